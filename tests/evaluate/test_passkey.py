import json
import re
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from coca_hf.errors import CocaError
from coca_hf.evaluate.batches import Batches
from coca_hf.evaluate.passkey import FILLER, INSTRUCTION, VARIANTS, Case, answers, passkey_rows
from tests.conftest import refused
from tests.evaluate.reader import reads
from tests.evaluate.runs import passkey_case, raw_of, run_of

SHORTEST = 227  # bytes of the prompt without any filler
FILLER_LEN = 90  # and of one more filler, with its line break
SENTENCES = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)


def measure(loaded, out, length=320, num_cases=100, new_tokens=None, batch_size=None, **options):
    run = run_of(loaded, out, length, batch_size=batch_size)
    (row,) = passkey_rows(run, num_cases, new_tokens, **options)
    return row


def read_key(prompt):
    return "It is " + re.search(r"The passkey is (\d+)", prompt).group(1)


def test_the_prompt_is_the_papers_word_for_word(tiny_tokenizer):
    case = passkey_case(tiny_tokenizer, SHORTEST + 4 * FILLER_LEN + 2, 0, 2)
    before = round(case.depth * 4)
    assert 0 < before < 4
    assert VARIANTS["paper"].new_tokens == 64
    assert tiny_tokenizer.decode(case.token_ids) == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there.\n\n"
        + "\n".join([SENTENCES] * before)
        + f"\n\nThe passkey is {case.key}. Remeber it. {case.key} is the passkey.\n\n"
        + "\n".join([SENTENCES] * (4 - before))
        + "\n\nWhat is the passkey?"
    )


def test_depths_are_spread_over_the_whole_prompt(tiny_tokenizer):
    depths = [passkey_case(tiny_tokenizer, 760, 0, number).depth for number in range(120)]
    shares = [sum(low <= 4 * depth < low + 1 for depth in depths) / 120 for low in range(4)]
    assert {0.0, 1.0} < set(depths)
    assert all(0.1 < share < 0.4 for share in shares)
    assert sum(depths) / 120 == pytest.approx(0.5, abs=0.08)


def test_a_case_depends_on_seed_length_and_number_only(tiny_tokenizer):
    case = passkey_case(tiny_tokenizer, 500, 7, 3)
    assert passkey_case(tiny_tokenizer, 500, 7, 3) == case
    others = [(500, 7, 4), (500, 8, 3), (501, 7, 3)]
    assert len({case.key, *(passkey_case(tiny_tokenizer, *other).key for other in others)}) == 4


@pytest.mark.parametrize(
    ("reply", "new_tokens", "share"),
    [
        (lambda prompt: "The passkey is 12345", 64, 0.0),
        (lambda prompt: "", 64, 0.0),
        (lambda prompt: "x" * 20 + read_key(prompt), 20, 0.0),
        (lambda prompt: "x" * 20 + read_key(prompt), 40, 1.0),
    ],
)
def test_only_a_key_within_the_new_tokens_counts(
    tiny_tokenizer, tmp_path, reply, new_tokens, share
):
    row = measure(reads(tiny_tokenizer, reply), tmp_path, num_cases=4, new_tokens=new_tokens)
    assert (row["value"], row["error"]) == (share, None)


def test_accuracy_is_the_share_of_correct_cases_and_each_has_a_record(tiny_tokenizer, tmp_path):
    def even_only(prompt):
        return read_key(prompt) if int(read_key(prompt)[-1]) % 2 == 0 else "no idea"

    row = measure(reads(tiny_tokenizer, even_only), tmp_path, 400, 20, 12, seed=2)
    records = raw_of(row, tmp_path, "cases")
    assert [record["case"] for record in records] == list(range(20))
    assert all(record["correct"] == (record["key"] % 2 == 0) for record in records)
    assert 0 < row["value"] < 1
    assert row["value"] == sum(record["correct"] for record in records) / 20
    first = passkey_case(tiny_tokenizer, 400, 2, 0)
    assert all(records[0][name] == getattr(first, name) for name in ("key", "depth", "distance"))
    assert {record["row_id"] for record in records} == {row["row_id"]}


@pytest.mark.parametrize("kind", ["llama", "coca"])
def test_a_batch_gives_the_answers_of_single_cases(kind, request):
    loaded = request.getfixturevalue(kind)
    loaded.model.double()
    lengths = (SHORTEST, 700, 325)  # cases that need much padding
    cases = [passkey_case(loaded.tokenizer, length, 0, length) for length in lengths]
    together = answers(loaded, cases, 9, Batches(3))
    alone = [answers(loaded, [case], 9, Batches())[0] for case in cases]
    assert together == alone
    assert len(set(map(tuple, alone))) == 3


