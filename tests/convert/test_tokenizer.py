"""A converted checkpoint has the source's tokenizer: the same tokens and the same chats."""

import json
import shutil

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import (
    AutoTokenizer,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from coca_hf import convert_checkpoint
from tests.conftest import TINY
from tests.convert.checkpoints import assert_same_weights, edit_json, files_of, refuses

SAMPLES = (
    "Half a league, half a league,\n\nHalf a league  onward",
    " \t leading, trailing \n\n\n",
    "e\u0301 and \u00e9, ﬁ, ½, \u200d, 漢字, 🤷🏽\u200d♂️, \x00\x7f",
    "def f(x):\n    return x ** 2 if x != 1_000_000 else 0x1F",
    "<s>a</s> <|x|><unk>",
    "HELLOWorld can't WE'LL 12345",
    "",
)
CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]


def assert_same_tokenizer(source, converted):
    theirs, ours = (AutoTokenizer.from_pretrained(directory) for directory in (source, converted))
    assert type(ours) is type(theirs)
    for text in SAMPLES:
        ids = theirs(text).input_ids
        assert ours(text).input_ids == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.chat_template == theirs.chat_template
    return ours


def test_all_chat_templates_come_along(source, tmp_path):
    folder = source / "additional_chat_templates"
    folder.mkdir()
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    (folder / "rag.jinja").write_text("rag: {% for m in messages %}{{ m.content }}</s>{% endfor %}")
    (folder / "tool_use.jinja").write_text("tool: {{ messages[0].content }}")
    (folder / "notes.txt").write_text("not a template")
    convert_checkpoint(source, tmp_path / "dst")
    tokenizer = assert_same_tokenizer(source, tmp_path / "dst")
    assert set(tokenizer.chat_template) == {"default", "rag", "tool_use"}
    expected = {"default": "<s>Who?<s>I.", "rag": "rag: Who?</s>I.</s>", "tool_use": "tool: Who?"}
    for name, chat in expected.items():
        assert tokenizer.apply_chat_template(CHAT, chat_template=name, tokenize=False) == chat
    assert not (tmp_path / "dst" / "additional_chat_templates" / "notes.txt").exists()


def test_links_of_additional_chat_templates_out_of_the_checkpoint_are_refused(source, tmp_path):
    (tmp_path / "secret.jinja").write_text("secret")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").symlink_to(tmp_path / "secret.jinja")
    message = r"rag\.jinja: is a link to .*secret\.jinja, outside the checkpoint"
    refuses(message, source, tmp_path / "dst")
    shutil.rmtree(source / "additional_chat_templates")
    (source / "additional_chat_templates").symlink_to(tmp_path)
    message = r"secret\.jinja: is a link to .*secret\.jinja, outside the checkpoint"
    refuses(message, source, tmp_path / "dst")


def test_files_of_other_tokenizers_come_along(source, tmp_path):
    names = ["vocab.txt", "spiece.model", "tokenizer.model.v3", "tekken.json", "qwen.tiktoken"]
    names.append("tokenizer.4.0.json")
    for name in [*names, "optimizer.bin"]:
        (source / name).write_bytes(b"\x00mine")
    convert_checkpoint(source, tmp_path / "dst")
    assert [(tmp_path / "dst" / name).read_bytes() for name in names] == [b"\x00mine"] * 6
    assert not (tmp_path / "dst" / "optimizer.bin").exists()


