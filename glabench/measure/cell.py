"""Measures one cell: inputs, first call, accuracy, memory, samples, energy and rates become a record."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from statistics import median

from glabench.backends import Backend
from glabench.devices.nvml import Nvml
from glabench.measure.accuracy import Accuracy, check_accuracy, first_nonfinite, output_error_at_size, small_cell
from glabench.measure.energy import energy_per_call
from glabench.measure.job import Job
from glabench.measure.memory import Memory, measure_memory
from glabench.measure.rates import with_rates
from glabench.measure.sampling import Samples, collect_samples
from glabench.measure.timer import Sample, Timer
from glabench.measure.watch import Watch
from glabench.measure.workload import Steps, Workload, prepare, steps_of
from glabench.ops import Op
from glabench.records import Record
from glabench.sweeps.model import Cell

_LEAST_WARM_UP_CALLS = 2


@dataclass(frozen=True)
class _FirstCall:
    """The first call of a cell: its time, the name of a tensor that is not finite, the error of its output."""

    seconds: float
    nonfinite: str | None
    output_error: float | None


def _first_call(op: Op, workload: Workload, cell: Cell, timer: Timer) -> _FirstCall:
    timer.synchronize()
    start = time.perf_counter()
    output = workload.forward()
    gradients = workload.gradients(output) if cell.has_backward else ()
    timer.synchronize()
    seconds = time.perf_counter() - start
    names = ("o", *(f"d{name}" for name in workload.inputs))
    nonfinite = first_nonfinite(dict(zip(names, (output, *gradients), strict=False)))
    del gradients
    return _FirstCall(seconds, nonfinite, None if nonfinite else output_error_at_size(op, cell, workload, output))


class CellMeter:
    """Measures cells of one backend. Cells that share a small cell are compared with the reference once."""

    def __init__(self, op: Op, backend: Backend, job: Job, timer: Timer, nvml: Nvml | None = None) -> None:
        self._op = op
        self._backend = backend
        self._job = job
        self._timer = timer
        self._nvml = nvml
        self._checked: dict[Cell, Accuracy] = {}

    def measure(self, cell: Cell) -> Record:
        """Measures a cell that the backend supports. Exceptions of the backend propagate."""
        record = self._measure(cell)
        return with_rates(record, self._op, self._backend, self._job.ceilings)

    def _measure(self, cell: Cell) -> Record:
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        record = Record(run_id=self._job.run_id, cell=cell, status="ok", code=self._job.code, started_at=started_at)
        workload = prepare(self._op, self._backend, cell)
        first = _first_call(self._op, workload, cell, self._timer)
        launch = self._backend.launch(workload.inputs, cell)
        record = replace(record, first_call_s=first.seconds, launch=launch)
        if first.output_error is None:
            return replace(record, status="inaccurate", reason=f"{first.nonfinite} holds NaN or Inf")
        accuracy = self._accuracy(cell)
        accuracy = replace(accuracy, rel_error={**accuracy.rel_error, "o_at_size": first.output_error})
        record = replace(record, rel_error=accuracy.rel_error, accuracy_reference=accuracy.reference)
        if accuracy.problem is not None:
            return replace(record, status="inaccurate", reason=accuracy.problem)
        steps = steps_of(workload, cell)
        record = _with_memory(record, measure_memory(steps, cell.device))
        del steps  # frees the forward's autograd nodes, which must not outlive their stream
        steps = steps_of(workload, cell)
        record = self._sampled(record, steps)
        return self._with_energy(record, steps)

    def _sampled(self, record: Record, steps: Steps) -> Record:
        sample = self._timer.bind(steps.prepare, steps.call)
        self._warm_up(sample)
        watch = Watch(self._nvml)

        def watched() -> Sample:
            taken = sample()
            watch.look()
            return taken

        max_clock = self._nvml.max_sm_clock_mhz() if self._nvml is not None else None
        samples = collect_samples(watched, self._job.settings, max_clock)
        record = _with_samples(record, samples, self._timer.name)
        seen = watch.summary()
        processes = self._nvml.processes() if self._nvml is not None else None
        return replace(
            record,
            memory_clock_mhz=seen.memory_clock_mhz,
            temperature_c=seen.temperature_c,
            power_w=seen.power_w,
            throttle=seen.throttle,
            process_memory_mib=processes.own_memory_mib if processes is not None else None,
            other_processes=processes.others if processes is not None else None,
        )

    def _with_energy(self, record: Record, steps: Steps) -> Record:
        """Adds joules per call, except for a backward alone, which cannot run twice without its forward."""
        if self._nvml is None or not self._job.settings.energy or steps.prepare is not None or not record.time_ms:
            return record
        energy = energy_per_call(steps.call, record.time_ms / 1e3, self._timer.mark, self._nvml.energy_j)
        return record if energy is None else replace(record, energy_j=energy.call_j, energy_call_ms=energy.call_ms)

    def _warm_up(self, sample: Callable[[], Sample]) -> None:
        end = time.monotonic() + min(self._job.settings.warm_up_s, self._job.settings.time_limit_s)
        for call in count(1):
            sample()
            if call >= _LEAST_WARM_UP_CALLS and time.monotonic() >= end:
                return

    def _accuracy(self, cell: Cell) -> Accuracy:
        key = small_cell(self._op, cell)
        if key not in self._checked:
            self._checked[key] = check_accuracy(self._op, self._backend, key)
        return self._checked[key]


def _with_memory(record: Record, memory: Memory) -> Record:
    return replace(
        record,
        peak_allocated_mib=memory.peak_allocated_mib,
        peak_reserved_mib=memory.peak_reserved_mib,
        peak_resident_mib=memory.peak_resident_mib,
        saved_mib=memory.saved_mib,
    )


def _with_samples(record: Record, samples: Samples, timing: str) -> Record:
    import numpy as np

    times = tuple(sample.ms for sample in samples.kept)
    clocks = [sample.sm_clock_mhz for sample in samples.kept if sample.sm_clock_mhz is not None]
    p20, middle, p80 = (float(x) for x in np.percentile(times, (20, 50, 80)))
    return replace(
        record,
        time_ms=middle,
        time_ms_p20=p20,
        time_ms_p80=p80,
        samples_ms=times,
        thrown_out_ms=tuple(sample.ms for sample in samples.thrown_out),
        exposed_samples=sum(sample.exposed for sample in samples.kept),
        sm_clock_mhz=median(clocks) if clocks else None,
        stop_reason=samples.stop_reason,
        timing=timing,
    )
