import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from coca_hf.errors import CocaError
from coca_hf.evaluate.loaded_model import (
    Rope,
    check_rope,
    parse_ropes,
    rotary_modules,
    use_rope_,
    warn_beyond_trained,
)

TRAINED, LENGTH = 64, 150


def load(directory, rope_type=None, factor=None, **others):
    """A fresh model, by transformers alone, with the RoPE type in its config."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    if rope_type is None:
        return model
    config = copy.deepcopy(model.config)
    config.rope_parameters.update(rope_type=rope_type, factor=factor, **others)
    return AutoModelForCausalLM.from_pretrained(directory, config=config)


def tokens(length, seed=3):
    return torch.randint(259, (2, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model, ids):
    return model(input_ids=ids, use_cache=False).logits


@pytest.fixture(params=["tiny_llama_dir", "tiny_coca_dir"])
def directory(request):
    return request.getfixturevalue(request.param)


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_settings_are_read_in_order_each_once_and_named_with_their_exact_factor():
    ropes = parse_ropes("default, dynamic:4,linear:2.50,default,yarn:1000000,yarn:999999.5")
    assert ropes[:3] == [Rope("default"), Rope("dynamic", 4.0), Rope("linear", 2.5)]
    names = ["default", "dynamic:4", "linear:2.5", "yarn:1e+06", "yarn:999999.5"]
    assert [str(rope) for rope in ropes] == names


FORMLESS = ["ntk", "dynamic", "dynamic:", "linear:x", "yarn", "llama3:8", "default:2"]
FORMLESS += ["dynamic:0.5", "linear:inf", "", "a,"]


@pytest.mark.parametrize("text", FORMLESS)
def test_an_unknown_setting_is_refused_with_the_forms_that_exist(text):
    with pytest.raises(
        CocaError, match=r"expected default, linear:FACTOR, dynamic:FACTOR, yarn:FACTOR"
    ):
        parse_ropes(text)


@pytest.mark.parametrize(
    "rope", [Rope("dynamic", 3.0), Rope("linear", 5.0), Rope("yarn", 4.0)], ids=str
)
@pytest.mark.parametrize("constraint", ["slack", "strict"])
def test_a_setting_equals_transformers_own_rope_of_that_type(directory, rope, constraint):
    original = {"original_max_position_embeddings": TRAINED} if rope.kind == "yarn" else {}
    model, expected = load(directory), load(directory, rope.kind, rope.factor, **original)
    for each in (model, expected):
        each.config.coca_constraint = constraint
    plain = logits_of(model, tokens(LENGTH))
    before = copy.deepcopy(model.config.to_dict())
    use_rope_(model, rope, LENGTH)
    got = logits_of(model, tokens(LENGTH))
    assert_close(got, logits_of(expected, tokens(LENGTH)))
    assert (got - plain).abs().max() > 0.1
    assert model.config.to_dict() == before


def test_dynamic_changes_nothing_up_to_the_trained_length(directory):
    model = load(directory)
    expected = logits_of(model, tokens(TRAINED))
    use_rope_(model, Rope("dynamic", 3.0), TRAINED)
    assert torch.equal(logits_of(model, tokens(TRAINED)), expected)


def test_yarn_scales_coca_scores_by_the_square_of_its_factor_as_plain_ones(directory):
    model = load(directory)
    use_rope_(model, Rope("yarn", 4.0), LENGTH)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    model.set_attn_implementation("eager")
    ids = tokens(9)[:1]
    scaled = model(input_ids=ids, output_attentions=True).attentions[0].log()
    for _, _, rotary in rotary_modules(model):
        rotary.attention_scaling = 1.0
    once = model(input_ids=ids, output_attentions=True).attentions[0].log()
    row = slice(0, 9)
    differences = [(x[0, 0, 8, row] - x[0, 0, 8, 0]).double() for x in (scaled, once)]
    torch.testing.assert_close(
        differences[0], differences[1] * (0.1 * math.log(4) + 1) ** 2, rtol=1e-3, atol=1e-4
    )


def test_a_setting_depends_on_nothing_that_ran_before_it(directory):
    fresh, used = load(directory), load(directory)
    for rope, total_len in (
        (Rope("dynamic", 8.0), 190),
        (Rope("linear", 2.0), 90),
        (Rope("dynamic", 3.0), LENGTH),
    ):
        use_rope_(used, rope, total_len)
        logits_of(used, tokens(total_len))
    use_rope_(fresh, Rope("dynamic", 3.0), LENGTH)
    assert torch.equal(logits_of(used, tokens(70)), logits_of(fresh, tokens(70)))
    use_rope_(used, Rope("default"), LENGTH)
    assert torch.equal(logits_of(used, tokens(70)), logits_of(load(directory), tokens(70)))


@torch.no_grad()
def test_decoding_with_a_cache_equals_the_full_forward_under_dynamic(directory):
    model, ids = load(directory), tokens(LENGTH)
    use_rope_(model, Rope("dynamic", 3.0), LENGTH)
    expected = logits_of(model, ids)
    past = model(input_ids=ids[:, :40], use_cache=True).past_key_values
    for end in range(41, LENGTH + 1, 11):
        start = past.get_seq_length()
        step = model(input_ids=ids[:, start:end], past_key_values=past, use_cache=True).logits
        assert_close(step, expected[:, start:end])


@pytest.mark.parametrize("original", [None, 32])  # transformers does not read it for this type
def test_a_checkpoint_that_is_dynamic_itself_is_evaluated_with_one_base(directory, original):
    model = load(directory, "dynamic", 3.0, original_max_position_embeddings=original)
    use_rope_(model, Rope("default"), LENGTH)
    logits_of(model, tokens(190))  # the stock module would now keep the longer base
    reference = load(directory)
    use_rope_(reference, Rope("dynamic", 3.0), LENGTH)
    assert torch.equal(logits_of(model, tokens(LENGTH)), logits_of(reference, tokens(LENGTH)))


def test_a_checkpoint_that_is_scaled_already_takes_no_other_setting(directory):
    model = load(directory, "linear", 2.0)
    check_rope(model, Rope("default"))
    with pytest.raises(CocaError, match="the checkpoint already has the RoPE setting linear"):
        use_rope_(model, Rope("dynamic", 2.0), LENGTH)


def test_a_model_without_rotary_embedding_takes_only_default():
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=12, n_head=2, n_layer=1, n_positions=32)
    ).eval()
    use_rope_(model, Rope("default"), 20)
    with pytest.raises(CocaError, match="GPT2LMHeadModel, which has no rotary embedding"):
        check_rope(model, Rope("linear", 2.0))


def test_lengths_beyond_the_trained_one_are_warned_of_under_static_settings(directory):
    model, default, dynamic = load(directory), Rope("default"), Rope("dynamic", 2.0)
    linear, yarn = Rope("linear", 2.0), Rope("yarn", 4.0)
    warning = warn_beyond_trained(model, [default, dynamic], [32, 65, 128])
    assert "lengths 65, 128 are beyond the 64 tokens of --rope default" in warning
    assert warn_beyond_trained(model, [default], [32, 64]) is None
    assert warn_beyond_trained(model, [dynamic], [128]) is None
    warning = warn_beyond_trained(model, [linear, yarn], [128, 200, 400])
    of_linear = "lengths 200, 400 are beyond the 128 tokens of --rope linear:2"
    assert f"{of_linear}; lengths 400 are beyond the 256" in warning
    warning = warn_beyond_trained(model, [default], [62, 63], 2)
    assert "lengths 63 and 2 new tokens are beyond the 64" in warning
