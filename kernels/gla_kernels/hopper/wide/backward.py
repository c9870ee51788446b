# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: SIM102
"""Computes all gradients of wide heads in one kernel, K and V up to 128: Gluon kernel for Hopper.

The equations are those of docs/kernels.md and `narrow/backward.py`; chunks run from the last to the first. The gradient
of the state stays in the registers of two warpgroups from chunk to chunk; only at the ends of a piece is it in global
memory.

Registers and shared memory are both full. The exponents a - r, and the excess, are kept in shared memory for dq and dk.
q and k of the next chunk are fetched into the tiles of v and do once those have been read, v and do into those of q and
k. The two parts of the sum in dg go to the tile of dS~'. The accumulators of dv, dq and dk are used one after another
as far as possible, and the addresses of rows are recomputed.

With a gate per head, the decays of rows are factors of accumulators, and only 2^a q has a tile of its own. P and dP are
both transposed, so that one tile of decays is for both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, fetch_rows, load_state, write
from gla_kernels.hopper.gates import excess, fetch_gate_rows, frame_factor, make_words
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
    sums_in,
)
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, operand_layout
from gla_kernels.hopper.places import find_piece, first_slot, raise_where, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked, no_state, product, triangle
from gla_kernels.hopper.values import negative, readdressed, split, thread_barrier, to_float32, wide_product
from gla_kernels.hopper.wide.tiles import (
    WARPS,
    excess_row,
    gate_halves,
    make_ones_columns,
    start_centred_gates,
    start_total_gate,
    store_scaled,
    write_tile,
)


@gluon.jit(do_not_specialize=["T", "H", "N", "base", "stride", "piece_chunks"])
def wide_backward(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0; if HEAD_GATED [B, H, T], float32 sums of gates
    do,  # [B, T, H, V]
    states,  # [slots, H, K, V] bfloat16: S~ of each chunk; of this launch's pieces only if SCRATCH
    after,  # [pieces, H, K, V] float32: the gradient of the state after each piece of this launch, in no frame
    before,  # [pieces, H, K, V] float32: the gradient of the state before each
    flags,  # [N, H] int32: 1 if a result of the forward is not finite
    failed,  # [N, H] int32: set to 1 if the results are not finite
    dq,  # [B, T, H, K], contiguous, like dk, dv and dg
    dk,  # [B, T, H, K]
    dv,  # [B, T, H, V]
    dg,  # [B, T, H, K] in g's dtype, or [B, T, H] if HEAD_GATED
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    after_p,  # elements from one piece's state in `after` to the next piece's
    before_p,  # the same for `before`
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
    HAS_AFTER: gl.constexpr,
    STORE_BEFORE: gl.constexpr,
    STORE_DG: gl.constexpr,  # with gates alone
    SCRATCH: gl.constexpr,
):  # fmt: skip
    """A program handles one piece and head."""
    copy_k: gl.constexpr = copy_layout(BK, 16, WARPS)
    copy_v: gl.constexpr = copy_layout(BV, 16, WARPS)
    state_layout: gl.constexpr = accumulator(BV, BK, WARPS)
    key_tile: gl.constexpr = accumulator(BK, C, WARPS)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    wait_for_previous_kernel()
    pid = gl.program_id(0)
    h = pid % H
    piece = pid // H
    n, i, b, begin, length = find_piece(cu_seqlens, base + piece * stride, N, T, piece_chunks * C, VARLEN)
    if GATED:  # the exact kernel computes what the forward has flagged
        if gl.load(flags + n * H + h) != 0:
            return
    b = n * 0 if VARLEN else b
    first_chunk = i * piece_chunks
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first_chunk, piece_chunks), 0)
    rows_left = gl.minimum(length - (first_chunk + chunks - 1) * C, gl.minimum(chunks, 1) * C)
    t = begin + (first_chunk + chunks - 1) * C
    if SCRATCH:
        slot = piece * piece_chunks + chunks - 1
    else:
        slot = first_slot(n, begin, length, C, VARLEN) + first_chunk + chunks - 1

    # BK = BV = 128 = 2 C. q and k of a chunk take the place of v and do of the chunk processed before it. Without gates
    # there is also room for v and do of the next one.
    ring: gl.constexpr = 2 if GATED else 3
    q_and_v = gl.allocate_shared_memory(gl.bfloat16, [ring, C, 128], operand_layout(C, 128))
    k_and_do = gl.allocate_shared_memory(gl.bfloat16, [ring, C, 128], operand_layout(C, 128))
    S_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))
    dS_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))
    Pt_memory = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
    dA_memory = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
    # dv, and then dq, are stored through it.
    out_memory = gl.allocate_shared_memory(gl.bfloat16, [C, 128], operand_layout(C, 128))
    if GATED:
        g_tile = gl.allocate_shared_memory(gl.float32, [C, BK], gate_layout())
        exponents = gl.allocate_shared_memory(gl.float32, [C, BK], gate_layout())
        ones = make_ones_columns(C)
        words = make_words()
        # Not a row beside the tiles, which would take 16 registers; and without a branch where it is read, which would
        # take more (NOTES, "Registers").
        excesses = gl.allocate_shared_memory(gl.float32, [BK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        if STORE_DG:
            suspect = gl.zeros([BK, 8], gl.float32, accumulator(8, BK, WARPS))
        else:
            suspect = gl.zeros([C], gl.float32, gl.SliceLayout(1, key_tile))
    if HEAD_GATED:
        sums = make_sums(2, C)
        if STORE_DG:
            sent = make_row_sums(C, 2)
            totals = make_totals(1)
        decayed_q_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
    if HAS_AFTER:
        dS = load_state(after + piece.to(gl.int64) * after_p + h * K * V, K, V, state_layout, BK, BV)
    else:
        dS = no_state(BK, BV, scale, state_layout)
    # 2^r of the next chunk (the one processed before this one), which takes its gradient out of its frame.
    previous_factor = gl.full([BK], 1.0, gl.float32, key_layout)

    fetch_rows(q_and_v.index(0), q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
    fetch_rows(k_and_do.index(0), k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
    fetch(S_memory, states + wide_product(slot * H + h, K * V), V, gl.where(chunks > 0, K, 0), V, copy_v)
    if GATED:
        fetch_gate_rows(g_tile, g, b, t, h, g_b, g_t, g_h, rows_left, K)
    else:
        fetch_rows(q_and_v.index(1), v, b, t, h, v_b, v_t, v_h, rows_left, V, 16)
        fetch_rows(k_and_do.index(1), do, b, t, h, do_b, do_t, do_h, rows_left, V, 16)
    if HEAD_GATED:
        fetch_sums(sums.index(0), sums_in(g, b, t, h, T, H), rows_left)
    async_copy.commit_group()
    for j in range(chunks):
        q_tile = q_and_v.index(j % ring)
        k_tile = k_and_do.index(j % ring)
        v_tile = q_and_v.index((j + 1) % ring)
        do_tile = k_and_do.index((j + 1) % ring)
        next_rows = gl.where(j + 1 < chunks, C, 0)
        token = (b * T + t) * H + h
        if GATED or (HEAD_GATED and STORE_DG):
            # With the branch for large gates, some 20 descriptors and addresses would be on the stack otherwise.
            S_tile = readdressed(S_memory)
            dS_tile = readdressed(dS_memory)
            Pt_tile = readdressed(Pt_memory)
            dA_tile = readdressed(dA_memory)
            out_tile = readdressed(out_memory)
        else:
            S_tile = S_memory
            dS_tile = dS_memory
            Pt_tile = Pt_memory
            dA_tile = dA_memory
            out_tile = out_memory
        async_copy.wait_group(0)
        thread_barrier()
        if GATED:
            dA_tile.store(gl.where(triangle(C, True, True, WARPS), 0.5, -0.5).to(gl.bfloat16))
            halves, large = gate_halves(g_tile, g, words, C, BK)
            G = start_centred_gates(halves, dA_tile, C, BK)
            total = start_total_gate(halves, ones, BK)
            # Behind the loads of gates, which would wait for every copy that was started before them.
            fetch_rows(v_tile, v, b, t, h, v_b, v_t, v_h, rows_left, V, 16)
            fetch_rows(do_tile, do, b, t, h, do_b, do_t, do_h, rows_left, V, 16)
            async_copy.commit_group()
            G, total = warpgroup_mma_wait(0, deps=[G, total])
            last = gl.convert_layout(gl.max(total, axis=1), key_layout)
            factor = frame_factor(last)
            dS *= (previous_factor * factor)[:, None]
            previous_factor = factor
            bq = q_tile.load(key_tile)
            bk = k_tile.load(key_tile)
            excesses.store(excess(last))
            if large:
                G -= 0.5 * excess_row(last, C, BK)  # k's exponents, negated
            k_tile.store((to_float32(bk) * gl.exp2(negative(G))).to(gl.bfloat16))
            if large:
                G += excess_row(last, C, BK)  # q's
            q_tile.store((to_float32(bq) * scale * gl.exp2(G)).to(gl.bfloat16))
            exponents.store(G)
        else:
            fetch_rows(q_and_v.index((j + 2) % ring), v, b, t - C, h, v_b, v_t, v_h, next_rows, V, 16)
            fetch_rows(k_and_do.index((j + 2) % ring), do, b, t - C, h, do_b, do_t, do_h, next_rows, V, 16)
            if HEAD_GATED:
                fetch_sums(sums.index((j + 1) % 2), sums_in(g, b, t - C, h, T, H), next_rows)
            async_copy.commit_group()
            if HEAD_GATED:
                a = row_sums(sums.index(j % 2), key_tile)
                total = chunk_gate(sums.index(j % 2))
                from_start = gl.exp2(a)[:, None] * scale
                to_end = decay_to_end(a, total)
                decayed_q_tile.store((to_float32(q_tile.load(key_tile)) * from_start).to(gl.bfloat16))
            else:
                store_scaled(q_tile, scale, C, BK)
        dS_tile.store(dS.to(gl.bfloat16))
        if HEAD_GATED:
            dS *= gl.exp2(total)
        async_copy.wait_group(0 if GATED else 1)  # v and do
        fence_async_shared()
        thread_barrier()
        if GATED:
            fetch_gate_rows(g_tile, g, b, t - C, h, g_b, g_t, g_h, next_rows, K)
            async_copy.commit_group()
        Pt = product(k_tile, q_tile.permute((1, 0)), C, C, WARPS)
        if HEAD_GATED:  # transposed like P, so that one tile of decays, times scale, is for both
            dP = product(v_tile, do_tile.permute((1, 0)), C, C, WARPS)
            bdv = product(k_tile, dS_tile, C, BV, WARPS)
            decays = score_decays(sums.index(j % 2), accumulator(C, C, WARPS), False) * scale
            Pt, dP = warpgroup_mma_wait(1, deps=[Pt, dP])
            Pt *= decays
            dP *= decays
        else:
            dP = product(do_tile, v_tile.permute((1, 0)), C, C, WARPS)
            Pt, dP = warpgroup_mma_wait(0, deps=[Pt, dP])
        Pt_tile.store(masked(Pt, triangle(C, False, True, WARPS)).to(gl.bfloat16))
        dA_tile.store(masked(dP, triangle(C, not HEAD_GATED, True, WARPS, 1)).to(gl.bfloat16))
        fence_async_shared()
        thread_barrier()
        # For the waits: two products of dv, one of dS, two each of dq and dk, in this order.
        if HEAD_GATED:
            bdv = warpgroup_mma_wait(0, deps=[bdv])
            bdv *= to_end
            bdv = add_product(Pt_tile, do_tile, bdv)
            dS = add_product(decayed_q_tile.permute((1, 0)), do_tile, dS)
            bdq = product(do_tile, S_tile.permute((1, 0)), C, BK, WARPS)
            bdv = warpgroup_mma_wait(2, deps=[bdv])
        else:
            bdv = product(Pt_tile, do_tile, C, BV, WARPS)
            bdv = add_product(k_tile, dS_tile, bdv)
            dS = add_product(q_tile.permute((1, 0)), do_tile, dS)
            bdq = product(do_tile, S_tile.permute((1, 0)), C, BK, WARPS)
            bdq = add_product(dA_tile, k_tile, bdq)
            bdv = warpgroup_mma_wait(3, deps=[bdv])
        out_tile.store(bdv.to(gl.bfloat16))
        if STORE_DG and GATED:
            dS = warpgroup_mma_wait(2, deps=[dS])
            boundary = gl.sum(to_float32(S_tile.load(state_layout)) * dS, axis=1)
        bdk = product(v_tile, dS_tile.permute((1, 0)), C, BK, WARPS)
        if HEAD_GATED:
            dS, bdq = warpgroup_mma_wait(1, deps=[dS, bdq])
            bdq *= from_start
            bdq = add_product(dA_tile.permute((1, 0)), k_tile, bdq)
            if STORE_DG:
                boundary = gl.sum(to_float32(S_tile.load(state_layout)) * dS, axis=1)
            bdk = warpgroup_mma_wait(1, deps=[bdk])
            bdk *= to_end
            bdk = add_product(dA_tile, q_tile, bdk)
        else:
            bdk = add_product(dA_tile.permute((1, 0)), q_tile, bdk)
        thread_barrier()
        write_tile(dv + wide_product(token, V), out_tile, H * V, rows_left, V, copy_v, 0, True)
        dS, bdq = warpgroup_mma_wait(1 if HEAD_GATED else 2, deps=[dS, bdq])
        if STORE_DG:
            balance = negative(to_float32(q_tile.load(key_tile))) * bdq
        if GATED:
            bdq *= gl.exp2(exponents.load(key_tile))
            if not STORE_DG:
                suspect += gl.sum(bdq, axis=1) * 0.0
        thread_barrier()  # all threads have read dv from out_tile
        if not HEAD_GATED:
            bdq *= scale
        out_tile.store(bdq.to(gl.bfloat16))
        bdk = warpgroup_mma_wait(0, deps=[bdk])
        thread_barrier()  # no product reads dS~', dP, Q~ and K~ any more
        if STORE_DG:
            balance += to_float32(k_tile.load(key_tile)) * bdk
            if HEAD_GATED:
                sent.store(halves_sums(balance))
                store_row_total(totals.index(0), boundary)
            else:
                high, low = split(balance)
                parts = dS_tile._reinterpret(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
                parts.index(0).store(high)
                parts.index(1).store(low)
        if GATED:
            bdk *= gl.exp2(excesses.load(gl.SliceLayout(0, key_tile))[None, :] - exponents.load(key_tile))
            if not STORE_DG:
                suspect += gl.sum(bdk, axis=1) * 0.0
        if STORE_DG and GATED:
            dA_tile.store(gl.where(triangle(C, True, False, WARPS, 1), 1.0, 0.0).to(gl.bfloat16))
            fence_async_shared()
        q_tile.store(bdk.to(gl.bfloat16))
        thread_barrier()  # dq, dk and the terms of dg are in their tiles
        if STORE_DG and GATED:
            bdg = product(dA_tile, parts.index(0), C, BK, WARPS)
            bdg = add_product(dA_tile, parts.index(1), bdg)
            suspect = add_product(parts.index(0).permute((1, 0)), ones, suspect)
        write_tile(dq + wide_product(token, K), out_tile, H * K, rows_left, K, copy_k, 0, True)
        write_tile(dk + wide_product(token, K), q_tile, H * K, rows_left, K, copy_k, 0, True)
        # Behind the stores' loads from shared memory, which would wait for these copies.
        fetch_rows(v_tile, q, b, t - C, h, q_b, q_t, q_h, next_rows, K, 16)
        fetch_rows(do_tile, k, b, t - C, h, k_b, k_t, k_h, next_rows, K, 16)
        slot -= 1
        fetch(S_tile, states + wide_product(slot * H + h, K * V), V, gl.where(next_rows > 0, K, 0), V, copy_v)
        async_copy.commit_group()
        if STORE_DG and HEAD_GATED:
            store_head_gates(dg + token, H, sent, totals, rows_left)
        if STORE_DG and GATED:
            bdg, suspect = warpgroup_mma_wait(0, deps=[bdg, suspect])
            boundary_row = gl.convert_layout(boundary, gl.SliceLayout(0, key_tile))
            bdg += boundary_row[None, :]
            write(dg + wide_product(token, K), bdg, H * K, rows_left, K, key_tile, 0, True)
        t -= C
        rows_left = C
    async_copy.wait_group(0)
    dS *= previous_factor[:, None]
    if GATED:
        # Infinity times 0 is NaN, which stays NaN in every sum. `suspect` sums the terms of dg with dQ~ and dK~ or,
        # without dg, what is left of dq and dk. Of the other terms of dg, an S~ that is not finite shows in dQ~, and a
        # dS that is not finite stays so to the end. dv needs no test: the forward has tested P and K~.
        if STORE_DG:
            zero_or_nan = gl.sum(suspect * 0.0, axis=1)
            zero_or_nan = gl.convert_layout(zero_or_nan, key_layout) + gl.sum(dS * 0.0, axis=1)
            raise_where(failed + n * H + h, (zero_or_nan != 0.0) & (chunks > 0))
        else:
            raise_where(failed + n * H + h, (suspect != 0.0) & (chunks > 0))
            raise_where(failed + n * H + h, (gl.sum(dS * 0.0, axis=1) != 0.0) & (chunks > 0))
    if STORE_BEFORE:
        write(before + piece.to(gl.int64) * before_p + h * K * V, dS, V, K, V, state_layout)
