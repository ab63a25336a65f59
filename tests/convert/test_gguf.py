"""GGUF files of every family that transformers reads, written in the way of llama.cpp."""

import contextlib
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_hf import convert_checkpoint
from coca_hf.convert import source
from coca_hf.convert.config import FAMILIES, MODELS
from tests.conftest import TINY
from tests.convert.checkpoints import refuses

gguf = pytest.importorskip("gguf")
SHAPE = TINY | {"intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8}
SHAPE["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
SHAPE["initializer_range"] = 0.2
CASES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("llama", {"sliding_window": None}),  # llama.cpp calls it LLaMA
    "qwen2": ("qwen2", {"head_dim": ...}),
    "phi3": ("phi3", {"head_dim": ..., "pad_token_id": None}),
    "qwen3": ("qwen3", {"head_dim": 128}),  # transformers assumes it for every qwen3 of GGUF
}


class Announced:
    """A lock that notes who comes for it."""

    def __init__(self, waiting):
        self.waiting, self.lock = waiting, threading.Lock()

    def __enter__(self):
        self.waiting.append(threading.get_ident())
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()


@pytest.fixture
def model(case, tiny_tokenizer):
    family = case if case in FAMILIES else "llama"
    fields = SHAPE | CASES[case][1] | {"vocab_size": len(tiny_tokenizer) + 2}
    given = {name: value for name, value in fields.items() if value is not ...}
    torch.manual_seed(4)
    model = FAMILIES[family].causal_lm(FAMILIES[family].config(**given))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def write_gguf(file, model, arch, tokenizer, change=lambda writer: None, without=None):
    config = model.config
    writer = gguf.GGUFWriter(file, arch)
    writer.add_name("Any-7B-v0.3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(getattr(config, "head_dim", 8))
    # a file needs merges; transformers 5.17 turns a single one into a string
    vocab = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), "ab", "cd"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(vocab) - 3)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)  # Phi-3's default is beyond this vocabulary
    heads_of = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        heads = heads_of.get(name.split(".")[-2])
        if arch == "llama" and heads:  # llama.cpp rotates neighbouring numbers, not halves
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(theirs, np.ascontiguousarray(tensor.numpy()))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_converts_to_the_weights_of_its_original(case, model, tiny_tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "original")
    write_gguf(tmp_path / "model.gguf", model, CASES[case][0], tiny_tokenizer)
    convert_checkpoint(tmp_path / "original", tmp_path / "expected", max_shard_size="100KB")
    record = convert_checkpoint(tmp_path / "model.gguf", tmp_path / "dst")
    assert record["source_format"] == "gguf"
    places = tmp_path / "dst", tmp_path / "expected"
    made, expected = map(AutoModelForCausalLM.from_pretrained, places)
    assert type(made) is MODELS["ForCausalLM"][FAMILIES[CASES[case][0]].coca_config]
    assert made.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name
    ids = torch.arange(50)[None]
    assert torch.equal(made(ids).logits, expected(ids).logits)
    text = "Ay, but to die, and go we know not where"
    tokenizers = AutoTokenizer.from_pretrained(tmp_path / "dst"), tiny_tokenizer
    ours, theirs = (tokenizer(text).input_ids for tokenizer in tokenizers)
    assert ours[-5:] == theirs[-5:]


@pytest.mark.parametrize("case", ["llama"])
def test_the_header_is_parsed_once(case, model, tiny_tokenizer, tmp_path, monkeypatch):
    """It takes seconds for a vocabulary of 49,152 words."""
    write_gguf(tmp_path / "model.gguf", model, case, tiny_tokenizer)
    parsed, parse = [], gguf.GGUFReader._build_fields
    counting = lambda *arguments: parsed.append(1) or parse(*arguments)  # noqa: E731
    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", counting)
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "dst")
    assert len(parsed) == 1


