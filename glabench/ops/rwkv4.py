"""The mixer of RWKV-4 without its projections: a weighted mean of values, of which old ones count less."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from glabench.ops.base import BYTES, Op, Spec, wide
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, integers

if TYPE_CHECKING:
    from torch import Generator, Tensor

# Tokens of a chunk of the reference, which computes all pairs of them for each channel.
_CHUNK = 16
# The most that the reference takes as a rate: infinity times an age of 0 would be NaN.
_FASTEST = 1e30


class Rwkv4(Op):
    """k, v, o [B, T, D]; w and u [D] in float32: the rate of forgetting is e^w, and a token adds u to its own key."""

    name = "rwkv4"
    equation = (
        "o_t = (sum_{i < t} exp(k_i - (t-1-i) e^w) v_i + exp(u + k_t) v_t) / (the same sum of weights without values)"
    )
    parameters = (integers("inner", "Channels D.", 1024),)
    independent = ("batch", "inner")
    small: ClassVar[Mapping[str, int]] = {"inner": 128}
    reference_name = "chunked recurrence of the weighted mean"

    def published(self, width: int) -> dict[str, Value]:
        """The model's width."""
        return {"inner": width}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        (D,) = cell.sizes("inner")
        shared = Spec(("inner",), (D,), wide(cell))
        return {"k": self.output(cell), "v": self.output(cell), "w": shared, "u": shared}

    def output(self, cell: Cell) -> Spec:
        (D,) = cell.sizes("inner")
        return Spec(("batch", "seqlen", "inner"), (cell.batch, cell.seqlen, D))

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """w and u about as when training begins: rates from e^-5 to e^3, u about log 0.3."""
        if name == "w":
            return first_rates(x) + 0.1 * x
        return x * 0.5 + math.log(0.3) if name == "u" else x

    def forward_flops(self, cell: Cell) -> int:
        """Per token and channel 2 for the sums' decay, 3 to add a token to both, 3 to do so for o alone, 1 to divide.

        Exponents do not count.
        """
        (D,) = cell.sizes("inner")
        return cell.tokens * D * 9

    def state_bytes(self, cell: Cell) -> int:
        """Two sums and the exponent that both are relative to; the last token of the layer's shift is not included."""
        (D,) = cell.sizes("inner")
        return 3 * D * BYTES[wide(cell)]

    def layer_parameters(self, cell: Cell) -> int:
        """Four square projections, w, u, and three weights per channel for the token before."""
        (D,) = cell.sizes("inner")
        return 4 * D * D + 5 * D

    def reference_numbers(self, cell: Cell) -> int:
        """Besides the tensors, pairs of tokens in a chunk."""
        return super().reference_numbers(cell) + 6 * cell.seqlen * (_CHUNK + 2)

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The output, and the states after the last token [B, 3, D]: both sums, and the exponent they are relative to.

        `initial` may be among the inputs; zeros are an empty state.
        """
        import torch

        k, v, rate, u = inputs["k"], inputs["v"], inputs["w"].exp().clamp(max=_FASTEST), inputs["u"]
        values, weights, exponent = inputs.get("initial", k.new_zeros(k.shape[0], 3, k.shape[2])).unbind(1)
        state = State(values, weights, exponent.masked_fill(weights == 0, -math.inf))
        whole = k.shape[1] // _CHUNK * _CHUNK
        outputs = []
        for part, chunk in ((slice(0, whole), _CHUNK), (slice(whole, None), k.shape[1] - whole)):
            if k[:, part].shape[1]:
                out, state = _chunks(k[:, part], v[:, part], rate, u, state, chunk)
                outputs.append(out)
        return torch.cat(outputs, 1), torch.stack(state, 1)


class State(NamedTuple):
    """The sum of weighted values, that of weights, and the exponent that both are relative to, [..., D] each."""

    values: Tensor
    weights: Tensor
    exponent: Tensor

    def after(self, earlier: State, decay: Tensor) -> State:
        """The sum of both, the earlier one forgotten by e^-decay."""
        import torch

        kept = earlier.exponent - decay
        exponent = torch.maximum(kept, self.exponent).detach()
        old, new = (kept - exponent).exp(), (self.exponent - exponent).exp()
        values, weights = (old * before + new * own for before, own in zip(earlier[:2], self[:2], strict=True))
        return State(values, weights, exponent)

    def part(self, chunks: slice) -> State:
        """Of states [B, N, D] some."""
        return State(*(x[:, chunks] for x in self))


def _chunks(k: Tensor, v: Tensor, rate: Tensor, u: Tensor, state: State, C: int) -> tuple[Tensor, State]:
    """Outputs of whole chunks of C tokens [B, N C, D], all at once, and the state after them."""
    import torch

    keys, own = (torch.unflatten(x, 1, (-1, C)) for x in (k, v))
    t = torch.arange(C, device=k.device, dtype=k.dtype)
    # Exponents [B, N, C, C, D] of the weights of earlier tokens, and the own one's.
    age = (t[:, None] - 1 - t[None, :])[..., None]
    exponents = torch.where(age == -1, keys[:, :, None] + u, keys[:, :, None] - age.clamp(min=0) * rate)
    exponents = exponents.masked_fill(age < -1, -math.inf)
    most = exponents.amax(3).detach()
    shares = (exponents - most[:, :, :, None]).exp()
    within = State((shares * own[:, :, None]).sum(3), shares.sum(3), most)

    left = keys - (C - 1 - t)[:, None] * rate
    most = left.amax(2).detach()
    shares = (left - most[:, :, None]).exp()
    ends = State((shares * own).sum(2), shares.sum(2), most)
    # Sums over all chunks before, in steps of twice the distance; the first state comes before all.
    all_states = State(*(torch.cat((first[:, None], x), 1) for first, x in zip(state, ends, strict=True)))
    distance = 1
    while distance < all_states.values.shape[1]:
        later = all_states.part(slice(distance, None))
        summed = later.after(all_states.part(slice(0, -distance)), distance * C * rate)
        first = all_states.part(slice(0, distance))
        all_states = State(*(torch.cat(pair, 1) for pair in zip(first, summed, strict=True)))
        distance *= 2
    before = State(*(x[:, :-1, None] for x in all_states))
    summed = within.after(before, t[:, None] * rate)
    return (summed.values / summed.weights).flatten(1, 2), State(*(x[:, -1] for x in all_states))


def first_rates(like: Tensor) -> Tensor:
    """w [D] of a model's middle layer before training: from -5 in the first channel to 3 in the last (RWKV-4)."""
    import torch

    D = like.shape[0]
    places = torch.arange(D, device=like.device, dtype=like.dtype) / max(D - 1, 1)
    return 8 * places**1.35 - 5


RWKV4 = Rwkv4()
