"""Timers: one sample of one call. What flushes the cache and what prepares the call is never timed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from glabench.measure.settings import Timing

if TYPE_CHECKING:
    from torch import Tensor

_CPU_FLUSH_BYTES = 64 * 2**20
# The device spins before the clock starts, for longer than the host took to queue any of the last calls: all launches
# of the timed call then wait in the queue, and what is timed is the device's work and not the gaps between launches.
# Calls that keep the host busy for longer than the bound are host-bound in real use, and are timed as such.
_LEAST_SPIN_S, _MOST_SPIN_S = 1e-4, 5e-3
_SPIN_MARGIN = 1.5
_CALLS_LOOKED_BACK = 16
_CYCLES_PER_S = 2e9
_CALLS_BEFORE_CAPTURE = 3

Step = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """One timed call: milliseconds, the mean SM clock around it in MHz, and whether launch latency may be in it.

    `exposed`: the device had begun before the host had queued the whole call, so that gaps between launches count.
    """

    ms: float
    sm_clock_mhz: float | None = None
    exposed: bool = False


class Timer(Protocol):
    """Times one call; `name` says how, and goes into the record."""

    name: str

    def bind(self, prepare: Step | None, call: Step) -> Callable[[], Sample]:
        """A function that runs `prepare`, flushes the cache if the timing is a cold one, then times `call`."""

    def synchronize(self) -> None:
        """Waits until the device has done all of its work."""

    def mark(self) -> Callable[[], None]:
        """A function that waits until the device has done all that was queued before this call."""


class WallTimer:
    """The process' clock, on a CPU. Cold: a buffer larger than most last-level caches is written before each sample."""

    def __init__(self, timing: Timing = "cold") -> None:
        import torch

        self.name = f"{timing}, wall clock"
        self._flush = torch.empty(_CPU_FLUSH_BYTES, dtype=torch.int8) if timing == "cold" else None

    def bind(self, prepare: Step | None, call: Step) -> Callable[[], Sample]:
        return partial(self._sample, prepare, call)

    def _sample(self, prepare: Step | None, call: Step) -> Sample:
        if prepare is not None:
            prepare()
        if self._flush is not None:
            self._flush.zero_()
        start = time.perf_counter_ns()
        kept = call()
        elapsed = time.perf_counter_ns() - start
        del kept  # freeing is not the call's business
        return Sample(elapsed / 1e6)

    def synchronize(self) -> None:
        pass

    def mark(self) -> Callable[[], None]:
        return self.synchronize


class CudaTimer:
    """Device events on a GPU, launches hidden behind a spin, the SM clock read before and after.

    `cold`: a buffer of four times the L2 is written before each sample; as with Triton's do_bench and NVIDIA's nvbench
    the call then also waits for dirty lines to leave the L2, as it would behind any kernel that writes. `hot`: nothing
    is flushed, and the call finds what the last one left. `graph`: cold, and the call is replayed from a CUDA graph.
    """

    def __init__(self, timing: Timing = "cold") -> None:
        import torch

        from glabench.devices.clock import sm_clock

        self.name = {
            "cold": "cold, device events behind a spin",
            "hot": "hot, device events behind a spin",
            "graph": "graph, cold, device events behind a spin",
        }[timing]
        self._torch = torch
        self._captures = timing == "graph"
        if self._captures:
            # The default stream cannot be captured, and a backward runs on the stream that its inputs' nodes were made
            # on: from here on all work of this process goes to a stream of its own.
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush: Tensor | None = None
        if timing != "hot":
            self._flush = torch.empty(4 * max(l2, 2**24), dtype=torch.int8, device="cuda")
        self._start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._host_s: deque[float] = deque(maxlen=_CALLS_LOOKED_BACK)
        self._clock = sm_clock()

    def bind(self, prepare: Step | None, call: Step) -> Callable[[], Sample]:
        if self._captures:
            prepare, call = captured(prepare, call)
        return partial(self._sample, prepare, call)

    def _sample(self, prepare: Step | None, call: Step) -> Sample:
        if prepare is not None:
            prepare()
        if self._flush is not None:
            self._flush.zero_()
        if self._clock is not None:
            self._clock.begin()
        spin_s = min(max(_SPIN_MARGIN * max(self._host_s, default=0.0), _LEAST_SPIN_S), _MOST_SPIN_S)
        self._torch.cuda._sleep(int(spin_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        self._start.record()
        queued_at = time.perf_counter()
        kept = call()
        self._host_s.append(time.perf_counter() - queued_at)
        self._end.record()
        exposed = bool(self._start.query())
        if self._clock is not None:
            self._clock.end()
        self._end.synchronize()
        del kept  # freeing is the next call's business, not this one's
        mhz = self._clock.mhz() if self._clock is not None else None
        return Sample(float(self._start.elapsed_time(self._end)), mhz, exposed)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def mark(self) -> Callable[[], None]:
        event: Any = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize  # type: ignore[no-any-return]


def captured(prepare: Step | None, call: Step) -> tuple[Step | None, Step]:
    """Both steps as replays of CUDA graphs that share their memory. Raises RuntimeError if one cannot be captured."""
    import torch

    for _ in range(_CALLS_BEFORE_CAPTURE):
        if prepare is not None:
            prepare()
        call()
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()

    def capture(step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            step()
        return graph.replay

    try:
        return (None if prepare is None else capture(prepare)), capture(call)
    except RuntimeError as problem:
        raise RuntimeError(f"the call cannot be captured in a CUDA graph: {problem}") from problem


def median_ms(timer: Timer, call: Step, warm_up_calls: int, samples: int) -> float:
    """The median of so many samples, after calls that do not count."""
    sample = timer.bind(None, call)
    return median([sample().ms for _ in range(warm_up_calls + samples)][warm_up_calls:])


def timer_for(device: str, timing: Timing = "cold") -> Timer:
    """The timer of a device, "cuda" or "cpu"."""
    return CudaTimer(timing) if device == "cuda" else WallTimer(timing)
