"""Runs a call some times under torch's profiler and prints its profile as a line of JSON; in a process of its own.

python -m glabench.profiling.worker REQUEST, a JSON object with the fields of `request.Request`. The process times
nothing, because the profiler slows it down for good. If counters are asked for, Nsight Compute has started the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from glabench.backends import load_registry
from glabench.backends.base import Counts, faults_of, refusal
from glabench.backends.base import Part as BackendPart
from glabench.backends.sites import open_site
from glabench.errors import GlabenchError, UsageError
from glabench.measure.kinds import KINDS
from glabench.measure.outcome import one_line
from glabench.measure.worker import end_with_parent, private_stdout
from glabench.measure.workload import Steps
from glabench.plain import read_as
from glabench.profiling.profile import CALL, LONGEST_NAME, profile_of, with_occupancy
from glabench.profiling.request import Request
from glabench.profiling.trace import load_trace
from glabench.records.profile import Part, Profile, Work, check_profile, check_rates

# Calls before the profiler starts, and under it before the first one that counts: it may lose what comes first.
_CALLS_BEFORE, _CALLS_UNCOUNTED = 5, 2
# As for the suite's timer: the device waits until a call's launches are all queued, behind a flush of its cache.
_CYCLES_PER_S, _SPIN_MARGIN, _MOST_SPIN_S = 2e9, 1.5, 0.05
_MEMORY_EVENTS = 100_000


class _Device:
    """How to get ready for a call, and how to wait for its end."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self.is_cuda = device != "cpu"
        self._spin_s = 0.0
        if self.is_cuda:
            torch.cuda.set_device(device)
            l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._flush = torch.empty(4 * max(l2, 2**24), dtype=torch.int8, device="cuda")

    def wait(self) -> None:
        if self.is_cuda:
            self._torch.cuda.synchronize()

    def remember(self, host_s: float) -> None:
        """That the host needs so long to queue a call."""
        self._spin_s = min(max(self._spin_s, host_s * _SPIN_MARGIN), _MOST_SPIN_S)

    def get_ready(self) -> None:
        if self.is_cuda:
            self._flush.zero_()
            self._torch.cuda._sleep(int(self._spin_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]


def _run(steps: Steps, device: _Device, mark: Callable[[str], Any] | None = None) -> float:
    """Runs the pass once, under a mark if one is given; returns the host's seconds."""
    if steps.prepare is not None:
        steps.prepare()
    device.wait()
    device.get_ready()
    start = time.perf_counter()
    if mark is None:
        kept = steps.call()
    else:
        with mark(CALL):
            kept = steps.call()
    host_s = time.perf_counter() - start
    device.wait()
    del kept
    return host_s


def profile_steps(steps: Steps, device_name: str, calls: int, trace_to: Path | None) -> Profile:
    """The profile of a pass over so many calls; the trace is kept if it has a path."""
    from torch.profiler import ProfilerActivity, profile, record_function

    device = _Device(device_name)
    for _ in range(_CALLS_BEFORE):
        _run(steps, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_cuda else [])]
    with profile(activities=activities) as profiler:
        # The profiler makes launches longer, so the wait is measured under it.
        for _ in range(_CALLS_UNCOUNTED):
            device.remember(_run(steps, device))
        for _ in range(calls):
            _run(steps, device, record_function)
    with TemporaryDirectory() as folder:
        path = trace_to or Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return profile_of(load_trace(path))


def run_counted(steps: Steps, device_name: str) -> None:
    """Runs one call between the marks that Nsight Compute waits for, after some without."""
    from torch.cuda import profiler

    device = _Device(device_name)
    for _ in range(_CALLS_BEFORE):
        _run(steps, device)
    if steps.prepare is not None:
        steps.prepare()
    device.wait()
    profiler.start()  # type: ignore[no-untyped-call]
    kept = steps.call()
    device.wait()
    profiler.stop()  # type: ignore[no-untyped-call]
    del kept


def keep_memory(steps: Steps, device_name: str, path: Path) -> None:
    """Writes torch's snapshot of all allocations of one call, for https://pytorch.org/memory_viz."""
    import torch

    device = _Device(device_name)
    _run(steps, device)
    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    _run(steps, device)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)


def main(arguments: Sequence[str]) -> None:
    """Profiles what is asked for."""
    end_with_parent()
    open_site()
    request = Request.from_json(json.loads(arguments[0]))
    with private_stdout() as channel:
        try:
            answer = _answer(request)
        except GlabenchError as problem:
            answer = {"error": str(problem)}
        print(json.dumps(answer), file=channel, flush=True)


def _answer(request: Request) -> dict[str, Any]:
    """The profile, and why it lacks its parts if they failed; nothing if it is Nsight Compute that looks at a call."""
    registry, cell = load_registry(request.plugins), request.cell
    backend, op = registry[cell.backend], registry.op_of(cell.backend)
    if (reason := refusal(backend, op, cell)) is not None:
        raise GlabenchError(reason)
    if request.device != "cpu":
        import torch

        torch.cuda.set_device(request.device)
    inputs, steps = KINDS[backend.work].make_ready(op, backend, cell)
    if request.counted:
        run_counted(steps, request.device)
        return {}
    if request.memory_to is not None:
        keep_memory(steps, request.device, Path(request.memory_to))
    trace_to = None if request.trace_to is None else Path(request.trace_to)
    found = profile_steps(steps, request.device, request.calls, trace_to)
    counts = backend.kernel_counts(dict(inputs), cell.copy())
    if counts is None:
        found = _with_op_work(found, Counts(op.flops(cell), op.moved_bytes(cell)))
    else:
        found = found.with_work({name: Work(each.bytes, each.flops) for name, each in counts.items()})
    found = with_occupancy(found, _arch(request))
    failure = None
    try:
        with faults_of():
            parts = backend.parts(dict(inputs), cell.copy())
            found = replace(found, parts=tuple(_profile_part(*each, request) for each in parts.items()))
    except UsageError as problem:
        failure = one_line(str(problem))
    return {"profile": found.to_json(), "failure": failure}


def _with_op_work(found: Profile, counts: Counts) -> Profile:
    """The profile with the op's work at its only kernel, unless that ended too soon to have done it."""
    if (sole := found.sole_kernel) is None:
        return found
    known = found.with_work({sole: Work(counts.bytes, counts.flops)})
    try:
        check_profile(known)
    except ValueError:
        return found
    return known


def _profile_part(name: str, part: BackendPart, request: Request) -> Part:
    """Raises ValueError if a run folder cannot hold what the backend says of the part."""
    found = profile_steps(Steps(None, part.call, None), request.device, request.calls, None)
    counts = {} if part.counts is None else {"bytes": part.counts.bytes, "flops": part.counts.flops}
    known = read_as(Part, {"name": str(name)[:LONGEST_NAME], "ms": found.span_ms, **counts})
    check_rates(known)
    return known


def _arch(request: Request) -> str:
    """The GPU's architecture, such as 90; empty on a CPU."""
    if request.device == "cpu":
        return ""
    import torch

    return "".join(map(str, torch.cuda.get_device_capability(request.device)))


if __name__ == "__main__":
    main(sys.argv[1:])
