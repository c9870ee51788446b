# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Exact forward, for heads with values that are too large for the plain form's scaled operands.

The exact kernels are launched after every plain kernel, and a program returns at once if none of its flags is raised.
They work on subchunks of R rows and never use the inverse of a decay: a tree of references (`tree.py`) gives every
pair's decay as two factors of at most 1, and decays between the state and a token come from sums of just the gates
between them. -inf is a reset.

A block of BK key columns depends on no other: it gives a part of o and dv of its own, as in the plain form. States are
stored before every chunk of C rows, as in the plain form, but not in the chunk's frame. The code is written for
clarity, not speed.
"""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import (
    checkpoint_slot,
    exact_gates,
    first_slot,
    load_tile,
    locate,
    select_sum,
    store_tile,
    wait_for_previous_kernel,
    zero_state,
)
from gla_kernels.portable.tree import own_scores, tree_scores

# Key columns per block when the scores of a subchunk are computed.
SCORE_KEYS = tl.constexpr(64)
# Flags that a program reads at a time.
FLAGS_AT_ONCE = tl.constexpr(32)


@triton.jit
def exact_scores(q, k, g, scale, q_t, k_t, g_t, first, steps, rows_left, K: tl.constexpr, BK: tl.constexpr,
                 TRANSPOSED: tl.constexpr, R: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """tril(scale q k^T with the decay of every pair) or its transpose, (R, R) float32, for any gates.

    Of BK keys from `first` on. q, k and g point to the subchunk's first row. They are read again, a few keys at a time:
    in a product this small every warp holds both operands in full, and with 256 keys these alone exceed its registers.
    """
    block: tl.constexpr = min(BK, SCORE_KEYS)
    # Not constant zeros: with those LLVM made holes in the mask of the diagonal (`ptx.py`).
    scores = zero_state(scale, R, R)
    for column in range(0, min(BK, K), block):
        cols = first + column + tl.arange(0, block)
        bq = load_tile(q, steps, cols, q_t, rows_left, K).to(tl.float32) * scale
        bk = load_tile(k, steps, cols, k_t, rows_left, K).to(tl.float32)
        step_gates = exact_gates(load_tile(g, steps, cols, g_t, rows_left, K))
        scores = own_scores(scores, bq, bk, steps)
        scores = tree_scores(scores, bq, bk, step_gates, steps, 1, R, TRANSPOSED, 3, DOT, PRECISION)
    return scores


@triton.jit
def advance(S, k, v, step_gates, steps, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The state [BK, BV] after a subchunk: S is decayed by all of its gates, each key by the gates after it."""
    until_end = select_sum(steps[:, None] < steps[None, :], step_gates, 3, DOT)
    ks = (k * tl.exp2(until_end)).to(DOT)
    S *= tl.exp2(tl.sum(step_gates, axis=0))[:, None]
    return tl.dot(tl.trans(ks), v, S, input_precision=PRECISION)


@triton.jit
def items_here(items):
    """How many of `items` items this program handles."""
    return tl.cdiv(items - tl.program_id(0), tl.num_programs(0))


