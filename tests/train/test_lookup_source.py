"""`{synthetic: lookups}` in a recipe: its share, its marked answers, and their weight."""

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy, kl_div
from transformers import LlamaForCausalLM

from coca_hf.train.model import load_model
from coca_hf.train.objectives import answer_loss, answer_weights, distillation_loss
from coca_hf.train.recipe import Source, load_recipe
from coca_hf.train.stages import run_recipe
from tests.train.corpora import make_corpus
from tests.train.layouts import DDP, Run, succeed
from tests.train.results import log_lines, logged

SEQ_LEN, REACH = 170, 901
SYNTHETIC = Source(synthetic="lookups", weight=4)


@pytest.fixture
def corpus(words, digits, tiny_tokenizer, tmp_path):
    def make(sources=(words, SYNTHETIC, digits), directory=tmp_path / "prepared", **options):
        return make_corpus(sources, tiny_tokenizer, SEQ_LEN, directory, 2, seed=5, **options)

    return make


def take(blocks, count: int) -> list[dict[str, list]]:
    return [{name: row.tolist() for name, row in blocks[number].items()} for number in range(count)]


def test_its_weight_is_its_share_of_the_blocks_and_of_all_answers(corpus):
    blocks = corpus().prepare(200)
    drawn = take(blocks, 200)
    synthetic = ["synthetic" in blocks.sources_of(number, 1) for number in range(200)]
    assert sum(synthetic) == pytest.approx(100, abs=25)
    assert f"{sum(synthetic)} of synthetic lookups" in blocks.sources_of(0, 200)
    with_answers = [any(block["answers"]) for block in drawn]
    assert not any(marked for marked, made in zip(with_answers, synthetic, strict=True) if not made)
    assert sum(with_answers) > 0.6 * sum(synthetic)
    assert max(max(block["input_ids"]) for block in drawn) < 259
    assert all(block["input_ids"] == block["labels"] for block in drawn)


def test_a_preparation_that_is_extended_makes_the_same_lookups(corpus, tmp_path):
    plain = take(corpus().prepare(90), 90)
    for count in (40, 41, 90):
        blocks = corpus(directory=tmp_path / "in-parts").prepare(count)
    assert take(blocks, 90) == plain


def test_nothing_synthetic_is_held_out_and_nothing_that_is_held_out_is_trained_on(corpus, words):
    held_out = corpus((words, SYNTHETIC)).prepare(1).held_out
    assert torch.equal(held_out, corpus((words,)).prepare(1).held_out)


def test_a_recipe_without_it_has_no_answers(corpus, words):
    assert set(corpus((words,)).prepare(1)[0]) == {"input_ids", "labels"}


def test_half_of_the_blocks_skip_positions_to_at_most_their_reach_and_each_differently(corpus):
    drawn = take(corpus(skip_positions=REACH).prepare(120), 120)
    skipping = [block for block in drawn if block["position_ids"] != list(range(SEQ_LEN))]
    assert len(skipping) == pytest.approx(60, abs=20)
    for block in drawn:
        steps = torch.tensor(block["position_ids"]).diff()
        assert block["position_ids"][0] == 0
        assert steps.min() >= 1
        assert block["position_ids"][-1] < REACH
        assert block["attention_mask"] == [1] * SEQ_LEN
    assert max(block["position_ids"][-1] for block in skipping) > 2 * SEQ_LEN
    assert len({tuple(block["position_ids"]) for block in skipping}) == len(skipping)


@pytest.fixture
def predictions():
    """Two models' logits, (b, m, vocabulary), labels, and answers; the last block has none."""
    draw = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 3, 11, 7, generator=draw)
    labels = torch.randint(7, (3, 11), generator=draw)
    answers = torch.zeros(3, 11, dtype=torch.bool)
    answers[0, 4], answers[1, 2:9] = True, True
    return ours, theirs, labels, answers


def mean_over_answers(losses, answers):
    """losses: (b, m - 1), after the first token; mean over blocks of that over answers."""
    rows = zip(losses, answers[:, 1:], strict=True)
    parts = [row[marked].mean() if marked.any() else row.new_zeros(()) for row, marked in rows]
    return torch.stack(parts).mean()


