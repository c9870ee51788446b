"""Forward kernel, plain form: one pass over a sequence, chunk by chunk, the state kept on chip.

    S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,    o_t = scale * q_t S_t

With G the chunk's cumulative gate (per key channel, log2) and r = G_last / 2 its middle:

    Q~ = scale q 2^(G - r),   K~ = k 2^(r - G)
    O  = Q~ (2^r S) + tril(Q~ K~^T) V,        S' = 2^r ((2^r S) + K~^T V)

It holds while |G_last| stays below SPAN_LIMIT and the scaled operands in their type's range. A sequence and head for
which it does not hold raises its flag, and `exact.py`'s kernel, launched after this one, does it again.

There are no variants without a state before or after, or for whole tiles: see `backward.py`.
"""

import triton
import triton.language as tl

from gla_kernels.tiles import checkpoint_slot, first_slot, gate_frame, load_tile, locate, store_tile

# log2; half of it is the largest exponent of a scaled operand, far from bfloat16's and float32's 127.
SPAN_LIMIT = tl.constexpr(120.0)


@triton.jit(do_not_specialize=["T", "H", "first", "count", "every"])
def gla_forward_kernel(
    q,  # [B, T, H, K], any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K], natural log, <= 0
    o,  # [B, T, H, V], contiguous
    initial,  # [N, H, K, V] float32: the states before the first chunk; a checkpoint's slots if FROM_CHECKPOINT
    final,  # [N, H, K, V] float32: the states after the last chunk
    states,  # [slots, H, K, V] in DOT: the state before each chunk, in that chunk's frame
    checkpoints,  # [slots, H, K, V] float32: the state before every `every`-th chunk
    flags,  # [N, H] int32, 0: 1 where the plain form does not hold
    cu,  # [N + 1] int32 or int64: where packed sequences begin and end
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T,
    H,
    first,  # the first chunk of a sequence to do
    count,  # and how many at most
    every,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    GATED: tl.constexpr,
    VARLEN: tl.constexpr,
    FROM_CHECKPOINT: tl.constexpr,
    STORE_O: tl.constexpr,
    STORE_STATES: tl.constexpr,
    STORE_CHECKPOINTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program does one block of BV value columns of one sequence and head, chunks first .. first + count."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    # Neighbouring programs share q, k and g, which they then find in L2.
    iv = pid % blocks_v
    n = pid // blocks_v // H
    h = pid // blocks_v % H
    b, begin, length = locate(cu, n, T, VARLEN)
    chunks = tl.minimum((length + C - 1) // C - first, count)
    rows_left = length - first * C
    b = b.to(tl.int64) if not VARLEN else b
    t = (begin + first * C).to(tl.int64)
    q += b * q_b + t * q_t + h.to(tl.int64) * q_h
    k += b * k_b + t * k_t + h.to(tl.int64) * k_h
    v += b * v_b + t * v_t + h.to(tl.int64) * v_h
    if GATED:
        g += b * g_b + t * g_t + h.to(tl.int64) * g_h
    if STORE_O:
        o += ((b * T + t) * H + h) * V
    if STORE_STATES:
        slot = n * count if FROM_CHECKPOINT else first_slot(n, begin, length, C, VARLEN)
        states += (slot.to(tl.int64) * H + h) * K * V
    checkpoint = checkpoint_slot(n, begin, length, first, every, C, VARLEN)
    kcols = tl.arange(0, BK)
    vcols = iv * BV + tl.arange(0, BV)
    steps = tl.arange(0, C)
    at = checkpoint if FROM_CHECKPOINT else n
    S = load_tile(initial + (at.to(tl.int64) * H + h) * K * V, kcols, vcols, V, K, V).to(tl.float32)
    widest = tl.zeros([BK], dtype=tl.float32)
    suspect = tl.zeros([C], dtype=tl.float32)
    for i in tl.range(0, chunks, num_stages=STAGES):
        bq = load_tile(q, steps, kcols, q_t, rows_left, K).to(tl.float32) * scale
        bk = load_tile(k, steps, kcols, k_t, rows_left, K)
        bv = load_tile(v, steps, vcols, v_t, rows_left, V).to(DOT)
        if STORE_CHECKPOINTS:
            there = checkpoints + ((checkpoint + i // every).to(tl.int64) * H + h) * K * V
            due = (i % every == 0) & (kcols[:, None] < K) & (vcols[None, :] < V)
            tl.store(there + kcols[:, None] * V + vcols[None, :], S, mask=due)
        if GATED:
            G, G_last = gate_frame(load_tile(g, steps, kcols, g_t, rows_left, K), steps, DOT)
            widest = tl.maximum(widest, -G_last)
            qs = (bq * tl.exp2(G)).to(DOT)
            ks = (bk.to(tl.float32) * tl.exp2(-G)).to(DOT)
            half = tl.exp2(0.5 * G_last)
            S *= half[:, None]
        else:
            qs = bq.to(DOT)
            ks = bk.to(DOT)
        Sd = S.to(DOT)
        if STORE_STATES:
            store_tile(states, Sd, kcols, vcols, V, K, V)
            states += H * K * V
        if STORE_O:
            product = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
            # The entries above the diagonal may be inf: chosen away, never multiplied.
            scores = tl.where(steps[:, None] >= steps[None, :], product, 0.0).to(DOT)
            bo = tl.dot(qs, Sd, input_precision=PRECISION)
            bo = tl.dot(scores, bv, bo, input_precision=PRECISION)
            suspect += tl.sum(bo, axis=1) * 0.0
            store_tile(o, bo, steps, vcols, H * V, rows_left, V)
            o += C * H * V
        S = tl.dot(tl.trans(ks), bv, S, input_precision=PRECISION)
        if GATED:
            S *= half[:, None]
            g += C * g_t
        q += C * q_t
        k += C * k_t
        v += C * v_t
        rows_left -= C
    store_tile(final + (n.to(tl.int64) * H + h) * K * V, S, kcols, vcols, V, K, V)
    if GATED and STORE_O:
        # Infinity times 0 is NaN, which no sum loses and no comparison holds for.
        finite = (tl.sum(suspect, axis=0) + tl.sum(tl.sum(S * 0.0, axis=1), axis=0)) == 0.0
        plain = finite & (tl.max(widest, axis=0) <= SPAN_LIMIT)
        if not plain:
            tl.store(flags + n * H + h, 1)
