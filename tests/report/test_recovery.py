"""The recovery curve from a directory as coca-train writes it."""

import json
import math
import shutil

import pytest

from coca_hf import CocaError
from coca_hf.page import Grid, markdown
from coca_hf.report import read_page, write_report
from coca_hf.report.plots import draw
from coca_hf.report.recovery import read_recovery, recovery
from tests.conftest import refused
from tests.report.made import row, write_rows


def rewrite(path, change):
    """Change every line of a log."""
    lines = [change(number, json.loads(line)) for number, line in enumerate(path.open())]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines if line))


def record_of(tokens_seen, held_out) -> str:
    """A stage's training.json."""
    made = {"hardware": {"device": "cpu", "processes": 2}, "versions": {}, "seconds": 60}
    facts = {"tokens_seen": tokens_seen, "held_out": held_out, "date": "2026-11-27"}
    return json.dumps(facts | made)


@pytest.fixture
def out(tmp_path):
    """Two complete stages and one that has begun."""
    directory = tmp_path / "run"
    losses = {"1-k": (9.0, 5.0), "2-qkv": (5.0, 4.0), "10-full": (4.0, None)}
    for number, (stage, (before, after)) in enumerate(losses.items()):
        (directory / stage).mkdir(parents=True)
        seen = 100 * number
        lines = [
            {"step": 0, "held_out_loss": before, "tokens_seen": seen, "seconds": 0.0},
            {"step": 5, "loss": before - 0.5, "tokens_seen": seen + 50, "seconds": 10.0},
        ]
        if after:
            ends = {"tokens_seen": seen + 100, "seconds": 20.0}
            lines.append({"step": 10, "held_out_loss": after, **ends})
            record = record_of(seen + 100, {"before": before, "after": after})
            (directory / stage / "training.json").write_text(record)
        log = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / stage / "log.jsonl").write_text(log)
    (directory / "recipe.yaml").write_text("model: x\n")
    return directory


