# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Building blocks of the Gluon kernels for wide heads: two warpgroups, key columns in blocks of 128, time in pieces."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import write
from gla_kernels.hopper.gates import excess, has_large, keep_bits, raise_to_least, read_gates
from gla_kernels.hopper.layouts import accumulator, copy_layout, operand_layout, rows_at_once
from gla_kernels.hopper.places import find_piece, first_slot, locate, raise_where
from gla_kernels.hopper.products import add_product, product, triangle
from gla_kernels.hopper.values import negative, split, thread_barrier, to_float32, wide_product

WARPS = gl.constexpr(8)


@gluon.jit
def find_chunk(
    cu_seqlens, chunk_slot, base, stride, piece_chunks, N, T, C: gl.constexpr, VARLEN: gl.constexpr
):  # fmt: skip
    """For chunk slot `chunk_slot` of a launch: sequence, batch row and first token (64 bits), rows left from there."""
    piece = base + chunk_slot // piece_chunks * stride
    n, i, b, begin, length = find_piece(cu_seqlens, piece, N, T, piece_chunks * C, VARLEN)
    offset = (i * piece_chunks + chunk_slot % piece_chunks) * C
    return n, b.to(gl.int64) if not VARLEN else 0, (begin + offset).to(gl.int64), length - offset


@gluon.jit
def constant_tile(values, C: gl.constexpr):
    """A shared operand [C, C] that holds `values`."""
    return gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C), values.to(gl.bfloat16))


@gluon.jit
def cumulative_tile(C: gl.constexpr):
    """The shared constant tril(1) - 1/2; times the gates it gives the centred gate."""
    return constant_tile(gl.where(triangle(C, True, True, WARPS), 0.5, -0.5), C)


@gluon.jit
def gate_halves(g_tile, g, words, C: gl.constexpr, BK: gl.constexpr):
    """The gates in g_tile, in log2, as two bfloat16 parts [2, C, BK] in its memory; and whether one is large.

    `words` is for `has_large`. Only if there is a large gate, some may be less than the least.
    """
    bits: gl.constexpr = g.dtype.element_ty.primitive_bitwidth
    gates = read_gates(g_tile, g, copy_layout(BK, bits, WARPS))
    keep_bits(words, gates, rows_at_once(BK, bits, WARPS))
    halves = g_tile._reinterpret(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    thread_barrier()
    large = has_large(words)
    if large:
        gates = raise_to_least(gates)
    high, low = split(gates)
    halves.index(0).store(high)
    halves.index(1).store(low)
    fence_async_shared()
    thread_barrier()
    return halves, large


@gluon.jit
def start_centred_gates(halves, cumulative, C: gl.constexpr, BK: gl.constexpr):
    """Starts the centred gate a - a_last / 2 (C, BK)."""
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
    """Starts a_last (BK, 8), the same in every column; keys are rows, as in the state."""
    total = product(halves.index(0).permute((1, 0)), ones, BK, 8, WARPS)
    return add_product(halves.index(1).permute((1, 0)), ones, total)


@gluon.jit
def chunk_head_of(cu_seqlens, n, t, h, T, H, C: gl.constexpr, VARLEN: gl.constexpr):
    """Slot times H, plus h, of the chunk of sequence n whose first token is t (64 bits), among all chunks of a call."""
    _row, begin, length = locate(cu_seqlens, n, T, VARLEN)
    return (first_slot(n, begin, length, C, VARLEN) + (t - begin).to(gl.int32) // C) * H + h


@gluon.jit
def keep_excess(excesses, chunk_head, last, k0, K: gl.constexpr):
    """Stores the excess of a chunk's keys from k0 on, from a_last (BK), for `kept_excess`.

    Only chunks with a large gate keep it. A reader has the same tile of gates, so it finds the same.
    """
    keys = k0 + gl.arange(0, last.shape[0], last.type.layout)
    gl.store(excesses + wide_product(chunk_head, K) + keys, excess(last), keys < K)


@gluon.jit
def kept_excess(excesses, chunk_head, k0, C: gl.constexpr, BK: gl.constexpr, K: gl.constexpr):
    """`excess_row` (1, BK) of a chunk's keys from k0 on, as another kernel kept it; 0 beyond K."""
    keys = k0 + gl.arange(0, BK, gl.SliceLayout(0, accumulator(BK, C, WARPS)))
    return gl.load(excesses + wide_product(chunk_head, K) + keys, keys < K, 0.0)[None, :]


@gluon.jit
def excess_row(last, C: gl.constexpr, BK: gl.constexpr):
    """The excess of each channel as a row (1, BK) beside tiles (C, BK), from a_last (BK, any layout)."""
    return gl.convert_layout(excess(last), gl.SliceLayout(0, accumulator(BK, C, WARPS)))[None, :]


@gluon.jit
def strong_exponents(G, last, C: gl.constexpr, BK: gl.constexpr):
    """Exponents of q and of k (C, BK), from the centred gate and a_last (BK, any layout), if there is a large gate.

    Without one they are the centred gate and its negative; see `hopper/gates.py`.
    """
    beyond = excess_row(last, C, BK)
    G += 0.5 * beyond
    return G, beyond - G


@gluon.jit
def total_gate(halves, ones, BK: gl.constexpr):
    """Computes a_last (BK) and waits for the result."""
    total = start_total_gate(halves, ones, BK)
    return gl.max(warpgroup_mma_wait(0, deps=[total]), axis=1)


@gluon.jit
def store_framed(tile, x, exponents):
    """Stores Q~ or K~ (C, BK), from scale * q or k and its exponents."""
    tile.store((x * gl.exp2(exponents)).to(gl.bfloat16))


@gluon.jit
def store_frame(q_tile, k_tile, G, last, large, scale, C: gl.constexpr, BK: gl.constexpr):
    """Replaces q and k by Q~ and K~, from the centred gate and a_last; `large`: whether there is a large gate."""
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)
    if large:
        G -= 0.5 * excess_row(last, C, BK)  # k's exponents, negated
    store_framed(k_tile, to_float32(k_tile.load(key_tile)), negative(G))
    if large:
        G += excess_row(last, C, BK)  # q's
    store_framed(q_tile, to_float32(q_tile.load(key_tile)) * scale, G)


@gluon.jit
def store_scaled(q_tile, scale, C: gl.constexpr, BK: gl.constexpr):
    """Replaces q by scale * q."""
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)
    q_tile.store((to_float32(q_tile.load(key_tile)) * scale).to(gl.bfloat16))


