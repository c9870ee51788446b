"""What the device's memory can do: the bandwidth of a large copy, the measure for what a cell moves."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glabench.measure.timer import Timer

_BUFFER_BYTES = 2**30
_WARM_UP_CALLS, _SAMPLES = 3, 15


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
    samples = [timer.sample(lambda: None, lambda: target.copy_(source)) for _ in range(_WARM_UP_CALLS + _SAMPLES)]
    return 2 * source.numel() * source.element_size() / median(samples[_WARM_UP_CALLS:]) / 1e6
