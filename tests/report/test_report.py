import itertools
import json
import math
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest
from PIL import Image

import coca_hf
from coca_hf.errors import CocaError
from coca_hf.evaluate.measurements import MEASUREMENTS
from coca_hf.page import FAR, LOOKS, Curve, Key, Plot, markdown
from coca_hf.report import read_page, read_tables, tables_markdown, write_report
from coca_hf.report.plots import COLORS, CSS_NAMES, PAPER, draw, look, to_png, to_svg
from tests.conftest import refused
from tests.report.made import row, with_raw, write_rows


@pytest.fixture
def run(tmp_path):
    """Write rows, each alone or with the name and the lines of a raw table, as a new directory."""
    numbers = itertools.count()

    def write(*rows):
        directory, made = tmp_path / f"run-{next(numbers)}", []
        for one in rows:
            of, *raw = one if isinstance(one, tuple) else (one,)
            made.append(with_raw(directory, raw[0], of, raw[1]) if raw else of)
        return write_rows(directory, *made)

    return write


@pytest.fixture
def page(run):
    """The page of rows, as Markdown without its hard spaces."""
    return lambda *rows: markdown_of([run(*rows)])


@pytest.fixture
def figures(run):
    """The figures of rows by their names."""
    return lambda *rows: {figure.name: figure for figure in read_page([run(*rows)]).figures()}


def markdown_of(runs, paper=()):
    return markdown(read_page(runs, paper)).replace("\N{NO-BREAK SPACE}", " ")


def curves_of(figure):
    """Each line of a figure by its label."""
    lines = draw(figure.drawing, 5, 3, True).axes[0].lines
    return {line.get_label(): line for line in lines if not line.get_label().startswith("_")}


LABELS = [["a"], [*"abc"], [f"model {n}" for n in range(60)], ["x" * 900, "y"]]


@pytest.mark.parametrize("labels", LABELS, ids=["one", "few", "many", "long"])
def test_a_legend_of_any_length_is_on_the_picture_and_leaves_room_for_the_curves(labels):
    curves = [Curve(Key(name, n), [256, 4096], [5.0 + n, 6.0]) for n, name in enumerate(labels)]
    figure = draw(Plot(curves, "perplexity", trained_lengths=[512, 600, 700, 800]), 9, 4.5, True)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    texts = axes.get_legend().get_texts() if len(labels) > 1 else []
    assert len(texts) in (0, len(labels))
    for box in (text.get_window_extent() for text in texts):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1
    assert axes.get_window_extent().height > figure.bbox.y1 / 2


def test_the_page_holds_every_value_by_model_rope_and_length(run):
    original = run(row(value=7.256), row(length=4096, value=96731.2), row(length=1024, value=7.0))
    extended = row("coca", "dynamic:4", 1024, 8.25)
    found = row("coca", "dynamic:4", 4096, 0.81, task="passkey")
    page = markdown_of([original, run(row("coca", value=8.5), extended, found)])
    for table in (
        "| model | 512 | 1024 | 4096 |\n| --- | ---: | ---: | ---: |\n| llama | 7.26 | 7.00 | "
        "9.67e+04 |\n| coca | 8.50 |  |  |\n| coca + dynamic:4 |  | 8.25 |  |\n",
        "| model | 4096 |\n| --- | ---: |\n| coca + dynamic:4 | 0.81 |",
        "| llama | llama | float32 | 2,048 |  |\n"
        "| coca | CoCA, slack | float32 | 2,048 | 123,904 |",
        "](perplexity.png)",
        "](passkey.png)",
    ):
        assert table in page


def test_only_the_page_needs_the_packages_that_draw_it():
    """`coca-hf[eval]` measures without them."""
    files = Path(coca_hf.__file__).parent.rglob("*.py")
    draws = re.compile(r"^\s*(?:import|from) (?:matplotlib|PIL|jinja2|coca_hf\.report)\b", re.M)
    found = {file.parent.name for file in files if draws.search(file.read_text())}
    assert found == {"report"}


def test_the_page_says_how_each_number_was_made(page):
    command = "coca-eval perplexity llama --stride 999"
    gpu = {"device": "NVIDIA H200", "commit": "77ed9d2", "command": command}
    made = page(row(length=128, stride=128), row(**gpu), row(length=320, value=1.0, task="passkey"))
    making = made[made.index("## How each number was made") :]
    for said in (
        "| llama | 128 | 128 | 98,301 | 0 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [1] |",
        "| llama | 512 | 256 | 98,301 | 0 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [2] |",
        "| llama | 320 |  | 51,100 | 0 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [1] |",
        "- [1] cpu (x86\\_64, 2 threads); torch 2.13.0, python 3.11.7",
        "- [2] NVIDIA H200; torch 2.13.0, python 3.11.7, commit 77ed9d2",
        "<summary>Perplexity: books, 2 documents, stride 256</summary>",
        "Passkey retrieval: 100 cases per length, uniform depth, 64 new tokens, seed 0</summary>",
        "- emma.txt\n- persuasion.txt",
        f"{command}\n",
        "- llama: /models/llama",
    ):
        assert said in making


