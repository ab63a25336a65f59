import json
import math
import os
import struct

import pytest

from coca_hf.errors import CocaError
from coca_hf.evaluate.measurements import MEASUREMENTS
from coca_hf.evaluate.row import Count, Identity, Row, Setting
from coca_hf.evaluate.tables import Measurement
from coca_hf.page import markdown
from coca_hf.plots import COLORS, Heat, Key, heat_figure
from coca_hf.report import read_page, tables_markdown, write_report
from coca_hf.report.read import read_tables
from tests.report.made import row, with_raw, write_rows


def markdown_of(runs, paper=()):
    return markdown(read_page(runs, paper))


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def test_the_page_holds_every_value_by_model_rope_and_length(tmp_path):
    original = write_rows(
        tmp_path / "a",
        row(value=7.256),
        row(length=4096, value=96731.2),
        row(length=1024, value=7.0),
    )
    coca = write_rows(
        tmp_path / "b",
        row("coca", value=8.5),
        row("coca", "dynamic:4", 1024, 8.25),
        row("coca", "dynamic:4", 4096, 0.81, task="passkey"),
    )
    page = markdown_of([original, coca])
    assert (
        "| model | 512 | 1024 | 4096 |\n| --- | ---: | ---: | ---: |\n| llama | 7.26 | 7.00 | "
        "9.67e+04 |\n| coca | 8.50 |  |  |\n| coca + dynamic:4 |  | 8.25 |  |\n"
    ) in page
    assert "| model | 4096 |\n| --- | ---: |\n| coca + dynamic:4 | 0.81 |" in page
    assert (
        "| llama | llama | float32 | 2,048 |  |\n| coca | CoCA, slack | float32 | 2,048 | 123,904 |"
        in page
    )
    assert "](perplexity.png)" in page
    assert "](passkey.png)" in page


def test_the_page_says_how_each_number_was_made(tmp_path):
    gpu = {
        "device": "NVIDIA H200",
        "commit": "77ed9d2",
        "command": "coca-eval perplexity llama --stride 999",
    }
    run = write_rows(
        tmp_path / "a",
        row(length=128, stride=128),
        row(**gpu),
        row(length=320, value=1.0, task="passkey"),
    )
    page = markdown_of([run])
    making = page[page.index("## How each number was made") :]
    for said in (
        "| llama | 128 | 128 | 98,301 | 0 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [1] |",
        "| llama | 512 | 256 | 98,301 | 0 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [2] |",
        "| llama | 320 |  | 51,100 | 0 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [1] |",
        "- [1] cpu (x86\\_64, 2 threads); torch 2.13.0, python 3.11.7",
        "- [2] NVIDIA H200; torch 2.13.0, python 3.11.7, commit 77ed9d2",
        "<summary>Perplexity: books, 2 documents, stride 256</summary>",
        "<summary>Passkey retrieval: 100 cases per length, uniform depth, 64 new tokens, seed "
        "0</summary>",
        "- emma.txt\n- persuasion.txt",
        "coca-eval perplexity llama --stride 999\n",
        "- llama: /models/llama",
    ):
        assert said in making


@pytest.mark.parametrize(
    ("tokens_seen", "said"), [(0, True), (999_999_999, True), (1_000_000_000, False), (None, False)]
)
def test_a_model_hardly_trained_is_said_to_show_the_machinery_only(tmp_path, tokens_seen, said):
    run = write_rows(tmp_path / "a", row("coca", tokens_seen=tokens_seen))
    page = markdown_of([run])
    assert ("minutes of training show the machinery, not the paper's result" in page) == said
    assert (f"coca: {tokens_seen or 0:,}. The paper" in page) == said


def test_only_what_there_are_rows_for_is_written(tmp_path):
    run = write_rows(tmp_path / "a", row(value=0.5, task="passkey"))
    page = (write_report([run], tmp_path / "page").parent / "report.md").read_text()
    assert sorted(os.listdir(tmp_path / "page")) == ["passkey.png", "report.html", "report.md"]
    for absent in ("erplexity", "CoCA", "boundaries", "Speed"):
        assert absent not in page


