# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""One gate per head and token: decays of a chunk's rows and scores.

With a_i the sum of a chunk's gates up to token i, in log2, and a_C its total, a decay is a number per row or per pair
of tokens, and no exponent is above 0:

    O  = 2^a Q S + (P o D) V,    D_ij = 2^(a_i - a_j) for j <= i, else 0
    S' = 2^(a_C) S + K^T 2^(a_C - a) V

So nothing has to be taken into a frame, and strong gates need no other kernel. Gates are at least LEAST_GATE, so that a
difference of two sums is finite. `portable/sums.py` computes the sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from gla_kernels.hopper.values import opaque


@gluon.jit
def make_sums(buffers: gl.constexpr, C: gl.constexpr):
    """Shared memory for the sums of `buffers` chunks."""
    return gl.allocate_shared_memory(gl.float32, [buffers, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def sums_in(sums, b, t, h, T, H):
    """Pointer to the sum of token t of batch row b and head h, in [B, H, T]."""
    return sums + ((b.to(gl.int64) * H + h) * T + t)


@gluon.jit
def fetch_sums(vector, ptr, rows_left):
    """Starts the copy of a chunk's sums to shared memory; behind the last token there are copies of its sum."""
    C: gl.constexpr = vector.shape[0]
    rows = opaque(gl.arange(0, C, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    at = gl.maximum(gl.minimum(rows, rows_left - 1), 0)
    async_copy.async_copy_global_to_shared(vector, ptr + at, at < rows_left)


@gluon.jit
def row_sums(vector, tile: gl.constexpr):
    """The sums of a chunk's rows [C], beside a tile [C, ...] with the layout `tile`."""
    return vector.load(gl.SliceLayout(1, tile))


@gluon.jit
def chunk_gate(vector):
    """a_C, from a chunk's sums [C] in shared memory."""
    C: gl.constexpr = vector.shape[0]
    last = vector.slice(C - 1, 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.max(last, axis=0)


@gluon.jit
def decay_to_end(a, total):
    """2^(a_C - a) of each row, as a column."""
    return gl.exp2(total - a)[:, None]


@gluon.jit
def decay_scores(scores, vector, LOWER: gl.constexpr):
    """Scores times 2^(a_i - a_j): token i is the row and j the column (LOWER), or the other way round.

    Outside the triangle, which the caller masks, values can be infinite or NaN.
    """
    layout: gl.constexpr = scores.type.layout
    differences = row_sums(vector, layout)[:, None] - vector.load(gl.SliceLayout(0, layout))[None, :]
    return scores * gl.exp2(differences if LOWER else 0.0 - differences)


@gluon.jit
def make_terms(C: gl.constexpr):
    """Shared memory for terms of dg: two numbers per token of a chunk, whose sum counts."""
    return gl.allocate_shared_memory(gl.float32, [2 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def store_row_sums(terms, x):
    """Writes the sums of the rows of x [C, K] to `terms`: one for each half of the columns.

    Two warpgroups hold the halves, so that no sum needs a barrier.
    """
    C: gl.constexpr = x.shape[0]
    halves = gl.sum(x.reshape([C, 2, x.shape[1] // 2]), axis=2)
    terms._reinterpret(gl.float32, [C, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(halves)


@gluon.jit
def store_head_gates(ptr, H, sent, from_states, boundary, rows_left):
    """Writes dg of a chunk's tokens: the sum of `boundary`, of `from_states` if not None, and of `sent` before token t.

    `ptr` is that of the first token; neighbours are H apart. Terms are those of `make_terms`. A barrier lies between
    their writes and this.
    """
    C: gl.constexpr = sent.shape[0] // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    rows = gl.arange(0, C, gl.SliceLayout(1, layout))
    is_earlier = gl.arange(0, 2 * C, columns)[None, :] < opaque(2 * rows)[:, None]
    terms = gl.where(is_earlier, sent.load(columns)[None, :], 0.0) + boundary.load(columns)[None, :]
    if from_states is not None:
        terms += from_states.load(columns)[None, :]
    dg = gl.sum(terms, axis=1)
    gl.store(ptr + rows.to(gl.int64) * H, dg.to(ptr.dtype.element_ty), rows < rows_left)
