# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Computes Q~, K~, scores and 2^r of every chunk, for K up to 256: Gluon kernel for wide heads on Hopper.

    Q~ = scale 2^(a - r) q,    K~ = 2^(b - r) k,    2^r with r = max(a_last, -limit) / 2
    forward:  P = tril(Q~ K~^T),    reverse:  P = triu(K~ Q~^T)

`wide_walk` has one program per block of value columns; without this kernel, each would compute these again.

With a gate per head (`head_gates.py`), Q~ = scale 2^a q, K~ = 2^(a_C - a) k, the scores are those of q and k themselves
times 2^(a_i - a_j), and in place of 2^r there is 2^(a_C).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, write
from gla_kernels.hopper.gates import fetch_gates, frame_factor, make_words
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
from gla_kernels.hopper.products import add_product, masked, triangle
from gla_kernels.hopper.values import thread_barrier, to_float32
from gla_kernels.hopper.wide.tiles import (
    WARPS,
    cumulative_tile,
    find_chunk,
    gate_halves,
    keep_excess,
    make_ones_columns,
    raise_where_not_finite,
    start_centred_gates,
    start_total_gate,
    store_frame,
    store_scaled,
    write_tile,
    zeros,
)


@gluon.jit(do_not_specialize=["T", "H", "N"])
def wide_frames(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0; if HEAD_GATED [B, H, T], float32 sums of gates
    framed_q,  # [B, T, H, K] bfloat16, contiguous: Q~
    framed_k,  # [B, T, H, K]: K~
    scores,  # [B, T, H, C] bfloat16: for each token, its row of P
    frame_factors,  # [chunks, H, K] float32: 2^r of each chunk; if HEAD_GATED [chunks, H], 2^(a_C)
    excesses,  # [chunks, H, K] float32: for `wide_gradients`; see `hopper/gates.py`; unused forward
    raised,  # [N, H] int32: set to 1 if a result is not finite
    marks,  # [chunks, H] int32, 0: n + 1 if the chunk, of sequence n, has a strong channel; unused in reverse
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h,
    T,
    H,
    N,
    K: gl.constexpr,
    BK: gl.constexpr,
    C: gl.constexpr,
    GATED: gl.constexpr,
    HEAD_GATED: gl.constexpr,
    VARLEN: gl.constexpr,
    REVERSE: gl.constexpr,
):  # fmt: skip
    """A program handles one chunk and head, in a loop over blocks of BK key columns."""
    blocks_k: gl.constexpr = (K + BK - 1) // BK
    copy_k: gl.constexpr = copy_layout(BK, 16, WARPS)
    copy_p: gl.constexpr = copy_layout(C, 16, WARPS)
    wait_for_previous_kernel()
    pid = gl.program_id(0)
    h = pid % H
    chunk_slot = pid // H
    n, b, t, rows_left = find_chunk(cu_seqlens, chunk_slot, 0, 1, 1, N, T, C, VARLEN)
    if rows_left <= 0:
        return
    q += b * q_b + t * q_t + h.to(gl.int64) * q_h
    k += b * k_b + t * k_t + h.to(gl.int64) * k_h
    out = (b * T + t) * H + h
    framed_q += out * K
    framed_k += out * K
    scores += out * C
    if GATED:
        g += b * g_b + t * g_t + h.to(gl.int64) * g_h
        frame_factors += (chunk_slot.to(gl.int64) * H + h) * K
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)

    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [blocks_k, C, BK], operand_layout(C, BK))
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [blocks_k, C, BK], operand_layout(C, BK))
    if GATED:
        g_tile = gl.allocate_shared_memory(gl.float32, [C, BK], gate_layout())
        fetch_gates(g_tile, g, g_t, rows_left, K)
        ones = make_ones_columns(C)
        cumulative = cumulative_tile(C)
        words = make_words()
    if HEAD_GATED:
        sums = make_sums(1, C).index(0)
        fetch_sums(sums, sums_in(g, n * 0 if VARLEN else n, t, h, T, H), rows_left)
    for ik in gl.static_range(blocks_k):
        fetch(q_tiles.index(ik), q + ik * BK, q_t, rows_left, K, copy_k, ik * BK)
        fetch(k_tiles.index(ik), k + ik * BK, k_t, rows_left, K, copy_k, ik * BK)
        async_copy.commit_group()
    P = zeros(C, C, scale)
    for ik in gl.static_range(blocks_k):
        q_tile = q_tiles.index(ik)
        k_tile = k_tiles.index(ik)
        async_copy.wait_group(blocks_k - 1 if ik == 0 else 0)
        thread_barrier()
        if GATED:
            halves, large = gate_halves(g_tile, g, words, C, BK)
            G = start_centred_gates(halves, cumulative, C, BK)
            total = start_total_gate(halves, ones, BK)
            G, total = warpgroup_mma_wait(0, deps=[G, total])
            if ik + 1 < blocks_k:
                thread_barrier()  # no product reads the gates any more
                fetch_gates(g_tile, g + (ik + 1) * BK, g_t, rows_left, K, (ik + 1) * BK)
                async_copy.commit_group()
            last = gl.max(total, axis=1)
            keys = ik * BK + gl.arange(0, BK, last.type.layout)
            gl.store(frame_factors + keys, frame_factor(last), keys < K)
            if large:
                if REVERSE:
                    keep_excess(excesses, chunk_slot * H + h, last, ik * BK, K)
                else:
                    mark_strong(marks + chunk_slot * H + h, last, n)
            store_frame(q_tile, k_tile, G, last, large, scale, C, BK)
        elif HEAD_GATED:
            bq = to_float32(q_tile.load(key_tile)) * scale
            bk = to_float32(k_tile.load(key_tile))
            q_tile.store(bq.to(gl.bfloat16))
        else:
            store_scaled(q_tile, scale, C, BK)
        fence_async_shared()
        thread_barrier()
        if REVERSE:
            P = add_product(k_tile, q_tile.permute((1, 0)), P)
        else:
            P = add_product(q_tile, k_tile.permute((1, 0)), P)
        if HEAD_GATED:
            a = row_sums(sums, key_tile)
            total = chunk_gate(sums)
            P = warpgroup_mma_wait(0, deps=[P])
            thread_barrier()  # no product reads the tiles any more
            q_tile.store((bq * gl.exp2(a)[:, None]).to(gl.bfloat16))
            k_tile.store((bk * decay_to_end(a, total)).to(gl.bfloat16))
            thread_barrier()
        write_tile(framed_q + ik * BK, q_tile, H * K, rows_left, K, copy_k, ik * BK)
        write_tile(framed_k + ik * BK, k_tile, H * K, rows_left, K, copy_k, ik * BK)
        P = warpgroup_mma_wait(0, deps=[P])
    if HEAD_GATED:
        gl.store(frame_factors + (chunk_slot.to(gl.int64) * H + h), gl.exp2(chunk_gate(sums)))
        P *= score_decays(sums, accumulator(C, C, WARPS), not REVERSE)
    P = masked(P, triangle(C, not REVERSE, True, WARPS))
    if GATED:
        raise_where_not_finite(raised + n * H + h, P)
    write(scores, gl.convert_layout(P.to(gl.bfloat16), copy_p), H * C, rows_left, C, copy_p)
