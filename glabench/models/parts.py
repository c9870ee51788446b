"""What all models share: the MLP, rotary positions, the causal convolution before a scan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glabench.models.states import Place

_BASE = 10_000.0
_MULTIPLE = 256


def widened(x: Tensor) -> Tensor:
    """In float32, or in its own type if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def hidden_width(width: int, ratio: float) -> int:
    """The inner width of a SwiGLU that has as many parameters as an MLP of `ratio` times the width, in whole tiles."""
    return -(-int(width * ratio * 2 / 3) // _MULTIPLE) * _MULTIPLE


class Norm(nn.RMSNorm):
    """y = w x / sqrt(mean(x^2) + eps), in x's type, or in autocast's. Parameters: d.

    Weights are taken in x's type, because torch's fused kernel takes no other. Under autocast every product behind the
    norm would cast y for itself, and keep its own copy for the backward.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] to [..., d]."""
        y = F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
        is_cast = torch.is_autocast_enabled(x.device.type)
        return y.to(torch.get_autocast_dtype(x.device.type)) if is_cast else y


class SwiGlu(nn.Module):
    """y = W_3 (Swish(W_1 x) * W_2 x) (final paper, section 4.4). Parameters: 3 d h."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] to [..., d]."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Rotary(nn.Module):
    """Turns pairs (i, i + D/2) of a head's channels by t / 10000^(2i/D) at token t (RoFormer). No parameters."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head dim; got {head_dim}")
        self._head_dim = head_dim

    def forward(self, *heads: Tensor, start: Place | int = 0) -> tuple[Tensor, ...]:
        """Each [B, T, H, D] of one shape, in its own type; angles are in float32. `start`: the first token's place."""
        if isinstance(start, Place):
            cos, sin = start.once((Rotary, self._head_dim), lambda: self._turns(start.tokens[:, None]))
        else:
            cos, sin = self._turns(torch.arange(start, start + heads[0].shape[1], device=heads[0].device))
        # All at once and in few operations, which count in a step of one token.
        x = torch.stack(heads)
        turned = torch.addcmul(x * cos, x.roll(self._head_dim // 2, -1), sin)
        return turned.to(x.dtype).unbind()

    def _turns(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., 1, D] of places [...]; what comes from the other half of the channels has sin's sign."""
        evens = torch.arange(0, self._head_dim, 2, device=places.device, dtype=torch.float32)
        angles = places[..., None, None] * _BASE ** -(evens / self._head_dim)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class CausalConv(nn.Module):
    """y_t = Swish(sum_i w_i x_{t-i} + b) for every channel, over 4 tokens, as before Mamba's scans.

    By the package causal-conv1d on a GPU, if it is installed, but for float64. Parameters: 5 per channel.
    """

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
        nn.init.uniform_(self.bias, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, channels, T] to the same."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if (fused := _fused_conv(x)) is not None:
            # The package takes channels that lie side by side only if tokens and sequences begin at every eighth.
            x = x if all(stride % 8 == 0 for stride in (x.stride(0), x.stride(2))) else x.contiguous()
            return fused(x, weight, bias, activation="silu")  # type: ignore[no-any-return]
        padded = F.pad(x, (weight.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]))

    def make_tail(self, batch: int) -> Tensor:
        """Room for the last tokens [B, channels, 4], which steps need, in the weights' type."""
        return self.weight.new_zeros(batch, *self.weight.shape)

    def keep_tail(self, x: Tensor, tail: Tensor) -> None:
        """Keeps the last tokens of x [B, channels, T]; zeros before the first."""
        width = tail.shape[-1]
        tail.copy_(F.pad(x[..., -width:], (max(0, width - x.shape[-1]), 0)))

    def step(self, x: Tensor, tail: Tensor) -> Tensor:
        """The next token, x [B, channels, 1] to the same; it becomes the tail's last one."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if (fused := _fused_conv(x, "causal_conv1d_update")) is not None:
            return fused(x[..., 0], tail, weight, bias, activation="silu")[..., None]  # type: ignore[no-any-return]
        tail.copy_(torch.cat((tail[..., 1:], x), -1))
        y = (widened(tail) * widened(weight)).sum(-1, keepdim=True) + widened(bias)[:, None]
        return F.silu(y).to(x.dtype)


def _fused_conv(x: Tensor, name: str = "causal_conv1d_fn") -> Callable[..., Any] | None:
    """The package's function, if it takes x."""
    return _of_package(name) if x.is_cuda and x.dtype != torch.float64 else None


@cache
def _of_package(name: str) -> Callable[..., Any] | None:
    if find_spec("causal_conv1d") is None:
        return None
    import causal_conv1d

    return getattr(causal_conv1d, name)  # type: ignore[no-any-return]