def test_a_notice_says_that_a_model_has_hardly_been_trained(page):
    notice = "minutes of training show the machinery, not the paper's result"
    for tokens_seen, said in {0: True, 999_999_999: True, 10**9: False, None: False}.items():
        made = page(row("coca", tokens_seen=tokens_seen))
        assert (notice in made) == (f"coca: {tokens_seen or 0:,}. The paper" in made) == said
    older = row("coca", task="recall", value=0.5, tokens_seen=7, date="2026-01-01T00:00:00+00:00")
    made = page(row("coca", tokens_seen=8), older)
    assert ("coca: 8. The paper" in made, "| 2,048 | 8 |" in made) == (True, True)


def cases_of(depth, *cases):
    """Lines of the raw table of cases at a depth, of distances and whether they were found."""
    return [{"depth": depth, "distance": where, "correct": found} for where, found in cases]


def test_numbers_drawn_from_raw_files_are_those_of_the_files(page):
    """Shares by distance and the scenarios, against counting by hand."""
    lines = cases_of(0.5, (4, True), (5, False), (8, True), (300, False), (512, True), (513, False))
    passkey = row(length=1024, value=0.5, task="passkey")
    made = page((passkey, "cases", lines), row(length=512, value=0.25, task="boundary"))
    distances = "| distance | ≤ 4 | ≤ 8 | ≤ 512 | ≤ 1024 |\n| --- | ---: | ---: | ---: | ---: |\n"
    assert f"{distances}| llama | 1.00 | 0.50 | 0.50 | 0.00 |" in made
    assert "| llama | 512 | 0.750 | 0.250 | 0.250 | 0.125 | 0.750 | 0.000 |" in made
    assert "CoCA-slack" not in made


@pytest.mark.parametrize(
    ("values", "at", "names", "lengths"),
    [
        ({1024: 9.0}, ", at length 1024", ("llama", "coca"), (1024, 1024)),
        ({1024: 9.0, 4096: None}, ", at length 1024", ("llama", "coca"), (1024, 1024)),
        ({1024: 9.0, 4096: 8.0}, ", at length 4096", ("llama", "coca"), (4096, 4096)),
        ({512: 9.0}, "", ("llama at 512", "coca at 4096"), (512, 4096)),
    ],
)
def test_all_lines_are_shown_at_one_length_or_say_theirs(page, values, at, names, lengths):
    rows = []
    for model, of_model in (("llama", values), ("coca", {1024: 9.0, 4096: 8.0})):
        for length, value in of_model.items():
            ends = ((0, 64), (64, length))
            ranges = [{"first": a, "end": b, "perplexity": length} for a, b in ends if value]
            made = {"length": length, "value": value, "ranges": ranges, "task": "position-loss"}
            buckets = [{"first": 0, "tokens": 64, "nll": float(length)}]
            rows.append((row(model, **made), "buckets", buckets) if value else row(model, **made))
    made = page(*rows)
    assert f"Loss against the token's index{at}: books" in made
    assert f"| perplexity of tokens{at} | 0 to 64 | " in made
    for name, length in zip(names, lengths, strict=True):
        assert f"| {name} | {length}.00 | " in made


def test_a_loss_by_position_stands_at_the_end_of_its_bucket_in_the_window(figures):
    """The last bucket of a window of 100 tokens has 40."""
    buckets = [{"first": 0, "tokens": 60, "nll": 120.0}, {"first": 60, "tokens": 40, "nll": 40.0}]
    made = row(length=100, task="position-loss", bucket=60), "buckets", buckets
    line = curves_of(figures(made)["position-loss"])["llama"]
    assert line.get_xydata().tolist() == [[60, 2.0], [100, 1.0]]


def test_distances_are_counted_over_the_lengths_that_all_lines_have(page):
    def made(model, length, correct):
        shared = {"length": length, "value": 0.5, "task": "passkey"}
        return row(model, **shared), "cases", cases_of(0.5, (200, correct))

    llama, coca = made("llama", 256, True), made("coca", 4096, False)
    both = page(llama, made("coca", 256, True), coca)
    assert "in tokens, over context lengths 256: each point" in both
    assert "| distance | ≤ 256 |\n| --- | ---: |\n| llama | 1.00 |\n| coca | 1.00 |" in both
    assert "No length is common to all lines" in page(llama, coca)


def test_where_passkeys_are_found_has_its_settings_beside_other_settings(page):
    made = {"value": 1.0, "task": "passkey"}
    seeds = [(row(**made, seed=n), "cases", cases_of(0.5, (200, True))) for n in (0, 1)]
    settings = "100 cases per length, uniform depth, 64 new tokens, seed"
    both = page(*seeds)
    for n in (0, 1):
        said = f"Where, of {settings} {n}:\n\n- llama: 1.00 at every context length and depth"
        assert said in both
    assert "Where, of" not in page(seeds[0])


def test_contexts_and_perplexities_are_on_log_axes_and_published_curves_dashed(run):
    rows = run(row(value=7.0), row(length=4096, value=96731.2))
    (figure,) = read_page([rows], ["350m"]).figures()
    (axes,) = draw(figure.drawing, 5, 3, True).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    curves = curves_of(figure)
    assert curves["llama"].get_xydata().tolist() == [[512, 7.0], [4096, 96731.2]]
    published = curves["paper: RoFormer + CoCA"]
    assert published.get_xydata().tolist()[:2] == [[512, 20.11], [1024, 33.47]]
    assert (curves["llama"].get_linestyle(), published.get_linestyle()) == ("-", "--")


