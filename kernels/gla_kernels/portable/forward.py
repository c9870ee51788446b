# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Forward kernel of the plain form, in Triton: one pass over a sequence, chunk by chunk, with the state kept on chip.

    S_t = diag(exp g_t) S_{t-1} + k_t^T v_t,    o_t = scale * q_t S_t

The plain form computes a chunk from scaled operands. With a_i the gates up to token i of the chunk and b_j those after
token j (sums per key channel, in log2, both at most 0), their total a_last, and a reference r:

    Q~ = scale q 2^(a - r),   K~ = k 2^(b - r),   r = max(a_last, -limit) / 2
    O  = Q~ S~ + tril(Q~ K~^T) V,        S~ = 2^r S,    S~' = S~ + K~^T V,    S' = 2^r S~'

Q~ and K~ are q and k "in the chunk's frame", and S~ and S~' the states before and after the chunk. No operand is scaled
by more than 2^(limit / 2).

A channel is mild in this chunk if |a_last| is at most the limit (`span_limit`). Then a_i + b_j - 2r = a_i - a_j, and
nothing is approximated but gates below LEAST_GATE, of which few leave a chunk mild. In a strong channel, what passes
between the state and a token is right too, and the state that passes through the whole chunk is 2^-limit of what it
was, in place of still less. But what passes from token to token is too small by the factor 2^(a_last + limit). So a
chunk with a strong channel is marked, and `strong.py` adds what is missing.

The scaled operands, and what is computed from them, may be beyond their dtype's range. If a result of a head of a
sequence is not finite, its flag is raised, and the kernel of `exact.py` computes the head again.

With one gate per head (HEAD_GATED), a decay is a number per row or per pair of tokens, no exponent is above 0, and
there is no frame, mark or flag:

    O  = scale (2^a Q S + (tril(Q K^T) o D) V),    D_ij = 2^(a_i - a_j),    S' = 2^a_last S + K^T 2^(a_last - a) V