def test_a_tokenizer_whose_class_follows_from_the_model_type_stays_the_same(source, tmp_path):
    """Distilled Qwen2 models name LLaMA's class, and transformers loads Qwen2's by model_type."""
    fields = TINY | {"vocab_size": 259}
    Qwen2ForCausalLM(Qwen2Config(**fields)).save_pretrained(source)
    edit_json(source / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    convert_checkpoint(source, tmp_path / "dst")
    ours = assert_same_tokenizer(source, tmp_path / "dst")
    assert type(ours).__name__.startswith("Qwen2Tokenizer")


@pytest.mark.parametrize(
    "named", [False, True], ids=["without a config", "config.json has its class"]
)
def test_a_tokenizer_whose_own_config_names_no_class_stays_the_same(source, tmp_path, named):
    if named:
        edit_json(source / "tokenizer_config.json", tokenizer_class=None)
        edit_json(source / "config.json", tokenizer_class="GPTNeoXTokenizerFast")
    else:
        (source / "tokenizer_config.json").unlink()
    convert_checkpoint(source, tmp_path / "dst")
    assert_same_tokenizer(source, tmp_path / "dst")


@pytest.mark.parametrize("fix", [True, None])
def test_the_corrected_pattern_of_mistral_stays_corrected(source, tmp_path, fix):
    """Transformers corrects it for large vocabularies of a Mistral from before version 5."""
    config = MistralConfig(**(TINY | {"num_hidden_layers": 1}), vocab_size=259)
    MistralForCausalLM(config).save_pretrained(source)
    edit_json(source / "config.json", transformers_version="4.50.0")
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"token {number}": number for number in range(259, 100_100)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    split = pre_tokenizers.Split(Regex(r"[a-z]+|[^a-z]"), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.save(str(source / "tokenizer.json"))
    if fix is not None:
        edit_json(source / "tokenizer_config.json", fix_mistral_regex=fix)
    convert_checkpoint(source, tmp_path / "dst")
    ours = assert_same_tokenizer(source, tmp_path / "dst")
    content = json.loads(ours.backend_tokenizer.to_str())
    first = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    assert ("a-z" not in first) is bool(fix)


def test_a_tokenizer_that_cannot_be_loaded_is_copied_as_it_is(source, tmp_path):
    (source / "tokenizer.json").write_text("{}")
    convert_checkpoint(source, tmp_path / "dst")
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == "{}"


def test_calibration_does_not_change_the_tokenizer(source, tmp_path, calibrating):
    """Tokenizing a text turns off the truncation and the padding that tokenizer.json may ask for."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=7)
    tokenizer.save(str(source / "tokenizer.json"))
    convert_checkpoint(source, tmp_path / "dst", **calibrating)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "dst" / name).read_bytes() == (source / name).read_bytes()


def test_two_tokens_with_one_id_are_kept(source, tmp_path):
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"]["vocab"]["?"] = content["model"]["vocab"]["!"]
    (source / "tokenizer.json").write_text(json.dumps(content))
    if len(AutoTokenizer.from_pretrained(source).get_vocab()) < len(content["model"]["vocab"]):
        pytest.skip("this transformers (5.17 does) loads one of the two, at random")
    for number in range(5):  # which of the two is written is random
        convert_checkpoint(source, dst := tmp_path / f"dst{number}")
        assert (dst / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_source_that_is_deleted_meanwhile_still_gives_its_weights_and_tokenizer(source, tmp_path):
    convert_checkpoint(source, tmp_path / "expected")

    def delete(done, total):
        shutil.rmtree(source, ignore_errors=True)

    convert_checkpoint(source, tmp_path / "dst", progress=delete)
    assert_same_weights(tmp_path / "dst", tmp_path / "expected")
    made, expected = (files_of(tmp_path / name).keys() for name in ("dst", "expected"))
    assert made == expected
    assert_same_tokenizer(tmp_path / "expected", tmp_path / "dst")


def test_a_tokenizer_that_needs_its_own_code_is_copied_and_said_to_need_it(
    source, tmp_path, converts
):
    code = "from transformers import PreTrainedTokenizerFast as Fast\nclass Own(Fast): pass\n"
    (source / "tok_own.py").write_text(code)
    edit_json(
        source / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["tok_own.Own", None]},
    )
    line = (
        "  tokenizer             without SRC's own code (['tok_own.Own', None]), without which it "
    )
    line += f"cannot be loaded: copy its files into {tmp_path}/dst to have it\n"
    for option in ("--dry-run", "--overwrite"):
        assert line in converts(source, tmp_path / "dst", option)
    shutil.copy(source / "tok_own.py", tmp_path / "dst")
    theirs, ours = (
        AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
        for directory in (source, tmp_path / "dst")
    )
    assert type(ours).__name__ == "Own"
    assert ours(SAMPLES[0]).input_ids == theirs(SAMPLES[0]).input_ids


def test_a_tokenizer_config_that_cannot_be_read_is_copied_as_it_is(source, tmp_path):
    (source / "tokenizer_config.json").write_text("{broken")
    record = convert_checkpoint(source, tmp_path / "dst")
    assert (tmp_path / "dst" / "tokenizer_config.json").read_text() == "{broken"
    assert "tokenizer_not_taken" not in record


def test_a_tokenizer_that_loads_without_its_code_names_none(source, tmp_path):
    edit_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tok_own.Own"]})
    convert_checkpoint(source, tmp_path / "dst")
    assert_same_tokenizer(source, tmp_path / "dst")
    AutoTokenizer.from_pretrained(tmp_path / "dst", trust_remote_code=True)
