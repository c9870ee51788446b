# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Layouts of tiles in registers and shared memory.

A product is a `wgmma` of a warpgroup of 4 warps. A kernel with 4 warps therefore holds every accumulator in full in its
registers, and can use it as the left operand of the next product without going through shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def used_keys(K: int) -> int:
    """Columns of a tile of 64 that hold K keys, as products and accumulators take them: all, or half of them."""
    return 32 if K <= 32 else 64


@gluon.constexpr_function
def accumulator(cols: int, rows: int = 64, warps: int = 4) -> gl.NVMMADistributedLayout:
    """Layout of a product's accumulator [rows, cols], with a multiple of 64 rows, over one or two warpgroups.

    Two warpgroups (8 warps) divide a tile of 128 rows by rows, and a tile of 64 rows by columns.
    """
    if warps == 8 and rows == 64:
        return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, cols // 2, 16])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, cols, 16])


@gluon.constexpr_function
def left_operand(cols: int, rows: int = 64, warps: int = 4) -> gl.DotOperandLayout:
    """Layout of a product's left operand in registers.

    An accumulator of the same shape converts to it without data movement, unless two warpgroups divide its columns.
    """
    return gl.DotOperandLayout(0, accumulator(cols, rows, warps), 2)


@gluon.constexpr_function
def copy_layout(cols: int, bits: int, warps: int = 4) -> gl.BlockedLayout:
    """Layout of copies in units of 16 bytes, with the units of a row in neighbouring threads."""
    piece = 128 // bits
    across = min(32, cols // piece)
    return gl.BlockedLayout([1, piece], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def rows_at_once(cols: int, bits: int, warps: int = 4) -> int:
    """Rows of a tile that all warps hold together in one unit of `copy_layout`; neighbouring ones are a warp's."""
    return warps * 32 // min(32, cols * bits // 128)


@gluon.constexpr_function
def operand_layout(rows: int, cols: int) -> gl.NVMMASharedLayout:
    """Shared-memory layout of a bfloat16 operand."""
    return gl.NVMMASharedLayout.get_default_for([rows, cols], gl.bfloat16)


@gluon.constexpr_function
def gate_layout() -> gl.SwizzledSharedLayout:
    """Shared-memory layout of a tile of float32 gates, read and written in units of 16 bytes."""
    return gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
