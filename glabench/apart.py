"""Runs modules of the suite in processes of their own, and git.

The parent process must not import torch or hold memory on a GPU, so what needs either is a module that prints JSON.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from glabench.errors import ExitCode, GlabenchError, UsageError
from glabench.plain import read_json

# Git sets these in its hooks, for a repository that need not be the one that is asked about.
SET_BY_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


def ask_module(module: str, *arguments: str, timeout_s: float | None = None) -> Any:
    """The JSON that `python -m MODULE ARGUMENTS` prints in a fresh process.

    Raises UsageError for a mistake of the user, which the module tells with `tell_mistake`; otherwise GlabenchError
    with the last line of its stderr.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise GlabenchError(f"it took more than {timeout_s:g} s") from None
    except OSError as problem:
        raise GlabenchError(f"no process can be started: {problem.strerror or problem}") from None
    if done.returncode == ExitCode.USAGE:
        with suppress(ValueError, TypeError, KeyError):  # Python itself may end with this code, too
            raise UsageError(str(read_json(done.stdout)["error"]))
    if done.returncode != ExitCode.OK:
        raise GlabenchError((done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1])
    try:
        return read_json(done.stdout)
    except ValueError:
        raise GlabenchError("its output is not JSON; something else wrote to its stdout") from None


def tell_mistake(problem: UsageError) -> ExitCode:
    """In a module that is asked: prints a mistake of the user, and returns the exit code to end with."""
    print(json.dumps({"error": str(problem)}))
    return ExitCode.USAGE


def ask_git(folder: Path, *arguments: str, timeout_s: float | None = None) -> str:
    """What git prints in a folder, stripped. Raises GlabenchError if it fails or is missing."""
    variables = {name: value for name, value in os.environ.items() if name not in SET_BY_HOOKS}
    # Takes no lock that it can do without, because the user may be working in the repository.
    variables["GIT_OPTIONAL_LOCKS"] = "0"
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=variables)
    except OSError as problem:
        raise GlabenchError(f"git does not run here: {problem.strerror}; install it") from None
    except subprocess.TimeoutExpired:
        raise GlabenchError(f"git {arguments[0]} took more than {timeout_s:g} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise GlabenchError(f"git {arguments[0]} failed: {said[-1]}")
    return done.stdout.strip()
