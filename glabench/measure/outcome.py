"""Turning what a backend raised into a record: a failure is data."""

import re

from glabench.errors import printable
from glabench.measure.job import Job
from glabench.records import Record, Status
from glabench.sweeps.model import Cell

_LONGEST_REASON = 300


def one_line(text: str) -> str:
    """The line of a message that says most, cut to a readable length, without paths of the machine.

    That is the first one; but a compiler's error starts with a place in the code and ends with the message.
    """
    lines = [part.strip() for part in text.splitlines() if part.strip()] or ["no message"]
    line = lines[0]
    if re.search(r"\bat \d+:\d+:?$", line):
        line = f"{line} {lines[-1]}"
    line = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", printable(line))
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def failure(job: Job, cell: Cell, status: Status, reason: str) -> Record:
    """The record of a cell that gave no measurement."""
    return Record(run_id=job.run_id, cell=cell, status=status, reason=one_line(reason), code=job.code)


def failure_of(job: Job, cell: Cell, problem: BaseException) -> Record:
    """The record of a cell whose measurement raised."""
    if is_out_of_memory(problem):
        return failure(job, cell, "oom", str(problem) or "out of memory")
    if any(words in str(problem) for words in _NO_KERNEL):
        return failure(job, cell, "unsupported", f"{type(problem).__name__}: {problem}")
    return failure(job, cell, "error", f"{type(problem).__name__}: {problem}")


# How torch, its CPU allocator, cuBLAS and the driver (through Triton) say it; few have an exception of their own.
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
# How scaled_dot_product_attention says that the one kernel it is held to cannot do a shape.
_NO_KERNEL = ("No available kernel", "No viable backend")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or the host."""
    said = isinstance(problem, RuntimeError) and any(words in str(problem) for words in _OUT_OF_MEMORY)
    return said or isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"
