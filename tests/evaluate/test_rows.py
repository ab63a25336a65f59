import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from coca_hf.errors import CocaError
from coca_hf.evaluate import rows
from coca_hf.evaluate.passkey import PasskeyRow
from coca_hf.evaluate.perplexity import PerplexityRow
from coca_hf.evaluate.rows import RowStore
from coca_hf.report.read import read_tables
from tests.report import made

ROW = {"model": "a", "fingerprint": "f", "task": "passkey", "rope": "default", "length": 512}
ROW |= {"seed": 0, "value": 0.25}


def test_a_row_is_found_by_its_settings_in_a_later_run(tmp_path):
    row = RowStore(tmp_path).append(PasskeyRow, ROW)
    store = RowStore(tmp_path)
    settings = {key: value for key, value in ROW.items() if key != "value"}
    assert store.find(PasskeyRow, settings | {"batch_size": 7}) == [row]
    other = {"length": 513, "rope": "linear:2", "fingerprint": "g", "new_tokens": 3, "model": "b"}
    other |= {"dtype": "bfloat16"}
    for name, value in other.items():
        assert store.find(PasskeyRow, settings | {name: value}) == []


def test_every_process_has_the_rows_that_the_main_one_finds(tmp_path, monkeypatch):
    RowStore(tmp_path / "main").append(PasskeyRow, ROW)
    sent = []
    monkeypatch.setattr(rows, "broadcast_object_list", lambda found: sent.append(found) or found)
    RowStore(tmp_path / "main")
    monkeypatch.setattr(rows, "processes", lambda: SimpleNamespace(is_main_process=False))
    monkeypatch.setattr(rows, "broadcast_object_list", lambda found: sent[0])
    assert len(RowStore(tmp_path / "of another machine").find(PasskeyRow, ROW)) == 1


@pytest.mark.parametrize("kept_bytes", [1, 40, -1, None])
def test_a_last_line_is_kept_without_its_line_break_but_not_cut_short(tmp_path, kept_bytes):
    path, second = tmp_path / "rows.jsonl", ROW | {"length": 1024}
    RowStore(tmp_path).append(PasskeyRow, ROW)
    path.write_bytes(path.read_bytes() + json.dumps(second).encode()[:kept_bytes])
    store, is_whole = RowStore(tmp_path), kept_bytes is None
    assert store.find(PasskeyRow, second) == [second] * is_whole
    store.append(PasskeyRow, ROW | {"length": 2048})
    lengths = [json.loads(line)["length"] for line in path.read_text().splitlines()]
    assert lengths == [512, *[1024] * is_whole, 2048]


def test_raw_tables_carry_the_rows_id_and_are_read_together(tmp_path):
    store = RowStore(tmp_path)
    first = store.append(PasskeyRow, ROW, {"cases": [{"case": 0}, {"case": 1}], "empty": []})
    second = store.append(PasskeyRow, ROW | {"length": 1024}, {"cases": [{"case": 0}]})
    assert first["raw"] == {"cases": f"passkey-cases/{first['row_id']}.parquet"}
    together = pq.read_table(tmp_path / "passkey-cases").to_pylist()
    assert sorted((line["row_id"] == first["row_id"], line["case"]) for line in together) == [
        *((False, 0), (True, 0), (True, 1))
    ]
    assert second["row_id"] != first["row_id"]
    assert RowStore(tmp_path).find(PasskeyRow, ROW) == [first]


