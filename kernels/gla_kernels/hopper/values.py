# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Numbers as the compiler is to treat them: what it must not fold or keep, and conversions that it does badly."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# `gl.barrier` in Triton 3.7, `gl.thread_barrier` before.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def opaque(x):
    """x (int32), as a value that the compiler cannot predict and recomputes at every use of this function.

    There are two reasons. ptxas 12.8 loses a register operand of `wgmma` that it can fold to a constant (it writes the
    register after the product has read it), so masks must not be foldable. And offsets that the compiler would compute
    before a loop, by the dozen, cost more registers than computing them again.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def opaque_float(x):
    """x (float32), as `opaque` gives integers: what is computed from it is not kept from an earlier use."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def negative(x):
    """-x, as part of the instruction that uses it: Triton computes -x as 0 - x, which is one of its own."""
    return x * -1.0


@gluon.jit
def to_float32(x):
    """bfloat16 x, an even number per thread, as float32: Triton takes three instructions for two of them, not two."""
    both: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(both, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def split(x):
    """float32 x as a sum of two bfloat16, which keep 16 bits. The first is truncated, not rounded: a single `and`."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def readdressed(tile):
    """The shared `tile`, with an address that the compiler recomputes at every use of this function.

    Descriptors and addresses of tiles do not change in a loop, so the compiler would compute them before it, and keep
    them on the stack if registers are short. Loads from the stack go to L2, because shared memory leaves little L1.
    """
    place = tile._reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout)
    return place.index(opaque(0))


@gluon.jit
def wide_product(a, b):
    """a * b (int32) in 64 bits, with b a multiple of 16, recomputed at every use (see `opaque`)."""
    ab = gl.inline_asm_elementwise("mul.wide.s32 $0, $1, $2;", "=l,r,r", [a, b], gl.int64, is_pure=False, pack=1)
    return gl.multiple_of(ab, 16)


@gluon.jit
def stride_product(a, stride):
    """`wide_product` of a (int32) and a stride, which has 64 bits if it needs them."""
    if stride.dtype == gl.int64:
        return a.to(gl.int64) * stride
    return wide_product(a, stride)
