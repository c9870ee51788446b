"""Backward kernel: one pass over a sequence in reverse, the gradient of the state kept on chip.

With the forward's names, dS' the gradient of the state after the chunk, and everything in the chunk's frame
(dS~ = 2^(G_last - r) dS', S~ = 2^r S as the forward stored it):

    dV  = tril(Q~ K~^T)^T dO + K~ dS~
    dQ~ = tril(dO V^T) K~    + dO S~^T         dq = scale 2^(G - r) dQ~
    dK~ = tril(dO V^T)^T Q~  + V dS~^T         dk = 2^(r - G) dK~
    dS  = 2^r (dS~ + Q~^T dO)
    dg_t = sum_{i >= t} (Q~_i dQ~_i - K~_i dK~_i) + sum_v S~ dS~ + sum_j K~_j (V dS~^T)_j

The sum over i stays inside the chunk, and the last two terms stand for everything after it. Both Q~ dQ~ and K~ dK~
come from the rounded operands of the products, so that what cancels in exact arithmetic cancels here as well:
the error of dg neither grows with T nor with the gates' strength.
"""

import triton
import triton.language as tl

from gla_kernels.tiles import exact_gates, gate_frame, load_tile, select_sum, store_tile, tree_level


@triton.jit
def exact_intra(q, k, dA, dAt, step_gates, steps, C: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Inside a chunk, for any gates: (transposed scores (C, C), dq, dk, q dq - k dk (C, BK)), all float32.

    q (scaled) and k are (C, BK) float32, dA and dAt the gradient of the scores and its transpose. Level by level
    of the tree; dq is with respect to the scaled q. The pair of a token with itself has no gate and adds nothing
    to the last result.
    """
    diagonal = steps[:, None] == steps[None, :]
    own = tl.sum(q * k, axis=1)
    scores_t = tl.where(diagonal, own[:, None], 0.0)
    own_grad = tl.sum(tl.where(diagonal, dA, 0.0), axis=1)
    dq = own_grad[:, None] * k
    dk = own_grad[:, None] * q
    balance = tl.zeros([C, BK], dtype=tl.float32)
    size = 1
    while size < C:
        factor, late, pairs = tree_level(step_gates, steps, size, DOT)
        block = steps // size // 2
        pairs_t = (block[:, None] == block[None, :]) & (late[:, None] == 0) & late[None, :]
        ql = tl.where(late[:, None], q * factor, 0.0).to(DOT)
        kl = tl.where(late[:, None], 0.0, k * factor).to(DOT)
        scores_t += tl.where(pairs_t, tl.dot(kl, tl.trans(ql), input_precision=PRECISION), 0.0)
        dql = tl.dot(tl.where(pairs, dA, 0.0).to(DOT), kl, input_precision=PRECISION)
        dkl = tl.dot(tl.where(pairs_t, dAt, 0.0).to(DOT), ql, input_precision=PRECISION)
        dq += dql * factor
        dk += dkl * factor
        balance += ql.to(tl.float32) * dql - kl.to(tl.float32) * dkl
        size *= 2
    return scores_t, dq, dk, balance


@triton.jit(do_not_specialize=["t_begin", "t_end", "T", "H", "chunks"])
def gla_backward_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K], natural log, <= 0
    do,  # [B, T, H, V]
    states,  # [B * H, chunks, K, V] in DOT, as the forward stored them
    flags,  # [B * H] int32: 1 where the plain form does not hold
    dfinal,  # [B, H, K, V] float32: gradient of the state after t_end
    dq,  # [blocks_v, B, T, H, K]: one part a block of value columns
    dk,  # [blocks_v, B, T, H, K]
    dv,  # [B, T, H, V]
    dg,  # [blocks_v, B, T, H, K]
    dinitial,  # [B, H, K, V] float32: gradient of the state before t_begin
    scale,
    t_begin,
    t_end,
    T,
    H,
    heads,  # B * H
    chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr,
    EXACT: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_DFINAL: tl.constexpr,
    STORE_DINITIAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program does one block of BV value columns of one (batch, head), from t_end back to t_begin."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % blocks_v
    bh = (pid // blocks_v).to(tl.int64)
    if GATED:
        if (tl.load(flags + bh) != 0) != EXACT:
            return
    first = (bh // H * T + t_begin + (chunks - 1) * C) * H + bh % H
    part = iv * (heads // H).to(tl.int64) * T * H * K
    q += first * K
    k += first * K
    v += first * V
    do += first * V
    dv += first * V
    dq += part + first * K
    dk += part + first * K
    if GATED:
        g += first * K
        dg += part + first * K
    states += (bh * chunks + chunks - 1) * K * V
    kcols = tl.arange(0, BK)
    vcols = iv * BV + tl.arange(0, BV)
    steps = tl.arange(0, C)
    if HAS_DFINAL:
        dS = load_tile(dfinal + bh * K * V, kcols, vcols, V, K, V, MASKED).to(tl.float32)
    else:
        dS = tl.zeros([BK, BV], dtype=tl.float32)
    rows_left = t_end - t_begin - (chunks - 1) * C
    lower = steps[:, None] >= steps[None, :]
    upper = steps[:, None] <= steps[None, :]
    for _ in tl.range(0, chunks, num_stages=STAGES):
        bq = load_tile(q, steps, kcols, H * K, rows_left, K, MASKED).to(tl.float32)
        bk = load_tile(k, steps, kcols, H * K, rows_left, K, MASKED).to(tl.float32)
        bv = load_tile(v, steps, vcols, H * V, rows_left, V, MASKED).to(DOT)
        bdo = load_tile(do, steps, vcols, H * V, rows_left, V, MASKED).to(DOT)
        Sd = load_tile(states, kcols, vcols, V, K, V, MASKED)
        if GATED:
            bg = load_tile(g, steps, kcols, H * K, rows_left, K, MASKED)
        # A transposed accumulator as an operand is miscompiled on Hopper (Triton 3.4 to 3.7): a second product instead.
        dA = tl.where(lower, tl.dot(bdo, tl.trans(bv), input_precision=PRECISION), 0.0)
        dAt = tl.where(upper, tl.dot(bv, tl.trans(bdo), input_precision=PRECISION), 0.0)
        if EXACT:
            step_gates = exact_gates(bg)
            q_factor = tl.exp2(select_sum(lower, step_gates, 3, DOT))
            k_factor = tl.exp2(select_sum(steps[:, None] < steps[None, :], step_gates, 3, DOT))
            scaled_q = bq * scale
            qs = (scaled_q * q_factor).to(DOT)
            ks = (bk * k_factor).to(DOT)
            dSd = dS.to(DOT)
            dq_state = tl.dot(bdo, tl.trans(Sd), input_precision=PRECISION)
            dk_state = tl.dot(bv, tl.trans(dSd), input_precision=PRECISION)
            scores_t, bdq, bdk, balance = exact_intra(scaled_q, bk, dA, dAt, step_gates, steps, C, BK, DOT, PRECISION)
            balance += qs.to(tl.float32) * dq_state - ks.to(tl.float32) * dk_state
            bdq = (bdq + dq_state * q_factor) * scale
            bdk += dk_state * k_factor
            dS *= tl.exp2(tl.sum(step_gates, axis=0))[:, None]
            after = tl.sum(Sd.to(tl.float32) * dS, axis=1) + tl.sum(ks.to(tl.float32) * dk_state, axis=0)
            bdv = tl.dot(scores_t.to(DOT), bdo, input_precision=PRECISION)
            bdv = tl.dot(ks, dSd, bdv, input_precision=PRECISION)
        else:
            if GATED:
                G, G_last, r = gate_frame(bg, steps, DOT)
                q_factor = tl.exp2(G - r[None, :]) * scale
                k_factor = tl.exp2(r[None, :] - G)
                qs = (bq * q_factor).to(DOT)
                ks = (bk * k_factor).to(DOT)
                dS *= tl.exp2(G_last - r)[:, None]
                after = tl.sum(Sd.to(tl.float32) * dS, axis=1)
            else:
                qs = (bq * scale).to(DOT)
                ks = bk.to(DOT)
            dSd = dS.to(DOT)
            scores_t = tl.where(upper, tl.dot(ks, tl.trans(qs), input_precision=PRECISION), 0.0).to(DOT)
            bdv = tl.dot(scores_t, bdo, input_precision=PRECISION)
            bdv = tl.dot(ks, dSd, bdv, input_precision=PRECISION)
            bdq = tl.dot(dA.to(DOT), ks, input_precision=PRECISION)
            bdq = tl.dot(bdo, tl.trans(Sd), bdq, input_precision=PRECISION)
            dk_state = tl.dot(bv, tl.trans(dSd), input_precision=PRECISION)
            bdk = tl.dot(dAt.to(DOT), qs, dk_state, input_precision=PRECISION)
            if GATED:
                after += tl.sum(ks.to(tl.float32) * dk_state, axis=0)
                balance = qs.to(tl.float32) * bdq - ks.to(tl.float32) * bdk
                bdq *= q_factor
                bdk *= k_factor
            else:
                bdq *= scale
        store_tile(dv, bdv, steps, vcols, H * V, rows_left, V, MASKED)
        store_tile(dq, bdq, steps, kcols, H * K, rows_left, K, MASKED)
        store_tile(dk, bdk, steps, kcols, H * K, rows_left, K, MASKED)
        if GATED:
            bdg = select_sum(upper, balance, 3 if EXACT else 2, DOT) + after[None, :]
            store_tile(dg, bdg, steps, kcols, H * K, rows_left, K, MASKED)
        dS = tl.dot(tl.trans(qs), bdo, dS, input_precision=PRECISION)
        if GATED and not EXACT:
            dS *= tl.exp2(r)[:, None]
        q -= C * H * K
        k -= C * H * K
        v -= C * H * V
        do -= C * H * V
        dq -= C * H * K
        dk -= C * H * K
        dv -= C * H * V
        if GATED:
            g -= C * H * K
            dg -= C * H * K
        states -= K * V
        rows_left += C
    if STORE_DINITIAL:
        store_tile(dinitial + bh * K * V, dS, kcols, vcols, V, K, V, MASKED)
