"""Faults of the machine around a run: disks, permissions, memory, signals, clocks. Nothing measured is lost."""

import ctypes
import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from conftest import FAKES
from test_records import CELL, record

from glabench.errors import RecordNotKeptError, UsageError
from glabench.measure.outcome import failure_of
from glabench.measure.sampling import ClockError, collect_samples, relative_half_width
from glabench.measure.settings import Settings
from glabench.measure.timer import Sample
from glabench.records import RunFolder
from glabench.sweeps import load_sweep

SMALL = ["--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32", "--pass", "fwd", "--device", "cpu"]
QUICK = ["--time-limit", "0.02", "--plugin", FAKES, "--out", "here"]
SPEED = ["speed", "--seqlen", "16,32,48", *SMALL, *QUICK]
GOOD = [*SPEED, "--backend", "fake-good"]


def last_line(stderr):
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]


def statuses(stdout):
    return [(r["seqlen"], r["status"]) for r in json.loads(stdout)]


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "here", load_sweep("cpu-smoke"), {"python": "3"})


# Disks


def no_file_longer_than(size):
    """What a disk does that is full: a write takes a part, and the next one fails."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextmanager
def hardly_any_disk(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_run_with_a_line_and_what_was_measured_is_kept(glabench, tmp_path):
    many = [*GOOD, "--seqlen", "16..128:+16"]
    code, _, stderr = glabench(*many, preexec_fn=no_file_longer_than(4000))
    assert code == 2
    line = last_line(stderr)
    assert line.startswith("glabench: error: the record of fake-good fwd B=1 T=")
    assert "cannot be written: File too large" in line
    assert line.endswith("what was measured is kept, go on with --resume --out here")
    records = tmp_path / "here/records.jsonl"
    kept = records.read_bytes()
    assert kept.endswith(b"\n")
    done = kept.count(b"\n")
    assert 0 < done < 8
    records.write_bytes(kept + kept[:100])  # and a kill cut a line
    code, stdout, stderr = glabench(*many, "--resume", "--json", "-")
    assert code == 0
    assert f"{done} of 8 cells are done already" in stderr
    assert len(json.loads(stdout)) == 8
    assert records.read_bytes().startswith(kept)
    assert records.read_bytes().count(b"\n") == 8


OTHER = replace(CELL, seqlen=7)


def test_a_record_that_fits_in_part_leaves_the_file_as_it_was(folder):
    folder.append(record())
    before = (folder.path / "records.jsonl").read_bytes()
    with (
        hardly_any_disk(len(before) + 100),
        pytest.raises(RecordNotKeptError, match="File too large; what was"),
    ):
        folder.append(replace(record(), cell=OTHER))
    assert (folder.path / "records.jsonl").read_bytes() == before
    folder.append(replace(record(time_ms=2.0), cell=OTHER))
    assert [r.time_ms for r in folder.records()] == [1.5, 2.0]


def test_a_record_that_the_disk_gives_back_late_leaves_the_file_as_it_was(folder, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder.append(record())
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordNotKeptError, match="No space left"):
        folder.append(replace(record(), cell=OTHER))
    assert [r.cell for r in folder.records()] == [CELL]


def test_a_run_that_found_no_room_to_start_can_be_started_again(tmp_path):
    with hardly_any_disk(20), pytest.raises(UsageError, match=r"--out: cannot write to '.*': File too large"):
        RunFolder.create(tmp_path / "here", load_sweep("cpu-smoke"), {})
    assert RunFolder.create(tmp_path / "here", load_sweep("cpu-smoke"), {}).records() == []


def test_data_that_stdout_does_not_take_is_an_error_and_no_loss(glabench, tmp_path):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        code, _, stderr = glabench(*GOOD, "--seqlen", "16", "--json", "-", stdout=full)
    assert code == 2
    assert last_line(stderr) == "glabench: error: cannot write: No space left on device"
    assert (tmp_path / "here/records.jsonl").read_bytes().count(b"\n") == 1


# Two runs in one folder


def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(glabench, tmp_path):
    assert glabench(*GOOD, "--seqlen", "16", "-q")[0] == 0
    run = RunFolder.open(tmp_path / "here")
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with run.locked():
        code, _, stderr = glabench(*GOOD, "--seqlen", "16", "--retry-failed")
        assert (code, last_line(stderr)) == (2, "glabench: error: --out: another glabench is measuring into 'here'")
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before


def test_of_two_runs_that_start_at_once_one_gets_the_folder(tmp_path, monkeypatch):
    """The second one starts in the moment in which the first has made its first file, and before it wrote the rest."""
    from glabench.records import runfolder

    other = []

    def meanwhile(sweep):
        monkeypatch.undo()
        with pytest.raises(UsageError, match="holds a run already"):
            RunFolder.create(tmp_path / "here", load_sweep("head-dim"), {})
        other.append(sweep)
        return runfolder.dump_sweep(sweep)

    monkeypatch.setattr(runfolder, "dump_sweep", meanwhile)
    first = RunFolder.create(tmp_path / "here", load_sweep("cpu-smoke"), {})
    assert other
    assert first.sweep().variants == load_sweep("cpu-smoke").variants


# Permissions


def without_roots_override():
    """Binds root, too, to a file's permission bits: drops CAP_DAC_OVERRIDE for the program that is started next."""
    drop_from_bounding_set, dac_override = 24, 1
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0) != 0:
        os._exit(77)


