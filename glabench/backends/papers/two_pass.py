# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""Linear attention as the papers describe it, in Triton: FlashLinearAttention with the states of all chunks in memory.

FIN, Algorithms 1 and 2 with materialization. With the names of `two_level.py`, b = 0 and q scaled by 1 / sqrt(K):

    states:     S' = S + K^T V                          one chunk after another
    outputs:    O = (Q K^T below the diagonal) V + Q S                   all chunks at once
    gradients:  D = D' + Q^T dO                         one chunk after another, from the last to the first
                dV = (Q K^T below the diagonal)^T dO + K D'              all chunks at once
                dQ = dP K + dO S^T,  dK = dP^T Q + V D'^T,  dP = dO V^T below the diagonal

Scores and their gradients are never in memory; the backward computes scores again, as the algorithms do.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glabench.backends.papers import rows_of_blocks
from glabench.backends.papers.two_level import Plan, rows_of


@triton.jit
def _outputs(
    q, k, v, states, o, scale, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr, WITHIN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """R rows and BV columns of o; of what passes within chunks, across chunks, or both."""
    i, bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, n = bh // H * T * H + bh % H, i * R // C
    steps, cols, vals = tl.arange(0, R), tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    rows = i * R + steps
    of_q = rows_of(q, first + rows * H, cols, K)
    out = tl.zeros([R, BV], dtype=tl.float32)
    if ACROSS:
        state = tl.load(states + ((bh * (T // C) + n) * K + cols[:, None]) * V + vals[None, :])
        out = tl.dot(of_q, state, input_precision=PRECISION) * scale
    if WITHIN:
        for j in range(n * C // R, i + 1):
            at = j * R + steps
            part = tl.dot(of_q, tl.trans(rows_of(k, first + at * H, cols, K)), input_precision=PRECISION) * scale
            part = tl.where(rows[:, None] >= at[None, :], part, 0.0).to(of_q.dtype)
            out = tl.dot(part, rows_of(v, first + at * H, vals, V), out, input_precision=PRECISION)
    tl.store(o + (first + rows * H)[:, None] * V + vals[None, :], out.to(o.dtype.element_ty))


@triton.jit
def _value_gradients(
    q, k, do, dstates, dv, scale, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R rows and BV columns of dv."""
    j, bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, n = bh // H * T * H + bh % H, j * R // C
    steps, cols, vals = tl.arange(0, R), tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    at = j * R + steps
    of_k = rows_of(k, first + at * H, cols, K)
    dstate = tl.load(dstates + ((bh * (T // C) + n) * K + cols[:, None]) * V + vals[None, :])
    out = tl.dot(of_k, dstate, input_precision=PRECISION)
    for i in range(j, (n + 1) * C // R):
        rows = i * R + steps
        part = tl.dot(of_k, tl.trans(rows_of(q, first + rows * H, cols, K)), input_precision=PRECISION) * scale
        part = tl.where(rows[None, :] >= at[:, None], part, 0.0).to(of_k.dtype)
        out = tl.dot(part, rows_of(do, first + rows * H, vals, V), out, input_precision=PRECISION)
    tl.store(dv + (first + at * H)[:, None] * V + vals[None, :], out.to(dv.dtype.element_ty))


@triton.jit
def _key_gradients(
    q, k, v, do, states, dstates, dq, dk, scale, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R rows and BK columns of dq and dk."""
    i, bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, n = bh // H * T * H + bh % H, i * R // C
    steps, cols = tl.arange(0, R), tl.program_id(1) * BK + tl.arange(0, BK)
    rows, every = i * R + steps, tl.arange(0, V)
    token = first + rows * H
    of_dq, of_dk = tl.zeros([R, BK], dtype=tl.float32), tl.zeros([R, BK], dtype=tl.float32)
    for iv in range(V // BV):
        vals = iv * BV + tl.arange(0, BV)
        place = ((bh * (T // C) + n) * K + cols[:, None]) * V + vals[None, :]
        state, dstate = tl.load(states + place), tl.load(dstates + place)
        of_dq = tl.dot(rows_of(do, token, vals, V), tl.trans(state), of_dq, input_precision=PRECISION)
        of_dk = tl.dot(rows_of(v, token, vals, V), tl.trans(dstate), of_dk, input_precision=PRECISION)
    of_do, of_v = rows_of(do, token, every, V), rows_of(v, token, every, V)
    own = tl.dot(of_do, tl.trans(of_v), input_precision=PRECISION) * scale
    own = tl.where(rows[:, None] >= rows[None, :], own, 0.0).to(of_do.dtype)
    of_dq = tl.dot(own, rows_of(k, token, cols, K), of_dq * scale, input_precision=PRECISION)
    of_dk = tl.dot(tl.trans(own), rows_of(q, token, cols, K), of_dk, input_precision=PRECISION)
    for j in range(n * C // R, i):
        at = first + (j * R + steps) * H
        part = tl.dot(of_do, tl.trans(rows_of(v, at, every, V)), input_precision=PRECISION) * scale
        of_dq = tl.dot(part.to(of_do.dtype), rows_of(k, at, cols, K), of_dq, input_precision=PRECISION)
    for j in range(i + 1, (n + 1) * C // R):
        at = first + (j * R + steps) * H
        part = tl.dot(of_v, tl.trans(rows_of(do, at, every, V)), input_precision=PRECISION) * scale
        of_dk = tl.dot(part.to(of_v.dtype), rows_of(q, at, cols, K), of_dk, input_precision=PRECISION)
    tl.store(dq + token[:, None] * K + cols[None, :], of_dq.to(dq.dtype.element_ty))
    tl.store(dk + token[:, None] * K + cols[None, :], of_dk.to(dk.dtype.element_ty))


def _plan(q: Tensor, v: Tensor, C: int) -> Plan:
    return Plan(q, v, C, rows=rows_of_blocks(C, q.dtype == torch.float32))


def _run_outputs(plan: Plan, q: Tensor, k: Tensor, v: Tensor, states: Tensor | None, within: bool) -> Tensor:
    """o; without states what passes within chunks alone."""
    o = torch.empty_like(v)
    plan.launch(_outputs, plan.by_values, q, k, v, states, o, WITHIN=within, ACROSS=states is not None)
    return o


class _TwoPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, C: int) -> Tensor:
        plan = _plan(q, v, C)
        states = plan.run_states(k, v, None, reverse=False)
        ctx.save_for_backward(q, k, v, states)
        ctx.plan = plan
        return _run_outputs(plan, q, k, v, states, within=True)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, states = ctx.saved_tensors
        plan, do = ctx.plan, do.contiguous()
        dstates = plan.run_states(q, do, None, reverse=True)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        plan.launch(_value_gradients, plan.by_values, q, k, do, dstates, dv)
        plan.launch(_key_gradients, plan.by_keys, q, k, v, do, states, dstates, dq, dk)
        return dq, dk, dv, None


def two_pass_linear(q: Tensor, k: Tensor, v: Tensor, chunk: int = 64) -> Tensor:
    """Linear attention in chunks, q and k [B, T, H, K], v [B, T, H, V]; sizes are as for `two_level.two_level_gla`."""
    o: Tensor = _TwoPass.apply(q, k, v, chunk)  # type: ignore[no-untyped-call]
    return o


def within_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """The part of o that does not pass through states."""
    return _run_outputs(_plan(q, v, chunk), q, k, v, None, within=True)


def across_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """The part of o that passes through states: these, and their product with q."""
    plan = _plan(q, v, chunk)
    return _run_outputs(plan, q, k, v, plan.run_states(k, v, None, reverse=False), within=False)
