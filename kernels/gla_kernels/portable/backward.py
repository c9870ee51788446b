# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
# ruff: noqa: SIM102
"""Backward kernel of the plain form, in Triton: one reverse pass over a sequence, with the state's gradient on chip.

With the symbols of docs/kernels.md; S~ is as the forward stored it, and dS~' = 2^r dS':

    dV  = tril(Q~ K~^T)^T dO + K~ dS~'
    dQ~ = tril(dO V^T) K~    + dO S~^T         dq = scale 2^(a - r) dQ~
    dK~ = tril(dO V^T)^T Q~  + V dS~'^T        dk = 2^(b - r) dK~
    dS~ = dS~' + Q~^T dO                       dS = 2^r dS~
    dg_t = sum_v S~ dS~ + sum_{i < t} (K~_i dK~_i - Q~_i dQ~_i)

The last line starts with what crosses the border before the chunk's first token, sum_v S~ dS~. Each token before t adds
what it sends on (K~ dK~) and removes what it receives (Q~ dQ~). Terms that cancel in exact arithmetic are made of the
same rounded operands, and cancel here too: the error of dg grows neither with T nor with the strength of the gates.

As in the forward, what passes from token to token in a strong channel is missing; `strong.py` adds it.

With one gate per head (HEAD_GATED), D_ij = 2^(a_i - a_j) and nothing in a frame:

    dV = scale (tril(Q K^T) o D)^T dO + 2^(a_last - a) K dS'
    dQ = scale (tril(dO V^T) o D) K   + (scale 2^a dO) S^T
    dK = scale (tril(dO V^T) o D)^T Q + 2^(a_last - a) V dS'^T
    dS = 2^a_last dS' + Q^T (scale 2^a dO)
    dg_t = sum_kv S dS + sum_{i < t} (k_i . dk_i - q_i . dq_i)

`dfinal` is always given (zeros if there is none) and `dinitial` always written: the variant without them, compiled by
Triton 3.6 for sm_90, left most of dv unwritten at K = V = 128.
"""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import (
    decay,
    decay_between,
    first_slot,
    gate_frame,
    load_head_sums,
    load_tile,
    locate,
    select_sum,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "H", "first_chunk", "count"])