@gluon.jit
def write_tile(
    ptr, tile, stride, rows_left, N: gl.constexpr, layout: gl.constexpr, column, EVICT: gl.constexpr = False
):  # fmt: skip
    """`write` of a shared tile, 32 rows at a time, which takes fewer registers."""
    for part in gl.static_range(tile.shape[0] // 32):
        rows = tile.slice(part * 32, 32, 0).load(layout)
        write(ptr + part * 32 * stride, rows, stride, rows_left - part * 32, N, layout, column, EVICT)


@gluon.jit
def zeros(rows: gl.constexpr, cols: gl.constexpr, scale):
    """An accumulator of zeros that the compiler cannot treat as constant (see `hopper.values.opaque`)."""
    return gl.zeros([rows, cols], gl.float32, accumulator(cols, rows, WARPS)) + scale * 0.0


@gluon.jit
def raise_where_not_finite(flag, x):
    """Sets `flag` to 1 if an element of the accumulator x is not finite."""
    # Infinity times 0 is NaN, which stays NaN in every sum and differs from 0. A thread sums its own elements of a row,
    # as the warpgroups share the columns: an instruction for each, where a comparison and a store were two more.
    groups: gl.constexpr = WARPS // 4
    R: gl.constexpr = x.shape[0]
    W: gl.constexpr = x.shape[1]
    zero_or_nan = gl.sum((x * 0.0).reshape([R, groups, W // (8 * groups), 8]), axis=2)
    raise_where(flag, zero_or_nan != 0.0)


@gluon.jit
def raise_where_state_not_finite(flag, zero_or_nan, chunks):
    """Sets `flag` to 1 if the state after `chunks` > 0 chunks is not finite; `zero_or_nan` is 0 times that state."""
    # Infinity times 0 is NaN, which stays NaN in every sum and fails every comparison.
    finite = gl.sum(gl.sum(zero_or_nan, axis=1), axis=0) == 0.0
    if (chunks > 0) & (finite == 0):
        gl.store(flag, 1)
