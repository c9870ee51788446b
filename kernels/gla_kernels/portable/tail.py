# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Zeros for tokens behind the last packed sequence, which belong to none: no other kernel writes their rows.

A fixed T with a varying number of tokens is what CUDA graphs and compiled models want.
"""

import triton
import triton.language as tl


@triton.jit
def clear_rows(x, width, begin, T, BV: tl.constexpr):
    """Sets rows `begin` to T - 1 of x [T, width] to 0; the programs share them."""
    for row in range(begin + tl.program_id(0), T, tl.num_programs(0)):
        for column in range(0, width, BV):
            cols = column + tl.arange(0, BV)
            zeros = tl.zeros([BV], dtype=x.dtype.element_ty)
            tl.store(x + tl.cast(row, tl.int64) * width + cols, zeros, mask=cols < width)


@triton.jit(do_not_specialize=["N", "T"])
def clear_tails_kernel(
    a, b, c, d,  # [1, T, ...], contiguous, or None
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    a_width, b_width, c_width, d_width,
    N, T,
    BV: tl.constexpr,
):  # fmt: skip
    """Sets what is behind token cu[N] of each tensor to 0."""
    begin = tl.load(cu_seqlens + N).to(tl.int32)
    if a is not None:
        clear_rows(a, a_width, begin, T, BV)
    if b is not None:
        clear_rows(b, b_width, begin, T, BV)
    if c is not None:
        clear_rows(c, c_width, begin, T, BV)
    if d is not None:
        clear_rows(d, d_width, begin, T, BV)
