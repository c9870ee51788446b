"""Real worker processes and backends that misbehave: each costs its own cell only. Signals: no record is lost.

Most fakes misbehave before their worker loads torch, which takes a tenth of a second instead of three.
"""

import json
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import in_process
import pytest
from conftest import FAKES, REAL, last_line

from glabench.measure.job import Job
from glabench.measure.settings import Settings
from glabench.records import RunFolder
from glabench.scheduling import process, starting
from glabench.scheduling.process import ProcessWorker, WorkerDiedError, WorkerTimeoutError
from glabench.sweeps import Cell, Parameters

# Short samples; axes small enough for a correct cell to take milliseconds.
SMALL = ["--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32", "--pass", "fwd", "--device", "cpu"]
SPEED = ["run", "cpu-smoke", "--seqlen", "16,32,48", *SMALL, "--time-limit", "0.02", "--plugin", FAKES]
BAD = {
    "fake-raising": ("error", "RuntimeError: a made-up fault"),
    "fake-dying": ("crashed", "the worker was killed by signal SIGSEGV: last words"),
    "fake-leaving": ("crashed", "the worker ended with exit code 7"),
    "fake-forking": ("crashed", "the worker ended with exit code 3"),  # although a child keeps the pipe open
    "fake-hungry": ("oom", "out of memory"),
    "fake-killed": ("crashed", "the worker was killed by signal SIGKILL, perhaps by the system, because"),
    "fake-babbling": ("crashed", "the worker ended with exit code 9: the last words"),
}
BAD_WHEN_CALLED = {
    **BAD,
    "fake-oom": ("oom", "CUDA out of memory"),
    "fake-nan": ("inaccurate", "o holds NaN or Inf"),
    "fake-wrong": ("inaccurate", "relative error beyond"),
    "fake-sticky": ("error", "AcceleratorError: CUDA error: an illegal memory access was encountered"),
}


TELLING = """
import os
from glabench.backends import Backend

class Telling(Backend):
    name, op, title, bind = "telling", "linear", "tells its surroundings", None

    def limits(self, cell):
        return f"{os.environ.get('MARK')} {os.environ.get('GLA_AUTOTUNE')}"

BACKENDS = [Telling]
"""


def records_of(folder):
    return RunFolder.open(folder).records()


@pytest.fixture
def lives(tmp_path):
    """Whether the child of this test's fake-hanging is alive; its worker needs a FAKE_CHILD in `tmp_path`."""
    return lambda: str(tmp_path) in subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout


def ends(lives):
    """Whether the child is gone soon: who kills it does not wait until the system has ended it."""
    deadline = time.monotonic() + 5
    while lives() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not lives()


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    """One run of all fakes that misbehave before torch is loaded, and two that do not; gives its folder and outcome."""
    folder = tmp_path_factory.mktemp("survived")
    names = ",".join([*BAD, "fake-chatty", "fake-good"])
    with mock.patch.object(starting, "_AT_ONCE", 1):  # those that wait would load torch
        ended = in_process.glabench(
            folder, *SPEED, "--backend", names, "--when", "limits", "--out", "here", "-v", **REAL
        )
    return folder / "here", ended


def test_a_bad_cell_costs_itself_only(survived):
    folder, (code, *_) = survived
    found = records_of(folder)
    assert len(found) == 3 * (len(BAD) + 2)
    for backend, (status, reason) in BAD.items():
        before, bad, after = (record for record in found if record.cell.backend == backend)
        assert (before.status, bad.status, after.status) == ("unsupported", status, "unsupported"), bad.reason
        assert bad.reason.startswith(reason)
        assert (bad.time_ms, bad.run_id) == (None, "here")
    assert code == 4
    assert len({record.code for record in found} - {None}) == 1


def test_what_a_backend_prints_is_not_taken_for_data(survived):
    chatty = [record for record in records_of(survived[0]) if record.cell.backend == "fake-chatty"]
    assert {(record.status, record.reason) for record in chatty} == {("unsupported", "nothing to measure")}


def test_verbose_shows_what_a_worker_said_with_the_traceback_of_a_failed_cell(survived):
    stderr = survived[1][2]
    assert "Traceback" in stderr
    assert "with a second line" in stderr
    assert "this is not a record" in stderr


def test_a_measured_cell_is_a_finished_record_and_a_device_in_a_bad_state_costs_one_cell(command, tmp_path):
    """The only default test in which torch runs in real workers: a broken device state does not leave its process."""
    code, _, stderr = command(*SPEED, "--backend", "fake-sticky", "--out", "here")
    good, bad, fresh = records_of(tmp_path / "here")
    assert (good.status, bad.status, fresh.status, code) == ("ok", "error", "ok", 4)
    assert bad.reason.startswith(BAD_WHEN_CALLED["fake-sticky"][1])
    assert all(value for value in (good.time_ms, good.samples_ms, good.first_call_s, good.gbps, good.tflops, good.code))
    assert (good.copy_gbps, good.timing, good.stop_reason) == (None, "cold, wall clock", "time limit")
    assert good.peak_resident_mib is not None or sys.platform != "linux"
    assert "Traceback" not in stderr


@pytest.mark.full
@pytest.mark.parametrize(("backend", "expected"), BAD_WHEN_CALLED.items(), ids=list(BAD_WHEN_CALLED))
def test_a_cell_that_goes_wrong_while_it_is_measured_costs_itself_only(command, tmp_path, backend, expected):
    code, *_ = command(*SPEED, "--backend", backend, "--out", "here")
    good, bad, fresh = records_of(tmp_path / "here")
    assert (good.status, bad.status, fresh.status, code) == ("ok", expected[0], "ok", 4)
    assert bad.reason.startswith(expected[1])


