"""Measuring one cell, from inputs to a record: first call, accuracy gate, memory, samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

from glabench.backends import Backend, Workload
from glabench.measure.accuracy import Accuracy, check_accuracy, first_nonfinite, output_error_at_size, small_cell
from glabench.measure.ceiling import copy_bandwidth_gbps
from glabench.measure.memory import Memory, measure_memory
from glabench.measure.sampling import collect_samples
from glabench.measure.settings import Settings
from glabench.measure.timer import Timer
from glabench.records import Record
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_WARM_UP_CALLS = 2


@dataclass(frozen=True)
class _Steps:
    """A pass as calls: `prepare` runs before each timed `call` and is not timed."""

    prepare: Callable[[], object]
    call: Callable[[], object]
    forward: Callable[[], object] | None


def _steps(workload: Workload, cell: Cell) -> _Steps:
    def nothing() -> None:
        return None

    def both() -> tuple[Tensor, ...]:
        output = workload.forward()
        return (output, *workload.gradients(output))

    if not cell.has_backward:
        return _Steps(nothing, workload.forward, None)
    if cell.pass_ == "fwd+bwd":
        return _Steps(nothing, both, workload.forward)
    held: list[Tensor] = []

    def forward_first() -> None:
        held[:] = [workload.forward()]

    return _Steps(forward_first, lambda: workload.gradients(held[0]), workload.forward)


@dataclass(frozen=True)
class _FirstCall:
    """What the first call of a cell showed: its time, a fault that is plain to see, the error of its output."""

    seconds: float
    nonfinite: str | None
    output_error: float | None


def _first_call(backend: Backend, workload: Workload, cell: Cell, timer: Timer) -> _FirstCall:
    timer.synchronize()
    start = time.perf_counter()
    output = workload.forward()
    gradients = workload.gradients(output) if cell.has_backward else ()
    timer.synchronize()
    seconds = time.perf_counter() - start
    names = ("o", *(f"d{name}" for name in workload.inputs))
    nonfinite = first_nonfinite(dict(zip(names, (output, *gradients), strict=False)))
    del gradients
    return _FirstCall(seconds, nonfinite, None if nonfinite else output_error_at_size(backend, workload, output))


class CellMeter:
    """Measures cells of one backend; an accuracy check is made once for all cells that share its small cell."""

    def __init__(self, backend: Backend, settings: Settings, timer: Timer, run_id: str) -> None:
        self._backend = backend
        self._settings = settings
        self._timer = timer
        self._run_id = run_id
        self._checked: dict[Cell, Accuracy] = {}

    def measure(self, cell: Cell) -> Record:
        """The record of a cell that the backend supports. Whatever the backend raises goes through."""
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        copy_gbps = self._copy_gbps if cell.device == "cuda" else None
        record = Record(self._run_id, cell, "ok", started_at=started_at, copy_gbps=copy_gbps)
        workload = self._backend.prepare(cell)
        first = _first_call(self._backend, workload, cell, self._timer)
        launch = self._backend.launch(workload.inputs, cell)
        record = replace(record, first_call_s=first.seconds, launch=launch)
        if first.output_error is None:
            return replace(record, status="inaccurate", reason=f"{first.nonfinite} holds NaN or Inf")
        accuracy = self._accuracy(cell)
        accuracy = replace(accuracy, rel_error={**accuracy.rel_error, "o_at_size": first.output_error})
        record = replace(record, rel_error=accuracy.rel_error, accuracy_reference=accuracy.reference)
        if accuracy.problem is not None:
            return replace(record, status="inaccurate", reason=accuracy.problem)
        steps = _steps(workload, cell)
        memory = measure_memory(steps.prepare, steps.call, steps.forward) if cell.device == "cuda" else None
        self._warm_up(steps)
        samples, stop_reason = collect_samples(lambda: self._timer.sample(steps.prepare, steps.call), self._settings)
        record = _with_samples(_with_memory(record, memory), samples, stop_reason, self._timer.name)
        return self._with_bandwidth(record)

    @cached_property
    def _copy_gbps(self) -> float | None:
        """What a copy moves on the GPU, measured once, before the first cell takes memory."""
        return copy_bandwidth_gbps(self._timer, "cuda")

    def _with_bandwidth(self, record: Record) -> Record:
        if not record.time_ms:
            return record
        moved = self._backend.definition().moved_bytes(record.cell)
        return replace(record, gbps=moved / record.time_ms / 1e6)

    def _warm_up(self, steps: _Steps) -> None:
        end = time.monotonic() + min(self._settings.warm_up_s, self._settings.time_limit_s)
        for call in count(1):
            self._timer.sample(steps.prepare, steps.call)
            if call >= _LEAST_WARM_UP_CALLS and time.monotonic() >= end:
                return

    def _accuracy(self, cell: Cell) -> Accuracy:
        key = small_cell(cell)
        if key not in self._checked:
            self._checked[key] = check_accuracy(self._backend, key)
        return self._checked[key]


def _with_memory(record: Record, memory: Memory | None) -> Record:
    if memory is None:
        return record
    return replace(
        record,
        peak_allocated_mib=memory.peak_allocated_mib,
        peak_reserved_mib=memory.peak_reserved_mib,
        saved_mib=memory.saved_mib,
    )


def _with_samples(record: Record, samples: tuple[float, ...], stop_reason: str, timing: str) -> Record:
    import numpy as np

    p20, median, p80 = (float(x) for x in np.percentile(samples, (20, 50, 80)))
    return replace(
        record,
        time_ms=median,
        time_ms_p20=p20,
        time_ms_p80=p80,
        samples_ms=samples,
        stop_reason=stop_reason,
        timing=timing,
    )
