import copy
import json
import math
import os
import shutil

import pytest
import torch
from huggingface_hub import constants
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    dynamic_module_utils,
)

from coca_hf import convert_checkpoint
from coca_hf.errors import CocaError
from coca_hf.evaluate import loaded_model
from coca_hf.evaluate.loaded_model import (
    Rope,
    beyond_trained_warning,
    check_rope,
    load_model,
    parse_ropes,
    rotary_modules,
    small_tokenizer_warning,
    use_rope_,
)
from coca_hf.evaluate.rows import about_model
from coca_hf.models.attention import CACHE
from tests.convert.checkpoints import edit_config, edit_json, edit_weights
from tests.convert.test_quantized import quantized_by_bitsandbytes


def refused(path, message, **options):
    """Loading is refused in one line that has `message`, a regular expression."""
    with pytest.raises(CocaError, match=message) as error:
        load_model(str(path), **options)
    assert "\n" not in str(error.value)


@pytest.fixture
def checkpoint(tiny_llama_dir, tmp_path):
    """A copy of the tiny LLaMA to spoil."""
    return shutil.copytree(tiny_llama_dir, tmp_path / "copy")


def test_a_model_is_called_by_its_directory_or_as_asked(checkpoint):
    loaded = load_model(str(checkpoint) + "/")
    assert (loaded.name, loaded.path, loaded.tokens_seen) == ("copy", str(checkpoint), None)
    assert loaded.commit is None
    assert load_model(str(checkpoint), name="mine").name == "mine"


