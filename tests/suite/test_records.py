"""Records and the run folder."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from glabench.backends import load_registry
from glabench.errors import RecordNotKeptError, UsageError
from glabench.records import Record, Run, RunFolder
from glabench.records.run import rows_of
from glabench.sweeps import Cell, Parameters, Sweep, Variant, expand, load_sweep, resolve

SIZES = {"heads": 16, "key_dim": 64, "value_dim": 64, "materialize": "states", "gate": "logsigmoid/16"}
CELL = Cell("gla-triton", "gla", "fwd+bwd", 32, 1024, "bf16", Parameters(SIZES))
OTHER = replace(CELL, seqlen=2048)
ATTENTION = Cell("sdpa-math", "softmax", "fwd", 2, 64, "fp32", Parameters({"heads": 4, "head_dim": 32}), "cpu", 7)
MAMBA = Cell("mamba1", "mamba1", "fwd", 2, 64, "bf16", Parameters({"inner": 2048, "state_size": 16}))
# The fields of the first version's records. Scripts read them, so none may be removed.
PROMISED = (
    *("run_id", "backend", "op", "pass", "batch", "seqlen", "heads", "key_dim", "value_dim", "chunk", "materialize"),
    *("dtype", "gate", "device", "seed", "status", "reason", "time_ms", "time_ms_p20", "time_ms_p80", "samples_ms"),
    *("thrown_out_ms", "exposed_samples", "stop_reason", "timing", "first_call_s", "peak_allocated_mib"),
    *("peak_reserved_mib", "saved_mib", "process_memory_mib", "tflops", "gbps", "copy_gbps", "product_tflops"),
    *("roofline_pct", "energy_j", "energy_call_ms", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w"),
    *("other_processes", "throttle", "rel_error", "accuracy_reference", "launch", "started_at"),
)
RESULTS = sorted((Path(__file__).parents[2] / "results").rglob("records.jsonl"))


def record(cell=CELL, **changes):
    known = {"time_ms": 1.5, "samples_ms": (1.4, 1.5, 1.6), "rel_error": {"o": 3e-3}}
    return Record(cell=cell, run_id="run", **{"status": "ok", **known, **changes})


def oom(cell=CELL):
    return Record(cell=cell, run_id="run", status="oom", reason="no room")


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "a-run", load_sweep("cpu-smoke"), {"python": "3"})


# The line of a record


@pytest.mark.parametrize("cell", [CELL, ATTENTION, MAMBA], ids=lambda cell: cell.op)
def test_every_promised_field_is_in_the_line(cell):
    data = json.loads(record(cell).to_line())
    assert set(data) >= {*PROMISED, "schema", "parameters"}
    assert data["schema"] == 2
    assert data["parameters"] == list(cell.parameters)
    assert data.items() >= dict(cell.parameters).items()


def test_head_dims_are_told_as_those_of_keys_and_values_too():
    data = ATTENTION.to_json()
    assert (data["heads"], data["key_dim"], data["value_dim"], data["head_dim"]) == (4, 32, 32, 32)
    assert (data["chunk"], data["materialize"], data["gate"]) == (None, None, None)


def test_an_op_without_heads_has_none():
    data = MAMBA.to_json()
    assert (data["heads"], data["key_dim"], data["value_dim"]) == (None, None, None)
    assert (data["inner"], data["state_size"]) == (2048, 16)


def test_what_is_absent_is_null_and_never_zero():
    data = json.loads(oom().to_line())
    assert all(data[name] is None for name in PROMISED[PROMISED.index("time_ms") :])


def test_a_record_is_made_by_keyword():
    with pytest.raises(TypeError):
        Record(CELL, "run", "ok")


@pytest.mark.parametrize("one", [record(), oom(), record(ATTENTION, reason="é 🚀"), record(MAMBA, launch="C=16")])
def test_a_record_survives_being_written_and_read(one):
    assert Record.from_line(one.to_line()) == one
    assert "\n" not in one.to_line()


@pytest.mark.parametrize("value", [0, -3, 64, 0.5, 1.0, 2**40, "a text", True, False])
def test_parameters_of_a_plugin_survive_being_written_and_read(value):
    cell = Cell("mine", "mine", "fwd", 1, 2, "fp64", Parameters({"sub_chunk": value, "open": None}), "cpu", 3)
    again = Cell.from_json(json.loads(json.dumps(cell.to_json())))
    assert again == cell
    assert type(again.get("sub_chunk")) is type(value)


def test_text_that_no_encoding_takes_is_written_without_it(folder):
    folder.append(record(reason="caf\udce9", launch="a\nb"))
    (again,) = folder.records()
    assert (again.reason, again.launch) == ("caf ", "a b")
    other = RunFolder.create(folder.path / "other", load_sweep("cpu-smoke"), {"command": ["run", "caf\udce9.toml"]})
    assert other.environment()["command"] == ["run", "caf .toml"]


def test_numbers_that_json_lacks_become_null():
    data = json.loads(record(time_ms=math.nan, rel_error={"o": math.inf}).to_line())
    assert data["time_ms"] is None
    assert data["rel_error"] == {"o": None}


def test_what_a_later_version_adds_is_passed_over():
    data = record().to_json() | {"colour": "blue", "schema": 3}
    assert Record.from_json(data) == record()


# Records of the first schema, which do not name parameters

FIRST = {"run_id": "run", "batch": 2, "seqlen": 64, "dtype": "bf16", "device": "cuda", "seed": 0, "pass": "fwd"} | {
    **{"status": "ok", "heads": 4, "key_dim": 32, "value_dim": 32, "chunk": None, "materialize": None, "gate": None}
}


@pytest.mark.parametrize(
    ("old", "parameters"),
    [
        (
            {"backend": "gla-triton", "op": "gla", "materialize": False, "gate": "slow", "value_dim": 64},
            {"heads": 4, "key_dim": 32, "value_dim": 64, "materialize": "checkpoints", "gate": "slow"},
        ),
        (
            {"backend": "linear-torch", "op": "linear", "chunk": 16},
            {"heads": 4, "key_dim": 32, "value_dim": 32, "chunk": 16},
        ),
        ({"backend": "sdpa-math", "op": "softmax"}, {"heads": 4, "head_dim": 32}),
        ({"backend": "mamba1", "op": "mamba1", "key_dim": 16}, {"inner": 128, "state_size": 16}),
    ],
)
def test_records_of_the_first_schema_have_todays_parameters(old, parameters):
    cell = Record.from_json(FIRST | old).cell
    assert dict(cell.parameters) == parameters
    traits = load_registry().traits()
    sweep = Sweep("s", {"seqlen": "64", "batch": "2", "dtype": "bf16", "pass": "fwd"}, (Variant(old["backend"]),))
    assert expand(resolve(sweep, "cuda", parameters, traits), traits, "cuda") == [cell]


def test_softmax_of_the_first_schema_with_two_head_dims_keeps_both():
    cell = Record.from_json(FIRST | {"backend": "mine", "op": "softmax", "value_dim": 16}).cell
    assert dict(cell.parameters) == {"heads": 4, "key_dim": 32, "value_dim": 16}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_every_field_of_a_stored_record_comes_back_as_it_was(path):
    seen = set()
    for line in path.read_text().splitlines():
        data = json.loads(line)
        if data["op"] not in seen:
            seen.add(data["op"])
            again = Record.from_line(line).to_json()
            if isinstance(kept := data["materialize"], bool):  # before it had words
                data["materialize"] = "states" if kept else "checkpoints"
            if data["backend"] in ("gla-two-level", "linear-two-pass") and data["pass"] != "infer":
                # before they could keep nothing
                data |= {"materialize": "states", "parameters": sorted({*data["parameters"], "materialize"})}
            assert {name: again[name] for name in data} == data


# The folder


def test_appended_records_are_read_back_in_order(folder):
    folder.append(record(time_ms=1.0))
    folder.append(record(OTHER, time_ms=2.0))
    assert [r.time_ms for r in folder.records()] == [1.0, 2.0]


def test_the_latest_record_of_a_cell_counts(folder):
    folder.append(oom())
    folder.append(record(OTHER))
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
    folder.append(record(OTHER, time_ms=2.0))
    assert [r.time_ms for r in folder.records()] == [1.0, 2.0]


def test_a_bad_line_in_the_middle_is_named(folder):
    folder.append(record())
    (folder.path / "records.jsonl").write_text("nonsense\n" + record().to_line() + "\n")
    with pytest.raises(UsageError, match="line 1 is not a record"):
        folder.records()


def test_a_record_that_the_disk_does_not_take_leaves_those_before_it(folder, monkeypatch):
    folder.append(record(time_ms=1.0))

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        RecordNotKeptError, match="cannot be written: No space left on device; what was measured is kept"
    ):
        folder.append(record(OTHER))
    assert [r.time_ms for r in folder.records()] == [1.0]


def test_a_run_is_never_overwritten(folder):
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder.create(folder.path, load_sweep("cpu-smoke"), {})


def test_a_run_that_was_killed_before_it_began_is_to_be_deleted(tmp_path):
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(UsageError, match="holds a run that is starting, or was killed then; delete it or name"):
        RunFolder.check_free(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out: cannot write"):
        RunFolder.create(tmp_path / "file" / "run", load_sweep("cpu-smoke"), {})


def test_a_folder_without_records_is_not_a_run(tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        RunFolder.open(tmp_path)


def test_the_sweep_and_the_environment_are_kept_with_the_run(folder):
    assert folder.sweep() == replace(load_sweep("cpu-smoke"), name="a-run")
    assert folder.environment() == {"python": "3", "packages": {}}


def test_a_stored_sweep_with_the_old_word_loads_without_a_notice(folder):
    file = folder.path / "sweep.toml"
    file.write_text(file.read_text().replace("against =", "baseline ="))
    assert folder.sweep().against == "sdpa-math"


# The run


def test_a_run_is_complete_if_every_cell_has_a_record(folder):
    folder.append(record())
    (folder.path / "environment.json").write_text('{"cells": 2}')
    assert not folder.load().complete
    folder.append(oom(OTHER))
    run = folder.load()
    assert run.complete
    assert (run.name, run.cells, len(run.records)) == ("a-run", 2, 2)


def test_a_run_that_did_not_keep_its_number_of_cells_counts_as_complete(folder):
    folder.append(record())
    assert folder.load().complete


def test_a_row_is_flat_and_holds_what_can_be_derived():
    one = record(gbps=1000.0, copy_gbps=4000.0, peak_allocated_mib=12.0, rel_error={"o": 1e-3, "dq": 4e-3, "dk": None})
    (row,) = rows_of([one])
    assert row["cell"] == str(CELL)
    assert (row["samples"], "samples_ms" in row) == (3, False)
    assert (row["rel_error_o"], row["rel_error_dq"], row["rel_error_dk"], row["error"]) == (1e-3, 4e-3, None, 4e-3)
    assert (row["peak_mib"], row["floor_pct"]) == (12.0, 25.0)
    assert row["tokens_per_s"] == pytest.approx(32 * 1024 / 1.5e-3)
    assert not any(isinstance(value, list | dict | tuple) for value in row.values())


def test_a_row_of_a_failure_derives_nothing():
    (row,) = rows_of([oom()])
    assert [row[name] for name in ("peak_mib", "floor_pct", "tokens_per_s", "error", "samples")] == [None] * 5


def test_the_table_of_a_run_has_whole_sizes_that_may_be_missing(tmp_path):
    largest = replace(CELL, seqlen=2**62, parameters=Parameters(SIZES | {"heads": 2**63 - 1}))
    table = Run(tmp_path, load_sweep("guard"), {}, [record(largest), record(ATTENTION), oom(MAMBA)]).table()
    assert str(table["heads"].dtype) == "Int64"
    assert table["heads"].tolist()[:2] == [2**63 - 1, 4]
    assert table["heads"].isna().tolist() == [False, False, True]
    assert table["inner"].isna().tolist() == [True, True, False]
    assert list(table["status"]) == ["ok", "ok", "oom"]


def test_the_table_of_a_run_without_records_is_empty(tmp_path):
    assert Run(tmp_path, load_sweep("guard"), {}, []).table().empty
