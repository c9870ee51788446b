"""Timers take one sample of one call. Cache flushes and preparation are never timed."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import call as ask
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from glabench.measure.ranks import ALONE, Ranks
from glabench.measure.settings import Timing

if TYPE_CHECKING:
    from torch import Tensor

_CPU_FLUSH_BYTES = 64 * 2**20
# Before each timed call the device spins for longer than the host needed to queue any of the last calls. All launches
# of the call then wait in the queue, so only the device's work is timed, not gaps between launches. Calls that keep the
# host busy for longer than the upper bound are host-bound in real use, too, and are timed as such.
_LEAST_SPIN_S, _MOST_SPIN_S = 1e-4, 5e-3
_SPIN_MARGIN = 1.5
# The longest spin before inputs are renewed, which takes the host longer than a call.
_MOST_DELAY_S = 5e-2
_CALLS_LOOKED_BACK = 16
_CYCLES_PER_S = 2e9
_CALLS_BEFORE_CAPTURE = 3
# Back to back, so many calls make a sample that they take about this long.
_LEAST_BATCH_S, _MOST_CALLS = 0.02, 100

Step = Callable[[], object]
# Whether the device waits.
Delay = Callable[[bool], object]


@dataclass(frozen=True)
class Sample:
    """One timed call."""

    ms: float
    # MHz, the mean from the start of the spin to the end of the call; None if unknown.
    sm_clock_mhz: float | None = None
    # Whether launch latency may be included, because the device started before the host had queued the whole call.
    exposed: bool = False
    # Milliseconds for which the call kept the host busy; None if host and device are one.
    host_ms: float | None = None
    # If `ms` is the mean of calls back to back: milliseconds of one alone, with new inputs and a warm cache.
    alone_ms: float | None = None


class Between:
    """What else happens between timed calls; it is not timed. By default nothing does."""

    def renew(self, delay: Delay) -> None:
        """Called before everything else of a sample; may change the call's inputs.

        After `delay(True)`, the device waits until the host has queued the whole sample. Work that a call puts on
        another stream, without waiting for its own, then finds inputs that have not been changed yet. `delay(False)`
        takes the host as long.
        """

    def renew_gradients(self) -> None:
        """Called between preparation and the call; may change the gradients of the outputs.

        So the forward of a backward that is timed alone cannot know them.
        """

    # Functions of C whose answers go to `keep`: what was left behind. They are asked as soon as a call has returned, by
    # no function of Python and before anything of torch runs, which could call what the backend has left, and undo it.
    signs: tuple[Callable[[], object], ...] = ()

    def keep(self, result: Any, left: tuple[object, ...] = ()) -> None:
        """Called with what the timed call returned; may queue copies of it, right behind the end of the call.

        So work that the call left to another stream comes too late. `left`: what the signs said.
        """

    def look(self, result: Any) -> None:
        """Called with the same result once the call has ended, before it is freed."""


UNTOUCHED = Between()


class Timer(Protocol):
    """Times calls. `name` describes how, for the record."""

    name: str

    def bind(self, prepare: Step | None, call: Step, between: Between = UNTOUCHED) -> Callable[[], Sample]:
        """A function that runs `prepare`, flushes the cache unless the timing is hot, and times `call`."""

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""

    def mark(self) -> Callable[[], None]:
        """A function that waits until the device has finished all work queued before `mark` was called."""


class WallTimer:
    """Times calls on a CPU with the host's clock. Cold: writes a buffer larger than most caches before each sample."""

    def __init__(self, timing: Timing = "cold") -> None:
        import torch

        self.name = f"{timing}, wall clock"
        self._flush = torch.empty(_CPU_FLUSH_BYTES, dtype=torch.int8) if timing == "cold" else None

    def bind(self, prepare: Step | None, call: Step, between: Between = UNTOUCHED) -> Callable[[], Sample]:
        return partial(self._sample, prepare, call, between)

    def _sample(self, prepare: Step | None, call: Step, between: Between) -> Sample:
        between.renew(nothing)
        if prepare is not None:
            prepare()
        between.renew_gradients()
        if self._flush is not None:
            self._flush.zero_()
        start = time.perf_counter_ns()
        kept = call()
        elapsed = time.perf_counter_ns() - start
        left = tuple(map(ask, between.signs))
        between.keep(kept, left)
        between.look(kept)
        del kept  # after the clock, so that freeing the output is not timed
        return Sample(elapsed / 1e6)

    def synchronize(self) -> None:
        pass

    def mark(self) -> Callable[[], None]:
        return self.synchronize


