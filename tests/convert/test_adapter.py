"""`--adapter`: a base with a LoRA adapter converts to the bits of peft's merge_and_unload."""

import shutil

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from coca_hf import convert_checkpoint
from tests.convert.checkpoints import (
    assert_same_weights,
    edit_config,
    edit_json,
    edit_weights,
    files_of,
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
def base(tiny_llama_dir):
    return tiny_llama_dir


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return make_adapter(base, tmp_path_factory.mktemp("adapter") / "lora")


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "rslora"),
    [
        *((torch.float32, torch.float32, False), (torch.float32, torch.bfloat16, True)),
        *((torch.bfloat16, torch.float32, False), (torch.bfloat16, torch.bfloat16, True)),
    ],
)
def test_the_result_is_that_of_peft_merge_and_unload_bit_for_bit(
    tiny_llama_dir, tmp_path, converts, dtype, adapter_dtype, rslora
):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir).to(dtype)
    model.save_pretrained(tmp_path / "base")
    lora = make_adapter(tmp_path / "base", tmp_path / "lora", adapter_dtype, use_rslora=rslora)
    converts(*(tmp_path / "base", tmp_path / "dst", "--adapter", lora, "--max-shard-size", "100KB"))
    merged = merge(tmp_path / "base", lora, tmp_path / "merged")
    convert_checkpoint(merged, tmp_path / "expected", max_shard_size="100KB")
    assert_same_weights(tmp_path / "dst", tmp_path / "expected")
    convert_checkpoint(tmp_path / "base", tmp_path / "plain")
    plain, made = weights_of(tmp_path / "plain"), weights_of(tmp_path / "dst")
    moved = {name.split(".")[-2] for name in plain if not torch.equal(plain[name], made[name])}
    linear = {"q_proj", "t_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert moved == linear


def test_the_fused_projection_of_gpt_neox_is_merged_before_it_is_split(tmp_path):
    stock_model("neox-partial").save_pretrained(tmp_path / "base")
    lora = make_adapter(tmp_path / "base", tmp_path / "lora")
    convert_checkpoint(tmp_path / "base", tmp_path / "dst", adapter=lora)
    merged = merge(tmp_path / "base", lora, tmp_path / "merged")
    convert_checkpoint(merged, tmp_path / "expected")
    assert_same_weights(tmp_path / "dst", tmp_path / "expected")


def test_a_calibration_is_on_the_merged_model(base, adapter, calibrating, tmp_path):
    convert_checkpoint(base, tmp_path / "dst", adapter=adapter, **calibrating)
    merged = merge(base, adapter, tmp_path / "merged")
    convert_checkpoint(merged, tmp_path / "expected", **calibrating)
    assert_same_weights(tmp_path / "dst", tmp_path / "expected")


def test_record_and_card_name_the_adapter_and_its_hash_follows_weights_and_factor(
    base, adapter, tmp_path
):
    records = []
    for number, (weight, alpha) in enumerate([(1.0, 7), (2.0, 7), (1.0, 8), (1.0, 7)]):
        changed = shutil.copytree(adapter, tmp_path / str(number) / "mine")
        edit_adapter(changed, lora_alpha=alpha)
        edit_tensors(changed, lambda t, w=weight: t.update({n: w * t[n] for n in t}))
        record = convert_checkpoint(base, tmp_path / f"dst{number}", adapter=changed)
        records.append(record["adapter"])
    assert {record["name"] for record in records} == {"mine"}
    hashes = [record["xxh3_128"] for record in records]
    assert len(set(hashes)) == 3
    assert hashes[0] == hashes[3]
    card = (tmp_path / "dst0" / "README.md").read_text()
    assert "- adapter: mine, merged\n" in card


def test_a_conversion_without_the_adapter_does_not_continue_one_with_it(base, adapter, tmp_path):
    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(
            base, tmp_path / "dst", adapter=adapter, progress=interrupt, max_shard_size="100KB"
        )
    convert_checkpoint(base, tmp_path / "dst", max_shard_size="100KB")
    convert_checkpoint(base, tmp_path / "expected", max_shard_size="100KB")
    assert_same_weights(tmp_path / "dst", tmp_path / "expected")


def test_a_dry_run_counts_the_adapter_as_read(base, adapter, tmp_path):
    plain, with_adapter = (
        convert_checkpoint(base, tmp_path / "dst", dry_run=True, adapter=given)["read"]
        for given in (None, adapter)
    )
    size = (adapter / "adapter_model.safetensors").stat().st_size
    assert with_adapter == {"files": plain["files"] + 1, "bytes": plain["bytes"] + size}


def edit_adapter(directory, **fields):
    edit_json(directory / "adapter_config.json", **fields)


def edit_tensors(directory, change):
    edit_weights(directory, change, "adapter_model.safetensors")


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
REMEDY = "merge it with peft's merge_and_unload first, and convert the result"
FIELDS = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "rank_pattern": {"q_proj": 5},
    "alpha_pattern": {"q_proj": 5},
    "init_lora_weights": "pissa",
    "peft_type": "LOHA",
    "fan_in_fan_out": True,
    "trainable_token_indices": [3],
    "target_parameters": ["mlp.experts"],
    "layer_replication": [[0, 2]],
    "field_of_the_future": 1,
}
REFUSED = {
    **{
        field: (
            lambda d, field=field, value=value: edit_adapter(d, **{field: value}),
            f"adapter_config.json: got {field}={value!r}, expected plain LoRA on linear layers; "
            f"{REMEDY}",
        )
        for field, value in FIELDS.items()
    },
    "no peft_type": (
        lambda d: (d / "adapter_config.json").write_text('{"r": 3}'),
        "got peft_type=None, expected plain LoRA",
    ),
    "no rank": (lambda d: edit_adapter(d, r=0), "got r=0, lora_alpha=7, expected a rank from 1"),
    "an alpha that is no number": (
        lambda d: edit_adapter(d, lora_alpha=float("nan")),
        "got r=3, lora_alpha=nan, expected a rank from 1 and a number",
    ),
    "another rank": (lambda d: edit_adapter(d, r=4), "got ranks [3, 3] of lora_A and lora_B for"),
    "half a pair": (
        lambda d: edit_tensors(d, lambda t: t.pop(f"{Q0}.lora_B.weight")),
        "got ranks [3, None] of lora_A and lora_B for model.layers.0.self_attn.q_proj.weight",
    ),
    "another tensor": (
        lambda d: edit_tensors(d, lambda t: t.update({f"{Q0}.lora_magnitude": torch.ones(2)})),
        f"got {Q0}.lora_magnitude, F32 of shape (2,), expected plain LoRA on linear layers; {REMEDY}",
    ),
    "no tensors": (lambda d: edit_tensors(d, lambda t: t.clear()), "got no tensors"),
    "not in the base": (
        lambda d: edit_tensors(
            d,
            lambda t: [
                t.update({name.replace("layers.0", "layers.9"): t.pop(name)})
                for name in [f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"]
            ],
        ),
        "got weights for model.layers.9.self_attn.q_proj.weight of shape (48, 48), expected a "
        "tensor of the base; is the base another model?",
    ),
    "another shape": (
        lambda d: edit_tensors(d, lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(3, 40)})),
        "q_proj.weight of shape (48, 40), expected (48, 48); is the base another model?",
    ),
    "NaN": (
        lambda d: edit_tensors(d, lambda t: t[f"{Q0}.lora_A.weight"].fill_(torch.nan)),
        "lora/adapter_model.safetensors: tensor model.layers.0.self_attn.q_proj.weight: got NaN or",
    ),
    "no weights": (
        lambda d: (d / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors: no such file",
    ),
    "no adapter": (
        lambda d: (d / "adapter_config.json").unlink(),
        "adapter_config.json: no such file",
    ),
}