def test_a_model_on_the_hub_is_that_of_its_revision_and_commit(checkpoint, tmp_path, monkeypatch):
    """Two commits of one repository, as the hub's cache keeps them."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo, commits = tmp_path / "models--somebody--tiny", {"main": "1" * 40, "step-7": "2" * 40}
    (repo / "refs").mkdir(parents=True)
    for revision, commit in commits.items():
        (repo / "refs" / revision).write_text(commit)
        shutil.copytree(checkpoint, repo / "snapshots" / commit)
    step = repo / "snapshots" / commits["step-7"]
    edit_weights(step, lambda weights: weights["lm_head.weight"].add_(1))
    main, step = load_model("somebody/tiny"), load_model("somebody/tiny", revision="step-7")
    assert (main.name, main.commit) == ("tiny", commits["main"])
    assert (step.name, step.commit) == ("tiny@step-7", commits["step-7"])
    torch.testing.assert_close(step.model.lm_head.weight, main.model.lm_head.weight + 1)
    assert main.fingerprint != step.fingerprint
    assert about_model(step)["model_commit"] == commits["step-7"]
    assert (main.tokens_seen, step.tokens_seen) == (None, None)
    (repo / "snapshots" / commits["main"] / "conversion.json").write_text("{}")
    trained = {"stages": [{"tokens": 40}, {"tokens": 2}], "recipe": {"data": {"seq_len": 32}}}
    record = repo / "snapshots" / commits["step-7"] / "training.json"
    record.write_text(json.dumps(trained))
    main, step = load_model("somebody/tiny"), load_model("somebody/tiny", revision="step-7")
    assert (main.tokens_seen, main.trained_seq_len) == (0, None)
    assert (step.tokens_seen, step.trained_seq_len) == (42, 32)


def test_a_row_says_which_layers_keep_their_attention_and_over_what_window(
    tiny_llama_dir, tmp_path
):
    convert_checkpoint(tiny_llama_dir, tmp_path / "coca", keep_layers=[1], keep_window=6)
    about = about_model(load_model(str(tmp_path / "coca")))
    assert (about["coca_kept_layers"], about["coca_kept_window"]) == ([1], 6)
    assert about_model(load_model(str(tiny_llama_dir)))["coca_kept_window"] is None


def test_a_row_says_how_weights_are_quantized(tiny_llama_dir, tmp_path):
    quantized = quantized_by_bitsandbytes(tiny_llama_dir, tmp_path / "int8", load_in_8bit=True)
    for file in tiny_llama_dir.glob("tokenizer*"):
        shutil.copy(file, quantized)
    assert about_model(load_model(str(quantized)))["dtype"] == "bfloat16, bitsandbytes"
    assert about_model(load_model(str(tiny_llama_dir)))["dtype"] == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(checkpoint, dtype):
    model = load_model(str(checkpoint), dtype).model
    assert model.dtype == getattr(torch, dtype)
    assert not model.training
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_fingerprint_changes_with_what_a_model_computes_and_with_nothing_else(checkpoint):
    """Not with code that does not run, nor with a dangling link."""
    before = load_model(str(checkpoint)).fingerprint
    for name in ("rows.jsonl", "conversion.json", "README.md", "other.py"):
        (checkpoint / name).write_text("{}\n")
    (checkpoint / "pytorch_model.bin").symlink_to(checkpoint / "nowhere")
    for trusted in (False, True):
        assert load_model(str(checkpoint), trust_remote_code=trusted).fingerprint == before
    found = set()
    for name in ("generation_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"):
        (checkpoint / name).write_text("{}\n")
        found.add(loaded_model.fingerprint(str(checkpoint), None, False))
        (checkpoint / name).unlink()
    assert len(found - {before}) == 4
    file = checkpoint / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    edit_weights(checkpoint, lambda weights: weights["lm_head.weight"].add_(1))
    os.utime(file, ns=times)
    assert load_model(str(checkpoint)).fingerprint != before


def test_the_fingerprint_of_a_model_on_the_hub_changes_if_its_own_code_runs():
    """Its commit has the code, whether or not it runs."""
    of_hub = [
        loaded_model.fingerprint("somebody/tiny", commit, own_code)
        for commit in ("1" * 40, "2" * 40)
        for own_code in (False, True)
    ]
    assert len({*of_hub}) == 4


def test_the_fingerprint_changes_with_an_adapter_in_the_directory_and_with_its_base(checkpoint):
    """Not loaded here: transformers 5.17 loads no adapters with peft 0.18."""
    base, found = checkpoint.parent / "base", set()
    base.mkdir()
    for alpha, content in ((6, "{}"), (64, "{}"), (64, '{"changed": 1}')):
        adapter = {"lora_alpha": alpha, "base_model_name_or_path": str(base)}
        (checkpoint / "adapter_config.json").write_text(json.dumps(adapter))
        (base / "config.json").write_text(content)
        found.add(loaded_model.fingerprint(str(checkpoint), None, False))
    assert len(found) == 3
    for base in (str(checkpoint), None):  # an adapter beside its own base, and one that names none
        config = json.dumps({"base_model_name_or_path": base})
        (checkpoint / "adapter_config.json").write_text(config)
        assert loaded_model.fingerprint(str(checkpoint), None, False) not in found


def test_a_model_that_changes_while_it_is_loaded_is_refused(checkpoint, monkeypatch):
    load = loaded_model._load_tokenizer

    def replaces_the_weights(*arguments):
        edit_weights(checkpoint, lambda weights: weights["lm_head.weight"].add_(1))
        return load(*arguments)

    monkeypatch.setattr(loaded_model, "_load_tokenizer", replaces_the_weights)
    with pytest.raises(CocaError, match="changed while it was loaded; run the same command again"):
        load_model(str(checkpoint))


def test_tokens_seen_are_read_from_the_training_record(checkpoint):
    (checkpoint / "conversion.json").write_text("{}")
    assert load_model(str(checkpoint)).tokens_seen == 0
    stages = [{"tokens": 100_000}, {"tokens": 123_904}]  # those of an earlier run count
    for skip_positions, reached in ((None, 160), (2048, 2048)):
        data = {"seq_len": 160, "skip_positions": skip_positions}
        record = {"stages": stages, "recipe": {"data": data}}
        (checkpoint / "training.json").write_text(json.dumps(record))
        loaded = load_model(str(checkpoint))
        assert (loaded.tokens_seen, loaded.trained_seq_len) == (223_904, reached)
    stages = ("[]", "[3]", '[{"tokens": 1e999}]')
    for text in (*(f'{{"stages": {some}}}' for some in stages), "{", "[]", "[" * 9999):
        (checkpoint / "training.json").write_text(text)
        refused(checkpoint, r"training\.json: got no stages and tokens of coca-train")


def test_what_is_no_model_or_no_revision_of_one_is_refused(checkpoint, tmp_path):
    for path in ("./nowhere", ""):
        refused(path, f"'{path}': no such directory, expected a model directory or a hub id")
    refused("nobody/nothing-here", "no such directory here, and as a hub id it cannot be read")
    message = r"--revision: got 'v1' for the directory .*copy, expected it for a hub id"
    refused(checkpoint, message, revision="v1")
    refused(tmp_path, r"got no config\.json there")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "got an adapter of peft, expected a whole model; merge it .*merge_and_unload")


def test_what_the_hub_says_is_in_the_error(monkeypatch):  # transformers has it in a later line
    def refuse(*_, **__):
        raise OSError("There was a specific connection error:\n401 Invalid credentials")

    monkeypatch.setattr(loaded_model.AutoConfig, "from_pretrained", refuse)
    refused("owner/gated", r"cannot be read \(OSError: .* error: 401 Invalid credentials\)")


def test_a_config_that_cannot_be_read_is_refused(checkpoint):
    for text in ("{", '{"model_type": "nonsense"}'):
        (checkpoint / "config.json").write_text(text)
        refused(checkpoint, r"copy: its config\.json or its own code cannot be read \(")


@pytest.mark.parametrize(
    ("config", "kind"), [(T5Config, "T5ForConditionalGeneration"), (BertConfig, "BertForMaskedLM")]
)
def test_other_models_than_causal_language_models_are_refused(tmp_path, config, kind):
    config(architectures=[kind]).save_pretrained(tmp_path)
    refused(tmp_path, f"got {kind}, expected a causal language model")


UP_PROJ = "model.layers.1.mlp.up_proj.weight"
OWN_TOKENIZER = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
DAMAGE = [
    (
        lambda copy: os.truncate(copy / "model.safetensors", 9999),
        r"copy: transformers cannot load it; save or convert it again \(SafetensorError",
    ),
    (
        lambda copy: edit_weights(copy, lambda weights: weights.pop(UP_PROJ)),
        rf"LlamaForCausalLM with its config\.json \({UP_PROJ} is missing; 1 such in all\)",
    ),
    (
        lambda copy: edit_config(copy, num_hidden_layers=2),
        r"\(model\.layers\.2\..* is not used; 9 such in all\); are they of one model",
    ),
    (
        lambda copy: edit_config(copy, vocab_size=100),
        r"lm_head\.weight has the shape \[259, 48\], not \[100, 48\]",
    ),
    (
        lambda copy: [file.unlink() for file in copy.glob("tokenizer*")],
        r"got no tokenizer that can be loaded, .* copy tokenizer\.json",
    ),
    (
        lambda copy: edit_json(copy / "tokenizer_config.json", **OWN_TOKENIZER),
        "needs the code it carries",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_checkpoints_are_refused_by_what_is_wrong(checkpoint, damage, message):
    damage(checkpoint)
    refused(checkpoint, message)


def test_derived_tensors_of_old_checkpoints_are_ignored(checkpoint):
    plain = load_model(str(checkpoint)).model
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_weights(checkpoint, lambda weights: weights.update({name: torch.ones(4)}))
    model = load_model(str(checkpoint)).model
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_a_tokenizer_far_smaller_than_the_embedding_is_warned_of_and_padding_not(tiny_llama_dir):
    loaded = load_model(str(tiny_llama_dir))
    padded = {259: False, 259 + 1024: False, 259 + 1025: True, 49_152: True}
    for rows, warned in padded.items():
        loaded.model.set_input_embeddings(nn.Embedding(rows, 2))
        assert (small_tokenizer_warning(loaded) is not None) == warned
    said = "got a tokenizer of 259 tokens for an embedding of 49,152 rows; is it"
    assert said in small_tokenizer_warning(loaded)
    loaded.model.set_input_embeddings(nn.Embedding(51_200, 2))
    # phi-2's, and a tenth fewer
    for tokens, warned in {50_295: False, 46_080: False, 46_079: True}.items():
        loaded.tokenizer = range(tokens)
        assert (small_tokenizer_warning(loaded) is not None) == warned


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class HalfConfig(LlamaConfig):
    model_type = "half-llama"


class HalfForCausalLM(LlamaForCausalLM):
    config_class = HalfConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output
"""


