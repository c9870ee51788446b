"""Work of known size, to validate the timers with: a kernel that spins, a copy, a product."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import triton
import triton.language as tl
from torch import Tensor

_REPEATS = 9
_REST_S = 0.05  # between bursts, so that bursts do not reach a power limit that single calls do not reach
_BURST_S = 0.01


@triton.jit
def _spin(out, nanoseconds):  # type: ignore[no-untyped-def]
    """Spins until the device's global timer has advanced by `nanoseconds`, and writes the exact number."""
    start = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    now = start
    while now - start < nanoseconds:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    tl.store(out, now - start)


@dataclass(frozen=True)
class KnownWork:
    """A call, its description, and its true time in milliseconds, measured without the timers under test."""

    name: str
    what: str
    call: Callable[[], object]
    true_ms: Callable[[], float]


def spin(milliseconds: float) -> KnownWork:
    """A kernel that spins for a time. Its true time is read from the device's own timer inside the kernel."""
    out = torch.zeros(1, dtype=torch.int64, device="cuda")

    def call() -> None:
        _spin[(1,)](out, int(milliseconds * 1e6), num_warps=1)

    def true_ms() -> float:
        call()
        return out.item() / 1e6

    return KnownWork(f"spin {milliseconds:g} ms", "one program that waits for the device's timer", call, true_ms)


def copy(mebibytes: int) -> KnownWork:
    """A copy within the device's memory."""
    source, target = _buffers(mebibytes)
    return _in_a_row(f"copy {mebibytes} MiB", f"{2 * mebibytes} MiB moved", lambda: target.copy_(source))


def kernel_copy(mebibytes: int) -> KnownWork:
    """The same bytes moved by a kernel (a bitwise not), because CUDA graphs replay plain copies by other means."""
    source, target = _buffers(mebibytes)
    what = f"{2 * mebibytes} MiB moved by a kernel"
    return _in_a_row(f"bitwise not {mebibytes} MiB", what, lambda: torch.bitwise_not(source, out=target))


def product(size: int) -> KnownWork:
    """A square bf16 product."""
    a, b, out = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return _in_a_row(f"product {size}", f"{2 * size**3 / 1e9:.0f} GFLOP in bf16", lambda: torch.mm(a, b, out=out))


def _buffers(mebibytes: int) -> tuple[Tensor, Tensor]:
    source = torch.randint(-(2**31), 2**31, (mebibytes * 2**18,), dtype=torch.int32, device="cuda")
    return source, torch.empty_like(source)


def _in_a_row(name: str, what: str, call: Callable[[], object]) -> KnownWork:
    """Work whose true time is that of the host's clock over many calls in a row."""
    return KnownWork(name, what, call, lambda: back_to_back_ms(call))


def back_to_back_ms(call: Callable[[], object]) -> float:
    """Milliseconds per call by the host's clock alone: the time of 2N calls in a row minus that of N, divided by N."""
    call()
    once = _burst_s(call, 1)
    calls = max(4, round(_BURST_S / once))
    longer = []
    for _ in range(_REPEATS):
        time.sleep(_REST_S)
        short = _burst_s(call, calls)
        time.sleep(_REST_S)
        longer.append(_burst_s(call, 2 * calls) - short)
    return 1e3 * median(longer) / calls


def _burst_s(call: Callable[[], object], calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def known_works() -> Sequence[KnownWork]:
    """The work that timers are validated with."""
    return [
        *(spin(milliseconds) for milliseconds in (0.25, 1, 10)),
        *(copy(mebibytes) for mebibytes in (256, 1024)),
        kernel_copy(1024),
        *(product(size) for size in (4096, 6144, 8192)),
    ]
