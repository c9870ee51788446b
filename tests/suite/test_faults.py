"""Faults around a run: disks, permissions, other runs, packages. No measured record is lost."""

import ctypes
import errno
import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
from conftest import FAKES, last_line
from fake_workers import Workers
from simulated import CELL, record

from glabench.apart import ask_module
from glabench.errors import GlabenchError, RecordNotKeptError, UsageError
from glabench.records import RunFolder
from glabench.sweeps import load_sweep

SMALL = ["--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32", "--pass", "fwd", "--device", "cpu"]
MANY = ["run", "cpu-smoke", "--seqlen", "16..128:+16", *SMALL, "--plugin", FAKES, "--backend", "fake-good"]
GOOD = [*MANY, "--seqlen", "16", "--out", "here"]
OTHER = replace(CELL, seqlen=7)


@pytest.fixture
def measure(command):
    """Runs a command with made-up workers in an empty folder; gives (exit code, stdout, stderr)."""
    return lambda *arguments, **options: command(*arguments, workers=Workers(), **options)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "here", load_sweep("cpu-smoke"), {"python": "3"})


# Disks


@contextmanager
def no_file_longer_than(size):
    """A full disk: a write stores a part of the data, and the next one fails.

    Bytecode is not kept meanwhile: some versions of Python do not see that its file was cut off, and then no later
    process can import that module (python/cpython#126606).
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # for processes that are started meanwhile
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_run_with_a_line_and_what_was_measured_is_kept(measure, tmp_path):
    with no_file_longer_than(4000):
        code, _, stderr = measure(*MANY, "--out", "here")
    assert code == 2
    line = last_line(stderr)
    assert line.startswith("glabench: error: the record of fake-good fwd B=1 T=")
    assert "cannot be written: File too large" in line
    assert line.endswith("what was measured is kept, continue with: glabench run --resume here")
    records = tmp_path / "here/records.jsonl"
    kept = records.read_bytes()
    assert kept.endswith(b"\n")
    done = kept.count(b"\n")
    assert 0 < done < 8
    records.write_bytes(kept + kept[:100])  # and a kill cuts off a line
    code, stdout, stderr = measure(*MANY, "--out", "here", "--resume", "--json", "-")
    assert code == 0
    assert f"{done} of 8 cells are already measured" in stderr
    assert len(json.loads(stdout)) == 8
    assert records.read_bytes().startswith(kept)
    assert records.read_bytes().count(b"\n") == 8


def test_a_record_that_fits_in_part_leaves_the_file_as_it_was(folder):
    folder.append(record([1.5]))
    before = (folder.path / "records.jsonl").read_bytes()
    with (
        no_file_longer_than(len(before) + 100),
        pytest.raises(RecordNotKeptError, match="File too large; what was"),
    ):
        folder.append(record([1.5], OTHER))
    assert (folder.path / "records.jsonl").read_bytes() == before
    folder.append(record([2.0], OTHER))
    assert [found.time_ms for found in folder.records()] == [1.5, 2.0]


def test_a_record_that_the_disk_gives_back_late_leaves_the_file_as_it_was(folder, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder.append(record([1.5]))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordNotKeptError, match="No space left"):
        folder.append(record([1.5], OTHER))
    assert [found.cell for found in folder.records()] == [CELL]


def test_a_run_that_found_no_room_to_start_can_be_started_again(tmp_path):
    with no_file_longer_than(20), pytest.raises(UsageError, match=r"--out: cannot write to '.*': File too large"):
        RunFolder.create(tmp_path / "here", load_sweep("cpu-smoke"), {})
    assert RunFolder.create(tmp_path / "here", load_sweep("cpu-smoke"), {}).records() == []


def test_data_that_stdout_does_not_take_is_an_error_and_no_loss(measure, tmp_path):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        code, _, stderr = measure(*GOOD, "--json", "-", stdout=full)
    assert code == 2
    assert last_line(stderr) == "glabench: error: cannot write: No space left on device"
    assert (tmp_path / "here/records.jsonl").read_bytes().count(b"\n") == 1


# Two runs in one folder


def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(measure, tmp_path):
    assert measure(*GOOD, "-q")[0] == 0
    run = RunFolder.open(tmp_path / "here")
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with run.locked():
        code, _, stderr = measure(*GOOD, "--retry-failed")
        assert (code, last_line(stderr)) == (
            2,
            "glabench: error: --out: another glabench is measuring into 'here'; wait for it or name another folder",
        )
    code, _, stderr = measure(*GOOD)
    assert code == 2
    assert "--out: 'here' already holds a run; resume it (--resume) or name another folder" in last_line(stderr)
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before


def test_of_two_runs_that_start_at_once_one_gets_the_folder(tmp_path, monkeypatch):
    """The second run starts after the first has made its first file, before it writes the others."""
    from glabench.records import runfolder

    other = []

    def meanwhile(sweep):
        monkeypatch.undo()
        with pytest.raises(UsageError, match="holds a run that is starting"):
            RunFolder.create(tmp_path / "here", load_sweep("head-dim"), {})
        other.append(sweep)
        return runfolder.dump_sweep(sweep)

    monkeypatch.setattr(runfolder, "dump_sweep", meanwhile)
    first = RunFolder.create(tmp_path / "here", load_sweep("cpu-smoke"), {})
    assert other
    assert first.sweep().variants == load_sweep("cpu-smoke").variants


# Permissions


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def without_roots_override():
    """Makes permission bits apply to root, too: drops CAP_DAC_OVERRIDE of this thread for a while."""
    third_version, dac_override = 0x20080522, 1 << 1
    library, header, sets = ctypes.CDLL(None), _Header(third_version, 0), (_Sets * 2)()
    if library.capget(ctypes.byref(header), sets) != 0:
        pytest.skip("this system has no capabilities")
    before = sets[0].effective
    sets[0].effective &= ~dac_override
    library.capset(ctypes.byref(header), sets)
    try:
        yield
    finally:
        sets[0].effective = before
        library.capset(ctypes.byref(header), sets)


@pytest.fixture
def locked_out(measure, tmp_path):
    """Runs glabench as a user who may read the folder `here` but not write to it."""
    here = tmp_path / "here"
    here.mkdir(exist_ok=True)

    def call(*arguments):
        for path in here.iterdir():
            path.chmod(0o444)
        here.chmod(0o555)
        try:
            with without_roots_override():
                if os.access(here, os.W_OK, effective_ids=True):
                    pytest.skip("permissions do not bind this user")
                return measure(*arguments)
        finally:
            here.chmod(0o755)
            for path in here.iterdir():
                path.chmod(0o644)

    return call


def test_a_folder_that_may_not_be_written_is_found_out_before_anything_is_measured(measure, locked_out, tmp_path):
    denied = "glabench: error: --out: cannot write to 'here': Permission denied"
    code, _, stderr = locked_out(*GOOD)
    assert (code, last_line(stderr)) == (2, denied)
    assert measure(*GOOD, "-q")[0] == 0
    before = (tmp_path / "here/records.jsonl").read_bytes()
    code, _, stderr = locked_out(*GOOD, "--resume")
    assert (code, last_line(stderr)) == (2, denied)
    code, _, stderr = locked_out("report", "here")
    assert (code, last_line(stderr)) == (2, "glabench: error: 'here/records.csv': Permission denied")
    assert (tmp_path / "here/records.jsonl").read_bytes() == before


def test_a_file_in_the_place_of_the_folder_is_named(measure, tmp_path):
    (tmp_path / "here").write_text("")
    code, _, stderr = measure(*GOOD)
    assert (code, last_line(stderr)) == (2, "glabench: error: --out: cannot write to 'here': it is not a folder")


# Processes


def test_a_process_that_ends_as_for_a_mistake_but_tells_none_is_an_error_of_its_own():
    with pytest.raises(GlabenchError, match="unrecognized arguments: --nonsense") as caught:
        ask_module("json.tool", "--nonsense")
    assert type(caught.value) is GlabenchError


# Streams and the working folder


def test_streams_that_are_closed_are_never_files_of_ours(glabench, tmp_path):
    code, *_ = glabench("sweeps", "--json", "all.json", preexec_fn=lambda: os.closerange(0, 3))
    assert code == 0
    assert json.loads((tmp_path / "all.json").read_text())
    code, _, stderr = glabench("sweeps", preexec_fn=lambda: os.close(1))
    assert (code, stderr) == (0, "")


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(glabench):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        assert glabench("sweeps", "nope", stderr=full)[0] == 2


def test_what_a_terminal_cannot_show_is_replaced(glabench, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (tmp_path / "mine.toml").write_text('title = "1 ± 2"\n[axes]\n[[backends]]\nname = "gla-torch"\n', "utf-8")
    code, stdout, stderr = glabench("sweeps", "mine.toml")
    assert code == 0, stderr
    assert 'title = "1 ? 2"' in stdout


def test_a_working_folder_that_is_gone_is_a_mistake_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = subprocess.run([sys.executable, "-m", "glabench", "env"], capture_output=True, text=True)
    message = "glabench: error: the working folder no longer exists; change to another one\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


# Packages with plugins


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package with an entry point for backends, in the form that pip leaves."""

    def install(code):
        (tmp_path / "extra_backends.py").write_text(code)
        info = tmp_path / "extra-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("[glabench.backends]\nmore = extra_backends\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("extra_backends", None)


def test_env_lists_the_code_that_plugins_bring_and_runs_none_of_it(command, installed, tmp_path):
    installed("raise SystemExit('was run')\n")
    (tmp_path / "mine.py").write_text("raise SystemExit('was run')\n")
    code, stdout, stderr = command("env", "--plugin", "mine.py", "--json", "-")
    assert code == 0, stderr
    assert json.loads(stdout)["plugins"] == [
        {"name": "more", "origin": "extra 1.2: extra_backends"},
        {"name": "mine", "origin": "--plugin mine.py"},
    ]
    stdout = command("env", "--plugin", "mine.py")[1]
    assert "plugins more" in stdout
    assert "extra 1.2: extra_backends" in stdout
    assert command("env", "--plugin", "nope.py")[0] == 2


@pytest.mark.parametrize("code", ["import no_such_module", "raise SystemExit(0)"])
def test_a_package_whose_backends_cannot_be_loaded_is_named(command, installed, code):
    installed(code)
    code, _, stderr = command("speed", "--dry-run")
    assert code == 2
    assert last_line(stderr).startswith("glabench: error: package more cannot be loaded; fix or uninstall it: ")
