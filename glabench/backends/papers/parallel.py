# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Linear attention as all pairs of tokens, in Triton, without scores in memory: FlashAttention without its softmax.

FIN section 3.2 and V3 section 2.3 (the I/O-aware form of TransNormerLLM). Tensors are q, k [B, T, H, K] and v, o
[B, T, H, V]. A program has R tokens of a head and goes through all blocks of R tokens before them, in the
gradients of keys and values through those behind; the backward computes the scores again:

    O = P V,  P_ij = q_i k_j / sqrt(K) for j <= i;   dQ = dP K,  dK = dP^T Q,  dV = P^T dO,  dP as P, of dO and V
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glabench.backends.papers.two_level import rows_of


@triton.jit
def _pairs(x, y, rows, at, scale, PRECISION: tl.constexpr):
    """x y^T times the scale, for tokens `rows` of x and `at` of y; 0 where y's are later. In the type of x."""
    found = tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale
    return tl.where(rows[:, None] >= at[None, :], found, 0.0).to(x.dtype)


@triton.jit
def _rows(x, y, z, out, scale, T, H, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr):
    """R rows of (x y^T, masked) z: of O (x = q, y = k, z = v), or of dQ (x = dO, y = v, z = k). K is x's width."""
    i, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, steps, cols, vals = bh // H * T * H + bh % H, tl.arange(0, R), tl.arange(0, K), tl.arange(0, V)
    rows = i * R + steps
    of_x, total = rows_of(x, first + rows * H, cols, K), tl.zeros([R, V], dtype=tl.float32)
    for j in range(i + 1):
        at = j * R + steps
        part = _pairs(of_x, rows_of(y, first + at * H, cols, K), rows, at, scale, PRECISION)
        total = tl.dot(part, rows_of(z, first + at * H, vals, V), total, input_precision=PRECISION)
    tl.store(out + (first + rows * H)[:, None] * V + vals[None, :], total.to(out.dtype.element_ty))


@triton.jit
def _columns(
    q, k, v, do, dk, dv, scale, T, H, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr
):
    """R rows of dK and dV."""
    j, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, steps, cols, vals = bh // H * T * H + bh % H, tl.arange(0, R), tl.arange(0, K), tl.arange(0, V)
    at = j * R + steps
    of_k, of_v = rows_of(k, first + at * H, cols, K), rows_of(v, first + at * H, vals, V)
    of_dk, of_dv = tl.zeros([R, K], dtype=tl.float32), tl.zeros([R, V], dtype=tl.float32)
    for i in range(j, T // R):
        rows = i * R + steps
        of_q, of_do = rows_of(q, first + rows * H, cols, K), rows_of(do, first + rows * H, vals, V)
        scores = _pairs(of_q, of_k, rows, at, scale, PRECISION)
        of_dv = tl.dot(tl.trans(scores), of_do, of_dv, input_precision=PRECISION)
        gradients = _pairs(of_do, of_v, rows, at, scale, PRECISION)
        of_dk = tl.dot(tl.trans(gradients), of_q, of_dk, input_precision=PRECISION)
    tl.store(dk + (first + at * H)[:, None] * K + cols[None, :], of_dk.to(dk.dtype.element_ty))
    tl.store(dv + (first + at * H)[:, None] * V + vals[None, :], of_dv.to(dv.dtype.element_ty))


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, R: int) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.R, o = R, torch.empty_like(v)
        _launch(_rows, q, R, q, k, v, o, K=q.shape[-1], V=v.shape[-1])
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        do = do.contiguous()
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        K, V = q.shape[-1], v.shape[-1]
        _launch(_rows, q, ctx.R, do, v, k, dq, K=V, V=K)
        _launch(_columns, q, ctx.R, q, k, v, do, dk, dv, K=K, V=V)
        return dq, dk, dv, None


def _launch(kernel: Any, q: Tensor, R: int, *tensors: Tensor, K: int, V: int) -> None:
    B, T, H, width = q.shape
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    sizes = {"R": R, "K": K, "V": V, "PRECISION": precision, "num_warps": 4 if max(K, V) <= 64 else 8, "num_stages": 2}
    kernel[T // R, B * H](*tensors, width**-0.5, T, H, **sizes)


def parallel_linear(q: Tensor, k: Tensor, v: Tensor, rows: int = 64) -> Tensor:
    """Linear attention q (k^T v) / sqrt(K), causal, from q, k [B, T, H, K] and v [B, T, H, V] of one float type.

    T is a multiple of `rows`, K and V are powers of two from 16 to 256.
    """
    o: Tensor = _Parallel.apply(q.contiguous(), k.contiguous(), v.contiguous(), rows)  # type: ignore[no-untyped-call]
    return o
