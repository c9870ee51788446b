"""Records and the run folder."""

import json
import math
from dataclasses import replace

import pytest

from glabench.errors import UsageError
from glabench.records import Record, RunFolder
from glabench.sweeps import Cell, load_sweep

CELL = Cell("gla-triton", "gla", "fwd+bwd", 32, 1024, 16, 64, 64, None, True, "bf16", "logsigmoid/16", "cuda")
PROMISED = (
    *("run_id", "backend", "op", "pass", "batch", "seqlen", "heads", "key_dim", "value_dim", "chunk", "materialize"),
    *("dtype", "device", "status", "reason", "time_ms", "time_ms_p20", "time_ms_p80", "samples_ms"),
    *("peak_allocated_mib", "peak_reserved_mib", "saved_mib", "first_call_s", "tflops", "gbps", "copy_gbps"),
    *("roofline_pct", "energy_j", "energy_call_ms", "sm_clock_mhz", "throttle", "rel_error", "accuracy_reference"),
    "launch",
)


def record(**changes):
    known = {"time_ms": 1.5, "samples_ms": (1.4, 1.5, 1.6), "rel_error": {"o": 3e-3}}
    return Record("run", CELL, "ok", **known | changes)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "a-run", load_sweep("cpu-smoke"), {"python": "3"})


def test_every_promised_field_is_in_the_line():
    assert set(PROMISED) <= set(json.loads(record().to_line()))


def test_what_is_absent_is_null_and_never_zero():
    data = json.loads(Record("run", CELL, "oom", "no room").to_line())
    assert all(data[name] is None for name in PROMISED[PROMISED.index("time_ms") :])


def test_a_record_survives_being_written_and_read():
    assert Record.from_json(json.loads(record().to_line())) == record()


def test_numbers_that_json_lacks_become_null():
    data = json.loads(record(time_ms=math.nan, rel_error={"o": math.inf}).to_line())
    assert data["time_ms"] is None
    assert data["rel_error"] == {"o": None}


def test_a_field_of_a_later_version_is_passed_over():
    data = json.loads(record().to_line()) | {"colour": "blue"}
    assert Record.from_json(data) == record()


OTHER = replace(CELL, seqlen=2048)


def test_appended_records_are_read_back_in_order(folder):
    folder.append(record(time_ms=1.0))
    folder.append(replace(record(time_ms=2.0), cell=OTHER))
    assert [r.time_ms for r in folder.records()] == [1.0, 2.0]


def test_the_latest_record_of_a_cell_counts(folder):
    folder.append(Record("run", CELL, "error", "a fault"))
    folder.append(replace(record(), cell=OTHER))
    folder.append(record(time_ms=3.0))
    assert [(r.cell, r.time_ms) for r in folder.records()] == [(CELL, 3.0), (OTHER, 1.5)]


def test_a_run_is_measured_into_by_one_process_alone(folder):
    with folder.locked(), pytest.raises(UsageError, match="another glabench"), RunFolder(folder.path).locked():
        pass


@pytest.mark.parametrize("rest", [b'{"run_id": "run", "ba', b"\xff\xfe", b"{}"])
def test_a_line_cut_off_by_a_kill_is_passed_over_and_replaced(folder, rest):
    folder.append(record(time_ms=1.0))
    with (folder.path / "records.jsonl").open("ab") as file:
        file.write(rest)
    assert [r.time_ms for r in folder.records()] == [1.0]
    folder.append(replace(record(time_ms=2.0), cell=OTHER))
    assert [r.time_ms for r in folder.records()] == [1.0, 2.0]


def test_a_bad_line_in_the_middle_is_named(folder):
    folder.append(record())
    (folder.path / "records.jsonl").write_text("nonsense\n" + record().to_line() + "\n")
    with pytest.raises(UsageError, match="line 1 is not a record"):
        folder.records()


def test_a_run_is_never_overwritten(folder):
    with pytest.raises(UsageError, match="holds a run already"):
        RunFolder.create(folder.path, load_sweep("cpu-smoke"), {})


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out: cannot write"):
        RunFolder.create(tmp_path / "file" / "run", load_sweep("cpu-smoke"), {})


def test_a_folder_without_records_is_not_a_run(tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        RunFolder.open(tmp_path)


def test_the_sweep_is_kept_with_the_run(folder):
    assert folder.sweep().variants == load_sweep("cpu-smoke").variants
    assert folder.environment() == {"python": "3"}
