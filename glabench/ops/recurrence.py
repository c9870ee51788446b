"""Recurrences in chunks, differentiated by autograd: the references of all ops but softmax attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from glabench.ops.recompute import recomputed
from glabench.ops.segments import CHUNK, SHORTEST, segment_tokens

if TYPE_CHECKING:
    from torch import Tensor

# Replaces -inf, because -inf - -inf is NaN. exp of it is 0 in float64, and sums of it are still exact enough.
_NO_GATE_BELOW = -800.0


def gated_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial: Tensor | None = None, gv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`S_t = diag(exp g_t) S_{t-1} + k_t^T v_t`, `o_t = q_t S_t / sqrt(K)` (GLA paper, final version, section 4.1).

    q, k, g [B, T, H, K], v [B, T, H, V] and the initial state [B, H, K, V] (zeros if None), all of one dtype, give o
    [B, T, H, V] and the final state. Without gates if g is None. All exponents are at most 0, so any gate is handled,
    also -inf. The relative error for float64 inputs is about 1e-12.

    With gates of values gv [B, T, H, V]: `S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t^T v_t` (version 3, eq. 12).
    """
    K, V = q.shape[-1], v.shape[-1]
    B, T, H, _ = q.shape
    state = q.new_zeros((B, H, K, V)) if initial is None else initial
    segment: Callable[..., tuple[Tensor, Tensor]] = _ungated_segment
    rows: tuple[Tensor, ...] = (q * K**-0.5, k, v)
    if g is not None or gv is not None:
        gates = torch.zeros_like(q) if g is None else g.clamp(min=_NO_GATE_BELOW)
        segment, rows = _segment, (*rows, gates)
    if gv is not None:
        segment, rows = _value_gated_segment, (*rows, gv.clamp(min=_NO_GATE_BELOW))
    length = segment_tokens(B * H, K if gv is None else max(K, V))
    outputs = []
    for start in range(0, T, length):
        pieces = (*(x[:, start : start + length] for x in rows), state)
        out, state = segment(*pieces) if length >= T else recomputed(segment, *pieces)
        outputs.append(out)
    return torch.cat(outputs, 1), state


def packed_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, borders: Sequence[int], initial: Tensor | None = None,
    gv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`gated_recurrence` of each of N sequences that lie one behind the other in rows [B, T, ...].

    Sequence n has the tokens from `borders[n]` until `borders[n + 1]`, and the states [N, H, K, V] have its initial and
    final state; if B is not 1, [B, N, H, K, V] has its final one.
    """
    outputs, finals = [], []
    for number, (start, end) in enumerate(pairwise(borders)):
        own = slice(start, end)
        gates, of_values = (None if x is None else x[:, own] for x in (g, gv))
        state = None if initial is None else initial[number : number + 1]
        out, final = gated_recurrence(q[:, own], k[:, own], v[:, own], gates, state, of_values)
        outputs.append(out)
        finals.append(final)
    states = torch.stack(finals, 1)
    return torch.cat(outputs, 1), states[0] if len(states) == 1 else states


def _ungated_segment(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`_segment` without gates."""
    T = q.shape[1]
    q, k, v = (_in_chunks(x) for x in (q, k, v))
    states = state[:, :, None] + F.pad((k.transpose(-1, -2) @ v).cumsum(2), (0, 0, 0, 0, 1, 0))
    out = (q @ k.transpose(-1, -2)).tril() @ v + q @ states[:, :, :-1]
    return out.flatten(2, 3).transpose(1, 2)[:, :T], states[:, :, -1]


def _segment(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The output of some tokens, and the state after them, from the state [B, H, K, V] before them."""
    T = q.shape[1]
    q, k, v, g = (_in_chunks(x) for x in (q, k, v, g))
    G = g.cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)[..., None]
    between = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(later, -math.inf).exp()
    scores = _scores(q, k, between)
    within = scores @ v
    from_start, to_end = q * G.exp(), k * (G[..., -1:, :] - G).exp()
    added = to_end.transpose(-1, -2) @ v
    # The state before each chunk: that before the segment and what the chunks in between added, decayed since. Sums of
    # the segment's gates are in float64, because small differences of them count.
    until = F.pad(G[..., -1, :].double().cumsum(-2), (0, 0, 1, 0))
    earlier = torch.ones(until.shape[-2], q.shape[2], dtype=torch.bool, device=q.device).tril(-1)[..., None]
    since = (until[..., :, None, :] - until[..., None, 1:, :]).masked_fill(~earlier, -math.inf).exp().to(q.dtype)
    states = (
        torch.einsum("...nmk,...mkv->...nkv", since, added) + until.exp().to(q.dtype)[..., None] * state[:, :, None]
    )
    out = within + from_start @ states[:, :, :-1]
    return out.flatten(2, 3).transpose(1, 2)[:, :T], states[:, :, -1]


def _value_gated_segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, gv: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`_segment` with gates of values too, from chunk to chunk."""
    T = q.shape[1]
    q, k, v, g, gv = (_in_chunks(x) for x in (q, k, v, g, gv))
    G, of_values = g.cumsum(-2), gv.cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)[..., None]
    between, of_pairs = (
        (sums[..., :, None, :] - sums[..., None, :, :]).masked_fill(later, -math.inf).exp() for sums in (G, of_values)
    )
    scores = _scores(q, k, between)
    within = torch.einsum("...ij,...ijv,...jv->...iv", scores, of_pairs, v)
    added = (k * (G[..., -1:, :] - G).exp()).transpose(-1, -2) @ (v * (of_values[..., -1:, :] - of_values).exp())
    passed = G[..., -1, :, None].exp() * of_values[..., -1, None, :].exp()
    from_start, out_of_state = q * G.exp(), of_values.exp()
    outputs = []
    for chunk in range(q.shape[2]):
        outputs.append(within[:, :, chunk] + (from_start[:, :, chunk] @ state) * out_of_state[:, :, chunk])
        state = passed[:, :, chunk] * state + added[:, :, chunk]
    return torch.stack(outputs, 2).flatten(2, 3).transpose(1, 2)[:, :T], state


