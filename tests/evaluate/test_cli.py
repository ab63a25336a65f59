import inspect
import json
import os
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

from coca_hf import provenance
from coca_hf.evaluate import sample


def rows_in(directory):
    return [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def perplexity(coca_eval, tiny_llama_dir, books, out):
    """`coca-eval perplexity` of the tiny LLaMA with more options."""

    def run(options):
        return coca_eval(f"perplexity {tiny_llama_dir} --data {books} --out {out}", options)

    return run


def test_perplexity_passkey_and_report_follow_each_other(
    tiny_llama_dir, perplexity, tmp_path, out, coca_eval, monkeypatch
):
    monkeypatch.setattr("coca_hf.report.write.to_png", lambda figure: b"")
    code, stdout, stderr = perplexity("--lengths 32,100 --stride 48 --rope default,dynamic:4")
    assert code == 0
    assert "warning: lengths 100 are beyond the 64 tokens" in stderr
    assert [(row["rope"], row["length"], row["stride"]) for row in rows_in(out)] == [
        *(("default", 32, 32), ("default", 100, 48)),
        *(("dynamic:4", 32, 32), ("dynamic:4", 100, 48)),
    ]
    assert f"{rows_in(out)[3]['value']:.2f}" in stdout
    options = f"--lengths 320 --cases 3 --new-tokens 2 --out {out} --name renamed"
    assert coca_eval(f"passkey {tiny_llama_dir}", options)[0] == 0
    assert (rows_in(out)[4]["task"], rows_in(out)[4]["model"]) == ("passkey", "renamed")
    page = tmp_path / "page"
    code, stdout, _ = coca_eval("report", out, f"--out {page} --title 'One & tiny'")
    assert (code, stdout.strip()) == (0, f"report: {page / 'report.html'}")
    assert "tiny-llama + dynamic:4" in (page / "report.md").read_text()
    assert "<h1>One &amp; tiny</h1>" in (page / "report.html").read_text()


@pytest.mark.parametrize(("room", "code"), [(40, 0), (0, 1)])
def test_the_status_is_one_if_nothing_could_be_measured(perplexity, out, monkeypatch, room, code):
    forward = LlamaForCausalLM.forward

    def limited(self, input_ids, **kwargs):
        if input_ids.shape[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, input_ids, **kwargs)

    limited.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(LlamaForCausalLM, "forward", limited)
    found, stdout, _ = perplexity("--lengths 32,50")
    assert (found, "OOM" in stdout) == (code, True)
    assert [row["value"] is None for row in rows_in(out)] == [code == 1, True]


def test_rows_and_pages_hold_no_absolute_path(tiny_llama_dir, books, tmp_path, out, coca_eval):
    words = f"perplexity {tiny_llama_dir} --data {books} --lengths 32 --out={out}"
    assert coca_eval(words)[0] == 0
    (row,) = rows_in(out)
    (out / row["raw"]["windows"]).unlink()
    assert coca_eval(f"report {out} --out {tmp_path / 'page'}")[0] == 0
    made = [out / "rows.jsonl", *(tmp_path / "page" / f"report.{kind}" for kind in ("md", "html"))]
    for file in made:
        outside = file.read_text().replace(os.path.relpath(tmp_path.parent), "")
        assert str(tmp_path.parent) not in outside
    data, model = os.path.relpath(books), os.path.relpath(tiny_llama_dir)
    assert (row["data"], row["model_path"]) == (data, model)
    command = f"coca-eval perplexity {model} --data {data} --lengths 32"
    assert row["command"] == f"{command} --out={os.path.relpath(out)}"


def test_a_second_run_makes_no_row_again_and_lists_other_versions_at_the_end(perplexity, out):
    _, printed, stderr = perplexity("--lengths 24,32")
    assert "made before" not in stderr
    first, second = rows_in(out)
    assert first["commit"] == provenance.commit()
    second |= {"versions": second["versions"] | {"transformers": "5.1.7"}, "commit": "f" * 40}
    before = f"{json.dumps(first)}\n{json.dumps(second)}\n"
    (out / "rows.jsonl").write_text(before)
    code, again, stderr = perplexity("--lengths 24,32")
    assert (code, again) == (0, printed)
    assert (out / "rows.jsonl").read_text() == before
    assert stderr.endswith(
        f"note: 1 row was made before, with transformers 5.1.7, coca-hf commit {'f' * 40}; delete "
        f"such rows from rows.jsonl to measure them again\n"
    )


def test_rich_markup_in_names_is_printed_verbatim(perplexity, tmp_path):
    out = tmp_path / "o[" / "b]c[/red]"
    options = "--lengths 32 --documents 1 --max-tokens 40 --name [/b]:smile:"
    code, stdout, _ = perplexity(f"{options} --out {out}")
    assert code == 0
    assert "[/b]:smile:" in stdout
    assert f"rows: {out / 'rows.jsonl'}" in stdout


def test_skipped_documents_are_counted_and_the_first_are_named(perplexity, books, out):
    _, _, stderr = perplexity("--lengths 220 --skip-short")
    assert "short or empty documents skipped (1): austen.txt\n" in stderr
    assert "were asked for" not in stderr
    for number in range(12):
        (books / f"a{number:02}.txt").write_text("too short")
    _, _, stderr = perplexity("--lengths 30 --skip-short")
    assert "short or empty documents skipped (12): a00.txt, " in stderr
    assert "a09.txt and 2 more\n" in stderr
    assert len(rows_in(out)[1]["skipped_documents"]) == 12


BAD = {
    "--rope ntk:4": "--rope: got 'ntk:4', expected default, linear:FACTOR",
    "--lengths 215": "1 of 3 documents have fewer than 215 tokens",
    "--out pyproject.toml": "got Not a directory, expected the rows of coca-eval or nothing",
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_one_line_and_exit_code_2(bad, perplexity, out):
    lengths = "" if "--lengths" in bad else "--lengths 32"
    code, stdout, stderr = perplexity(f"{lengths} {bad}")
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert BAD[bad] in stderr
    assert stderr.count("\n") == 1
    assert not out.exists()


def test_what_no_row_could_hold_is_refused_before_the_model_is_read(coca_eval, out, monkeypatch):
    """A name with the byte 0x80, as the system gives it, and a directory without permission."""
    code, _, stderr = coca_eval(f"passkey ./nowhere --lengths 320 --out {out} --name a\udc80")
    assert code == 2
    assert "got a name that is not UTF-8, which no result can hold; rename it" in stderr
    monkeypatch.setattr(os, "access", lambda path, mode: path != out.parent)
    code, _, stderr = coca_eval(f"passkey ./nowhere --lengths 320 --out {out}")
    remedy = f"nothing can be written in {out.parent}; choose another directory"
    assert (code, stderr) == (2, f"error: --out {out}: {remedy}\n")


@pytest.mark.parametrize("words", ["report {out} --out page --title a\udc80", "card b\udc80"])
def test_a_page_and_a_card_refuse_names_that_are_not_utf_8(coca_eval, out, words):
    code, stdout, stderr = coca_eval(words.format(out=out))
    assert (code, stdout) == (2, "")
    assert "got a name that is not UTF-8, which no result can hold; rename it" in stderr


def test_a_directory_that_cannot_be_written_gives_its_rows_and_takes_no_others(
    perplexity, out, monkeypatch
):
    assert perplexity("--lengths 100 --max-tokens 110")[0] == 0
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (out, os.W_OK))
    assert perplexity("--lengths 100 --max-tokens 110")[0] == 0
    code, _, stderr = perplexity("--lengths 100,50 --max-tokens 110")
    assert (code, f"nothing can be written in {out}; choose another" in stderr) == (2, True)
    assert [row["length"] for row in rows_in(out)] == [100]


def test_a_factor_beyond_all_positions_is_measured(perplexity, out):
    ropes = "linear:1e308,dynamic:1e300,dynamic:1e308"
    code, _, stderr = perplexity(f"--lengths 100 --max-tokens 110 --rope {ropes}")
    assert (code, "warning" in stderr) == (0, False)
    assert all(row["value"] > 1 for row in rows_in(out))


def test_a_tokenizer_too_small_for_a_model_is_warned_of(tiny_llama_dir, tmp_path, out, coca_eval):
    model = LlamaForCausalLM.from_pretrained(tiny_llama_dir)
    model.resize_token_embeddings(1400, mean_resizing=False)
    wide = shutil.copytree(tiny_llama_dir, tmp_path / "wide")
    model.save_pretrained(wide)
    code, _, stderr = coca_eval(f"copying {wide} --lengths 16 --cases 1 --out {out}")
    assert code == 0
    warning = "got a tokenizer of 259 tokens for an embedding of 1,400 rows;"
    assert f"warning: {wide}: {warning}" in stderr


def test_a_row_that_cannot_be_written_is_one_line_and_earlier_rows_stay(perplexity, out):
    assert perplexity("--lengths 64")[0] == 0
    (out / "perplexity-windows").rename(out / "moved")
    (out / "perplexity-windows").write_text("")
    code, _, stderr = perplexity("--lengths 64,100")
    assert code == 2
    assert f"error: {out}: a row cannot be written ([Errno 17] File exists" in stderr
    assert [row["length"] for row in rows_in(out)] == [64]


def test_a_preset_is_its_documents_cut_to_its_length(
    tiny_llama_dir, books, out, coca_eval, monkeypatch
):
    preset = {"data": str(books), "documents": 3, "min_tokens": 220, "max_tokens": 220}
    monkeypatch.setitem(sample.PRESETS, "pg19", preset | {"skip_short": True})
    command = f"perplexity {tiny_llama_dir} --preset pg19 --lengths 100 --stride 60 --out {out}"
    code, _, stderr = coca_eval(command)
    assert code == 0
    assert "short or empty documents skipped (1): austen.txt" in stderr
    warning = "2 documents have at least 220 tokens, 3 were asked for; only these are measured"
    assert f"warning: {warning}\n" in stderr
    (row,) = rows_in(out)
    assert (row["documents"], row["tokens"]) == (2, 2 * 219)
    assert row["skipped_documents"] == ["austen.txt"]
