"""The layer of Hyena (Poli et al., 2023) with order 2: its long convolution is a kernel of backends."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glabench.models.kernels import Kernel
from glabench.models.parts import widened
from glabench.models.states import LayerStates, MixerLayer, Place
from glabench.ops.hyena import FEATURES, HIDDEN, SHORT, filter_decays


class Filter(nn.Module):
    """h(t) = W_4 sin(f W_3 sin(f W_2 sin(f W_1 x_t))), times a decay, of x_t = (t / L, cos 2 pi t / L, sin 2 pi t / L).

    The first three layers have biases. L is the longest sequence; beyond it the filter goes on. Where x_t has one turn
    per L, the authors' code has 1e-4 of a turn with so few features, and learns x_t. Parameters, with
    m = 64: 4 m + 2 (m + 1) m + m + m d.
    """

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self._longest = longest
        self.first, self.second, self.third = (nn.Linear(inner, HIDDEN) for inner in (FEATURES, HIDDEN, HIDDEN))
        self.frequency = nn.Parameter(torch.ones(HIDDEN))
        self.last = nn.Linear(HIDDEN, width, bias=False)

    def reset(self) -> None:
        """Draws the weights as torch does for a linear layer; with those of other layers filters would be near 0."""
        for layer in (self.first, self.second, self.third, self.last):
            layer.reset_parameters()

    def forward(self, tokens: int) -> Tensor:
        """The first values [d, tokens], in float32 or wider."""
        frequency = widened(self.frequency)
        places = torch.arange(tokens, device=frequency.device, dtype=frequency.dtype) / self._longest
        angles = 2 * math.pi * places
        x = torch.stack((places, angles.cos(), angles.sin()), -1)
        with torch.autocast(x.device.type, enabled=False):
            for layer in (self.first, self.second, self.third):
                x = torch.sin(frequency * F.linear(x, widened(layer.weight), widened(layer.bias)))
            h = F.linear(x, widened(self.last.weight)).t().contiguous()
        return h * filter_decays(h, self._longest)


class Hyena(MixerLayer):
    """q, k, v = conv(W_in x + b); y = W_out (q * (h conv (k * v) + skip k * v)) + b, conv over 3 tokens.

    Parameters: 4 d E + 3 E + d + 12 E + E, and the filter's; E is the inner width.
    """

    op = "hyena"

    def __init__(self, width: int, inner: int, longest: int, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self.enter = nn.Linear(width, 3 * inner)
        self.short = nn.Conv1d(3 * inner, 3 * inner, SHORT, groups=3 * inner)
        self.filter = Filter(inner, longest)
        self.skip = nn.Parameter(torch.randn(inner))
        self.out = nn.Linear(inner, width)

    def reset(self) -> None:
        """Draws the filter's parameters; other initializations leave them alone."""
        self.filter.reset()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] to [B, T, d]."""
        return self._mix(x, *self._gates(F.pad(self._enter(x), (SHORT - 1, 0))))

    def make_states(self, batch: int, room: int) -> LayerStates:
        """The last two tokens before the short convolution, [B, 3 E, 2], and k v of all tokens, [B, room, E]."""
        like = self.enter.weight
        inner = self.out.in_features
        tail = like.new_zeros(batch, 3 * inner, SHORT - 1)
        return LayerStates(fixed=(tail,), caches=(like.new_zeros(batch, room, inner),))

    def prefill(self, x: Tensor, states: LayerStates) -> Tensor:
        """As `forward`; keeps what later tokens need."""
        (tail,), (cache,) = states.fixed, states.caches
        entered = F.pad(self._enter(x), (SHORT - 1, 0))
        q, k, v = self._gates(entered)
        tail.copy_(entered[..., 1 - SHORT :])
        cache[:, : x.shape[1]] = (k * v).transpose(1, 2)
        return self._mix(x, q, k, v)

    def decode(self, x: Tensor, states: LayerStates, place: Place) -> Tensor:
        """The next token of each sequence, x [B, 1, d] to the same, by a sum over all tokens before it."""
        (tail,), (cache,) = states.fixed, states.caches
        entered = torch.cat((tail, self._enter(x)), -1)
        q, k, v = (each[..., 0] for each in self._gates(entered))
        tail.copy_(entered[..., 1:])
        rows = place.once("rows", lambda: torch.arange(len(x), device=x.device))
        u = k * v
        cache[rows, place.tokens] = u.to(cache.dtype)
        age = place.tokens[:, None] - torch.arange(cache.shape[1], device=x.device)
        h = self.filter(cache.shape[1]).t()[age.clamp(min=0)].masked_fill((age < 0)[..., None], 0.0)
        y = (h * widened(cache)).sum(1) + widened(self.skip) * widened(u)
        mixed: Tensor = self.out((widened(q) * y).to(x.dtype)[:, None])
        return mixed

    def _enter(self, x: Tensor) -> Tensor:
        """[B, 3 E, T] before the short convolution."""
        entered: Tensor = self.enter(x)
        return entered.transpose(1, 2)

    def _gates(self, entered: Tensor) -> tuple[Tensor, ...]:
        """q, k and v [B, E, T] from [B, 3 E, T + 2], whose first two tokens came before."""
        return self.short(entered).chunk(3, dim=1)  # type: ignore[no-any-return]

    def _mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = {"q": q, "k": k, "v": v, "h": self.filter(x.shape[1]), "skip": widened(self.skip)}
        mixed: Tensor = self.out(self._kernel(inputs, x.shape[0], x.shape[1]).transpose(1, 2))
        return mixed
