# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: SIM102
"""Backward kernel for Hopper, in Gluon, with a gate per head and token: chunks of 64, K and V up to 64, bfloat16.

With the symbols of docs/kernels.md, a_i the sum of a chunk's gates up to token i, in log2, and D_ij = 2^(a_i - a_j):

    A   = scale (tril(dO V^T) o D)^T, whose rows are those of K
    dV  = scale (tril(Q K^T) o D)^T dO + 2^(a_C - a) K dS'
    dQ  = A^T K + scale 2^a dO S^T
    dK  = A Q + 2^(a_C - a) V dS'^T
    dS  = 2^(a_C) dS' + (scale 2^a Q)^T dO
    dg_t = sum_kv S dS + sum_{i < t} (k_i . dk_i - q_i . dq_i)

Nothing is in a frame.

A chunk's scores, Q K^T and dO V^T, need its inputs alone. So they are started before dq and dk of the chunk before are
written, and are ready when the loop comes to them. dP goes through shared memory, to be used both ways round. What dg
of a chunk is made of is stored, and dg itself is computed later: of pieces for four chunks at once, of whole sequences
in the next chunk, after its copies have been started.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma_wait

from gla_kernels.hopper.copies import fetch, fetch_rows, load_state, write
from gla_kernels.hopper.head_gates import (
    chunk_gate,
    fetch_sums,
    make_sums,
    make_thread_row_sums,
    make_thread_totals,
    row_sums,
    store_head_gates,
    store_head_gates_of_chunks,
    sums_in,
    thread_row_sums,
    thread_totals,
)
from gla_kernels.hopper.layouts import accumulator, copy_layout, operand_layout, used_keys
from gla_kernels.hopper.narrow.states import recompute_states
from gla_kernels.hopper.places import find_piece, first_slot, locate, wait_for_previous_kernel
from gla_kernels.hopper.products import add_product, masked, masked_operand, product, triangle
from gla_kernels.hopper.values import readdressed, thread_barrier, to_float32, wide_product

GATES_AT_ONCE = gl.constexpr(4)  # chunks of a piece whose dg is computed together, each by a warp


@gluon.jit
def fetch_chunk(
    q_tile, k_tile, v_tile, do_tile, sums, q, k, v, g, do, b, t, h, T, H, rows_left,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Starts copying a chunk from token t on, of which `rows_left` rows are there, as a group."""
    fetch_rows(k_tile, k, b, t, h, k_b, k_t, k_h, rows_left, K, 16)
    fetch_rows(q_tile, q, b, t, h, q_b, q_t, q_h, rows_left, K, 16)
    fetch_rows(v_tile, v, b, t, h, v_b, v_t, v_h, rows_left, V, 16)
    fetch_rows(do_tile, do, b, t, h, do_b, do_t, do_h, rows_left, V, 16)
    fetch_sums(sums, sums_in(g, b, t, h, T, H), rows_left)
    async_copy.commit_group()


@gluon.jit
def placed(tile, SHORT: gl.constexpr):
    """The tile, `readdressed` if registers are SHORT (NOTES, "Registers")."""
    return readdressed(tile) if SHORT else tile


@gluon.jit
def start_scores(q_tile, k_tile, v_tile, do_tile, KC: gl.constexpr):
    """Starts K Q^T and V dO^T of a chunk whose copies have arrived, behind a fence and a barrier."""
    C: gl.constexpr = v_tile.shape[0]
    Pt = product(k_tile.slice(0, KC, 1), q_tile.slice(0, KC, 1).permute((1, 0)), C, C)
    dPt = product(v_tile, do_tile.permute((1, 0)), C, C)
    return Pt, dPt


@gluon.jit
def first_scores(q_tiles, k_tiles, v_tiles, do_tiles, KC: gl.constexpr):
    """`start_scores` of the first chunk, whose copies it waits for."""
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
    return start_scores(q_tiles.index(0), k_tiles.index(0), v_tiles.index(0), do_tiles.index(0), KC)


