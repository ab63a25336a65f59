import copy
import re

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from coca_hf.errors import CocaError
from coca_hf.evaluate.answers import Case, score_answers
from coca_hf.evaluate.batches import Batches
from coca_hf.evaluate.passkey import FILLER, VARIANTS
from coca_hf.evaluate.recall import recall_rows
from coca_hf.tokens import around_text
from tests.evaluate.conftest import put_around_texts
from tests.evaluate.reader import reads
from tests.evaluate.runs import passkey_case, raw_of, recall_case, run_of


def looked_up(prompt):
    """The value of the key at the end, as a reader of the list would give it."""
    key = prompt.rsplit("\n", 1)[1].removesuffix(":")
    return " " + re.search(rf"^{key}: (\d+)$", prompt, re.MULTILINE).group(1)


def measure(loaded, out, length=260, batch_size=None, **options):
    (row,) = recall_rows(run_of(loaded, out, length, batch_size=batch_size), **options)
    return row


@pytest.mark.parametrize(("length", "pairs"), [(433, 8), (701, 5), (613, 3)])
def test_a_list_fills_its_length_and_asks_for_one_of_its_lines(tiny_tokenizer, length, pairs):
    depths, asked = [], set()
    for number in range(20):
        case = recall_case(tiny_tokenizer, length, 3, number, pairs)
        text = tiny_tokenizer.decode(case.token_ids)
        lines = re.findall(r"^(\d+): (\d+)$", text, re.MULTILINE)
        assert length - len(FILLER) - 1 <= len(case.token_ids) <= length
        assert len({key for key, _ in lines}) == len(lines) == pairs
        assert text.endswith(f"\n{case.key}:")
        assert looked_up(text) == f" {case.answer}" == tiny_tokenizer.decode(case.answer_ids)
        from_line = text[-case.distance :]
        assert from_line.startswith(f"{case.key}: {case.answer}\n")
        filler = text.count(FILLER)
        assert case.depth == pytest.approx(1 - from_line.count(FILLER) / filler)
        depths.append(case.depth)
        asked.add(lines.index((str(case.key), str(case.answer))))
    assert asked == set(range(pairs))
    assert min(depths) < 0.2
    assert max(depths) > 0.8


def test_a_case_depends_on_seed_length_pairs_and_number_only(tiny_tokenizer):
    case = recall_case(tiny_tokenizer, 300, 7, 3, 8)
    assert recall_case(tiny_tokenizer, 300, 7, 3, 8) == case
    others = [(300, 7, 4, 8), (300, 8, 3, 8), (301, 7, 3, 8), (300, 7, 3, 9)]
    answers = {case.answer, *(recall_case(tiny_tokenizer, *other).answer for other in others)}
    assert len(answers) == 5


@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_a_prompt_omits_the_tokens_that_end_a_text(tiny_tokenizer, variant):
    ends = copy.deepcopy(tiny_tokenizer)
    put_around_texts(ends, "<s> $A </s>")
    case, expected = (
        passkey_case(tokenizer, 501, 7, 3, variant)
        if variant
        else recall_case(tokenizer, 501, 7, 3, 8)
        for tokenizer in (ends, tiny_tokenizer)
    )
    assert case.token_ids[0] == 1
    assert case.token_ids[-9:] == expected.token_ids[-9:]
    assert case.answer_ids == tiny_tokenizer(f" {case.answer}")["input_ids"]


def tokenizer_of(words, unknown, template):
    """A tokenizer of whole words, the first of which are <s> and </s>."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unknown))
    special_tokens = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special_tokens)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown)


@pytest.mark.parametrize(
    ("template", "around"), [("<s> $A </s>", ([0], [1])), ("<s> $A", ([0], [])), ("$A", ([], []))]
)
def test_special_tokens_are_told_from_a_text_that_the_tokenizer_does_not_know(template, around):
    assert around_text(tokenizer_of(["<s>", "</s>", "b"], "<s>", template)) == around


def test_a_tokenizer_that_knows_no_text_is_refused():
    with pytest.raises(CocaError, match="whose special tokens cannot be told from its text, exp"):
        around_text(tokenizer_of(["<s>", "</s>"], "<s>", "<s> $A <s> </s> </s>"))


def test_a_model_that_looks_up_finds_all_and_one_that_guesses_none(tiny_tokenizer, tmp_path):
    row = measure(reads(tiny_tokenizer, looked_up), tmp_path / "all", num_cases=7, batch_size=3)
    assert (row["value"], row["error"], row["cases"]) == (1.0, None, 7)
    assert row["nll"] < 1e-6
    row = measure(reads(tiny_tokenizer, lambda prompt: " 12345"), tmp_path / "none", num_cases=7)
    assert row["value"] == 0.0
    assert row["nll"] > 1


@torch.no_grad()
def test_losses_are_those_of_a_loop_over_cases(coca, tmp_path):
    coca.model.double()
    row = measure(coca, tmp_path, num_cases=5, seed=2, batch_size=2)
    lines = raw_of(row, tmp_path, "cases")
    for number, line in enumerate(lines):
        case = recall_case(coca.tokenizer, 260, 2, number, 8)
        ids = torch.tensor([case.token_ids + case.answer_ids])
        logits = coca.model(ids).logits[0, len(case.token_ids) - 1 : -1].log_softmax(-1)
        nll = -logits.gather(1, torch.tensor(case.answer_ids)[:, None]).sum().item()
        assert line["nll"] == pytest.approx(nll, rel=1e-6)
        assert line["output"] == coca.tokenizer.decode(logits.argmax(-1).tolist())
    nll, count = (sum(line[name] for line in lines) for name in ("nll", "answer_tokens"))
    assert row["nll"] == pytest.approx(nll / count)


def test_greedy_decoding_gives_what_is_found_without_generation(llama):
    """Prompts of several lengths in one batch, and the model's own greedy answers among the answers
    asked for.
    """
    prompts = [[9, 4, 30, 7], [12, 5], [100, 101, 102, 103, 104, 90], [40, 41, 42]]
    greedy = []
    for ids in prompts:
        said = llama.model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)
        greedy.append(said[0, len(ids) :].tolist())
    asked = [greedy[0], [8, *greedy[1][1:]], greedy[2], [*greedy[3][:2], 8]]
    cases = [Case(0, 0, 0.0, 0, *each) for each in zip(prompts, asked, strict=True)]
    scores = score_answers(llama.model, cases, Batches(3))
    found = [score.likeliest == answer for score, answer in zip(scores, asked, strict=True)]
    assert found == [True, False, True, False]


def test_a_length_without_room_for_the_list_is_refused_with_the_least(coca, tmp_path):
    said = r"--lengths: got 60, expected at least \d+ tokens for a list of 4"
    with pytest.raises(CocaError, match=said) as error:
        measure(coca, tmp_path, length=60, pairs=4)
    least = int(re.search(r"least (\d+)", str(error.value)).group(1))
    assert measure(coca, tmp_path, length=least, pairs=4, num_cases=3)["error"] is None
