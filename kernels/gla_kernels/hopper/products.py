# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""`wgmma` products, and the masks of their operands.

Shapes in comments: C = 64 rows (tokens) of a chunk, BK and BV = key and value columns of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from gla_kernels.hopper.layouts import accumulator, left_operand
from gla_kernels.hopper.values import opaque, opaque_float


@gluon.jit
def no_state(BK: gl.constexpr, BV: gl.constexpr, scale, layout: gl.constexpr):
    """A state [BK, BV] of zeros, each computed separately.

    The assembler treats registers that hold the same constant as free. It would fill them before the loop with values
    that the loop can recompute, and then keep those values on the stack.
    """
    rows = gl.arange(0, BK, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BV, gl.SliceLayout(0, layout))[None, :]
    return (rows * BV + cols).to(gl.float32) * (scale * 0.0)


@gluon.jit
def product(a, b, M: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr = 4):
    """Starts a @ b, [M, N] float32."""
    zeros = gl.zeros([M, N], gl.float32, accumulator(N, M, WARPS))
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_product(a, b, acc):
    """Starts acc + a @ b."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def triangle(
    C: gl.constexpr, LOWER: gl.constexpr, INCLUSIVE: gl.constexpr, WARPS: gl.constexpr = 4, SHIFT: gl.constexpr = 0
):  # fmt: skip
    """Mask [C, C] of the pairs (i, j) with j <= i (LOWER) or j >= i; without the diagonal if not INCLUSIVE.

    SHIFT is added to i and j. ptxas sees through `opaque`, computes the same masks before and behind a branch once, and
    spends two instructions on keeping each predicate. Masks with another shift are others to it.
    """
    layout: gl.constexpr = accumulator(C, C, WARPS)
    i = opaque(gl.arange(0, C, gl.SliceLayout(1, layout)) + SHIFT)[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :] + SHIFT
    if LOWER:
        return i >= j if INCLUSIVE else i > j
    return i <= j if INCLUSIVE else i < j


@gluon.jit
def masked(x, mask):
    """x (float32), with 0 outside the mask, where values may be inf or NaN.

    Opaque, because the compiler would choose behind a conversion to bfloat16, from two numbers in a register: five
    instructions in place of three.
    """
    return opaque_float(gl.where(mask, x, 0.0))


@gluon.jit
def masked_operand(x, mask):
    """x (C, C) float32 as a left operand, `masked`."""
    C: gl.constexpr = x.shape[0]
    return gl.convert_layout(masked(x, mask).to(gl.bfloat16), left_operand(C))
