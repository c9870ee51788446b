"""The layer of RWKV-4 that mixes tokens (Peng et al., 2023): its weighted mean is a kernel of backends."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glabench.models.kernels import Kernel
from glabench.models.parts import widened
from glabench.models.states import LayerStates, MixerLayer, Place
from glabench.ops.rwkv4 import first_rates


class Rwkv4(MixerLayer):
    """r, k, v = W (m x_t + (1 - m) x_{t-1}), each with an m of its own per channel; y = W_o (sigmoid(r) wkv(k, v)).

    The mean is computed in float32. Parameters: 4 d E + 3 d + 2 E; E is the inner width.
    """

    op = "rwkv4"

    def __init__(self, width: int, inner: int, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.receptance = nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        self.w = nn.Parameter(first_rates(torch.ones(inner)))
        self.u = nn.Parameter(math.log(0.3) + 0.5 * (torch.arange(1, inner + 1) % 3 - 1).float())
        # As in the authors' middle layer: later channels look at the token itself.
        places = torch.arange(width) / width
        self.mix = nn.Parameter(torch.stack((places**0.25, places**0.5, places**0.5 + 0.15)))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] to [B, T, d]."""
        r, inputs = self._inputs(x, F.pad(x, (0, 0, 1, -1)))
        return self._project(r, self._kernel(inputs, *x.shape[:2]))

    def make_states(self, batch: int, room: int) -> LayerStates:  # noqa: ARG002
        """The states of the mean [B, 3, E], in float32 or wider, and the token before [B, 1, d]; zeros for any room."""
        like = self.key.weight
        states = widened(like.new_zeros(1)).new_zeros(batch, 3, self.key.out_features)
        return LayerStates(fixed=(states, like.new_zeros(batch, 1, self.key.in_features)))

    def prefill(self, x: Tensor, states: LayerStates) -> Tensor:
        """As `forward`; keeps the states after the last token."""
        kept, last = states.fixed
        r, inputs = self._inputs(x, F.pad(x, (0, 0, 1, -1)))
        o, final = self._kernel.with_states(inputs, *x.shape[:2])
        kept.copy_(final)
        last.copy_(x[:, -1:])
        return self._project(r, o)

    def decode(self, x: Tensor, states: LayerStates, place: Place) -> Tensor:  # noqa: ARG002
        """The next token of each sequence, x [B, 1, d] to the same; moves the states on."""
        kept, last = states.fixed
        r, inputs = self._inputs(x, last)
        o = self._kernel.step({**inputs, "initial": kept}, len(x))
        last.copy_(x)
        return self._project(r, o)

    def _inputs(self, x: Tensor, before: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """sigmoid(r), and the op's inputs."""
        own = self.mix.to(x.dtype)
        r, k, v = (torch.lerp(before, x, share) for share in own)
        inputs = {
            "k": widened(self.key(k)), "v": widened(self.value(v)), "w": widened(self.w), "u": widened(self.u)
        }  # fmt: skip
        return self.receptance(r).sigmoid(), inputs

    def _project(self, r: Tensor, o: Tensor) -> Tensor:
        y: Tensor = self.out(r * o.to(r.dtype))
        return y
