"""`--adapter`: a base with a LoRA adapter converts to the bits of peft's merge_and_unload."""

import shutil

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_hf import convert_checkpoint
from tests.convert.checkpoints import (
    assert_same_weights,
    edit_config,
    edit_json,
    edit_weights,
    interrupt,
    weights_of,
)
from tests.models.families import stock_model

RANK = 3


def make_adapter(base, directory, dtype=torch.float32, targets="all-linear", **options):
    """An adapter with a random B, which peft would start at zero."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    config = peft.LoraConfig(r=RANK, lora_alpha=7, target_modules=targets, **options)
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter).to(dtype)
    adapted.save_pretrained(directory, save_embedding_layers=False)
    return directory


def merge(base, adapter, directory):
    """The checkpoint that peft merges."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(directory)
    for file in base.glob("tokenizer*"):
        shutil.copyfile(file, directory / file.name)
    return directory


@pytest.fixture(scope="module")
def adapter(tiny_llama_dir, tmp_path_factory):
    return make_adapter(tiny_llama_dir, tmp_path_factory.mktemp("adapter") / "lora")


def assert_converts_as_merged(base, lora, directory, **options):
    """`--adapter` gives the weights of what peft merges."""
    convert_checkpoint(base, directory / "dst", adapter=lora, **options)
    convert_checkpoint(merge(base, lora, directory / "merged"), directory / "expected", **options)
    assert_same_weights(directory / "dst", directory / "expected")


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "rslora"),
    [
        *((dtype, torch.float32, False) for dtype in (torch.float32, torch.bfloat16)),
        *((dtype, torch.bfloat16, True) for dtype in (torch.float32, torch.bfloat16)),
        (torch.float64, torch.float64, False),
    ],
)
def test_the_result_is_that_of_peft_merge_and_unload_bit_for_bit(
    tiny_llama_dir, tmp_path, converts, dtype, adapter_dtype, rslora
):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).to(dtype)
    model.save_pretrained(tmp_path / "base")
    lora = make_adapter(tmp_path / "base", tmp_path / "lora", adapter_dtype, use_rslora=rslora)
    converts(tmp_path / "base", tmp_path / "command", "--adapter", lora)
    assert_converts_as_merged(tmp_path / "base", lora, tmp_path, max_shard_size="100KB")
    assert_same_weights(tmp_path / "command", tmp_path / "expected")
    convert_checkpoint(tmp_path / "base", tmp_path / "plain")
    plain, made = weights_of(tmp_path / "plain"), weights_of(tmp_path / "dst")
    moved = {name.split(".")[-2] for name in plain if not torch.equal(plain[name], made[name])}
    linear = {"q_proj", "t_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert moved == linear


def test_the_fused_projection_of_gpt_neox_is_merged_before_it_is_split(tmp_path):
    stock_model("neox-partial").save_pretrained(tmp_path / "base")
    lora = make_adapter(tmp_path / "base", tmp_path / "lora")
    assert_converts_as_merged(tmp_path / "base", lora, tmp_path)


def test_a_calibration_is_on_the_merged_model(tiny_llama_dir, adapter, calibrating, tmp_path):
    assert_converts_as_merged(tiny_llama_dir, adapter, tmp_path, **calibrating)


def test_the_record_has_a_hash_of_the_adapter(tiny_llama_dir, adapter, tmp_path):
    hashes = []
    for number, (weight, alpha) in enumerate([(1.0, 7), (2.0, 7), (1.0, 8), (1.0, 7)]):
        changed = shutil.copytree(adapter, tmp_path / str(number) / "mine")
        config(lora_alpha=alpha)(changed)
        tensors(lambda t, w=weight: t.update({n: w * t[n] for n in t}))(changed)
        record = convert_checkpoint(tiny_llama_dir, tmp_path / f"dst{number}", adapter=changed)
        hashes.append(record["adapter"]["xxh3_128"])
    assert len(set(hashes)) == 3
    assert hashes[0] == hashes[3]


LLAMAS = dict.fromkeys(("/home/me/llama", "./models/llama", "../llama"), "llama")


@pytest.mark.parametrize(("base", "shown"), [*LLAMAS.items(), ("owner/name",) * 2, (None, None)])
def test_record_and_card_name_the_adapter_and_the_base_that_it_was_trained_on(
    tiny_llama_dir, adapter, tmp_path, base, shown
):
    changed = shutil.copytree(adapter, tmp_path / "mine")
    config(base_model_name_or_path=base)(changed)
    record = convert_checkpoint(tiny_llama_dir, tmp_path / "dst", adapter=changed)
    assert (record["adapter"]["name"], record["adapter"].get("trained_on")) == ("mine", shown)
    trained_on = f" (trained on {shown})" if shown else ""
    card = (tmp_path / "dst" / "README.md").read_text()
    assert f"- adapter: mine, merged{trained_on}\n" in card


def test_the_rule_of_a_coca_source_names_the_adapter(tiny_coca_dir, tmp_path):
    lora = make_adapter(tiny_coca_dir, tmp_path / "lora")
    for given, end in ((None, "a CoCA checkpoint"), (lora, "a CoCA checkpoint, with the adapter")):
        dst = tmp_path / f"dst{given is None}"
        record = convert_checkpoint(tiny_coca_dir, dst, adapter=given, ntk_length=128)
        assert record["start"]["rule"].startswith("none: all weights are those of the source")
        assert record["start"]["rule"].endswith(end)


def test_a_conversion_without_it_does_not_continue_one_with_it(tiny_llama_dir, adapter, tmp_path):
    arguments, shards = (tiny_llama_dir, tmp_path / "dst"), {"max_shard_size": "100KB"}
    interrupt(*arguments, 0.5, adapter=adapter, **shards)
    convert_checkpoint(*arguments, **shards)
    convert_checkpoint(tiny_llama_dir, tmp_path / "expected", **shards)
    assert_same_weights(tmp_path / "dst", tmp_path / "expected")


def test_a_dry_run_counts_the_adapter_as_read(tiny_llama_dir, adapter, tmp_path):
    plain, with_adapter = (
        convert_checkpoint(tiny_llama_dir, tmp_path / "dst", dry_run=True, adapter=given)["read"]
        for given in (None, adapter)
    )
    size = (adapter / "adapter_model.safetensors").stat().st_size
    assert with_adapter == {"files": plain["files"] + 1, "bytes": plain["bytes"] + size}


def test_a_tokenizer_beside_the_adapter_is_not_taken_and_its_differences_are_named(
    tiny_llama_dir, adapter, tmp_path, converts
):
    lora, dst = shutil.copytree(adapter, tmp_path / "lora"), tmp_path / "dst"
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    tokenizer.save_pretrained(lora)
    assert "\n  tokenizer" not in converts(tiny_llama_dir, dst, "--adapter", lora)
    tokenizer.chat_template, tokenizer.eos_token = "{{ messages[0].content }}", "<s>"
    tokenizer.save_pretrained(lora)
    line = (
        "  tokenizer             without the adapter's, which differs (chat template, eos_token): "
        f"copy its files into {dst} to have it\n"
    )
    for option in ("--dry-run", "--overwrite"):
        assert line in converts(tiny_llama_dir, dst, "--adapter", lora, "--overwrite", option)
    made = AutoTokenizer.from_pretrained(dst)
    assert (made.chat_template, made.eos_token) == (None, "</s>")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(lora / file, dst / file)
    made = AutoTokenizer.from_pretrained(dst)
    assert (made.chat_template, made.eos_token) == (tokenizer.chat_template, "<s>")
    (lora / "tokenizer.json").unlink()
    record = convert_checkpoint(tiny_llama_dir, tmp_path / "other", adapter=lora)
    assert record["tokenizer_not_taken"] == "the adapter's, which differs (it cannot be loaded)"


def config(**fields):
    """A damage: other fields of adapter_config.json."""
    return lambda directory: edit_json(directory / "adapter_config.json", **fields)


def tensors(change):
    return lambda directory: edit_weights(directory, change, "adapter_model.safetensors")


def to_layer_9(weights):
    for name in [f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"]:
        weights[name.replace("layers.0", "layers.9")] = weights.pop(name)


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
REMEDY = "merge it with peft's merge_and_unload first, and convert the result"
NOT_PLAIN = {
    **{"use_dora": True, "modules_to_save": ["lm_head"], "bias": "all", "peft_type": "LOHA"},
    **{"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"q_proj": 5}, "fan_in_fan_out": True},
    **{"init_lora_weights": "pissa", "trainable_token_indices": [3], "field_of_the_future": 1},
    **{"target_parameters": ["mlp.experts"], "layer_replication": [[0, 2]]},
}
REFUSED = {
    **{
        f"adapter_config.json: got {field}={value!r}, expected plain LoRA on linear layers; "
        f"{REMEDY}": config(**{field: value})
        for field, value in NOT_PLAIN.items()
    },
    "got peft_type=None, expected plain LoRA": (
        lambda d: (d / "adapter_config.json").write_text('{"r": 3}')
    ),
    "got r=0, lora_alpha=7, expected a rank from 1": config(r=0),
    "got r=3, lora_alpha=nan, expected a rank from 1 and a number": config(lora_alpha=float("nan")),
    "got ranks [3, 3] of lora_A and lora_B for": config(r=4),
    "got ranks [3, None] of lora_A and lora_B for model.layers.0.self_attn.q_proj.weight": (
        tensors(lambda w: w.pop(f"{Q0}.lora_B.weight"))
    ),
    f"got {Q0}.lora_magnitude, F32 of shape (2,), expected plain LoRA on linear layers; {REMEDY}": (
        tensors(lambda w: w.update({f"{Q0}.lora_magnitude": torch.ones(2)}))
    ),
    "got no tensors": tensors(dict.clear),
    "got weights for model.layers.9.self_attn.q_proj.weight of shape (48, 48), expected a "
    "tensor of the base; is the base another model?": tensors(to_layer_9),
    "q_proj.weight of shape (48, 40), expected (48, 48); is the base another model?": (
        tensors(lambda w: w.update({f"{Q0}.lora_A.weight": torch.ones(3, 40)}))
    ),
    "lora/adapter_model.safetensors: tensor model.layers.0.self_attn.q_proj.weight: got NaN or": (
        tensors(lambda w: w[f"{Q0}.lora_A.weight"].fill_(torch.nan))
    ),
    **{
        f"{name}: no such file": lambda d, name=name: (d / name).unlink()
        for name in ("adapter_model.safetensors", "adapter_config.json")
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_plain_lora_on_this_base_is_one_line_and_exit_code_2(
    tiny_llama_dir, adapter, tmp_path, refusal, message
):
    damaged = shutil.copytree(adapter, tmp_path / "lora")
    REFUSED[message](damaged)
    assert message in refusal(tiny_llama_dir, tmp_path / "dst", "--adapter", damaged)
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]


@pytest.mark.parametrize(("case", "tied"), [("llama", True), ("smollm3", ...)])
def test_a_head_that_the_config_or_the_familys_default_ties_to_the_embedding_is_refused(
    tmp_path, refusal, case, tied
):
    base, embedding = tmp_path / "base", "model.embed_tokens.weight"
    stock_model(case, tie_word_embeddings=False).save_pretrained(base)
    lora = make_adapter(base, tmp_path / "lora", targets=["lm_head"])
    edit_config(base, tie_word_embeddings=tied)
    edit_weights(base, lambda w: w.update({"lm_head.weight": w[embedding].clone()}))
    message = f"got weights for lm_head.weight, which the base ties to its embedding; {REMEDY}"
    assert message in refusal(base, tmp_path / "dst", "--adapter", lora)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_an_adapter_of_a_coca_model_is_refused_for_its_original(
    tiny_llama_dir, tiny_coca_dir, tmp_path, refusal, task
):
    """W_Q has the same shape in both, but means another function."""
    lora = make_adapter(tiny_coca_dir, tmp_path / "lora", targets=["q_proj"], task_type=task)
    if task is None:  # which the class alone shows
        config(base_model_name_or_path="no/such/directory")(lora)
    said = refusal(tiny_llama_dir, tmp_path / "dst", "--adapter", lora)
    assert "adapter_config.json: got an adapter that was trained on a CoCA model" in said
    convert_checkpoint(tiny_coca_dir, tmp_path / "dst", ntk_length=128, adapter=lora)


def test_an_adapter_of_gguf_is_refused(adapter, tmp_path, refusal):
    (tmp_path / "a.gguf").touch()
    printed = refusal(tmp_path / "a.gguf", tmp_path / "dst", "--adapter", adapter)
    assert "a.gguf: --adapter: got a GGUF file, whose weights are quantized" in printed


def test_an_adapter_is_not_overwritten(tiny_llama_dir, adapter, tmp_path, refusal):
    mine = shutil.copytree(adapter, tmp_path / "mine")
    (mine / "config.json").touch()
    printed = refusal(tiny_llama_dir, mine, "--adapter", mine, "--overwrite")
    assert "is the source itself or holds it" in printed
