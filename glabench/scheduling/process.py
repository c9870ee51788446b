"""The parent's side of a worker process, which may answer, die or hang."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from glabench.measure.job import LOADED, Job
from glabench.measure.outcome import one_line
from glabench.records import Record
from glabench.sweeps.model import Cell

# Elsewhere, a paused worker would outlive a parent that is killed.
CAN_PAUSE = sys.platform == "linux"
_LOOK_AGAIN_S = 1.0
# From a folder on a network, torch may take minutes to load.
_LONGEST_LOAD_S = 300.0
_LAST_WAIT_S = 10.0
# Bytes of a worker's stderr that are read, from its end.
_MOST_ERRORS = 2**20


class WorkerDiedError(Exception):
    """The worker ended without an answer. The message says how."""


class WorkerTimeoutError(Exception):
    """The worker gave no answer in time."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return str(number)


def _started_by(pid: int) -> list[int]:
    """The processes that a process has started, those that they have, and so on; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # of a process that has ended
            # `PID (NAME) STATE PARENT ...`, where the name may be anything
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:  # which grows meanwhile
        found += children.get(each, [])
    return found[1:]


class Worker(Protocol):
    """Measures cells of one backend."""

    def is_loaded(self) -> bool:
        """Waits until a worker has loaded what it loads early; False if it has ended, or takes too long."""

    def pause(self) -> None:
        """Stops the worker until it measures a cell."""

    def measure(self, cell: Cell) -> Record:
        """Measures a cell. Raises ValueError for an answer that is not a record.

        Raises WorkerDiedError or WorkerTimeoutError; after either, the worker can only be closed.
        """

    def close(self) -> None:
        """Ends the worker, even in the middle of a cell."""


class ProcessWorker:
    """A worker in its own process and process group. Closing it kills the whole group.

    If GPUs share a cell, the worker is torchrun with a process per GPU, each of which leads a group; all are killed.
    The worker's stderr is kept for the reason of a crash, and printed at the end if `show_errors`. `variables` are
    added to its environment.
    """

    def __init__(self, job: Job, variables: Mapping[str, str], show_errors: bool = False) -> None:
        self._show_errors = show_errors
        self._timeout_s = job.settings.cell_timeout_s
        self._has_ranks = job.gpus > 1
        module = "launch" if self._has_ranks else "worker"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"glabench.measure.{module}", json.dumps(job.to_json())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            env={**os.environ, **variables},
        )
        self._unread = b""
        self._is_awaited = job.early
        self._load_until = time.monotonic() + _LONGEST_LOAD_S

    def is_loaded(self) -> bool:
        try:
            self._load()
        except (WorkerDiedError, WorkerTimeoutError):
            return False
        return self._process.poll() is None

    def _load(self) -> None:
        """Waits for the line that says that this is done. What the environment's own start writes is passed over."""
        while self._is_awaited:
            left_s = self._load_until - time.monotonic()
            line = self._read_line(left_s, f"torch, or what is loaded with it, took more than {_LONGEST_LOAD_S:g} s")
            self._is_awaited = line != LOADED.encode()

    def pause(self) -> None:
        """Stops the group, but no process that a package has started in a session of its own.

        If this process is killed meanwhile, the worker ends, and what it has started itself stays stopped.
        """
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:  # otherwise its answer will say that it has ended
            os.killpg(self._process.pid, number)

    def measure(self, cell: Cell) -> Record:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)  # does nothing to one that is not paused
        self._load()
        try:
            self._process.stdin.write(json.dumps(cell.to_json()).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDiedError(self._how_it_died()) from None
        return Record.from_line(
            self._read_line(self._timeout_s, f"no result within {self._timeout_s:g} s (--cell-timeout)")
        )

    def _read_line(self, longest_s: float, too_late: str) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + longest_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WorkerTimeoutError(too_late)
                if not selector.select(min(left, _LOOK_AGAIN_S)):
                    # A child that the worker left behind may keep the pipe open.
                    if self._process.poll() is not None:
                        raise WorkerDiedError(self._how_it_died())
                    continue
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise WorkerDiedError(self._how_it_died())
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _how_it_died(self) -> str:
        try:
            code = self._process.wait(timeout=_LAST_WAIT_S)
        except subprocess.TimeoutExpired:
            return "the worker no longer answers and does not end"
        end = f"was killed by signal {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            end += ", perhaps by the system, because the host's memory ran out"
        said = self._stderr().splitlines()
        return f"the worker {end}" + (f": {one_line(said[-1])}" if said else "")

    def _stderr(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _MOST_ERRORS))
        return self._errors.read().decode(errors="replace").strip()

    def close(self) -> None:
        groups = [self._process.pid]
        if self._has_ranks:
            self._process.send_signal(signal.SIGSTOP)  # so that it starts no rank while they are looked for
            groups += _started_by(self._process.pid)
        for group in groups:
            with suppress(ProcessLookupError):  # also of a process that leads no group
                os.killpg(group, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in the driver; the system has to end it
            self._process.wait(timeout=_LAST_WAIT_S)
        if self._show_errors and (said := self._stderr()):
            print(said, file=sys.stderr)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
