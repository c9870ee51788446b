# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Exact backward: the gradients of the heads that the forward or the plain backward has flagged; see `exact.py`.

It goes through the subchunks of a chunk in reverse and recomputes the state before each from the chunk's. From
checkpoints, it first recomputes the states of the chunks behind one checkpoint, then goes back through these, and so on
to the first checkpoint, all in one launch.
"""

import triton
import triton.language as tl

from gla_kernels.portable.exact import advance, any_raised, exact_forward_row, exact_scores, items_here
from gla_kernels.portable.tiles import (
    exact_gates,
    first_slot,
    load_tile,
    locate,
    minus_reference,
    plain_gates,
    select_sum,
    store_tile,
    wait_for_previous_kernel,
    zero_state,
)
from gla_kernels.portable.tree import tree_gradients


@triton.jit
def exact_intra(q, k, dP, dPt, step_gates, steps, R: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Gradients from pairs inside a subchunk, for any gates: (dq, dk, k dk - q dq), each (R, BK) float32.

    q (scaled) and k are (R, BK) float32, dP and dPt the gradient of the scores and its transpose; dq is with respect to
    the scaled q. There is no gate between a token and itself, so this pair does not enter the last result.
    """
    own_grad = tl.sum(tl.where(steps[:, None] == steps[None, :], dP, 0.0), axis=1)
    dq = own_grad[:, None] * k
    dk = own_grad[:, None] * q
    balance = tl.zeros([R, BK], dtype=tl.float32)
    return tree_gradients(dq, dk, balance, q, k, dP, dPt, step_gates, steps, 1, R, 3, DOT, PRECISION)


