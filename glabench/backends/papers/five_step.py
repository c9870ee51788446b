# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""GLA's forward in the five steps of an early public pipeline, in Triton, in chunks of 16 tokens.

Tensors are q, k, g [B, T, H, K] and v, o [B, T, H, V], contiguous; b is the sum of a chunk's gates up to a token, and E
its last. Key columns are in blocks of 64, and every block gives a part of o and of the scores, added up in the end:

    1  b  = sums of gates                                                       all chunks at once
    2  Q' = scale Q exp(b),  K' = K exp(E - b)                                  all chunks at once
    3  O' = Q' S,  S <- exp(E) S + K'^T V                                       one chunk after another
    4  P_ij = scale sum_k Q_ik K_jk exp(b_ik - b_jk), j <= i                    all chunks at once, no tensor cores
    5  O  = sum O' + (sum P) V                                                  in PyTorch

Between steps b, Q', K', P and the parts of O go through memory. There is no backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

C = 16
_MOST_COLUMNS = 64
# A gate below this empties a state in every format; sums of it are still exact enough.
_LEAST_GATE = tl.constexpr(-60.0)


@triton.jit
def _decays(q, k, g, b, framed_q, framed_k, scale, T, H, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Steps 1 and 2, which are one launch here: of a chunk, BK key columns."""
    n, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    cols = tl.program_id(0) * BK + tl.arange(0, BK)
    token = bh // H * T * H + bh % H + (n * C + tl.arange(0, C)) * H
    at = token[:, None] * K + cols[None, :]
    gates = tl.maximum(tl.load(g + at).to(tl.float32), _LEAST_GATE)
    sums, total = tl.cumsum(gates, axis=0), tl.sum(gates, axis=0)
    of_q, of_k = tl.load(q + at), tl.load(k + at)
    tl.store(b + at, sums)
    tl.store(framed_q + at, (of_q.to(tl.float32) * scale * tl.exp(sums)).to(of_q.dtype))
    tl.store(framed_k + at, (of_k.to(tl.float32) * tl.exp(total[None, :] - sums)).to(of_k.dtype))


@triton.jit
def _across(
    framed_q, framed_k, v, b, parts, T, H, tokens, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Step 3: a part of O', from BK keys of the state, for BV value columns of all chunks."""
    ik, bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    cols, vals = ik * BK + tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    first = bh // H * T * H + bh % H
    state = tl.zeros([BK, BV], dtype=tl.float32)
    for n in range(T // C):
        token = first + (n * C + tl.arange(0, C)) * H
        of_q, of_k = (
            tl.load(framed_q + token[:, None] * K + cols[None, :]),
            tl.load(framed_k + token[:, None] * K + cols[None, :]),
        )
        of_v = tl.load(v + token[:, None] * V + vals[None, :])
        part = tl.dot(of_q, state.to(of_q.dtype), input_precision=PRECISION)
        tl.store(parts + (ik.to(tl.int64) * tokens + token[:, None]) * V + vals[None, :], part)
        total = tl.load(b + (first + (n * C + C - 1) * H) * K + cols)
        state = state * tl.exp(total)[:, None] + tl.dot(tl.trans(of_k), of_v, input_precision=PRECISION)


@triton.jit
def _within(q, k, b, scores, scale, T, H, tokens, C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Step 4: a part of a chunk's scores, from BK key columns."""
    ik, n, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    cols, steps = ik * BK + tl.arange(0, BK), tl.arange(0, C)
    first = bh // H * T * H + bh % H
    token = first + (n * C + steps) * H
    at = token[:, None] * K + cols[None, :]
    of_q, sums = tl.load(q + at).to(tl.float32) * scale, tl.load(b + at)
    out = tl.zeros([C, C], dtype=tl.float32)
    for j in range(C):
        row = (first + (n * C + j) * H) * K + cols
        # Exponents of earlier rows are above 0 and not used.
        factor = tl.exp(tl.minimum(sums - tl.load(b + row)[None, :], 0.0))
        score = tl.sum(of_q * factor * tl.load(k + row).to(tl.float32)[None, :], axis=1)
        out += tl.where((steps[None, :] == j) & (steps[:, None] >= j), score[:, None], 0.0)
    tl.store(scores + (ik.to(tl.int64) * tokens + token[:, None]) * C + steps[None, :], out)


def five_step_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """GLA without gradients; T is a multiple of 16, K and V are powers of two of at least 16."""
    (B, T, H, K), V = q.shape, v.shape[-1]
    BK, BV, scale, tokens = min(K, _MOST_COLUMNS), min(V, _MOST_COLUMNS), K**-0.5, B * T * H
    blocks, chunks = K // BK, T // C
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    b, framed_q, framed_k = torch.empty_like(q, dtype=torch.float32), torch.empty_like(q), torch.empty_like(k)
    _decays[(blocks, chunks, B * H)](q, k, g, b, framed_q, framed_k, scale, T, H, C=C, K=K, BK=BK, num_warps=1)
    parts = v.new_empty((blocks, *v.shape), dtype=torch.float32)
    _across[(blocks, V // BV, B * H)](
        framed_q, framed_k, v, b, parts, T, H, tokens, C=C, K=K, V=V, BK=BK, BV=BV, PRECISION=precision, num_warps=2
    )
    scores = v.new_empty((blocks, B, T, H, C), dtype=torch.float32)
    _within[(blocks, chunks, B * H)](q, k, b, scores, scale, T, H, tokens, C=C, K=K, BK=BK, num_warps=4)
    of_chunks = scores.sum(0).to(v.dtype).view(B, chunks, C, H, C).transpose(2, 3)
    within = of_chunks @ v.view(B, chunks, C, H, V).transpose(2, 3)
    return (parts.sum(0) + within.transpose(2, 3).reshape(v.shape)).to(v.dtype)
