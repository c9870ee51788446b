"""Fixtures of the suite's tests: the command line in its own process, and in this one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import in_process
import pytest
import repositories
import small_plan

from glabench.backends import load_registry
from glabench.devices.environment import collect
from glabench.scheduling.plan import Place, make_plan
from glabench.scheduling.process import ProcessWorker
from glabench.sweeps import Sweep, Variant

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
def soon_settled(monkeypatch):
    """A few steps before those that are timed; beside other tests they never take equally long."""
    monkeypatch.setattr("glabench.measure.loop._MOST_STEPS", 3)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder with a plugin, in this process; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steady.py").write_text(in_process.PLUGIN)
    return lambda *arguments, **options: in_process.glabench(tmp_path, *arguments, **options)


@pytest.fixture(scope="session")
def made_repository(tmp_path_factory):
    """A repository with a committed plugin, and a baseline of it."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "steady.py").write_text(in_process.PLUGIN)
    (folder / "waiting.toml").write_text(repositories.SWEEP)
    (folder / ".gitignore").write_text("runs/\nbaseline.json\nwas-busy\n__pycache__/\n")
    repositories.git(folder, "init", "--quiet", "--initial-branch=main")
    repositories.commit(folder)
    save = ["baseline", "save", "waiting.toml", "--plugin", "steady.py", "--out", "baseline.json", "--rounds", "2"]
    assert in_process.glabench(folder, *save, "--device", "cpu")[0] == 0
    shutil.rmtree(folder / "runs")
    return folder


@pytest.fixture
def repository(made_repository, tmp_path):
    """A copy of that repository, in the test's own folder."""
    shutil.copytree(made_repository, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(scope="session")
def place():
    """A CPU, with the made-up backends beside the others."""
    return Place(collect("cpu"), load_registry([str(FAKES)]), (str(FAKES),))


@pytest.fixture
def plan(place):
    """Three cells of two backends."""
    sweep = Sweep("small", small_plan.AXES, (Variant("linear-torch"), Variant("gla-torch")), title="A small sweep")
    return make_plan(sweep, {}, small_plan.SETTINGS, place)


def last_line(stderr):
    """The command's last message, which must not be a traceback."""
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]
