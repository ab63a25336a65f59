"""Sequence and token classifiers of every family."""

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from coca_hf import convert_checkpoint, patch_, unpatch_
from coca_hf.convert.config import FAMILIES, MODELS
from coca_hf.evaluate.loaded_model import load_model as load_for_evaluation
from coca_hf.train.model import load_model as load_for_training
from tests.conftest import refused
from tests.convert.checkpoints import load_clean
from tests.models.families import ONE_CASE_EACH, stock_config

HEADS = {
    "SequenceClassification": AutoModelForSequenceClassification,
    "TokenClassification": AutoModelForTokenClassification,
}
PAIRS = [(family, head) for family in FAMILIES for head in HEADS]
EVERY_CLASSIFIER = pytest.mark.parametrize(
    ("family", "head"),
    [pair for pair in PAIRS if MODELS[f"For{pair[1]}"].get(FAMILIES[pair[0]].config, None)],
)


def stock_classifier(family, head):
    """Transformers' own model with random weights, where no bias is zero."""
    torch.manual_seed(7)
    config = stock_config(ONE_CASE_EACH[family], id2label={0: "bad", 1: "so-so", 2: "good"})
    model = HEADS[head].from_config(config, attn_implementation="sdpa").double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def class_name(family, head):
    return MODELS[f"For{head}"][FAMILIES[family].coca_config].__name__


def padded():
    """Three texts, (3, 19), one padded on the right and one on the left, and their mask."""
    ids = torch.randint(1, 89, (3, 19), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[1, 11:] = mask[2, :6] = 0
    return ids * mask, mask


@EVERY_CLASSIFIER
def test_with_all_layers_kept_it_has_transformers_logits_beside_padding(tmp_path, family, head):
    stock = stock_classifier(family, head)
    stock.save_pretrained(tmp_path / "src")
    convert_checkpoint(tmp_path / "src", tmp_path / "dst", keep_layers=[0, 1, 2])
    loaded = load_clean(tmp_path / "dst", HEADS[head], dtype=torch.float64)
    assert type(loaded).__name__ == class_name(family, head)
    assert loaded.config.architectures == [type(loaded).__name__]
    assert loaded.config.id2label == {0: "bad", 1: "so-so", 2: "good"}
    ids, mask = padded()
    of_text = slice(None) if head == "SequenceClassification" else mask.bool()
    expected = stock(ids, attention_mask=mask).logits[of_text]
    assert expected.std() > 0.1
    for model in (loaded.eval(), patch_(copy.deepcopy(stock), keep_layers=[0, 1, 2])):
        got = model(ids, attention_mask=mask).logits[of_text]
        # angles are float32, and left padding moves positions
        assert (got - expected).abs().max() < 1e-5


@EVERY_CLASSIFIER
def test_a_converted_classifier_is_the_patched_one_which_can_be_unpatched(tmp_path, family, head):
    stock = stock_classifier(family, head).float()
    stock.save_pretrained(tmp_path / "src")
    record = convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    assert record["architecture"] == class_name(family, head)
    loaded = HEADS[head].from_pretrained(tmp_path / "dst")
    ids, mask = padded()
    before = stock(ids, attention_mask=mask).logits
    patched = patch_(stock, keep_original=True)
    assert type(patched) is type(loaded)
    logits = patched(ids, attention_mask=mask).logits
    assert torch.equal(loaded(ids, attention_mask=mask).logits, logits)
    assert (logits - before).abs().max() > 1e-2
    assert torch.equal(unpatch_(patched)(ids, attention_mask=mask).logits, before)
    card = (tmp_path / "dst" / "README.md").read_text()
    assert f"model = AutoModelFor{head}.from_pretrained(checkpoint, trust_remote_code" in card
    tag = {"SequenceClassification": "text", "TokenClassification": "token"}[head]
    assert f"pipeline_tag: {tag}-classification\n" in card


def test_what_needs_a_language_head_refuses_a_classifier(tmp_path, tiny_tokenizer, refusal, capsys):
    stock_classifier("llama", "SequenceClassification").float().save_pretrained(tmp_path / "src")
    tiny_tokenizer.save_pretrained(tmp_path / "src")
    convert_checkpoint(tmp_path / "src", tmp_path / "dst")
    (tmp_path / "text.txt").write_text("text " * 1000)
    printed = refusal(*(tmp_path / "src", tmp_path / "again", "--calibrate", tmp_path / "text.txt"))
    assert "--calibrate: got LlamaForSequenceClassification, expected a causal language" in printed
    dst = str(tmp_path / "dst")
    found = r"got CocaLlamaForSequenceClassification, expected a causal language model .CocaLlama"
    for trust_remote_code in (False, True):
        refused(found, load_for_evaluation, dst, trust_remote_code=trust_remote_code)
    refused(r"missing keys: lm_head.weight; .* keys: score.weight", load_for_training, dst)
