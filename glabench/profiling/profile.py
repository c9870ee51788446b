"""A profile of a call, from the traces of several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from glabench.errors import GlabenchError
from glabench.inspecting.code import occupancy
from glabench.profiling.trace import Event, Trace, covered, self_times
from glabench.records.profile import Host, Kernel, Profile

# How the worker marks a call.
CALL = "glabench: one call"
# How torch names what its autograd engine does around the operators of a backward.
_AUTOGRAD = "autograd::"
# What a run folder takes.
LONGEST_NAME = 300


def profile_of(trace: Trace) -> Profile:
    """The profile of the calls that a trace marks. Raises GlabenchError if the trace lacks some of their work."""
    windows = [event for event in trace.marks if event.name == CALL]
    if not windows:
        raise GlabenchError("the profiler recorded no call")
    host = _host(trace, windows)
    if not trace.on_device:
        return _of_operators(trace, windows, host)
    works = [_launched_in(trace, window) for window in windows]
    _check_complete(works)
    ends = [max(event.end for event in work) for work in works]
    spans = [end - work[0].start for work, end in zip(works, ends, strict=True)]
    busy = [covered(work, work[0].start, end) for work, end in zip(works, ends, strict=True)]
    return Profile(len(windows), _ms(spans), _ms(busy), _kernels(works), host, True)


def _launched_in(trace: Trace, window: Event) -> list[Event]:
    """The device's work that the host queued during a window, on any thread, sorted by start."""
    runtime = _within(trace.runtime, window)
    queued = {event.correlation for event in runtime if event.correlation is not None}
    work = [event for event in trace.on_device if event.correlation in queued]
    if not work:
        raise GlabenchError("the profiler recorded no kernel of a call: it lost them, or the call launches none")
    recorded = {event.correlation for event in work}
    launched = [event for event in runtime if _launches(event)]
    if lost := sum(event.correlation not in recorded for event in launched):
        raise GlabenchError(f"the profiler lost the kernels of {lost} of {len(launched)} launches; profile again")
    return work


def _within(events: Sequence[Event], window: Event) -> list[Event]:
    """Those that began during a window."""
    return [event for event in events if window.start <= event.start <= window.end]


def _launches(event: Event) -> bool:
    """Whether it is the launch of a kernel or a graph, and not of a function of the host's."""
    return "launch" in event.name.lower() and "HostFunc" not in event.name


def _check_complete(works: Sequence[Sequence[Event]]) -> None:
    """Raises GlabenchError if calls differ in their kernels."""
    names = [sorted(short_name(event.name) for event in work) for work in works]
    if any(other != names[0] for other in names):
        counts = ", ".join(str(len(work)) for work in works)
        raise GlabenchError(
            f"calls differ in their kernels ({counts} in the calls profiled): the profiler lost some, or the call does "
            "not do the same work each time; profile again"
        )


def _kernels(works: Sequence[Sequence[Event]]) -> tuple[Kernel, ...]:
    """Kernels by name, grid and what a program needs, in the order of their first starts."""
    found: dict[_Launched, list[list[_Placed]]] = {}
    for number, work in enumerate(works):
        until = work[0].start
        for event in work:
            key = _Launched.of(event)
            own = found.setdefault(key, [[] for _ in works])
            added = max(0.0, event.end - max(until, event.start))
            own[number].append(_Placed(event, max(0.0, event.start - until), added))
            until = max(until, event.end)
    return tuple(_kernel(kernel, own) for kernel, own in found.items())


class _Launched(NamedTuple):
    """What launches of one kernel have in common. Variants of a template differ in what a program needs, if at all."""

    name: str
    grid: tuple[int, ...] | None
    threads: int | None
    registers: int | None
    shared_bytes: int | None

    @classmethod
    def of(cls, event: Event) -> _Launched:
        """By the trace's details."""
        details = event.details
        block = _numbers(details.get("block"))
        threads = None if block is None else block[0] * block[1] * block[2]
        needs = details.get("registers per thread"), details.get("shared memory")
        return cls(short_name(event.name), _numbers(details.get("grid")), threads, *needs)


class _Placed(NamedTuple):
    """A kernel of a call, how long the device was idle before it, and how much longer it is busy for it."""

    event: Event
    gap: float
    added: float


def _kernel(kernel: _Launched, calls: Sequence[Sequence[_Placed]]) -> Kernel:
    return Kernel(
        kernel.name,
        round(median(len(own) for own in calls)),
        _ms([sum(placed.event.duration for placed in own) for own in calls]),
        _ms([sum(placed.added for placed in own) for own in calls]),
        _ms([sum(placed.gap for placed in own) for own in calls]),
        kernel.grid,
        kernel.threads,
        kernel.registers,
        kernel.shared_bytes,
    )


def _numbers(value: Any) -> tuple[int, ...] | None:
    return tuple(int(n) for n in value) if value else None


def _host(trace: Trace, windows: Sequence[Event]) -> Host:
    calls, launches, operators, autograd, counts = [], [], [], [], []
    for window in windows:
        runtime, own = _within(trace.runtime, window), _within(trace.operators, window)
        of_torch = [event for event in own if not event.name.startswith(_AUTOGRAD)]
        in_launches = covered(runtime, window.start, window.end)
        in_torch = covered([*runtime, *of_torch], window.start, window.end)
        calls.append(window.duration)
        launches.append(in_launches)
        operators.append(in_torch - in_launches)
        autograd.append(covered([*runtime, *own], window.start, window.end) - in_torch)
        counts.append(sum(map(_launches, runtime)))
    return Host(_ms(calls), round(median(counts)), _ms(launches), _ms(operators), _ms(autograd))


def _of_operators(trace: Trace, windows: Sequence[Event], host: Host) -> Profile:
    """On a CPU: torch's operators, each without those within it."""
    times: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for event, own in self_times(trace.operators):
        for number, window in enumerate(windows):
            if window.start <= event.start <= window.end:
                times.setdefault(event.name, [0.0] * len(windows))[number] += own
                counts[event.name] = counts.get(event.name, 0) + 1
    kernels = [
        Kernel(name[:LONGEST_NAME], max(1, round(counts[name] / len(windows))), _ms(own), _ms(own))
        for name, own in times.items()
    ]
    kernels.sort(key=lambda kernel: -kernel.ms)
    span = _ms([window.duration for window in windows])
    # Operators of several threads may take longer together.
    busy = min(span, sum(kernel.ms for kernel in kernels))
    return Profile(len(windows), span, busy, tuple(kernels), host, False)


def short_name(name: str) -> str:
    """A kernel's name without its return type, nameless namespaces, template arguments and parameters."""
    plain = re.sub(r"^(void|static|__global__)\s+|(\(anonymous namespace\)|<unnamed>)::", "", name.strip())
    return (re.split(r"[<(]", plain, maxsplit=1)[0].strip() or name)[:LONGEST_NAME]


def _ms(microseconds: Sequence[float]) -> float:
    return median(microseconds) / 1e3


def with_occupancy(found: Profile, arch: str) -> Profile:
    """The same with how many programs of each kernel a multiprocessor of `arch`, such as 90, holds."""
    return replace(found, kernels=tuple(_with_occupancy(kernel, arch) for kernel in found.kernels))


def _with_occupancy(kernel: Kernel, arch: str) -> Kernel:
    if not kernel.threads or kernel.registers is None or kernel.shared_bytes is None:
        return kernel
    held = occupancy(arch, -(-kernel.threads // 32), kernel.registers, kernel.shared_bytes)
    return kernel if held is None else replace(kernel, programs=held.programs, limit=held.limit)
