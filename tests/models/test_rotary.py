"""Rotary angles depend on the positions of their own row, and on nothing else."""

import copy
import itertools

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch.nn.functional import pad
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StaticCache,
)
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from coca_hf import CocaGPTNeoXConfig
from coca_hf.models.attention import CACHE
from coca_hf.models.cache import CocaCache
from coca_hf.models.rotary import CocaRotaryEmbedding
from tests.conftest import TINY
from tests.models.families import MENDED_CACHES, tiny_model, tokens

TRAINED = {"original_max_position_embeddings": 64}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.1],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0],
}
FIELDS = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0} | TRAINED,
    "llama3": {"factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | TRAINED,
    "longrope": {"factor": 3.0} | LONGROPE | TRAINED,
}
ROPES = {name: {"rope_type": name, "rope_theta": 5e4} | some for name, some in FIELDS.items()}


def model_of(rope, constraint="slack"):
    """A tiny model in float64, with a RoPE type and 64 trained tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 5.0]}
    parameters = ROPES[rope] | (factors if rope == "longrope" else {})
    return tiny_model(constraint, rope_parameters=parameters).double()


LOGITS = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def config_of(rope):
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "max_position_embeddings": 64}
    return LlamaConfig(**sizes, rope_parameters=dict(rope))


NAMES_ANOTHER_LENGTH = ROPES["dynamic"] | {"original_max_position_embeddings": 32}


@pytest.mark.parametrize("length", [64, 65, 150])  # 64 are trained
@pytest.mark.parametrize(
    "rope", [*ROPES.values(), NAMES_ANOTHER_LENGTH], ids=[*ROPES, "dynamic-names-another-length"]
)
def test_angles_are_those_of_transformers_and_pairs_that_are_not_rotated_have_none(rope, length):
    """All pairs of heads of 16, and the first half of those of heads of 32."""
    neox = {"hidden_size": 96, "num_attention_heads": 3, "max_position_embeddings": 64}
    neox["rope_parameters"] = rope | {"partial_rotary_factor": 0.5}
    configs = (GPTNeoXConfig(**copy.deepcopy(neox)), CocaGPTNeoXConfig(**copy.deepcopy(neox)))
    for kind, stock_config, config, width in (
        (LlamaRotaryEmbedding, config_of(rope), config_of(rope), 8),
        (GPTNeoXRotaryEmbedding, *configs, 16),
    ):
        arguments = torch.empty(0), torch.arange(length)[None]
        found = CocaRotaryEmbedding(config)(*arguments), kind(stock_config)(*arguments)
        for got, stock, still in zip(*found, (1, 0), strict=True):
            assert got.shape == (1, length, width)
            expected = torch.nn.functional.pad(stock[..., :8], (0, width - 8), value=still)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_a_single_pair_has_the_angle_of_its_position_under_dynamic_ntk_too():
    config = LlamaConfig(hidden_size=6, num_attention_heads=3, max_position_embeddings=64)
    config.rope_parameters = ROPES["dynamic"]
    cos, _ = CocaRotaryEmbedding(config)(torch.empty(0), torch.arange(150)[None])
    torch.testing.assert_close(cos, torch.arange(150.0).cos()[None, :, None])


@pytest.mark.parametrize(
    ("rope", "constraint"), [*zip(ROPES, itertools.cycle(["slack", "strict"]))]
)
def test_a_sequence_has_its_own_logits_padded_packed_or_alone(rope, constraint):
    """A row of 10 tokens beside one of 100, where 64 are trained: forward, generate with every
    cache, and packed.
    """
    model = model_of(rope, constraint)
    short, long = tokens(1, 100)[:, 90:], tokens(1, 100)
    ids = torch.cat((pad(short, (90, 0)), long))
    mask = torch.cat((pad(torch.ones_like(short), (90, 0)), torch.ones_like(long)))
    alone = [model(row).logits for row in (short, long)]
    together = model(ids, attention_mask=mask).logits
    assert (together[:1, 90:] - alone[0]).abs().max() < 1e-11
    assert (together[1:] - alone[1]).abs().max() < 1e-11
    ids_right, mask_right = (torch.cat((pad(x[:1, 90:], (0, 90)), x[1:])) for x in (ids, mask))
    right = model(ids_right, attention_mask=mask_right).logits
    assert (right[:1, :10] - alone[0]).abs().max() < 1e-11
    packed = torch.cat((short, long, short), dim=1)
    positions = torch.cat([torch.arange(n) for n in (10, 100, 10)])[None]
    logits = model(packed, position_ids=positions, use_cache=False).logits
    assert (logits - torch.cat((alone[0], alone[1], alone[0]), dim=1)).abs().max() < 1e-11

    options = LOGITS | {"max_new_tokens": 8}
    expected = [torch.stack(model.generate(row, **options).logits) for row in (short, long)]
    static = {"cache_implementation": "static", "disable_compile": True}
    for caching in ({}, {"use_cache": False}, static):
        logits = torch.stack(model.generate(ids, attention_mask=mask, **options, **caching).logits)
        assert (logits - torch.cat(expected, dim=1)).abs().max() < 1e-5  # generate hands out fp32


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_of_the_model_rounds_no_frequency(dtype, rope):
    """Position 5000 times a frequency rounded to bfloat16 is off by several turns."""
    positions = torch.arange(5000, 5150)[None]
    rotary = CocaRotaryEmbedding(config_of(ROPES[rope]))
    expected = rotary(torch.empty(0, dtype=dtype), positions)
    cast = rotary.to(dtype).to("meta").to_empty(device="cpu")
    assert {buffer.dtype for buffer in cast.buffers()} == {torch.float32}
    rotary = CocaRotaryEmbedding(config_of(ROPES[rope])).to("cpu", dtype)
    got = rotary(torch.empty(0, dtype=dtype), positions)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rope", ROPES)
def test_a_rope_type_given_at_loading_is_saved_and_loads_again(rope, tmp_path):
    given, ids = model_of(rope).config.rope_parameters, tokens(1, 90)
    tiny_model().save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", rope_parameters=given)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.rope_parameters == given
    assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("rope", ["default", "dynamic"])
@pytest.mark.parametrize("value", [2, 0.5, True])
def test_whatever_is_not_0_in_a_mask_is_a_token(rope, value):
    model, ids, mask = model_of(rope), tokens(2, 90), torch.ones(2, 90, dtype=torch.long)
    mask[0, :40] = 0
    other = torch.where(mask == 1, value, 0).to(torch.tensor(value).dtype)
    planned = {"rope_length": 100} if rope == "dynamic" else {}  # past the padding on the left
    expected = model(ids, attention_mask=mask, **planned).logits
    assert torch.equal(model(ids, attention_mask=other, **planned).logits, expected)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_padded_rows_keep_their_angles_in_a_second_turn(rope):
    model = model_of(rope)
    short, long = tokens(1, 90)[:, 80:], tokens(1, 90)
    ids, mask = torch.cat((pad(short, (80, 0)), long)), torch.ones(2, 90, dtype=torch.long)
    mask[0, :80] = 0
    cache = model(ids, attention_mask=mask, rope_length=120, use_cache=True)[CACHE]
    more, mask = tokens(2, 5), pad(mask, (0, 5), value=1)
    mask[0, 92:] = 0  # padded on the right, too: another count of zeros, the same angles
    logits = model(more, attention_mask=mask, **{CACHE: cache}).logits
    first, second = torch.cat((short, more[:1, :2]), dim=1), torch.cat((long, more[1:]), dim=1)
    expected = model(first, rope_length=40, use_cache=False).logits[:, 10:]
    assert (logits[:1, :2] - expected).abs().max() < 1e-11
    expected = model(second, rope_length=120, use_cache=False).logits[:, 90:]
    assert (logits[1:] - expected).abs().max() < 1e-11


@pytest.mark.parametrize(("rope", "constraint"), [("dynamic", "slack"), ("longrope", "strict")])
@pytest.mark.parametrize(("prompt_len", "total"), [(50, 64), (50, 96), (90, 96), (150, 192)])
def test_generation_past_the_trained_length_is_the_full_forward(
    constraint, prompt_len, total, rope
):
    """The angles follow from prompt + new tokens, so a cache is exact: at 1, 1.5 and 3 times the 64
    tokens trained.
    """
    model = model_of(rope, constraint)
    prompt = tokens(1, prompt_len)
    out = model.generate(prompt, max_length=total, **LOGITS)
    full = model(out.sequences, rope_length=total).logits[:, prompt_len - 1 : -1]
    assert (torch.stack(out.logits, dim=1) - full).abs().max() < 1e-5  # generate hands out fp32
    other = model(out.sequences, rope_length=192 if total == 64 else 64).logits
    other = other[:, prompt_len - 1 : -1]
    assert (full - other).abs().max() > 1e-3
    cache = model(prompt, rope_length=total, use_cache=True)
    steps = [cache.logits]
    for token in out.sequences[:, prompt_len:-1].split(1, dim=1):
        steps.append(model(token, **{CACHE: cache[CACHE]}).logits)
    expected = model(out.sequences[:, :-1], rope_length=total).logits
    assert (torch.cat(steps, dim=1) - expected).abs().max() < 1e-11


def refused(got, planned):
    message = f"got {got} tokens in all, but the rotary angles were planned for {planned}; start"
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
@pytest.mark.parametrize("planned", [None, 30])
def test_a_dialogue_within_the_trained_length_needs_no_plan(rope, planned):
    """Up to 64 tokens all plans have the same angles."""
    model = model_of(rope)
    prompt = tokens(1, 20)
    first = model.generate(prompt, max_length=30, rope_length=planned, **LOGITS)
    # generate would not look at tokens of padding, which are among them
    going_on = {"attention_mask": torch.ones_like(first.sequences), "do_sample": False}
    cache = going_on[CACHE] = first[CACHE]
    second = model.generate(first.sequences, max_length=64, **going_on)
    assert torch.equal(second, model.generate(prompt, max_length=64, do_sample=False))
    with refused(65, 64):
        model.generate(second, **{CACHE: cache}, max_length=65)


CACHES = {
    "dynamic": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=130),
    "coca": CocaCache,
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_plan_is_noted_on_any_cache_and_what_breaks_it_is_refused(kind):
    """Two turns over a cache that the user supplies, against one forward under one base."""
    model = model_of("dynamic")
    prompt, cache = tokens(1, 60), CACHES[kind](model.config)
    first = model.generate(prompt, max_length=80, **{CACHE: cache}, rope_length=120, **LOGITS)
    second = model.generate(first.sequences, max_length=100, **{CACHE: cache}, **LOGITS)
    full = model(second.sequences, rope_length=120, use_cache=False).logits[:, 79:-1]
    assert (torch.stack(second.logits, dim=1) - full).abs().max() < 1e-5
    with refused(80, 70):
        model.generate(prompt, max_length=80, rope_length=70)
    with refused(121, 120):
        model.generate(second.sequences, max_length=121, **{CACHE: cache})
    with refused(150, 120):
        model.generate(second.sequences, max_length=110, **{CACHE: cache}, rope_length=150)
    unplanned = CACHES[kind](model.config)
    model.generate(prompt, max_length=80, **{CACHE: unplanned})
    with refused(90, 80):
        model.generate(tokens(1, 82), max_length=90, **{CACHE: unplanned})


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_cache_of_forward_continues_only_under_one_plan(rope):
    model = model_of(rope)
    ids = tokens(1, 90)

    def filled(length, **options):
        return model(ids[:, :length], use_cache=True, **options)[CACHE]

    planned = filled(70, rope_length=100)
    expected = model(ids, rope_length=100, use_cache=False).logits[:, 70:]
    assert (model(ids[:, 70:], **{CACHE: planned}).logits - expected).abs().max() < 1e-11
    generated = model.generate(ids, max_length=100, **{CACHE: planned}, do_sample=False)
    assert generated.shape == (1, 100)
    short = filled(40)  # within the 64 tokens trained no plan is needed
    model(ids[:, 40:64], **{CACHE: short})
    with refused(65, 64):
        model(ids[:, 64:65], **{CACHE: short})
    with refused(80, 64):
        model.generate(ids[:, :65], max_length=80, **{CACHE: filled(40)})
    positions = torch.arange(90)[None]  # of the caller
    given = filled(40, position_ids=positions[:, :40])
    got = model(ids[:, 40:64], position_ids=positions[:, 40:64], **{CACHE: given}).logits
    expected = model(ids[:, :64], use_cache=False).logits[:, 40:]
    assert (got - expected).abs().max() < 1e-11
    with refused(90, 64):
        model(ids[:, 64:], position_ids=positions[:, 64:], **{CACHE: given})
    mask = (positions >= 20).long()
    positions = (positions - 20).clamp(min=0)  # 64 without the padding, in 84 columns
    given = filled(40, position_ids=positions[:, :40], attention_mask=mask[:, :40])
    options = {"position_ids": positions[:, 40:84], "attention_mask": mask[:, :84]}
    got = model(ids[:, 40:84], **options, **{CACHE: given}).logits
    expected = model(ids[:, 20:84], use_cache=False).logits[:, 20:]
    assert (got - expected).abs().max() < 1e-11
    far = filled(40, position_ids=torch.arange(50, 90)[None])
    for use in (
        lambda: model(ids[:, 70:], **{CACHE: filled(70)}),
        lambda: model.generate(ids, max_length=100, **{CACHE: filled(70)}),
        lambda: model(ids[:, 40:41], **{CACHE: far}),
    ):
        unplanned = r"not planned.*start again without the old cache, with rope_length="
        with pytest.raises(ValueError, match=unplanned):
            use()


@MENDED_CACHES
def test_a_cache_that_is_reset_has_no_plan():
    model, ids = model_of("dynamic"), tokens(1, 90)
    cache = model(ids[:, :40], use_cache=True)[CACHE]
    cache.reset()
    expected = model(ids, use_cache=False, rope_length=100).logits
    got = model(ids, **{CACHE: cache}, rope_length=100).logits
    assert (got - expected).abs().max() < 1e-11


def test_a_plain_llama_assists_a_model_of_dynamic_ntk():
    model = model_of("dynamic")
    torch.manual_seed(5)
    assistant = LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=model.config.vocab_size)).double()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(tokens(1, 60), **options)
    got = model.generate(tokens(1, 60), assistant_model=assistant, **options)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_an_assistant_plans_its_drafts_itself(rope):
    """A plan has room for twice the tokens of its draft; after 140 tokens there was more than one."""
    assistant = model_of(rope)
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=assistant.config.vocab_size)).double()
    prompt, options = tokens(1, 20), {"max_new_tokens": 120, "do_sample": False}
    expected = model.generate(prompt, **options)
    got = model.generate(prompt, assistant_model=assistant, **options)
    assert torch.equal(got, expected)


def test_an_assistant_with_another_tokenizer_may_need_more_tokens():
    model, prompt = model_of("dynamic"), tokens(1, 60)
    letters = "?abcdefghijklmnopqrstuvwxyz"
    pairs = [a + b for a in letters[1:] for b in letters[1:]]
    assistant_config = copy.deepcopy(model.config)
    assistant_config.vocab_size = len(letters)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(prompt, **options)
    got = model.generate(
        prompt,
        assistant_model=type(model)(assistant_config).double(),
        tokenizer=tokenizer_of([*letters, *pairs][: model.config.vocab_size]),
        assistant_tokenizer=tokenizer_of(letters),
        **options,
    )
    assert torch.equal(got, expected)


def tokenizer_of(vocabulary):
    """A tokenizer of letters, and of pairs of letters if `vocabulary` has them."""
    numbers = {token: number for number, token in enumerate(vocabulary)}
    merges = [tuple(token) for token in vocabulary if len(token) == 2]
    tokenizer = Tokenizer(BPE(vocab=numbers, merges=merges, unk_token="?"))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="?",
        pad_token="?",
        clean_up_tokenization_spaces=False,
    )


@pytest.mark.parametrize("negative", [None, 5])
def test_guidance_has_the_angles_of_the_generation(negative):
    model, prompt = model_of("dynamic"), tokens(1, 60)
    options = {"max_new_tokens": 20, "do_sample": False, "guidance_scale": 1.7}
    if negative:
        options["negative_prompt_ids"] = tokens(1, negative, seed=3)
    expected = model.generate(prompt, use_cache=False, **options)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert len(expected[0, 60:].unique()) > 3


def test_guidance_of_the_caller_keeps_its_model():
    model, other = model_of("dynamic"), tiny_model()
    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, other, tokens(1, 5))
    model.generate(tokens(1, 60), max_new_tokens=2, logits_processor=[guidance])
    assert guidance.model is other


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_generating_from_embeddings_equals_generating_from_their_ids(rope):
    model, ids = model_of(rope), tokens(1, 60)
    options = {"max_new_tokens": 15, "do_sample": False}
    expected = model.generate(ids, **options)[:, 60:]
    assert len(expected[0].unique()) > 3
    options["inputs_embeds"] = model.get_input_embeddings()(ids)
    for cached in (True, False):
        assert torch.equal(model.generate(use_cache=cached, **options), expected)
