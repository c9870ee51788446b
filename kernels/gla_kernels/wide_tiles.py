"""Pieces of the Gluon kernels for wide heads: two warpgroups, key columns in blocks of 128, time in pieces.

A piece is a run of `rows` tokens of one sequence (its last one may be shorter). Pieces are counted through all
sequences, packed or not, by `tiles.first_slot`'s rule; kernels are launched over pieces, and a piece that a sequence
does not have does nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper_tiles import (
    LOG2E,
    SPAN_LIMIT,
    accumulator,
    add_product,
    copy_layout,
    locate,
    operand_layout,
    product,
    put,
    raise_where,
    split,
    thread_barrier,
    triangle,
)

WARPS = gl.constexpr(8)


@gluon.jit
def find_piece(cu, slot, N, T, rows, VARLEN: gl.constexpr):
    """The sequence of piece `slot`, the piece's number in it, and the sequence's batch row, first token and length."""
    if VARLEN:
        # The last sequence whose first slot is not beyond: first slots, cu[n] // rows + n, rise with n.
        n = slot * 0
        beyond = n + N
        while beyond - n > 1:
            middle = (n + beyond) // 2
            late = gl.load(cu + middle).to(gl.int32) // rows + middle > slot
            beyond = gl.where(late, middle, beyond)
            n = gl.where(late, n, middle)
        b, begin, length = locate(cu, n, T, VARLEN)
        return n, slot - begin // rows - n, b, begin, length
    per_sequence = gl.cdiv(T, rows)
    n = slot // per_sequence
    b, begin, length = locate(cu, n, T, VARLEN)
    return n, slot % per_sequence, b, begin, length


@gluon.jit
def find_chunk(
    cu, chunk_slot, base, stride, piece_chunks, N, T, C: gl.constexpr, VARLEN: gl.constexpr
):  # fmt: skip
    """Of the chunk in slot `chunk_slot` of some pieces: sequence, batch row and first token (64 bits), rows left."""
    piece = base + chunk_slot // piece_chunks * stride
    n, i, b, begin, length = find_piece(cu, piece, N, T, piece_chunks * C, VARLEN)
    first = (i * piece_chunks + chunk_slot % piece_chunks) * C
    return n, b.to(gl.int64) if not VARLEN else 0, (begin + first).to(gl.int64), length - first


@gluon.jit
def constant_tile(values, C: gl.constexpr):
    """A shared operand [C, C] that holds `values`."""
    return gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C), values.to(gl.bfloat16))


@gluon.jit
def cumulative_tile(C: gl.constexpr):
    """The shared constant tril(1) - 1/2, by which gates become the cumulative gate about the chunk's middle."""
    return constant_tile(gl.where(triangle(C, True, True, WARPS), 0.5, -0.5), C)


@gluon.jit
def gate_halves(g_tile, C: gl.constexpr, BK: gl.constexpr):
    """The gates of g_tile (C, BK) float32 in log2, as two bfloat16 halves [2, C, BK] in the same memory."""
    layout: gl.constexpr = copy_layout(BK, 32, WARPS)
    high, low = split(g_tile.load(layout) * LOG2E)
    halves = g_tile._reinterpret(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    thread_barrier()
    halves.index(0).store(high)
    halves.index(1).store(low)
    fence_async_shared()
    thread_barrier()
    return halves


@gluon.jit
def start_centred_gates(halves, cumulative, C: gl.constexpr, BK: gl.constexpr):
    """Starts G - r (C, BK): the cumulative gate about the chunk's middle r = G_last / 2."""
    G = product(cumulative, halves.index(0), C, BK, WARPS)
    return add_product(cumulative, halves.index(1), G)


@gluon.jit
def make_ones_columns(C: gl.constexpr):
    """The shared constant [C, 8] of ones that `start_total_gate` sums gates with."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [WARPS, 1], [1, 0])
    ones = gl.full([C, 8], 1.0, gl.bfloat16, layout)
    return gl.allocate_shared_memory(gl.bfloat16, [C, 8], operand_layout(C, 8), ones)


@gluon.jit
def start_total_gate(halves, ones, BK: gl.constexpr):
    """Starts G_last (BK, 8), in every column the same, with the keys down the rows, as the state has them."""
    total = product(halves.index(0).permute((1, 0)), ones, BK, 8, WARPS)
    return add_product(halves.index(1).permute((1, 0)), ones, total)


@gluon.jit
def centred_gates(halves, cumulative, C: gl.constexpr, BK: gl.constexpr):
    """G - r (C, BK), waited for."""
    G = start_centred_gates(halves, cumulative, C, BK)
    return warpgroup_mma_wait(0, deps=[G])


@gluon.jit
def store_frame(q_tile, k_tile, G, scale, C: gl.constexpr, BK: gl.constexpr):
    """Q~ and K~ in place of q and k."""
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)
    k_tile.store((k_tile.load(key_tile).to(gl.float32) * gl.exp2(-G)).to(gl.bfloat16))
    q_tile.store((q_tile.load(key_tile).to(gl.float32) * scale * gl.exp2(G)).to(gl.bfloat16))


@gluon.jit
def store_scaled(q_tile, scale, C: gl.constexpr, BK: gl.constexpr):
    """scale * q in place of q."""
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)
    q_tile.store((q_tile.load(key_tile).to(gl.float32) * scale).to(gl.bfloat16))


@gluon.jit
def put_tile(
    ptr, tile, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column, EVICT: gl.constexpr = False
):  # fmt: skip
    """`put` of a shared tile, 32 rows at a time: fewer registers."""
    for part in gl.static_range(tile.shape[0] // 32):
        rows = tile.slice(part * 32, 32, 0).load(layout)
        put(ptr + part * 32 * stride, rows, stride, rows_left - part * 32, N, layout, column, EVICT)


@gluon.jit
def zeros(rows: gl.constexpr, cols: gl.constexpr, scale):
    """An accumulator of zeros that the compiler does not know to be constant (see `hopper_tiles.opaque`)."""
    return gl.zeros([rows, cols], gl.float32, accumulator(cols, rows, WARPS)) + scale * 0.0


@gluon.jit
def raise_where_not_finite(flag, x):
    """Sets `flag` to 1 if a number of the tile x is not finite."""
    # Infinity times 0 is NaN, which differs from 0.
    raise_where(flag, x * 0.0 != 0.0)


@gluon.jit
def raise_where_not_plain(flag, nothing, widest, chunks):
    """Sets `flag` to 1 after a walk of some chunks on which the plain form did not hold.

    `nothing` is 0 times the state, `widest` (BK) the largest span of a chunk's gates, log2.
    """
    # Infinity times 0 is NaN, which no sum loses and no comparison holds for.
    finite = gl.sum(gl.sum(nothing, axis=1), axis=0) == 0.0
    plain = finite & (gl.max(widest, axis=0) <= SPAN_LIMIT)
    if (chunks > 0) & (plain == 0):
        gl.store(flag, 1)
