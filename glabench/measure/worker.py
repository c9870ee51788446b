"""The worker process: measures cells of one backend.

    python -m glabench.measure.worker JOB_JSON [CELL_JSON]

Reads cells from stdin and writes records to stdout, each as one line of JSON. If it is started early, it loads torch
and what else takes long (`_load_early`) and writes a line first; it is paused while others are measured, and plugins
and backends' packages, which may take the device, are loaded with the first cell. What a backend prints goes to stderr,
so that it cannot be taken for a record. If GPUs share the cell, it is an argument, and this process is one of the
ranks: the first writes the record, or whichever fails.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from typing import IO

from glabench.backends import Registry, load_registry
from glabench.backends.base import refusal
from glabench.backends.builtin import BACKENDS
from glabench.backends.sites import open_site
from glabench.devices.nvml import open_nvml
from glabench.measure.job import LOADED, Job
from glabench.measure.kinds import KINDS, Meter
from glabench.measure.memory import free_memory_bytes
from glabench.measure.outcome import failure, failure_of, one_line
from glabench.measure.ranks import join_ranks, known_ranks
from glabench.measure.timer import timer_refuses
from glabench.records import Record
from glabench.sweeps.model import Cell

# Seconds before a rank says that it has failed: torchrun ends it within them if the reason is that another one died.
_GRACE_S = 1.0
# What `torch.autograd.grad` loads at its first call.
_FOR_GRADIENTS = "torch.fx.experimental.symbolic_shapes"
# How far an estimate of memory may be off.
_ROUGHLY = 2


@contextmanager
def private_stdout() -> Iterator[IO[str]]:
    """The original stdout, for records. From here on, file descriptor 1 leads to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)
        yield channel


def end_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, so that no orphan keeps the GPU."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _die_first() -> None:
    """Asks Linux to kill this process first when the host's memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write("1000")


class _Cells:
    """Measures cells one by one. Torch is loaded once a cell can run, if not before; `problem`: why that failed."""

    def __init__(self, registry: Registry, job: Job, problem: Exception | None = None) -> None:
        self._backend = registry[job.backend]
        self._op = registry.op_of(job.backend)
        self._job = job
        self._problem = problem
        self._meter: Meter | None = None
        self._ranks = known_ranks(job.gpus)

    def record(self, cell: Cell) -> Record | None:
        """The record of a cell; None if another rank has it."""
        try:
            reason = refusal(self._backend, self._op, cell) or timer_refuses(self._job.settings.timing, cell.pass_)
            if reason is not None:
                return failure(self._job, cell, "unsupported", reason)
            if self._problem is not None:
                raise self._problem
            if self._meter is None:
                self._meter = self._make_meter(cell)
            if (reason := self._too_large(cell)) is not None:
                return failure(self._job, cell, "oom", reason)
            record = self._meter.measure(cell)
            return record if self._ranks.rank == 0 else None
        except Exception as problem:
            traceback.print_exc()  # to stderr, which --verbose shows
            record = failure_of(self._job, cell, problem)
            if self._ranks.size == 1:
                return record
            time.sleep(_GRACE_S)
            return replace(record, reason=one_line(f"rank {self._ranks.rank}: {record.reason}"))

    def _too_large(self, cell: Cell) -> str | None:
        """Why there is no memory for a cell, as far as it can be told before.

        On a CPU a model's own tensors count, too, as they are estimated: the system would kill the process.
        """
        needed, free = self._op.least_bytes(cell), free_memory_bytes(cell.device)
        if free is None:
            return None
        said = f"{free / 2**30:.1f} GiB are free"
        if needed > free:
            return f"its tensors alone take {needed / 2**30:.1f} GiB; {said}"
        if cell.device != "cpu" or self._backend.work == "op":
            return None
        about = needed + self._backend.working_bytes(cell)
        return f"it takes about {about / 2**30:.0f} GiB; {said}" if about > _ROUGHLY * free else None

    def _make_meter(self, cell: Cell) -> Meter:
        nvml = None
        if self._ranks.size > 1:
            join_ranks(self._ranks, self._job.device, self._job.settings.cell_timeout_s)
        if cell.device == "cuda":
            import torch

            if self._ranks.size == 1:
                torch.cuda.set_device(self._job.device)
            nvml = open_nvml()
        return KINDS[self._backend.work].make_meter(self._op, self._backend, self._job, cell.device, nvml)


def _load_early(backend: str) -> Exception | None:
    """Loads torch, what gradients need, and what a backend of glabench names, as far as that is installed.

    Returns why something cannot be loaded, of which a second attempt would say something else.
    """
    named = (module for own in BACKENDS if own.name == backend for module in own.early_modules)
    try:
        import torch  # noqa: F401 - strictly: without a module that it needs, it fails in another way the second time

        for module in (_FOR_GRADIENTS, *named):
            with suppress(ModuleNotFoundError):
                import_module(module)
    except Exception as problem:
        return problem
    return None


def main(arguments: Sequence[str]) -> None:
    """Measures the cell that is given, or requested cells until stdin ends."""
    end_with_parent()
    _die_first()
    job = Job.from_json(json.loads(arguments[0]))
    if job.settings.autotune:
        os.environ["GLA_AUTOTUNE"] = "1"
    with private_stdout() as channel:
        open_site()
        problem = None
        if job.early:
            problem = _load_early(job.backend)
            print(LOADED, file=channel, flush=True)
        cells: _Cells | None = None
        for line in arguments[1:] or sys.stdin:
            cells = cells or _Cells(load_registry(job.plugins), job, problem)
            record = cells.record(Cell.from_json(json.loads(line)))
            if record is not None:
                print(record.to_line(), file=channel, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
