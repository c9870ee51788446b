"""Turns exceptions of a backend into records: a failure is data."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from glabench.errors import printable
from glabench.measure.job import Job
from glabench.records import Record, Status
from glabench.sweeps.model import Cell

_LONGEST_REASON = 300


def one_line(text: str) -> str:
    """The most telling line of a message, at most 300 characters, without folders of the machine.

    This is the first line. A compiler's error starts with a position in the code, so its last line is added.
    """
    lines = [part.strip() for part in text.splitlines() if part.strip()] or ["no message"]
    line = lines[0]
    if re.search(r"\bat \d+:\d+:?$", line):
        line = f"{line} {lines[-1]}"
    line = re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", printable(line))
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 1] + "…"


def failure(job: Job, cell: Cell, status: Status, reason: str) -> Record:
    """The record of a cell that gave no measurement."""
    return Record(run_id=job.run_id, cell=cell, status=status, reason=one_line(reason), code=job.code)


def failure_of(job: Job, cell: Cell, problem: BaseException) -> Record:
    """The record of a cell whose measurement raised."""
    if is_out_of_memory(problem):
        return failure(job, cell, "oom", str(problem) or "out of memory")
    if any(words in str(problem) for words in _REFUSALS):
        return failure(job, cell, "unsupported", f"{type(problem).__name__}: {problem}")
    return failure(job, cell, "error", f"{type(problem).__name__}: {problem}")


# Messages of torch, its CPU allocator, cuBLAS and the driver (through Triton); few have their own exception.
_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
# Messages of scaled_dot_product_attention, restricted to one kernel, if this kernel does not support a shape; and of
# fla-core, whose backward with a gate per head refuses some versions of Triton on Hopper.
_REFUSALS = ("No available kernel", "No viable backend", "produces incorrect results for gated chunk_bwd_dqkwg")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the GPU or the host."""
    said = isinstance(problem, RuntimeError) and any(words in str(problem) for words in _OUT_OF_MEMORY)
    return said or isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"


@contextmanager
def own_check() -> Iterator[None]:
    """Says of an out-of-memory error that the suite's check of results raised it, and not the backend's call."""
    try:
        yield
    except Exception as problem:
        if not is_out_of_memory(problem):
            raise
        said = f" ({problem})" if str(problem) else ""
        raise MemoryError(
            f"the suite's check of results ran out of memory, not the backend; --check small leaves it out{said}"
        ) from problem