def test_every_figure_is_a_png_for_a_paper_and_stands_in_the_markdown(report_html):
    directory = report_html.parent
    page = (directory / "report.md").read_text()
    pngs = sorted(path.name for path in directory.glob("*.png"))
    assert pngs == sorted(
        ["perplexity.png", "position-loss.png", "passkey.png", "speed.png", "speed-2.png"]
        + [f"passkey-{which}.png" for which in ("inside", "beyond", "distance")]
        + [f"passkey-depth-of-{number}.png" for number in (1, 2, 3, 4)]
        + ["boundary-angle.png", "boundary-tau.png", "boundary-decay.png"]
        + ["boundary-layers-of-1.png", "boundary-layers-of-2.png"]
    )
    for name in pngs:
        assert page.count(f"]({name})") == 1
        assert png_size(directory / name)[0] == 9 * 200


def test_numbers_drawn_from_raw_files_are_those_of_the_files(tmp_path):
    """Shares by distance and the scenarios, against counting by hand."""
    cases = [(4, True), (5, False), (8, True), (300, False), (512, True), (513, False)]
    lines = [
        {"depth": 0.5, "distance": distance, "correct": correct} for distance, correct in cases
    ]
    (tmp_path / "a").mkdir()
    found = with_raw(tmp_path / "a", "cases", row(length=1024, value=0.5, task="passkey"), lines)
    run = write_rows(tmp_path / "a", found, row(length=512, value=0.25, task="boundary"))
    page = markdown_of([run]).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "| distance | ≤ 4 | ≤ 8 | ≤ 512 | ≤ 1024 |\n| --- | ---: | ---: | ---: | ---: |\n"
        "| llama | 1.00 | 0.50 | 0.50 | 0.00 |" in page
    )
    assert "| llama | 512 | 0.000 | 0.750 | 0.000 | 0.250 | 0.250 | 0.125 | 0.750 | 0.000 |" in page
    assert "CoCA-slack" not in page


def test_contexts_and_perplexities_are_on_log_axes_and_published_curves_dashed(tmp_path):
    run = write_rows(tmp_path / "a", row(value=7.0), row(length=4096, value=96731.2))
    (figure,) = read_page([run], ["350m"]).figures()
    (axes,) = figure.draw(5, 3, True).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    curves = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert curves["llama"].get_xydata().tolist() == [[512, 7.0], [4096, 96731.2]]
    published = curves["paper: RoFormer + CoCA"]
    assert published.get_xydata().tolist()[:2] == [[512, 20.11], [1024, 33.47]]
    assert (curves["llama"].get_linestyle(), published.get_linestyle()) == ("-", "--")


@pytest.mark.parametrize("marked", [True, False])
def test_twice_as_many_models_as_colours_look_different(marked):
    looks = [Key("model", color=number, marked=marked).look for number in range(2 * len(COLORS))]
    seen = {
        (look["color"], look["marker"], look.get("markerfacecolor") if look["marker"] else None)
        for look in looks
    }
    assert len(seen) == len(looks)


def test_a_cell_of_a_heat_map_says_its_share():
    heat = Heat("a model", ["512", "1024"], ["0.0", "0.5"], [[1.0, 0.25], [None, 0.5]])
    axes = heat_figure(heat, "context", "depth")(5, 3, False).axes[0]
    cells = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    assert {cell: text for cell, text in cells.items() if text} == {
        (0, 0): "1.00",
        (1, 0): "0.25",
        (1, 1): "0.50",
    }


def cells_of(figure):
    """Of a heat map: the names of its lines, and the texts of its cells by line."""
    axes = figure.draw(5, figure.height, True).axes[0]
    texts = {tuple(map(int, text.get_position()[::-1])): text.get_text() for text in axes.texts}
    lines = sorted({line for line, _ in texts})
    names = [label.get_text() for label in axes.get_yticklabels()]
    return names, [
        [text for place, text in sorted(texts.items()) if place[0] == line] for line in lines
    ]


