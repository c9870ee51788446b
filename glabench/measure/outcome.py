"""Turning what a backend raised into a record: a failure is data."""

import re

from glabench.records import Record, Status
from glabench.sweeps.model import Cell

_LONGEST_REASON = 300


def one_line(text: str) -> str:
    """The first line of a message that says something, cut to a readable length, without paths of the machine."""
    line = next((part.strip() for part in text.splitlines() if part.strip()), "no message")
    line = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", line)
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def failure(run_id: str, cell: Cell, status: Status, reason: str) -> Record:
    """The record of a cell that gave no measurement."""
    return Record(run_id, cell, status, one_line(reason))


def failure_of(run_id: str, cell: Cell, problem: BaseException) -> Record:
    """The record of a cell whose measurement raised."""
    if is_out_of_memory(problem):
        return failure(run_id, cell, "oom", str(problem) or "out of memory")
    return failure(run_id, cell, "error", f"{type(problem).__name__}: {problem}")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or the host."""
    if isinstance(problem, MemoryError) or type(problem).__name__ in ("OutOfMemoryError", "AcceleratorError"):
        return isinstance(problem, MemoryError) or "out of memory" in str(problem)
    # torch's CPU allocator has no exception of its own.
    return isinstance(problem, RuntimeError) and "not enough memory" in str(problem)
