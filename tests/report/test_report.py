import json
import os
import struct

import pytest

from coca_hf.errors import CocaError
from coca_hf.report import write_report
from coca_hf.report.plots import plot_png
from coca_hf.report.rows import read_tables


def row(model="llama", rope="default", length=512, value=7.25, task="perplexity", **changes):
    shared = {
        "model": model,
        "model_path": f"/models/{model}",
        "rope": rope,
        "length": length,
        "value": value,
        "task": task,
        "error": None,
        "trained_length": 2048,
        "coca_constraint": "slack" if "coca" in model else None,
        "tokens_seen": 123_904 if "coca" in model else None,
        "dtype": "float32",
        "device": "cpu (x86_64, 2 threads)",
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
        "command": f"coca-eval {task} {model}",
        "date": "2026-01-02T03:04:05+00:00",
        "seconds": 61.5,
    }
    if task == "perplexity":
        of_task = {"stride": 256, "asked_stride": 256, "tokens": 98_301, "data": "books", "column": "text"}
        of_task |= {"split": "test", "document_names": ["emma.txt", "persuasion.txt"], "max_tokens": None}
    else:
        of_task = {"stride": None, "tokens": 51_100, "cases": 100, "new_tokens": 64, "seed": 0}
    return shared | of_task | changes


def write_rows(directory, *rows):
    directory.mkdir(exist_ok=True)
    with (directory / "rows.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return directory


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def test_the_page_holds_every_value_by_model_rope_and_length(tmp_path):
    original = write_rows(
        tmp_path / "a", row(value=7.256), row(length=4096, value=96731.2), row(length=1024, value=7.0)
    )
    coca = write_rows(
        tmp_path / "b",
        row("coca", value=8.5),
        row("coca", "dynamic:4", 1024, 8.25),
        row("coca", "dynamic:4", 4096, 0.81, task="passkey"),
    )
    page = write_report([original, coca], tmp_path / "page").read_text()
    assert (
        "| model | tokens seen in CoCA training | 512 | 1024 | 4096 |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| llama |  | 7.26 | 7.00 | 9.67e+04 |\n"
        "| coca | 123,904 | 8.50 |  |  |\n"
        "| coca + dynamic:4 | 123,904 |  | 8.25 |  |\n"
    ) in page
    assert (
        "| model | tokens seen in CoCA training | 4096 |\n| --- | ---: | ---: |\n| coca + dynamic:4 | 123,904 | 0.81 |"
        in page
    )
    assert "![Perplexity against context length](perplexity.png)" in page
    assert "![Passkey retrieval against context length](passkey.png)" in page


def test_the_page_says_how_each_number_was_made(tmp_path):
    gpu = {"device": "NVIDIA H200", "command": "coca-eval perplexity llama --stride 999"}
    run = write_rows(
        tmp_path / "a", row(length=128, stride=128), row(**gpu), row(length=320, value=1.0, task="passkey")
    )
    page = write_report([run], tmp_path / "page").read_text()
    making = page[page.index("## How each number was made") :]
    for said in (
        "| llama | 128 | 128 | 98,301 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [1] |",
        "| llama | 512 | 256 | 98,301 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [2] |",
        "| llama | 320 |  | 51,100 | float32 | 61.5 | 2026-01-02T03:04:05+00:00 | [1] |",
        "- [1] cpu (x86\\_64, 2 threads); torch 2.13.0, python 3.11.7",
        "- [2] NVIDIA H200; torch 2.13.0, python 3.11.7",
        "### Perplexity: books, 2 documents, stride 256",
        "### Passkey retrieval: 100 cases per length, 64 new tokens, seed 0",
        "- emma.txt\n- persuasion.txt",
        "coca-eval perplexity llama --stride 999\n",
        "- llama: `/models/llama`",
    ):
        assert said in making


@pytest.mark.parametrize(
    ("tokens_seen", "said"), [(0, True), (999_999_999, True), (1_000_000_000, False), (None, False)]
)
def test_a_model_hardly_trained_is_said_to_show_the_machinery_only(tmp_path, tokens_seen, said):
    run = write_rows(tmp_path / "a", row("coca", tokens_seen=tokens_seen))
    page = write_report([run], tmp_path / "page").read_text()
    assert ("minutes of training show the machinery, not the paper's result" in page) == said
    assert (f"coca: {tokens_seen or 0:,}. The paper" in page) == said


def test_only_what_there_are_rows_for_is_written(tmp_path):
    run = write_rows(tmp_path / "a", row(value=0.5, task="passkey"))
    page = write_report([run], tmp_path / "page")
    assert sorted(os.listdir(tmp_path / "page")) == ["passkey.png", "report.md"]
    assert "erplexity" not in page.read_text()
    assert "CoCA" not in page.read_text()


def test_plots_are_images_of_the_size_asked_for(tmp_path):
    run = write_rows(
        tmp_path / "a",
        *(row(length=length, value=7.0 + length / 512) for length in (512, 1024, 8192)),
        row(value=0.5, task="passkey"),
        row(value=0.5, task="passkey", cases=7),
    )
    write_report([run], tmp_path / "page")
    assert png_size(tmp_path / "page" / "perplexity.png") == (9 * 150, 4.5 * 150)
    assert png_size(tmp_path / "page" / "passkey.png") == (9 * 150, 2 * 4.5 * 150)


def test_a_plot_changes_with_its_values_and_its_trained_length(tmp_path):
    def png(**changes):
        number = len(list(tmp_path.iterdir()))
        rows = (row(value=value, length=length, **changes) for value, length in ((7, 512), (9, 1024), (8, 4096)))
        return plot_png(read_tables([write_rows(tmp_path / f"{number}", *rows)]))

    images = [png(), png(), png(trained_length=1024), png(trained_length=None), png(rope="linear:2")]
    assert images[0] == images[1]
    assert len(set(images)) == 4


def test_a_value_that_is_none_is_explained_and_the_rest_is_shown(tmp_path):
    nan = {"value": None, "error": "the model's loss is nan"}
    run = write_rows(tmp_path / "a", row(length=512, value=9.5), row(length=1024, **nan))
    page = write_report([run], tmp_path / "page").read_text()
    assert "| llama | 9.50 | none |" in page
    assert "- llama at 1024: the model's loss is nan" in page
    only_none = write_rows(tmp_path / "b", row(**nan))
    assert "| llama | none |" in write_report([only_none], tmp_path / "page").read_text()
    assert png_size(tmp_path / "page" / "perplexity.png") == (1350, 675)


def test_the_latest_of_two_rows_of_one_measurement_counts_whatever_the_order(tmp_path):
    old, new = row(value=9.0, date="2026-01-01T00:00:00+00:00"), row(value=8.0, date="2026-01-03T00:00:00+00:00")
    first, second = write_rows(tmp_path / "a", new, old), write_rows(tmp_path / "b", old)
    for runs in ([first], [first, second], [second, first]):
        (table,) = read_tables(runs)
        assert [found["value"] for found in table.rows] == [8.0]


@pytest.mark.parametrize("change", [{"data": "other"}, {"asked_stride": 64}, {"document_names": ["emma.txt"]}])
def test_numbers_made_with_other_settings_stand_in_another_table(tmp_path, change):
    tables = read_tables([write_rows(tmp_path / "a", row(value=8.0), row("coca", value=9.0, **change))])
    assert [[found["value"] for found in table.rows] for table in tables] == [[8.0], [9.0]]


def test_models_of_one_name_are_told_apart_by_path_and_dtype(tmp_path):
    other = row(value=9.0, model_path="/elsewhere/llama", dtype="bfloat16")
    (table,) = read_tables([write_rows(tmp_path / "a", row(value=8.0), other)])
    assert {name: rows[0]["value"] for name, rows in table.series.items()} == {
        "llama (/models/llama, float32)": 8.0,
        "llama (/elsewhere/llama, bfloat16)": 9.0,
    }


def test_what_markdown_would_read_as_its_own_is_escaped(tmp_path):
    run = write_rows(tmp_path / "a", row("a|b*c", value=8.0, data="<books>_*"))
    page = write_report([run], tmp_path / "page").read_text()
    assert "| a\\|b\\*c | 8.00 |" in page
    assert "\\<books>\\_\\*, 2 documents, stride 256:" in page


def test_a_last_line_cut_short_is_left_out_and_left_as_it_is(tmp_path):
    run = write_rows(tmp_path / "a", row(value=8.0))
    with (run / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row(length=1024))[:50])
    before = (run / "rows.jsonl").read_bytes()
    assert [found["length"] for found in read_tables([run])[0].rows] == [512]
    assert (run / "rows.jsonl").read_bytes() == before