@pytest.mark.full
@pytest.mark.parametrize(("flag", "launch"), [([], None), (["--autotune"], "tuned")], ids=str)
def test_what_was_launched_comes_back(command, tmp_path, flag, launch):
    command(*SPEED, "--backend", "fake-good", *flag, "--out", "here")
    assert {record.launch for record in records_of(tmp_path / "here")} == {launch}


def test_an_unsupported_cell_is_a_record_and_no_failure(command, tmp_path):
    code, *_ = command(*SPEED, "--backend", "fake-picky", "--seqlen", "32", "--out", "here")
    assert [record.reason for record in records_of(tmp_path / "here")] == ["32 tokens are too many"]
    assert code == 3  # because there is nothing else


# A worker by itself


@pytest.fixture
def worker(tmp_path):
    """Starts a worker of a fake that misbehaves at 32 tokens; closes it at the end."""
    started = []

    def start(backend, **settings):
        job = Job(backend, "run", "cpu", Settings(**settings), (str(FAKES),), code="c0de")
        started.append(ProcessWorker(job, {"FAKE_CHILD": str(tmp_path)}))
        return started[-1]

    yield start
    for each in started:
        each.close()


def ask(worker, backend, seqlen):
    sizes = {"heads": 1, "key_dim": 16, "value_dim": 16, "when": "limits"}
    return worker.measure(Cell(backend, "linear", "fwd", 1, seqlen, "fp32", Parameters(sizes), "cpu"))


def test_a_worker_that_hangs_is_given_up_with_its_children(worker, lives):
    hanging = worker("fake-hanging", cell_timeout_s=1.5)
    assert ask(hanging, "fake-hanging", 16).status == "unsupported"
    with pytest.raises(WorkerTimeoutError, match=r"no result within 1.5 s \(--cell-timeout\)"):
        ask(hanging, "fake-hanging", 32)
    assert lives()
    hanging.close()
    assert ends(lives)


def test_a_worker_that_closes_its_output_and_lives_on_is_given_up(worker, monkeypatch):
    monkeypatch.setattr(process, "_LAST_WAIT_S", 0.2)
    with pytest.raises(WorkerDiedError, match="the worker no longer answers and does not end"):
        ask(worker("fake-closing"), "fake-closing", 32)


def test_a_worker_that_cannot_start_says_why(worker):
    with pytest.raises(WorkerDiedError, match="ended with exit code 1: KeyError: 'fake-nobody'"):
        ask(worker("fake-nobody"), "fake-nobody", 16)


def test_variables_and_autotuning_reach_the_worker(tmp_path):
    plugin = tmp_path / "telling.py"
    plugin.write_text(TELLING)
    for autotune, said in ((False, "of a version None"), (True, "of a version 1")):
        job = Job("telling", "run", "cpu", Settings(autotune=autotune), (str(plugin),))
        worker = ProcessWorker(job, {"MARK": "of a version"})
        assert ask(worker, "telling", 16).reason == said
        worker.close()


# Signals


# The command line in a process that is told its environment. Finding it out would take another one, and seconds.
START = """
import json, sys
from unittest import mock
from glabench import cli
environment = json.loads(sys.argv.pop(1))
with mock.patch("glabench.scheduling.plan.probe", lambda *_: environment):
    cli.main()
"""


def start_of(*arguments):
    """How to start the command line."""
    return [sys.executable, "-c", START, json.dumps(in_process.environment()), *map(str, arguments)]


def wait_until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_stopped_suite_loses_at_most_the_cell_in_work_and_resumes(command, tmp_path, how):
    many = ["--seqlen", "16..160:+16", "--backend", "fake-slow,fake-good", "--when", "limits", "--out", "here"]
    arguments = [*SPEED, *many]
    records = tmp_path / "here/records.jsonl"
    suite = subprocess.Popen(
        start_of(*arguments),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # A shell's background job ignores SIGINT, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: records.exists() and records.read_bytes().count(b"\n") >= 3)
    os.kill(suite.pid, how)
    stderr = suite.communicate(timeout=30)[1]
    before = records.read_bytes()
    done = before.count(b"\n")
    assert 3 <= done < 20
    if how == signal.SIGINT:
        assert suite.returncode == 130
        assert last_line(stderr).startswith("glabench: interrupted; what was measured is kept")
    _, _, stderr = command(*arguments, "--resume")
    assert f"{done} of 20 cells are already measured" in stderr
    assert records.read_bytes().startswith(before)
    assert len({(record.cell.backend, record.cell.seqlen) for record in records_of(tmp_path / "here")}) == 20
    assert records.read_bytes().count(b"\n") == 20


def test_a_batch_systems_signal_in_mid_cell_leaves_no_process_and_loses_no_record(tmp_path, lives):
    started = start_of(*SPEED, "--backend", "fake-hanging", "--when", "limits", "--out", "here", "-q")
    variables = {**os.environ, "FAKE_CHILD": str(tmp_path / "child")}
    suite = subprocess.Popen(started, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=variables)
    wait_until(lives)
    suite.send_signal(signal.SIGTERM)
    stderr = suite.communicate(timeout=30)[1]
    assert suite.returncode == 130
    assert last_line(stderr) == (
        "glabench: interrupted; what was measured is kept, continue with: glabench run --resume here"
    )
    assert ends(lives)
    assert [record.cell.seqlen for record in records_of(tmp_path / "here")] == [16]