def test_decoding_is_greedy_whatever_the_checkpoint_prefers(llama):
    cases = [passkey_case(llama.tokenizer, 320, 0, number) for number in range(2)]
    greedy = answers(llama, cases, 12, Batches())
    preferred = {"do_sample": True, "temperature": 9.0, "repetition_penalty": 5.0}
    llama.model.generation_config.update(**preferred, min_new_tokens=3)
    assert answers(llama, cases, 12, Batches()) == greedy


def test_an_end_of_text_that_is_no_token_is_refused_in_one_line(llama):
    llama.model.generation_config.eos_token_id = ["x"]
    case = passkey_case(llama.tokenizer, 320, 0, 0)
    message = r"got eos_token_id \['x'\] for generation, expected token ids or null; correct its"
    refused(message, answers, llama, [case], 12, Batches())


def test_rope_is_fixed_for_the_prompt_and_the_new_tokens(llama, tmp_path):
    list(passkey_rows(run_of(llama, tmp_path, 400, ropes="dynamic:2"), 1, 13))
    stretch, head_dim = 2.0 * (400 + 13) / 64 - 1, 8
    base = 10000.0 * stretch ** (head_dim / (head_dim - 2))
    second = llama.model.model.rotary_emb.inv_freq[1].item()
    assert second == pytest.approx(base ** (-2 / head_dim))


def test_a_length_too_short_for_the_prompt_is_refused_with_the_shortest_that_does(llama, tmp_path):
    least = f"got {SHORTEST - 1}, expected at least {SHORTEST} tokens: the passkey prompt without"
    with pytest.raises(CocaError, match=f"--lengths: {least} any filler"):
        passkey_rows(run_of(llama, tmp_path, 500, SHORTEST - 1), 3)
    assert not (tmp_path / "rows.jsonl").exists()  # nothing was measured before the refusal
    passkey_rows(run_of(llama, tmp_path, SHORTEST), 3)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_logit_is_an_error_of_the_row_and_minus_infinity_rules_a_token_out(
    llama, tmp_path, sign
):
    llama.model.lm_head.register_forward_hook(
        lambda *given: given[-1].index_fill(-1, torch.tensor(7), sign * torch.inf)
    )
    row = measure(llama, tmp_path, num_cases=2, new_tokens=3)
    expected = (None, "the model's logits are infinite") if sign > 0 else (0.0, None)
    assert (row["value"], row["error"]) == expected


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_scored_keys_that_are_no_numbers_are_an_error_of_the_row(llama, tmp_path, number):
    nn.init.constant_(llama.model.lm_head.weight, number)
    row = measure(llama, tmp_path, num_cases=2, variant="landmark")
    assert (row["value"], row["error"]) == (None, "the model's loss is nan")


@pytest.fixture(scope="module")
def bpe_tokenizer():
    """400 tokens: whole words, parts of words, and numbers of one to three digits."""
    words = [FILLER, INSTRUCTION, *(str(number) for number in range(100, 999, 7))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(words, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("length", [210, 333, 1009])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts_of_subwords_fill_their_length_with_the_key_in_its_place(
    variant, length, bpe_tokenizer
):
    """Tokens have many sizes, and filler cut inside a word can take more of them than the whole
    word.
    """
    kind = VARIANTS[variant]
    room = len(bpe_tokenizer(FILLER + "\n\n")["input_ids"]) if variant == "paper" else 4
    for number in range(12):
        case = passkey_case(bpe_tokenizer, length, 5, number, variant)
        assert length - room <= len(case.token_ids) <= length
        assert kind.keys[0] <= case.key <= kind.keys[1]
        sentence = kind.sentence.format(key=case.key)
        text = bpe_tokenizer.decode(case.token_ids)
        assert bpe_tokenizer(text)["input_ids"] == case.token_ids
        assert bpe_tokenizer.decode(case.token_ids[-case.distance :]).startswith(sentence)
        before, after = (part.count(FILLER) for part in text.split(sentence))
        if variant == "paper":
            assert case.depth == (before / (before + after) if before + after else 0.0)


def test_a_tokenizer_that_merges_the_answer_with_the_word_before_it_is_refused(llama, tmp_path):
    """As tokenizers do whose tokens span words: the answer would be scored without its beginning."""
    spec = json.loads(llama.tokenizer.backend_tokenizer.to_str())
    spec["pre_tokenizer"]["use_regex"] = False
    vocab = spec["model"]["vocab"]
    vocab["sĠ"] = vocab.pop("ÿ")  # Ġ is the space of byte-level tokenizers
    spec["model"]["merges"] = [["s", "Ġ"]]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)))
    loaded = replace(llama, tokenizer=tokenizer)
    message = r"got a tokenizer that merges the end of '.* pass key is' with the answer, \d{5}, "
    with pytest.raises(CocaError, match=message):
        passkey_rows(run_of(loaded, tmp_path, 500), 3, variant="landmark")
    assert not (tmp_path / "rows.jsonl").exists()


