"""Tests the timers on work of known size and against other timers.

    python -m glabench.measure.validation DEVICE

prints a JSON list with one object per work: its name, its description, its true time and each timer's median, in
milliseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from glabench.apart import ask_module
from glabench.errors import GlabenchError
from glabench.measure.settings import TIMINGS

_BURSTS, _REST_S = 5, 0.1
_WARM_UP_CALLS, _SAMPLES = 2, 10
_CUDA_BENCH_TIMEOUT_S = 300
_TIMEOUT_S = 600


def time_known_work(device: str) -> list[dict[str, Any]]:
    """What this module prints when it is run for a device. Raises GlabenchError if that fails."""
    try:
        found: list[dict[str, Any]] = ask_module(__name__, device, timeout_s=_TIMEOUT_S)
    except GlabenchError as problem:
        raise GlabenchError(f"timing work of a known size failed: {problem}") from None
    return found


def measure_known_work() -> list[dict[str, Any]]:
    """One row per work, on torch's current GPU; `cuda_bench_ms` is None if cuda-bench is missing or fails."""
    import torch

    from glabench.measure.known import KnownWork, known_works
    from glabench.measure.timer import CudaTimer, median_ms

    timers = {timing: CudaTimer(timing) for timing in TIMINGS if timing != "eager"}
    theirs = cuda_bench_ms(torch.cuda.current_device())

    def row(work: KnownWork) -> dict[str, Any]:
        rows: dict[str, Any] = {"work": work.name, "what": work.what, "true_ms": _rested(work.true_ms)}
        for timing, timer in timers.items():
            rows[f"{timing}_ms"] = _rested(lambda timer=timer: median_ms(timer, work.call, _WARM_UP_CALLS, _SAMPLES))  # type: ignore[misc]
        rows["do_bench_ms"] = _rested(lambda: _do_bench_ms(work.call))
        rows["cuda_bench_ms"] = theirs.get(work.name)
        return rows

    return [row(work) for work in known_works()]


def _rested(measure: Callable[[], float]) -> float:
    """The median of short bursts, each after a rest, so that the clock is the same for all timers.

    In longer bursts, large products reach the power limit and take up to a sixth longer.
    """
    found = []
    for _ in range(_BURSTS):
        time.sleep(_REST_S)
        found.append(measure())
    return median(found)


def _do_bench_ms(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=1, rep=15, return_mode="median"))


def cuda_bench_ms(gpu: int) -> Mapping[str, float]:
    """Median milliseconds of each work by NVIDIA's cuda-bench, in its own process; empty if it is missing or fails."""
    try:
        if find_spec("cuda.bench") is None:
            return {}
    except ModuleNotFoundError:
        return {}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "cuda-bench.json"
        command = [sys.executable, "-P", "-m", "glabench.measure.cuda_bench", "--json", str(out), "--devices", str(gpu)]
        command += ["--stopping-criterion", "sample-count", "--target-samples", str(_SAMPLES)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_CUDA_BENCH_TIMEOUT_S)
            found = json.loads(out.read_text(encoding="utf-8"))
        except (OSError, subprocess.SubprocessError, ValueError) as problem:
            print(f"cuda-bench did not run: {problem}", file=sys.stderr)
            return {}
    return {name: 1e3 * seconds for name, seconds in _medians(found)}


def _medians(found: Mapping[str, Any]) -> list[tuple[str, float]]:
    pairs = []
    for benchmark in found["benchmarks"]:
        for summary in benchmark["states"][0]["summaries"]:
            if summary["tag"] == "nv/cold/time/gpu/median":
                pairs.append((benchmark["name"], float(summary["data"][0]["value"])))
    return pairs


def main() -> None:
    """Measures all work and prints the rows as JSON."""
    import torch

    torch.cuda.set_device(sys.argv[1])
    print(json.dumps(measure_known_work()))


if __name__ == "__main__":
    main()