def test_a_model_has_one_colour_in_all_figures_of_a_page(figures):
    """A figure need not have all models, or have them in the order of another."""
    recall = [row(model, task="recall", value=0.5) for model in ("coca", "other")]
    drawn = figures(*recall, row("original"), row("coca"))
    colors = {
        name: {label: line.get_color() for label, line in curves_of(figure).items()}
        for name, figure in drawn.items()
    }
    assert colors == {
        "perplexity": {"original": COLORS[0], "coca": COLORS[1]},
        "recall": {"coca": COLORS[1], "other": COLORS[2]},
    }


@pytest.mark.parametrize("scale", ["log", "linear"])
def test_names_of_ticks_stay_apart_and_the_last_is_there(scale):
    xs = [256, 400, 512, 1024, 1025, 16384]
    plot = Plot([Curve(Key("m"), xs, [1.0] * 6)], "loss", x_scale=scale)
    figure = draw(plot, 5, 3, False)
    figure.canvas.draw()
    labels = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert labels[-1].get_text() == "16k"
    assert len(labels) == (4 if scale == "log" else 2)


def test_curves_that_coincide_are_all_seen():
    drawn = [Curve(Key(str(n), color=n), [256, 512, 1024], [1.0, 1.0, 0.1 * n]) for n in range(3)]
    crossing = Curve(Key("3", color=3), [256, 512, 1024], [0.7, 1.0, 0.7])
    missing = [crossing, Curve(Key("4", color=4), [256, 512, 1024], [1.0, None, None])]
    plot = Plot([*drawn, *missing], "share found", y_scale="share")
    lines = draw(plot, 5, 3, False).axes[0].lines[::2]
    widths = [line.get_linewidth() for line in lines]
    assert widths[0] > widths[1] > widths[2] == widths[3] == widths[4]
    sizes = [line.get_markersize() for line in lines]
    assert sizes[0] > sizes[1] > sizes[2] == sizes[3] == sizes[4]


@pytest.mark.parametrize("marked", [True, False])
def test_twice_as_many_models_as_colours_and_seven_rope_settings_look_different(marked):
    models = [look(Key("m", color=n, marked=marked)) for n in range(2 * len(COLORS))]
    fills = [one.get("markerfacecolor") if one["marker"] else None for one in models]
    seen = {(one["color"], one["marker"], fill) for one, fill in zip(models, fills, strict=True)}
    assert len(seen) == len(models) == LOOKS
    ropes = [look(Key("m", style=n, marked=marked)) for n in range(7)]
    assert len({(one["linestyle"], one["marker"]) for one in ropes}) == 7


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 2 * FAR])
def test_a_value_that_cannot_be_drawn_is_a_cross_at_the_upper_edge(value):
    plot = Plot([Curve(Key("model"), [512, 1024], [3.0, value])], "loss")
    _, crosses = draw(plot, 5, 3, False).axes[0].lines
    assert (crosses.get_marker(), crosses.get_xydata().tolist()) == ("x", [[1024, 1.0]])


@pytest.mark.parametrize(("points", "markers"), [(8, 8), (40, 10)])
def test_the_markers_of_many_points_leave_the_line_to_be_seen(points, markers):
    curve = Curve(Key("model", color=len(COLORS)), list(range(1, points + 1)), [3.0] * points)
    drawn = to_svg(draw(Plot([curve], "loss"), 5, 3, False), "plot", "loss")
    assert markers / 4 < len(re.findall(rf"<use [^>]*var\(--{CSS_NAMES[PAPER]}", drawn)) <= markers


def cells_of(figure):
    """The names of a heat map's lines, and the texts of its cells by line."""
    axes = draw(figure.drawing, 5, figure.height, True).axes[0]
    lines = defaultdict(list)
    for text in sorted(axes.texts, key=lambda text: text.get_position()[::-1]):
        lines[text.get_position()[1]].append(text.get_text())
    return [label.get_text() for label in axes.get_yticklabels()], [*lines.values()]


@pytest.mark.parametrize(
    ("depths", "percentages"),
    [(11, [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100]), (5, [0, 25, 50, 75, 100]), (1, [0])],
)
def test_a_grid_of_depths_is_a_heat_map_with_a_line_for_each(figures, depths, percentages):
    """Prompts of five sentences of filler, so that the points of a grid of 11 come to lie on six
    depths only.
    """
    rows = []
    for shift, length in enumerate((512, 1024)):
        cases = []
        for number in range(4 * depths):
            turn, point = divmod(number, depths)
            depth = round(5 * point / max(depths - 1, 1)) / 5
            cases += cases_of(depth, (9, turn < (point + shift) % 5))
        rows.append((row(length=length, value=0.5, task="passkey", depths=depths), "cases", cases))
    shares = [[f"{(point + shift) % 5 / 4:.2f}" for shift in (0, 1)] for point in range(depths)]
    names = [f"{percentage}%" for percentage in percentages]
    assert cells_of(figures(*rows)["passkey-depth-of-1"]) == (names, shares)


def test_uniform_depths_are_a_heat_map_of_fifths(figures):
    found = {0.0: True, 0.19: False, 0.2: True, 0.41: False, 0.79: False, 0.81: True, 1.0: False}
    lines = [case for depth, correct in found.items() for case in cases_of(depth, (9, correct))]
    made = figures((row(value=0.4, task="passkey"), "cases", lines))
    names, cells = cells_of(made["passkey-depth-of-1"])
    assert names == ["0-20%", "20-40%", "40-60%", "60-80%", "80-100%"]
    assert cells == [["0.50"], ["1.00"], ["0.00"], ["0.00"], ["0.50"]]