def test_cases_take_the_depths_of_a_grid_in_turn(tiny_tokenizer):
    """With 22 fillers of 90 bytes, grid points are at most half a filler off."""
    length, grid = SHORTEST + 22 * FILLER_LEN + 2, [0, 0.25, 0.5, 0.75, 1]
    cases = [passkey_case(tiny_tokenizer, length, 0, number, depths=5) for number in range(10)]
    assert [case.depth for case in cases] == pytest.approx(grid * 2, abs=0.5 / 22)
    assert (cases[0].depth, cases[4].depth) == (0.0, 1.0)
    assert len({case.key for case in cases}) == 10


@pytest.mark.parametrize("variant", ["yarn", "longlora"])
@pytest.mark.parametrize("length", [300, 777])
def test_prompts_of_other_scripts_are_theirs_and_never_too_long(variant, length, tiny_tokenizer):
    for number in range(8):
        case = passkey_case(tiny_tokenizer, length, 3, number, variant)
        # Filler is cut by characters, and a byte is a token
        assert length - 2 < len(case.token_ids) <= length
        assert 1 <= case.key <= 50_000
        task, prefix, line, suffix, question = tiny_tokenizer.decode(case.token_ids).split("\n")
        garbage = " ".join([SENTENCES] * 9)
        assert task.startswith("There is an important info hidden inside a lot of irrelevant text.")
        assert garbage.startswith(prefix)
        assert garbage.startswith(suffix)
        assert case.depth == len(prefix) / len(prefix + suffix)
        assert line == f"The pass key is {case.key}. Remember it. {case.key} is the pass key."
        assert question == "What is the pass key? The pass key is"
        assert tiny_tokenizer.decode(case.token_ids[-case.distance :]).startswith(line)


CASE = Case(key=417, answer=417, depth=0.5, distance=9, token_ids=[1], answer_ids=[32, 52, 49, 55])
FOUND = {
    variant: [[(text, []) for text in texts] for texts in both]
    for variant, both in {
        "paper": (("It is 417.", "1417", " 417"), ("41 7", "", "four")),
        "yarn": (
            (" 417.", "well, 417 or 5", "0417"),
            (" 5 or 417", "4170", "", "none", "417" * 1500),  # int() takes 4,300 digits
        ),
    }.items()
}
IDS = [32, 52, 49, 55]  # LongLoRA wants exactly these tokens first
FOUND["longlora"] = [[("", IDS), ("", [*IDS, 9])], [("", IDS[:3]), ("", [9, *IDS])]]


@pytest.mark.parametrize("variant", FOUND)
def test_scoring_is_that_of_the_script(variant):
    right, wrong = FOUND[variant]
    assert all(VARIANTS[variant].found(CASE, text, ids) for text, ids in right)
    assert not any(VARIANTS[variant].found(CASE, text, ids) for text, ids in wrong)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_that_copies_the_key_scores_one_in_every_variant(tiny_tokenizer, tmp_path, variant):
    copier = reads(tiny_tokenizer, lambda prompt: re.search(r"key is( \d+)", prompt).group(1))
    row = measure(copier, tmp_path, 400, 6, variant=variant, depths=3, batch_size=5)
    assert (row["value"], row["variant"], row["depths"]) == (1.0, variant, 3)
    assert (row["length"], row["cases"]) == (400, 6)
    if variant == "landmark":  # which is scored without generation
        assert (row["new_tokens"], row["error"]) == (0, None)
        assert row["nats_per_digit"] < 1e-6
        cases = raw_of(row, tmp_path, "cases")
        assert all(case["output"] == f" {case['key']}" for case in cases)


def test_nats_per_digit_are_those_of_all_cases(coca, tmp_path):
    row = measure(coca, tmp_path, 330, 3, seed=4, variant="landmark")
    cases = raw_of(row, tmp_path, "cases")
    assert [case["answer_tokens"] for case in cases] == [6] * 3  # a space and five digits
    assert row["nats_per_digit"] == pytest.approx(sum(case["nll"] for case in cases) / 15)


@pytest.mark.parametrize(
    ("variant", "new_tokens", "problem"),
    [
        ("landmark", 6, "but --variant landmark generates nothing; leave it out"),
        ("longlora", 5, "expected at least 6, the tokens of a key"),
    ],
)
def test_new_tokens_that_are_too_few_or_of_no_use_are_refused(
    coca, tmp_path, variant, new_tokens, problem
):
    with pytest.raises(CocaError, match=f"--new-tokens: got {new_tokens}, {problem}"):
        measure(coca, tmp_path, 330, 9, new_tokens, variant=variant)
