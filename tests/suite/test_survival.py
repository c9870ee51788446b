"""Real worker processes and backends that misbehave: each costs its own cell only."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import FAKES

# Short samples; axes small enough for a correct cell to take milliseconds.
SMALL = ["--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32", "--pass", "fwd", "--device", "cpu"]
QUICK = ["--time-limit", "0.02", "--plugin", FAKES]
SPEED = ["speed", "--seqlen", "16,32,48", *SMALL, *QUICK]


def statuses(stdout):
    return [(r["seqlen"], r["status"]) for r in json.loads(stdout)]


@pytest.mark.parametrize(
    ("backend", "status", "reason"),
    [
        ("fake-raising", "error", "RuntimeError: a made-up fault"),
        ("fake-dying", "crashed", "the worker was killed by signal SIGSEGV: last words"),
        ("fake-leaving", "crashed", "the worker ended with exit code 7"),
        ("fake-oom", "oom", "CUDA out of memory"),
        ("fake-nan", "inaccurate", "o holds NaN or Inf"),
        ("fake-wrong", "inaccurate", "relative error beyond"),
    ],
)
def test_a_bad_cell_costs_itself_only(glabench, backend, status, reason):
    code, stdout, _ = glabench(*SPEED, "--backend", backend, "--json", "-")
    assert statuses(stdout) == [(16, "ok"), (32, status), (48, "ok")]
    bad = json.loads(stdout)[1]
    assert bad["reason"].startswith(reason)
    assert bad["time_ms"] is None
    assert code == 4


def test_a_hanging_cell_is_given_up_with_its_children(glabench):
    code, stdout, _ = glabench(*SPEED, "--backend", "fake-hanging", "--cell-timeout", "8", "--json", "-")
    assert statuses(stdout) == [(16, "ok"), (32, "timeout"), (48, "ok")]
    assert "--cell-timeout" in json.loads(stdout)[1]["reason"]
    assert code == 4
    assert "glabench-fake-child" not in subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(("flag", "launch"), [([], None), (["--autotune"], "tuned")], ids=str)
def test_autotune_is_passed_to_the_worker_and_what_was_launched_comes_back(glabench, flag, launch):
    _, stdout, _ = glabench(*SPEED, "--backend", "fake-good", *flag, "--json", "-")
    assert {record["launch"] for record in json.loads(stdout)} == {launch}


def test_an_unsupported_cell_is_a_record_and_no_failure(glabench):
    code, stdout, _ = glabench(*SPEED, "--backend", "fake-picky", "--json", "-")
    assert statuses(stdout) == [(16, "ok"), (32, "unsupported"), (48, "ok")]
    assert json.loads(stdout)[1]["reason"] == "32 tokens are too many"
    assert code == 0


def test_what_a_backend_prints_is_not_taken_for_data(glabench):
    code, stdout, _ = glabench(*SPEED, "--backend", "fake-chatty", "--json", "-")
    assert statuses(stdout) == [(16, "ok"), (32, "ok"), (48, "ok")]
    assert code == 0


def test_a_crash_is_seen_although_a_child_holds_the_pipe(glabench):
    _, stdout, _ = glabench(*SPEED, "--backend", "fake-forking", "--json", "-")
    assert statuses(stdout) == [(16, "ok"), (32, "crashed"), (48, "ok")]
    assert "exit code 3" in json.loads(stdout)[1]["reason"]


def test_one_backends_crash_does_not_touch_the_next(glabench):
    code, stdout, _ = glabench(*SPEED, "--backend", "fake-dying,fake-good", "--seqlen", "32", "--json", "-")
    assert [(r["backend"], r["status"]) for r in json.loads(stdout)] == [("fake-dying", "crashed"), ("fake-good", "ok")]
    assert code == 4


def _lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_suite_loses_at_most_the_cell_in_work_and_resumes(glabench, tmp_path, how):
    axes = ["speed", "--seqlen", "16..160:+16", *SMALL, "--backend", "fake-good,fake-slow", "--plugin", str(FAKES)]
    command = [*axes, "--time-limit", "0.3", "--out", str(tmp_path / "run")]
    records = tmp_path / "run" / "records.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "glabench", *command], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while _lines(records) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, how)
    _, stderr = process.communicate(timeout=30)
    done = _lines(records)
    assert 3 <= done < 20
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert stderr.decode().splitlines()[-1].startswith("glabench: error: interrupted; what was measured is kept")
    before = records.read_bytes()
    code, stdout, stderr = glabench(*command, "--resume", "--json", "-")
    assert code == 0
    assert f"{done} of 20 cells are done already" in stderr
    assert records.read_bytes().startswith(before)
    assert len({(r["backend"], r["seqlen"]) for r in json.loads(stdout)}) == _lines(records) == 20


def test_resume_without_out_takes_the_latest_run(glabench, tmp_path):
    command = [*SPEED, "--backend", "fake-good", "--json", "-"]
    assert glabench(*command)[0] == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1
    code, stdout, stderr = glabench(*command, "--resume")
    assert code == 0
    assert "3 of 3 cells are done already" in stderr
    assert len(json.loads(stdout)) == 3
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_failed_cells_are_measured_again_when_asked(glabench, tmp_path):
    plugin = tmp_path / "mended.py"
    plugin.write_text(FAKES.read_text())
    axes = ["speed", "--seqlen", "16,32", *SMALL, "--time-limit", "0.02", "--plugin", plugin, "--out", "here"]
    command = [*axes, "--backend", "fake-raising", "--json", "-"]
    assert statuses(glabench(*command)[1]) == [(16, "ok"), (32, "error")]
    plugin.write_text(FAKES.read_text().replace("bad_seqlen = 32", "bad_seqlen = 0"))
    code, stdout, stderr = glabench(*command, "--resume")
    assert (statuses(stdout), code) == ([(16, "ok"), (32, "error")], 4)
    code, stdout, stderr = glabench(*command, "--retry-failed")
    assert (statuses(stdout), code) == ([(16, "ok"), (32, "ok")], 0)
    assert "1 of 2 cells are done already" in stderr


def test_resume_on_another_machine_is_refused(glabench, tmp_path):
    command = [*SPEED, "--backend", "fake-good", "--out", "here"]
    assert glabench(*command)[0] == 0
    file = tmp_path / "here/environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cpu": "another"}))
    code, _, stderr = glabench(*command, "--resume")
    assert code == 2
    assert "was measured elsewhere (it differs in: cpu)" in stderr


def test_verbose_shows_the_traceback_of_a_failed_cell(glabench):
    _, _, stderr = glabench(*SPEED, "--backend", "fake-raising", "-v")
    assert "Traceback" in stderr
    assert "with a second line" in stderr


def test_resume_of_another_sweep_is_refused(glabench, tmp_path):
    assert glabench(*SPEED, "--backend", "fake-good", "--out", "here")[0] == 0
    code, _, stderr = glabench(*SPEED, "--backend", "fake-good", "--seqlen", "64", "--out", "here", "--resume")
    assert code == 2
    assert "--resume: 'here' holds another sweep" in stderr
