"""Steps of models in a loop, as training and decoding make them: when they have settled, their times, their energy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from glabench.devices.nvml import Nvml
from glabench.measure.cell import with_samples
from glabench.measure.energy import energy_per_call
from glabench.measure.memory import MIB, measure_memory
from glabench.measure.ranks import ALONE, Ranks
from glabench.measure.sampling import collect_samples
from glabench.measure.settings import Settings
from glabench.measure.timer import Between, Sample, Timer
from glabench.measure.watch import Watch
from glabench.measure.workload import Steps
from glabench.records import Record

# Steps are taken until the last ones are as alike as this, and so many at most.
_ALIKE, _LAST, _MOST_STEPS = 0.02, 3, 30


def settle(step: Callable[[], object], synchronize: Callable[[], None], ranks: Ranks = ALONE) -> None:
    """Steps until the last ones take equally long: the clock has settled, and everything is compiled."""
    times: list[float] = []
    for _ in range(_MOST_STEPS):
        start = time.perf_counter()
        step()
        synchronize()
        times.append(ranks.most(time.perf_counter() - start))
        last = times[-_LAST:]
        if len(last) == _LAST and max(last) <= (1 + _ALIKE) * min(last):
            return


def with_memory(record: Record, step: Callable[[], object], ranks: Ranks = ALONE) -> Record:
    """With the memory of a step, the most of any rank. On a GPU peaks are of all that torch holds: weights, states."""
    memory = measure_memory(Steps(None, step, None), record.cell.device)
    if record.cell.device == "cuda":
        allocated, reserved = _peaks_mib(step)
        memory = replace(memory, peak_allocated_mib=allocated, peak_reserved_mib=reserved)
    most: dict[str, Any] = {name: x if x is None else ranks.most(x) for name, x in asdict(memory).items()}
    return replace(record, **most)


def with_times(
    record: Record, step: Callable[[], object], between: Between, timer: Timer, settings: Settings, nvml: Nvml | None,
    repeated: Callable[[], object] | None = None, ranks: Ranks = ALONE,
) -> Record:  # fmt: skip
    """With samples of a step, the device's state and idle time, and energy, for which `repeated` (or the step) repeats.

    Of several ranks there is no energy: the counters of several GPUs do not step together.
    """
    sample, watch = timer.bind(None, step, between), Watch(nvml, is_loop=True)

    def watched() -> Sample:
        taken = sample()
        watch.look()
        return taken

    # By one clock, so that all ranks stop after the same sample.
    samples = collect_samples(watched, settings, clock=lambda: ranks.first(time.monotonic()))
    record = with_samples(record, samples, timer.name)
    record = replace(record, **asdict(watch.summary()))
    if nvml is None:
        return record
    others = nvml.processes().others
    record = replace(record, other_processes=others, gpu_idle_pct=None if others else watch.idle_pct())
    if settings.energy and record.time_ms and ranks.size == 1:
        energy = energy_per_call(repeated or step, record.time_ms / 1e3, timer.mark, nvml.energy_j)
        if energy is not None:
            record = replace(record, energy_j=energy.call_j, energy_call_ms=energy.call_ms)
    return record


def _peaks_mib(step: Callable[[], object]) -> tuple[float, float]:
    """What torch has allocated at most, and what it has reserved from the device."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB
