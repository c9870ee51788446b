# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""GLA token by token with the states of all tokens in memory, in Triton: what version 3's Table 3 compares with.

As Mao's kernels for decaying fast weights (2022): the forward writes every state,
S_t = diag(exp g_t) S_{t-1} + k_t^T v_t, and the backward reads them, with D_t the gradient of S_t:

    D_t = diag(exp g_{t+1}) D_{t+1} + q_t^T do_t
    dq_t = S_t do_t,   dk_t = D_t v_t,   dv_t = k_t D_t,   dg_t = exp(g_t) sum_v S_{t-1} D_t

With gates of values gv [B, T, H, V] (version 3, eq. 12), columns of S and D decay by exp(gv_t) too, and dgv is the same
sum over keys.

Tensors are q, k, g [B, T, H, K] and v, o [B, T, H, V], contiguous; states are float32. No tensor cores.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glabench.backends.papers import H100_MULTIPROCESSORS, state_columns


@triton.jit
def _row(x, token, cols, D: tl.constexpr):
    return tl.load(x + token * D + cols).to(tl.float32)


@triton.jit
def _forward(q, k, v, g, gv, o, states, scale, T, H, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    bh, iv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, vals = tl.arange(0, K), iv * BV + tl.arange(0, BV)
    first = bh // H * T * H + bh % H
    state = tl.zeros([K, BV], dtype=tl.float32)
    for t in range(T):
        token = first + t * H
        of_q, of_k = (
            (tl.load(q + token * K + keys) * scale).to(tl.float32),
            tl.load(k + token * K + keys).to(tl.float32),
        )
        of_v = _row(v, token, vals, V)
        state *= tl.exp(_row(g, token, keys, K))[:, None]
        if gv is not None:
            state *= tl.exp(_row(gv, token, vals, V))[None, :]
        state += of_k[:, None] * of_v[None, :]
        tl.store(states + ((bh * T + t) * K + keys[:, None]) * V + vals[None, :], state)
        tl.store(o + token * V + vals, tl.sum(of_q[:, None] * state, axis=0).to(o.dtype.element_ty))


@triton.jit
def _backward(
    q, k, v, g, gv, do, states, dq, dk, dv, dg, dgv, scale, T, H, tokens,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg have a part per block of value columns."""
    bh, iv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, vals = tl.arange(0, K), iv * BV + tl.arange(0, BV)
    first, part = bh // H * T * H + bh % H, iv.to(tl.int64) * tokens
    gradient = tl.zeros([K, BV], dtype=tl.float32)
    at = states + (bh * T * K + keys[:, None]) * V + vals[None, :]
    state = tl.load(at + (T - 1) * K * V)
    for step in range(T):
        t = T - 1 - step
        token = first + t * H
        of_q, of_k = (
            (tl.load(q + token * K + keys) * scale).to(tl.float32),
            tl.load(k + token * K + keys).to(tl.float32),
        )
        of_v, of_do = _row(v, token, vals, V), _row(do, token, vals, V)
        decay = tl.exp(_row(g, token, keys, K))
        gradient += of_q[:, None] * of_do[None, :]
        of_dq, of_dk = tl.sum(state * of_do[None, :], axis=1) * scale, tl.sum(gradient * of_v[None, :], axis=1)
        tl.store(dq + (part + token) * K + keys, of_dq.to(dq.dtype.element_ty))
        tl.store(dk + (part + token) * K + keys, of_dk.to(dk.dtype.element_ty))
        tl.store(dv + token * V + vals, tl.sum(of_k[:, None] * gradient, axis=0).to(dv.dtype.element_ty))
        state = tl.load(at + (t - 1) * K * V, mask=(t > 0) & (vals < V)[None, :], other=0.0)
        gradient *= decay[:, None]
        if gv is not None:
            gradient *= tl.exp(_row(gv, token, vals, V))[None, :]
            tl.store(dgv + token * V + vals, tl.sum(state * gradient, axis=0).to(dgv.dtype.element_ty))
        tl.store(dg + (part + token) * K + keys, tl.sum(state * gradient, axis=1).to(dg.dtype.element_ty))


@cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; those of an H100 elsewhere."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else H100_MULTIPROCESSORS


class _StoredStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, gv: Tensor | None) -> Tensor:
        (B, T, H, K), V = q.shape, v.shape[-1]
        BV = state_columns(K, V, B * H, multiprocessors(q.device))
        warps = 4 if BV == 16 else 8
        ctx.sizes = {"scale": K**-0.5, "T": T, "H": H, "K": K, "V": V, "BV": BV, "num_warps": warps}
        states, o = torch.empty((B * H, T, K, V), device=q.device, dtype=torch.float32), torch.empty_like(v)
        _forward[(B * H, V // ctx.sizes["BV"])](q, k, v, g, gv, o, states, **ctx.sizes)
        ctx.save_for_backward(q, k, v, g, gv, states)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, gv, states = ctx.saved_tensors
        B, T, H, _ = q.shape
        blocks = v.shape[-1] // ctx.sizes["BV"]
        # A single part is the gradient itself.
        dq, dk, dg = (
            x.new_empty((blocks, *x.shape), dtype=torch.float32 if blocks > 1 else x.dtype) for x in (q, k, g)
        )
        dv, dgv = torch.empty_like(v), None if gv is None else torch.empty_like(gv)
        arguments = (q, k, v, g, gv, do.contiguous(), states, dq, dk, dv, dg, dgv)
        _backward[(B * H, blocks)](*arguments, tokens=B * T * H, **ctx.sizes)
        dq, dk, dg = (x[0] if blocks == 1 else x.sum(0).to(of.dtype) for x, of in ((dq, q), (dk, k), (dg, g)))
        return dq, dk, dv, dg, dgv


def stored_states_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, gv: Tensor | None = None) -> Tensor:
    """GLA; K is a power of two, and V one of at least 16 or a multiple of 16."""
    o: Tensor = _StoredStates.apply(q, k, v, g, gv)  # type: ignore[no-untyped-call]
    return o
