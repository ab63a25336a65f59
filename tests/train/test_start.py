"""What the first stage starts from: a model with the recipe's `config`, or scratch; adapters."""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

import coca_hf
from coca_hf import CocaError, tokens
from coca_hf.train import model as models
from coca_hf.train.gpu_plan import plan_recipe
from coca_hf.train.model import load_tokenizer, stage_model, start_config, start_model
from coca_hf.train.preflight import (
    check_model,
    check_overrides,
    check_positions,
    check_teacher,
    check_teacher_tokens,
    check_tokenizer,
    lock,
    resolve_stages,
)
from coca_hf.train.recipe import Recipe, load_recipe
from coca_hf.train.run_directory import begin_out, check_out
from coca_hf.train.stages import prepare_recipe, run_recipe
from tests.conftest import TINY, refused
from tests.train.corpora import corpus_of
from tests.train.results import assert_same_weights, changed, logged, record, weights

WIDE = {"hidden_size": 48, "intermediate_size": 80}
WIDE |= {"num_hidden_layers": 2, "num_attention_heads": 6}
ALL = ["stages.k.train=all", "stages.qkv.train=all"]


def write_recipe(path, tree: dict):
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@pytest.mark.parametrize("kind", ["tiny_llama_dir", "tiny_coca_dir"])
def test_overrides_of_the_config_are_used_and_kept(kind, recipe_tree, tmp_path, request):
    recipe_tree["model"] = str(request.getfixturevalue(kind))
    recipe_tree["stages"] = [{"name": "full", "train": "all", "max_steps": 1}]
    path = write_recipe(tmp_path / "r.yaml", recipe_tree)
    plain = run_recipe(load_recipe(path), tmp_path / "plain")
    rope = "rope_parameters: {rope_type: linear, factor: 4.0}"
    override = f"config={{max_position_embeddings: 256, {rope}}}"
    result = run_recipe(load_recipe(path, [override]), tmp_path / "out")
    config = AutoConfig.from_pretrained(result)
    assert config.model_type == AutoConfig.from_pretrained(recipe_tree["model"]).model_type
    assert config.max_position_embeddings == 256
    found = [config.rope_parameters[name] for name in ("rope_type", "factor", "rope_theta")]
    assert found == ["linear", 4, 10000]  # rope_theta is kept
    assert logged(plain)[0] != logged(result)[0]  # the first step already turns by other angles


RAISED = "config.max_position_embeddings=256"
YARN = "config.rope_parameters={rope_type: yarn, factor: 4.0}"
LLAMA3 = "config.rope_parameters={rope_type: llama3, factor: 4.0, low_freq_factor: 1.0, high_freq_factor: 4.0}"


@pytest.mark.parametrize("rope", [YARN, LLAMA3])
def test_raised_positions_do_not_hide_the_trained_length_from_rope(recipe_path, rope):
    own = "config.rope_parameters.original_max_position_embeddings"
    raised, named, other = (
        start_config(load_recipe(recipe_path, [RAISED, rope, *more]))
        for more in ([], [f"{own}=64"], [f"{own}=32"])
    )
    assert raised.max_position_embeddings == 256
    assert raised.rope_parameters == named.rope_parameters
    assert other.rope_parameters["original_max_position_embeddings"] == 32


def test_raised_positions_are_refused_with_dynamic_ntk_which_they_would_undo(recipe_path):
    dynamic = "config.rope_parameters={rope_type: dynamic, factor: 4.0}"
    assert start_config(load_recipe(recipe_path, [dynamic])).rope_parameters["factor"] == 4
    message = "got 256 with rope_type dynamic, which .*, expected the checkpoint's 64; leave it out"
    refused(message, start_config, load_recipe(recipe_path, [dynamic, RAISED]))


LISTED = {
    "config.max_window_layers=1": "config.max_window_layers: would not change layer_types, which",
    "config.use_sliding_window=false": "config.use_sliding_window: would not change layer_types",
}


