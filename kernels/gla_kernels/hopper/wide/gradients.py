# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: SIM102
"""Computes dq, dk, dg and, for K up to 128, dv of a chunk: Gluon kernel for wide heads on Hopper.

With S~ the state before the chunk and dS~' the gradient of the state after it, both in the chunk's frame, as stored by
`wide_recurrence` or `wide_walk`:

    dP  = tril(dO V^T)
    dQ~ = dP K~   + dO S~^T         dq = scale 2^(a - r) dQ~
    dK~ = dP^T Q~ + V dS~'^T        dk = 2^(b - r) dK~
    dV  = triu(K~ Q~^T) dO + K~ dS~'
    dg_t = sum_v S~ dS~' + sum_{i >= t} (Q~ dO S~^T)_i + sum_{i < t} (K~_i dK~_i - Q~_i (dP K~)_i)

The last line is that of docs/kernels.md with dS~ = dS~' + Q~^T dO: its second term is in the sum over i >= t, so that
nothing is added and subtracted again. Each term uses the rounded operands of the products (dS~' too), so that terms
which cancel in exact arithmetic cancel here too. Of marked chunks, `strong.py` adds what is missing.

With a gate per head (`head_gates.py`; D as there), S and dS' being in no frame:

    dQ = scale ((dP o D) K + 2^a dO S^T),    dK = (dP o D)^T Q + 2^(a_C - a) V dS'^T
    dV = (P o D)^T dO + 2^(a_C - a) K dS'
    dg_t = 2^(a_C) sum_kv S dS' + sum_i q_i . (scale 2^a dO S^T)_i + sum_{i < t} (k_i . dk_i - q_i . dq_i)

of which a program computes what its key columns add: one of the sums that make dg. The second term, for i < t, is in
the third again, subtracted. Without that, (dP o D) K would need registers of its own, with which two programs do not
fit a multiprocessor.
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
    halves_sums,
    make_row_sums,
    make_sums,
    make_totals,
    row_sums,
    score_decays,
    store_head_gates,
    store_row_total,
    store_total,
    sums_in,
)
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, operand_layout
from gla_kernels.hopper.places import wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked, product, triangle
from gla_kernels.hopper.values import negative, opaque_float, readdressed, split, thread_barrier, to_float32
from gla_kernels.hopper.wide.tiles import (
    WARPS,
    chunk_head_of,
    cumulative_tile,
    find_chunk,
    gate_halves,
    kept_excess,
    raise_where_not_finite,
    start_centred_gates,
    zeros,
)


@gluon.jit
def fetch_parked(
    tile, dq, dk, parked, H, keys, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr, column
):  # fmt: skip
    """`fetch` of columns of a state that is parked in the memory of its chunk's gradients; see `wide/recurrence.py`.

    The upper half of its keys is in dq (the first K columns) and dk (the others), the lower one in float32 dg, or in
    memory of its size. All chunks are full (`pieces.parks_dstates`).
    """
    C: gl.constexpr = tile.shape[0] // 2
    gl.static_assert((K == 2 * C) & (V <= 2 * K))
    lower = gl.where(column < K, dq + column, dk + (column - K))
    fetch(tile.slice(0, C, 0), lower, H * K, keys, V, layout, column)
    fetch(tile.slice(C, C, 0), parked + column, H * 2 * K, keys - C, V, layout, column)


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks"])
def wide_gradients(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0; if HEAD_GATED [B, H, T], float32 sums of gates
    do,  # [B, T, H, V]
    states,  # [chunks, H, K, V] bfloat16: S~ of each chunk of this launch
    dstates,  # [chunks, H, K, V] bfloat16: dS~' of each; unused if PARKED
    parked,  # [B, T, H, 2 K]: if PARKED, the memory of dg as bfloat16, which with dq and dk holds that gradient
    excesses,  # [chunks of all launches, H, K] float32, as `wide_recurrence` or `wide_frames` kept those of large gates
    flags,  # [N, H] int32: 1 if a result of the forward is not finite
    failed,  # [N, H] int32: set to 1 if the results are not finite
    dq,  # [B, T, H, K], contiguous, like dk, dv and dg
    dk,  # [B, T, H, K]
    dv,  # [B, T, H, V]; written if K fits one block
    dg,  # [B, T, H, K] in g's dtype; if HEAD_GATED [B, T, H, blocks of keys]
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
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
    PARKED: gl.constexpr,
    STORE_DG: gl.constexpr,  # with gates alone; without it, `failed` is found from dq and dk
):  # fmt: skip
    """A program handles one chunk and head and BK key columns, in a loop over blocks of BV value columns."""
    blocks_k: gl.constexpr = (K + BK - 1) // BK
    blocks_v: gl.constexpr = (V + BV - 1) // BV
    # Tiles of a block of values that are there at once. With one block, two programs fit a multiprocessor.
    BUFFERS: gl.constexpr = min(blocks_v, 3)
    copy_k: gl.constexpr = copy_layout(BK, 16, WARPS)
    copy_v: gl.constexpr = copy_layout(BV, 16, WARPS)
    # Two threads share a row of a state, so that a sum over the row needs one step between threads.
    state_rows: gl.constexpr = gl.BlockedLayout([1, BV // 2], [16, 2], [WARPS, 1], [1, 0])
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)
    # Whether the left operands of dv, the same for all blocks of values, are in registers. From shared memory, blocks
    # would wait for its reads. With gates per channel this was not tried.
    IN_REGISTERS: gl.constexpr = blocks_k == 1 and blocks_v > 1 and not GATED
    left: gl.constexpr = gl.DotOperandLayout(0, accumulator(BV, C, WARPS), 2)
    wait_for_previous_kernel()
    pid = gl.program_id(0)
    k0 = pid % blocks_k * BK
    h = pid // blocks_k % H
    chunk_slot = pid // blocks_k // H
    n, b, t, rows_left = find_chunk(cu_seqlens, chunk_slot, base, stride, piece_chunks, N, T, C, VARLEN)
    if rows_left <= 0:
        return
    if GATED:  # the exact kernel computes what the forward has flagged
        if gl.load(flags + n * H + h) != 0:
            return
    q += b * q_b + t * q_t + h.to(gl.int64) * q_h + k0
    k += b * k_b + t * k_t + h.to(gl.int64) * k_h + k0
    v += b * v_b + t * v_t + h.to(gl.int64) * v_h
    do += b * do_b + t * do_t + h.to(gl.int64) * do_h
    state_at = ((chunk_slot.to(gl.int64) * H + h) * K + k0) * V
    if not PARKED:
        dstates += state_at
    states += state_at
    out = (b * T + t) * H + h
    if PARKED:
        parked += out * 2 * K
    dq += out * K + k0
    dk += out * K + k0
    if blocks_k == 1:
        dv += out * V
    if GATED:
        g += b * g_b + t * g_t + h.to(gl.int64) * g_h + k0
        if STORE_DG:
            dg += out * K + k0
        chunk_head = chunk_head_of(cu_seqlens, n, t, h, T, H, C, VARLEN)

    q_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, BV], operand_layout(C, BV))
    do_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, C, BV], operand_layout(C, BV))
    S_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BK, BV], operand_layout(BK, BV))
    dS_tiles = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BK, BV], operand_layout(BK, BV))
    fetch(q_tile, q, q_t, rows_left, K, copy_k, k0)
    fetch(k_tile, k, k_t, rows_left, K, copy_k, k0)
    if GATED:
        g_tile = gl.allocate_shared_memory(gl.float32, [C, BK], gate_layout())
        fetch_gates(g_tile, g, g_t, rows_left, K, k0)
        cumulative = cumulative_tile(C)
        words = make_words()
    if HEAD_GATED:
        sums = make_sums(1, C).index(0)
        totals = make_totals(2)
        fetch_sums(sums, sums_in(g, n * 0 if VARLEN else n, t, h, T, H), rows_left)
    async_copy.commit_group()
    for block in gl.static_range(2):
        if block > 0:
            v += BV
            do += BV
            states += BV
            if not PARKED:
                dstates += BV
        if block < blocks_v:
            fetch(v_tiles.index(block), v, v_t, rows_left, V, copy_v, block * BV)
            fetch(do_tiles.index(block), do, do_t, rows_left, V, copy_v, block * BV)
            fetch(S_tiles.index(block), states, V, K - k0, V, copy_v, block * BV)
            if PARKED:
                fetch_parked(dS_tiles.index(block), dq, dk, parked, H, K - k0, K, V, copy_v, block * BV)
            else:
                fetch(dS_tiles.index(block), dstates, V, K - k0, V, copy_v, block * BV)
        async_copy.commit_group()
    async_copy.wait_group(2)
    if GATED:
        thread_barrier()
        bq = to_float32(q_tile.load(key_tile)) * scale
        bk = to_float32(k_tile.load(key_tile))
        halves, large = gate_halves(g_tile, g, words, C, BK)
        G = start_centred_gates(halves, cumulative, C, BK)
        G = warpgroup_mma_wait(0, deps=[G])
        if large:
            beyond = kept_excess(excesses, chunk_head, k0, C, BK, K)
            G += 0.5 * beyond
            bk *= gl.exp2(beyond - G)
        else:
            bk *= gl.exp2(negative(G))
        bq *= gl.exp2(G)
        q_tile.store(bq.to(gl.bfloat16))
        k_tile.store(bk.to(gl.bfloat16))
    if HEAD_GATED or IN_REGISTERS:
        thread_barrier()
    if HEAD_GATED:
        total = chunk_gate(sums)
    if IN_REGISTERS:
        k_for_state = k_tile.load(left)
        if HEAD_GATED:
            k_for_state = (to_float32(k_for_state) * decay_to_end(row_sums(sums, left), total)).to(gl.bfloat16)
    elif HEAD_GATED and blocks_k == 1:
        k_for_state = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
        bk = to_float32(k_tile.load(key_tile)) * decay_to_end(row_sums(sums, key_tile), total)
        k_for_state.store(bk.to(gl.bfloat16))
    else:
        k_for_state = k_tile
    if blocks_v == 1:
        async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    if blocks_k == 1:
        Pt = product(k_tile, q_tile.permute((1, 0)), C, C, WARPS)
        Pt_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
    if blocks_v == 1:
        v_tile = v_tiles.index(0)
        do_tile = do_tiles.index(0)
        S_tile = S_tiles.index(0)
        dS_tile = dS_tiles.index(0)
        if HEAD_GATED:  # transposed like P, so that one tile of decays is for both
            dP = product(v_tile, do_tile.permute((1, 0)), C, C, WARPS)
        else:
            dP = product(do_tile, v_tile.permute((1, 0)), C, C, WARPS)
        if STORE_DG:
            S = to_float32(S_tile.load(state_rows))
            boundary = gl.sum(S * to_float32(dS_tile.load(state_rows)), axis=1)  # sum_v S~ dS~'
            if HEAD_GATED:
                store_row_total(totals.index(0), gl.exp2(total) * boundary)
        if blocks_k == 1:
            dP, Pt = warpgroup_mma_wait(0, deps=[dP, Pt])
        else:
            dP = warpgroup_mma_wait(0, deps=[dP])
    elif blocks_k == 1:
        Pt = warpgroup_mma_wait(0, deps=[Pt])
    if not GATED and (blocks_k == 1 or blocks_v == 1):
        # Scale is a factor of scores and of dO S^T, so that q and k are used as they are.
        factor = score_decays(sums, accumulator(C, C, WARPS), False) * scale if HEAD_GATED else scale
        if blocks_k == 1:
            Pt *= factor
        if blocks_v == 1:
            dP *= factor
    if blocks_k == 1:
        Pt_tile.store(masked(Pt, triangle(C, False, True, WARPS)).to(gl.bfloat16))
    if IN_REGISTERS:
        thread_barrier()
        Pt_operand = Pt_tile.load(left)
    elif blocks_k == 1:
        Pt_operand = Pt_tile
    if blocks_v == 1:
        dA_memory = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
        dA_memory.store(masked(dP, triangle(C, not HEAD_GATED, True, WARPS)).to(gl.bfloat16))
        dA_tile = dA_memory.permute((1, 0)) if HEAD_GATED else dA_memory
        fence_async_shared()
        thread_barrier()
        if blocks_k == 1:
            bdv = product(Pt_operand, do_tile, C, BV, WARPS)
            bdv = add_product(k_for_state, dS_tile, bdv)
        bdq = product(do_tile, S_tile.permute((1, 0)), C, BK, WARPS)
        bdk = product(v_tile, dS_tile.permute((1, 0)), C, BK, WARPS)
        if blocks_k == 1:
            bdv = warpgroup_mma_wait(2, deps=[bdv])
            write(dv, gl.convert_layout(bdv.to(gl.bfloat16), copy_v), H * V, rows_left, V, copy_v, 0)
        # The tiles are dependencies too: nothing reads them later, and the compiler could use their memory for the
        # conversion of dv while the products still read them.
        bdq, bdk, _, _, _, _ = warpgroup_mma_wait(0, deps=[bdq, bdk, S_tile, dS_tile, v_tile, do_tile])
    else:
        dP = zeros(C, C, scale)
        bdq = zeros(C, BK, scale)
        bdk = zeros(C, BK, scale)
        boundary = gl.zeros([BK], gl.float32, gl.SliceLayout(1, state_rows))
        for j in range(blocks_v):
            buffer = j % BUFFERS
            async_copy.wait_group(1)
            fence_async_shared()
            thread_barrier()
            if blocks_v > 2:
                next_buffer = (j + 2) % 3
                rows_there = gl.where(j + 2 < blocks_v, rows_left, 0)
                keys_there = gl.where(j + 2 < blocks_v, K - k0, 0)
                column = (j + 2) * BV
                v += BV
                do += BV
                states += BV
                fetch(v_tiles.index(next_buffer), v, v_t, rows_there, V, copy_v, column)
                fetch(do_tiles.index(next_buffer), do, do_t, rows_there, V, copy_v, column)
                fetch(S_tiles.index(next_buffer), states, V, keys_there, V, copy_v, column)
                if PARKED:
                    fetch_parked(dS_tiles.index(next_buffer), dq, dk, parked, H, keys_there, K, V, copy_v, column)
                else:
                    dstates += BV
                    fetch(dS_tiles.index(next_buffer), dstates, V, keys_there, V, copy_v, column)
            async_copy.commit_group()
            v_tile = v_tiles.index(buffer)
            do_tile = do_tiles.index(buffer)
            S_tile = S_tiles.index(buffer)
            dS_tile = dS_tiles.index(buffer)
            if blocks_k == 1:
                bdv = product(Pt_operand, do_tile, C, BV, WARPS)
                bdv = add_product(k_for_state, dS_tile, bdv)
            dP = add_product(do_tile, v_tile.permute((1, 0)), dP)
            bdq = add_product(do_tile, S_tile.permute((1, 0)), bdq)
            bdk = add_product(v_tile, dS_tile.permute((1, 0)), bdk)
            if STORE_DG:
                S = to_float32(S_tile.load(state_rows))
                boundary += gl.sum(S * dS_tile.load(state_rows).to(gl.float32), axis=1)
            if blocks_k == 1:
                bdv = warpgroup_mma_wait(3, deps=[bdv])
                write(dv, gl.convert_layout(bdv.to(gl.bfloat16), copy_v), H * V, rows_left, V, copy_v, j * BV)
                dv += BV
            dP, bdq, bdk, _, _, _, _ = warpgroup_mma_wait(0, deps=[dP, bdq, bdk, S_tile, dS_tile, v_tile, do_tile])
        # The last copies, of zeros, have to end before dP takes memory of the tiles; and a parked state has to be read
        # before dq, dk and dg take its place.
        async_copy.wait_group(0)
        thread_barrier()
        if not GATED:
            dP *= score_decays(sums, accumulator(C, C, WARPS), True) * scale if HEAD_GATED else scale
        dA_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
        dA_tile.store(masked(dP, triangle(C, True, True, WARPS)).to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
    if not GATED:
        bdq *= gl.exp2(row_sums(sums, key_tile))[:, None] * scale if HEAD_GATED else scale
    if HEAD_GATED:
        bdk *= decay_to_end(row_sums(sums, key_tile), total)
    if GATED and STORE_DG:
        intra = product(dA_tile, k_tile, C, BK, WARPS)  # dP K~
        bdk = add_product(dA_tile.permute((1, 0)), q_tile, bdk)
        Q = to_float32(q_tile.load(key_tile))
        high, low = split(Q * bdq)
        readdressed(halves.index(0)).store(high)
        readdressed(halves.index(1)).store(low)
        intra, bdk = warpgroup_mma_wait(0, deps=[intra, bdk])
        bdq += intra
        high, low = split(to_float32(k_tile.load(key_tile)) * bdk - Q * intra)
    else:
        bdk = add_product(dA_tile.permute((1, 0)), q_tile, bdk)
        if STORE_DG:
            sent = make_row_sums(C, 2)
            if blocks_v > 1:
                store_row_total(totals.index(0), gl.exp2(total) * boundary)
            store_total(totals.index(1), to_float32(q_tile.load(key_tile)) * bdq)
        bdq = add_product(dA_tile, k_tile, bdq)
        if HEAD_GATED:
            # The tiles are listed as dependencies, as in the loop: the sums over rows take memory.
            bdq, bdk, _, _, _ = warpgroup_mma_wait(0, deps=[bdq, bdk, dA_tile, q_tile, k_tile])
            thread_barrier()
        else:
            bdq, bdk = warpgroup_mma_wait(0, deps=[bdq, bdk])
        if STORE_DG:
            lost = halves_sums(to_float32(q_tile.load(key_tile)) * bdq)
            sent.store(halves_sums(to_float32(k_tile.load(key_tile)) * bdk) - lost)
    if GATED:
        # Otherwise 2^G and 2^-G would be kept from above, not G.
        G = opaque_float(G)
        bdq *= gl.exp2(G)
        if large:
            G -= kept_excess(excesses, chunk_head, k0, C, BK, K)
        bdk *= gl.exp2(negative(G))
        thread_barrier()  # no thread reads dP, Q~ and K~ any more
    if STORE_DG and GATED:
        # The masks of the two sums over time. The first mask takes the tile of dP, the terms of the second sum take
        # the tiles of Q~ and K~.
        dA_tile.store(gl.where(triangle(C, False, True, WARPS), 1.0, 0.0).to(gl.bfloat16))
        before_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
        before_tile.store(gl.where(triangle(C, True, False, WARPS), 1.0, 0.0).to(gl.bfloat16))
        q_tile.store(high)
        k_tile.store(low)
        fence_async_shared()
        thread_barrier()
        bdg = product(dA_tile, readdressed(halves.index(0)), C, BK, WARPS)
        bdg = add_product(dA_tile, readdressed(halves.index(1)), bdg)
        bdg = add_product(before_tile, q_tile, bdg)
        bdg = add_product(before_tile, k_tile, bdg)
    if GATED:
        bdq *= scale
    write(dq, gl.convert_layout(bdq.to(gl.bfloat16), copy_k), H * K, rows_left, K, copy_k, k0)
    write(dk, gl.convert_layout(bdk.to(gl.bfloat16), copy_k), H * K, rows_left, K, copy_k, k0)
    if STORE_DG and HEAD_GATED:
        there = dg + (((b * T + t) * H + h) * blocks_k + k0 // BK)
        store_head_gates(there, H * blocks_k, sent, totals, rows_left)
    if STORE_DG and GATED:
        # The tiles are listed as dependencies, as in the loop: dq and dk are converted while the products read them.
        bdg, _, _, _, _, _ = warpgroup_mma_wait(0, deps=[bdg, dA_tile, before_tile, halves, q_tile, k_tile])
        boundary_row = gl.convert_layout(boundary, gl.SliceLayout(0, key_tile))
        bdg += boundary_row[None, :]
        write(dg, bdg, H * K, rows_left, K, key_tile, k0)
        # dg is a sum over dQ~, dK~ and the states; a term that is not finite makes the sum so too: 0 * infinity is NaN.
        raise_where_not_finite(failed + n * H + h, bdg)
    elif GATED:
        raise_where_not_finite(failed + n * H + h, bdq * 0.0 + bdk * 0.0)
