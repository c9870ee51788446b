"""What the device can do: the bandwidth of a large copy and the speed of a large bf16 product, once a run.

    python -m glabench.measure.ceiling

prints both as JSON: the suite asks a process of its own, which leaves the GPU's memory as it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from glabench.measure.timer import Timer, median_ms, timer_for
from glabench.records import Ceilings

_BUFFER_BYTES = 2**30
_PRODUCT_SIZE = 8192
_WARM_UP_CALLS, _SAMPLES = 3, 15
_TIMEOUT_S = 120


def copy_bandwidth_gbps(timer: Timer, device: str, buffer_bytes: int = _BUFFER_BYTES) -> float | None:
    """Bytes read and written by a device-to-device copy over its median time, GB/s (10^9); None if there is no room.

    The buffer is many times the L2, and random: copies of zeros can be faster than copies of data.
    """
    import torch

    try:
        source = torch.randint(-(2**31), 2**31, (buffer_bytes // 4,), dtype=torch.int32, device=device)
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return None
    return (
        2
        * source.numel()
        * source.element_size()
        / median_ms(timer, lambda: target.copy_(source), _WARM_UP_CALLS, _SAMPLES)
        / 1e6
    )


def product_tflops(timer: Timer, device: str, size: int = _PRODUCT_SIZE) -> float | None:
    """FLOPs (10^12 a second) of a square bf16 product of random matrices by its median time; None if there is no room.

    A long product runs at the clock that the power limit leaves it, and that is the ceiling that products meet.
    """
    import torch

    try:
        a, b, out = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(3))
    except torch.OutOfMemoryError:
        return None
    return 2 * size**3 / median_ms(timer, lambda: torch.mm(a, b, out=out), _WARM_UP_CALLS, _SAMPLES) / 1e9


def measure_ceilings() -> Ceilings:
    """The ceilings of the GPU, measured in a process of its own; unknown ones if that process fails."""
    command = [sys.executable, "-m", "glabench.measure.ceiling"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
        return Ceilings(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return Ceilings()


def main() -> None:
    """Measures and prints."""
    timer = timer_for("cuda")
    print(json.dumps(asdict(Ceilings(copy_bandwidth_gbps(timer, "cuda"), product_tflops(timer, "cuda")))))


if __name__ == "__main__":
    main()