def test_passkeys_inside_and_beyond_the_trained_length_are_told_apart(page, figures):
    """The paper's figure 4, by hand: the model trained at 256 has its border there, the other at
    2048.
    """
    lines = cases_of(0.5, (200, True), (256, True), (257, False), (900, False), (1000, True))
    shared = {"length": 1024, "value": 0.6, "task": "passkey"}
    rows = [
        (row(model, **shared, trained_seq_len=own), "cases", lines)
        for model, own in (("llama", None), ("coca", 256))
    ]
    made = page(*rows)
    inside = "| inside the trained length | 1024 |\n| --- | ---: |\n| llama | 0.60 of 5 |\n"
    assert f"{inside}| coca | 1.00 of 2 |" in made
    assert "| beyond the trained length | 1024 |\n| --- | ---: |\n| coca | 0.33 of 3 |" in made
    line = curves_of(figures(*rows)["passkey-beyond"])["coca"]
    assert line.get_xydata().tolist() == [[1024, pytest.approx(1 / 3)]]


def test_a_heat_map_with_a_single_share_is_a_sentence(page):
    missed = [*cases_of(0.1, (300, False)), *cases_of(0.9, (300, False))]
    both = [line | {"correct": line["depth"] > 0.5} for line in missed]
    llama, coca = (row(model, value=0.5, task="passkey") for model in ("llama", "coca"))
    made = page((llama, "cases", missed), (coca, "cases", both))
    assert "- llama: 0.00 at every context length and depth, so no heat map." in made
    assert "Where coca finds the passkey" in made
    assert "(passkey-depth-of-1.png)" in made
    assert "Where llama" not in made
    assert "passkey-inside" not in made  # none lies beyond the trained length
    lost = row("llama", length=8192, value=None, task="passkey", error="OOM: too long")
    assert "Where llama finds the passkey" in page((llama, "cases", missed), lost)


def test_the_band_is_from_the_tenth_to_the_ninetieth_percentile_of_documents(figures):
    """Eleven documents of several windows, of losses per token 1.0, 1.1, ... 2.0, or twice that; at
    1024 only one.
    """
    rows = []
    for length, factor, documents in ((512, 1, 11), (1024, 1, 1), (2048, 2, 11)):
        windows = [
            {"document": document, "tokens": tokens, "nll": tokens * factor * (1 + document / 10)}
            for document in range(documents)
            for tokens in (30, 70)
        ]
        rows.append((row(length=length), "windows", windows))
    figure = figures(*rows)["perplexity"]
    (band,) = draw(figure.drawing, 5, 3, True).axes[0].collections
    (outline,) = band.get_paths()
    ends = {512: (1.1, 1.9), 2048: (2.2, 3.8)}
    expected = [(length, math.exp(loss)) for length, some in ends.items() for loss in some]
    found = sorted({tuple(point) for point in outline.vertices.tolist()})
    assert found == [pytest.approx(end) for end in expected]
    assert "Shaded: from the 10th to the 90th percentile of the documents." in figure.caption
    one_document = figures(rows[1])["perplexity"]
    assert not draw(one_document.drawing, 5, 3, True).axes[0].collections
    assert "Shaded" not in one_document.caption


@pytest.fixture
def _no_png(monkeypatch):
    """Images, which take longest, are empty files."""
    monkeypatch.setattr("coca_hf.report.write.to_png", lambda figure: b"")


@pytest.mark.usefixtures("_no_png")
def test_the_length_of_the_last_training_stage_counts_before_that_of_the_config(run, tmp_path):
    rows = run(row(), row("coca", trained_seq_len=256))
    page = markdown_of([rows])
    assert "| coca | CoCA, slack | float32 | 256 |" in page
    assert "Trained at: 2048 (llama), 256 (coca)." in page
    svg = write_report([rows], tmp_path / "page").read_text()
    assert "trained at 256" in svg
    assert "trained at 2k" in svg


def test_names_of_trained_lengths_stand_above_the_axes_and_apart():
    curve = Curve(Key("model"), [512, 1024, 2048], [9.0, 8.0, 7.0])
    plot = Plot([curve], "loss", trained_lengths=[256, 700, 1024, 2048, 131_072])
    for width, legend in ((5, False), (9, True)):
        figure = draw(plot, width, 3, legend)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        names = ["256", "700", "1k", "2k", "128k \N{RIGHTWARDS ARROW}"]
        assert [text.get_text() for text in axes.texts] == [f"trained at {name}" for name in names]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert all(box.y0 > axes.get_window_extent().y1 for box in boxes)
        assert all(0 <= box.x0 < box.x1 <= figure.bbox.x1 for box in boxes)
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_published_curves_are_drawn_when_asked_for_only(run, tmp_path):
    rows = run(row(), row(length=1024, value=0.5, task="passkey"))
    page = markdown_of([rows], ["llama-7b"])
    published = "9.91 | 8.49 | 8.27 | 8.61 | 9.56 | 11.10 | 13.98"
    assert f"| paper: LLaMA-7B + dynamic NTK & CoCA | {published} |" in page
    assert "| paper: LLaMA-7B + CoCA | 1.00 | 1.00 | 1.00 | 0.71 | 0.28 | 0.11 | 0.10 |" in page
    lost = "| paper: LLaMA-7B | 9.25 | 7.56 | 7.30 | 9673.14 | inf | inf | inf |"
    assert lost in page  # the paper's own words for what has no number
    alibi = markdown_of([rows], ["350m"])
    assert "| paper: ALiBi | 0.82 | 0.65 | 0.28 | 0.18 | 0.12 | OOM | OOM |" in alibi
    assert "arXiv 2309.08646" in page
    assert "shapes can be compared, values cannot" in page
    assert "paper: " not in markdown_of([rows])
    expected = "--paper: got 'llama', expected one of 350m, llama-7b, pi-32k"
    refused(expected, write_report, [rows], tmp_path / "page", ["llama"])


