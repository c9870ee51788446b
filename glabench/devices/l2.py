# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""A copy within the L2 cache: every program copies a piece of its own to and fro, past the L1 caches."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _copy_to_and_fro(source, target, times, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(times):
        # Volatile, so that a compiler cannot keep in registers what it has just stored.
        tl.store(target + at, tl.load(source + at, volatile=True), cache_modifier=".cg")
        tl.store(source + at, tl.load(target + at, volatile=True), cache_modifier=".cg")


def copy_to_and_fro(source: Tensor, target: Tensor, times: int) -> None:
    """Copies `source` to `target` and back, so many times, in one launch. Sizes are multiples of `BLOCK`."""
    _copy_to_and_fro[source.numel() // BLOCK,](source, target, times, BLOCK=BLOCK, num_warps=8)