@pytest.mark.parametrize("case", ["llama"])
def test_a_thread_that_waits_reads_the_file_that_is_there_then(
    case, model, tiny_tokenizer, tmp_path, monkeypatch
):
    file, load, waiting, others = tmp_path / "model.gguf", AutoTokenizer.from_pretrained, [], []
    monkeypatch.setattr(source, "READING_GGUF", Announced(waiting))
    write_gguf(file, model, case, tiny_tokenizer)

    def replace_file(*arguments, **options):
        """While the first thread reads and the second waits."""
        if not others:
            others.append(pool.submit(convert_checkpoint, file, tmp_path / "second"))
            while len(waiting) < 2:
                time.sleep(0.01)
            model.lm_head.weight.data.mul_(2)
            file.unlink()
            write_gguf(file, model, case, tiny_tokenizer)
        return load(*arguments, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", replace_file)
    with ThreadPoolExecutor() as pool, contextlib.closing(source.open_source(str(file))):
        others[0].result()
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    assert torch.equal(made.lm_head.weight, model.lm_head.weight)


CHANGES = {
    "rope_freqs.weight": lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32)),
    "llama.rope.scaling.type='yarn'": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
    "llama.rope.scaling.factor=4.0": lambda w: w.add_rope_scaling_factor(4.0),
    "llama.attention.sliding_window=7": lambda w: w.add_sliding_window(7),
    "llama.rope.scaling.attn_factor=0.5": lambda w: w.add_rope_scaling_attn_factors(0.5),
    "llama.attention.causal=False": lambda w: w.add_causal_attention(False),
    "phi3.rope.dimension_count=6": lambda w: w.add_rope_dimension_count(6),
    "qwen2.rope.dimension_count=4": lambda w: w.add_rope_dimension_count(4),
    "tokenizer.ggml.add_space_prefix=False": lambda w: without_space_prefix(w),
    "": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE),
}


def without_space_prefix(writer):
    writer.kv_data[0]["tokenizer.ggml.model"].value = "llama"
    writer.add_add_space_prefix(False)


@pytest.mark.parametrize(
    ("case", "change"),
    [(of if (of := change.split(".")[0]) in CASES else "llama", change) for change in CHANGES],
)
def test_what_transformers_ignores_is_refused(case, change, model, tiny_tokenizer, tmp_path):
    write_gguf(tmp_path / "model.gguf", model, CASES[case][0], tiny_tokenizer, CHANGES[change])
    if not change:
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "dst")
        return
    message = rf"model\.gguf: got {re.escape(change)}, which transformers' reader"
    refuses(message, tmp_path / "model.gguf", tmp_path / "dst")
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


NEEDED = ("context_length", "attention.head_count", "attention.head_count_kv")
NEEDED += ("attention.layer_norm_rms_epsilon",)


