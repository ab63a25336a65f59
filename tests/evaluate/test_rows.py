import json

import pytest

from coca_hf.errors import CocaError
from coca_hf.evaluate.rows import RowStore

ROW = {"model": "a", "fingerprint": "f", "task": "passkey", "rope": "default", "length": 512, "seed": 0, "value": 0.25}


def test_a_row_is_found_by_its_settings_in_a_later_run(tmp_path):
    RowStore(tmp_path).append(ROW)
    store = RowStore(tmp_path)
    settings = {key: value for key, value in ROW.items() if key != "value"}
    assert store.find(settings | {"batch_size": 7}) == ROW
    for change in ({"length": 513}, {"rope": "linear:2"}, {"fingerprint": "g"}, {"new_tokens": 3}, {"model": "b"}):
        assert store.find(settings | change) is None


@pytest.mark.parametrize("kept_bytes", [1, 40, -1])
def test_a_last_line_that_a_kill_cut_short_is_dropped_and_the_file_goes_on(tmp_path, kept_bytes):
    path = tmp_path / "rows.jsonl"
    RowStore(tmp_path).append(ROW)
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(ROW | {"length": 1024}).encode()[:kept_bytes])
    store = RowStore(tmp_path)
    assert path.read_bytes() == whole
    assert store.find(ROW | {"length": 1024}) is None
    store.append(ROW | {"length": 2048})
    assert [json.loads(line)["length"] for line in path.read_text().splitlines()] == [512, 2048]


def test_cases_cut_short_are_repaired_too(tmp_path):
    store = RowStore(tmp_path)
    store.append(ROW, [{"case": 0}, {"case": 1}])
    with (tmp_path / "passkey-cases.jsonl").open("a") as file:
        file.write('{"case": 2, "out')
    store.append(ROW | {"length": 1024}, [{"case": 0}])
    cases = [json.loads(line) for line in (tmp_path / "passkey-cases.jsonl").read_text().splitlines()]
    assert [(case["length"], case["case"]) for case in cases] == [(512, 0), (512, 1), (1024, 0)]


@pytest.mark.parametrize("line", ["not json", "[1, 2]", "7"])
def test_a_whole_line_that_is_no_row_is_refused_by_number_and_kept(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + f"\n{line}\n")
    with pytest.raises(CocaError, match="line 2: got no JSON object"):
        RowStore(tmp_path)
    assert path.read_text().splitlines()[1] == line


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(CocaError, match=r"--out .*out: got File exists, expected a directory or a free name"):
        RowStore(tmp_path / "out")
