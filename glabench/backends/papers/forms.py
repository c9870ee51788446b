"""Linear attention and GLA in forms that do not work in chunks, in PyTorch: all pairs of tokens, and a scan over time.

Tensors are q, k, g [B, T, H, K] and v, o [B, T, H, V]; q is scaled by K ** -0.5. Gradients are autograd's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from glabench.backends.papers import TARGETS
from glabench.ops.recompute import recomputed

# Replaces -inf, because -inf - -inf is NaN: exp of it is 0, and sums of it in float64 are still exact enough.
_NO_GATE_BELOW = -800.0


def _by_head(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Scaled q and the others as [B, H, T, D], in the dtype of the last."""
    tensors = (x.to(others[-1].dtype).transpose(1, 2) for x in (q, *others))
    return next(tensors) * q.shape[-1] ** -0.5, *tensors


def parallel_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`O = (Q K^T * M) V` with the causal mask M, in the inputs' dtype (FIN section 2.1, V3 section 2.1)."""
    qh, kh, vh = _by_head(q, k, v)
    return ((qh @ kh.mT).tril() @ vh).transpose(1, 2)


def naive_parallel_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """`O = ((Q * B)(K / B)^T * M) V`, B = exp of the gates' sums, in g's dtype (FIN section 4.1, V3 equation 13).

    1 / B grows with every token: beyond some sum of gates results are infinite or NaN.
    """
    qh, kh, vh, gh = _by_head(q, k, v, g)
    B = gh.cumsum(2).exp()
    scores = ((qh * B) @ (kh / B).mT).tril()
    return (scores @ vh).transpose(1, 2).to(v.dtype)


def parallel_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """`P_ij = sum_k Q_ik K_jk exp(log B_ik - log B_jk)`, `O = (P * M) V` (FIN equation 4): stable for any gates.

    No product of matrices: every pair has a factor of its own in every channel. They are computed for a few targets at
    a time and again in the backward, because those of all pairs would take T^2 K numbers per head.
    """
    qh, kh, vh, gh = _by_head(q, k, v, g)
    sums = gh.clamp(min=_NO_GATE_BELOW).double().cumsum(2)  # whose differences count
    parts: list[Tensor] = []
    for i in range(0, q.shape[1], TARGETS):
        own, until = slice(i, i + TARGETS), slice(0, i + TARGETS)  # no later source reaches these targets
        tensors = qh[:, :, own], kh[:, :, until], vh[:, :, until], sums[:, :, own], sums[:, :, until]
        parts += recomputed(_some_rows, *tensors)
    return torch.cat(parts, 2).transpose(1, 2).to(v.dtype)


def _some_rows(q: Tensor, k: Tensor, v: Tensor, targets: Tensor, sources: Tensor) -> tuple[Tensor]:
    """The outputs [B, H, R, V] of R targets, the last of the T sources; with the gates' sums of both."""
    R, T = targets.shape[2], sources.shape[2]
    later = torch.ones(R, T, dtype=torch.bool, device=q.device).triu(T - R + 1)[..., None]
    between = (targets[:, :, :, None] - sources[:, :, None]).masked_fill(later, -math.inf).exp().to(q.dtype)
    return (torch.einsum("bhik,bhjk,bhijk->bhij", q, k, between) @ v,)


def scan_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """`(a, X) o (a', X') = (a a', a' X + X')` over all tokens in log2 T steps (GateLoop; FIN section 6, V3 section 5).

    The state after every token, [B, H, T, K, V] in g's dtype, is in memory, and one per step of the scan for autograd.
    """
    qh, kh, vh, gh = _by_head(q, k, v, g)
    states, decay, reach = kh[..., None] * vh[..., None, :], gh.exp()[..., None], 1
    while reach < q.shape[1]:
        # What token t - reach has gathered from as many tokens decays by the gates of those up to t.
        early, late = states[:, :, :-reach], states[:, :, reach:]
        states = torch.cat([states[:, :, :reach], late + decay[:, :, reach:] * early], 2)
        decay = torch.cat([decay[:, :, :reach], decay[:, :, reach:] * decay[:, :, :-reach]], 2)
        reach *= 2
    return torch.einsum("bhtk,bhtkv->bthv", qh, states).to(v.dtype)
