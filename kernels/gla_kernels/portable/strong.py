# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Kernels for chunks with strong gates: they add what the plain form leaves out, and nothing else is computed again.

With the names of `forward.py`: in a strong channel of a chunk, whose total gate a_last is beyond -limit (`span_limit`),
the plain form has the score of every pair of tokens, but times 2^(a_last + limit). What is missing is the share

    w = 1 - 2^min(0, a_last + limit)         (0 in a mild channel, so a mark that is raised in vain does no harm)

of sum_k q_ik k_jk 2^(a_i - a_j), and it concerns the chunk's own tokens alone: neither a state nor another chunk. So
all marked chunks are repaired at the same time: the missing scores P are computed as if q were w q, and

    O += P V,    dV += P^T dO,    dq, dk and dg += what dP = tril(dO V^T) gives them.

The scores are those of a tree of references, without positive exponents; see `tree.py`, whose `pair_tile` also makes
one product a level enough for P, and one for dq and dk together.
"""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import (
    first_slot,
    load_tile,
    locate,
    plain_gates,
    span_limit,
    store_tile,
    wait_for_previous_kernel,
    zero_state,
)
from gla_kernels.portable.tree import at_level, pair_tile

# Marks that a program reads at a time.
MARKS_AT_ONCE = tl.constexpr(64)


@triton.jit
def load_strong(q, k, g, scale, q_t, k_t, g_t, steps, cols, rows_left, K: tl.constexpr, DOT: tl.constexpr):
    """q times the missing share and the scale, k and gates (C, BK) of key columns `cols`, and that factor of q (BK)."""
    gates = plain_gates(load_tile(g, steps, cols, g_t, rows_left, K))
    weight = (1.0 - tl.exp2(tl.minimum(tl.sum(gates, axis=0) + span_limit(DOT), 0.0))) * scale
    bq = load_tile(q, steps, cols, q_t, rows_left, K).to(tl.float32) * weight[None, :]
    return bq, load_tile(k, steps, cols, k_t, rows_left, K).to(tl.float32), gates, weight


@triton.jit
def missing_scores(
    q, k, g, scale, q_t, k_t, g_t, rows_left, TRANSPOSED: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The missing scores (C, C) of the chunk whose first row q, k and g point to, or their transpose."""
    steps = tl.arange(0, C)
    pairs = zero_state(scale, C, C)  # the scores and, above the diagonal, their mirror image
    for column in tl.range(0, K, BK):
        cols = column + tl.arange(0, BK)
        bq, bk, gates, weight = load_strong(q, k, g, scale, q_t, k_t, g_t, steps, cols, rows_left, K, DOT)
        if tl.max(tl.abs(weight), axis=0) > 0.0:
            pairs += tl.where(steps[:, None] == steps[None, :], tl.sum(bq * bk, axis=1)[:, None], 0.0)
            size = 1
            while size < C:
                tile, _, _ = pair_tile(bq, bk, gates, steps, size, DOT)
                product = tl.dot(tile, tl.trans(tile), input_precision=PRECISION)
                pairs += tl.where(at_level(steps, size), product, 0.0)
                size *= 2
    if TRANSPOSED:
        scores = tl.where(steps[:, None] <= steps[None, :], pairs, 0.0)
    else:
        scores = tl.where(steps[:, None] >= steps[None, :], pairs, 0.0)
    return scores.to(DOT)


