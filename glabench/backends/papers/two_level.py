# mypy: allow-incomplete-defs, allow-untyped-decorators, allow-untyped-defs
"""GLA as the papers describe it, in Triton: chunks of C tokens, subchunks of c, states of all chunks in memory.

FIN, Algorithms 3 and 4, section 4.3 and Figures 3 and 7; what is wrong as printed is mended (docs/backends.md). Tensors
are q, k, g [B, T, H, K] and v, o [B, T, H, V], contiguous; b is the sum of a chunk's gates up to a token, E its last.

    states:   S' = exp(E) S + (K exp(E - b))^T V                                one chunk after another
    scores:   P_ij = sum_k Q_ik K_jk exp(b_ik - b_jk), j <= i                   all chunks at once
    outputs:  O = P V + (Q exp(b)) S                                            all chunks at once

Scores of two subchunks are products in the inputs' type of (Q exp(b - r)) and (K exp(r - b)), r before the later one
begins, so no exponent is above 0; those within one are sums in float32, channel by channel, off the tensor cores. The
backward has the same three steps with the states' gradients D, from the last chunk to the first:

    D = exp(E) D' + (Q exp(b))^T dO,   dP = dO V^T below the diagonal
    dV = P^T dO + (K exp(E - b)) D',   dQ = exp(b) (dO S^T) + sum_j dP_ij K_j exp(b_i - b_j)
    dK = exp(E - b) (V D'^T) + sum_i dP_ij Q_i exp(b_i - b_j)
    dg_t = sum_v S' D' + sums of Q dQ - K dK over the chunk's tokens from t on

The papers sum Q dQ - K dK to the end of the sequence, where their terms cancel: 1 % of dg is lost to the rounding of
bfloat16 at 512 tokens, and more at more. What follows a chunk is S' D', the state after it and the state's gradient;
with `over_sequence` the sum is the papers'.

Scores P and dP go through memory, as in public implementations of subchunks; Algorithms 3 and 4, which have no
subchunks, keep them on chip. `two_pass.py` is the same without gates, with all scores on chip; `one_pass.py` keeps
nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from glabench.backends.papers import MOST_COLUMNS, MOST_ROWS

# Numbers in a tile of a chunk's keys at most.
_TILE = 8192
# A gate below this empties a state in every format; sums of it are still exact enough.
_LEAST_GATE = -60.0


@triton.jit
def rows_of(x, token, cols, D: tl.constexpr):
    """Rows of x [tokens, D] at the places `token`, the columns `cols`."""
    return tl.load(x + token[:, None] * D + cols[None, :])


@triton.jit
def own_scores(
    of_q, b_q, k, b, first, row, H, R: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr
):
    """P / scale among the R tokens from `row` on, 0 above the diagonal: with gates sums in float32, by channel."""
    steps, cols = tl.arange(0, R), tl.arange(0, K)
    if GATED:
        own = tl.zeros([R, R], dtype=tl.float32)
        for t in range(R):
            token = first + (row + t) * H
            of_k, sums = tl.load(k + token * K + cols).to(tl.float32), tl.load(b + token * K + cols)
            # Exponents of earlier rows are above 0 and not used.
            factor = tl.exp(tl.minimum(b_q - sums[None, :], 0.0))
            score = tl.sum(of_q.to(tl.float32) * factor * of_k[None, :], axis=1)
            own += tl.where(steps[None, :] == t, score[:, None], 0.0)
    else:
        own = tl.dot(of_q, tl.trans(rows_of(k, first + (row + steps) * H, cols, K)), input_precision=PRECISION)
    return tl.where(steps[:, None] >= steps[None, :], own, 0.0)


@triton.jit
def _states(
    x, y, b, states, scale, T, H, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, GATED: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before every chunk (x = k, y = v), or its gradient after every chunk (x = q, y = dO)."""
    cols, vals = tl.program_id(0) * BK + tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    bh = tl.program_id(2).to(tl.int64)
    first, chunks = bh // H * T * H + bh % H, T // C
    state = tl.zeros([BK, BV], dtype=tl.float32)
    for step in range(chunks):
        n = chunks - 1 - step if REVERSE else step
        at = states + ((bh * chunks + n) * K + cols[:, None]) * V + vals[None, :]
        tl.store(at, state.to(states.dtype.element_ty))
        token = first + (n * C + tl.arange(0, C)) * H
        of_x, of_y = rows_of(x, token, cols, K), rows_of(y, token, vals, V)
        if GATED:
            sums = rows_of(b, token, cols, K)
            total = tl.load(b + (first + (n * C + C - 1) * H) * K + cols)
            factor = tl.exp(sums) * scale if REVERSE else tl.exp(total[None, :] - sums)
            of_x = (of_x.to(tl.float32) * factor).to(of_x.dtype)
            state *= tl.exp(total)[:, None]
        elif REVERSE:
            of_x = (of_x.to(tl.float32) * scale).to(of_x.dtype)
        state = tl.dot(tl.trans(of_x), of_y, state, input_precision=PRECISION)