def test_a_page_replaces_its_predecessor_and_leaves_nothing_else_behind(tmp_path):
    run = write_rows(tmp_path / "a", row(value=8.0))
    write_report([run], tmp_path / "page")
    write_rows(run, row(value=9.0, date="2027-01-01T00:00:00+00:00"))
    assert "| llama | 9.00 |" in write_report([run], tmp_path / "page").read_text()
    assert sorted(os.listdir(tmp_path / "page")) == ["perplexity.png", "report.md"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a: got no rows.jsonl there, expected the --out of coca-eval perplexity or passkey"),
        ("", "rows.jsonl: got no rows, expected at least one; run coca-eval perplexity or passkey first"),
        ("oops\n", "rows.jsonl, line 1: got no row of perplexity or passkey; delete the line"),
        ('{"task": "other"}\n', "rows.jsonl, line 1: got no row of perplexity or passkey; delete the line"),
        (
            json.dumps({**row(), "dtype": 0, "command": ""}).replace('"seconds"', '"s"') + "\n",
            "got a row without seconds",
        ),
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


def test_an_out_that_is_a_file_is_refused(tmp_path):
    run = write_rows(tmp_path / "a", row())
    with pytest.raises(CocaError, match=r"--out .*rows\.jsonl: got File exists, expected a directory or a free name"):
        write_report([run], run / "rows.jsonl")
