"""A converted LLaMA checkpoint loads anywhere and has the weights that it should have."""

import copy
import json

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from coca_hf import convert_checkpoint, patch_
from coca_hf.models.attention import coca_query
from tests.conftest import TINY, refused
from tests.convert.checkpoints import (
    assert_same_weights,
    edit_config,
    edit_weights,
    record_of,
    refuses,
    weights_of,
)
from tests.models.families import stock_model

IDS = torch.arange(60).view(2, 30) * 5 % 251


def llama(**fields):
    torch.manual_seed(1)
    fields = TINY | {"vocab_size": 259, "initializer_range": 0.2} | fields
    return LlamaForCausalLM(LlamaConfig(**fields)).eval()


def saved(model, directory, **options):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory, **options)
    return directory


def test_source_and_result_may_have_shards_of_the_size_asked_for(
    tmp_path, tiny_llama_dir, tiny_coca_dir
):
    model = LlamaForCausalLM.from_pretrained(tiny_llama_dir)
    saved(model, tmp_path / "src", max_shard_size="50KB")
    assert len(list((tmp_path / "src").glob("*.safetensors"))) > 3
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", max_shard_size="50KB")
    assert_same_weights(tmp_path / "dst", tiny_coca_dir)
    shards = sorted((tmp_path / "dst").glob("model-*-of-*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        tensors = load_file(shard)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 50_000 or len(tensors) == 1
    index = record_of(tmp_path / "dst", "model.safetensors.index.json")
    assert index["metadata"]["total_size"] > 50_000
    models = map(AutoModelForCausalLM.from_pretrained, (tmp_path / "dst", tiny_coca_dir))
    assert torch.equal(*(model(IDS).logits for model in models))


@pytest.mark.parametrize(
    ("stated", "expected"), [("bfloat16", "bfloat16"), ("float64", "float16"), (None, "float16")]
)
def test_dtype_is_asked_for_or_the_stated_one_or_that_of_most_bytes(tmp_path, stated, expected):
    """The embedding, which comes first, is float32, the last norm bfloat16, and the rest float16."""
    source = saved(llama(intermediate_size=400).half(), tmp_path / "src")
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    edit_weights(source, lambda w: w.update({embedding: w[embedding].float()}))
    edit_weights(source, lambda w: w.update({norm: w[norm].bfloat16()}))
    edit_config(source, dtype=stated)
    assert convert_checkpoint(source, tmp_path / "dst")["dtype"] == expected
    assert AutoConfig.from_pretrained(tmp_path / "dst").dtype == getattr(torch, expected)
    own = {embedding: torch.float32, norm: torch.bfloat16}
    for name, tensor in weights_of(tmp_path / "dst").items():
        assert tensor.dtype == own.get(name, torch.float16)
    assert convert_checkpoint(source, tmp_path / "asked", dtype="bfloat16")["dtype"] == "bfloat16"
    asked = AutoModelForCausalLM.from_pretrained(tmp_path / "asked")
    assert {parameter.dtype for parameter in asked.parameters()} == {torch.bfloat16}


def test_a_dtype_too_narrow_for_the_numbers_is_refused_by_tensor(tmp_path):
    source, half = saved(llama(), tmp_path / "src"), {"dtype": "float16"}
    down, key = "model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.k_proj.weight"
    edit_weights(source, lambda w: w[down][3, 5].fill_(1e5))
    message = f"tensor {down}: got numbers up to 100000, which in float16 are infinite"
    refuses(message, source, tmp_path / "dst", **half)
    convert_checkpoint(source, tmp_path / "bfloat16", dtype="bfloat16")
    edit_weights(source, lambda w: [w[down][3, 5].fill_(0), w[key].mul_(1e-12)])
    message = "layers.2.self_attn.t_proj.weight: .* which in float16 are zero or nearly so; exp"
    refuses(message, source, tmp_path / "dst", **half)
    refuses(message, source, tmp_path / "dst", **half, dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bfloat16", "src"]


def largest_folded(q, constraint):
    """The largest number in these 500 queries, each folded with the rotation by another angle."""
    angles = torch.linspace(0, 6.3, 500)[None, None, :, None].expand(1, 1, 500, q.shape[-1] // 2)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    return coca_query(q, cos, sin, constraint).abs().max()


@pytest.mark.parametrize(
    ("constraint", "fits", "overflows", "stored"),
    [("strict", 720, 730, torch.float32), ("slack", 855, 870, torch.float16)],
)
def test_a_query_bias_whose_pairs_float16_cannot_square_is_refused(
    tmp_path, constraint, fits, overflows, stored
):
    source = saved(llama(attention_bias=True).to(stored), tmp_path / "src")
    name = "model.layers.1.self_attn.q_proj.bias"
    half = AutoConfig.from_pretrained(source).head_dim // 2

    def store(size):
        bias = torch.zeros(6 * 2 * half, dtype=stored)
        bias[1], bias[1 + half] = size, -size
        edit_weights(source, lambda w: w.update({name: bias}))

    store(fits)
    convert_checkpoint(source, tmp_path / "fits", constraint, dtype="float16")
    store(overflows)
    refusal = rf"tensor {name}: got numbers up to 1.*, whose squares float16 cannot hold, expected "
    refuses(refusal, source, tmp_path / "dst", constraint, dtype="float16")
    refuses(refusal, source, tmp_path / "dst", constraint, dtype="float16", keep_layers=[0])
    convert_checkpoint(source, tmp_path / "kept", constraint, dtype="float16", keep_layers=[1])
    convert_checkpoint(source, tmp_path / "bfloat16", constraint, dtype="bfloat16")
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float16)
    refused(refusal, patch_, model, constraint)
    assert type(model) is LlamaForCausalLM
    patch_(copy.deepcopy(model), constraint, keep_layers=[1])
    patch_(model.bfloat16(), constraint)
    q = torch.zeros(1, 1, 500, 2 * half)
    q[..., 1] = q[..., 1 + half] = fits  # the worst angle rotates the pair onto its larger product
    assert 0.9 * 65504 < largest_folded(q, constraint) < 65504


def test_a_norm_of_queries_whose_square_float16_cannot_hold_is_refused(tmp_path):
    source = saved(stock_model("qwen3"), tmp_path / "src")
    name, d = "model.layers.1.self_attn.q_norm.weight", 14
    edit_weights(source, lambda w: w[name][3].fill_(1020 / d**0.5))
    convert_checkpoint(source, tmp_path / "held", dtype="float16")
    held = AutoModelForCausalLM.from_pretrained(tmp_path / "held", dtype=torch.float16)
    q = torch.zeros(1, 1, 500, d, dtype=torch.float16)
    q[..., 3] = 5  # a query in a single number, which the norm scales to sqrt(d)
    normed = held.model.layers[1].self_attn.q_norm(q)
    assert 0.9 * 65504 < largest_folded(normed, "slack") < 65504
    edit_weights(source, lambda w: w[name][3].fill_(-278))
    refusal = rf"tensor {name}: got queries up to 1040.18, whose squares float16 cannot hold, expected at most 1024"
    refuses(refusal, source, tmp_path / "dst", dtype="float16")
    refused(refusal, patch_, AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16))
    convert_checkpoint(source, tmp_path / "kept", dtype="float16", keep_layers=[1])
    convert_checkpoint(source, tmp_path / "dst", dtype="bfloat16")


@pytest.mark.parametrize("heads", [slice(0, 8), slice(8, 16)], ids=["first", "second"])
def test_a_start_too_small_for_float16_is_refused_there_and_written_in_float32(tmp_path, heads):
    """Keys of 2e-5 and queries of 20 fit into float16, but their scale makes W_T underflow."""
    model = llama()
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.k_proj.weight[heads] *= 1e-4
        attention.q_proj.weight[heads.start * 3 : heads.stop * 3] *= 100
    source, name = saved(model.half(), tmp_path / "src"), "model.layers.1.self_attn.t_proj.weight"
    message = rf"{name}: got numbers .* in float16 are zero or nearly so; expected"
    refuses(message, source, tmp_path / "dst")
    refused(message, patch_, LlamaForCausalLM.from_pretrained(source, dtype=torch.float16))
    record = convert_checkpoint(source, tmp_path / "dst", dtype="float32")
    weights, made = map(weights_of, (source, tmp_path / "dst"))
    keys = weights[name.replace("t_proj", "k_proj")].double().view(2, 2, 4, 48)
    expected = keys.mean(1) * torch.tensor(record["start"]["scales"][1])[:, None, None]
    assert expected.flatten(0, 1)[slice(heads.start // 2, heads.stop // 2)].abs().max() < 1e-6
    torch.testing.assert_close(made[name], expected.flatten(0, 1).float(), rtol=1e-6, atol=0)
    convert_checkpoint(source, tmp_path / "bfloat16", dtype="bfloat16")
    got = weights_of(tmp_path / "bfloat16")[name]
    torch.testing.assert_close(got, expected.flatten(0, 1).bfloat16(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("head", ["other", "equal", "absent"])
def test_an_untied_head_is_kept_although_the_config_calls_it_tied(tmp_path, family, head):
    fields = {"tie_word_embeddings": True, "vocab_size": 259, "initializer_range": 0.2}
    case = "neox-partial" if family == "gpt_neox" else "llama"
    source = saved(stock_model(case, **fields), tmp_path / "src")
    embedding = next(t for name, t in weights_of(source).items() if "embed" in name)
    stored = torch.randn(embedding.shape) if head == "other" else embedding.clone()
    if head != "absent":
        edit_weights(source, lambda w: w.update({"lm_head.weight": stored}))
    convert_checkpoint(source, tmp_path / "dst")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "dst")
    assert torch.equal(got.lm_head.weight, stored)
    assert got.config.tie_word_embeddings is (head != "other")
    assert (got.lm_head.weight is got.model.embed_tokens.weight) is (head != "other")
    assert ("lm_head.weight" in weights_of(tmp_path / "dst")) is (head == "other")
    original = AutoModelForCausalLM.from_pretrained(source)
    patched = patch_(original)
    assert torch.equal(patched.lm_head.weight, got.lm_head.weight)
    assert patched.config.tie_word_embeddings is (head != "other")


def test_record_says_what_was_converted_and_by_which_rule(tiny_llama_dir, tiny_coca_dir):
    record = record_of(tiny_coca_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_coca_dir)
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(count.values())
    assert record["source"] == tiny_llama_dir.name
    tensors = load_file(tiny_llama_dir / "model.safetensors")
    digest = xxhash.xxh3_128_hexdigest
    hashes = {name: digest(tensors[name].numpy().tobytes()) for name in sorted(tensors)}
    assert record["source_xxh3_128"] == digest(json.dumps(hashes).encode())
    assert record["parameters"]["after"] == total == record["parameters"]["before"] - 3 * 2 * 4 * 48
    of_q, of_t, of_v = (
        sum(number for name, number in count.items() if part in name)
        for part in ("q_proj", "t_proj", "v_proj")
    )
    assert record["trainable_fraction"]["k"] == pytest.approx(of_t / total)
    assert record["trainable_fraction"]["qkv"] == pytest.approx((of_q + of_t + of_v) / total)
    assert record["kv_cache_bytes_per_token"]["before"] == 3 * 2 * 2 * 8 * 4
    assert [len(scales) for scales in record["start"]["scales"]] == [2, 2, 2]
    assert "fold(W_K)" in record["start"]["rule"]


def test_the_command_says_what_to_do_next(tiny_llama_dir, tmp_path, converts):
    printed = converts(tiny_llama_dir, tmp_path / "dst")
    assert "less after --calibrate TEXT" in printed
    assert f"Next: coca-train RECIPE model={tmp_path / 'dst'} (" in printed


def test_stock_llama_loads_no_coca_checkpoint_unnoticed(tiny_coca_dir):
    """Forced into LLaMA's class, it reports every key projection missing."""
    _, info = LlamaForCausalLM.from_pretrained(tiny_coca_dir, output_loading_info=True)
    for problem, name in (("missing_keys", "k_proj"), ("unexpected_keys", "t_proj")):
        expected = {f"model.layers.{i}.self_attn.{name}.weight" for i in range(3)}
        assert expected <= set(info[problem])


SETTINGS = {"repetition_penalty": 1.3, "max_length": 77, "do_sample": True, "top_k": 7}
WITHOUT_EFFECT = {"temperature": 0.5, "use_cache": False}  # do_sample is not set


@pytest.mark.parametrize("settings", [SETTINGS, {"do_sample": True}, WITHOUT_EFFECT, {}], ids=str)
def test_settings_of_generation_in_an_old_config_reach_the_result(source, tmp_path, settings):
    dst = tmp_path / "dst"
    (source / "generation_config.json").unlink()
    edit_config(source, **settings, top_p=None)
    convert_checkpoint(source, dst)
    assert (dst / "generation_config.json").exists() == bool(settings)
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(directory).generation_config.to_diff_dict()
        for directory in (source, dst)
    )
    assert ours | settings == ours
    assert ours | {"_from_model_config": True} == theirs | {"_from_model_config": True}


def test_settings_of_generation_that_cannot_be_read_are_refused(source, tmp_path):
    (source / "generation_config.json").unlink()
    edit_config(source, max_new_tokens=-3)
    message = r"config\.json: its settings of generation cannot be read: .* must be greater than 0"
    refuses(message, source, tmp_path / "dst")


UNREADABLE = {
    "[1]": "got a list, expected a JSON object",
    '{"top_k": 5': "not JSON",
    '{"max_new_tokens": -3}': "cannot be read; correct it, or remove the file: .* greater than 0",
}


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_generation_config_that_cannot_be_read_is_refused_at_once(source, tmp_path, content):
    (source / "generation_config.json").write_text(content)
    (source / "model.safetensors").write_bytes(b"")  # which would be refused next
    refuses(rf"source/generation_config\.json: {UNREADABLE[content]}", source, tmp_path / "dst")