@pytest.mark.parametrize(("damage", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_plain_lora_on_this_base_is_one_line_and_exit_code_2(
    base, adapter, tmp_path, refusal, damage, message
):
    damaged = shutil.copytree(adapter, tmp_path / "lora")
    damage(damaged)
    assert message in refusal(base, tmp_path / "dst", "--adapter", damaged)
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]


def test_a_head_that_is_the_embedding_is_refused(base, tmp_path, refusal):
    tied = shutil.copytree(base, tmp_path / "base")
    edit_config(tied, tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    edit_weights(tied, lambda w: w.update({"lm_head.weight": w[embedding].clone()}))
    lora = make_adapter(base, tmp_path / "lora", targets=["lm_head"])
    printed = refusal(tied, tmp_path / "dst", "--adapter", lora)
    assert f"got weights for lm_head.weight, which the base ties to its embedding; {REMEDY}" in (
        printed
    )


def test_an_adapter_of_gguf_is_refused(adapter, tmp_path, refusal):
    (tmp_path / "a.gguf").touch()
    printed = refusal(tmp_path / "a.gguf", tmp_path / "dst", "--adapter", adapter)
    assert "a.gguf: --adapter: got a GGUF file, whose weights are quantized" in printed


def test_an_adapter_is_not_overwritten(base, adapter, tmp_path, refusal):
    mine = shutil.copytree(adapter, tmp_path / "mine")
    (mine / "config.json").touch()
    before = files_of(mine)
    printed = refusal(base, mine, "--adapter", mine, "--overwrite")
    assert "is the source itself or holds it" in printed
    assert files_of(mine) == before