@pytest.mark.parametrize(
    ("depths", "names"),
    [
        (11, ["0%", "10%", "20%", "30%", "40%", "50%", "60%", "70%", "80%", "90%", "100%"]),
        (5, ["0%", "25%", "50%", "75%", "100%"]),
        (1, ["0%"]),
    ],
)
def test_a_grid_of_depths_is_a_heat_map_with_a_line_for_each(tmp_path, depths, names):
    """Prompts of five sentences of filler, so that the points of a grid of 11 come to lie on six
    depths only.
    """
    (tmp_path / "a").mkdir()
    rows = []
    for shift, length in enumerate((512, 1024)):
        cases = []
        for number in range(4 * depths):
            turn, point = divmod(number, depths)
            depth = round(5 * point / max(depths - 1, 1)) / 5
            cases.append({"depth": depth, "distance": 9, "correct": turn < (point + shift) % 5})
        made = row(length=length, value=0.5, task="passkey", depths=depths)
        rows.append(with_raw(tmp_path / "a", "cases", made, cases))
    run = write_rows(tmp_path / "a", *rows)
    figure = next(
        figure for figure in read_page([run]).figures() if figure.name.startswith("passkey-depth")
    )
    shares = [[f"{(point + shift) % 5 / 4:.2f}" for shift in (0, 1)] for point in range(depths)]
    assert cells_of(figure) == (names, shares)


def test_depths_that_were_drawn_are_a_heat_map_of_fifths(tmp_path):
    (tmp_path / "a").mkdir()
    cases = [
        (0.0, True),
        (0.19, False),
        (0.2, True),
        (0.41, False),
        (0.79, False),
        (0.81, True),
        (1.0, False),
    ]
    lines = [{"depth": depth, "distance": 9, "correct": correct} for depth, correct in cases]
    run = write_rows(
        tmp_path / "a", with_raw(tmp_path / "a", "cases", row(value=0.4, task="passkey"), lines)
    )
    figure = next(
        figure for figure in read_page([run]).figures() if figure.name.startswith("passkey-depth")
    )
    assert cells_of(figure) == (
        ["0-20%", "20-40%", "40-60%", "60-80%", "80-100%"],
        [["0.50"], ["1.00"], ["0.00"], ["0.00"], ["0.50"]],
    )


def test_passkeys_inside_and_beyond_the_trained_length_are_told_apart(tmp_path):
    """The paper's figure 4, by hand: the model trained at 256 has its border there, the other at
    2048.
    """
    cases = [(200, True), (256, True), (257, False), (900, False), (1000, True)]
    lines = [
        {"depth": 0.5, "distance": distance, "correct": correct} for distance, correct in cases
    ]
    (tmp_path / "a").mkdir()
    rows = [
        with_raw(
            tmp_path / "a",
            "cases",
            row(model, length=1024, value=0.6, task="passkey", trained_seq_len=own),
            lines,
        )
        for model, own in (("llama", None), ("coca", 256))
    ]
    run = write_rows(tmp_path / "a", *rows)
    page = markdown_of([run]).replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "| inside the trained length | 1024 |\n| --- | ---: |\n| llama | 0.60 of 5 |\n| coca | "
        "1.00 of 2 |" in page
    )
    assert "| beyond the trained length | 1024 |\n| --- | ---: |\n| coca | 0.33 of 3 |" in page
    figures = {figure.name: figure for figure in read_page([run]).figures()}
    (line,) = [
        line
        for line in figures["passkey-beyond"].draw(5, 3, True).axes[0].lines
        if line.get_label() == "coca"
    ]
    assert line.get_xydata().tolist() == [[1024, pytest.approx(1 / 3)]]


def test_a_heat_map_of_one_share_alone_is_a_sentence(tmp_path):
    (tmp_path / "a").mkdir()
    lines = [{"depth": depth, "distance": 300, "correct": False} for depth in (0.1, 0.9)]
    both = [line | {"correct": line["depth"] > 0.5} for line in lines]
    rows = [
        with_raw(tmp_path / "a", "cases", row(model, value=0.5, task="passkey"), cases)
        for model, cases in (("llama", lines), ("coca", both))
    ]
    page = markdown_of([write_rows(tmp_path / "a", *rows)])
    assert "- llama: 0.00 at every context length and depth, so no heat map." in page
    assert "Where coca finds the passkey" in page
    assert "(passkey-depth-of-1.png)" in page
    assert "Where llama" not in page


