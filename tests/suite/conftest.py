"""Fixtures of the suite's tests: the command line in its own process, and in this one."""

import os
import subprocess
import sys
from pathlib import Path

import in_process
import pytest

from glabench.apart import ask_git
from glabench.scheduling.process import ProcessWorker

FAKES = Path(__file__).parent.parent / "fake_backends.py"
REAL = {"workers": ProcessWorker}
os.environ.pop("COLUMNS", None)  # which readline sets in workers of pytest, and which makes output narrow


@pytest.fixture
def glabench(tmp_path):
    """Runs the command line as a process in an empty folder; gives (exit code, stdout, stderr)."""

    def call(*arguments, timeout=120, **options):
        command = [sys.executable, "-m", "glabench", *map(str, arguments)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        done = subprocess.run(command, cwd=tmp_path, text=True, timeout=timeout, **options)
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.fixture
def command(tmp_path):
    """Runs the command line within this process, in an empty folder, with real workers unless others are given."""
    return lambda *arguments, **options: in_process.glabench(tmp_path, *arguments, **{**REAL, **options})


@pytest.fixture
def one_thread():
    """Small models are slower with more threads, all the more beside other tests."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder with a plugin, in this process; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steady.py").write_text(in_process.PLUGIN)
    return lambda *arguments: in_process.glabench(tmp_path, *arguments)


def last_line(stderr):
    """The command's last message, which must not be a traceback."""
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]


def git(folder, *arguments):
    """What git prints in a folder. Commits have a made-up author."""
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return ask_git(folder, *identity, *arguments)