def test_missing_raw_files_are_named(tmp_path):
    made = with_raw(tmp_path / "a", "windows", row(), [{"document": 0, "tokens": 3, "nll": 2.0}])
    page = markdown_of([write_rows(tmp_path / "b", made)])
    assert "Files of raw results that are not beside their rows: 1, the first" in page


def test_values_have_their_ratios_and_errors_and_oom_is_named(page):
    slow = row("coca", length=512, value=0.5, task="speed") | {"ratio": 1.25, "baseline": "llama"}
    for optional in ("tokens_per_second", "memory_kind"):
        slow.pop(optional, None)
    oom = row("coca", length=1024, value=None, task="speed", error="OOM: at batch size 1")
    oom["peak_bytes"] = None
    made = page(slow, oom, row(length=None, value=0.4321, task="tasks"))
    assert "| coca | 0.5 s (1.25 x llama's) | OOM |" in made
    assert "- no value for coca at 1024: OOM: at batch size 1" in made
    assert "| arc\\_easy | reasoning | acc (none) | 0 shots | 0.432 ± 0.012 |" in made


@pytest.mark.parametrize("task", ["attention-maps", "layers"])
def test_measurements_against_two_originals_of_one_name_are_both_shown(page, task):
    rows = [row("coca", value=0.5 + n, task=task, baseline_fingerprint=str(n)) for n in (0, 1)]
    made = page(*rows)
    assert re.search(r"\| coca \|[^\n]* 0\.5", made)
    assert re.search(r"\| coca \|[^\n]* 1\.5", made)
    differ = "2 tables, of rows that differ in baseline fingerprint"
    assert re.search(rf"{differ}; the latest row is in number [12]\.", made)


def test_tables_for_a_model_card_are_those_of_the_page(run):
    markdown = tables_markdown(read_tables([run(row(value=7.5), row(value=0.5, task="passkey"))]))
    assert markdown.startswith("Perplexity: books, 2 documents, stride 256, float32. Slid")
    assert "| model | 512 |\n| --- | ---: |\n| llama | 7.50 |" in markdown
    other = run(row(), row("coca", dtype="bfloat16"))
    assert "256, float32 (llama), bfloat16 (coca). Slid" in tables_markdown(read_tables([other]))
    machine = "cpu (x86\\_64, 2 threads); torch 2.13.0, python 3.11.7."
    assert markdown.endswith(f"2026-01-02 on {machine}")
    benchmark = run(row(value=0.6123, task="tasks", length=None))
    assert "0.612" in tables_markdown(read_tables([benchmark]))
    failed = run(row(value=None, error="out of memory"))
    assert "- no value for llama at 512: out of memory" in tables_markdown(read_tables([failed]))


def test_a_value_that_is_none_is_explained_and_the_rest_is_shown(run, page, tmp_path):
    nan = {"value": None, "error": "the model's loss is nan"}
    made = page(row(length=512, value=9.5), row(length=1024, **nan))
    assert "| llama | 9.50 | none |" in made
    assert "- no value for llama at 1024: the model's loss is nan" in made
    assert "| llama | none |" in page(row(**nan))
    write_report([run(row(**nan))], tmp_path / "page")
    assert Image.open(tmp_path / "page" / "perplexity.png").size == (1800, 900)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": "other"}, "other, 2 documents, stride 256"),
        ({"asked_stride": 64}, "books, 2 documents, stride 64"),
        ({"document_names": ["emma.txt"]}, "books, 1 document, stride 256"),
        ({"split": "train", "column": "code"}, "books, split train, column code, 2 documents, str"),
        ({"seed": 7}, "books, 2 documents, seed 7, stride 256"),
    ],
)
def test_other_settings_make_another_table_whose_caption_says_so(run, change, said):
    tables = read_tables([run(row(value=8.0), row("coca", value=9.0, **change))])
    assert [[found["value"] for found in table.rows] for table in tables] == [[8.0], [9.0]]
    assert tables[1].settings.startswith(said)


def test_the_page_says_what_is_special_about_a_row(page):
    special = {"coca_constraint": "strict", "coca_kept_layers": [2, 5], "coca_kept_window": 4096}
    special |= {"coca_content_pairs": 3, "coca_content_layers": [1]}
    made = page(row(**special, variant="yarn", skipped_documents=["note.txt"]))
    for words in (
        "stride 256, yarn's windows and mean",
        "- persuasion.txt\n- note.txt (empty or too short, left out)\n",
        "| CoCA, strict, layers kept: 2 with a window of 4,096 tokens, 3 content pairs, layers with "
        "more content pairs: 1 |",
    ):
        assert words in made


