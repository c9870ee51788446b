# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""GLA as the papers describe it without stored states, in Triton: nothing is kept, and the backward begins anew.

FIN, Algorithms 1 and 2 without materialization, 5 and 6, with the names and the scores of `two_level.py`. A program
goes through all chunks of a head with some value columns of the state on chip:

    forward:           O = P V + (Q exp(b)) S                           then S = exp(E) S + (K exp(E - b))^T V
    the same again:    dQ = exp(b) (dO S^T) + sum_j dP_ij K_j exp(b_i - b_j)                   then S as above
    and back:          dV = P^T dO + (K exp(E - b)) D
                       dK = exp(E - b) (V D^T) + sum_i dP_ij Q_i exp(b_i - b_j)
                                                                        then D = exp(E) D + (Q exp(b))^T dO

The papers update S and D first, which counts a chunk twice. dQ and dK are sums over programs of value columns.

dg is as in `two_level.py`, where what follows a chunk is the state times its gradient. Here the two are never on chip
together; but it is also what later chunks read of their states, less what they add to those behind them:

    sum_v S' D' = sum over later chunks of [sums of (Q exp(b)) (dO S^T) - sums of (K exp(E - b)) (V D^T)]

Both products are taken of the float32 states and of the same rounded factors, so that terms cancel.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glabench.backends.papers import MOST_ROWS, value_columns
from glabench.backends.papers.two_level import chunk_sums, own_scores, rows_of


@triton.jit
def _scaled(x, factor):
    """x times a factor, rounded to x's type."""
    return (x.to(tl.float32) * factor).to(x.dtype)


@triton.jit
def _sums_before(b, first, row, start, H, cols, K: tl.constexpr):
    """The gates of a chunk, which begins with token `start`, up to token row - 1; 0 if that is before the chunk."""
    return tl.load(b + (first + (row - 1) * H) * K + cols, mask=(row > start) & (cols < K), other=0.0)


