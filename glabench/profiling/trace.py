"""Events of a trace in Chrome's format, as torch's profiler writes it. Times are in microseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glabench.errors import GlabenchError

# Work on a device; what the host calls to queue it; torch's operators; marks of ours.
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_OPERATOR, _MARK = "cpu_op", "user_annotation"


@dataclass(frozen=True)
class Event:
    """Something that took from `start` for `duration`. `details` are the trace's own, by its names."""

    name: str
    kind: str
    start: float
    duration: float
    thread: object = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.duration

    @property
    def correlation(self) -> int | None:
        """The number that a launch and what it launched share."""
        return self.details.get("correlation")


@dataclass(frozen=True)
class Trace:
    """The events of a trace that count here, by kind and in the order of their starts."""

    on_device: Sequence[Event]
    runtime: Sequence[Event]
    operators: Sequence[Event]
    marks: Sequence[Event]

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Trace:
        """From the events of a trace as they are written."""
        kinds: dict[str, list[Event]] = {kind: [] for kind in (*_DEVICE, *_RUNTIME, _OPERATOR, _MARK)}
        for each in events:
            kind = str(each.get("cat"))
            if each.get("ph") == "X" and kind in kinds:
                start, duration = float(each["ts"]), float(each.get("dur", 0.0))
                event = Event(str(each["name"]), kind, start, duration, each.get("tid"), each.get("args", {}))
                kinds[kind].append(event)

        def sorted_of(names: Iterable[str]) -> list[Event]:
            return sorted((event for name in names for event in kinds[name]), key=lambda event: event.start)

        return cls(sorted_of(_DEVICE), sorted_of(_RUNTIME), sorted_of([_OPERATOR]), sorted_of([_MARK]))


def load_trace(path: Path) -> Trace:
    """Reads a trace. Raises GlabenchError if it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Trace.of(data["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise GlabenchError(f"{path}: no trace that torch's profiler writes: {problem}") from None


def covered(events: Iterable[Event], start: float, end: float) -> float:
    """How much of the time from `start` to `end` at least one of the events takes."""
    total, until = 0.0, start
    for event in sorted(events, key=lambda each: each.start):
        begin = max(event.start, until)
        if (stop := min(event.end, end)) > begin:
            total += stop - begin
            until = stop
    return total


def self_times(events: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Each event with its time outside of those that lie within it on its thread."""
    threads: dict[object, list[Event]] = {}
    for event in events:
        threads.setdefault(event.thread, []).append(event)
    for own in threads.values():
        inside: dict[int, float] = {}
        open_ones: list[Event] = []
        for event in sorted(own, key=lambda each: (each.start, -each.duration)):
            while open_ones and open_ones[-1].end < event.end:
                open_ones.pop()
            if open_ones:
                inside[id(open_ones[-1])] = inside.get(id(open_ones[-1]), 0.0) + event.duration
            open_ones.append(event)
        for event in own:
            yield event, max(0.0, event.duration - inside.get(id(event), 0.0))
