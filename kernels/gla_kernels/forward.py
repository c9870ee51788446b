"""Forward kernel: one pass over a sequence, chunk by chunk, the state kept on chip.

    S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,    o_t = scale * q_t S_t

Plain form, with r the middle of the chunk's cumulative gate G (per key channel, log2, whole number):

    Q~ = scale q 2^(G - r),   K~ = k 2^(r - G)
    O  = Q~ (2^r S) + tril(Q~ K~^T) V,        S' = 2^(G_last - r) ((2^r S) + K~^T V)

It holds while |G_last| stays below SPAN_LIMIT. A sequence with a chunk beyond that raises its flag, and the same
kernel with EXACT, launched after it in the stream, does the flagged sequences again with a tree of references.
"""

import triton
import triton.language as tl

from gla_kernels.tiles import exact_gates, gate_frame, load_tile, select_sum, store_tile, tree_level

# log2; half of it is the largest exponent of a scaled operand, far from bfloat16's and float32's 127.
SPAN_LIMIT = tl.constexpr(120.0)


@triton.jit
def exact_scores(q, k, step_gates, steps, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """tril(q k^T with every pair's own decay), (C, C) float32, for any gates; q (scaled) and k are (C, BK) float32."""
    own = tl.sum(q * k, axis=1)
    scores = tl.where(steps[:, None] == steps[None, :], own[:, None], 0.0)
    size = 1
    while size < C:
        factor, late, pairs = tree_level(step_gates, steps, size, DOT)
        ql = tl.where(late[:, None], q * factor, 0.0).to(DOT)
        kl = tl.where(late[:, None], 0.0, k * factor).to(DOT)
        product = tl.dot(ql, tl.trans(kl), input_precision=PRECISION)
        scores += tl.where(pairs, product, 0.0)
        size *= 2
    return scores


@triton.jit(do_not_specialize=["t_begin", "t_end", "T", "H", "chunks", "every"])
def gla_forward_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K], natural log, <= 0
    o,  # [B, T, H, V]
    initial,  # [B, H, K, V] float32: the state before t_begin
    final,  # [B, H, K, V] float32: the state after t_end
    states,  # [B * H, chunks, K, V] in DOT: the state before each chunk, in that chunk's frame
    checkpoints,  # [segments, B * H, K, V] float32: the state before every `every`-th chunk
    flags,  # [B * H] int32: 1 where the plain form does not hold
    scale,
    t_begin,
    t_end,
    T,
    H,
    heads,  # B * H
    chunks,
    every,
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
    HAS_INITIAL: tl.constexpr,
    STORE_O: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    STORE_STATES: tl.constexpr,
    STORE_CHECKPOINTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program does one block of BV value columns of one (batch, head), from t_begin to t_end."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    # Neighbouring programs share q, k and g, which they then find in L2.
    iv = pid % blocks_v
    bh = (pid // blocks_v).to(tl.int64)
    if EXACT:
        if tl.load(flags + bh) == 0:
            return
    first = (bh // H * T + t_begin) * H + bh % H
    q += first * K
    k += first * K
    v += first * V
    if GATED:
        g += first * K
    if STORE_O:
        o += first * V
    kcols = tl.arange(0, BK)
    vcols = iv * BV + tl.arange(0, BV)
    steps = tl.arange(0, C)
    if HAS_INITIAL:
        S = load_tile(initial + bh * K * V, kcols, vcols, V, K, V, MASKED).to(tl.float32)
    else:
        S = tl.zeros([BK, BV], dtype=tl.float32)
    widest = tl.zeros([BK], dtype=tl.float32)
    rows_left = t_end - t_begin
    for i in tl.range(0, chunks, num_stages=STAGES):
        bq = load_tile(q, steps, kcols, H * K, rows_left, K, MASKED).to(tl.float32) * scale
        bk = load_tile(k, steps, kcols, H * K, rows_left, K, MASKED)
        bv = load_tile(v, steps, vcols, H * V, rows_left, V, MASKED).to(DOT)
        if STORE_CHECKPOINTS:
            at = checkpoints + ((i // every) * heads + bh) * K * V
            offsets = kcols[:, None] * V + vcols[None, :]
            due = (i % every == 0) & (kcols[:, None] < K) & (vcols[None, :] < V)
            tl.store(at + offsets, S, mask=due)
        if EXACT:
            step_gates = exact_gates(load_tile(g, steps, kcols, H * K, rows_left, K, MASKED))
            since_start = select_sum(steps[:, None] >= steps[None, :], step_gates, 3, DOT)
            until_end = select_sum(steps[:, None] < steps[None, :], step_gates, 3, DOT)
            bk = bk.to(tl.float32)
            qs = (bq * tl.exp2(since_start)).to(DOT)
            ks = (bk * tl.exp2(until_end)).to(DOT)
            Sd = S.to(DOT)
            scores = exact_scores(bq, bk, step_gates, steps, C, DOT, PRECISION).to(DOT)
            S *= tl.exp2(tl.sum(step_gates, axis=0))[:, None]
        else:
            if GATED:
                bg = load_tile(g, steps, kcols, H * K, rows_left, K, MASKED)
                G, G_last, r = gate_frame(bg, steps, DOT)
                widest = tl.maximum(widest, tl.abs(G_last))
                qs = (bq * tl.exp2(G - r[None, :])).to(DOT)
                ks = (bk.to(tl.float32) * tl.exp2(r[None, :] - G)).to(DOT)
                S *= tl.exp2(r)[:, None]
            else:
                qs = bq.to(DOT)
                ks = bk.to(DOT)
            Sd = S.to(DOT)
            product = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
            # The entries above the diagonal may be inf: chosen away, never multiplied.
            scores = tl.where(steps[:, None] >= steps[None, :], product, 0.0).to(DOT)
        if STORE_STATES:
            store_tile(states + (bh * chunks + i) * K * V, Sd, kcols, vcols, V, K, V, MASKED)
        if STORE_O:
            bo = tl.dot(qs, Sd, input_precision=PRECISION)
            bo = tl.dot(scores, bv, bo, input_precision=PRECISION)
            store_tile(o, bo, steps, vcols, H * V, rows_left, V, MASKED)
        S = tl.dot(tl.trans(ks), bv, S, input_precision=PRECISION)
        if GATED and not EXACT:
            S *= tl.exp2(G_last - r)[:, None]
        q += C * H * K
        k += C * H * K
        v += C * H * V
        if GATED:
            g += C * H * K
        if STORE_O:
            o += C * H * V
        rows_left -= C
    if STORE_FINAL:
        store_tile(final + bh * K * V, S, kcols, vcols, V, K, V, MASKED)
    if GATED and not EXACT:
        # A NaN may raise no flag (a GPU's maximum drops it); it shows in the outputs of either form.
        if tl.max(widest, axis=0) > SPAN_LIMIT:
            tl.store(flags + bh, 1)