@pytest.fixture
def half(checkpoint, tmp_path, monkeypatch):
    """The tiny LLaMA as a model that only the code beside it knows: half of LLaMA's logits."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (checkpoint / "half.py").write_text(OWN_CODE)
    code = {"AutoConfig": "half.HalfConfig", "AutoModelForCausalLM": "half.HalfForCausalLM"}
    own = {"model_type": "half-llama", "architectures": ["HalfForCausalLM"]}
    edit_config(checkpoint, **own, auto_map=code)
    return checkpoint


def test_own_code_runs_if_it_is_trusted(half, tiny_llama_dir):
    loaded, plain = load_model(str(half), trust_remote_code=True), load_model(str(tiny_llama_dir))
    ids = torch.arange(8)[None]
    assert torch.equal(loaded.model(ids).logits, plain.model(ids).logits / 2)
    (half / "half.py").write_text(OWN_CODE + "\n")
    assert load_model(str(half), trust_remote_code=True).fingerprint != loaded.fingerprint


def test_trust_remote_code_also_applies_to_the_baseline(half, tmp_path, coca_eval):
    arguments = f"speed {half} --baseline {half} --baseline-name same --modes prefill --lengths 16"
    arguments += f" --repeats 1 --out {tmp_path / 'out'}"
    code, _, stderr = coca_eval(arguments)
    assert (code, stderr.count("\n"), "add --trust-remote-code\n" in stderr) == (2, 1, True)
    code, stdout, _ = coca_eval(arguments, "--trust-remote-code")
    assert (code, "copy" in stdout, "same" in stdout) == (0, True, True)


@pytest.mark.parametrize("task", ["speed", "attention-maps --data BOOKS"])
def test_a_baseline_of_another_dtype_is_refused(
    task, checkpoint, tiny_llama_dir, books, tmp_path, coca_eval
):
    edit_config(checkpoint, dtype="bfloat16")
    command = f"{task.replace('BOOKS', str(books))} --lengths 16 --out {tmp_path / 'out'}"
    code, _, stderr = coca_eval(command, checkpoint, f"--baseline {tiny_llama_dir}")
    assert (code, stderr.count("\n")) == (2, 1)
    said = f"--baseline {tiny_llama_dir}: got float32, and bfloat16 of {checkpoint}, expected one"
    assert said in stderr


@pytest.mark.parametrize("model_type", ["half-llama", "llama"])
def test_untrusted_code_is_refused_with_the_remedy(half, model_type):
    """Also if transformers knows the type but has another class for it than config.json."""
    edit_config(half, model_type=model_type)
    needs = "got a model that needs the code it carries; .* add --trust-remote-code$"
    refused(half, f"copy: {needs}")


def test_an_error_in_the_code_of_a_model_is_one_line(half):
    (half / "half.py").write_text(f"{OWN_CODE}\ndef rotate(:\n")
    message = r"or its own code cannot be read \(SyntaxError: .* line 17"
    refused(half, message, trust_remote_code=True)


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


def test_an_unknown_setting_is_refused_with_the_forms_that_exist():
    forms = "expected default, linear:FACTOR, dynamic:FACTOR, yarn:FACTOR"
    unknown = "ntk dynamic dynamic: linear:x yarn llama3:8 default:2 dynamic:0.5 linear:inf a,"
    for text in (*unknown.split(), ""):
        with pytest.raises(CocaError, match=forms):
            parse_ropes(text)


@pytest.mark.parametrize("rope", parse_ropes("dynamic:3,linear:5,yarn:4"), ids=str)
@pytest.mark.parametrize("constraint", [None, "slack", "strict"])
def test_a_setting_equals_transformers_own_rope_of_that_type(
    rope, constraint, tiny_llama_dir, tiny_coca_dir
):
    directory = tiny_coca_dir if constraint else tiny_llama_dir
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
    scaled, once = ((x[0, 0, 8, :9] - x[0, 0, 8, 0]).double() for x in (scaled, once))
    expected = once * (0.1 * math.log(4) + 1) ** 2
    torch.testing.assert_close(scaled, expected, rtol=1e-3, atol=1e-4)


def test_a_setting_depends_on_nothing_that_ran_before_it(directory):
    fresh, used = load(directory), load(directory)
    ropes = Rope("dynamic", 8.0), Rope("linear", 2.0), Rope("dynamic", 3.0)
    for rope, total_len in zip(ropes, (190, 90, LENGTH), strict=True):
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
    past = model(input_ids=ids[:, :40], use_cache=True)[CACHE]
    for end in range(41, LENGTH + 1, 11):
        start = past.get_seq_length()
        step = model(input_ids=ids[:, start:end], **{CACHE: past}, use_cache=True).logits
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


def test_a_model_without_rotary_embedding_takes_only_default_and_is_not_told_to_extend_it():
    config = GPT2Config(vocab_size=50, n_embd=12, n_head=2, n_layer=1, n_positions=32)
    model = GPT2LMHeadModel(config)
    use_rope_(model, Rope("default"), 20)
    with pytest.raises(CocaError, match="GPT2LMHeadModel, which has no rotary embedding"):
        check_rope(model, Rope("linear", 2.0))
    warning = "lengths 40 are beyond the 32 tokens that --rope default reaches"
    assert beyond_trained_warning(model, [Rope("default")], [40]) == warning


def test_lengths_beyond_the_trained_one_are_warned_of_under_static_settings(directory):
    model = load(directory)
    default, dynamic, linear, yarn = parse_ropes("default,dynamic:2,linear:2,yarn:4")
    warning = beyond_trained_warning(model, [default, dynamic], [32, 65, 128])
    assert "lengths 65, 128 are beyond the 64 tokens that --rope default reaches" in warning
    assert beyond_trained_warning(model, [default], [32, 64]) is None
    assert beyond_trained_warning(model, [dynamic], [128]) is None
    warning = beyond_trained_warning(model, [linear, yarn], [128, 200, 400])
    of_linear = "lengths 200, 400 are beyond the 128 tokens that --rope linear:2 reaches"
    assert f"{of_linear}; lengths 400 are beyond the 256" in warning
    warning = beyond_trained_warning(model, [default], [62, 63], 2)
    assert "lengths 63 and 2 new tokens are beyond the 64" in warning
    assert warning.endswith("; --rope dynamic:4 reaches further")
    scaled = load(directory, "yarn", 4.0, original_max_position_embeddings=64)
    warning = "lengths 257 are beyond the 256 tokens that --rope default reaches"
    assert beyond_trained_warning(scaled, [default], [256, 257]) == warning
