"""Distributions of GLA's gates, as natural logarithms (at most 0), from normal x [B, T, H, K]."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Tokens of a document, and of a chunk that is strong as a whole.
_DOCUMENT, _CHUNK = (350, 1050), 64
_DEAD = -1e4


def _sigmoid(x: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.logsigmoid(x)


def _gla(x: Tensor) -> Tensor:
    """GLA's own: logsigmoid(x) with a temperature of 16 (GLA paper, final version, section 4.4)."""
    return _sigmoid(x) / 16


def _rare_resets(x: Tensor, generator: Generator, share: float) -> Tensor:
    """GLA's own, but -inf in all channels for a share of the tokens of every head."""
    import torch

    g = _gla(x)
    g[torch.rand(g.shape[:3], generator=generator, device=g.device) < share] = -math.inf
    return g


def _documents(x: Tensor, generator: Generator) -> Tensor:
    """GLA's own, but -inf in all heads and channels at the first token of each document, of 700 tokens on average."""
    import torch

    batch, T = x.shape[:2]
    firsts = _pick(generator, *_DOCUMENT, (batch, T // _DOCUMENT[0] + 1)).cumsum(1).clamp(max=T)
    is_first = torch.zeros(batch, T + 1, dtype=torch.bool, device=x.device).scatter_(1, firsts, value=True)[:, :T]
    return _gla(x).masked_fill_(is_first[..., None, None], -math.inf)


def _one_reset(x: Tensor, generator: Generator) -> Tensor:
    """GLA's own, but -inf for one token of one head of one sequence."""
    g = _gla(x)
    g[tuple(_pick(generator, 0, size - 1) for size in g.shape[:3])] = -math.inf
    return g


def _one_strong_chunk(x: Tensor, generator: Generator) -> Tensor:
    """GLA's own, but `strong` for 64 tokens of one head of one sequence."""
    import torch

    B, T, H = x.shape[:3]
    batch, token, head = (_pick(generator, 0, size - 1) for size in (B, T, H))
    places = (token // _CHUNK * _CHUNK + torch.arange(_CHUNK, device=x.device)).clamp(max=T - 1)
    g = _gla(x)
    g[batch, places, head] = _sigmoid(3 * x[batch, places, head] - 3)
    return g


def _biased(x: Tensor, generator: Generator) -> Tensor:
    """logsigmoid(x + bias), with a normal bias per head and channel."""
    import torch

    return _sigmoid(x + torch.randn(x.shape[2:], generator=generator, device=x.device, dtype=x.dtype))


def _dead(x: Tensor, generator: Generator) -> Tensor:
    """GLA's own, but -10,000 in one channel of every head."""
    g = _gla(x)
    g[..., _pick(generator, 0, g.shape[-1] - 1)] = _DEAD
    return g


def _pick(generator: Generator, low: int, high: int, shape: tuple[int, ...] = (1,)) -> Tensor:
    """Whole numbers from `low` to `high`. They stay on the device, so that the host need not wait for them."""
    import torch

    return torch.randint(low, high + 1, shape, generator=generator, device=generator.device)


# By the values of the axis `gate`; the first is the default.
GATES: Mapping[str, Callable[[Tensor, Generator], Tensor]] = {
    "logsigmoid/16": lambda x, _: _gla(x),
    "logsigmoid": lambda x, _: _sigmoid(x),
    "slow": lambda x, _: _sigmoid(x + 4) / 16,
    "strong": lambda x, _: _sigmoid(3 * x - 3),
    "logsigmoid-x2": lambda x, _: _sigmoid(2 * x),
    "rwkv6": lambda x, _: -x.exp(),
    "channel-bias": _biased,
    "dead-channel": _dead,
    "resets": lambda x, generator: _rare_resets(x, generator, 0.02),
    "resets-1024": lambda x, generator: _rare_resets(x, generator, 1 / 1024),
    "documents": _documents,
    "one-reset": _one_reset,
    "one-strong-chunk": _one_strong_chunk,
}

# Those that tell channels of a head apart, so that no gate per head has them.
OF_CHANNELS = frozenset({"channel-bias", "dead-channel"})
