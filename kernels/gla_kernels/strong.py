# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Kernels for chunks with strong gates: they add what the plain form leaves out, and nothing else is computed again.

With the names of `forward.py`: in a strong channel of a chunk, whose total gate a_last is beyond -SPAN_LIMIT, the plain
form has the score of every pair of tokens, but times 2^(a_last + SPAN_LIMIT). What is missing is the share

    w = 1 - 2^min(0, a_last + SPAN_LIMIT)         (0 in a mild channel, so a mark that is raised in vain does no harm)

of sum_k q_ik k_jk 2^(a_i - a_j), and it concerns the chunk's own tokens alone: neither a state nor another chunk. So
all marked chunks are repaired at the same time: the missing scores P are computed as if q were w q, and

    O += P V,    dV += P^T dO,    dq, dk and dg += what dP = tril(dO V^T) gives them.

The scores of tokens of different blocks of BLOCK rows are those of a tree of references (`tree.py`), without a positive
exponent. A block by itself is a chunk in small: its plain form misses a share only if its own total is beyond the
limit, and the tree's small levels, which are right for every gate, add that.
"""

import triton
import triton.language as tl

from gla_kernels.tiles import (
    SPAN_LIMIT,
    begin_behind,
    exact_gates,
    first_slot,
    frame_of,
    load_tile,
    locate,
    select_sum,
    store_tile,
    zero_state,
)
from gla_kernels.tree import own_scores, tree_gradients, tree_scores

# Rows of a block that is first treated as a chunk in small: the least that a product takes.
BLOCK = tl.constexpr(16)
# Marks that a program reads at a time.
MARKS_AT_ONCE = tl.constexpr(32)
# Bfloat16 parts of a sum of gates: an error of 2^-17 of gates of which those beyond 30 leave nothing.
PARTS_OF_GATES = tl.constexpr(2)


@triton.jit
def missing_share(total):
    """The share of a pair's score that the plain form leaves out, for a total gate in log2."""
    return 1.0 - tl.exp2(tl.minimum(total + SPAN_LIMIT, 0.0))


@triton.jit
def block_frame(step_gates, same_block, up_to_me, DOT: tl.constexpr):
    """Factors that take each row's q and k into the frame of its block, and the missing share; all (C, BK)."""
    to_row = select_sum(same_block & up_to_me, step_gates, PARTS_OF_GATES, DOT)
    to_end = select_sum(same_block & (up_to_me == 0), step_gates, PARTS_OF_GATES, DOT)
    total = to_row + to_end
    half = frame_of(total)
    return tl.exp2(to_row + half), tl.exp2(to_end + half), missing_share(total)


@triton.jit
def load_strong(q, k, g, scale, q_t, k_t, g_t, steps, cols, rows_left, K: tl.constexpr):
    """q scaled, k and gates (C, BK) of key columns `cols`, the missing share (BK), and whether any of it is not 0."""
    bq = load_tile(q, steps, cols, q_t, rows_left, K).to(tl.float32) * scale
    bk = load_tile(k, steps, cols, k_t, rows_left, K).to(tl.float32)
    step_gates = exact_gates(load_tile(g, steps, cols, g_t, rows_left, K))
    total = tl.sum(step_gates, axis=0)
    return bq, bk, step_gates, missing_share(total), tl.min(total, axis=0) < -SPAN_LIMIT


@triton.jit
def masks(steps):
    """(C, C): whether two tokens are of one block, and whether j <= i."""
    block = steps // BLOCK
    return block[:, None] == block[None, :], steps[None, :] <= steps[:, None]


@triton.jit
def marked_chunk(item, mark, H, cu, T, C: tl.constexpr, VARLEN: tl.constexpr):
    """Of item `item`, a slot and head, with mark n + 1: n, head, batch row and first token (64 bits), rows left."""
    n = mark - 1
    h = item % H
    b, begin, length = locate(cu, n, T, VARLEN)
    chunk = item // H - first_slot(n, begin, length, C, VARLEN)
    b = b.to(tl.int64) if not VARLEN else b
    return n, h, b, (begin + chunk * C).to(tl.int64), length - chunk * C