def test_without_a_passkey_beyond_the_trained_length_there_is_nothing_to_tell_apart(tmp_path):
    (tmp_path / "a").mkdir()
    lines = [{"depth": 0.5, "distance": 300, "correct": True}]
    run = write_rows(
        tmp_path / "a", with_raw(tmp_path / "a", "cases", row(value=1.0, task="passkey"), lines)
    )
    assert "passkey-inside" not in markdown_of([run])


def test_the_band_is_from_the_tenth_to_the_ninetieth_percentile_of_documents(tmp_path):
    """Eleven documents of several windows, of losses per token 1.0, 1.1, ... 2.0, or twice that; at
    1024 only one.
    """
    (tmp_path / "a").mkdir()
    rows = []
    for length, factor, documents in ((512, 1, 11), (1024, 1, 1), (2048, 2, 11)):
        windows = [
            {"document": document, "tokens": tokens, "nll": tokens * factor * (1 + document / 10)}
            for document in range(documents)
            for tokens in (30, 70)
        ]
        rows.append(with_raw(tmp_path / "a", "windows", row(length=length), windows))
    (figure,) = read_page([write_rows(tmp_path / "a", *rows)]).figures()
    (band,) = figure.draw(5, 3, True).axes[0].collections
    (outline,) = band.get_paths()
    expected = [
        (512, math.exp(1.1)),
        (512, math.exp(1.9)),
        (2048, math.exp(2.2)),
        (2048, math.exp(3.8)),
    ]
    assert sorted({tuple(point) for point in outline.vertices.tolist()}) == [
        pytest.approx(end) for end in expected
    ]
    assert "Shaded: from the 10th to the 90th percentile of the documents." in figure.caption


def test_one_document_has_no_band(tmp_path):
    (tmp_path / "a").mkdir()
    made = with_raw(tmp_path / "a", "windows", row(), [{"document": 0, "tokens": 3, "nll": 2.0}])
    (figure,) = read_page([write_rows(tmp_path / "a", made)]).figures()
    assert not figure.draw(5, 3, True).axes[0].collections
    assert "Shaded" not in figure.caption


def test_the_length_of_the_last_training_stage_counts_before_that_of_the_config(tmp_path):
    run = write_rows(tmp_path / "a", row(), row("coca", trained_seq_len=256))
    page = markdown_of([run])
    assert "| coca | CoCA, slack | float32 | 256 |" in page
    assert "Trained at: 2048 (llama), 256 (coca)." in page
    svg = write_report([run], tmp_path / "page").read_text()
    assert "trained at 256" in svg
    assert "trained at 2048" in svg


def test_trained_lengths_far_beyond_the_plot_are_named_at_its_edge(tmp_path):
    run = write_rows(tmp_path / "a", row(trained_length=131072))
    svg = write_report([run], tmp_path / "page").read_text()
    assert "trained at 128k \N{RIGHTWARDS ARROW}" in svg


def test_published_curves_are_drawn_when_asked_for_only(tmp_path):
    run = write_rows(tmp_path / "a", row(), row(length=1024, value=0.5, task="passkey"))
    page = markdown_of([run], ["llama-7b"])
    assert (
        "| paper: LLaMA-7B + dynamic NTK & CoCA | 9.91 | 8.49 | 8.27 | 8.61 | 9.56 | 11.10 | "
        "13.98 |" in page
    )
    assert "| paper: LLaMA-7B + CoCA | 1.00 | 1.00 | 1.00 | 0.71 | 0.28 | 0.11 | 0.10 |" in page
    assert "arXiv 2309.08646" in page
    assert "shapes can be compared, values cannot" in page
    assert "paper: " not in markdown_of([run])
    with pytest.raises(
        CocaError, match="--paper: got 'llama', expected one of 350m, llama-7b, pi-32k"
    ):
        write_report([run], tmp_path / "page", ["llama"])


def test_raw_files_that_were_left_behind_are_named(tmp_path):
    (tmp_path / "a").mkdir()
    made = with_raw(tmp_path / "a", "windows", row(), [{"document": 0, "tokens": 3, "nll": 2.0}])
    write_rows(tmp_path / "b", made)
    page = markdown_of([tmp_path / "b"])
    assert "1 files of raw results are not beside their rows" in page