def test_the_loss_on_answers_is_the_mean_over_those_of_each_block(predictions):
    ours, _, labels, answers = predictions
    expected = cross_entropy(ours[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    found = answer_loss(ours, labels, answer_weights(answers))
    torch.testing.assert_close(found, mean_over_answers(expected, answers))


def test_distillation_adds_the_mean_over_answers_to_that_over_tokens(predictions):
    ours, theirs, _, answers = predictions
    logarithms = ours.log_softmax(-1), theirs.log_softmax(-1)
    divergence = kl_div(*logarithms, log_target=True, reduction="none").sum(-1)
    expected = divergence.mean() + 3 * mean_over_answers(divergence[:, :-1], answers)
    found = distillation_loss(ours, theirs, weights=1 + 3 * answer_weights(answers))
    torch.testing.assert_close(found, expected)


def lookups_recipe(recipe_path, *settings):
    path = load_recipe(recipe_path).data.sources[0].path
    sources = f"data.sources=[{{path: '{path}', weight: 3}}, {{synthetic: lookups, weight: 6}}]"
    data = ["data.seq_len=100", "data.held_out_blocks=2", sources]
    return load_recipe(recipe_path, [*data, "config.max_position_embeddings=400", *settings])


@pytest.mark.parametrize("positions", [[], ["data.skip_positions=333"]])
def test_a_stage_adds_the_loss_on_answers_and_logs_it(
    recipe_path, tiny_llama_dir, tmp_path, positions
):
    teacher = LlamaForCausalLM.from_pretrained(tiny_llama_dir, max_position_embeddings=333)
    teacher.save_pretrained(tmp_path / "teacher")
    counted = ["stages.k.answer_weight=3", "stages.full.answer_weight=2"]
    short = [f"stages.{stage}.max_steps=2" for stage in ("k", "qkv", "full")]
    settings = [f"teacher={tmp_path / 'teacher'}", *counted, *short]
    mixed = "stages.full.objective={lm: 0.5, distill: 0.25}"
    run_recipe(lookups_recipe(recipe_path, *settings, mixed, *positions), tmp_path / "out")
    for line in log_lines(tmp_path / "out/1-k"):
        assert line["loss_answers"] > 1
        assert line["loss"] == pytest.approx(line["loss_lm"] + 3 * line["loss_answers"], rel=1e-4)
    for line in log_lines(tmp_path / "out/3-full"):
        text = 0.5 * (line["loss_lm"] + 2 * line["loss_answers"])
        assert line["loss"] == pytest.approx(text + 0.25 * line["loss_distill"], rel=1e-4)
    assert "loss_answers" not in (tmp_path / "out/2-qkv/log.jsonl").read_text()
    assert "- synthetic lookups, weight 6" in (tmp_path / "out/3-full/README.md").read_text()


def test_batches_do_not_change_the_weight_of_answers(recipe_path, tmp_path):
    losses = []
    for batch in (4, 1):
        settings = ["training.global_batch_size=4", f"training.per_device_train_batch_size={batch}"]
        recipe = lookups_recipe(recipe_path, *settings, "stages.k.answer_weight=3")
        run_recipe(recipe, tmp_path / str(batch), stage="k")
        losses.append(logged(tmp_path / str(batch) / "1-k"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_skipped_positions_do_not_separate_documents(tiny_coca_dir, tiny_llama_dir, corpus):
    blocks = corpus(skip_positions=REACH).prepare(9)
    block = next(blocks[n] for n in range(9) if blocks[n]["position_ids"][-1] >= SEQ_LEN)
    given = {name: block[name][None] for name in ("input_ids", "position_ids", "attention_mask")}
    changed = {**given, "input_ids": given["input_ids"].clone()}
    changed["input_ids"][0, 0] += 1
    without_mask = {"attention_mask": None}
    for directory in (tiny_coca_dir, tiny_llama_dir):
        model = load_model(str(directory))

        @torch.no_grad()
        def last(inputs, model=model):
            return model(**inputs, use_cache=False).logits[0, -1]

        assert not torch.equal(last(given), last(changed))
        ours, theirs = last(given | without_mask), last(changed | without_mask)
        assert torch.equal(ours, theirs), "only the mask says so"


@pytest.mark.real
def test_two_processes_have_the_losses_of_one(recipe_path, tmp_path):
    settings = ["data.skip_positions=333", "training.global_batch_size=4"]
    settings.append("stages.k.answer_weight=3")
    one, two = ([*settings, f"training.per_device_train_batch_size={batch}"] for batch in (4, 2))
    recipe = lookups_recipe(recipe_path, *one)
    run_recipe(recipe, tmp_path / "one", stage="k")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(lookups_recipe(recipe_path, *two).to_dict()))
    succeed(tmp_path, [Run([path, "--stage", "k", "--out", tmp_path / "two"], DDP)])
    assert logged(tmp_path / "two/1-k") == pytest.approx(logged(tmp_path / "one/1-k"), rel=1e-4)