@triton.jit
def add_product(
    out, scores, x, x_t, out_t, rows_left,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds scores @ x to the rows that `out` points to, block by block of value columns."""
    steps = tl.arange(0, C)
    for column in range(0, V, BV):
        cols = column + tl.arange(0, BV)
        bx = load_tile(x, steps, cols, x_t, rows_left, V).to(DOT)
        sums = load_tile(out, steps, cols, out_t, rows_left, V).to(tl.float32)
        sums += tl.dot(scores, bx, input_precision=PRECISION)
        store_tile(out, sums, steps, cols, out_t, rows_left, V)


@triton.jit
def marks_of(marks, i, items, lanes, PER_MARK: tl.constexpr):
    """The marks of the i-th MARKS_AT_ONCE items of this program; PER_MARK consecutive items share a mark."""
    here = tl.program_id(0) + (i * MARKS_AT_ONCE + lanes) * tl.num_programs(0)
    return tl.load(marks + here // PER_MARK, mask=here < items, other=0)


@triton.jit
def first_raised(found, lanes):
    """The first lane whose mark is raised; MARKS_AT_ONCE if there is none."""
    return tl.min(tl.where(found > 0, lanes, MARKS_AT_ONCE), axis=0)


@triton.jit
def marked_chunk(chunk_head, mark, H, cu_seqlens, T, C: tl.constexpr, VARLEN: tl.constexpr):
    """n, head, batch row, first token and rows left of a chunk and head with mark n + 1, `chunk_head` among all marks.

    The batch row and the token have 64 bits.
    """
    n = mark - 1
    h = chunk_head % H
    b, begin, length = locate(cu_seqlens, n, T, VARLEN)
    chunk = chunk_head // H - first_slot(n, begin, length, C, VARLEN)
    b = b.to(tl.int64) if not VARLEN else b
    return n, h, b, (begin + chunk * C).to(tl.int64), length - chunk * C


@triton.jit(do_not_specialize=["T", "H", "items"])
def gla_forward_strong(
    q,  # [B, T, H, K], any strides of B, T and H
    k,  # [B, T, H, K]
    v,  # [B, T, H, V]
    g,  # [B, T, H, K], natural log, <= 0
    o,  # [B, T, H, KEY_PARTS, V], contiguous: the plain form's output, to be completed in the first part
    flags,  # [N, H] int32: sequences and heads that the exact kernel computes
    marks,  # [slots, H] int32: n + 1 if the chunk, of sequence n, has a strong channel
    cu_seqlens,  # [N + 1] int32 or int64: boundaries of packed sequences
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
    KEY_PARTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program completes every num_programs-th item, a chunk and head, if it is marked.

    Each item is completed by one program, so that the order of sums is always the same.
    """
    wait_for_previous_kernel(PDL)
    lanes = tl.arange(0, MARKS_AT_ONCE)
    for i in tl.range(0, tl.cdiv(items, MARKS_AT_ONCE * tl.num_programs(0))):
        found = marks_of(marks, i, items, lanes, 1)
        lane = first_raised(found, lanes)
        while lane < MARKS_AT_ONCE:
            mark = tl.sum(tl.where(lanes == lane, found, 0), axis=0)
            item = tl.program_id(0) + (i * MARKS_AT_ONCE + lane) * tl.num_programs(0)
            n, h, b, t, rows_left = marked_chunk(item, mark, H, cu_seqlens, T, C, VARLEN)
            if tl.load(flags + n * H + h) == 0:
                h_wide = h.to(tl.int64)
                scores = missing_scores(
                    q + b * q_b + t * q_t + h_wide * q_h, k + b * k_b + t * k_t + h_wide * k_h,
                    g + b * g_b + t * g_t + h_wide * g_h, scale, q_t, k_t, g_t, rows_left,
                    False, K, BK, C, DOT, PRECISION,
                )  # fmt: skip
                add_product(
                    o + ((b * T + t) * H + h) * KEY_PARTS * V, scores, v + b * v_b + t * v_t + h_wide * v_h, v_t,
                    H * KEY_PARTS * V, rows_left, V, BV, C, DOT, PRECISION,
                )  # fmt: skip
            found = tl.where(lanes == lane, 0, found)
            lane = first_raised(found, lanes)


@triton.jit
def add_gradients(
    q, k, v, g, do, dq, dk, dg, scale, q_t, k_t, v_t, g_t, do_t, grad_t, cols, rows_left,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, STORE_DG: tl.constexpr,
):  # fmt: skip
    """Adds what the missing scores give key columns `cols` of dq, dk and dg of the chunk that all pointers point to.

    dg is made of products of rounded operands, so that terms which cancel in exact arithmetic cancel here too.
    """
    steps = tl.arange(0, C)
    bq, bk, gates, weight = load_strong(q, k, g, scale, q_t, k_t, g_t, steps, cols, rows_left, K, DOT)
    if tl.max(tl.abs(weight), axis=0) > 0.0:
        dP = zero_state(scale, C, C)
        dPt = zero_state(scale, C, C)
        for column in range(0, V, BV):
            vcols = column + tl.arange(0, BV)
            bv = load_tile(v, steps, vcols, v_t, rows_left, V).to(DOT)
            bdo = load_tile(do, steps, vcols, do_t, rows_left, V).to(DOT)
            dP = tl.dot(bdo, tl.trans(bv), dP, input_precision=PRECISION)
            dPt = tl.dot(bv, tl.trans(bdo), dPt, input_precision=PRECISION)
        # The gradient of a pair's score, in both of its places.
        pairs = tl.where(steps[:, None] >= steps[None, :], dP, dPt).to(DOT)
        own = tl.sum(tl.where(steps[:, None] == steps[None, :], pairs, 0.0).to(tl.float32), axis=1)[:, None]
        # All weights are on q. dk comes from q and has them; dq comes from k and gets them at the end.
        bdq = own * bk
        bdk = own * bq
        balance = tl.zeros([C, BK], dtype=tl.float32)
        size = 1
        while size < C:
            tile, factor, late = pair_tile(bq, bk, gates, steps, size, DOT)
            chosen = tl.where(at_level(steps, size), pairs, 0.0).to(DOT)
            gradient = tl.dot(chosen, tile, input_precision=PRECISION)
            if STORE_DG:
                change = tile.to(tl.float32) * gradient
                balance += tl.where(late, -change, change)
            gradient *= factor
            bdq += tl.where(late, gradient, 0.0)
            bdk += tl.where(late, 0.0, gradient)
            size *= 2
        bdq = bdq * weight[None, :] + load_tile(dq, steps, cols, grad_t, rows_left, K).to(tl.float32)
        store_tile(dq, bdq, steps, cols, grad_t, rows_left, K)
        bdk += load_tile(dk, steps, cols, grad_t, rows_left, K).to(tl.float32)
        store_tile(dk, bdk, steps, cols, grad_t, rows_left, K)
        if STORE_DG:
            bdg = tl.cumsum(balance, axis=0) - balance + load_tile(dg, steps, cols, grad_t, rows_left, K).to(tl.float32)
            store_tile(dg, bdg, steps, cols, grad_t, rows_left, K)


@triton.jit(do_not_specialize=["T", "H", "items"])
def gla_backward_strong(
    q, k, v, g,
    do,  # [B, T, H, V], any strides of B, T and H
    flags,  # [N, H] int32: sequences and heads that the exact kernel computes, because of the forward
    failed,  # [N, H] int32: and because of the plain backward
    marks,  # [slots, H] int32, as the forward raised them
    dq,  # [B, T, H, VALUE_PARTS, K], contiguous: the plain form's gradients, to be completed in the first part
    dk,  # [B, T, H, VALUE_PARTS, K]
    dv,  # [B, T, H, KEY_PARTS, V]
    dg,  # [B, T, H, VALUE_PARTS, K]
    cu_seqlens,
    scale,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, g_b, g_t, g_h, do_b, do_t, do_h,
    T, H,
    items,  # slots times heads times the parts of a chunk's work: dv, and each block of key columns of the others
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    VARLEN: tl.constexpr,
    PDL: tl.constexpr,
    STORE_DG: tl.constexpr,
):  # fmt: skip
    """The backward of `gla_forward_strong`, item by item as there."""
    wait_for_previous_kernel(PDL)
    parts: tl.constexpr = 1 + (K + BK - 1) // BK
    lanes = tl.arange(0, MARKS_AT_ONCE)
    for i in tl.range(0, tl.cdiv(items, MARKS_AT_ONCE * tl.num_programs(0))):
        found = marks_of(marks, i, items, lanes, parts)
        lane = first_raised(found, lanes)
        while lane < MARKS_AT_ONCE:
            mark = tl.sum(tl.where(lanes == lane, found, 0), axis=0)
            item = tl.program_id(0) + (i * MARKS_AT_ONCE + lane) * tl.num_programs(0)
            n, h, b, t, rows_left = marked_chunk(item // parts, mark, H, cu_seqlens, T, C, VARLEN)
            part = item % parts
            given_up = tl.load(flags + n * H + h) | tl.load(failed + n * H + h)
            if given_up == 0:
                h_wide = h.to(tl.int64)
                row = (b * T + t) * H + h
                q_at = q + b * q_b + t * q_t + h_wide * q_h
                k_at = k + b * k_b + t * k_t + h_wide * k_h
                g_at = g + b * g_b + t * g_t + h_wide * g_h
                do_at = do + b * do_b + t * do_t + h_wide * do_h
                if part == 0:
                    scores_t = missing_scores(
                        q_at, k_at, g_at, scale, q_t, k_t, g_t, rows_left, True, K, BK, C, DOT, PRECISION
                    )  # fmt: skip
                    add_product(
                        dv + row * KEY_PARTS * V, scores_t, do_at, do_t, H * KEY_PARTS * V, rows_left, V, BV, C, DOT,
                        PRECISION,
                    )  # fmt: skip
                else:
                    at = row * VALUE_PARTS * K
                    cols = (part - 1) * BK + tl.arange(0, BK)
                    add_gradients(
                        q_at, k_at, v + b * v_b + t * v_t + h_wide * v_h, g_at, do_at, dq + at, dk + at,
                        dg + at if STORE_DG else dg, scale, q_t, k_t, v_t, g_t, do_t, H * VALUE_PARTS * K, cols,
                        rows_left, K, V, BK, BV, C, DOT, PRECISION, STORE_DG,
                    )  # fmt: skip
            found = tl.where(lanes == lane, 0, found)
            lane = first_raised(found, lanes)