def test_out_of_memory_is_told_apart_and_a_ratio_and_an_error_stand_by_their_values(tmp_path):
    slow = row("coca", length=512, value=0.5, task="speed") | {"ratio": 1.25, "baseline": "llama"}
    oom = row("coca", length=1024, value=None, task="speed", error="OOM: at batch size 1") | {
        "peak_bytes": None
    }
    run = write_rows(tmp_path / "a", slow, oom, row(length=None, value=0.4321, task="tasks"))
    page = markdown_of([run]).replace("\N{NO-BREAK SPACE}", " ")
    assert "| coca | 0.5 s (1.25 x) | OOM |" in page
    assert "- no value for coca at 1024: OOM: at batch size 1" in page
    assert "| arc\\_easy | reasoning | acc (none) | 0 shots | 0.432 ± 0.012 |" in page


def test_tables_for_a_model_card_are_those_of_the_page(tmp_path):
    run = write_rows(tmp_path / "a", row(value=7.5), row(value=0.5, task="passkey"))
    markdown = tables_markdown([run])
    assert markdown.startswith("Perplexity: books, 2 documents, stride 256. Sliding window")
    assert "| model | 512 |\n| --- | ---: |\n| llama | 7.50 |" in markdown
    assert markdown.endswith(
        "2026-01-02 on cpu (x86\\_64, 2 threads); torch 2.13.0, python 3.11.7."
    )


def test_a_value_that_is_none_is_explained_and_the_rest_is_shown(tmp_path):
    nan = {"value": None, "error": "the model's loss is nan"}
    run = write_rows(tmp_path / "a", row(length=512, value=9.5), row(length=1024, **nan))
    page = markdown_of([run])
    assert "| llama | 9.50 | none |" in page
    assert "- no value for llama at 1024: the model's loss is nan" in page
    only_none = write_rows(tmp_path / "b", row(**nan))
    assert "| llama | none |" in markdown_of([only_none])
    write_report([only_none], tmp_path / "page")
    assert png_size(tmp_path / "page" / "perplexity.png") == (1800, 900)


def test_the_latest_of_two_rows_of_one_measurement_counts_whatever_the_order(tmp_path):
    old, new = (
        row(value=9.0, date="2026-01-01T00:00:00+00:00"),
        row(value=8.0, date="2026-01-03T00:00:00+00:00"),
    )
    first, second = write_rows(tmp_path / "a", new, old), write_rows(tmp_path / "b", old)
    for runs in ([first], [first, second], [second, first]):
        (table,) = read_tables(runs)
        assert [found["value"] for found in table.rows] == [8.0]


@pytest.mark.parametrize(
    "change", [{"data": "other"}, {"asked_stride": 64}, {"document_names": ["emma.txt"]}]
)
def test_numbers_made_with_other_settings_stand_in_another_table(tmp_path, change):
    tables = read_tables(
        [write_rows(tmp_path / "a", row(value=8.0), row("coca", value=9.0, **change))]
    )
    assert [[found["value"] for found in table.rows] for table in tables] == [[8.0], [9.0]]


def test_models_of_one_name_are_told_apart_by_path_and_dtype(tmp_path):
    other = row(value=9.0, model_path="/elsewhere/llama", dtype="bfloat16")
    (table,) = read_tables([write_rows(tmp_path / "a", row(value=8.0), other)])
    assert {name: rows[0]["value"] for name, rows in table.series.items()} == {
        "llama (/models/llama, float32)": 8.0,
        "llama (/elsewhere/llama, bfloat16)": 9.0,
    }


def test_documents_that_were_left_out_are_named_beside_those_measured(tmp_path):
    page = markdown_of([write_rows(tmp_path / "a", row(value=8.0, skipped_documents=["note.txt"]))])
    assert "- persuasion.txt\n- note.txt (empty or too short, left out)\n" in page


