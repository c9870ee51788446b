# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Sums of a gate per head, made by a call's first kernel for itself and for the later ones.

A kernel of its own for them (`portable/sums.py`) takes 2.5 us, for which all others wait. So programs with few chunks
make the sums of all their chunks when they start, while q, k and v are on their way, unless the GPU is so full that the
gates' bytes count (`sums_made` of both families). In a loop over chunks the gates' way would show: a load that is used
some chunks later is waited for at the end of the branch that it is in.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gla_kernels.hopper.gates import LOG2E, raise_to_least
from gla_kernels.hopper.head_gates import add, sums_in


@gluon.constexpr_function
def _layout(C: int, warps: int) -> gl.BlockedLayout:
    """A chunk is in one warp, so that sums need no exchange between warps."""
    return gl.BlockedLayout([1, C // 32], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def _tokens(begin, length, first, step, chunks, R: gl.constexpr, C: gl.constexpr):
    """Tokens [R, C] of a sequence's chunk `first` and every `step`-th from there, and which of them are there."""
    layout: gl.constexpr = _layout(C, gl.num_warps())
    number = gl.arange(0, R, gl.SliceLayout(1, layout))
    place = ((first + step * number) * C)[:, None] + gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    return begin + place, (number < chunks)[:, None] & (place < length)


@gluon.jit
def load_head_gates(
    gates, b, begin, h, gates_b, gates_t, gates_h, length, first, step, chunks, R: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Gates of up to R chunks [R, C], as they are; 0 where there is no token.

    To be called before copies start, because a load behind these waits for all of them.
    """
    t, there = _tokens(begin, length, first, step, chunks, R, C)
    row = gates + (b.to(gl.int64) * gates_b + h.to(gl.int64) * gates_h)
    return gl.load(row + t.to(gl.int64) * gates_t, there, other=0.0)


@gluon.jit
def head_sums(gates):
    """Sums of the loaded gates of each chunk [R, C], in log2."""
    return gl.associative_scan(raise_to_least(gates.to(gl.float32) * LOG2E), 1, add)


@gluon.jit
def share_head_sums(sums_of_chunks, summed):
    """Writes sums [R, C] to shared memory for R chunks, or more."""
    R: gl.constexpr = summed.shape[0]
    C: gl.constexpr = summed.shape[1]
    sums_of_chunks._reinterpret(gl.float32, [R, C], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(summed)


@gluon.jit
def keep_head_sums(sums, summed, b, begin, h, T, H, length, first, step, chunks):
    """Writes sums [R, C] to where later kernels read them, in [B, H, T]."""
    t, there = _tokens(begin, length, first, step, chunks, summed.shape[0], summed.shape[1])
    gl.store(sums_in(sums, b, t, h, T, H), summed, there)