@triton.jit
def start_state_gradient(
    nh, ik, dfinal, dinitial, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, HAS_DFINAL: tl.constexpr,
):  # fmt: skip
    """Sets block ik of `dinitial` of a sequence and head to the gradient of the state after the last token."""
    kcols = ik * BK + tl.arange(0, BK)
    for iv in range(0, (V + BV - 1) // BV):
        vcols = iv * BV + tl.arange(0, BV)
        if HAS_DFINAL:
            dS = load_tile(dfinal + nh.to(tl.int64) * K * V, kcols, vcols, V, K, V).to(tl.float32)
        else:
            dS = zero_state(scale, BK, BV)
        store_tile(dinitial + nh.to(tl.int64) * K * V, dS, kcols, vcols, V, K, V)


@triton.jit
def exact_backward_row(
    nh, ik, q, k, v, g, do, states, flags, dq, dk, dv, dg, dinitial, cu_seqlens, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T, H, first_chunk, count,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    FROM_CHECKPOINT: tl.constexpr,
    STORE_DG: tl.constexpr,
):  # fmt: skip
    """The backward of block ik of the key columns of a sequence and head, `count` chunks from `first_chunk` on.

    A program handles all value columns, block by block, so that dq, dk and dg are summed before they are rounded. The
    gradient of the state is passed from subchunk to subchunk in `dinitial`, which holds that after the last one.
    VALUE_PARTS: partial sums in the buffers of dq, dk and dg; the first gets the whole gradient, the others 0.

    FROM_CHECKPOINT: `states` holds this head's `count` states alone, as `exact_forward_row` stored them. Otherwise they
    are those of the whole pass, from the plain form unless the forward was flagged.
    """
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    n = nh // H
    h = nh % H
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    chunks = tl.maximum(tl.minimum((length + C - 1) // C - first_chunk, count), 0)
    b = b.to(tl.int64) if not VARLEN else b
    t = tl.cast(begin + first_chunk * C, tl.int64)
    q += b * q_b + t * q_t + h.to(tl.int64) * q_h
    k += b * k_b + t * k_t + h.to(tl.int64) * k_h
    v += b * v_b + t * v_t + h.to(tl.int64) * v_h
    g += b * g_b + t * g_t + h.to(tl.int64) * g_h
    do += b * do_b + t * do_t + h.to(tl.int64) * do_h
    out = (b * T + t) * H + h
    grad_stride = H * VALUE_PARTS * K
    dq += out * VALUE_PARTS * K
    dk += out * VALUE_PARTS * K
    if STORE_DG:
        dg += out * VALUE_PARTS * K
    dv += (out * blocks_k + ik) * V
    if not FROM_CHECKPOINT:
        states += (first_slot(n, begin, length, C, VARLEN).to(tl.int64) * H + h) * K * V
        flagged = tl.load(flags + nh) != 0
    state_step = K * V if FROM_CHECKPOINT else H.to(tl.int64) * K * V
    dinitial += nh.to(tl.int64) * K * V
    kcols = ik * BK + tl.arange(0, BK)
    steps = tl.arange(0, R)
    lower = steps[:, None] >= steps[None, :]
    upper = steps[:, None] <= steps[None, :]
    for back in range(0, chunks):
        chunk = (chunks - 1 - back).to(tl.int64)
        chunk_rows = length - (first_chunk + chunk.to(tl.int32)) * C
        if not FROM_CHECKPOINT:
            minus_r = tl.zeros([BK], dtype=tl.float32)
            if not flagged:
                # Only the plain backward failed: the states are those of the plain forward, in the chunk's frame.
                for before in range(0, C // R):
                    row = (chunk * C + before * R) * g_t
                    minus_r += tl.sum(plain_gates(load_tile(g + row, steps, kcols, g_t, chunk_rows - before * R, K)), 0)
                minus_r = minus_reference(minus_r, DOT)
        for back_in_chunk in range(0, C // R):
            sub = C // R - 1 - back_in_chunk
            row = chunk * C + sub * R
            rows_left = chunk_rows - sub * R
            bq = load_tile(q + row * q_t, steps, kcols, q_t, rows_left, K).to(tl.float32) * scale
            bk = load_tile(k + row * k_t, steps, kcols, k_t, rows_left, K).to(tl.float32)
            step_gates = exact_gates(load_tile(g + row * g_t, steps, kcols, g_t, rows_left, K))
            q_factor = tl.exp2(select_sum(lower, step_gates, 3, DOT))
            k_factor = tl.exp2(select_sum(steps[:, None] < steps[None, :], step_gates, 3, DOT))
            qs = (bq * q_factor).to(DOT)
            ks = (bk * k_factor).to(DOT)
            Pt = exact_scores(
                q + row * q_t, k + row * k_t, g + row * g_t, scale, q_t, k_t, g_t, ik * BK, steps, rows_left, K, BK,
                True, R, DOT, PRECISION,
            ).to(DOT)  # fmt: skip
            dP = zero_state(scale, R, R)
            dPt = zero_state(scale, R, R)
            dq_state = zero_state(scale, R, BK)
            dk_state = zero_state(scale, R, BK)
            boundary = tl.zeros([BK], dtype=tl.float32)
            # The loop reads parts of dinitial that other threads have written.
            tl.debug_barrier()
            for iv in range(0, blocks_v):
                vcols = iv * BV + tl.arange(0, BV)
                S = load_tile(states + chunk * state_step, kcols, vcols, V, K, V).to(tl.float32)
                if not FROM_CHECKPOINT:
                    S *= tl.exp2(minus_r)[:, None]
                for before in range(0, sub):
                    early = chunk * C + before * R
                    left = chunk_rows - before * R
                    key = load_tile(k + early * k_t, steps, kcols, k_t, left, K).to(tl.float32)
                    value = load_tile(v + early * v_t, steps, vcols, v_t, left, V).to(DOT)
                    gates = exact_gates(load_tile(g + early * g_t, steps, kcols, g_t, left, K))
                    S = advance(S, key, value, gates, steps, DOT, PRECISION)
                bv = load_tile(v + row * v_t, steps, vcols, v_t, rows_left, V).to(DOT)
                bdo = load_tile(do + row * do_t, steps, vcols, do_t, rows_left, V).to(DOT)
                dS = load_tile(dinitial, kcols, vcols, V, K, V)
                S_operand = S.to(DOT)
                dS_operand = dS.to(DOT)
                dP = tl.dot(bdo, tl.trans(bv), dP, input_precision=PRECISION)
                dPt = tl.dot(bv, tl.trans(bdo), dPt, input_precision=PRECISION)
                dq_state = tl.dot(bdo, tl.trans(S_operand), dq_state, input_precision=PRECISION)
                dk_state = tl.dot(bv, tl.trans(dS_operand), dk_state, input_precision=PRECISION)
                bdv = tl.dot(Pt, bdo, input_precision=PRECISION)
                bdv = tl.dot(ks, dS_operand, bdv, input_precision=PRECISION)
                store_tile(dv + row * H * blocks_k * V, bdv, steps, vcols, H * blocks_k * V, rows_left, V)
                dS *= tl.exp2(tl.sum(step_gates, axis=0))[:, None]
                dS = tl.dot(tl.trans(qs), bdo, dS, input_precision=PRECISION)
                if STORE_DG:
                    boundary += tl.sum(S_operand.to(tl.float32) * dS, axis=1)
                store_tile(dinitial, dS, kcols, vcols, V, K, V)
            dP = tl.where(lower, dP, 0.0)
            dPt = tl.where(upper, dPt, 0.0)
            bdq, bdk, balance = exact_intra(bq, bk, dP, dPt, step_gates, steps, R, BK, DOT, PRECISION)
            balance += ks.to(tl.float32) * dk_state - qs.to(tl.float32) * dq_state
            bdq = (bdq + dq_state * q_factor) * scale
            bdk += dk_state * k_factor
            if STORE_DG:
                bdg = select_sum(steps[:, None] > steps[None, :], balance, 3, DOT) + boundary[None, :]
            for part in range(0, VALUE_PARTS):
                at = row * grad_stride + part * K
                store_tile(dq + at, tl.where(part == 0, bdq, 0.0), steps, kcols, grad_stride, rows_left, K)
                store_tile(dk + at, tl.where(part == 0, bdk, 0.0), steps, kcols, grad_stride, rows_left, K)
                if STORE_DG:
                    store_tile(dg + at, tl.where(part == 0, bdg, 0.0), steps, kcols, grad_stride, rows_left, K)


@triton.jit(do_not_specialize=["T", "H", "rows"])
def gla_backward_exact(
    q, k, v, g, do, states, flags, failed, dfinal, dq, dk, dv, dg, dinitial, cu_seqlens, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T, H, rows,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    STORE_DG: tl.constexpr,
):  # fmt: skip
    """`gla_backward_kernel` for those of the `rows` sequences and heads that either pass has flagged.

    An item is a block of key columns of one of them.
    """
    wait_for_previous_kernel(PDL)
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    items = rows * blocks_k
    if any_raised(flags, items, blocks_k) | any_raised(failed, items, blocks_k):
        for i in range(0, items_here(items)):
            item = tl.program_id(0) + i * tl.num_programs(0)
            nh = item // blocks_k
            if (tl.load(flags + nh) != 0) | (tl.load(failed + nh) != 0):
                start_state_gradient(nh, item % blocks_k, dfinal, dinitial, scale, K, V, BK, BV, HAS_DFINAL)
                exact_backward_row(
                    nh, item % blocks_k, q, k, v, g, do, states, flags, dq, dk, dv, dg, dinitial, cu_seqlens, scale,
                    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
                    T, H, 0, tl.cdiv(T, C), K, V, BK, BV, C, R, VALUE_PARTS, DOT, PRECISION, VARLEN, False, STORE_DG,
                )  # fmt: skip


@triton.jit(do_not_specialize=["T", "H", "checkpoint_chunks", "rows"])
def gla_backward_exact_recomputing(
    q, k, v, g, do,
    checkpoints,  # [slots, H, K, V] float32: the state before each `checkpoint_chunks`-th chunk
    states,  # [programs, every, K, V] in DOT: a program's own memory for the states that it recomputes
    failed,  # [N, H] int32: not 0 if a result of the forward or of the plain backward is not finite
    dfinal, dq, dk, dv, dg, dinitial, cu_seqlens, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T, H, checkpoint_chunks, rows,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    STORE_DG: tl.constexpr,
):  # fmt: skip
    """`gla_backward_exact` from checkpoints: a program goes back from one to the one before, recomputing the states."""
    wait_for_previous_kernel(PDL)
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    items = rows * blocks_k
    if any_raised(failed, items, blocks_k):
        states += tl.program_id(0).to(tl.int64) * checkpoint_chunks * K * V
        for i in range(0, items_here(items)):
            item = tl.program_id(0) + i * tl.num_programs(0)
            nh = item // blocks_k
            ik = item % blocks_k
            if tl.load(failed + nh) != 0:
                start_state_gradient(nh, ik, dfinal, dinitial, scale, K, V, BK, BV, HAS_DFINAL)
                _, _, length = locate(cu_seqlens, nh // H, T, VARLEN)
                pieces = tl.cdiv(length, checkpoint_chunks * C)
                for back in range(0, pieces):
                    first_chunk = (pieces - 1 - back) * checkpoint_chunks
                    # Other threads may still read the states of the piece after this one.
                    tl.debug_barrier()
                    for iv in range(0, blocks_v):
                        exact_forward_row(
                            nh, ik, iv, q, k, v, g, None, checkpoints, None, states, None, cu_seqlens, scale,
                            q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, T, H, first_chunk,
                            checkpoint_chunks, checkpoint_chunks,
                            K, V, BK, BV, C, R, DOT, PRECISION, VARLEN, True, True, False, False, True, False,
                        )  # fmt: skip
                    # The backward reads states that other threads have written.
                    tl.debug_barrier()
                    exact_backward_row(
                        nh, ik, q, k, v, g, do, states, None, dq, dk, dv, dg, dinitial, cu_seqlens, scale,
                        q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h, T, H,
                        first_chunk, checkpoint_chunks,
                        K, V, BK, BV, C, R, VALUE_PARTS, DOT, PRECISION, VARLEN, True, STORE_DG,
                    )  # fmt: skip
