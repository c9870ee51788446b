"""Measures one cell: inputs, first call, accuracy, memory, samples, energy and rates become a record."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

from glabench.devices.nvml import Nvml
from glabench.measure.accuracy import first_nonfinite
from glabench.measure.at_size import Results
from glabench.measure.energy import energy_per_call
from glabench.measure.job import Job
from glabench.measure.memory import give_back_unused, limited, measure_memory
from glabench.measure.outcome import is_out_of_memory
from glabench.measure.physics import Physics
from glabench.measure.rates import with_rates
from glabench.measure.repeats import why_kept
from glabench.measure.sampling import Samples, collect_samples
from glabench.measure.spot_checks import SpotChecks, WrongResultError
from glabench.measure.timer import UNTOUCHED, Sample, Timer, nothing
from glabench.measure.watch import Watch
from glabench.measure.work import Work
from glabench.measure.workload import Steps, Workload, steps_of
from glabench.ops.base import as_tuple
from glabench.records import Record
from glabench.records.metrics import significant
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_WARM_UP_CALLS = 2
# The fastest of the samples that were looked at may be so much slower than the median before more are looked at: how
# many, and how many others there are between two of them at most.
_LEAST_SHARE_LOOKED_AT, _MORE_LOOKS, _MOST_BETWEEN = 0.8, 10, 2
# Calls back to back may take this share of the time of one alone, whose inputs are new.
_LEAST_SHARE_ALONE = 0.5


class CellMeter:
    """Measures the cells of one backend."""

    def __init__(self, work: Work, job: Job, timer: Timer, nvml: Nvml | None = None) -> None:
        self._work = work
        self._job = job
        self._timer = timer
        self._nvml = nvml
        self._physics: Physics | None = None

    def measure(self, cell: Cell) -> Record:
        """The record of a cell that the backend supports. Whatever the backend raises goes through."""
        return with_rates(self._measure(cell), self._work, self._job.ceilings)

    def _measure(self, cell: Cell) -> Record:
        """A cell that is refused keeps its errors, but neither time nor memory."""
        record = self._job.begin(cell)
        give_back_unused(cell.device)
        workload = self._work.prepare(cell)
        record = self._checked(record, workload)
        if record.status != "ok":
            return record
        give_back_unused(cell.device)
        checked, checks = record, None
        if record.check_seed is not None:
            # A graph's replays share what they keep for a backward, which frees it.
            goes_back = self._job.settings.timing != "graph"
            checks = self._work.spot_checks(cell, workload, goes_back)
        try:
            steps = steps_of(workload, cell)
            if checks is not None:
                checks.expect()
            record = replace(
                record,
                **asdict(
                    measure_memory(
                        steps,
                        cell.device,
                        checks or UNTOUCHED,
                        self._own_memory_mib,
                        self._job.settings.memory_limit_mib,
                    )
                ),
            )
            del steps  # and with it a forward's nodes, which must not outlive their stream
            steps = steps_of(workload, cell)
            samples, sampled, idle = self._sampled(record, steps, checks)
            reason = idle or _why_misled(samples) or self._why_impossible(sampled)
            try:
                reason = reason or self._why_kept(sampled, steps, checks)
            except Exception as problem:
                # It needs memory for a copy of an input, too. Single calls count without it, energy does not.
                if self._job.settings.timing == "eager" or not is_out_of_memory(problem):
                    raise
                return sampled
            if reason is not None:
                return replace(checked, status="suspicious", reason=reason)
            return self._with_energy(sampled, steps, checks)
        except WrongResultError as problem:
            return replace(checked, status="inaccurate", reason=str(problem))

    def _own_memory_mib(self) -> float | None:
        return None if self._nvml is None else self._nvml.processes().own_memory_mib

    def _measures_energy(self, record: Record, steps: Steps) -> bool:
        """Not that of a backward alone, which cannot run twice without its forward."""
        wanted = self._nvml is not None and self._job.settings.energy
        return wanted and steps.prepare is None and bool(record.time_ms)

    def _why_kept(self, record: Record, steps: Steps, checks: SpotChecks | None) -> str | None:
        """Why calls back to back, as they are made for eager times and for energy, cannot all have done their work."""
        repeats = self._job.settings.timing == "eager" or self._measures_energy(record, steps)
        return why_kept(steps.call, checks, self._timer.synchronize) if checks is not None and repeats else None

    def _why_impossible(self, record: Record) -> str | None:
        if not record.time_ms:
            return None
        if self._physics is None:
            self._physics = Physics(record.cell.device, self._timer, self._job.ceilings)
        least, written = self._work.least(record.cell), self._work.written_share(record.cell)
        return self._physics.why_impossible(record.time_ms, least, written)

    def _checked(self, record: Record, workload: Workload) -> Record:
        """With the time of the first call, and with its errors; inaccurate if they are too large."""
        cell = record.cell
        self._timer.synchronize()
        start = time.perf_counter()
        with limited(self._job.settings.memory_limit_mib):
            returned = workload.forward()
            if disorder := workload.disorder:
                return replace(record, status="inaccurate", reason=disorder)
            self._work.check_kind(cell, returned)
            gradients = _first_gradients(cell, workload, returned)
            self._timer.synchronize()
        record = replace(record, first_call_s=time.perf_counter() - start)
        self._work.check_gradients(cell, gradients)
        results = Results.of(workload, as_tuple(returned), gradients)
        nonfinite = first_nonfinite(results.by_error)
        if nonfinite is not None:
            return replace(record, status="inaccurate", reason=f"{nonfinite} holds NaN or Inf")
        # Drawn anew for every cell, so that no backend can know which parts are looked at closely.
        seed = secrets.randbits(31) if self._job.settings.check == "full" else None
        accuracy = self._work.check(cell, results, seed)
        record = replace(record, rel_error=accuracy.errors, accuracy_reference=accuracy.reference, check_seed=seed)
        # Last, because it runs code of the backend.
        record = replace(record, launch=self._work.launch(cell, workload))
        problem = accuracy.problem
        return record if problem is None else replace(record, status="inaccurate", reason=problem)

    def _sampled(self, record: Record, steps: Steps, checks: SpotChecks | None) -> tuple[Samples, Record, str | None]:
        """The samples, the record with them, and why some calls cannot have done their work; None if they can."""
        sample = self._timer.bind(steps.prepare, steps.call, checks or UNTOUCHED)
        self._warm_up(sample)
        if checks is not None:
            checks.begin()
        watch = Watch(self._nvml)
        looked_at_ms: list[float] = []

        def watched() -> Sample:
            taken = sample()
            if checks is not None and checks.looked:
                looked_at_ms.append(taken.ms)
            watch.look()
            return taken

        max_clock = self._nvml.max_sm_clock_mhz() if self._nvml is not None else None
        samples = collect_samples(watched, self._job.settings, max_clock)
        record = with_samples(record, samples, self._timer.name)
        processes = self._nvml.processes() if self._nvml is not None else None
        record = replace(
            record,
            **asdict(watch.summary()),
            other_processes=processes.others if processes is not None else None,
        )
        if checks is None:
            return samples, record, None
        checks.end()
        for _ in range(secrets.randbelow(_MOST_BETWEEN + 1)):  # so that nobody can know which sample is the next one
            sample()
        checks.expect(everything=True)
        looked_at_ms.append(sample().ms)  # as the samples before it, but all of its result is looked at
        checks.verify()
        idle = why_idle(sample, checks, looked_at_ms, record.time_ms or 0.0, record.other_processes or 0)
        return samples, record, idle

    def _with_energy(self, record: Record, steps: Steps, checks: SpotChecks | None) -> Record:
        """Adds joules per call. The last call's result is looked at."""
        if self._nvml is None or not record.time_ms or not self._measures_energy(record, steps):
            return record
        if checks is not None:
            checks.expect()
            checks.renew(nothing)
            checks.renew_gradients()
        held: list[object] = []

        def call() -> None:
            held.clear()  # before the call, which may need the memory
            held.append(steps.call())

        energy = energy_per_call(call, record.time_ms / 1e3, self._timer.mark, self._nvml.energy_j)
        if checks is not None:
            checks.keep(held[0])
            checks.look(held[0])
        return record if energy is None else replace(record, energy_j=energy.call_j, energy_call_ms=energy.call_ms)

    def _warm_up(self, sample: Callable[[], Sample]) -> None:
        end = time.monotonic() + min(self._job.settings.warm_up_s, self._job.settings.time_limit_s)
        for call in count(1):
            sample()
            if call >= _LEAST_WARM_UP_CALLS and time.monotonic() >= end:
                return


