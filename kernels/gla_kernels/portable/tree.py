# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""A tree of references: the scores of a chunk, and what comes of their gradients, right for every gate.

Every pair of tokens i > j belongs to exactly one level of the tree, at which j is in the first half of a block of
2 * size rows and i in the second. With the border between the halves as the reference,

    exp(G_i - G_j) = exp(gates from the border to i) * exp(gates from j to the border):

two factors of at most 1, each from a sum of its own gates, so there is neither overflow nor cancellation. Levels of
sizes 1, 2, 4, ... up to half of the rows cover all pairs.

Tiles are q (scaled) and k (C, BK) float32, and gates (C, BK) in log2 (`tiles.exact_gates`). PARTS: see `select_sum`.
"""

import triton
import triton.language as tl

from gla_kernels.portable.tiles import select_sum


@triton.jit
def tree_level(step_gates, steps, size, PARTS: tl.constexpr, DOT: tl.constexpr):
    """One level: the factor of every row (C, BK), whether a row is in a second half (C), and masks of its pairs (C, C).

    The second mask is the first one transposed.
    """
    half = steps // size
    late = half % 2 == 1
    same_half = half[:, None] == half[None, :]
    up_to_me = steps[None, :] <= steps[:, None]
    summed = same_half & (up_to_me == late[:, None])
    factor = tl.exp2(select_sum(summed, step_gates, PARTS, DOT))
    block = half // 2
    same_block = block[:, None] == block[None, :]
    pairs = same_block & late[:, None] & (late[None, :] == 0)
    pairs_t = same_block & late[None, :] & (late[:, None] == 0)
    return factor, late, pairs, pairs_t


@triton.jit
def tree_scores(scores, q, k, step_gates, steps, LEAST: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
                PARTS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """`scores` (C, C) plus those of the levels of sizes LEAST to ROWS / 2."""
    size = LEAST
    while size < ROWS:
        factor, late, pairs, pairs_t = tree_level(step_gates, steps, size, PARTS, DOT)
        ql = tl.where(late[:, None], q * factor, 0.0).to(DOT)
        kl = tl.where(late[:, None], 0.0, k * factor).to(DOT)
        if TRANSPOSED:
            scores += tl.where(pairs_t, tl.dot(kl, tl.trans(ql), input_precision=PRECISION), 0.0)
        else:
            scores += tl.where(pairs, tl.dot(ql, tl.trans(kl), input_precision=PRECISION), 0.0)
        size *= 2
    return scores


@triton.jit
def at_level(steps, size):
    """Mask (C, C) of the pairs of a level, in either order: the highest bit in which i and j differ is `size`."""
    return (steps[:, None] ^ steps[None, :]) // size == 1


@triton.jit
def pair_tile(q, k, step_gates, steps, size, DOT: tl.constexpr):
    """The operand X (C, BK) of a level, every row's factor (C, BK), and whether a row is in a second half (C, 1).

    A row in a second half is q there, the others k, times the factor. So X X^T has the score of every pair of the level
    in both of its places, and D X, with D the gradients of these scores in both places, has dq in rows of second halves
    and dk in the others (before they are multiplied by the factor).
    """
    half = steps // size
    late = (half % 2 == 1)[:, None]
    up_to_me = steps[None, :] <= steps[:, None]
    summed = (half[:, None] == half[None, :]) & (up_to_me == late)
    factor = tl.exp2(select_sum(summed, step_gates, 2, DOT))
    return (tl.where(late, q, k) * factor).to(DOT), factor, late


@triton.jit
def own_scores(scores, q, k, steps):
    """`scores` plus those of each token with itself, which no gate affects."""
    own = tl.sum(q * k, axis=1)
    return scores + tl.where(steps[:, None] == steps[None, :], own[:, None], 0.0)


@triton.jit
def tree_gradients(dq, dk, balance, q, k, dP, dPt, step_gates, steps, LEAST: tl.constexpr, ROWS: tl.constexpr,
                   PARTS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dq, dk and k dk - q dq, each (C, BK) float32, plus those of the levels of sizes LEAST to ROWS / 2.

    dP and dPt are the gradient of the scores and its transpose. dq is with respect to the scaled q. The last result
    uses the rounded operands of the products, so that terms which cancel in exact arithmetic cancel here too.
    """
    size = LEAST
    while size < ROWS:
        factor, late, pairs, pairs_t = tree_level(step_gates, steps, size, PARTS, DOT)
        ql = tl.where(late[:, None], q * factor, 0.0).to(DOT)
        kl = tl.where(late[:, None], 0.0, k * factor).to(DOT)
        dql = tl.dot(tl.where(pairs, dP, 0.0).to(DOT), kl, input_precision=PRECISION)
        dq += dql * factor
        balance -= ql.to(tl.float32) * dql
        dkl = tl.dot(tl.where(pairs_t, dPt, 0.0).to(DOT), ql, input_precision=PRECISION)
        dk += dkl * factor
        balance += kl.to(tl.float32) * dkl
        size *= 2
    return dq, dk, balance