@triton.jit
def _next_state(
    state, x, y, b, first, start, scale, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the chunk that begins with token `start`, x = k, y = v; in reverse D before it, x = q, y = dO."""
    steps, cols, vals = tl.arange(0, R), tl.arange(0, K), tl.program_id(0) * BV + tl.arange(0, BV)
    if GATED:
        total = tl.load(b + (first + (start + C - 1) * H) * K + cols)
        state *= tl.exp(total)[:, None]
    for i in range(C // R):
        token = first + (start + i * R + steps) * H
        of_x = rows_of(x, token, cols, K)
        if GATED:
            sums = rows_of(b, token, cols, K)
            of_x = _scaled(of_x, tl.exp(sums) * scale if REVERSE else tl.exp(total[None, :] - sums))
        elif REVERSE:
            of_x = _scaled(of_x, scale)
        state = tl.dot(tl.trans(of_x), rows_of(y, token, vals, V), state, input_precision=PRECISION)
    return state


@triton.jit
def _forward(
    q, k, v, b, o, scale, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BV columns of o, of all tokens of a head."""
    steps, cols, vals = tl.arange(0, R), tl.arange(0, K), tl.program_id(0) * BV + tl.arange(0, BV)
    bh = tl.program_id(1).to(tl.int64)
    first = bh // H * T * H + bh % H
    state = tl.zeros([K, BV], dtype=tl.float32)
    for n in range(T // C):
        start = n * C
        for i in range(C // R):
            row = start + i * R
            token = first + (row + steps) * H
            of_q = rows_of(q, token, cols, K)
            if GATED:
                b_q, r = rows_of(b, token, cols, K), _sums_before(b, first, row, start, H, cols, K)
                from_start, framed = _scaled(of_q, tl.exp(b_q) * scale), _scaled(of_q, tl.exp(b_q - r[None, :]))
            else:
                b_q, from_start, framed = of_q, _scaled(of_q, scale), of_q
            out = tl.dot(from_start, state.to(of_q.dtype), input_precision=PRECISION)
            for j in range(i):
                at = first + (start + j * R + steps) * H
                of_k = rows_of(k, at, cols, K)
                if GATED:
                    of_k = _scaled(of_k, tl.exp(r[None, :] - rows_of(b, at, cols, K)))
                part = tl.dot(framed, tl.trans(of_k), input_precision=PRECISION) * scale
                out = tl.dot(part.to(of_q.dtype), rows_of(v, at, vals, V), out, input_precision=PRECISION)
            own = own_scores(of_q, b_q, k, b, first, row, H, R, K, GATED, PRECISION) * scale
            out = tl.dot(own.to(of_q.dtype), rows_of(v, token, vals, V), out, input_precision=PRECISION)
            tl.store(o + token[:, None] * V + vals[None, :], out.to(o.dtype.element_ty))
        state = _next_state(state, k, v, b, first, start, scale, H, C, R, K, V, BV, GATED, False, PRECISION)


@triton.jit
def _own_score_gradients(of_do, of_v, scale, R: tl.constexpr, PRECISION: tl.constexpr):
    """dP among R tokens, times the scale of q, 0 above the diagonal."""
    steps = tl.arange(0, R)
    own = tl.dot(of_do, tl.trans(of_v), input_precision=PRECISION) * scale
    return tl.where(steps[:, None] >= steps[None, :], own, 0.0).to(of_do.dtype)


@triton.jit
def _query_gradients(
    q, k, v, b, do, dq, reads, scale, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The share of BV value columns in dq of a head, and with gates in what each chunk reads of its state."""
    steps, cols, vals = tl.arange(0, R), tl.arange(0, K), tl.program_id(0) * BV + tl.arange(0, BV)
    bh = tl.program_id(1).to(tl.int64)
    first, chunks = bh // H * T * H + bh % H, T // C
    part_of_dq = dq + tl.program_id(0).to(tl.int64) * tl.num_programs(1) * T * K
    state = tl.zeros([K, BV], dtype=tl.float32)
    for n in range(chunks):
        start = n * C
        read = tl.zeros([K], dtype=tl.float32)
        for i in range(C // R):
            row = start + i * R
            token = first + (row + steps) * H
            of_do = rows_of(do, token, vals, V)
            if GATED:
                b_q, r = rows_of(b, token, cols, K), _sums_before(b, first, row, start, H, cols, K)
                of_state = tl.dot(of_do.to(tl.float32), tl.trans(state), input_precision=EXACT)
                read += tl.sum(
                    _scaled(rows_of(q, token, cols, K), tl.exp(b_q) * scale).to(tl.float32) * of_state, axis=0
                )
                of_dq = of_state * tl.exp(b_q) * scale
            else:
                of_dq = tl.dot(of_do, tl.trans(state.to(of_do.dtype)), input_precision=PRECISION) * scale
            across = tl.zeros([R, K], dtype=tl.float32)
            for j in range(i):
                at = first + (start + j * R + steps) * H
                of_k = rows_of(k, at, cols, K)
                if GATED:
                    of_k = _scaled(of_k, tl.exp(r[None, :] - rows_of(b, at, cols, K)))
                part = tl.dot(of_do, tl.trans(rows_of(v, at, vals, V)), input_precision=PRECISION) * scale
                across = tl.dot(part.to(of_k.dtype), of_k, across, input_precision=PRECISION)
            own = _own_score_gradients(of_do, rows_of(v, token, vals, V), scale, R, PRECISION)
            if GATED:
                of_dq += across * tl.exp(b_q - r[None, :])
                for t in range(R):
                    at = first + (row + t) * H
                    k_t, b_t = tl.load(k + at * K + cols).to(tl.float32), tl.load(b + at * K + cols)
                    column = tl.sum(tl.where(steps[None, :] == t, own.to(tl.float32), 0.0), axis=1)
                    of_dq += column[:, None] * k_t[None, :] * tl.exp(tl.minimum(b_q - b_t[None, :], 0.0))
            else:
                of_dq = tl.dot(own, rows_of(k, token, cols, K), of_dq + across, input_precision=PRECISION)
            tl.store(part_of_dq + token[:, None] * K + cols[None, :], of_dq)
        if GATED:
            tl.store(reads + ((tl.program_id(0) * tl.num_programs(1) + bh) * chunks + n) * K + cols, read)
        state = _next_state(state, k, v, b, first, start, scale, H, C, R, K, V, BV, GATED, False, PRECISION)


@triton.jit
def _key_and_value_gradients(
    q, k, v, b, do, dk, dv, adds, scale, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """BV columns of dv of a head, their share in dk, and with gates in what each chunk adds to the state behind it."""
    steps, cols, vals = tl.arange(0, R), tl.arange(0, K), tl.program_id(0) * BV + tl.arange(0, BV)
    bh = tl.program_id(1).to(tl.int64)
    first, chunks = bh // H * T * H + bh % H, T // C
    part_of_dk = dk + tl.program_id(0).to(tl.int64) * tl.num_programs(1) * T * K
    dstate = tl.zeros([K, BV], dtype=tl.float32)
    for step in range(chunks):
        n = chunks - 1 - step
        start = n * C
        add = tl.zeros([K], dtype=tl.float32)
        for j in range(C // R):
            row = start + j * R
            token = first + (row + steps) * H
            of_k, of_v = rows_of(k, token, cols, K), rows_of(v, token, vals, V)
            if GATED:
                sums = rows_of(b, token, cols, K)
                last = tl.load(b + (first + (row + R - 1) * H) * K + cols)
                total = tl.load(b + (first + (start + C - 1) * H) * K + cols)
                to_end = _scaled(of_k, tl.exp(total[None, :] - sums))
                of_state = tl.dot(of_v.to(tl.float32), tl.trans(dstate), input_precision=EXACT)
                add += tl.sum(to_end.to(tl.float32) * of_state, axis=0)
                of_dk = of_state * tl.exp(total[None, :] - sums)
            else:
                sums, to_end = of_k, of_k
                of_dk = tl.dot(of_v, tl.trans(dstate.to(of_v.dtype)), input_precision=PRECISION)
            of_dv = tl.dot(to_end, dstate.to(of_k.dtype), input_precision=PRECISION)
            across = tl.zeros([R, K], dtype=tl.float32)
            for i in range(j + 1, C // R):
                later = start + i * R
                at = first + (later + steps) * H
                of_q, of_do, framed_k = rows_of(q, at, cols, K), rows_of(do, at, vals, V), of_k
                framed_q = of_q
                if GATED:
                    b_q, r = rows_of(b, at, cols, K), _sums_before(b, first, later, start, H, cols, K)
                    framed_q, framed_k = (
                        _scaled(of_q, tl.exp(b_q - r[None, :])),
                        _scaled(of_k, tl.exp(r[None, :] - sums)),
                    )
                    of_q = _scaled(of_q, tl.exp(b_q - last[None, :]))
                part = tl.dot(framed_q, tl.trans(framed_k), input_precision=PRECISION) * scale
                of_dv = tl.dot(tl.trans(part.to(of_k.dtype)), of_do, of_dv, input_precision=PRECISION)
                part = tl.dot(of_do, tl.trans(of_v), input_precision=PRECISION) * scale
                across = tl.dot(tl.trans(part.to(of_k.dtype)), of_q, across, input_precision=PRECISION)
            of_q, of_do = rows_of(q, token, cols, K), rows_of(do, token, vals, V)
            own = own_scores(of_q, sums, k, b, first, row, H, R, K, GATED, PRECISION) * scale
            of_dv = tl.dot(tl.trans(own.to(of_k.dtype)), of_do, of_dv, input_precision=PRECISION)
            own_gradients = _own_score_gradients(of_do, of_v, scale, R, PRECISION)
            if GATED:
                of_dk += across * tl.exp(last[None, :] - sums)
                for t in range(R):
                    at = first + (row + t) * H
                    q_t, b_t = tl.load(q + at * K + cols).to(tl.float32), tl.load(b + at * K + cols)
                    gradients = tl.sum(tl.where(steps[:, None] == t, own_gradients.to(tl.float32), 0.0), axis=0)
                    of_dk += gradients[:, None] * q_t[None, :] * tl.exp(tl.minimum(b_t[None, :] - sums, 0.0))
            else:
                of_dk = tl.dot(tl.trans(own_gradients), of_q, of_dk + across, input_precision=PRECISION)
            tl.store(dv + token[:, None] * V + vals[None, :], of_dv.to(dv.dtype.element_ty))
            tl.store(part_of_dk + token[:, None] * K + cols[None, :], of_dk)
        if GATED:
            tl.store(adds + ((tl.program_id(0) * tl.num_programs(1) + bh) * chunks + n) * K + cols, add)
        dstate = _next_state(dstate, q, do, b, first, start, scale, H, C, R, K, V, BV, GATED, True, PRECISION)


class _Plan:
    """Sizes and tiles of a call, and launches with the arguments that all kernels share."""

    def __init__(self, q: Tensor, v: Tensor, C: int, c: int, gated: bool) -> None:
        self.B, self.T, self.H, self.K = q.shape
        self.V, self.C, self.gated = v.shape[-1], C, gated
        precision = "ieee" if q.dtype == torch.float32 else "tf32"
        self._known = {
            "scale": self.K**-0.5, "T": self.T, "H": self.H, "K": self.K, "V": self.V,
            "C": C, "R": c if gated else min(C, MOST_ROWS), "GATED": gated, "PRECISION": precision,
            "EXACT": "ieee" if precision == "ieee" else "tf32x3",
        }  # fmt: skip

    def programs(self, backward: bool) -> int:
        """Programs that share a head."""
        return self.V // value_columns(self.K, self.V, backward and self.gated)

    def launch(self, kernel: Any, *tensors: Tensor | None) -> None:
        """Launches a kernel with a program per head and block of value columns."""
        taken = {name: value for name, value in self._known.items() if name in kernel.arg_names}
        programs = self.programs(backward=kernel is not _forward)
        grid = programs, self.B * self.H
        # With three stages, K = 128 has no room for its tiles.
        kernel[grid](*tensors, BV=self.V // programs, **taken, num_warps=4 if self.K <= 64 else 8, num_stages=2)


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, C: int, c: int) -> Tensor:
        plan, o = _Plan(q, v, C, c, g is not None), torch.empty_like(v)
        plan.launch(_forward, q, k, v, None if g is None else chunk_sums(g, C), o)
        ctx.save_for_backward(q, k, v, g)
        ctx.plan = plan
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g = ctx.saved_tensors
        plan, do = ctx.plan, do.contiguous()
        b = None if g is None else chunk_sums(g, plan.C)
        programs = plan.programs(backward=True)
        # Sums are wide: over programs, and over tokens in dg. With neither, gradients are as large as their inputs.
        dtype = q.dtype if programs == 1 and b is None else torch.float32
        dq, dk = (x.new_empty((programs, *x.shape), dtype=dtype) for x in (q, k))
        dv = torch.empty_like(v)
        of_chunks = programs, plan.B, plan.H, plan.T // plan.C, plan.K
        reads, adds = (None if b is None else b.new_empty(of_chunks) for _ in range(2))
        plan.launch(_query_gradients, q, k, v, b, do, dq, reads)
        plan.launch(_key_and_value_gradients, q, k, v, b, do, dk, dv, adds)
        dq, dk = (x[0] if programs == 1 else x.sum(0) for x in (dq, dk))
        dg = None
        if reads is not None and adds is not None:
            kept = (reads.double() - adds.double()).sum(0)  # what a chunk reads less what it adds, [B, H, chunks, K]
            later = (kept.flip(2).cumsum(2).flip(2) - kept).permute(0, 2, 1, 3)[:, :, None]
            balance = (q * dq - k * dk).view(plan.B, -1, plan.C, plan.H, plan.K)
            dg = (balance.flip(2).cumsum(2).flip(2) + later).view_as(q).to(g.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv, dg, None, None


def one_pass_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, chunk: int = 64, subchunk: int = 16
) -> Tensor:
    """`two_level.two_level_gla` without states in memory, K up to 128.

    There are as many programs as sequences and heads, times blocks of value columns.
    """
    o: Tensor = _OnePass.apply(q, k, v, g, chunk, subchunk)  # type: ignore[no-untyped-call]
    return o
