# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: SIM102
"""Backward kernel for Hopper, in Gluon: the plain form for chunks of 64, K and V up to 64, bfloat16.

With the symbols of docs/kernels.md, and dS~' = 2^r dS':

    dV  = tril(Q~ K~^T)^T dO + K~ dS~'
    dQ~ = tril(dO V^T) K~    + dO S~^T         dq = scale 2^(a - r) dQ~
    dK~ = tril(dO V^T)^T Q~  + V dS~'^T        dk = 2^(b - r) dK~
    dS~ = dS~' + Q~^T dO
    dg_t = sum_v S~ dS~ + sum_{i < t} (K~_i dK~_i - Q~_i dQ~_i)

The last line starts with what crosses the border before the chunk's first token, sum_v S~ dS~. Each token before t adds
what it sends on (K~ dK~) and removes what it receives (Q~ dQ~). Terms that cancel are made of the same rounded
operands: S~ and Q~ in sum_v S~ (Q~^T dO) and in Q~ (dO S~^T), the others in dP. In sum_v S~ dS~, dS~' cancels with
nothing, so its float32 value is used. (Starting at the chunk's end, with the state rounded to bfloat16 once more, the
relative error of dg was 3.6e-3 instead of 2.8e-3, with mild gates.) `strong.py` adds what is missing of strong
channels.

A multiprocessor holds two programs of 4 warps, by shared memory (113 KiB each) and by registers (255 per thread).
Shared memory is reused as soon as it is free: the tile of the gates holds their two bfloat16 parts, then dS~', then the
parts of the sum in dg. dq, dk and dv are stored through shared tiles (those of dO and V, and dv's own), because rows
stored from an accumulator, 16 bytes at a time, take twice the bandwidth of L2 (measured: 1.34 ms against 1.09). dg has
no tile left. With gates, L2 evicts gradients first, which took 1.5 % off a pass; without gates it lost.

dP is computed twice, because a barrier more costs what a product less saves. With a gate per head: `head_backward.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, fetch_rows, load_state, write
from gla_kernels.hopper.gates import (
    chunk_total,
    excess,
    fetch_gate_rows,
    frame_factor,
    make_ones,
    make_words,
    raise_to_least,
    read_gates,
    start_gate_frame,
)
from gla_kernels.hopper.layouts import accumulator, copy_layout, gate_layout, left_operand, operand_layout
from gla_kernels.hopper.narrow.states import recompute_states
from gla_kernels.hopper.places import find_piece, first_slot, locate, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked_operand, product, triangle
from gla_kernels.hopper.values import readdressed, split, thread_barrier, to_float32, wide_product


@gluon.jit
def fetch_chunk(
    q_tile, k_tile, v_tile, do_tile, g_tile, q, k, v, g, do, b, t, h, rows_left,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    K: gl.constexpr, V: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Starts copying a chunk from token t on, of which `rows_left` rows are there, as a group."""
    fetch_rows(q_tile, q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
    fetch_rows(k_tile, k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
    fetch_rows(v_tile, v, b, t, h, v_b, v_t, v_h, rows_left, V, 16)
    fetch_rows(do_tile, do, b, t, h, do_b, do_t, do_h, rows_left, V, 16)
    if GATED:
        fetch_gate_rows(g_tile, g, b, t, h, g_b, g_t, g_h, rows_left, K)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["T", "H", "count", "checkpoint_chunks", "N", "base"])
def gla_backward_hopper(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K] float32 or bfloat16, natural log, <= 0
    do,  # [B, T, H, V]
    states,  # [slots, H, K, V] bfloat16: S~ of each chunk; if RECOMPUTE, room for [programs, checkpoint_chunks, K, V]
    checkpoints,  # [slots, H, K, V] float32: S, in no frame, before every `checkpoint_chunks`-th chunk; if RECOMPUTE
    flags,  # [N, H] int32: 1 if a result of the forward is not finite
    failed,  # [N, H] int32: set to 1 if this kernel's results are not finite, with gates
    dfinal,  # [N or pieces of this launch, H, K, V] float32: gradient of the states after the last chunk
    dq,  # [B, T, H, K], contiguous, like dk, dv and dg
    dk,  # [B, T, H, K]
    dv,  # [B, T, H, V]
    dg,  # [B, T, H, K] in the gates' dtype
    dinitial,  # [N, H, K, V] float32: gradient of the states before the first chunk; not of pieces
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T,
    H,
    count,  # the most chunks of a sequence, or of a piece
    checkpoint_chunks,
    N,
    base,  # the first of this launch's pieces
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,  # K, V and C fit tiles of 64: BK = BV = C = 64
    BV: gl.constexpr,
    C: gl.constexpr,
    GATED: gl.constexpr,
    VARLEN: gl.constexpr,  # whether sequences are packed
    RECOMPUTE: gl.constexpr,  # from checkpoints
    HAS_DFINAL: gl.constexpr,
    STORE_DG: gl.constexpr,  # with gates alone; without, dg and its sums are left out
    STORE_DINITIAL: gl.constexpr,  # not of pieces
    PIECES: gl.constexpr,
):  # fmt: skip
    """A program handles one sequence and head, or a piece of it and a head, from the last chunk to the first.

    RECOMPUTE: from a checkpoint, it computes the states of `checkpoint_chunks` chunks again, then goes back through
    these chunks (a slice), and so on to the first. A piece then has `checkpoint_chunks` chunks or a multiple of them.
    """
    key_tile: gl.constexpr = accumulator(BK)
    copy_k: gl.constexpr = copy_layout(BK, 16)
    copy_v: gl.constexpr = copy_layout(BV, 16)
    state_layout: gl.constexpr = accumulator(BV)
    key_layout: gl.constexpr = gl.SliceLayout(1, state_layout)
    # The kernel before makes `dfinal` of pieces. All else has been there for longer, so it may be read at once.
    EARLY: gl.constexpr = PIECES and not RECOMPUTE
    if not EARLY:
        wait_for_previous_kernel()
    pid = gl.program_id(0)
    h = pid % H
    if PIECES:
        n, nth, b, begin, length = find_piece(cu_seqlens, base + pid // H, N, T, count * C, VARLEN)
        first_chunk = nth * count
    else:
        n = pid // H
        first_chunk = n * 0
        b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    if GATED and not EARLY:  # the exact kernel computes what the forward has flagged
        if gl.load(flags + n * H + h) != 0:
            return
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first_chunk, count), 0)
    rows_left = gl.minimum(length - (first_chunk + chunks - 1) * C, chunks * C)
    t = begin + (first_chunk + chunks - 1) * C
    b = n * 0 if VARLEN else b
    slot = first_slot(n, begin, length, C, VARLEN) + first_chunk + chunks - 1

    buffers: gl.constexpr = 2
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BK], operand_layout(C, BK))
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BV], operand_layout(C, BV))
    do_tiles = gl.allocate_shared_memory(gl.bfloat16, [buffers, C, BV], operand_layout(C, BV))
    S_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))
    dv_memory = gl.allocate_shared_memory(gl.bfloat16, [C, BV], operand_layout(C, BV))
    if GATED:
        g_tiles = gl.allocate_shared_memory(gl.float32, [buffers, C, BK], gate_layout())
        ones_memory = make_ones()
        if RECOMPUTE:
            words = make_words()
    else:
        g_tiles = k_tiles  # for calls of functions; nothing reads it
        dS_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))

    if EARLY:
        fetch_chunk(
            q_tiles.index(0), k_tiles.index(0), v_tiles.index(0), do_tiles.index(0), g_tiles.index(0),
            q, k, v, g, do, b, t, h, rows_left,
            q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h, K, V, GATED,
        )  # fmt: skip
        wait_for_previous_kernel()
        if GATED:
            if gl.load(flags + n * H + h) != 0:
                async_copy.wait_group(0)  # no copy may outlive the program
                return
    # 2^r of the later chunk, which was processed before this one: takes its gradient out of its frame.
    previous_factor = gl.full([BK], 1.0, gl.float32, key_layout)
    if HAS_DFINAL:
        dS = load_state(dfinal + pid.to(gl.int64) * K * V, K, V, state_layout, BK, BV)
    else:
        dS = gl.zeros([BK, BV], gl.float32, state_layout)
    suspect = gl.zeros([C], gl.float32, gl.SliceLayout(1, key_tile))

    left = chunks  # of this slice and of earlier ones
    for _ in range(gl.cdiv(chunks, checkpoint_chunks) if RECOMPUTE else 1):
        slice_chunks = chunks
        if RECOMPUTE:
            slice_chunks = (left - 1) % checkpoint_chunks + 1
            left -= slice_chunks
            slot = pid * checkpoint_chunks + slice_chunks - 1
            checkpoint = (
                first_slot(n, begin, length, checkpoint_chunks * C, VARLEN)
                + first_chunk // checkpoint_chunks
                + left // checkpoint_chunks
            )
            thread_barrier()  # all tiles are free
            recompute_states(
                states + wide_product(pid * checkpoint_chunks, K * V),
                checkpoints + wide_product(checkpoint * H + h, K * V),
                k_tiles, v_tiles, g_tiles, S_memory,
                ones_memory if GATED else S_memory, words if GATED else S_memory,
                k, v, g, b, t - (slice_chunks - 1) * C, h, T, H, slice_chunks, rows_left + (slice_chunks - 1) * C,
                k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, K, V, BK, BV, C, GATED, False,
            )  # fmt: skip
        if not EARLY:
            fetch_chunk(
                q_tiles.index(0), k_tiles.index(0), v_tiles.index(0), do_tiles.index(0), g_tiles.index(0),
                q, k, v, g, do, b, t, h, rows_left,
                q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h, K, V, GATED,
            )  # fmt: skip
        for i in range(slice_chunks):
            buffer = i % buffers
            next_buffer = (i + 1) % buffers
            async_copy.wait_group(0)
            thread_barrier()
            state_at = slot if RECOMPUTE else slot * H + h
            fetch(readdressed(S_memory), states + wide_product(state_at, K * V), V, K, V, copy_v)
            async_copy.commit_group()
            # The chunk to be processed next, the earlier one, is copied while this one is processed.
            next_rows = gl.where(i + 1 < slice_chunks, C, 0)
            fetch_chunk(
                q_tiles.index(next_buffer), k_tiles.index(next_buffer), v_tiles.index(next_buffer),
                do_tiles.index(next_buffer), g_tiles.index(next_buffer), q, k, v, g, do, b, t - C, h, next_rows,
                q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h, K, V, GATED,
            )  # fmt: skip

            q_tile = q_tiles.index(buffer)
            k_tile = k_tiles.index(buffer)
            v_tile = v_tiles.index(buffer)
            do_tile = do_tiles.index(buffer)
            token = (b * T + t) * H + h
            if GATED:
                gates = read_gates(g_tiles.index(buffer), g, copy_layout(BK, g.dtype.element_ty.primitive_bitwidth))
                high, low = split(raise_to_least(gates))
                parts = g_tiles.index(buffer)._reinterpret(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
                dS_memory = parts.index(0)
                thread_barrier()
                parts.index(0).store(high)
                parts.index(1).store(low)
                fence_async_shared()
                thread_barrier()
                G, total = start_gate_frame(parts.index(0), parts.index(1), readdressed(ones_memory), C, BK)
            bq = to_float32(q_tile.load(key_tile)) * scale
            if GATED:
                bk = to_float32(k_tile.load(key_tile))
                G, total = warpgroup_mma_wait(0, deps=[G, total])
                last = chunk_total(total, BV)
                factor = frame_factor(last)
                dS *= (previous_factor * factor)[:, None]  # dS~'
                previous_factor = factor
                beyond = gl.convert_layout(excess(last), gl.SliceLayout(0, key_tile))[None, :]
                G += 0.5 * beyond
                bk *= gl.exp2(beyond - G)
                bq *= gl.exp2(G)
                k_tile.store(bk.to(gl.bfloat16))
            q_tile.store(bq.to(gl.bfloat16))
            # With gates into the memory of a part of them, which no product reads any more: converting `beyond` has
            # synchronised the warps.
            readdressed(dS_memory).store(dS.to(gl.bfloat16))
            async_copy.wait_group(1)  # the state
            fence_async_shared()
            thread_barrier()

            Pt = product(k_tile, q_tile.permute((1, 0)), C, C)
            bdv = product(k_tile, readdressed(dS_memory), C, BV)
            dS = add_product(q_tile.permute((1, 0)), do_tile, dS)  # dS~
            Pt = warpgroup_mma_wait(2, deps=[Pt])
            bdv = add_product(masked_operand(Pt, triangle(C, False, True)), do_tile, bdv)
            dP = product(do_tile, v_tile.permute((1, 0)), C, C)
            dS, bdv = warpgroup_mma_wait(1, deps=[dS, bdv])
            readdressed(dv_memory).store(bdv.to(gl.bfloat16))
            if STORE_DG:
                boundary = gl.sum(to_float32(readdressed(S_memory).load(state_layout)) * dS, axis=1)
            bdq = product(do_tile, readdressed(S_memory).permute((1, 0)), C, BK)
            dP = warpgroup_mma_wait(1, deps=[dP])
            bdq = add_product(masked_operand(dP, triangle(C, True, True)), k_tile, bdq)
            # dP again, transposed: a left operand in registers cannot be transposed. Both round equally.
            dPt = product(v_tile, do_tile.permute((1, 0)), C, C)
            bdq, dPt = warpgroup_mma_wait(0, deps=[bdq, dPt])
            bdk = product(v_tile, readdressed(dS_memory).permute((1, 0)), C, BK)
            bdk = add_product(masked_operand(dPt, triangle(C, False, True)), q_tile, bdk)
            if STORE_DG:
                balance = -to_float32(q_tile.load(key_tile)) * bdq
            if GATED:
                bdq *= gl.exp2(G)
                suspect += gl.sum(bdq, axis=1) * 0.0
            thread_barrier()  # dv is in its tile, and no product reads do_tile any more
            write(
                dv + wide_product(token, V), readdressed(dv_memory).load(copy_v), H * V, rows_left, V, copy_v, 0, GATED
            )
            bdq *= scale
            do_tile.store(bdq.to(gl.bfloat16))
            bdk = warpgroup_mma_wait(0, deps=[bdk])
            if STORE_DG:
                balance += k_tile.load(key_tile).to(gl.float32) * bdk
            if GATED:
                bdk *= gl.exp2(beyond - G)
                suspect += gl.sum(bdk, axis=1) * 0.0
            if STORE_DG and GATED:
                high, low = split(balance)
            thread_barrier()  # dq is in do_tile, and no product reads v_tile or dS~' any more
            write(dq + wide_product(token, K), do_tile.load(copy_k), H * K, rows_left, K, copy_k, 0, GATED)
            v_tile.store(bdk.to(gl.bfloat16))
            if STORE_DG and GATED:
                parts.index(0).store(high)
                parts.index(1).store(low)
                fence_async_shared()
            thread_barrier()
            write(dk + wide_product(token, K), v_tile.load(copy_k), H * K, rows_left, K, copy_k, 0, GATED)
            if STORE_DG and GATED:
                before = gl.where(triangle(C, True, False), 1.0, 0.0).to(gl.bfloat16)
                before = gl.convert_layout(before, left_operand(C))
                bdg = product(before, parts.index(0), C, BK)
                bdg = add_product(before, parts.index(1), bdg)
                boundary_row = gl.convert_layout(boundary, gl.SliceLayout(0, key_tile))
                bdg = warpgroup_mma_wait(0, deps=[bdg])
                write(dg + wide_product(token, K), bdg + boundary_row[None, :], H * K, rows_left, K, key_tile, 0, GATED)
            t -= C
            slot -= 1
            rows_left = C
        async_copy.wait_group(0)
    dS *= previous_factor[:, None]  # in no frame
    if STORE_DINITIAL:
        write(dinitial + pid.to(gl.int64) * K * V, dS, V, K, V, state_layout)
    if GATED:
        # Infinity times 0 is NaN, which stays NaN in every sum and fails every comparison. A dO or dS~' that is not
        # finite makes dq or dk so too, and P or K~ that are not have raised the forward's flag: dv needs no test.
        finite = (gl.sum(suspect, axis=0) + gl.sum(gl.sum(dS * 0.0, axis=1), axis=0)) == 0.0
        if (chunks > 0) & (finite == 0):
            gl.store(failed + n * H + h, 1)