def test_rows_that_two_commands_write_at_once_are_all_kept_whole(tmp_path, monkeypatch):
    """Each line in two halves, with time between them."""

    def in_halves(path, line):
        for half in (line[: len(line) // 2], line[len(line) // 2 :] + "\n"):
            with path.open("a") as file:
                file.write(half)
            time.sleep(0.01)

    monkeypatch.setattr("coca_hf.evaluate.rows.append_line", in_halves)

    def command(first):
        for length in range(first, first + 20, 2):
            RowStore(tmp_path).append(PasskeyRow, ROW | {"length": length})

    with ThreadPoolExecutor() as commands:
        list(commands.map(command, (1, 2)))
    lengths = [json.loads(line)["length"] for line in (tmp_path / "rows.jsonl").open()]
    assert sorted(lengths) == [*range(1, 21)]


def test_a_row_that_another_command_has_written_meanwhile_is_not_written_again(tmp_path):
    """Nor are its raw tables, unless that row ran out of memory."""
    stores = [RowStore(tmp_path) for _ in range(3)]
    made = [ROW | {"value": value} for value in (None, 0.25, 0.5)]
    made[0]["error"] = "OOM: one sequence alone does not fit"
    first, second, third = (
        store.append(PasskeyRow, row, {"cases": [{"case": row["value"]}]})
        for store, row in zip(stores, made, strict=True)
    )
    assert (first["value"], second["value"], third) == (None, 0.25, second)
    assert rows.read_rows(tmp_path / "rows.jsonl") == [first, second]
    assert pq.read_table(tmp_path / second["raw"]["cases"])["case"].to_pylist() == [0.25]


def test_rows_are_not_lost_if_the_file_was_damaged_meanwhile(tmp_path):
    store = RowStore(tmp_path)
    store.append(PasskeyRow, ROW)
    (tmp_path / "rows.jsonl").write_text("7\n")
    store.append(PasskeyRow, ROW | {"length": 1024})
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[1])["length"] == 1024


@pytest.mark.parametrize(
    "line", ["7", '{"a": 1}', json.dumps(ROW | {"value": "7"}), "\udcff", "[" * 9999]
)
def test_a_complete_line_that_is_not_a_row_is_refused_by_number_and_kept(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes((json.dumps(ROW) + f"\n{line}\n").encode(errors="surrogateescape"))
    with pytest.raises(CocaError, match=r"line 2: got no row of coca-eval; delete the line"):
        RowStore(tmp_path)
    assert path.read_text(errors="surrogateescape").splitlines()[1] == line


def test_an_unfinished_table_is_not_part_of_its_directory(tmp_path, monkeypatch):
    """Nor is one that a killed run has left; one whose disk was full goes."""
    store, seen = RowStore(tmp_path), []
    store.append(PasskeyRow, ROW, {"cases": [{"case": 7}]})

    def full(partial, path):
        seen.extend(pq.read_table(path.parent).to_pylist())
        assert partial.is_file()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CocaError, match=r"a row cannot be written .*No space left on device"):
        store.append(PasskeyRow, ROW | {"length": 1024}, {"cases": [{"case": 8}]})
    assert [line["case"] for line in seen] == [7]
    assert len(list((tmp_path / "passkey-cases").iterdir())) == 1


@pytest.mark.parametrize(
    "dates", [("2026-01-03", "2026-01-01"), ("2026-01-01", "2026-01-03"), ("2026-01-02",) * 2]
)
def test_the_page_and_a_later_run_use_the_same_row_of_a_measurement(tmp_path, dates):
    """The later, wherever it stands; of one second, the last."""
    rows = [
        made.row(value=value, date=f"{date}T00:00:00+00:00")
        for value, date in zip((8, 9), dates, strict=True)
    ]
    made.write_rows(tmp_path, *rows)
    (table,) = read_tables([tmp_path])
    (found,) = RowStore(tmp_path).find(PerplexityRow, rows[0])
    assert [row["value"] for row in table.rows] == [found["value"]]
    assert table.rows[0]["value"] == (8 if dates[0] > dates[1] else 9)


def test_a_row_that_ran_out_of_memory_gives_way_to_a_value_of_an_earlier_date(tmp_path):
    """As of a clock that was set back, or of another machine's."""
    full = made.row(value=None, error="OOM: full", date="2026-01-03T00:00:00+00:00")
    value = made.row(value=8.0, date="2026-01-01T00:00:00+00:00")
    made.write_rows(tmp_path, full, value)
    assert RowStore(tmp_path).find(PerplexityRow, value) == [value]
    (table,) = read_tables([tmp_path])
    assert [row["value"] for row in table.rows] == [8.0]


def test_only_rows_of_its_tasks_are_told_apart_by_lm_eval(monkeypatch):
    monkeypatch.setattr(rows, "versions", lambda *names: dict.fromkeys((*names, "python"), "1.0"))
    row = {"versions": rows.versions(*rows.PACKAGES), "commit": rows.commit()}
    older = row | {"versions": row["versions"] | {"lm-eval": "0.9"}}
    assert rows.made_otherwise([row]) is None
    assert "1 row was made before, with lm-eval 0.9; delete" in rows.made_otherwise([row, older])


def test_documents_are_identified_by_their_tokens(tmp_path):
    """Wherever they are read from, as when a relative path leads there from another directory."""
    row = made.row(data="../books", data_hash="t")
    store = RowStore(made.write_rows(tmp_path, row))
    assert store.find(PerplexityRow, row | {"data": "books"}) == [row]
    assert store.find(PerplexityRow, row | {"data_hash": "u"}) == []
