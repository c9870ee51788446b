"""The mixer of Transformer++: causal softmax attention with rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import distributions
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glabench.models.kernels import Kernel
from glabench.models.parts import Rotary
from glabench.models.sequence import Stretch
from glabench.models.states import LayerStates, MixerLayer, Place


class Softmax(MixerLayer):
    """o = softmax(q k^T / sqrt(D), causal) v with rotary positions of q and k, y = W_o o. Parameters: 4 d H D."""

    op = "softmax"

    def __init__(self, width: int, heads: int, head_dim: int, kernel: Kernel) -> None:
        super().__init__()
        self._heads, self._kernel = (heads, head_dim), kernel
        self.q = nn.Linear(width, heads * head_dim, bias=False)
        self.k = nn.Linear(width, heads * head_dim, bias=False)
        self.v = nn.Linear(width, heads * head_dim, bias=False)
        self.rotary = Rotary(head_dim)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] to [B, T, d]."""
        return self._attend(x, self._inputs(x))

    def share(self, x: Tensor, stretch: Stretch) -> Tensor:
        """x [B, T, d] to [B, T, d], a stretch of sequences that other processes have the rest of.

        Each process attends over all tokens with its share of the heads.
        """
        inputs = self._inputs(x, stretch.rank * x.shape[1])
        own = dict(zip(inputs, stretch.to_heads(*inputs.values()), strict=True))
        B, T, H, _ = own["q"].shape
        o = stretch.to_tokens(self._kernel.of_heads(H)(own, B, T))
        y: Tensor = self.out(o.flatten(-2))
        return y

    def make_states(self, batch: int, room: int) -> LayerStates:
        """Caches of keys and values, [B, room, H, D] each, in the weights' type."""
        return LayerStates(caches=(self._make_cache(batch, room), self._make_cache(batch, room)))

    def prefill(self, x: Tensor, states: LayerStates) -> Tensor:
        """As `forward`; keeps keys and values."""
        inputs = self._inputs(x)
        for own, name in zip(states.caches, "kv", strict=True):
            own[:, : x.shape[1]] = inputs[name]
        return self._attend(x, inputs)

    def decode(self, x: Tensor, states: LayerStates, place: Place) -> Tensor:
        """The next token of each sequence, x [B, 1, d] to the same, at its place; keeps its key and value there."""
        (keys, values), new = states.caches, self._inputs(x, place)
        y: Tensor = self.out(attend_to_cache(new["q"], new["k"], new["v"], keys, values, place).flatten(-2))
        return y

    def _inputs(self, x: Tensor, start: Place | int = 0) -> dict[str, Tensor]:
        q, k, v = (project(x).unflatten(-1, self._heads) for project in (self.q, self.k, self.v))
        q, k = self.rotary(q, k, start=start)
        return {"q": q, "k": k, "v": v}

    def _attend(self, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.out(self._kernel(inputs, *x.shape[:2]).flatten(-2))
        return y

    def _make_cache(self, batch: int, room: int) -> Tensor:
        return self.k.weight.new_zeros(batch, room, *self._heads)


def attend_to_cache(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, place: Place) -> Tensor:
    """o [B, 1, H, D] of one token of each sequence, q, k and v [B, 1, H, D], whose k and v go to their place.

    `keys` and `values`: caches [B, room, H, D], of which what is behind a sequence's place is not read. By the package
    flash-attn on a GPU in half precision, if it is installed; otherwise by torch with a mask over the whole cache.
    """
    rows = place.once("rows", lambda: torch.arange(len(q), device=q.device))
    keys[rows, place.tokens], values[rows, place.tokens] = k[:, 0], v[:, 0]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and (fused := fused_attention()) is not None:
        lengths = place.once("lengths", lambda: place.tokens + 1)
        return fused(q, keys, values, cache_seqlens=lengths, causal=True)  # type: ignore[no-any-return]
    is_there = torch.arange(keys.shape[1], device=q.device) <= place.tokens[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=is_there[:, None, None]).transpose(1, 2)


@cache
def fused_attention() -> Callable[..., Any] | None:
    """`flash_attn_with_kvcache`, if flash-attn is installed; FlashAttention-4 has the same import name."""
    if not any(distributions(name="flash-attn")):
        return None
    from flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache  # type: ignore[no-any-return]