@pytest.fixture
def locked_out(glabench, tmp_path):
    """Runs glabench as somebody who may read the folder `here` and not write to it."""
    probe = [sys.executable, "-c", f"open({str(tmp_path / 'here' / 'probe')!r}, 'w')"]
    here = tmp_path / "here"
    here.mkdir(exist_ok=True)
    here.chmod(0o555)
    if subprocess.run(probe, preexec_fn=without_roots_override, capture_output=True).returncode in (0, 77):
        pytest.skip("permissions do not bind this user")
    here.chmod(0o755)

    def call(*arguments):
        for path in here.iterdir():
            path.chmod(0o444)
        here.chmod(0o555)
        try:
            return glabench(*arguments, preexec_fn=without_roots_override)
        finally:
            here.chmod(0o755)
            for path in here.iterdir():
                path.chmod(0o644)

    return call


def test_a_folder_that_may_not_be_written_is_found_out_before_anything_is_measured(glabench, locked_out, tmp_path):
    denied = "glabench: error: --out: cannot write to 'here': Permission denied"
    code, _, stderr = locked_out(*GOOD)
    assert (code, last_line(stderr)) == (2, denied)
    assert glabench(*GOOD, "--seqlen", "16", "-q")[0] == 0
    before = (tmp_path / "here/records.jsonl").read_bytes()
    code, _, stderr = locked_out(*GOOD, "--seqlen", "16", "--resume")
    assert (code, last_line(stderr)) == (2, denied)
    code, _, stderr = locked_out("report", "here")
    assert (code, last_line(stderr)) == (2, "glabench: error: 'here/records.csv': Permission denied")
    assert (tmp_path / "here/records.jsonl").read_bytes() == before


def test_a_file_in_the_place_of_the_folder_is_named(glabench, tmp_path):
    (tmp_path / "here").write_text("")
    code, _, stderr = glabench(*GOOD)
    assert (code, last_line(stderr)) == (2, "glabench: error: --out: cannot write to 'here': it is not a folder")


# Workers


BAD_STATES = {
    "fake-sticky": ("error", "AcceleratorError: CUDA error: an illegal memory access was encountered"),
    "fake-hungry": ("oom", "out of memory"),
    "fake-killed": ("crashed", "the worker was killed by signal SIGKILL, perhaps by the system, because"),
    "fake-babbling": ("crashed", "the worker ended with exit code 9: the last words"),
}


