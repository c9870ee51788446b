# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: E741, SIM102
"""Computes o of a chunk from its state, or in reverse dv from its gradient: Gluon kernel for wide heads on Hopper.

    forward:  X = Q~, Y = K~, Z = V    O  = tril(Q~ K~^T) V    + Q~ S~
    reverse:  X = K~, Y = Q~, Z = dO   dV = triu(K~ Q~^T) dO   + K~ dS~'

with K in blocks. Chunks are independent here, because `wide_recurrence` has stored the states.

With a gate per head (`head_gates.py`), X is scale 2^a q or, in reverse, 2^(a_C - a) k for the states alone; the scores
are those of q and k themselves times 2^(a_i - a_j).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, write
from gla_kernels.hopper.gates import fetch_gates, make_words
from gla_kernels.hopper.head_gates import (
    chunk_gate,
    decay_to_end,
    fetch_sums,
    make_sums,
    row_sums,
    score_decays,
    sums_in,
)
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, operand_layout
from gla_kernels.hopper.places import mark_strong, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked, product, triangle
from gla_kernels.hopper.values import negative, thread_barrier, to_float32
from gla_kernels.hopper.wide.tiles import (
    WARPS,
    chunk_head_of,
    cumulative_tile,
    find_chunk,
    gate_halves,
    kept_excess,
    make_ones_columns,
    raise_where_not_finite,
    start_centred_gates,
    store_framed,
    store_scaled,
    strong_exponents,
    total_gate,
    zeros,
)


@gluon.jit
def start_block(
    z_tile, S_tiles, first_tile, z, states, block, blocks_v, z_t, rows_left, K: gl.constexpr, V: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Starts copying a block of columns of z, and of the state to S_tiles from number `first_tile` on."""
    BK: gl.constexpr = S_tiles.shape[1]
    BV: gl.constexpr = S_tiles.shape[2]
    column = block * BV
    there = block < blocks_v
    fetch(z_tile, z + column, z_t, gl.where(there, rows_left, 0), V, layout, column)
    for ik in gl.static_range((K + BK - 1) // BK):
        keys = gl.where(there, K - ik * BK, 0)
        fetch(S_tiles.index(first_tile + ik), states + (ik * BK * V + column), V, keys, V, layout, column)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks"])
def wide_readout(
    x,  # [B, T, H, K] bfloat16: q, or k in reverse; any strides of B, T and H
    y,  # [B, T, H, K]: k, or q in reverse
    z,  # [B, T, H, V]: v, or do in reverse
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0; if HEAD_GATED [B, H, T], float32 sums of gates
    states,  # [chunks, H, K, V] bfloat16: what `wide_recurrence` stored for the chunks of this launch
    out,  # [B, T, H, V], contiguous
    flags,  # [N, H] int32: 1 if a result of the forward is not finite
    raised,  # [N, H] int32: set to 1 if the results are not finite
    marks,  # [chunks of all launches, H] int32, 0: n + 1 if the chunk, of sequence n, has a strong channel; forward
    excesses,  # [chunks of all launches, H, K] float32, as `wide_recurrence` kept them; in reverse
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, g_b, g_t, g_h,
    T,
    H,
    N,
    base,  # the first of this launch's pieces
    stride,  # from one piece of this launch to the next
    piece_chunks,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    C: gl.constexpr,
    GATED: gl.constexpr,
    HEAD_GATED: gl.constexpr,
    VARLEN: gl.constexpr,
    REVERSE: gl.constexpr,
):  # fmt: skip
    """A program handles one chunk and head, in a loop over blocks of K for the scores and one over blocks of V."""
    blocks_k: gl.constexpr = (K + BK - 1) // BK
    blocks_v: gl.constexpr = (V + BV - 1) // BV
    copy_k: gl.constexpr = copy_layout(BK, 16, WARPS)
    copy_v: gl.constexpr = copy_layout(BV, 16, WARPS)
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)
    buffers: gl.constexpr = 2
    wait_for_previous_kernel()
    pid = gl.program_id(0)
    h = pid % H
    chunk_slot = pid // H
    n, b, t, rows_left = find_chunk(cu_seqlens, chunk_slot, base, stride, piece_chunks, N, T, C, VARLEN)
    if rows_left <= 0:
        return
    if GATED and REVERSE:  # not forward: this launch may raise the flag itself, and all warps must take the same branch
        if gl.load(flags + n * H + h) != 0:
            return
    x += b * x_b + t * x_t + h.to(gl.int64) * x_h
    y += b * y_b + t * y_t + h.to(gl.int64) * y_h
    z += b * z_b + t * z_t + h.to(gl.int64) * z_h
    if GATED:
        g += b * g_b + t * g_t + h.to(gl.int64) * g_h
        chunk_head = chunk_head_of(cu_seqlens, n, t, h, T, H, C, VARLEN)
    states += (chunk_slot.to(gl.int64) * H + h) * K * V
    out += ((b * T + t) * H + h) * V

    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [blocks_k, C, BK], operand_layout(C, BK))
    y_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
    z_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BV], operand_layout(C, BV))
    S_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers * blocks_k, BK, BV], operand_layout(BK, BV))
    P_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
    if GATED:
        g_tile = gl.allocate_shared_memory(gl.float32, [C, BK], gate_layout())
        if not REVERSE:
            ones = make_ones_columns(C)
        cumulative = cumulative_tile(C)
        words = make_words()
    if HEAD_GATED:
        sums = make_sums(1, C).index(0)
        fetch_sums(sums, sums_in(g, n * 0 if VARLEN else n, t, h, T, H), rows_left)
    for ik in gl.static_range(blocks_k):
        fetch(x_tiles.index(ik), x + ik * BK, x_t, rows_left, K, copy_k, ik * BK)
    fetch(y_tile, y, y_t, rows_left, K, copy_k)
    if GATED:
        fetch_gates(g_tile, g, g_t, rows_left, K)
    async_copy.commit_group()
    for block in gl.static_range(buffers - 1):
        start_block(
            z_tiles.index(block), S_tiles, block * blocks_k, z, states, block, blocks_v, z_t, rows_left, K, V, copy_v
        )

    P = zeros(C, C, scale)
    for ik in gl.static_range(blocks_k):
        async_copy.wait_group(buffers - 1 if ik == 0 else 0)
        thread_barrier()
        x_tile = x_tiles.index(ik)
        q_tile = y_tile if REVERSE else x_tile
        k_tile = x_tile if REVERSE else y_tile
        if GATED:
            bq = q_tile.load(key_tile)
            bk = k_tile.load(key_tile)
            halves, large = gate_halves(g_tile, g, words, C, BK)
            G = start_centred_gates(halves, cumulative, C, BK)
            G = warpgroup_mma_wait(0, deps=[G])
            if large:
                if REVERSE:
                    beyond = kept_excess(excesses, chunk_head, ik * BK, C, BK, K)
                    G += 0.5 * beyond
                    store_framed(k_tile, to_float32(bk), beyond - G)
                else:
                    last = total_gate(halves, ones, BK)
                    G, of_k = strong_exponents(G, last, C, BK)
                    store_framed(k_tile, to_float32(bk), of_k)
                    mark_strong(marks + chunk_head, last, n)
            else:
                store_framed(k_tile, to_float32(bk), negative(G))
            store_framed(q_tile, to_float32(bq) * scale, G)
        elif HEAD_GATED:
            bx = to_float32(x_tile.load(key_tile))
            if REVERSE:
                store_scaled(q_tile, scale, C, BK)
            else:
                bx *= scale
                x_tile.store(bx.to(gl.bfloat16))
        else:
            store_scaled(q_tile, scale, C, BK)
        fence_async_shared()
        thread_barrier()
        P = add_product(x_tile, y_tile.permute((1, 0)), P)
        P = warpgroup_mma_wait(0, deps=[P])
        if HEAD_GATED:
            a = row_sums(sums, key_tile)
            decays = decay_to_end(a, chunk_gate(sums)) if REVERSE else gl.exp2(a)[:, None]
            thread_barrier()  # no product reads x_tile any more
            x_tile.store((bx * decays).to(gl.bfloat16))
        if ik + 1 < blocks_k:
            thread_barrier()
            fetch(y_tile, y + (ik + 1) * BK, y_t, rows_left, K, copy_k, (ik + 1) * BK)
            if GATED:
                fetch_gates(g_tile, g + (ik + 1) * BK, g_t, rows_left, K, (ik + 1) * BK)
            async_copy.commit_group()
    if HEAD_GATED:
        P *= score_decays(sums, accumulator(C, C, WARPS), not REVERSE)
    P = masked(P, triangle(C, not REVERSE, True, WARPS))
    P_tile.store(P.to(gl.bfloat16))
    if GATED:
        raise_where_not_finite(raised + n * H + h, P)
    for j in range(blocks_v):
        buffer = j % buffers
        free = (j + buffers - 1) % buffers
        async_copy.wait_group(buffers - 2)
        fence_async_shared()
        thread_barrier()
        start_block(
            z_tiles.index(free), S_tiles, free * blocks_k, z, states, j + buffers - 1, blocks_v, z_t, rows_left,
            K, V, copy_v,
        )  # fmt: skip
        O = product(P_tile, z_tiles.index(buffer), C, BV, WARPS)
        for ik in gl.static_range(blocks_k):
            O = add_product(x_tiles.index(ik), S_tiles.index(buffer * blocks_k + ik), O)
        # The tiles are listed as dependencies too: with one block of V nothing reads them later, and the compiler could
        # use their memory for the conversion of o while the products still read them.
        O, _, _, _, _ = warpgroup_mma_wait(0, deps=[O, P_tile, x_tiles, z_tiles, S_tiles])
        write(out, gl.convert_layout(O.to(gl.bfloat16), copy_v), H * V, rows_left, V, copy_v, j * BV)
        out += BV
    async_copy.wait_group(0)