@gluon.jit(do_not_specialize=["T", "H", "count", "checkpoint_chunks", "N", "base"])
def simple_gla_backward_hopper(
    q,  # [B, T, H, K] bfloat16, any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, H, T] float32: sums of gates, in log2
    do,  # [B, T, H, V]
    states,  # [slots, H, K, V] bfloat16: S of each chunk; if RECOMPUTE, room for [programs, checkpoint_chunks, K, V]
    checkpoints,  # [slots, H, K, V] float32: S before every `checkpoint_chunks`-th chunk; if RECOMPUTE
    dfinal,  # [N or pieces of this launch, H, K, V] float32: gradient of the states after the last chunk
    dq,  # [B, T, H, K], contiguous, like dk and dv
    dk,  # [B, T, H, K]
    dv,  # [B, T, H, V]
    dg,  # [B, T, H] in the gates' dtype
    dinitial,  # [N, H, K, V] float32: gradient of the states before the first chunk; not of pieces
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h,
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
    VARLEN: gl.constexpr,  # whether sequences are packed
    RECOMPUTE: gl.constexpr,  # from checkpoints
    HAS_DFINAL: gl.constexpr,
    STORE_DG: gl.constexpr,
    STORE_DINITIAL: gl.constexpr,  # not of pieces
    PIECES: gl.constexpr,
):  # fmt: skip
    """A program handles one sequence and head, or a piece of it and a head, from the last chunk to the first.

    RECOMPUTE: from a checkpoint, it computes the states of `checkpoint_chunks` chunks again, then goes back through
    these chunks (a slice), and so on to the first. A piece then has `checkpoint_chunks` chunks or a multiple of them.
    """
    KC: gl.constexpr = used_keys(K)
    key_tile: gl.constexpr = accumulator(KC)
    copy_k: gl.constexpr = copy_layout(KC, 16)
    copy_v: gl.constexpr = copy_layout(BV, 16)
    state_layout: gl.constexpr = accumulator(BV)
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
    chunks = gl.maximum(gl.minimum(gl.cdiv(length, C) - first_chunk, count), 0)
    rows_left = gl.minimum(length - (first_chunk + chunks - 1) * C, chunks * C)
    t = begin + (first_chunk + chunks - 1) * C
    b = n * 0 if VARLEN else b
    slot = first_slot(n, begin, length, C, VARLEN) + first_chunk + chunks - 1

    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], operand_layout(C, BK))
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BV], operand_layout(C, BV))
    do_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, BV], operand_layout(C, BV))
    all_sums = make_sums(2, C)
    decayed_q_tile = gl.allocate_shared_memory(gl.bfloat16, [C, BK], operand_layout(C, BK))
    S_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))
    dS_memory = gl.allocate_shared_memory(gl.bfloat16, [BK, BV], operand_layout(BK, BV))
    dAt_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], operand_layout(C, C))
    dv_memory = gl.allocate_shared_memory(gl.bfloat16, [C, BV], operand_layout(C, BV))
    if KC < BK:  # zeros for the products that take all columns
        decayed_q_tile.store(gl.zeros([C, BK], gl.bfloat16, accumulator(BK)))
    AT_ONCE: gl.constexpr = GATES_AT_ONCE if PIECES else 1
    sent = make_thread_row_sums(AT_ONCE, C)
    totals = make_thread_totals(AT_ONCE)
    if EARLY:
        fetch_chunk(
            q_tiles.index(0), k_tiles.index(0), v_tiles.index(0), do_tiles.index(0), all_sums.index(0),
            q, k, v, g, do, b, t, h, T, H, rows_left,
            q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, K, V,
        )  # fmt: skip
        Pt, dPt = first_scores(q_tiles, k_tiles, v_tiles, do_tiles, KC)
        wait_for_previous_kernel()
    if HAS_DFINAL:
        dS = load_state(dfinal + pid.to(gl.int64) * K * V, K, V, state_layout, BK, BV)
    else:
        dS = gl.zeros([BK, BV], gl.float32, state_layout)
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
                k_tiles, v_tiles, all_sums, S_memory, S_memory, S_memory,
                k, v, g, b, t - (slice_chunks - 1) * C, h, T, H, slice_chunks, rows_left + (slice_chunks - 1) * C,
                k_b, k_t, k_h, v_b, v_t, v_h, 0, 0, 0, K, V, BK, BV, C, False, True,
            )  # fmt: skip
        if not EARLY:
            fetch_chunk(
                q_tiles.index(0), k_tiles.index(0), v_tiles.index(0), do_tiles.index(0), all_sums.index(0),
                q, k, v, g, do, b, t, h, T, H, rows_left,
                q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, K, V,
            )  # fmt: skip
            Pt, dPt = first_scores(q_tiles, k_tiles, v_tiles, do_tiles, KC)
        last_rows = rows_left  # of the first chunk, the last one in time: the others are full
        later_rows = rows_left * 0  # of the later chunk, whose dg is yet to be written; not of pieces
        for i in range(slice_chunks):
            buffer = i % 2
            next_buffer = (i + 1) % 2
            q_tile = q_tiles.index(buffer)
            k_tile = k_tiles.index(buffer)
            v_tile = v_tiles.index(buffer)
            do_tile = do_tiles.index(buffer)
            sums = all_sums.index(buffer)
            q_part = q_tile.slice(0, KC, 1)
            k_part = k_tile.slice(0, KC, 1)
            # Before the barrier, because Triton puts another one between copies and these.
            bq = q_part.load(key_tile)
            a = row_sums(sums, key_tile)
            of_rows = row_sums(sums, accumulator(C))
            of_columns = sums.load(gl.SliceLayout(0, accumulator(C)))
            total = chunk_gate(sums)
            thread_barrier()  # the later chunk's outputs have left the tiles that they went through
            state_at = slot if RECOMPUTE else slot * H + h
            fetch(readdressed(S_memory), states + wide_product(state_at, K * V), V, K, V, copy_v)
            async_copy.commit_group()
            # The chunk to be processed next, the earlier one, is copied while this one is processed.
            next_rows = gl.where(i + 1 < slice_chunks, C, 0)
            fetch_chunk(
                q_tiles.index(next_buffer), k_tiles.index(next_buffer), v_tiles.index(next_buffer),
                do_tiles.index(next_buffer), all_sums.index(next_buffer), q, k, v, g, do, b, t - C, h, T, H, next_rows,
                q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, K, V,
            )  # fmt: skip
            there = (b * T + t) * H + h
            of_q = gl.exp2(a)[:, None] * scale
            of_k = gl.exp2(total - a)[:, None]
            token_of_k = gl.convert_layout(gl.exp2(total - of_rows), gl.SliceLayout(1, accumulator(BV)))[:, None]
            readdressed(dS_memory).store(dS.to(gl.bfloat16))
            placed(decayed_q_tile, RECOMPUTE).slice(0, KC, 1).store((to_float32(bq) * of_q).to(gl.bfloat16))
            dS *= gl.exp2(total)
            if STORE_DG and not PIECES:
                store_head_gates(dg + (there + C * H), H, sent.index(0), totals.index(0), later_rows)
            decays = gl.exp2(of_columns[None, :] - of_rows[:, None]) * scale
            Pt, dPt = warpgroup_mma_wait(0, deps=[Pt, dPt])
            mask = triangle(C, False, True)
            placed(dAt_tile, RECOMPUTE).store(masked(dPt * decays, mask).to(gl.bfloat16))
            P_operand = masked_operand(Pt * decays, mask)
            async_copy.wait_group(1)  # the state
            fence_async_shared()
            thread_barrier()
            bdv = product(k_part, readdressed(dS_memory).slice(0, KC), C, BV)
            bdq = product(do_tile, readdressed(S_memory).slice(0, KC).permute((1, 0)), C, KC)
            bdk = product(v_tile, readdressed(dS_memory).slice(0, KC).permute((1, 0)), C, KC)
            dS = add_product(placed(decayed_q_tile, RECOMPUTE).permute((1, 0)), do_tile, dS)
            bdv = warpgroup_mma_wait(3, deps=[bdv])
            bdv = add_product(P_operand, do_tile, bdv * token_of_k)
            bdq = warpgroup_mma_wait(3, deps=[bdq])
            bdq = add_product(placed(dAt_tile, RECOMPUTE).permute((1, 0)), k_part, bdq * of_q)
            bdk = warpgroup_mma_wait(3, deps=[bdk])
            bdk = add_product(placed(dAt_tile, RECOMPUTE), q_part, bdk * of_k)
            dS = warpgroup_mma_wait(3, deps=[dS])
            if STORE_DG:
                totals.index(i % AT_ONCE).store(
                    thread_totals(to_float32(readdressed(S_memory).load(state_layout)) * dS)
                )
            bdv = warpgroup_mma_wait(2, deps=[bdv])
            readdressed(dv_memory).store(bdv.to(gl.bfloat16))
            bdq = warpgroup_mma_wait(1, deps=[bdq])
            if STORE_DG:
                balance = thread_row_sums(to_float32(q_part.load(key_tile)) * bdq)
            async_copy.wait_group(0)
            fence_async_shared()
            thread_barrier()  # dv is in its tile, no product reads do_tile any more, and the next chunk is there
            write(dv + wide_product(there, V), readdressed(dv_memory).load(copy_v), H * V, rows_left, V, copy_v)
            Pt, dPt = start_scores(
                q_tiles.index(next_buffer), k_tiles.index(next_buffer), v_tiles.index(next_buffer),
                do_tiles.index(next_buffer), KC,
            )  # fmt: skip
            dq_tile = readdressed(S_memory).slice(0, KC, 1)
            dq_tile.store(bdq.to(gl.bfloat16))
            bdk = warpgroup_mma_wait(2, deps=[bdk])
            dk_tile = readdressed(dS_memory).slice(0, KC, 1)
            dk_tile.store(bdk.to(gl.bfloat16))
            thread_barrier()
            write(dq + wide_product(there, K), dq_tile.load(copy_k), H * K, rows_left, K, copy_k)
            write(dk + wide_product(there, K), dk_tile.load(copy_k), H * K, rows_left, K, copy_k)
            if STORE_DG:
                before = i % AT_ONCE
                sent.index(before).store(thread_row_sums(to_float32(k_part.load(key_tile)) * bdk) - balance)
                if PIECES:
                    if (before == AT_ONCE - 1) | (i == slice_chunks - 1):
                        thread_barrier()
                        rows = gl.where(i == before, last_rows, C)
                        store_head_gates_of_chunks(dg + (there + before * C * H), H, sent, totals, rows, before + 1)
            later_rows = rows_left
            t -= C
            slot -= 1
            rows_left = C
        if STORE_DG and not PIECES:
            thread_barrier()
            store_head_gates(dg + ((b * T + t + C) * H + h), H, sent.index(0), totals.index(0), later_rows)
        warpgroup_mma_wait(0, deps=[Pt, dPt])  # nothing reads these
    if STORE_DINITIAL:
        write(dinitial + pid.to(gl.int64) * K * V, dS, V, K, V, state_layout)