def gla_backward_kernel(
    q,  # [B, T, H, K], any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K], natural log, <= 0; if HEAD_GATED, [B, H, T]: sums of gates since the chunk's start, in log2
    do,  # [B, T, H, V]
    states,  # [slots, H, K, V] in DOT, as the forward stored them
    flags,  # [N, H] int32: 1 if a result of the forward is not finite
    failed,  # [N, H] int32, 0: 1 if this kernel's results are not finite
    dfinal,  # [N, H, K, V] float32: gradient of the states after the last chunk
    dq,  # [B, T, H, blocks_v, K], contiguous: one part per block of value columns, as in dk and in dg
    dk,  # [B, T, H, blocks_v, K]
    dv,  # [B, T, H, blocks_k, V]: one part per block of key columns
    dg,  # [B, T, H, blocks_v, K]; if HEAD_GATED, [B, T, H, blocks_k * blocks_v]
    dinitial,  # [N, H, K, V] float32: gradient of the states before the first chunk
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T,
    H,
    first_chunk,  # of each sequence to process
    count,  # the most chunks of a sequence to process
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr,  # by a gate per channel
    HEAD_GATED: tl.constexpr,
    VARLEN: tl.constexpr,
    FROM_CHECKPOINT: tl.constexpr,
    STORE_DG: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program handles BK key and BV value columns of one sequence and head, chunks first + count - 1 to first."""
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % blocks_v
    ik = pid // blocks_v % blocks_k
    nh = pid // (blocks_v * blocks_k)
    n = nh // H
    h = nh % H
    if GATED:
        if tl.load(flags + nh) != 0:
            return
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    chunks = tl.maximum(tl.minimum((length + C - 1) // C - first_chunk, count), 0)
    rows_left = tl.minimum(length - (first_chunk + chunks - 1) * C, chunks * C)
    b = b.to(tl.int64) if not VARLEN else b
    t = (begin + (first_chunk + chunks - 1) * C).to(tl.int64)
    q += b * q_b + t * q_t + h.to(tl.int64) * q_h
    k += b * k_b + t * k_t + h.to(tl.int64) * k_h
    v += b * v_b + t * v_t + h.to(tl.int64) * v_h
    do += b * do_b + t * do_t + h.to(tl.int64) * do_h
    out = (b * T + t) * H + h
    grad_stride = H * blocks_v * K
    part = (out * blocks_v + iv) * K
    dq += part
    dk += part
    dv += (out * blocks_k + ik) * V
    if GATED:
        g += b * g_b + t * g_t + h.to(tl.int64) * g_h
    if HEAD_GATED:
        g += (tl.cast(b, tl.int64) * H + h) * T + t
    if STORE_DG:
        dg += (out * blocks_k + ik) * blocks_v + iv if HEAD_GATED else part
    slot = (n * count if FROM_CHECKPOINT else first_slot(n, begin, length, C, VARLEN)) + chunks - 1
    states += (slot.to(tl.int64) * H + h) * K * V
    kcols = ik * BK + tl.arange(0, BK)
    vcols = iv * BV + tl.arange(0, BV)
    steps = tl.arange(0, C)
    lower = steps[:, None] >= steps[None, :]
    upper = steps[:, None] <= steps[None, :]
    dS = load_tile(dfinal + nh.to(tl.int64) * K * V, kcols, vcols, V, K, V).to(tl.float32)
    suspect = tl.zeros([C], dtype=tl.float32)
    for _ in tl.range(0, chunks, num_stages=STAGES):
        bq = load_tile(q, steps, kcols, q_t, rows_left, K).to(tl.float32)
        bk = load_tile(k, steps, kcols, k_t, rows_left, K).to(tl.float32)
        bv = load_tile(v, steps, vcols, v_t, rows_left, V).to(DOT)
        bdo = load_tile(do, steps, vcols, do_t, rows_left, V).to(DOT)
        S_operand = load_tile(states, kcols, vcols, V, K, V)
        if GATED:
            to_row, to_end, r, _ = gate_frame(load_tile(g, steps, kcols, g_t, rows_left, K), steps, DOT)
            q_factor = tl.exp2(to_row) * scale
            k_factor = tl.exp2(to_end)
            factor = tl.exp2(r)
            qs = (bq * q_factor).to(DOT)
            ks = (bk * k_factor).to(DOT)
            dS *= factor[:, None]
        else:
            qs = bq.to(DOT) if HEAD_GATED else (bq * scale).to(DOT)
            ks = bk.to(DOT)
        if HEAD_GATED:
            a, total = load_head_sums(g, steps, rows_left)
            late = decay(total - a)[:, None]
            early_do = (bdo.to(tl.float32) * (decay(a) * scale)[:, None]).to(DOT)
        else:
            early_do = bdo
        # Not dP transposed: Triton 3.4 to 3.7 miscompile a transposed accumulator as an operand on Hopper.
        dP = tl.dot(bdo, tl.trans(bv), input_precision=PRECISION)
        dPt = tl.dot(bv, tl.trans(bdo), input_precision=PRECISION)
        Pt = tl.dot(ks, tl.trans(qs), input_precision=PRECISION)
        if HEAD_GATED:
            dP *= decay_between(a[:, None], a[None, :]) * scale
            decays = decay_between(a[None, :], a[:, None]) * scale
            dPt *= decays
            Pt *= decays
        dP = tl.where(lower, dP, 0.0)
        dPt = tl.where(upper, dPt, 0.0)
        Pt = tl.where(upper, Pt, 0.0)
        dS_operand = dS.to(DOT)
        if HEAD_GATED:
            bdv = tl.dot(ks, dS_operand, input_precision=PRECISION) * late
            bdv = tl.dot(Pt.to(DOT), bdo, bdv, input_precision=PRECISION)
        else:
            bdv = tl.dot(Pt.to(DOT), bdo, input_precision=PRECISION)
            bdv = tl.dot(ks, dS_operand, bdv, input_precision=PRECISION)
        store_tile(dv, bdv, steps, vcols, H * blocks_k * V, rows_left, V)
        bdq = tl.dot(dP.to(DOT), ks, input_precision=PRECISION)
        bdq = tl.dot(early_do, tl.trans(S_operand), bdq, input_precision=PRECISION)
        if HEAD_GATED:
            dS *= decay(total)
            g -= C
        # Not last: Triton lays out all products like the last one, and the state's layout makes other GPUs spill.
        dS = tl.dot(tl.trans(qs), early_do, dS, input_precision=PRECISION)
        bdk = tl.dot(bv, tl.trans(dS_operand), input_precision=PRECISION)
        if HEAD_GATED:
            bdk *= late
        bdk = tl.dot(dPt.to(DOT), qs, bdk, input_precision=PRECISION)
        if STORE_DG:
            balance = ks.to(tl.float32) * bdk - qs.to(tl.float32) * bdq
            boundary = S_operand.to(tl.float32) * dS
            if HEAD_GATED:
                sent = tl.sum(balance, axis=1)
                before = tl.cumsum(sent, axis=0) - sent
                at = dg + steps.to(tl.int64) * H * (blocks_k * blocks_v)
                bdg = (before + tl.sum(tl.ravel(boundary, can_reorder=True), axis=0)).to(dg.dtype.element_ty)
                tl.store(at, bdg, mask=steps < rows_left)
                dg -= C * H * (blocks_k * blocks_v)
            else:
                bdg = select_sum(steps[:, None] > steps[None, :], balance, 2, DOT)
                bdg += tl.sum(boundary, axis=1)[None, :]
                store_tile(dg, bdg, steps, kcols, grad_stride, rows_left, K)
                dg -= C * grad_stride
        if GATED:
            bdq *= q_factor
            bdk *= k_factor
            dS *= factor[:, None]
            suspect += (tl.sum(bdq, axis=1) + tl.sum(bdk, axis=1)) * 0.0
            g -= C * g_t
        elif not HEAD_GATED:
            bdq *= scale
        store_tile(dq, bdq, steps, kcols, grad_stride, rows_left, K)
        store_tile(dk, bdk, steps, kcols, grad_stride, rows_left, K)
        q -= C * q_t
        k -= C * k_t
        v -= C * v_t
        do -= C * do_t
        dq -= C * grad_stride
        dk -= C * grad_stride
        dv -= C * H * blocks_k * V
        states -= H * K * V
        rows_left = C
    store_tile(dinitial + nh.to(tl.int64) * K * V, dS, kcols, vcols, V, K, V)
    if GATED:
        # Infinity times 0 is NaN, which stays NaN in every sum and fails every comparison.
        finite = (tl.sum(suspect, axis=0) + tl.sum(tl.sum(dS * 0.0, axis=1), axis=0)) == 0.0
        if not finite:
            tl.store(failed + nh, 1)