def test_what_markdown_would_read_as_its_own_is_escaped(tmp_path):
    run = write_rows(tmp_path / "a", row("a|b*c", value=8.0, data="<books>_*"))
    page = markdown_of([run])
    assert "| a\\|b\\*c | 8.00 |" in page
    assert "\\<books>\\_\\*, 2 documents, stride 256" in page


def test_a_last_line_cut_short_is_left_out_and_left_as_it_is(tmp_path):
    run = write_rows(tmp_path / "a", row(value=8.0))
    with (run / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row(length=1024))[:50])
    before = (run / "rows.jsonl").read_bytes()
    assert [found["length"] for found in read_tables([run])[0].rows] == [512]
    assert (run / "rows.jsonl").read_bytes() == before


def test_a_last_row_without_the_end_of_its_line_is_shown(tmp_path):
    run = write_rows(tmp_path / "a", row(value=8.0))
    (run / "rows.jsonl").write_text((run / "rows.jsonl").read_text() + json.dumps(row(length=1024)))
    assert [found["length"] for found in read_tables([run])[0].rows] == [512, 1024]


def test_rows_of_several_states_of_a_model_or_a_text_are_told_of(tmp_path):
    later = {"date": "2027-01-01T00:00:00+00:00"}
    same = [row(length=length, fingerprint="f", data_hash="t") for length in (256, 512)]
    assert "states of" not in markdown_of([write_rows(tmp_path / "same", *same)])
    model = markdown_of(
        [
            write_rows(
                tmp_path / "model", *same, row(length=512, fingerprint="g", data_hash="t", **later)
            )
        ]
    )
    assert (
        "llama: its rows are of 2 states of its files; of each measurement the latest row is shown"
        in model
    )
    assert "its documents" not in model
    text = markdown_of(
        [
            write_rows(
                tmp_path / "text", *same, row(length=512, fingerprint="f", data_hash="u", **later)
            )
        ]
    )
    assert "llama: its rows are of 2 states of its documents" in text
    assert "its files" not in text


def test_models_that_read_different_texts_of_one_name_are_told_of(tmp_path):
    first = row(text_hash="t")
    second = row(model="coca", date="2027-01-01T00:00:00+00:00")
    notice = "the text of these documents changed before the latest number; measure llama again"
    for name, text_hash, is_told in (("one", "t", False), ("old", None, False), ("two", "u", True)):
        run = write_rows(tmp_path / name, first, second | {"text_hash": text_hash})
        assert (notice in markdown_of([run])) == is_told