def curves_of(figure):
    """The axes, and the points of each line by its label."""
    axes = draw(figure.drawing, 5, 3, True).axes[0]
    return axes, {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def table_of(out):
    (losses,) = [part for part in recovery([read_recovery(out)]).parts if isinstance(part, Grid)]
    return losses.lines


def test_the_table_has_loss_and_perplexity_of_complete_stages(out):
    """In the order of their numbers, and also of a perplexity beyond any number."""
    first, *others = table_of(out)
    after = f"{math.exp(5):,.2f}"
    assert first == ["run", "k", "100", "9.0000", "5.0000", f"{math.exp(9):,.2f}", after]
    assert others == [["run", "qkv", "200", "5.0000", "4.0000", after, f"{math.exp(4):,.2f}"]]
    record = record_of(100, {"before": 1e4, "after": float("nan")})
    (out / "1-k/training.json").write_text(record)
    assert table_of(out)[0][3:] == ["10000.0000", "nan", "inf", "nan"]


def test_the_curve_has_every_loss_and_names_where_stages_begin(out):
    figure, _ = recovery([read_recovery(out)]).figures()
    axes, lines = curves_of(figure)
    assert lines["run, held out"] == [[0, 9], [100, 5], [100, 5], [200, 4], [200, 4]]
    assert lines["run, training"] == [[50, 8.5], [150, 4.5], [250, 3.5]]
    assert [text.get_text() for text in axes.texts] == ["k", "qkv", "full"]


@pytest.mark.parametrize(
    ("losses", "drawn"),
    [({"loss": 2.0, "loss_lm": 3.0, "loss_distill": 1.0}, 3.0), ({"loss": None}, None)],
    ids=["a mixed objective", "a bad first step"],
)
def test_the_loss_of_the_language_model_is_drawn_and_a_step_without_one_is_a_gap(
    out, losses, drawn
):
    with (out / "10-full/log.jsonl").open("a") as log:
        log.write(json.dumps({"step": 7, **losses, "tokens_seen": 260, "seconds": 15.0}) + "\n")
    figure, _ = recovery([read_recovery(out)]).figures()
    (curve,) = [curve for curve in figure.drawing.curves if "training" in curve.key.label]
    assert curve.values[2:] == [3.5, drawn]


def test_several_runs_are_drawn_without_their_stages_and_many_by_held_out_losses_alone(out):
    run = read_recovery(out)
    figure, _ = recovery([run] * 2).figures()
    assert not curves_of(figure)[0].texts
    assert "Dashed" not in figure.caption
    figure, _ = recovery([run] * 4).figures()
    assert [key.label for key in figure.keys] == ["run, held out"] * 4


@pytest.mark.parametrize(
    ("others", "is_noted"),
    [
        ({"tokens": 60, "xxh3_128": "a"}, False),
        ({"tokens": 60, "xxh3_128": "b"}, True),
        ({"tokens": 60}, False),  # of an older run, which may be the same
        ({"tokens": 40}, True),
    ],
)
def test_held_out_losses_of_different_text_have_a_notice(out, tmp_path, others, is_noted):
    other = shutil.copytree(out, tmp_path / "other")
    losses = {"before": 9.0, "after": 5.0}
    own = losses | {"tokens": 60, "xxh3_128": "a"}
    (out / "1-k/training.json").write_text(record_of(100, own))
    (other / "1-k/training.json").write_text(record_of(100, losses | others))
    page = markdown(recovery([read_recovery(run) for run in (out, other)]))
    assert ("> The held-out losses are of different text" in page) == is_noted


def test_against_seconds_the_calibration_and_the_stages_before_count(out):
    calibration = {"calibration": {"seconds": 300.0, "tokens": 1}}
    (out / "1-k/conversion.json").write_text(json.dumps(calibration))
    _, figure = recovery([read_recovery(out)]).figures()
    assert figure.name == "recovery-seconds"
    lines = {name: [x for x, _ in points] for name, points in curves_of(figure)[1].items()}
    assert lines["run, held out"] == [300, 320, 360, 380, 420]
    assert lines["run, training"] == [310, 370, 430]
    for damaged in ("{", '{"calibration": {"tokens": 1}}'):
        (out / "1-k/conversion.json").write_text(damaged)
        refused(r"1-k/conversion\.json: got no record", read_recovery, out)


def test_without_held_out_blocks_there_is_the_loss_in_training_alone(out):
    for log in out.glob("*/log.jsonl"):
        rewrite(log, lambda _, line: None if "held_out_loss" in line else line)
    for record in out.glob("*/training.json"):
        record.write_text(record_of(100, None))
    section = recovery([read_recovery(out)])
    assert not [part for part in section.parts if isinstance(part, Grid)]
    (figure,) = section.figures()
    assert [key.label for key in figure.keys] == ["run, training"]


DAMAGED = [  # file, content, and what is said of it
    ("log.jsonl", b"{}", "no line"),
    ("log.jsonl", b"[" * 100_000, "no line"),
    ("log.jsonl", b'{"tokens_seen": 5, "loss": "low"}', "no line"),
    ("training.json", b"\xff\xfe", "Invalid JSON"),
    ("training.json", b"[]", "no record"),
    (
        "training.json",
        b'{"tokens_seen": 5, "held_out": {"before": 1.0}}',
        r"held_out\.after: Field",
    ),
]


@pytest.mark.parametrize(("file", "content", "message"), DAMAGED, ids=range(6))
def test_damaged_files_are_named_in_one_line(out, file, content, message):
    (out / "2-qkv" / file).write_bytes(content + b"\n")
    with pytest.raises(CocaError, match=rf"2-qkv/{file}(, line 1)?: got .*{message}") as caught:
        read_recovery(out)
    assert "\n" not in str(caught.value)


def test_a_line_that_is_being_written_and_a_directory_beside_the_stages_are_left_out(out):
    expected = recovery([read_recovery(out)]).parts[-1]
    with (out / "10-full/log.jsonl").open("ab") as log:
        log.write(b'{"step": 6, "loss": 4.')
    (out / "my-notes").mkdir()
    (out / "my-notes/log.jsonl").write_text("bread\n")
    assert recovery([read_recovery(out)]).parts[-1] == expected


def test_the_page_takes_a_training_directory_alone_or_among_others(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = markdown(read_page([out]))
    assert "(recovery.png)" in page
    assert "| run | k | 100 |" in page
    both = markdown(read_page([write_rows(tmp_path / "rows", row()), out]))
    assert "Recovery in training" in both
    assert "Perplexity" in both
    write_rows(out, row(value=8.5))
    page = markdown(read_page([out]))
    assert "| llama | 8.50 |" in page
    assert "(recovery.png)" in page
    page = markdown(read_page([out, shutil.copytree(out, tmp_path / "other/run")]))
    assert "| run | k | 100 |" in page
    assert "| other/run | k | 100 |" in page


def test_a_page_of_training_alone_replaces_its_predecessor(out, tmp_path):
    for _ in range(2):
        assert write_report([out], tmp_path / "page").is_file()


def test_a_copy_of_a_stage_beside_it_is_no_stage(out, tmp_path):
    before = read_recovery(out)
    stage = next(path for path in sorted(out.iterdir()) if path.is_dir())
    for name in (f"{stage.name} copy", f"{stage.name}.bak"):
        shutil.copytree(stage, out / name)
    assert read_recovery(out) == before


def test_a_directory_with_a_recipe_in_which_nothing_was_trained_is_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: x\n")
    expected = "expected the --out of coca-eval, or of a coca-train that has begun to train"
    refused(f"got no rows.jsonl there, {expected}", read_page, [tmp_path])
    assert "Recovery" not in markdown(read_page([write_rows(tmp_path, row())]))