class CudaTimer:
    """Times calls on a GPU with device events, hides launches behind a spin, and reads the SM clock before and after.

    `cold`: a buffer of four times the L2's size is written before each sample. As with Triton's do_bench and NVIDIA's
    nvbench, the call then also waits for dirty lines to leave the L2, as it would after any kernel that writes. `hot`:
    no flush; the call finds what the last one left in the cache. `graph`: cold, replayed from a CUDA graph.
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
            # The default stream cannot be captured, and a backward runs on the stream on which its inputs' nodes were
            # made. So all further work of this process uses another stream.
            torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush: Tensor | None = None
        if timing != "hot":
            self._flush = torch.empty(4 * max(l2, 2**24), dtype=torch.int8, device="cuda")
        self._start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._host_s: deque[float] = deque(maxlen=_CALLS_LOOKED_BACK)
        self._whole_host_s: deque[float] = deque(maxlen=_CALLS_LOOKED_BACK)
        self._clock = sm_clock()

    def bind(self, prepare: Step | None, call: Step, between: Between = UNTOUCHED) -> Callable[[], Sample]:
        if self._captures:
            prepare, call = captured(prepare, call)
        return partial(self._sample, prepare, call, between)

    def _sample(self, prepare: Step | None, call: Step, between: Between) -> Sample:
        began_at = time.perf_counter()
        between.renew(self._delay)
        if prepare is not None:
            prepare()
        between.renew_gradients()
        if self._flush is not None:
            self._flush.zero_()
        if self._clock is not None:
            self._clock.begin()
        self._spin(max(self._host_s, default=0.0), _MOST_SPIN_S)
        self._start.record()
        queued_at = time.perf_counter()
        kept = call()
        ended_at = time.perf_counter()
        left = tuple(map(ask, between.signs))
        self._host_s.append(ended_at - queued_at)
        self._whole_host_s.append(ended_at - began_at)
        self._end.record()
        exposed = bool(self._start.query())
        between.keep(kept, left)
        if self._clock is not None:
            self._clock.end()
        self._end.synchronize()
        between.look(kept)
        del kept  # after the end event, so that freeing the output is not timed
        mhz = self._clock.mhz() if self._clock is not None else None
        return Sample(float(self._start.elapsed_time(self._end)), mhz, exposed, 1e3 * (ended_at - queued_at))

    def _delay(self, waits: bool) -> None:
        self._spin(max(self._whole_host_s, default=0.0) if waits else 0.0, _MOST_DELAY_S)

    def _spin(self, host_s: float, most_s: float) -> None:
        """Keeps the device busy for longer than the host needs for what it will queue."""
        spin_s = min(max(_SPIN_MARGIN * host_s, _LEAST_SPIN_S), most_s)
        self._torch.cuda._sleep(int(spin_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def mark(self) -> Callable[[], None]:
        event: Any = self._torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize  # type: ignore[no-any-return]


class EagerTimer:
    """Times calls back to back with the host's clock, as an uncompiled loop makes them; the last one is waited for.

    The time of a sample is that of its calls divided by their number, so it includes the host's work if that takes
    longer than the device's. Before each sample one call is timed alone. Ranks begin together, and the time is that of
    the slowest.
    """

    name = "eager, calls back to back, wall clock"

    def __init__(self, device: str, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._alone = CudaTimer("hot") if device == "cuda" else WallTimer("hot")
        self.synchronize = self._alone.synchronize
        self.mark = self._alone.mark

    def bind(self, prepare: Step | None, call: Step, between: Between = UNTOUCHED) -> Callable[[], Sample]:
        assert prepare is None, "the timer refuses a backward alone"
        start = time.perf_counter()
        call()
        self.synchronize()
        seconds = self._ranks.most(time.perf_counter() - start)
        count = max(1, min(_MOST_CALLS, round(_LEAST_BATCH_S / seconds)))
        return partial(self._sample, self._alone.bind(None, call, between), call, between, count)

    def _sample(self, alone: Callable[[], Sample], call: Step, between: Between, count: int) -> Sample:
        single = alone()
        looked_at = secrets.randbelow(count)  # not `random`, whose state a backend can read
        self.synchronize()
        self._ranks.wait()
        start = time.perf_counter()
        for number in range(count):
            result = call()
            if number == looked_at:
                kept = result
        self.synchronize()
        elapsed = time.perf_counter() - start
        left = tuple(map(ask, between.signs))
        between.keep(kept, left)
        between.look(kept)
        ms = 1e3 * self._ranks.most(elapsed) / count
        return Sample(ms, host_ms=single.host_ms, alone_ms=single.ms)


def nothing(*_: object) -> None:
    """Does nothing."""


def captured(prepare: Step | None, call: Step) -> tuple[Step | None, Step]:
    """Both steps as replays of CUDA graphs that share memory. Raises RuntimeError if one cannot be captured."""
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
            result = step()

        def replay() -> object:
            graph.replay()
            return result

        return replay

    try:
        return (None if prepare is None else capture(prepare)), capture(call)
    except RuntimeError as problem:
        raise RuntimeError(f"the call cannot be captured in a CUDA graph: {problem}") from problem


def median_ms(timer: Timer, call: Step, warm_up_calls: int, samples: int) -> float:
    """The median in milliseconds of `samples` samples, after `warm_up_calls` calls that do not count."""
    sample = timer.bind(None, call)
    return median([sample().ms for _ in range(warm_up_calls + samples)][warm_up_calls:])


def timer_refuses(timing: Timing, pass_: str) -> str | None:
    """Why a pass cannot be timed so, in one line; None if it can."""
    if timing == "eager" and pass_ == "bwd":
        return "a backward alone cannot be repeated back to back; with --timing eager measure fwd+bwd"
    return None


def timer_for(device: str, timing: Timing = "cold") -> Timer:
    """The timer of a device, "cuda" or "cpu"."""
    if timing == "eager":
        return EagerTimer(device)
    return CudaTimer(timing) if device == "cuda" else WallTimer(timing)