@triton.jit
def missing_scores(
    q, k, g, scale, q_t, k_t, g_t, rows_left, TRANSPOSED: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The missing scores (C, C) float32 of the chunk whose first row q, k and g point to, or their transpose."""
    steps = tl.arange(0, C)
    same_block, up_to_me = masks(steps)
    scores = zero_state(scale, C, C)
    for first in tl.range(0, K, BK):
        cols = first + tl.arange(0, BK)
        bq, bk, step_gates, share, strong = load_strong(q, k, g, scale, q_t, k_t, g_t, steps, cols, rows_left, K)
        if strong:
            bq *= share[None, :]
            if C > BLOCK:
                scores = tree_scores(
                    scores, bq, bk, step_gates, steps, BLOCK, C, TRANSPOSED, PARTS_OF_GATES, DOT, PRECISION
                )  # fmt: skip
                q_factor, k_factor, missing = block_frame(step_gates, same_block, up_to_me, DOT)
                ql = (bq * q_factor).to(DOT)
                kl = (bk * k_factor).to(DOT)
                if TRANSPOSED:
                    product = tl.dot(kl, tl.trans(ql), input_precision=PRECISION)
                    scores += tl.where(same_block & (steps[:, None] <= steps[None, :]), product, 0.0)
                else:
                    product = tl.dot(ql, tl.trans(kl), input_precision=PRECISION)
                    scores += tl.where(same_block & up_to_me, product, 0.0)
                bq *= missing
            if tl.max(tl.max(tl.abs(bq), axis=1), axis=0) > 0.0:
                scores = own_scores(scores, bq, bk, steps)
                scores = tree_scores(
                    scores, bq, bk, step_gates, steps, 1, BLOCK, TRANSPOSED, PARTS_OF_GATES, DOT, PRECISION
                )  # fmt: skip
    return scores.to(DOT)


@triton.jit
def add_product(
    out, scores, x, x_t, out_t, rows_left,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds scores @ x to the rows that `out` points to, block by block of value columns."""
    steps = tl.arange(0, C)
    for first in range(0, V, BV):
        cols = first + tl.arange(0, BV)
        bx = load_tile(x, steps, cols, x_t, rows_left, V).to(DOT)
        sums = load_tile(out, steps, cols, out_t, rows_left, V).to(tl.float32)
        sums = tl.dot(scores, bx, sums, input_precision=PRECISION)
        store_tile(out, sums, steps, cols, out_t, rows_left, V)


@triton.jit(do_not_specialize=["T", "H", "items"])
def gla_forward_strong(
    q,  # [B, T, H, K], any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K], natural log, <= 0
    o,  # [B, T, H, V], contiguous: the plain form's output, to be completed
    flags,  # [N, H] int32: sequences and heads that the exact kernel computes
    marks,  # [slots, H] int32: n + 1 if the chunk, of sequence n, has a strong channel
    cu,  # [N + 1] int32 or int64: boundaries of packed sequences
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h,
    T,
    H,
    items,  # slots times heads
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program looks at the marks of every num_programs-th item, a chunk and head, and repairs those that are raised.

    Each chunk is repaired by one program, so that the order of sums is always the same.
    """
    begin_behind(PDL)
    lanes = tl.arange(0, MARKS_AT_ONCE)
    programs = tl.num_programs(0)
    for i in tl.range(0, tl.cdiv(items, MARKS_AT_ONCE * programs)):
        here = tl.program_id(0) + (i * MARKS_AT_ONCE + lanes) * programs
        found = tl.load(marks + here, mask=here < items, other=0)
        if tl.max(found, axis=0) > 0:
            for j in tl.range(0, MARKS_AT_ONCE):
                mark = tl.sum(tl.where(lanes == j, found, 0), axis=0)
                if mark > 0:
                    item = tl.program_id(0) + (i * MARKS_AT_ONCE + j) * programs
                    n, h, b, t, rows_left = marked_chunk(item, mark, H, cu, T, C, VARLEN)
                    if tl.load(flags + n * H + h) == 0:
                        h_wide = h.to(tl.int64)
                        scores = missing_scores(
                            q + b * q_b + t * q_t + h_wide * q_h, k + b * k_b + t * k_t + h_wide * k_h,
                            g + b * g_b + t * g_t + h_wide * g_h, scale, q_t, k_t, g_t, rows_left,
                            False, K, BK, C, DOT, PRECISION,
                        )  # fmt: skip
                        add_product(
                            o + ((b * T + t) * H + h) * V, scores, v + b * v_b + t * v_t + h_wide * v_h, v_t, H * V,
                            rows_left, V, BV, C, DOT, PRECISION,
                        )  # fmt: skip


@triton.jit
def add_gradients(
    q, k, v, g, do, dq, dk, dg, scale, q_t, k_t, v_t, g_t, do_t, grad_t, rows_left,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the missing scores give dq, dk and dg of the chunk whose first row all pointers point to."""
    steps = tl.arange(0, C)
    same_block, up_to_me = masks(steps)
    dA = zero_state(scale, C, C)
    dAt = zero_state(scale, C, C)
    for first in range(0, V, BV):
        cols = first + tl.arange(0, BV)
        bv = load_tile(v, steps, cols, v_t, rows_left, V).to(DOT)
        bdo = load_tile(do, steps, cols, do_t, rows_left, V).to(DOT)
        dA = tl.dot(bdo, tl.trans(bv), dA, input_precision=PRECISION)
        dAt = tl.dot(bv, tl.trans(bdo), dAt, input_precision=PRECISION)
    # As operands, they take half of the registers.
    dA = dA.to(DOT)
    dAt = dAt.to(DOT)
    for first in tl.range(0, K, BK):
        cols = first + tl.arange(0, BK)
        bq, bk, step_gates, share, strong = load_strong(q, k, g, scale, q_t, k_t, g_t, steps, cols, rows_left, K)
        if strong:
            # All weights are on q. dk comes from q and has them; dq comes from k and gets them at the end.
            bq *= share[None, :]
            bdq = tl.zeros([C, BK], dtype=tl.float32)
            bdk = tl.zeros([C, BK], dtype=tl.float32)
            balance = tl.zeros([C, BK], dtype=tl.float32)
            missing = tl.zeros([C, BK], dtype=tl.float32) + 1.0
            if C > BLOCK:
                bdq, bdk, balance = tree_gradients(
                    bdq, bdk, balance, bq, bk, dA, dAt, step_gates, steps, BLOCK, C, PARTS_OF_GATES, DOT, PRECISION
                )  # fmt: skip
                q_factor, k_factor, missing = block_frame(step_gates, same_block, up_to_me, DOT)
                ql = (bq * q_factor).to(DOT)
                kl = (bk * k_factor).to(DOT)
                upper = same_block & (steps[:, None] <= steps[None, :])
                dql = tl.dot(tl.where(same_block & up_to_me, dA, 0.0).to(DOT), kl, input_precision=PRECISION)
                bdq += dql * q_factor
                balance -= ql.to(tl.float32) * dql
                dkl = tl.dot(tl.where(upper, dAt, 0.0).to(DOT), ql, input_precision=PRECISION)
                bdk += dkl * k_factor
                balance += kl.to(tl.float32) * dkl
                bq *= missing
            if tl.max(tl.max(missing, axis=1), axis=0) > 0.0:
                own_grad = tl.sum(tl.where(steps[:, None] == steps[None, :], dA, 0.0).to(tl.float32), axis=1)
                dq_small, bdk, balance = tree_gradients(
                    own_grad[:, None] * bk, bdk + own_grad[:, None] * bq, balance, bq, bk, dA, dAt, step_gates, steps,
                    1, BLOCK, PARTS_OF_GATES, DOT, PRECISION,
                )  # fmt: skip
                bdq += missing * dq_small
            bdq = bdq * (share * scale)[None, :] + load_tile(dq, steps, cols, grad_t, rows_left, K).to(tl.float32)
            store_tile(dq, bdq, steps, cols, grad_t, rows_left, K)
            bdk += load_tile(dk, steps, cols, grad_t, rows_left, K).to(tl.float32)
            store_tile(dk, bdk, steps, cols, grad_t, rows_left, K)
            bdg = select_sum(steps[:, None] > steps[None, :], balance, 2, DOT)
            bdg += load_tile(dg, steps, cols, grad_t, rows_left, K).to(tl.float32)
            store_tile(dg, bdg, steps, cols, grad_t, rows_left, K)


@triton.jit(do_not_specialize=["T", "H", "items"])
def gla_backward_strong(
    q, k, v, g,
    do,  # [B, T, H, V], any strides of B, T and H
    flags,  # [N, H] int32: sequences and heads that the exact kernel computes
    failed,  # [N, H] int32: the same
    marks,  # [slots, H] int32, as the forward raised them
    dq,  # [B, T, H, PARTS, K], contiguous: the plain form's gradients, to be completed in the first part
    dk,  # [B, T, H, PARTS, K]
    dv,  # [B, T, H, V]
    dg,  # [B, T, H, PARTS, K]
    cu,
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T, H, items,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The backward of `gla_forward_strong`, item by item as there."""
    begin_behind(PDL)
    lanes = tl.arange(0, MARKS_AT_ONCE)
    programs = tl.num_programs(0)
    for i in tl.range(0, tl.cdiv(items, MARKS_AT_ONCE * programs)):
        here = tl.program_id(0) + (i * MARKS_AT_ONCE + lanes) * programs
        found = tl.load(marks + here, mask=here < items, other=0)
        if tl.max(found, axis=0) > 0:
            for j in tl.range(0, MARKS_AT_ONCE):
                mark = tl.sum(tl.where(lanes == j, found, 0), axis=0)
                if mark > 0:
                    item = tl.program_id(0) + (i * MARKS_AT_ONCE + j) * programs
                    n, h, b, t, rows_left = marked_chunk(item, mark, H, cu, T, C, VARLEN)
                    if (tl.load(flags + n * H + h) == 0) & (tl.load(failed + n * H + h) == 0):
                        h_wide = h.to(tl.int64)
                        row = (b * T + t) * H + h
                        part = row * PARTS * K
                        q_at = q + b * q_b + t * q_t + h_wide * q_h
                        k_at = k + b * k_b + t * k_t + h_wide * k_h
                        g_at = g + b * g_b + t * g_t + h_wide * g_h
                        do_at = do + b * do_b + t * do_t + h_wide * do_h
                        scores_t = missing_scores(
                            q_at, k_at, g_at, scale, q_t, k_t, g_t, rows_left, True, K, BK, C, DOT, PRECISION
                        )  # fmt: skip
                        add_product(
                            dv + row * V, scores_t, do_at, do_t, H * V, rows_left, V, BV, C, DOT, PRECISION
                        )  # fmt: skip
                        add_gradients(
                            q_at, k_at, v + b * v_b + t * v_t + h_wide * v_h, g_at, do_at, dq + part, dk + part,
                            dg + part, scale, q_t, k_t, v_t, g_t, do_t, H * PARTS * K, rows_left,
                            K, V, BK, BV, C, DOT, PRECISION,
                        )  # fmt: skip
