"""What no implementation can do: move bytes faster than a copy or a read, or compute faster than a large product."""

from __future__ import annotations

from collections.abc import Callable

from glabench.backends import Counts
from glabench.devices.ceilings import product_tflops
from glabench.measure.timer import Timer, median_ms
from glabench.records.environment import Ceilings
from glabench.records.metrics import significant

# How far beyond the possible a rate may be, because both sides are measured.
_MARGIN = 1.05
# A large read is not believed to be faster than a large copy by more than this; then something disturbed the copy.
_MOST_BY_READING = 1.15
# Below this share of the ceiling, no copy of as many bytes is timed: it would not be that much slower. On a CPU, below
# rates (GB/s, TFLOP/s) that any CPU exceeds.
_WORTH_A_COPY = 0.5
_SLOWEST_GBPS, _SLOWEST_TFLOPS = 1.0, 0.005
_LARGEST_COPY = 2**31
_WARM_UP_CALLS, _SAMPLES = 3, 15
# The size of the product on a CPU, whose ceilings are measured where they are needed.
_CPU_PRODUCT = 1024


class Physics:
    """The limits of a device ("cuda" or "cpu"), measured with the timer of the cells."""

    def __init__(self, device: str, timer: Timer, ceilings: Ceilings) -> None:
        self._device = device
        self._timer = timer
        self._ceilings = ceilings
        self._copies: dict[int, float] = {}
        self._tflops = ceilings.product_tflops
        copy, read = ceilings.copy_gbps, ceilings.read_gbps
        # Memory that is only read gives more than a copy reaches. Measured before, in a process without backends.
        by_reading = read / copy if copy is not None and read is not None else 1.0
        self._by_reading = min(max(1.0, by_reading), _MOST_BY_READING)

    def why_impossible(self, time_ms: float, least: Counts, written: float) -> str | None:
        """Why a time is too short to be true, in a line; None if it is not.

        `least` is what every implementation must move and compute, and `written` the share of its bytes that is
        written. A cell that is small enough to live in a cache may be faster than the memory, so its bytes are compared
        with a copy of as many bytes under the same timing. Either may be faster than a copy by as much as a large read
        is, if nothing is written; by less with what is, and not at all if that is half of all, as in a copy.
        """
        by_reading = 1.0 + (self._by_reading - 1.0) * max(0.0, 1.0 - 2.0 * written)
        margin = _MARGIN * by_reading
        gbps, tflops = least.bytes / time_ms / 1e6, least.flops / time_ms / 1e9
        ceiling, short = self._ceilings.copy_gbps, f"{significant(time_ms)} ms is too short"
        if least.bytes <= _LARGEST_COPY and gbps > (_SLOWEST_GBPS if ceiling is None else _WORTH_A_COPY * ceiling):
            # Again for a doubtful cell, because the machine may have been busy.
            if all(time_ms * margin < self._copy_ms(least.bytes, again) for again in (False, True, True)):
                return f"{short}: even a copy of as many bytes takes {significant(self._copies[least.bytes])} ms"
        elif ceiling is not None and gbps > margin * ceiling:
            most = f"{by_reading * ceiling:.0f} GB/s"
            return f"{short}: {gbps:.0f} GB/s, but nothing that reads and writes as much reaches more than {most}"
        if self._device == "cpu" and tflops > max(_SLOWEST_TFLOPS, _MARGIN * (self._tflops or 0)):
            # Again for every doubtful cell, because the machine may have been busy before.
            self._tflops = max(self._tflops or 0, product_tflops(self._median_ms, "cpu", _CPU_PRODUCT) or 0)
        if self._tflops and tflops > _MARGIN * self._tflops:
            most = significant(self._tflops)
            return f"{short}: {significant(tflops)} TFLOP/s, but a large product reaches {most} TFLOP/s"
        return None

    def _copy_ms(self, count: int, again: bool) -> float:
        """The least milliseconds in which a kernel moves `count` bytes in total; 0 if there is no memory for them.

        Of the same number it is known already, unless it is to be measured `again`.
        """
        if count not in self._copies or again:
            import torch

            try:
                source = torch.zeros(max(1, count // 8), dtype=torch.int32, device=self._device)
                target = torch.empty_like(source)
            except torch.OutOfMemoryError:
                return 0.0
            # Not `copy_`, which a graph does by other means.
            found = self._least_ms(lambda: torch.bitwise_not(source, out=target))
            self._copies[count] = min(found, self._copies.get(count, found))
        return self._copies[count]

    def _least_ms(self, call: Callable[[], object]) -> float:
        sample = self._timer.bind(None, call)
        return min([sample().ms for _ in range(_WARM_UP_CALLS + _SAMPLES)][_WARM_UP_CALLS:])

    def _median_ms(self, call: Callable[[], object]) -> float:
        return median_ms(self._timer, call, _WARM_UP_CALLS, _SAMPLES)
