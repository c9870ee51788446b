"""Timers: one sample of one call, cold. What flushes the cache and what prepares the call is never timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_CPU_FLUSH_BYTES = 64 * 2**20
# The device spins before the clock starts, for longer than the host took to queue the last call: all launches of the
# timed call then wait in the queue, and what is timed is the device's work and not the gaps between launches.
# Calls that keep the host busy for longer than the bound are host-bound in real use, and are timed as such.
_LEAST_SPIN_S, _MOST_SPIN_S = 1e-4, 5e-3
_SPIN_MARGIN = 1.5
_CYCLES_PER_S = 2e9


class Timer(Protocol):
    """Times one call; `name` says how, and goes into the record."""

    name: str

    def sample(self, prepare: Callable[[], object], call: Callable[[], object]) -> float:
        """Runs `prepare`, flushes the cache, then times `call`; milliseconds."""

    def synchronize(self) -> None:
        """Waits until the device has done all of its work."""


class WallTimer:
    """The process' clock, on a CPU. A buffer larger than most last-level caches is written before each sample."""

    name = "cold, wall clock"

    def __init__(self) -> None:
        import torch

        self._flush = torch.empty(_CPU_FLUSH_BYTES, dtype=torch.int8)

    def sample(self, prepare: Callable[[], object], call: Callable[[], object]) -> float:
        prepare()
        self._flush.zero_()
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e6

    def synchronize(self) -> None:
        pass


class CudaTimer:
    """Device events on a GPU, launches hidden. A buffer of four times the L2 is written before each sample."""

    name = "cold, device events behind a spin"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self._flush: Tensor = torch.empty(4 * max(l2, 2**24), dtype=torch.int8, device="cuda")
        self._start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._spin_s = _LEAST_SPIN_S
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def sample(self, prepare: Callable[[], object], call: Callable[[], object]) -> float:
        prepare()
        self._flush.zero_()
        self._torch.cuda._sleep(int(self._spin_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        self._start.record()
        queued_at = time.perf_counter()
        kept = call()
        host_s = time.perf_counter() - queued_at
        self._end.record()
        self._spin_s = min(max(_SPIN_MARGIN * host_s, _LEAST_SPIN_S), _MOST_SPIN_S)
        self._end.synchronize()
        del kept  # freeing is the next call's business, not this one's
        return float(self._start.elapsed_time(self._end))

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()


def timer_for(device: str) -> Timer:
    """The timer of a device, "cuda" or "cpu"."""
    return CudaTimer() if device == "cuda" else WallTimer()