def test_a_page_replaces_its_predecessor_and_leaves_nothing_else_behind(tmp_path):
    run = write_rows(tmp_path / "a", row(value=8.0))
    write_report([run], tmp_path / "page")
    write_rows(run, row(value=9.0, date="2027-01-01T00:00:00+00:00"))
    assert "| llama | 9.00 |" in markdown_of([run])
    assert sorted(os.listdir(tmp_path / "page")) == ["perplexity.png", "report.html", "report.md"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a: got no rows.jsonl there, expected the --out of coca-eval"),
        ("", "rows.jsonl: got no rows, expected at least one; run coca-eval first"),
        (
            "oops\n",
            "rows.jsonl, line 1: got no row of coca-eval; delete the line",
        ),
        (
            '{"task": "other"}\n',
            "rows.jsonl, line 1: got no row of coca-eval; delete the line",
        ),
        (
            json.dumps({**row(), "dtype": 0, "command": ""}).replace('"seconds"', '"s"') + "\n",
            "got a row without seconds",
        ),
        (
            json.dumps(row() | {"length": "x"}) + "\n",
            "line 1: got a row with length 'x', no value of coca-eval's; delete it",
        ),
        (
            json.dumps(row()).replace("7.25", "NaN") + "\n",
            "line 1: got no row of coca-eval; delete the line",
        ),
        (
            json.dumps(row(document_names=5)) + "\n",
            "line 1: got a row with document_names 5, no value of coca-eval's",
        ),
        (
            json.dumps(row(document_names=[5])) + "\n",
            "line 1: got a row with document_names [5], no value",
        ),
        (
            json.dumps(row(raw={"windows": None})) + "\n",
            "line 1: got a row with raw {'windows': None}, no value",
        ),
        (json.dumps(row(length=0)) + "\n", "line 1: got a row with length 0, no value"),
        (json.dumps(row(length=None)) + "\n", "line 1: got a row with length None, no value"),
        (
            json.dumps(row(length=10**30)) + "\n",
            "line 1: got a row with length 1000000000000000000000000000000, no",
        ),
        (json.dumps(row(value=-3.0)) + "\n", "line 1: got a row with value -3.0, no value"),
        (
            json.dumps(row(depths=0, task="passkey", value=0.5)) + "\n",
            "line 1: got a row with depths 0, no value",
        ),
        (
            json.dumps(row(value=2.0, task="passkey")) + "\n",
            "line 1: got a row with value 2.0, no value",
        ),
        (
            json.dumps(row()).replace("7.25", "1e999") + "\n",
            "line 1: got no row of coca-eval; delete the line",
        ),
        (
            json.dumps(row(raw={"windows": "x" * 400})) + "\n",
            "line 1: got a row with raw {'windows': 'xxx",
        ),
        (json.dumps(row(tokens="many")) + "\n", "line 1: got a row with tokens 'many', no value"),
        (json.dumps(row("half \ud83d")) + "\n", "line 1: got no row of coca-eval; delete the line"),
        (json.dumps([row()]) + "\n", "line 1: got no row of coca-eval; delete the line"),
        ('{"task": ["perplexity"]}\n', "line 1: got no row of coca-eval; delete the line"),
        ("[" * 9999 + "\n", "line 1: got no row of coca-eval; delete the line"),
    ],
)
def test_runs_without_rows_are_refused_and_no_page_is_begun(tmp_path, content, message):
    (tmp_path / "a").mkdir()
    if content is not None:
        (tmp_path / "a" / "rows.jsonl").write_text(content)
    with pytest.raises(CocaError) as error:
        write_report([tmp_path / "a"], tmp_path / "page")
    assert message in str(error.value)
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    "line",
    [
        {"document": 0, "tokens": 3},
        {"document": 0, "tokens": 3, "nll": "much"},
        {"document": 0, "tokens": 3, "nll": None},
        {"document": [0], "tokens": 3, "nll": 2.0},
    ],
)
def test_a_raw_file_with_other_columns_is_refused_by_name(tmp_path, line):
    (tmp_path / "a").mkdir()
    run = write_rows(tmp_path / "a", with_raw(tmp_path / "a", "windows", row(), [line]))
    with pytest.raises(CocaError) as error:
        write_report([run], tmp_path / "page")
    (file,) = run.glob("perplexity-windows/*.parquet")
    assert str(error.value) == (
        f"{file}: got no parquet file with columns document, tokens, nll as coca-eval writes "
        f"them; delete it and its row, and measure again"
    )


def test_a_raw_file_that_is_no_parquet_is_refused_by_name(tmp_path):
    (tmp_path / "a").mkdir()
    run = write_rows(tmp_path / "a", with_raw(tmp_path / "a", "windows", row(), [{"document": 0}]))
    next(run.glob("perplexity-windows/*.parquet")).write_bytes(b"PAR1 and no more")
    with pytest.raises(CocaError, match="got no parquet file with columns document, tokens, nll"):
        write_report([run], tmp_path / "page")


def test_a_boundary_row_that_is_an_error_has_no_shares_and_is_explained(tmp_path):
    made = row(
        length=512,
        value=None,
        task="boundary",
        error="7 products of queries and keys are not finite",
    )
    run = write_rows(
        tmp_path / "a", {name: value for name, value in made.items() if "share" not in name}
    )
    page = markdown_of([run])
    assert "| llama | 512 |  |  |  |  |  |  |" in page
    assert "- no value for llama at 512: 7 products of queries and keys are not finite" in page


def test_a_bound_of_decay_is_drawn_for_strict_and_not_for_slack(tmp_path):
    (tmp_path / "a").mkdir()
    lines = [{"distance": distance, "bound_rope": 9.0, "bound_coca": 5.0} for distance in (1, 4)]
    made = [
        row(f"coca-{kind}", value=0.0, task="boundary", coca_constraint=kind)
        for kind in ("slack", "strict")
    ]
    made = [with_raw(tmp_path / "a", "decay", one, lines) for one in made]
    (figure,) = read_page([write_rows(tmp_path / "a", *made)]).figures()
    (axes,) = figure.draw(5, 3, True).axes
    curves = {
        line.get_label(): line.get_ydata().tolist()
        for line in axes.lines
        if line.get_label()[0] != "_"
    }
    assert curves == {"coca-strict": [5.0, 5.0]}


def test_an_out_that_is_a_file_is_refused(tmp_path):
    run = write_rows(tmp_path / "a", row())
    with pytest.raises(
        CocaError, match=r"--out .*rows\.jsonl: the page cannot be written there \(.* File exists"
    ):
        write_report([run], run / "rows.jsonl")
    (tmp_path / "out" / "report.md").mkdir(parents=True)
    with pytest.raises(
        CocaError, match=r"--out .*out: the page cannot be written there \(.* Is a directory"
    ):
        write_report([run], tmp_path / "out")


def test_a_command_with_a_code_fence_and_a_name_with_a_link_stay_what_they_are(tmp_path):
    commands = ["coca-eval perplexity 'a\n```\n# not a heading\n````\nb'", "coca-eval perplexity c"]
    name = "![x](https://example.org/seen.png)"
    run = write_rows(tmp_path / "a", row(command=commands[0]), row(name, command=commands[1]))
    page = markdown_of([run])
    assert "`````\n" + "\n".join(commands) + "\n`````\n" in page
    assert "](https" not in page
    assert r"![x]\(https://example.org/seen.png)" in page


@pytest.mark.parametrize(
    ("task", "field"), [("copying", "nll_first"), ("recall", "nll"), ("attention-maps", "sink")]
)
def test_a_number_that_is_shown_beside_a_value_has_to_be_there(tmp_path, task, field):
    whole = row(task=task, value=0.5)
    for number, broken in enumerate(
        ({key: whole[key] for key in whole if key != field}, whole | {field: None})
    ):
        run = write_rows(tmp_path / str(number), broken)
        with pytest.raises(CocaError, match=f"rows.jsonl, line 1: got a row with(out)? {field}"):
            read_page([run])
    failed = write_rows(
        tmp_path / "failed",
        whole | {"value": None, field: None, "error": "the model's loss is nan"},
    )
    assert "the model's loss is nan" in markdown_of([failed])


def test_a_title_that_folds_is_no_html(tmp_path):
    run = write_rows(tmp_path / "a", row(data="my_books/<img src=x>"))
    assert "<summary>Perplexity: my_books/&lt;img src=x&gt;, 2 documents" in markdown_of([run])


def test_a_new_measurement_is_one_row_type_and_one_measurement(tmp_path, monkeypatch):
    class WordsRow(Row):
        length: Identity[Count]
        value: float | None
        language: Setting[str]

    words = Measurement(
        task="words",
        title="Words",
        explanation="More is better.",
        row=WordsRow,
        settings=lambda row: f"in {row['language']}",
        cell=lambda row: f"{row['value']:.0f} words",
        parts=lambda tables: [table.grid() for table in tables],
    )
    monkeypatch.setitem(MEASUREMENTS, "words", words)
    made = row() | {"task": "words", "value": 417.2, "language": "Latin"}
    run = write_rows(tmp_path / "a", made, made | {"language": "Greek", "value": 4.0})
    page = markdown_of([run])
    section = page[page.index("## Words") : page.index("## How each")]
    assert "More is better.\n\n| model | 512 |\n| --- | ---: |\n| llama | 417 words |" in section
    assert "| llama | 4 words |" in section
    assert "<summary>Words: in Greek</summary>" in page
    with pytest.raises(CocaError, match="line 1: got a row without language; delete it"):
        read_page([write_rows(tmp_path / "b", row() | {"task": "words"})])


def test_attention_maps_without_a_value_are_explained(tmp_path):
    failed = {"value": None, "sink": None, "baseline_sink": None, "error": "OOM: 24 GiB"}
    run = write_rows(tmp_path / "a", row(task="attention-maps") | failed)
    assert "- no value for llama at 512: OOM: 24 GiB" in markdown_of([run])