@pytest.mark.parametrize("case", ["llama"])
@pytest.mark.parametrize("field", [f"llama.{name}" for name in NEEDED])
def test_a_field_for_which_transformers_assumes_a_value_is_refused(
    case, field, model, tiny_tokenizer, tmp_path
):
    """Without the number of heads or of key/value heads, it leaves queries and keys in llama.cpp's
    order; the number that it assumes is 32.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 32}
    full = type(model)(type(model.config)(**model.config.to_dict() | sizes))
    without = lambda writer: writer.kv_data[0].pop(field)  # noqa: E731
    write_gguf(tmp_path / "model.gguf", full, "llama", tiny_tokenizer, without)
    message = rf"model\.gguf: got no {re.escape(field)}, for which transformers' reader"
    refuses(message, tmp_path / "model.gguf", tmp_path / "dst")


@pytest.mark.parametrize("case", ["llama"])
def test_tensors_that_transformers_adds_or_drops_are_refused(case, model, tiny_tokenizer, tmp_path):
    missing = "model.layers.1.mlp.down_proj.weight"
    write_gguf(tmp_path / "a.gguf", model, case, tiny_tokenizer, without=missing)
    message = rf"tensor {missing} is missing; is the checkpoint"
    refuses(message, tmp_path / "a.gguf", tmp_path / "dst")

    def add_norm(writer):
        writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(8, np.float32))

    write_gguf(tmp_path / "b.gguf", model, case, tiny_tokenizer, add_norm)
    message = "got 22 tensors, of which transformers reads 21; expected a plain LlamaForCausalLM"
    refuses(message, tmp_path / "b.gguf", tmp_path / "dst")


@pytest.mark.parametrize("case", ["llama"])
def test_what_lies_beside_a_file_is_not_read(case, model, tiny_tokenizer, tmp_path):
    write_gguf(tmp_path / "model.gguf", model, case, tiny_tokenizer)
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "alone")
    words = {"[UNK]": 0, "to": 1, "die": 2}
    other = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    other.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "another/base"}')
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "beside")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        ours, theirs = (tmp_path / place / name for place in ("beside", "alone"))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("case", ["llama"])
def test_one_of_several_shards_is_refused(case, model, tiny_tokenizer, tmp_path):
    file = tmp_path / "model-00001-of-00003.gguf"
    write_gguf(file, model, case, tiny_tokenizer, lambda w: w.add_uint16("split.count", 3))
    message = "gguf: got one of 3 shards, expected a whole model; merge them with llama.cpp"
    refuses(message, file, tmp_path / "dst")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", ["llama"])
def test_more_layers_than_tensors_are_refused_at_once(case, model, tiny_tokenizer, tmp_path):
    def claim(writer):
        writer.kv_data[0]["llama.block_count"].value = 4_000_000

    write_gguf(tmp_path / "model.gguf", model, case, tiny_tokenizer, claim)
    message = "got llama.block_count=4000000, expected no more layers than its 21 tensors"
    refuses(message, tmp_path / "model.gguf", tmp_path / "dst")


@pytest.mark.parametrize("case", ["llama"])
@pytest.mark.parametrize("length", [3, 300, 2000, -5000, -1])
def test_a_file_that_was_cut_off_is_one_line_with_what_to_do(
    case, length, model, tiny_tokenizer, tmp_path
):
    file = tmp_path / "model.gguf"
    write_gguf(file, model, case, tiny_tokenizer)
    file.write_bytes(file.read_bytes()[:length])
    message = r"model\.gguf: cannot be read as GGUF; download it again, or convert the original"
    refuses(message, file, tmp_path / "dst")


@pytest.mark.parametrize("case", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("split", "flags", "around"),
    [
        ("llama-bpe", {}, (1, 0)),
        ("llama-bpe", {"bos": False}, (0, 0)),
        ("gpt-2", {}, (0, 0)),
        ("gpt-2", {"bos": True, "eos": True}, (1, 1)),
    ],
)
def test_special_tokens_are_those_of_the_file_and_surround_a_text_as_in_llama_cpp(
    case, split, flags, around, model, tiny_tokenizer, tmp_path
):
    """Older transformers confuses `bos_token` and `eos_token`, or takes those of Qwen2."""

    def describe(writer):
        writer.add_tokenizer_pre(split)
        for name, adds in flags.items():
            getattr(writer, f"add_add_{name}_token")(adds)

    write_gguf(tmp_path / "model.gguf", model, CASES[case][0], tiny_tokenizer, describe)
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "dst")
    made = AutoTokenizer.from_pretrained(tmp_path / "dst")
    assert (made.pad_token_id, made.bos_token_id, made.eos_token_id) == (0, 1, 2)
    ids, inner = made("to die").input_ids, made("to die", add_special_tokens=False).input_ids
    assert ids == [1] * around[0] + inner + [2] * around[1]


@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
@pytest.mark.parametrize("split", ["llama-bpe", "gpt-2", "qwen2"])
def test_words_are_split_as_the_file_says_whatever_its_family(
    case, split, model, tiny_tokenizer, tmp_path
):
    """The tokenizer of Qwen2 splits numbers into digits whatever it was saved with."""

    def describe(writer):
        writer.add_tokenizer_pre(split)
        words = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        words[-2:] = ["12", "34"]
        writer.kv_data[0]["tokenizer.ggml.merges"].value = ["1 2", "3 4"]

    write_gguf(tmp_path / "model.gguf", model, CASES[case][0], tiny_tokenizer, describe)
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "dst")
    with contextlib.closing(source.open_source(str(tmp_path / "model.gguf"))) as opened:
        theirs = opened.tokenizer
    ours = AutoTokenizer.from_pretrained(tmp_path / "dst")
    for text in ("12 34", "to die", "Ay, 1234\n e\u0301"):
        assert ours(text).input_ids == theirs(text).input_ids
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("case", ["llama"])
@pytest.mark.parametrize(
    ("split", "begin", "number"),
    [("llama-bpe", [1], 1), ("tekken", [1], 1), ("midm-2.0", [1], 1), ("gpt-2", [], 2)],
)
def test_words_in_the_vocabulary_of_llama_3_are_a_token_without_merges(
    case, split, begin, number, model, tiny_tokenizer, tmp_path
):
    def describe(writer):
        writer.add_tokenizer_pre(split)
        writer.kv_data[0]["tokenizer.ggml.merges"].value = ["c d", "c d"]  # none makes "ab"

    write_gguf(tmp_path / "model.gguf", model, CASES[case][0], tiny_tokenizer, describe)
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "dst")
    made = AutoTokenizer.from_pretrained(tmp_path / "dst")
    ids = made("ab").input_ids
    assert ids[: len(begin)] == begin
    assert len(ids) == len(begin) + number
    assert made.decode(ids[len(begin) :]) == "ab"