def _first_gradients(cell: Cell, workload: Workload, returned: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of a first call. A forward of training must allow a backward too.

    If it has no memory for that, nothing shows that it keeps what a backward needs, so its time does not count.
    """
    if cell.pass_ == "infer":
        return ()
    try:
        return workload.gradients(returned)
    except Exception as problem:
        if cell.pass_ != "fwd" or not is_out_of_memory(problem):
            raise
        raise MemoryError(
            f"no memory for the backward that compares a forward of training; --pass infer needs none ({problem})"
        ) from problem


def why_idle(
    sample: Callable[[], Sample], checks: SpotChecks, looked_at_ms: Sequence[float], time_ms: float, others: int = 0
) -> str | None:
    """Why calls whose results are not looked at cannot all have done their work, in a line; None if they can.

    If all that were right took longer than usual, more are looked at, and some between them are not. An honest backend
    takes as long for both, so noise costs time alone. Beside `others`, processes that take turns with it on the device,
    it may not: the device waits before a call that is looked at, and then it is another's turn.
    """

    def is_unusual(ms: float) -> bool:
        return _LEAST_SHARE_LOOKED_AT * ms > time_ms

    if not is_unusual(min(looked_at_ms)):
        return None
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_MORE_LOOKS):
        for is_expected in [False] * secrets.randbelow(_MOST_BETWEEN + 1) + [True]:
            if is_expected:
                checks.expect()
            ms = sample().ms
            found[checks.looked].append(ms)
        if not is_unusual(ms):
            return None
    fastest, usual = min(found[True]), median(found[False] or [time_ms])
    if _LEAST_SHARE_LOOKED_AT * fastest <= usual:
        return None
    reason = f"a call takes {significant(usual)} ms, but at least {significant(fastest)} if its result is looked at"
    return f"{reason}, perhaps because other processes use the GPU; end them and run again" if others else reason


def _why_misled(samples: Samples) -> str | None:
    """Why calls back to back cannot all have done their work, in a line; None if they can."""
    alone = [sample.alone_ms for sample in samples.kept if sample.alone_ms is not None]
    ms = median(sample.ms for sample in samples.kept)
    if alone and ms < _LEAST_SHARE_ALONE * median(alone):
        return f"{significant(ms)} ms is too short: one call alone takes {significant(median(alone))} ms"
    return None


def with_samples(record: Record, samples: Samples, timing: str) -> Record:
    """The record with the times of its samples."""
    import numpy as np

    # To the nanosecond, which no clock here tells, because digits beyond it would double the size of a run.
    times = tuple(round(sample.ms, 6) for sample in samples.kept)
    clocks = [sample.sm_clock_mhz for sample in samples.kept if sample.sm_clock_mhz is not None]
    hosts = [sample.host_ms for sample in samples.kept if sample.host_ms is not None]
    p20, middle, p80 = (float(x) for x in np.percentile(times, (20, 50, 80)))
    return replace(
        record,
        time_ms=middle,
        time_ms_p20=p20,
        time_ms_p80=p80,
        samples_ms=times,
        thrown_out_ms=tuple(round(sample.ms, 6) for sample in samples.thrown_out),
        exposed_samples=sum(sample.exposed for sample in samples.kept),
        sm_clock_mhz=median(clocks) if clocks else None,
        host_ms=median(hosts) if hosts else None,
        stop_reason=samples.stop_reason,
        timing=timing,
    )
