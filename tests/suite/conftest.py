"""Fixtures of the suite's tests."""

import subprocess
import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).parent.parent / "fake_backends.py"


@pytest.fixture
def glabench(tmp_path):
    """Runs the command line as a process in an empty folder; gives (exit code, stdout, stderr)."""

    def call(*arguments, timeout=120, **options):
        command = [sys.executable, "-m", "glabench", *map(str, arguments)]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        done = subprocess.run(command, cwd=tmp_path, text=True, timeout=timeout, **options)
        return done.returncode, done.stdout, done.stderr

    return call