@triton.jit
def _scores(q, k, b, scores, scale, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """P of the R rows of a subchunk, with all of its chunk up to them."""
    i, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, start = bh // H * T * H + bh % H, i * R // C * C
    steps, cols = tl.arange(0, R), tl.arange(0, K)
    rows = i * R + steps
    of_q = rows_of(q, first + rows * H, cols, K)
    out = scores + (bh * T + rows[:, None]) * C
    b_q = rows_of(b, first + rows * H, cols, K)
    # The sums before the subchunk; those of a chunk begin with 0.
    r = tl.load(b + (first + (i * R - 1) * H) * K + cols, mask=(i * R > start) & (cols < K), other=0.0)
    framed = (of_q.to(tl.float32) * tl.exp(b_q - r[None, :])).to(of_q.dtype)
    for j in range(start // R, i):
        token = first + (j * R + steps) * H
        of_k = rows_of(k, token, cols, K)
        of_k = (of_k.to(tl.float32) * tl.exp(r[None, :] - rows_of(b, token, cols, K))).to(of_k.dtype)
        part = tl.dot(framed, tl.trans(of_k), input_precision=PRECISION) * scale
        tl.store(out + (j * R - start + steps)[None, :], part.to(scores.dtype.element_ty))
    own = own_scores(of_q, b_q, k, b, first, i * R, H, R, K, True, PRECISION) * scale
    tl.store(out + (i * R - start + steps)[None, :], own.to(scores.dtype.element_ty))


@triton.jit
def _outputs(
    q, v, b, states, scores, o, scale, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr, WITHIN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """R rows and BV columns of o; of what passes within chunks, across chunks, or both."""
    i, bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, n = bh // H * T * H + bh % H, i * R // C
    steps, cols, vals = tl.arange(0, R), tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    rows = i * R + steps
    if ACROSS:
        of_q = rows_of(q, first + rows * H, cols, K).to(tl.float32) * scale
        of_q *= tl.exp(rows_of(b, first + rows * H, cols, K))
        state = tl.load(states + ((bh * (T // C) + n) * K + cols[:, None]) * V + vals[None, :])
        out = tl.dot(of_q.to(state.dtype), state, input_precision=PRECISION)
    else:
        out = tl.zeros([R, BV], dtype=tl.float32)
    if WITHIN:
        for j in range(n * C // R, i + 1):
            at = j * R + steps
            part = tl.load(scores + (bh * T + rows[:, None]) * C + (at - n * C)[None, :])
            part = tl.where(rows[:, None] >= at[None, :], part, 0.0).to(part.dtype)
            out = tl.dot(part, rows_of(v, first + at * H, vals, V), out, input_precision=PRECISION)
    tl.store(o + (first + rows * H)[:, None] * V + vals[None, :], out.to(o.dtype.element_ty))


@triton.jit
def _score_gradients(
    v, do, dscores, scale, T, H, C: tl.constexpr, R: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr
):
    """dP of R rows: dO V^T below the diagonal, times the scale of q."""
    i, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, start = bh // H * T * H + bh % H, i * R // C * C
    steps, vals = tl.arange(0, R), tl.arange(0, V)
    rows = i * R + steps
    of_do = rows_of(do, first + rows * H, vals, V)
    for j in range(start // R, i + 1):
        at = j * R + steps
        part = tl.dot(of_do, tl.trans(rows_of(v, first + at * H, vals, V)), input_precision=PRECISION) * scale
        part = tl.where(rows[:, None] >= at[None, :], part, 0.0)
        place = dscores + (bh * T + rows[:, None]) * C + (at - start)[None, :]
        tl.store(place, part.to(dscores.dtype.element_ty))


@triton.jit
def _value_gradients(
    k, b, do, dstates, scores, dv, T, H, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R rows and BV columns of dv."""
    j, bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, n = bh // H * T * H + bh % H, j * R // C
    steps, cols, vals = tl.arange(0, R), tl.arange(0, K), tl.program_id(1) * BV + tl.arange(0, BV)
    at = j * R + steps
    of_k = rows_of(k, first + at * H, cols, K)
    total = tl.load(b + (first + (n * C + C - 1) * H) * K + cols)
    factor = tl.exp(total[None, :] - rows_of(b, first + at * H, cols, K))
    of_k = (of_k.to(tl.float32) * factor).to(of_k.dtype)
    dstate = tl.load(dstates + ((bh * (T // C) + n) * K + cols[:, None]) * V + vals[None, :])
    out = tl.dot(of_k.to(dstate.dtype), dstate, input_precision=PRECISION)
    for i in range(j, (n + 1) * C // R):
        rows = i * R + steps
        part = tl.load(scores + (bh * T + rows[:, None]) * C + (at - n * C)[None, :])
        part = tl.where(rows[:, None] >= at[None, :], part, 0.0).to(part.dtype)
        out = tl.dot(tl.trans(part), rows_of(do, first + rows * H, vals, V), out, input_precision=PRECISION)
    tl.store(dv + (first + at * H)[:, None] * V + vals[None, :], out.to(dv.dtype.element_ty))


@triton.jit
def _key_gradients(
    q, k, v, b, do, states, dstates, dscores, dq, dk, dg, scale, T, H, C: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """R rows and BK columns of dq and dk, and of q dq - k dk, whose sums are dg."""
    i, bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first, n = bh // H * T * H + bh % H, i * R // C
    steps, cols = tl.arange(0, R), tl.program_id(1) * BK + tl.arange(0, BK)
    rows = i * R + steps
    token = first + rows * H
    of_dq, of_dk = tl.zeros([R, BK], dtype=tl.float32), tl.zeros([R, BK], dtype=tl.float32)
    for iv in range(V // BV):
        vals = iv * BV + tl.arange(0, BV)
        place = ((bh * (T // C) + n) * K + cols[:, None]) * V + vals[None, :]
        state, dstate = tl.load(states + place), tl.load(dstates + place)
        of_do, of_v = rows_of(do, token, vals, V), rows_of(v, token, vals, V)
        of_dq = tl.dot(of_do.to(state.dtype), tl.trans(state), of_dq, input_precision=PRECISION)
        of_dk = tl.dot(of_v.to(dstate.dtype), tl.trans(dstate), of_dk, input_precision=PRECISION)
    of_dq *= scale
    sums = rows_of(b, token, cols, K)
    total = tl.load(b + (first + (n * C + C - 1) * H) * K + cols)
    before = tl.load(b + (first + (i * R - 1) * H) * K + cols, mask=(i * R > n * C) & (cols < K), other=0.0)
    last = tl.load(b + (first + (i * R + R - 1) * H) * K + cols)
    of_dq *= tl.exp(sums)
    of_dk *= tl.exp(total[None, :] - sums)
    across = tl.zeros([R, BK], dtype=tl.float32)
    for j in range(n * C // R, i):
        at = j * R + steps
        of_k = rows_of(k, first + at * H, cols, K)
        of_k = (of_k.to(tl.float32) * tl.exp(before[None, :] - rows_of(b, first + at * H, cols, K))).to(of_k.dtype)
        part = tl.load(dscores + (bh * T + rows[:, None]) * C + (at - n * C)[None, :])
        across = tl.dot(part, of_k, across, input_precision=PRECISION)
    of_dq += across * tl.exp(sums - before[None, :])
    across = tl.zeros([R, BK], dtype=tl.float32)
    for j in range(i + 1, (n + 1) * C // R):
        at = j * R + steps
        of_q = rows_of(q, first + at * H, cols, K)
        of_q = (of_q.to(tl.float32) * tl.exp(rows_of(b, first + at * H, cols, K) - last[None, :])).to(of_q.dtype)
        part = tl.load(dscores + (bh * T + at[:, None]) * C + (rows - n * C)[None, :])
        across = tl.dot(tl.trans(part), of_q, across, input_precision=PRECISION)
    of_dk += across * tl.exp(last[None, :] - sums)
    # Before the loop, though used after it: a version that loaded them there took longer.
    own_q, own_k = rows_of(q, token, cols, K), rows_of(k, token, cols, K)
    own = dscores + bh * T * C - n * C
    for t in range(R):
        at = i * R + t
        b_t = tl.load(b + (first + at * H) * K + cols)
        k_t = tl.load(k + (first + at * H) * K + cols).to(tl.float32)
        q_t = tl.load(q + (first + at * H) * K + cols).to(tl.float32)
        # Zeros above the diagonal take out rows whose exponents are above 0.
        column = tl.load(own + rows * C + at).to(tl.float32)
        row = tl.load(own + at * C + rows).to(tl.float32)
        of_dq += column[:, None] * k_t[None, :] * tl.exp(tl.minimum(sums - b_t[None, :], 0.0))
        of_dk += row[:, None] * q_t[None, :] * tl.exp(tl.minimum(b_t[None, :] - sums, 0.0))
    balance = own_q.to(tl.float32) * of_dq - own_k.to(tl.float32) * of_dk
    tl.store(dg + token[:, None] * K + cols[None, :], balance)
    tl.store(dq + token[:, None] * K + cols[None, :], of_dq.to(dq.dtype.element_ty))
    tl.store(dk + token[:, None] * K + cols[None, :], of_dk.to(dk.dtype.element_ty))


@triton.jit
def _borders(
    states, dstates, borders, T, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Sums over values of the state after a chunk times its gradient, of BK keys; 0 after the last chunk."""
    n, bh = tl.program_id(0), tl.program_id(2).to(tl.int64)
    cols, chunks = tl.program_id(1) * BK + tl.arange(0, BK), T // C
    total = tl.zeros([BK], dtype=tl.float32)
    if n + 1 < chunks:
        for iv in range(V // BV):
            place = ((bh * chunks + n) * K + cols[:, None]) * V + (iv * BV + tl.arange(0, BV))[None, :]
            after = tl.load(states + place + K * V).to(tl.float32)
            total += tl.sum(after * tl.load(dstates + place).to(tl.float32), axis=1)
    tl.store(borders + (bh * chunks + n) * K + cols, total)


class Plan:
    """Sizes and tiles of a call in chunks of C and, with gates, subchunks of c, and launches of its kernels."""

    def __init__(self, q: Tensor, v: Tensor, C: int, c: int | None = None, rows: int = MOST_ROWS) -> None:
        self.B, self.T, self.H, self.K = q.shape
        self.V, self.C, self.gated = v.shape[-1], C, c is not None
        self.rows = min(C, rows)
        self.subchunk = c or self.rows
        self.BV = min(self.V, MOST_COLUMNS)
        self.BK = min(self.K, MOST_COLUMNS)
        self.scale = self.K**-0.5
        self.precision = "ieee" if q.dtype == torch.float32 else "tf32"
        self.state_shape = (self.B * self.H, self.T // C, self.K, self.V)
        self.score_shape = (self.B * self.H, self.T, C)
        # Programs per rows of outputs and blocks of value columns, and per rows of scores and blocks of key columns.
        self.by_values = (self.T // self.rows, self.V // self.BV, self.B * self.H)
        self.by_keys = (self.T // self.subchunk, self.K // self.BK, self.B * self.H)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *tensors: Tensor | None, warps: int = 4, **others: Any
    ) -> None:
        """Launches a kernel; what it takes of the sizes is passed by name."""
        known = {
            "scale": self.scale, "T": self.T, "H": self.H, "C": self.C, "K": self.K, "V": self.V, "BK": self.BK,
            "BV": self.BV, "R": self.rows, "GATED": self.gated, "PRECISION": self.precision,
        } | others  # fmt: skip
        taken = {name: value for name, value in known.items() if name in kernel.arg_names}
        kernel[grid](*tensors, **taken, num_warps=warps)

    def run_states(self, x: Tensor, y: Tensor, b: Tensor | None, reverse: bool) -> Tensor:
        """The states before all chunks, or their gradients after them, in the type of x."""
        states = x.new_empty(self.state_shape)
        BK = min(self.BK, state_rows(self.C))
        grid = (self.K // BK, self.V // self.BV, self.B * self.H)
        self.launch(_states, grid, x, y, b, states, BK=BK, REVERSE=reverse, warps=8 if self.C > MOST_ROWS else 4)
        return states

    def run_scores(self, q: Tensor, k: Tensor, b: Tensor) -> Tensor:
        """P [B H, T, C]; what is above the diagonal may be anything."""
        scores = q.new_empty(self.score_shape)
        self.launch(_scores, (self.T // self.subchunk, self.B * self.H), q, k, b, scores, R=self.subchunk)
        return scores

    def run_outputs(self, q: Tensor, v: Tensor, b: Tensor, states: Tensor | None, scores: Tensor | None) -> Tensor:
        """o; without states what passes within chunks alone, without scores what passes across them."""
        o = torch.empty_like(v)
        parts = {"WITHIN": scores is not None, "ACROSS": states is not None}
        self.launch(_outputs, self.by_values, q, v, b, states, scores, o, **parts)
        return o


class _TwoLevel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, C: int, c: int, over_sequence: bool) -> Tensor:
        plan, b = Plan(q, v, C, c), chunk_sums(g, C)
        states, scores = plan.run_states(k, v, b, reverse=False), plan.run_scores(q, k, b)
        o = plan.run_outputs(q, v, b, states, scores)
        ctx.save_for_backward(q, k, v, b, states, scores)
        ctx.plan, ctx.over_sequence = plan, over_sequence
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, b, states, scores = ctx.saved_tensors
        plan, do = ctx.plan, do.contiguous()
        dstates = plan.run_states(q, do, b, reverse=True)
        dscores, dq, dk, dv = torch.empty_like(scores), torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        balances = torch.empty_like(b)
        plan.launch(_score_gradients, (plan.T // plan.rows, plan.B * plan.H), v, do, dscores)
        plan.launch(_value_gradients, plan.by_values, k, b, do, dstates, scores, dv)
        tensors = (q, k, v, b, do, states, dstates, dscores, dq, dk, balances)
        plan.launch(_key_gradients, plan.by_keys, *tensors, R=plan.subchunk)
        if ctx.over_sequence:
            dg = balances.flip(1).cumsum(1).flip(1)
        else:
            borders = b.new_empty(plan.state_shape[:3])
            plan.launch(_borders, (plan.T // plan.C, plan.K // plan.BK, plan.B * plan.H), states, dstates, borders)
            of_chunks = balances.view(plan.B, -1, plan.C, plan.H, plan.K)
            later = borders.view(plan.B, plan.H, -1, 1, plan.K).permute(0, 2, 3, 1, 4)
            dg = (of_chunks.flip(2).cumsum(2).flip(2) + later).view_as(b)
        return dq, dk, dv, dg, None, None, None


def state_rows(C: int) -> int:
    """Rows of a state that a program has at most, so that a tile of a chunk's keys is not large."""
    return max(16, _TILE // C)


def chunk_sums(g: Tensor, C: int) -> Tensor:
    """b: the sum of a chunk's gates up to each token; g [B, T, H, K], T a multiple of C."""
    B, T, H, K = g.shape
    return g.clamp(min=_LEAST_GATE).view(B, T // C, C, H, K).cumsum(2).view(B, T, H, K)


def two_level_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, chunk: int = 64, subchunk: int = 16, over_sequence: bool = False
) -> Tensor:
    """GLA in chunks and subchunks. `over_sequence`: dg is a sum to the end of the sequence, as printed.

    T is a multiple of `chunk`, that of `subchunk`, and K and V are powers of two from 16 to 256.
    """
    o: Tensor = _TwoLevel.apply(q, k, v, g, chunk, subchunk, over_sequence)  # type: ignore[no-untyped-call]
    return o


def within_chunks(q: Tensor, k: Tensor, v: Tensor, b: Tensor, chunk: int, subchunk: int) -> Tensor:
    """The part of o that does not pass through states: scores, and their product with v. b: `chunk_sums`."""
    plan = Plan(q, v, chunk, subchunk)
    return plan.run_outputs(q, v, b, None, plan.run_scores(q, k, b))


def across_chunks(q: Tensor, k: Tensor, v: Tensor, b: Tensor, chunk: int, subchunk: int) -> Tensor:
    """The part of o that passes through states: these, and their product with q. b: `chunk_sums`."""
    plan = Plan(q, v, chunk, subchunk)
    return plan.run_outputs(q, v, b, plan.run_states(k, v, b, reverse=False), None)
