"""Traces of a GPU's calls, as torch's profiler writes them."""

from itertools import count

from glabench.profiling.profile import CALL
from glabench.profiling.trace import Trace

SMALL = {"heads": 2, "key_dim": 16, "value_dim": 16}


def complete(name, cat, start, duration, thread=1, **args):
    """An event as a trace has it."""
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": duration, "tid": thread, "args": args}


def call_at(start, kernels, numbers, launch_us=5.0, operator=None):
    """A marked call of 100 us whose kernels, (name, start, duration, grid), begin 200 us after it."""
    events = [complete(CALL, "user_annotation", start, 100.0)]
    for place, (name, begin, duration, grid) in enumerate(kernels):
        correlation = next(numbers)
        details = {"grid": [grid, 1, 1], "block": [128, 2, 1], "registers per thread": 168, "shared memory": 40960}
        # A backward's launches are on another thread.
        launched = start + 10 * (place + 1)
        events.append(complete("cuLaunchKernelEx", "cuda_driver", launched, launch_us, 2, correlation=correlation))
        begins = start + 200 + begin
        events.append(complete(name, "kernel", begins, duration, 7, correlation=correlation, **details))
    return events + ([complete(operator, "cpu_op", start + 10, 20.0, 2)] if operator else [])


KERNELS = [
    ("void forward<float, 4>(float*)", 0.0, 30.0, 64),
    ("backward", 40.0, 50.0, 132),
    ("backward", 85.0, 15.0, 132),  # begins before the one before it ends
    ("backward", 100.0, 10.0, 8),
]


def trace_of(*calls):
    """A trace of calls 1,000 us apart, each behind a flush that is no part of it."""
    numbers, events = count(1), []
    for number, kernels in enumerate(calls):
        flush = next(numbers)
        start = 1000.0 * number
        events.append(complete("cudaMemsetAsync", "cuda_runtime", start - 20, 5.0, correlation=flush))
        events.append(complete("Memset", "gpu_memset", start - 10, 190.0, 7, correlation=flush))
        events += call_at(start, kernels, numbers, operator="aten::empty")
    return Trace.of([*events, {"ph": "M", "name": "process_name"}, complete("other", "python_function", 0, 1)])
