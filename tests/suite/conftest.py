"""Fixtures of the suite's tests: the command line as a process, and within this one."""

import io
import signal
import subprocess
import sys
import warnings
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from glabench.cli import main
from glabench.devices.environment import collect

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


def run_command(folder, *arguments, workers=None, stdout=None):
    """Runs the command line within this process, in a folder; gives (exit code, stdout, stderr).

    Other than with the fixture `glabench` nothing is started but workers, and those are `workers` if they are given.
    """
    out, err = stdout or io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", ["glabench", *map(str, arguments)]))
        stack.enter_context(patch.object(sys, "path", list(sys.path)))
        for user in ("scheduling.plan", "cli.env"):
            stack.enter_context(patch(f"glabench.{user}.probe", collect))
        if workers is not None:
            for user in ("runs", "versions"):
                stack.enter_context(patch(f"glabench.scheduling.{user}.ProcessWorker", workers))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(chdir(folder))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        ended = stack.enter_context(pytest.raises(SystemExit))
        main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return ended.value.code, "" if stdout else out.getvalue(), err.getvalue()


@pytest.fixture
def command(tmp_path):
    """`run_command` in an empty folder."""
    return lambda *arguments, **options: run_command(tmp_path, *arguments, **options)


def last_line(stderr):
    """What the command said last; not a traceback."""
    assert "Traceback" not in stderr
    return stderr.strip().splitlines()[-1]
