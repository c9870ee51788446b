"""The SM clock, measured on the device: cycles divided by nanoseconds between two tiny kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import triton
    import triton.language as tl
except ImportError:  # on a CPU build of torch
    triton = None

if TYPE_CHECKING:
    from torch import Tensor

_TIME, _CYCLES, _MULTIPROCESSOR = range(3)

if triton is not None:

    @triton.jit
    def _stamp(out):  # type: ignore[no-untyped-def]
        """Writes the global timer (ns), the multiprocessor's cycle counter and the multiprocessor's number."""
        time = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
        cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, False, 1)
        where = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], tl.int32, False, 1)
        tl.store(out, time)
        tl.store(out + 1, cycles)
        tl.store(out + 2, where.to(tl.int64))


class SmClock:
    """The mean clock between two stamps on the current stream of the current GPU."""

    def __init__(self) -> None:
        import torch

        self._stamps: Tensor = torch.zeros(2, 3, dtype=torch.int64, device="cuda")
        self._first, self._second = self._stamps[0], self._stamps[1]
        self.begin()
        self.end()
        torch.cuda.synchronize()

    def begin(self) -> None:
        """Queues the first stamp."""
        _stamp[(1,)](self._first, num_warps=1)

    def end(self) -> None:
        """Queues the second stamp."""
        _stamp[(1,)](self._second, num_warps=1)

    def mhz(self) -> float | None:
        """MHz between the stamps; None if they ran on different multiprocessors or the timer did not move.

        Waits for the second stamp.
        """
        first, second = self._stamps.tolist()
        elapsed = second[_TIME] - first[_TIME]
        if elapsed <= 0 or first[_MULTIPROCESSOR] != second[_MULTIPROCESSOR]:
            return None
        return float(1e3 * (second[_CYCLES] - first[_CYCLES]) / elapsed)


def sm_clock() -> SmClock | None:
    """The clock of the current GPU; None if it cannot be read (no Triton, or no NVIDIA GPU)."""
    import torch

    if triton is None or torch.version.cuda is None:
        return None
    return SmClock()