@triton.jit
def any_raised(flags, items, PER_FLAG: tl.constexpr):
    """Whether the flag of any of this program's items is raised; PER_FLAG consecutive items share a flag."""
    programs = tl.num_programs(0)
    raised = tl.zeros([FLAGS_AT_ONCE], dtype=tl.int32)
    for i in range(0, tl.cdiv(items, FLAGS_AT_ONCE * programs)):
        mine = tl.program_id(0) + (i * FLAGS_AT_ONCE + tl.arange(0, FLAGS_AT_ONCE)) * programs
        raised = tl.maximum(raised, tl.load(flags + mine // PER_FLAG, mask=mine < items, other=0))
    return tl.max(raised, axis=0) != 0


@triton.jit
def exact_forward_row(
    nh, ik, iv, q, k, v, g, o, initial, final, states, checkpoints, cu_seqlens, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T, H, first_chunk, count, checkpoint_chunks,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    FROM_CHECKPOINT: tl.constexpr,
    STORE_O: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    STORE_STATES: tl.constexpr,
    STORE_CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """The forward of block ik of key and iv of value columns of a sequence and head, `count` chunks from `first_chunk`.

    FROM_CHECKPOINT: `initial` holds checkpoints, and `states` has room for this head's `count` states alone.
    """
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    ratio: tl.constexpr = C // R
    n = nh // H
    h = nh % H
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    rows_left = length - first_chunk * C
    subchunks = (tl.minimum(rows_left, count * C) + R - 1) // R
    b = b.to(tl.int64) if not VARLEN else b
    t = tl.cast(begin + first_chunk * C, tl.int64)
    q += b * q_b + t * q_t + h.to(tl.int64) * q_h
    k += b * k_b + t * k_t + h.to(tl.int64) * k_h
    v += b * v_b + t * v_t + h.to(tl.int64) * v_h
    g += b * g_b + t * g_t + h.to(tl.int64) * g_h
    if STORE_O:
        o += (((b * T + t) * H + h) * blocks_k + ik) * V
    if STORE_STATES and not FROM_CHECKPOINT:
        states += (first_slot(n, begin, length, C, VARLEN).to(tl.int64) * H + h) * K * V
    state_step = K * V if FROM_CHECKPOINT else H.to(tl.int64) * K * V
    checkpoint = checkpoint_slot(n, begin, length, first_chunk, checkpoint_chunks, C, VARLEN)
    kcols = ik * BK + tl.arange(0, BK)
    vcols = iv * BV + tl.arange(0, BV)
    steps = tl.arange(0, R)
    inside = (kcols[:, None] < K) & (vcols[None, :] < V)
    state_at = kcols[:, None] * V + vcols[None, :]
    if HAS_INITIAL:
        at = checkpoint if FROM_CHECKPOINT else n
        S = load_tile(initial + (at.to(tl.int64) * H + h) * K * V, kcols, vcols, V, K, V).to(tl.float32)
    else:
        S = zero_state(scale, BK, BV)
    for i in range(0, subchunks):
        bk = load_tile(k, steps, kcols, k_t, rows_left, K).to(tl.float32)
        bv = load_tile(v, steps, vcols, v_t, rows_left, V).to(DOT)
        step_gates = exact_gates(load_tile(g, steps, kcols, g_t, rows_left, K))
        if STORE_CHECKPOINTS:
            there = checkpoints + ((checkpoint + i // (checkpoint_chunks * ratio)).to(tl.int64) * H + h) * K * V
            tl.store(there + state_at, S, mask=inside & (i % (checkpoint_chunks * ratio) == 0))
        if STORE_STATES:
            there = states + (i // ratio) * state_step
            tl.store(there + state_at, S.to(DOT), mask=inside & (i % ratio == 0))
        if STORE_O:
            bq = load_tile(q, steps, kcols, q_t, rows_left, K).to(tl.float32) * scale
            since_start = select_sum(steps[:, None] >= steps[None, :], step_gates, 3, DOT)
            scores = exact_scores(
                q, k, g, scale, q_t, k_t, g_t, ik * BK, steps, rows_left, K, BK, False, R, DOT, PRECISION
            ).to(DOT)  # fmt: skip
            bo = tl.dot((bq * tl.exp2(since_start)).to(DOT), S.to(DOT), input_precision=PRECISION)
            bo = tl.dot(scores, bv, bo, input_precision=PRECISION)
            store_tile(o, bo, steps, vcols, H * blocks_k * V, rows_left, V)
            o += R * H * blocks_k * V
        S = advance(S, bk, bv, step_gates, steps, DOT, PRECISION)
        q += R * q_t
        k += R * k_t
        v += R * v_t
        g += R * g_t
        rows_left -= R
    if STORE_FINAL:
        store_tile(final + (n.to(tl.int64) * H + h) * K * V, S, kcols, vcols, V, K, V)


@triton.jit(do_not_specialize=["T", "H", "checkpoint_chunks", "rows"])
def gla_forward_exact(
    q, k, v, g, o, initial, final, states, checkpoints, flags, cu_seqlens, scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T, H, checkpoint_chunks, rows,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_O: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    STORE_STATES: tl.constexpr,
    STORE_CHECKPOINTS: tl.constexpr,
):  # fmt: skip
    """`gla_forward_kernel` for those of the `rows` sequences and heads whose flag is raised; R is rows of a subchunk.

    An item is a block of key and of value columns of a sequence and head. A program handles every num_programs-th item.
    Most calls have no flag raised, so there are no more programs than a GPU runs at once.
    """
    wait_for_previous_kernel(PDL)
    blocks_k: tl.constexpr = (K + BK - 1) // BK
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    items = rows * blocks_k * blocks_v
    if any_raised(flags, items, blocks_k * blocks_v):
        for i in range(0, items_here(items)):
            item = tl.program_id(0) + i * tl.num_programs(0)
            nh = item // (blocks_k * blocks_v)
            if tl.load(flags + nh) != 0:
                exact_forward_row(
                    nh, item // blocks_v % blocks_k, item % blocks_v, q, k, v, g, o, initial, final, states,
                    checkpoints, cu_seqlens, scale, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
                    T, H, 0, tl.cdiv(T, C), checkpoint_chunks, K, V, BK, BV, C, R, DOT, PRECISION,
                    VARLEN, HAS_INITIAL, False, STORE_O, STORE_FINAL, STORE_STATES, STORE_CHECKPOINTS,
                )  # fmt: skip