def test_a_model_in_two_dtypes_has_two_lines(run):
    (table,) = read_tables([run(row(), row(dtype="bfloat16"))])
    names = [f"llama (/models/llama, {dtype})" for dtype in ("float32", "bfloat16")]
    assert [*table.series] == names


def test_notices_and_captions_tell_models_of_one_name_apart(page):
    """As the stages of two runs, whose directories have one name."""
    ours = {"model_path": "a/3-full", "trained_seq_len": 512, "fingerprint": "1"}
    theirs = {"model_path": "b/3-full", "trained_seq_len": 1024, "fingerprint": "2"}
    texts = {"text_hash": "one", "date": "2026-01-02T03:04:06+00:00"}
    found = page(
        row("coca", data_hash="3", **ours | {"text_hash": "one"}),
        row("coca", length=1024, data_hash="3", **ours | {"fingerprint": "4", "text_hash": "one"}),
        row("coca", data_hash="5", tokens_seen=99, **theirs | texts),
        row("coca", length=1024, data_hash="5", tokens_seen=99, **theirs | texts),
    )
    assert "Tokens seen: coca (a/3-full): 123,904, coca (b/3-full): 99." in found
    assert "> coca (a/3-full): its rows are of 2 states of its files" in found
    assert "coca (a/3-full) reads other tokens of this text than coca (b/3-full);" in found
    assert "Trained at: 512 (coca (a/3-full)), 1024 (coca (b/3-full))." in found


def test_a_benchmark_that_failed_has_no_metric_and_is_named_with_its_error(page):
    error = "--shots 2: the benchmark's definition has 0; leave it out"
    failed = {"metric": None, "filter": None, "stderr": None, "shots": 2, "error": error}
    made = page(row(value=None, length=None, task="tasks", **failed))
    assert "| arc\\_easy | reasoning | no metric | 2 shots | none |" in made
    assert f"- no value for llama on arc\\_easy: {error}" in made
    assert "None" not in made


def test_models_of_one_name_are_told_apart_by_path_and_dtype(page):
    task = {"task": "tasks", "length": None}
    other = {"benchmark": "piqa", "model_path": "/elsewhere/llama", "dtype": "bfloat16"}
    made = page(row(value=0.4, **task), row(value=0.9, **task, **other))
    first, second = "llama (/models/llama, float32)", "llama (/elsewhere/llama, bfloat16)"
    assert f"| {first} | {second} |" in made.replace("\\", "")
    assert "| 0.400" in made
    assert "|  | 0.900" in made
    assert "| llama (/models/llama) | llama | float32" in made.replace("\\", "")


def test_markdown_and_html_in_names_and_commands_stay_what_they_are(page):
    commands = ["coca-eval perplexity 'a\n```\n# not a heading\n````\nb'", "coca-eval perplexity c"]
    link = "![x](https://example.org/seen.png)"
    books = {"data": "<my>_books*", "command": commands[0]}
    name = "a|b*c ~~d~~ &lt;e"
    made = page(row(name, value=8.0, **books), row(link, **books | {"command": commands[1]}))
    assert r"| a\|b\*c \~\~d\~\~ \&lt;e | 8.00 |" in made
    assert "\\<my>\\_books\\*, 2 documents, stride 256" in made
    assert "<summary>Perplexity: &lt;my&gt;_books*, 2 documents" in made
    assert "`````\n" + "\n".join(commands) + "\n`````\n" in made
    assert "](https" not in made
    assert r"![x]\(https://example.org/seen.png)" in made


def test_a_picture_that_pillow_takes_for_an_attack_is_drawn(figures, monkeypatch):
    """A legend of hundreds of models has more than the 178 million pixels that Pillow reads."""
    figure = figures(row(length=256), row(length=512))["perplexity"]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    png = to_png(draw(figure.drawing, 5, 3, True))
    assert png.startswith(b"\x89PNG")


def test_a_last_line_cut_short_is_left_out_and_one_without_its_end_is_shown(run):
    rows, last = run(row(value=8.0)) / "rows.jsonl", json.dumps(row(length=1024))
    first = rows.read_text()
    for written, lengths in ((last[:50], [512]), (last, [512, 1024])):
        rows.write_text(first + written)
        assert [found["length"] for found in read_tables([rows.parent])[0].rows] == lengths
        assert rows.read_text() == first + written


@pytest.mark.parametrize("state", ["fingerprint", "data_hash"])
def test_memory_that_ran_out_for_new_files_or_text_hides_the_value_of_the_old(page, state):
    oom = row(value=None, error="OOM: at batch size 1", date="2027-01-01T00:00:00+00:00")
    value = row(value=7.5)
    assert "| llama | 7.50 |" in page(value, oom)
    assert "| llama | OOM |" in page(value, oom | {state: "new"})


def test_a_notice_names_models_whose_files_or_documents_changed(page):
    later = {"length": 512, "date": "2027-01-01T00:00:00+00:00"}
    same = [row(length=length, fingerprint="f", data_hash="t") for length in (256, 512)]
    assert "states of" not in page(*same)
    model = page(*same, row(fingerprint="g", data_hash="t", **later))
    said = "of its files; of each measurement the latest row is shown"
    assert f"llama: its rows are of 2 states {said}" in model
    assert "its documents" not in model
    again = [row(**later | {"length": length, "fingerprint": "g"}) for length in (256, 512)]
    assert "states of" not in page(*same, *again)
    text = page(*same, row(fingerprint="f", data_hash="u", **later))
    assert "llama: its rows are of 2 states of its documents" in text
    assert "its files" not in text