Symbols: docs/kernels.md. There are no variants without initial or final states: see `backward.py`.
"""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import (
    checkpoint_slot,
    decay,
    decay_between,
    first_slot,
    gate_frame,
    load_head_sums,
    load_tile,
    locate,
    span_limit,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "H", "first_chunk", "count", "checkpoint_chunks"])
def gla_forward_kernel(
    q,  # [B, T, H, K], any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K], natural log, <= 0; if HEAD_GATED, [B, H, T]: sums of gates since the chunk's start, in log2
    o,  # [B, T, H, blocks_k, V], contiguous: one part per block of key columns
    initial,  # [N, H, K, V] float32: the states before the first chunk; checkpoints if FROM_CHECKPOINT
    final,  # [N, H, K, V] float32: the states after the last chunk
    states,  # [slots (`first_slot`), H, K, V] in DOT: S~ of each chunk
    checkpoints,  # [slots, H, K, V] float32: the state before every `checkpoint_chunks`-th chunk
    flags,  # [N, H] int32, zeros: set to 1 if a result is not finite
    marks,  # [slots, H] int32, zeros: set to n + 1 if the chunk, of sequence n, has a strong channel
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T,
    H,
    first_chunk,  # of each sequence to process: 0, or a multiple of `checkpoint_chunks` if FROM_CHECKPOINT
    count,  # the most chunks of a sequence to process
    checkpoint_chunks,  # chunks from one checkpoint to the next
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,  # key columns of a program
    BV: tl.constexpr,  # value columns of a program
    C: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the products' operands
    PRECISION: tl.constexpr,  # how float32 operands are multiplied
    GATED: tl.constexpr,  # by a gate per channel
    HEAD_GATED: tl.constexpr,
    VARLEN: tl.constexpr,  # whether sequences are packed
    FROM_CHECKPOINT: tl.constexpr,  # recompute `states` for `count` chunks; without STORE_O
    STORE_O: tl.constexpr,
    STORE_STATES: tl.constexpr,
    STORE_CHECKPOINTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program handles BK key and BV value columns of one sequence and head, for `count` chunks from `first_chunk` on.

    What a block of key columns adds to o depends on no other block.
    """
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    # Neighbouring programs read the same q, k and g, so that all but the first find them in L2.
    iv = pid % blocks_v
    ik = pid // blocks_v % blocks_k
    n = pid // (blocks_v * blocks_k) // H
    h = pid // (blocks_v * blocks_k) % H
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    chunks = tl.minimum((length + C - 1) // C - first_chunk, count)
    rows_left = length - first_chunk * C
    b = b.to(tl.int64) if not VARLEN else b
    t = (begin + first_chunk * C).to(tl.int64)
    q += b * q_b + t * q_t + h.to(tl.int64) * q_h
    k += b * k_b + t * k_t + h.to(tl.int64) * k_h
    v += b * v_b + t * v_t + h.to(tl.int64) * v_h
    if GATED:
        g += b * g_b + t * g_t + h.to(tl.int64) * g_h
    if HEAD_GATED:
        g += (tl.cast(b, tl.int64) * H + h) * T + t
    if STORE_O:
        o += (((b * T + t) * H + h) * blocks_k + ik) * V
    if STORE_STATES:
        slot = n * count if FROM_CHECKPOINT else first_slot(n, begin, length, C, VARLEN)
        states += (slot.to(tl.int64) * H + h) * K * V
    if STORE_O:
        marks += first_slot(n, begin, length, C, VARLEN) * H + h
    checkpoint = checkpoint_slot(n, begin, length, first_chunk, checkpoint_chunks, C, VARLEN)
    kcols = ik * BK + tl.arange(0, BK)
    vcols = iv * BV + tl.arange(0, BV)
    steps = tl.arange(0, C)
    at = checkpoint if FROM_CHECKPOINT else n
    S = load_tile(initial + (at.to(tl.int64) * H + h) * K * V, kcols, vcols, V, K, V).to(tl.float32)
    suspect = tl.zeros([C], dtype=tl.float32)  # NaN where a result was not finite
    for i in tl.range(0, chunks, num_stages=STAGES):
        bq = load_tile(q, steps, kcols, q_t, rows_left, K).to(tl.float32) * scale
        bk = load_tile(k, steps, kcols, k_t, rows_left, K)
        bv = load_tile(v, steps, vcols, v_t, rows_left, V).to(DOT)
        if STORE_CHECKPOINTS:
            there = checkpoints + ((checkpoint + i // checkpoint_chunks).to(tl.int64) * H + h) * K * V
            due = (i % checkpoint_chunks == 0) & (kcols[:, None] < K) & (vcols[None, :] < V)
            tl.store(there + kcols[:, None] * V + vcols[None, :], S, mask=due)
        if GATED:
            to_row, to_end, r, total = gate_frame(load_tile(g, steps, kcols, g_t, rows_left, K), steps, DOT)
            qs = (bq * tl.exp2(to_row)).to(DOT)
            ks = (bk.to(tl.float32) * tl.exp2(to_end)).to(DOT)
            factor = tl.exp2(r)
            S *= factor[:, None]  # S~ from here on
            if STORE_O:
                # Programs of other blocks of columns may store the same number.
                tl.store(marks + i * H, n + 1, mask=tl.min(total, axis=0) < -span_limit(DOT))
        else:
            qs = bq.to(DOT)
            ks = bk.to(DOT)
        if HEAD_GATED:
            a, total = load_head_sums(g, steps, rows_left)
            late_v = (bv.to(tl.float32) * decay(total - a)[:, None]).to(DOT)
        else:
            late_v = bv
        S_operand = S.to(DOT)
        if STORE_STATES:
            store_tile(states, S_operand, kcols, vcols, V, K, V)
            states += H * K * V
        if STORE_O:
            P = tl.dot(qs, tl.trans(ks), input_precision=PRECISION)
            if HEAD_GATED:
                P *= decay_between(a[:, None], a[None, :])
            # Entries above the diagonal may be inf, so they are replaced, not multiplied by 0.
            P = tl.where(steps[:, None] >= steps[None, :], P, 0.0).to(DOT)
            bo = tl.dot(qs, S_operand, input_precision=PRECISION)
            if HEAD_GATED:
                bo *= decay(a)[:, None]
            bo = tl.dot(P, bv, bo, input_precision=PRECISION)
            suspect += tl.sum(bo, axis=1) * 0.0
            store_tile(o, bo, steps, vcols, H * blocks_k * V, rows_left, V)
            o += C * H * blocks_k * V
        if HEAD_GATED:
            S *= decay(total)
            g += C
        S = tl.dot(tl.trans(ks), late_v, S, input_precision=PRECISION)  # S~'
        if GATED:
            S *= factor[:, None]  # S'
            g += C * g_t
        q += C * q_t
        k += C * k_t
        v += C * v_t
        rows_left -= C
    store_tile(final + (n.to(tl.int64) * H + h) * K * V, S, kcols, vcols, V, K, V)
    if GATED and STORE_O:
        # Infinity times 0 is NaN, which stays NaN in every sum and fails every comparison.
        finite = (tl.sum(suspect, axis=0) + tl.sum(tl.sum(S * 0.0, axis=1), axis=0)) == 0.0
        if not finite:
            tl.store(flags + n * H + h, 1)