@pytest.mark.parametrize("setting", LISTED)
def test_a_field_whose_effect_the_config_lists_by_layer_is_refused(recipe_path, tmp_path, setting):
    sizes = {name: size for name, size in TINY.items() if name != "rms_norm_eps"}
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
    coca_hf.CocaQwen2Config(**sizes, **windows).save_pretrained(tmp_path / "qwen2")
    settings = [f"model={tmp_path / 'qwen2'}", setting]
    refused(LISTED[setting], start_config, load_recipe(recipe_path, settings))
    full = "config.layer_types=[full_attention, full_attention, full_attention]"
    config = start_config(load_recipe(recipe_path, [*settings, full]))
    assert config.layer_types == ["full_attention"] * 3
    start_config(load_recipe(recipe_path, [settings[0], "config.max_window_layers=2"]))
    coca_hf.CocaQwen2Config(**sizes, coca_kept_layers=[1]).save_pretrained(tmp_path / "kept")
    window = [f"model={tmp_path / 'kept'}", "config.coca_kept_window=5"]  # sets the types itself
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert start_config(load_recipe(recipe_path, window)).layer_types == types


@pytest.fixture
def scratch_path(recipe_tree, tiny_coca_dir, tmp_path):
    del recipe_tree["model"]
    sizes = {name: size for name, size in TINY.items() if name != "rms_norm_eps"}
    config = {"model_type": "coca_llama", **sizes}
    recipe_tree |= {"tokenizer": str(tiny_coca_dir), "config": config}
    return write_recipe(tmp_path / "r.yaml", recipe_tree)


def test_a_model_from_scratch_trains_to_a_checkpoint_twice_the_same(scratch_path, tmp_path):
    result = run_recipe(load_recipe(scratch_path), tmp_path / "once")
    run_recipe(load_recipe(scratch_path), tmp_path / "again", stage="k")
    assert_same_weights(tmp_path / "once/1-k", tmp_path / "again/1-k")
    model, report = AutoModelForCausalLM.from_pretrained(result, output_loading_info=True)
    assert not any(report.values())
    assert model.config.eos_token_id == AutoTokenizer.from_pretrained(result).eos_token_id == 2
    assert record(tmp_path / "once/1-k")["base_model"] == "coca_llama from scratch"
    assert load_recipe(tmp_path / "once/recipe.yaml") == load_recipe(scratch_path)


BAD_STARTS = {
    "config.hidden_sizes=3": "config: CocaLlamaConfig has no 'hidden_sizes'; nearest: hidden_size",
    "config.hidden_size=large": "config: CocaLlamaConfig does not take it: .*'hidden_size' expected int",
    "config.dtype=bfloat16": r"config\.dtype: got 'bfloat16', but a run keeps its weights in float32",
    "config.model_type=coca_lama": "coca_lama from scratch: cannot be loaded",
    "config.vocab_size=100": "config.vocab_size: got 100, expected at least the tokenizer's 259",
    "config.rope_parameters.factor=4": r"config\.rope_parameters: got a factor of 4 with rope_type default",
    "config.rope_parameters=5": r"config\.rope_parameters: got 5, expected a mapping, such as \{",
    "config.pad_token_id=99999": "config: no CocaLlamaConfig model can be made of it: Padding_idx must be within",
    "model=somewhere": "model: expected a checkpoint, or, for a model from scratch, tokenizer instead",
    "config={hidden_size: 3}": "config.model_type: expected beside tokenizer",
    "tokenizer=none/here/at/all": "none/here/at/all: cannot be loaded",
}


@pytest.mark.parametrize("setting", BAD_STARTS, ids=[setting[:60] for setting in BAD_STARTS])
def test_a_config_that_does_not_work_is_refused_in_one_line(scratch_path, setting):
    with pytest.raises(CocaError, match=BAD_STARTS[setting]) as caught:
        check_model(load_recipe(scratch_path, [setting]))
    assert "\n" not in str(caught.value)


def test_a_model_directory_without_a_tokenizer_is_named_with_what_to_copy(tiny_coca_dir, tmp_path):
    model = shutil.copytree(tiny_coca_dir, tmp_path / "no-tokenizer")
    for file in model.glob("tokenizer*"):
        file.unlink()
    message = (
        "no-tokenizer: got no tokenizer that can be loaded, expected one beside the model; copy"
    )
    refused(message, load_tokenizer, str(model))