def test_models_of_one_name_and_path_in_two_runs_have_a_line_each(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (run(row(value=v, fingerprint=str(v))) for v in (8.0, 9.0))
    made = markdown_of([first, second])
    assert f"| llama (/models/llama of {first.name}, float32) | 8.00 |" in made
    assert f"| llama (/models/llama of {second.name}, float32) | 9.00 |" in made
    again = run(row(length=256, value=7.0, fingerprint="8.0"), row(value=8.5, fingerprint="9.0"))
    made = markdown_of([first, again])
    assert f" of {again.name}" not in made


def test_a_model_and_a_text_of_several_paths_are_one(run):
    same = {"fingerprint": "f", "text_hash": "t"}
    paths = {"model_path": "../llama", "data": "../books.jsonl", "length": 512}
    paths["document_names"] = ["books.jsonl:0", "books.jsonl:1"]
    (table,) = read_tables([run(row(**same), row(**same, **paths))])
    assert [*table.series] == ["llama"]
    others = run(row(**same), row(**paths | {"fingerprint": "g", "text_hash": "u"}))
    assert len(read_tables([others])) == 2


def test_a_model_that_was_copied_before_it_was_trained_again_keeps_its_line(run):
    name = {"model": "1-recover", "model_path": "runs/1-recover"}
    before = row(**name, fingerprint="f", value=8.0)
    copied = before | {"model_path": "kept/1-recover"}
    after = row(**name, fingerprint="g", value=7.0)
    (table,) = read_tables([run(before, copied, after)])
    assert {rows[0]["model_path"]: rows[0]["value"] for rows in table.series.values()} == {
        "kept/1-recover": 8.0,
        "runs/1-recover": 7.0,
    }


OLDER = "the text of these documents changed before the latest number; measure llama again"
OTHER = "llama reads other tokens of this text than coca; losses and perplexities per token"


@pytest.mark.parametrize(
    ("text_hash", "data_hash", "said"),
    [("t", "d", None), (None, "d", None), ("u", "d", OLDER), ("t", "e", OTHER)],
)
def test_a_notice_names_models_that_read_older_text_or_other_tokens(
    page, text_hash, data_hash, said
):
    later = {"date": "2027-01-01T00:00:00+00:00", "text_hash": text_hash, "data_hash": data_hash}
    longer = row("coca", **later | {"length": 8192, "date": "2027-01-02T00:00:00+00:00"})
    made = page(row(text_hash="t", data_hash="d"), row("coca", **later), longer)
    assert [notice for notice in (OLDER, OTHER) if notice in made] == ([said] if said else [])


@pytest.mark.parametrize(("data_hash", "is_said"), [("d", False), (None, False), ("e", True)])
def test_a_notice_names_models_that_answered_other_tasks_of_the_same_name(page, data_hash, is_said):
    later = {"date": "2027-01-01T00:00:00+00:00", "data_hash": data_hash}
    rows = row(task="tasks", data_hash="d"), row("coca", task="tasks", **later)
    said = "or their times, changed before the latest number; measure llama again to compare"
    assert (said in page(*rows)) == is_said


def test_only_measurements_with_rows_are_written_and_a_page_replaces_its_predecessor(run, tmp_path):
    write_report([run(row(value=0.25, task="passkey"))], tmp_path / "page")
    rows = run(row(value=0.5, task="passkey"))
    page = (write_report([rows], tmp_path / "page").parent / "report.md").read_text()
    assert "| llama | 0.50 |" in page
    assert sorted(os.listdir(tmp_path / "page")) == ["passkey.png", "report.html", "report.md"]
    assert Image.open(tmp_path / "page" / "passkey.png").size[0] == 9 * 200
    for absent in ("erplexity", "CoCA", "boundaries", "Speed"):
        assert absent not in page


NO_ROW = "line 1: got no row of coca-eval; delete the line"
REFUSED = [  # contents of rows.jsonl, and what is said of them; test_rows.py has more without a row
    (None, "got no rows.jsonl there, expected the --out of coca-eval"),
    ("", "rows.jsonl: got no rows, expected at least one; run coca-eval first"),
    ({"task": "other"}, NO_ROW),
    (row() | {"task": ["perplexity"]}, NO_ROW),
    (row("half \ud83d"), NO_ROW),
    (row(length=0), "line 1: got a row with length 0, no value of coca-eval's; delete it"),
    (row(document_names=[5]), "got a row with document_names [5], no value"),
    (row(raw={"windows": "x" * 400}), "got a row with raw {'windows': 'xxx"),
    (row(raw={"windows": "../0123456789abcdef.parquet"}), "got a row with raw {'windows': '../01"),
    (row(value=-3.0), "got a row with value -3.0, no value"),
    (row(task="passkey", value=2.0), "got a row with value 2.0, no value"),
    ({name: row()[name] for name in row() if name != "seconds"}, "got a row with seconds None, no"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_runs_without_rows_are_refused_and_no_page_is_begun(tmp_path, content, message):
    (tmp_path / "a").mkdir()
    if content is not None:
        line = json.dumps(content) + "\n" if content else ""
        (tmp_path / "a" / "rows.jsonl").write_text(line)
    with pytest.raises(CocaError) as error:
        write_report([tmp_path / "a"], tmp_path / "page")
    assert message in str(error.value)
    assert not (tmp_path / "page").exists()


@pytest.mark.usefixtures("_no_png")
@pytest.mark.parametrize("name", ["report.md", "report.html"])
def test_a_file_of_yours_is_not_replaced_by_a_page(run, tmp_path, name):
    rows, page = run(row()), tmp_path / "page"
    write_report([rows], page)
    write_report([rows], page)
    (page / name).write_text("# My report\n")
    before = {file: file.read_bytes() for file in page.iterdir()}
    with pytest.raises(CocaError) as error:
        write_report([rows], page)
    problem = "is there and was not made by coca-eval report; move it, or choose another --out"
    assert str(error.value) == f"{page / name}: {problem}"
    assert {file: file.read_bytes() for file in page.iterdir()} == before


@pytest.mark.usefixtures("_no_png")
def test_a_picture_of_yours_is_not_replaced_and_a_page_that_was_begun_is_made(
    run, tmp_path, monkeypatch
):
    rows, page = run(row()), tmp_path / "page"
    page.mkdir()
    (page / "perplexity.png").write_bytes(b"mine")
    refused(r"perplexity\.png: is there and was not made by coca-eval", write_report, [rows], page)
    assert [file.read_bytes() for file in page.iterdir()] == [b"mine"]
    killed = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.delattr("coca_hf.report.write.html")
        with pytest.raises(NameError):
            write_report([rows], killed)
    assert (killed / "perplexity.png").exists()
    assert write_report([rows], killed).exists()


@pytest.mark.parametrize(
    "line", [{"document": 0, "tokens": 3}, {"document": 0, "tokens": 3, "nll": None}, None]
)
def test_a_raw_file_with_other_columns_or_no_parquet_is_refused_by_name(run, tmp_path, line):
    rows = run((row(), "windows", [line or {"document": 0}]))
    (file,) = rows.glob("perplexity-windows/*.parquet")
    if line is None:
        file.write_bytes(b"PAR1 and no more")
    with pytest.raises(CocaError) as error:
        write_report([rows], tmp_path / "page")
    expected = "got no parquet file with columns document, tokens, nll as coca-eval writes them"
    assert str(error.value) == f"{file}: {expected}; delete it and its row, and measure again"


def test_sections_stand_in_the_order_of_the_measurements(run):
    rows = run(*(row(value=0.5, task=task) for task in reversed(MEASUREMENTS)))
    titles = [section.title for section in read_page([rows]).parts]
    measured = [measurement.title for measurement in MEASUREMENTS.values()]
    assert titles == ["Models", *measured, "How each number was made"]


def test_slack_is_explained_once_with_its_absolute_part_and_an_error_instead_of_shares(page):
    slack = row("coca", value=0.25, task="boundary", share_absolute=0.4)
    error = "7 products of queries and keys are not finite"
    failed = row("broken", value=None, task="boundary", error=error)
    failed |= dict.fromkeys(name for name in failed if "share" in name or "angle" in name)
    made = page(row(value=0.25, task="boundary"), slack, slack | {"pairs_per_document": 7}, failed)
    assert made.count("The score of a CoCA-slack model has two parts") == 1
    assert "| coca | 512 | 0.750 | 0.250 | 0.250 | 0.125 | 0.750 | 0.400 |" in made
    assert "| broken | 512 |  |  |  |  |  |  |\n" in made
    assert f"- no value for broken at 512: {error}" in made


def test_a_bound_of_decay_is_drawn_for_strict_and_not_for_slack(figures):
    lines = [{"layer": 0, "distance": s, "bound_rope": 9.0, "bound_coca": 5.0} for s in (1, 4)]
    made = [
        (row(f"coca-{kind}", value=0.0, task="boundary", coca_constraint=kind), "decay", lines)
        for kind in ("slack", "strict")
    ]
    ((name, line),) = curves_of(figures(*made)["boundary-decay"]).items()
    assert (name, line.get_ydata().tolist()) == ("coca-strict", [5.0, 5.0])


def test_an_out_that_is_a_file_is_refused(run, tmp_path):
    rows = run(row())
    (tmp_path / "out" / "report.md").mkdir(parents=True)
    for out, why in ((rows / "rows.jsonl", "File exists"), (tmp_path / "out", "Is a directory")):
        message = rf"--out {out}: the page cannot be written there \(.* {why}"
        refused(message, write_report, [rows], out)


@pytest.mark.parametrize(
    ("task", "field"),
    [
        *(("copying", "nll_first"), ("recall", "nll")),
        *(("attention-maps", "sink"), ("boundary", "share_b")),
    ],
)
def test_a_number_shown_beside_a_value_is_required(page, task, field):
    whole = row(task=task, value=0.5)
    without = {key: whole[key] for key in whole if key != field}
    for broken in (without, whole | {field: None}):
        refused(f"rows.jsonl, line 1: got a row with {field} None", page, broken)
    failed = whole | {"value": None, field: None, "error": "the model's loss is nan"}
    assert "- no value for llama at 512: the model's loss is nan" in page(failed)
