# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Kernels that only move memory: a copy within the L2 cache, and a large read."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
# Blocks that each program of a read reads.
_BLOCKS_PER_PIECE = 4
PIECE = BLOCK * _BLOCKS_PER_PIECE


@triton.jit
def _copy_to_and_fro(source, target, times, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(times):
        # Volatile, so that a compiler cannot keep in registers what it has just stored.
        tl.store(target + at, tl.load(source + at, volatile=True), cache_modifier=".cg")
        tl.store(source + at, tl.load(target + at, volatile=True), cache_modifier=".cg")


def copy_to_and_fro(source: Tensor, target: Tensor, times: int) -> None:
    """Copies `source` to `target` and back, so many times, in one launch, past the L1 caches.

    Every program copies a piece of its own. Sizes are multiples of `BLOCK`.
    """
    _copy_to_and_fro[source.numel() // BLOCK,](source, target, times, BLOCK=BLOCK, num_warps=8)


@triton.jit
def _read_pieces(source, found, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    piece = tl.program_id(0).to(tl.int64)
    at = source + piece * BLOCKS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for number in range(BLOCKS):
        total ^= tl.load(at + number * BLOCK)
    tl.store(found + piece, tl.xor_sum(total, 0))


def read_pieces(source: Tensor, found: Tensor) -> None:
    """Reads all of `source` (int32, a multiple of `PIECE` numbers): the exclusive or of each piece, to `found`."""
    _read_pieces[found.numel(),](source, found, BLOCKS=_BLOCKS_PER_PIECE, BLOCK=BLOCK, num_warps=8)