def test_a_tokenizer_of_another_model_is_refused_and_added_tokens_are_not(tiny_tokenizer, tmp_path):
    tiny_tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["[PAD]"], special_tokens=True)
    check_tokenizer(tokenizer, LlamaConfig(vocab_size=259))
    message = "a tokenizer with a token 258, expected one below the model's vocab_size, 99"
    refused(message, check_tokenizer, tokenizer, LlamaConfig(vocab_size=99))


def test_a_teacher_that_has_other_ids_for_the_tokens_is_refused(
    recipe_path, tiny_llama_dir, tiny_tokenizer, tmp_path
):
    """Two models may have as many tokens, and others; the student may have one more."""
    steps = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    vocab = steps["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    other = shutil.copytree(tiny_llama_dir, tmp_path / "other")
    swapped = Tokenizer.from_str(json.dumps(steps))
    PreTrainedTokenizerFast(tokenizer_object=swapped).save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.add_tokens(["[PAD]"], special_tokens=True)
    check_teacher_tokens(str(tiny_llama_dir), tokenizer, 260)
    message = rf"teacher: {other} has a tokenizer with the id \d+ for '[ab]', expected the model's"
    refused(message, check_teacher_tokens, str(other), tokenizer, 260)
    recipe = load_recipe(recipe_path, [f"teacher={other}", "stages.k.objective=distill"])
    refused(f"teacher: {other} has a tokenizer with", run_recipe, recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_that_names_an_added_token_which_the_model_has_not_is_refused(
    train, recipe_path, tiny_coca_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokens, "PIECE_CHARACTERS", 100)
    model = shutil.copytree(tiny_coca_dir, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["[NEW]"])
    tokenizer.save_pretrained(model)
    message = (
        r"got token 259 \('\[NEW\]'\) in the text, expected ids below the model's vocabulary of 259"
    )
    for place in (0, 399):  # found before the run and by the preparation
        rows = ["a [NEW] word" if number == place else "two words" for number in range(400)]
        (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
        settings = f"model={model}", f"data.sources=[{{path: {tmp_path}/a.jsonl, weight: 1}}]"
        with pytest.raises(CocaError, match=message):
            train(*settings)
        corpus_of(load_recipe(recipe_path, settings)).prepare(300)  # for a model of 260 tokens
        with pytest.raises(CocaError, match=message):
            train(*settings)
        assert (tmp_path / "out").exists() == (place == 399)


def write(name: str, content: dict):
    """Adds these entries to a JSON file of a checkpoint, which may be new."""

    def change(checkpoint):
        file = checkpoint / name
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | content))

    return change


def config(**fields):
    return write("config.json", fields)


ADAPTER = write("adapter_config.json", {})
BESIDE_ADAPTER = r"got adapter_config.json, .* merge the adapter \(merge_and_unload"
CLASSIFIER = config(architectures=["LlamaForSequenceClassification"])
NO_CLASSIFIER = "got LlamaForSequenceClassification, expected a causal language model"
QUANTIZED = {"quant_method": "bitsandbytes", "load_in_8bit": True}
UNREADABLE = write("generation_config.json", {"max_new_tokens": -3})
WRONG_SETTINGS = r"copy/generation_config\.json: cannot be read; correct it, or remove the file"
UNUSABLE = [
    *(("model", UNREADABLE, WRONG_SETTINGS), ("teacher", UNREADABLE, WRONG_SETTINGS)),
    *(("model", ADAPTER, BESIDE_ADAPTER), ("teacher", ADAPTER, BESIDE_ADAPTER)),
    *(("model", CLASSIFIER, NO_CLASSIFIER), ("teacher", CLASSIFIER, NO_CLASSIFIER)),
    ("model", config(quantization_config=QUANTIZED), "got weights quantized by bitsandbytes, expe"),
    *(
        (
            "teacher",
            config(**{key: size}),
            rf"teacher: .*/copy has {key} {size}, but the model has \d+; take the one it was",
        )
        for key, size in {"vocab_size": 99, "num_hidden_layers": 2, "hidden_size": 96}.items()
    ),
]


@pytest.mark.parametrize(("key", "change", "message"), UNUSABLE)
def test_a_checkpoint_that_cannot_be_used_is_refused_before_anything_is_written(
    recipe_tree, tiny_llama_dir, tmp_path, key, change, message
):
    recipe_tree["teacher"] = str(tiny_llama_dir)
    recipe_tree[key] = str(shutil.copytree(recipe_tree[key], tmp_path / "copy"))
    change(tmp_path / "copy")
    refused(message, run_recipe, Recipe.model_validate(recipe_tree), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_blocks_that_skip_beyond_the_models_positions_are_refused(recipe_path):
    skipping = ["data.seq_len=32", "data.skip_positions=65"]
    with pytest.raises(CocaError, match="skip_positions: got 65, expected at most 64, the pos"):
        prepare_recipe(load_recipe(recipe_path, skipping), 1)
    recipe = load_recipe(recipe_path, [*skipping, "config.max_position_embeddings=65"])
    assert check_positions(recipe, start_config(recipe)) is None


def test_skipped_positions_are_refused_for_a_model_that_reads_none(scratch_path):
    skipping = ["data.seq_len=32", "data.skip_positions=64"]
    recipe = load_recipe(scratch_path, ["config.model_type=alibi_llama", *skipping])
    with pytest.raises(CocaError, match=r"got 64 for alibi_llama .* reads no positions"):
        check_positions(recipe, start_config(recipe))


@pytest.mark.parametrize("settings", [["skip_positions", "data.seq_len=32"], ["seq_len"]])
def test_blocks_that_reach_beyond_the_teachers_positions_are_refused(
    recipe_path, tiny_llama_dir, tiny_coca_dir, settings
):
    key, *more = settings
    student = AutoConfig.from_pretrained(tiny_coca_dir, max_position_embeddings=128)
    within, beyond = (
        load_recipe(recipe_path, [*more, f"data.{key}={reach}", f"teacher={tiny_llama_dir}"])
        for reach in (64, 65)
    )
    check_teacher(within, student)
    assert check_positions(beyond, student) is None
    message = rf"data\.{key}: got 65, expected at most 64, the positions of the teacher .*a \("
    refused(message, check_teacher, beyond, student)


def test_blocks_longer_than_the_model_was_trained_for_are_announced_by_the_run_and_the_plan(
    recipe_path, tiny_coca_dir, tmp_path, capsys
):
    notice = f"data.seq_len: got 70 tokens, more than the 64 positions of {tiny_coca_dir} "
    notice += "(max_position_embeddings): it was not trained on those beyond; if that is intended, "
    notice += "set config.max_position_embeddings=70, which the result keeps, or scale RoPE"
    settings = ["data.seq_len=70", "stages.k.max_steps=1", "training.use_cpu=false"]
    recipe = load_recipe(recipe_path, settings)
    first = recipe.model_copy(update={"stages": recipe.stages[:1]})
    assert any(note.startswith(notice) for note in plan_recipe(first).notes)
    run_recipe(load_recipe(recipe_path, settings[:2]), tmp_path / "out", stage="k")
    assert capsys.readouterr().out.count(notice) == 1
    for setting in "max_position_embeddings=70", "rope_parameters={rope_type: linear, factor: 2.0}":
        recipe = load_recipe(recipe_path, ["data.seq_len=70", f"config.{setting}"])
        assert check_positions(recipe, start_config(recipe)) is None
    long = load_recipe(recipe_path, settings)
    assert check_positions(long, coca_hf.AlibiLlamaConfig(max_position_embeddings=64)) is None


def test_a_stage_computes_in_bfloat16_without_accelerators(recipe_path, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    recipe = load_recipe(recipe_path, ["training.bf16=true"])
    del recipe.training["use_cpu"]
    for stage in resolve_stages(recipe, tmp_path):
        assert stage.arguments.bf16
        assert stage.arguments.device.type == "cpu"


LONG_ROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONG_ROPE["original_max_position_embeddings"] = 64
ROPES = {"linear": {}, "dynamic": {}, "longrope": LONG_ROPE}
FAMILIES = {
    **{
        f"{config.__name__} {kind}": config(
            **TINY, rope_parameters={"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **own}
        )
        for config in (LlamaConfig, coca_hf.CocaLlamaConfig)
        for kind, own in ROPES.items()
    },
    "CocaMistral": coca_hf.CocaMistralConfig(**TINY, sliding_window=8),
    "CocaQwen2": coca_hf.CocaQwen2Config(**TINY),
    "CocaQwen3": coca_hf.CocaQwen3Config(**TINY, head_dim=8),
    "CocaGranite": coca_hf.CocaGraniteConfig(**TINY),
    "CocaSmolLM3": coca_hf.CocaSmolLM3Config(**TINY),
    "CocaGPTNeoX": coca_hf.CocaGPTNeoXConfig(**WIDE),
    "AlibiLlama": coca_hf.AlibiLlamaConfig(**TINY),
    "Mistral": MistralConfig(**TINY, sliding_window=8),
    "Qwen3": Qwen3Config(**TINY, head_dim=8),
    "GPTNeoX": GPTNeoXConfig(**WIDE),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_model_passes_the_check_of_its_shapes(recipe_path, tmp_path, family):
    FAMILIES[family].save_pretrained(tmp_path)
    check_model(load_recipe(recipe_path, [f"model={tmp_path}", *ALL]))


FIXED = {
    "tie_word_embeddings=true": "False",
    "vocab_size=300": "259",
    "hidden_size=96": "48",
    "attention_bias=true": "False",
    "coca_constraint=strict": "slack",
    "coca_kept_layers=[1]": r"\[\]",
    "coca_content_pairs=1": "0",
    "coca_content_layers=[1]": r"\[\]",
}


@pytest.mark.parametrize(("setting", "expected"), FIXED.items())
def test_a_field_that_the_weights_fix_is_not_overridden(recipe_path, setting, expected):
    message = rf"config\.\w+: got \S+, expected {expected}, as the weights of .* have it; leave it"
    refused(message, check_overrides, load_recipe(recipe_path, [f"config.{setting}"]))


def assert_in_use(recipe, out):
    refused("not empty; continue what is there with --resume", check_out, recipe, out, resume=False)


@pytest.mark.parametrize(("out", "prepared"), [("out", "out/blocks"), (".", "prepared")])
def test_blocks_inside_out_do_not_count_as_a_run(recipe_path, out, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(recipe_path, [f"data.prepared={prepared}"])
    recipe_path.unlink()
    (tmp_path / prepared).mkdir(parents=True)
    (tmp_path / prepared / "coca-files.json").write_text("{}")
    check_out(recipe, Path(out), resume=False)
    begin_out(Path(out), recipe, {})
    assert (tmp_path / out / "recipe.yaml").is_file()
    (tmp_path / out / "mine.txt").write_text("mine")
    assert_in_use(recipe, Path(out))


OWN_FILES = ["recipe.yaml", "inputs.json", "notes/recipe.yaml", "notes/inputs.json"]
OWN_FILES += [".download.partial", "notes/.a.1.partial", "1-k/log.jsonl"]


@pytest.mark.parametrize("optim", ["adafactor", "adagrad", "lion_8bit"])
def test_an_optimizer_of_whole_weights_is_refused_where_fsdp2_shards_them(
    optim, train, tmp_path, monkeypatch
):
    if optim == "lion_8bit":
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(models, "is_sharded", lambda: True)
    message = (
        rf"stages\.k: optim {optim}, .* {optim} cannot step, or not resume, weights that FSDP2 has"
    )
    refused(message, train, f"stages.k.optim={optim}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prepared", ["prepared", "."])
@pytest.mark.parametrize("name", OWN_FILES)
def test_a_run_and_files_of_ones_own_with_our_names_are_refused_and_kept(
    recipe_path, tmp_path, name, prepared
):
    mine = tmp_path / "out" / name
    recipe = load_recipe(recipe_path, [f"data.prepared={tmp_path / prepared}"])
    mine.parent.mkdir(parents=True)
    mine.write_text(recipe_path.read_text())  # the same recipe, but without its defaults
    assert_in_use(recipe, tmp_path / "out")
    begin_out(tmp_path / "out", recipe, {})
    assert mine.read_text() == recipe_path.read_text()


def test_a_run_refuses_an_out_that_is_a_mount_point_and_held_from_another_place(
    recipe_path, tmp_path, monkeypatch
):
    volume = tmp_path / "volume"
    volume.mkdir()
    for name in ("here", "there"):  # two containers, each with a mount at out
        (tmp_path / name).mkdir()
        (tmp_path / name / "out").symlink_to(volume)
    monkeypatch.setattr(Path, "resolve", Path.absolute)
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "out")
    with ExitStack() as first:
        lock(tmp_path / "here/out", first)
        other = tmp_path / "there/out"
        refused("another coca-train is writing it", run_recipe, load_recipe(recipe_path), other)
    run_recipe(load_recipe(recipe_path, ["stages.k.max_steps=1"]), other, stage="k")
    assert not any(path.name.endswith("lock") for path in volume.iterdir())


@pytest.mark.parametrize("name", ["link", "."])
def test_a_run_refuses_an_out_that_another_holds_under_any_name(
    name, recipe_path, tmp_path, monkeypatch
):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path / "out")
    other = Path(name) if name == "." else tmp_path / name
    with ExitStack() as first:
        lock(tmp_path / "out", first)
        refused("another coca-train is writing it", run_recipe, load_recipe(recipe_path), other)
        assert not any((tmp_path / "out").iterdir())


def test_a_config_without_overrides_is_that_of_the_model(recipe_path, tiny_coca_dir):
    config = start_config(load_recipe(recipe_path))
    assert config.to_dict() == AutoConfig.from_pretrained(tiny_coca_dir).to_dict()


LORA = {"r": 3, "alpha": 6, "dropout": 0.1}


@pytest.fixture
def lora_path(recipe_tree, tmp_path):
    for stage in recipe_tree["stages"][1:]:
        stage["lora"] = LORA
    return write_recipe(tmp_path / "r.yaml", recipe_tree)


def test_adapters_end_as_weights_that_differ_by_low_ranks(lora_path, unbroken, tmp_path, capsys):
    out = tmp_path / "out"
    run_recipe(load_recipe(lora_path), out)
    # r (inputs + outputs) of q (48, 48), t (48, 8) and v (48, 16), in each of 3 layers
    assert f"2-qkv: trains {3 * 3 * (96 + 56 + 64):,} of" in capsys.readouterr().out
    before, after, final = (weights(out / stage) for stage in ("1-k", "2-qkv", "3-full"))
    parts = ("q_proj", "t_proj", "v_proj")
    learnt = changed(before, after)
    assert learnt == {name for name in before if any(part in name for part in parts)}
    differences = (after[name] - before[name] for name in learnt)
    assert {torch.linalg.matrix_rank(d, rtol=1e-3).item() for d in differences} == {3}
    assert changed(after, final) == {name for name in after if "_proj" in name}
    for stage in ("2-qkv", "3-full"):
        model, report = AutoModelForCausalLM.from_pretrained(out / stage, output_loading_info=True)
        assert not any(report.values())
        assert type(model).__name__ == "CocaLlamaForCausalLM"
        ours, theirs = (sorted(os.listdir(each / stage)) for each in (out, unbroken))
        assert ours == theirs


def test_the_seed_initialises_adapters(lora_path):
    recipe = load_recipe(lora_path)

    def first_adapter(seed):
        model = stage_model(start_model(recipe), recipe.stages[1], seed)
        return next(value for name, value in model.named_parameters() if "lora_A" in name)

    first, again, other = map(first_adapter, (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_adapters_need_a_linear_layer(lora_path):
    message = r"stages\.qkv\.train: got embed_tokens, norm with lora, expected linear layers"
    with pytest.raises(CocaError, match=message):
        check_model(load_recipe(lora_path, ["stages.qkv.train=[embed_tokens, q_proj, norm]"]))