def test_a_worker_in_a_bad_state_costs_the_cell_in_work_only(glabench):
    code, stdout, stderr = glabench(*SPEED, "--backend", ",".join(BAD_STATES), "--json", "-")
    assert statuses(stdout) == [
        pair for status, _ in BAD_STATES.values() for pair in [(16, "ok"), (32, status), (48, "ok")]
    ]
    for found in json.loads(stdout)[1::3]:
        assert found["reason"].startswith(BAD_STATES[found["backend"]][1])
    assert code == 4
    assert "Traceback" not in stderr


def test_a_batch_systems_signal_in_mid_cell_leaves_no_process_and_loses_no_record(tmp_path):
    command = [sys.executable, "-m", "glabench", *map(str, SPEED), "--backend", "fake-hanging", "-q"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while "glabench-fake-child" not in processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert last_line(stderr).endswith("interrupted; what was measured is kept, go on with --resume --out here")
    assert "glabench-fake-child" not in processes()
    assert [(r.cell.seqlen, r.status) for r in RunFolder.open(tmp_path / "here").records()] == [(16, "ok")]


def processes():
    return subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout


# Clocks


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 7])
def test_a_sample_that_no_call_can_take_ends_as_an_error_and_not_as_a_time(bad, at):
    times = iter([1.0] * at + [bad] + [1.0] * 100)
    with pytest.raises(ClockError) as caught:
        collect_samples(lambda: Sample(next(times)), Settings(least_time_s=0))
    failed = failure_of("run", CELL, caught.value)
    assert failed.status == "error"
    assert failed.reason.startswith("ClockError: the clock says that a call took ")


def test_samples_without_a_size_never_count_as_settled():
    assert relative_half_width([0.0] * 20) == math.inf


def test_a_clock_that_goes_back_does_not_prolong_the_sampling():
    ticks = iter([*range(0, 3), *range(-1000, 1000)])
    found = collect_samples(lambda: Sample(5.0), Settings(time_limit_s=5, least_time_s=99), clock=lambda: next(ticks))
    assert (len(found.kept), found.stop_reason) == (7, "time limit")


def test_a_clock_that_leaps_ends_the_sampling_as_one_that_did_not_settle():
    ticks = iter([0.0, 0.1, 0.2, *(1e9 + i for i in range(100))])
    found = collect_samples(lambda: Sample(5.0), Settings(time_limit_s=5), clock=lambda: next(ticks))
    assert (len(found.kept), found.stop_reason) == (3, "time limit")


# Plugins


def installed(tmp_path, code):
    """A package with an entry point for backends, as pip leaves it; the environment in which Python finds it."""
    (tmp_path / "extra_backends.py").write_text(code)
    info = tmp_path / "extra-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[glabench.backends]\nmore = extra_backends\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def test_env_lists_the_code_that_plugins_bring_and_runs_none_of_it(glabench, tmp_path):
    environment = installed(tmp_path, "raise SystemExit('was run')\n")
    (tmp_path / "mine.py").write_text("raise SystemExit('was run')\n")
    code, stdout, _ = glabench("env", "--plugin", "mine.py", "--json", "-", env=environment)
    assert code == 0
    assert json.loads(stdout)["plugins"] == [
        {"name": "more", "origin": "extra 1.2: extra_backends"},
        {"name": "mine", "origin": "--plugin mine.py"},
    ]
    code, stdout, _ = glabench("env", "--plugin", "mine.py", env=environment)
    assert "plugins more" in stdout
    assert "extra 1.2: extra_backends" in stdout
    assert glabench("env", "--plugin", "nope.py")[0] == 2


@pytest.mark.parametrize("code", ["import no_such_module", "raise SystemExit(0)"])
def test_a_package_whose_backends_cannot_be_loaded_is_named(glabench, tmp_path, code):
    code, _, stderr = glabench("speed", "--dry-run", env=installed(tmp_path, code))
    assert code == 2
    assert last_line(stderr).startswith("glabench: error: package more cannot be loaded; mend or uninstall it: ")
