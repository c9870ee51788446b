# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Rows between global and shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from gla_kernels.hopper.layouts import copy_layout
from gla_kernels.hopper.values import opaque, stride_product


@gluon.jit
def offsets_and_mask(
    R: gl.constexpr, W: gl.constexpr, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column=0
):
    """Offsets of a tile [R, W] with rows `stride` apart, and a mask of its first rows_left rows and N columns.

    `column` is the tile's first column. The mask takes it into account, the offsets do not.
    """
    rows = opaque(gl.arange(0, R, gl.SliceLayout(1, layout)))
    cols = gl.arange(0, W, gl.SliceLayout(0, layout))
    mask = (rows < rows_left)[:, None]
    if N % W != 0:
        mask = mask & (column + cols < N)[None, :]
    return rows[:, None] * stride + cols[None, :], mask


@gluon.jit
def fetch(tile, ptr, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column=0):
    """Starts the copy of ptr[0:R, 0:W] into the shared `tile` [R, W]; zeros beyond rows_left rows and N columns."""
    offsets, mask = offsets_and_mask(tile.shape[0], tile.shape[1], stride, rows_left, N, layout, column)
    async_copy.async_copy_global_to_shared(tile, ptr + offsets, mask)


@gluon.jit
def write(
    ptr, x, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column=0, EVICT: gl.constexpr = False
):  # fmt: skip
    """Writes x [R, W], which has `layout`, to the first rows_left rows and N columns of ptr[0:R, 0:W].

    EVICT: the L2 cache should evict it before other data.
    """
    offsets, mask = offsets_and_mask(x.shape[0], x.shape[1], stride, rows_left, N, layout, column)
    gl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask, eviction_policy="evict_first" if EVICT else "")


@gluon.jit
def row_of(ptr, b, t, h, stride_b, stride_t, stride_h):
    """Pointer to the row of batch row b, token t and head h (int32)."""
    return ptr + (stride_product(b, stride_b) + stride_product(t, stride_t) + stride_product(h, stride_h))


@gluon.jit
def fetch_rows(
    tile, ptr, b, t, h, stride_b, stride_t, stride_h, rows_left, N: gl.constexpr, bits: gl.constexpr,
    column=0,
):  # fmt: skip
    """`fetch` of rows from token t on and columns from `column` on, with elements of `bits` bits."""
    row = row_of(ptr, b, t, h, stride_b, stride_t, stride_h) + column
    fetch(tile, row, stride_t, rows_left, N, copy_layout(tile.shape[1], bits, gl.num_warps()), column)


@gluon.jit
def load_state(
    ptr, K, V: gl.constexpr, layout: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, column=0
):  # fmt: skip
    """Reads a tile [BK, BV] of a float32 state with V columns and K rows left, in `layout`; zeros beyond."""
    offsets, mask = offsets_and_mask(BK, BV, V, K, V, layout, column)
    return gl.load(ptr + offsets, mask=mask, other=0.0)