def selective_scan(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`x_t = exp(D_t A) x_{t-1} + D_t B_t u_t`, `y_t = C_t x_t + D u_t`, `D_t = softplus(delta_t)` (Mamba, section 3).

    u, delta [B, D, T]; A [D, N] below 0; B, C [B, N, T]; D [D] and the initial states [B, D, N] (zeros if there are
    none), all of one dtype, give y [B, D, T] and the final states. All chunks are scanned in parallel from a zero
    state; then the state before each chunk is added.
    """
    u, A = inputs["u"], inputs["A"]
    T = u.shape[-1]
    C = max(1, math.isqrt(T))
    step = F.softplus(inputs["delta"])
    # [row, B, D, N, chunk]; padding rows neither decay nor add.
    gate, added = (
        F.pad(x, (0, -T % C)).reshape(*x.shape[:-1], -1, C).movedim(-1, 0).contiguous()
        for x in (step[:, :, None] * A[..., None], (step * u)[:, :, None] * inputs["B"][:, None])
    )
    # `unbind`, because the backward of an index would fill a tensor of the whole size for every row.
    first, *others = added.unbind()
    local = [first]
    for kept, adds in zip(gate.exp().unbind()[1:], others, strict=True):
        local.append(kept * local[-1] + adds)
    within, passed = torch.stack(local), gate.cumsum(0).exp()
    before = [inputs["initial"] if "initial" in inputs else torch.zeros_like(first[..., 0])]
    for kept, adds in list(zip(passed[-1].unbind(-1), within[-1].unbind(-1), strict=True))[:-1]:
        before.append(kept * before[-1] + adds)
    states = (within + passed * torch.stack(before, -1)).movedim(0, -1).flatten(-2)[..., :T]
    return (states * inputs["C"][:, None]).sum(2) + u * inputs["D"][:, None], states[..., -1]


def delta_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """`S_t = (I - b_t k_t^T k_t) diag(exp g_t) S_{t-1} + b_t k_t^T v_t`, `o_t = q_t S_t / sqrt(K)`, from zero states.

    q, k, g [B, T, H, K], v [B, T, H, V] and beta [B, T, H], all of one dtype, give o [B, T, H, V] and the final state
    [B, H, K, V]. What the tokens of a chunk add, u, solves a triangular system (Gated DeltaNet, section 3.3).
    """
    state = q.new_zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
    rows = (q * q.shape[-1] ** -0.5, k, v, g.clamp(min=_NO_GATE_BELOW), beta[..., None])
    outputs = []
    for start in range(0, q.shape[1], SHORTEST):
        pieces = (*(x[:, start : start + SHORTEST] for x in rows), state)
        out, state = _delta_segment(*pieces) if q.shape[1] <= SHORTEST else recomputed(_delta_segment, *pieces)
        outputs.append(out)
    return torch.cat(outputs, 1), state


def _delta_segment(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The output of some tokens, and the state after them, from the state [B, H, K, V] before them."""
    T, V = q.shape[1], v.shape[-1]
    q, k, v, g, beta = (_in_chunks(x) for x in (q, k, v, g, beta))
    G = g.cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(later[..., None], -math.inf).exp()
    scores = _scores(q, k, between)
    overlaps = beta * _scores(k, k, between).tril(-1)
    system = overlaps + torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    given = beta * torch.cat((v, k * G.exp()), -1)
    from_values, from_state = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True).split(
        (V, k.shape[-1]), -1
    )
    from_start, to_end, passed = q * G.exp(), k * (G[..., -1:, :] - G).exp(), G[..., -1, :, None].exp()
    outputs = []
    for chunk in range(q.shape[2]):
        u = from_values[:, :, chunk] - from_state[:, :, chunk] @ state
        outputs.append(from_start[:, :, chunk] @ state + scores[:, :, chunk] @ u)
        state = passed[:, :, chunk] * state + to_end[:, :, chunk].transpose(-1, -2) @ u
    return torch.stack(outputs, 2).flatten(2, 3).transpose(1, 2)[:, :T], state


def _scores(q: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """`sum_k q_ik k_jk between_ijk`, in half of the time and memory that einsum takes for three tensors."""
    return ((between * k[..., None, :, :]) @ q[..., None]).squeeze(-1)


def _in_chunks(x: Tensor) -> Tensor:
    """Rows [B, T, H, D] as [B, H, chunk, row, D]; padding rows are zeros, which neither decay nor add."""
    padded = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK)).transpose(1, 2)
    return padded.reshape(*padded.shape[:2], -1, CHUNK, padded.shape[-1])
