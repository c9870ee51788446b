"""The state-space dual of Mamba-2, without its projections, convolution, gate and norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec, check_width, wide
from glabench.ops.segments import pair_numbers
from glabench.ops.softmax import PREFIX, STATE, returns_states, takes_states
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, integers

if TYPE_CHECKING:
    from torch import Generator, Tensor

_HEAD_DIM = 64


class Mamba2(Op):
    """A matrix-valued state per head that decays by one number per token. The heads of a sequence share B and C.

    With a prefix, a call is given the states after it, `initial` [B, H, P, N], and returns those after its own tokens.
    `state` asks for either.
    """

    name = "mamba2"
    equation = "S_t = exp(D_t A) S_{t-1} + D_t B_t^T x_t,  y_t = C_t S_t + D x_t, D_t = softplus(delta_t)"
    parameters = (
        integers("heads", "Heads H.", 32),
        integers("head_dim", "Head dim P.", _HEAD_DIM),
        integers("state_size", "States N per channel.", 128),
        STATE,
        PREFIX,
    )
    independent = ("batch", "heads")
    small: ClassVar[Mapping[str, int]] = {"heads": 2}
    reference_name = "chunked recurrence with a scalar gate"

    def published(self, width: int) -> dict[str, Value]:
        """Twice the model's width in heads of 64, with 128 states, as the layer of mamba-ssm has by default."""
        check_width(width, _HEAD_DIM // 2)
        return {"heads": 2 * width // _HEAD_DIM, "head_dim": _HEAD_DIM, "state_size": 128}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        H, P, N = cell.sizes("heads", "head_dim", "state_size")
        lead = ("batch", "seqlen"), (cell.batch, cell.seqlen)
        shared = Spec((*lead[0], "state_size"), (*lead[1], N))
        per_head = Spec(("heads",), (H,), wide(cell))
        tensors = {
            "x": Spec((*lead[0], "heads", "head_dim"), (*lead[1], H, P)),
            "delta": Spec((*lead[0], "heads"), (*lead[1], H)),
            "A": per_head,
            "B": shared,
            "C": shared,
            "D": per_head,
        }
        return tensors | ({"initial": self._states(cell)} if takes_states(cell) else {})

    def outputs(self, cell: Cell) -> dict[str, Spec]:
        return super().outputs(cell) | ({"final": self._states(cell)} if returns_states(cell) else {})

    def _states(self, cell: Cell) -> Spec:
        H, P, N = cell.sizes("heads", "head_dim", "state_size")
        return Spec(("batch", "heads", "head_dim", "state_size"), (cell.batch, H, P, N), wide(cell))

    def output(self, cell: Cell) -> Spec:
        return self.inputs(cell)["x"]

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """Close to Mamba-2's initialization: steps of about 0.001 to 0.1 after softplus, A uniform in -1 to -16."""
        import torch

        if name == "delta":
            return x.sub_(4.5)
        return -1 - 15 * torch.special.ndtr(x) if name == "A" else x

    def forward_flops(self, cell: Cell) -> int:
        """Per token and head: 5NP as GLA (product, sum, decay, 2 for C), P for the step and 2P for D."""
        H, P, N = cell.sizes("heads", "head_dim", "state_size")
        return cell.tokens * H * (5 * N * P + 3 * P)

    def least_flops(self, cell: Cell) -> int:
        """Of a short sequence, scores of all pairs of tokens take fewer operations than states; heads share them."""
        H, P, N = cell.sizes("heads", "head_dim", "state_size")
        pairs = cell.tokens * (cell.seqlen + 1) // 2
        forward = min(self.forward_flops(cell), pairs * 2 * (N + H * P))
        return forward * self.flops(cell) // self.forward_flops(cell)

    def state_bytes(self, cell: Cell) -> int:
        """A state of N times P per head; that of the layer's convolution is not included."""
        H, P, N = cell.sizes("heads", "head_dim", "state_size")
        return H * P * N * BYTES[wide(cell)]

    def layer_parameters(self, cell: Cell) -> int:
        """Projections in (values, gate, B, C, dt) and out, a convolution of 4 tokens, A, D, dt's bias, a norm."""
        H, P, N = cell.sizes("heads", "head_dim", "state_size")
        inner = H * P
        width = inner // 2
        return width * (3 * inner + 2 * N + H) + 5 * (inner + 2 * N) + 3 * H + inner

    def reference_numbers(self, cell: Cell) -> int:
        """Besides the tensors, pairs of rows in a chunk, for each state."""
        (N,) = cell.sizes("state_size")
        return super().reference_numbers(cell) // 2 + pair_numbers(cell, N)

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The output, and the states after the last token."""
        import torch.nn.functional as F

        from glabench.ops.recurrence import gated_recurrence

        x, B, C = inputs["x"], inputs["B"], inputs["C"]
        N, step = B.shape[-1], F.softplus(inputs["delta"])[..., None]
        heads = (*x.shape[:3], N)
        # The recurrence scales its queries.
        q = (C * math.sqrt(N))[:, :, None].expand(heads)
        k, g = step * B[:, :, None], (step * inputs["A"][:, None]).expand(heads)
        initial = inputs["initial"].mT if "initial" in inputs else None
        out, final = gated_recurrence(q, k, x, g, initial)
        return out + inputs["D"][:, None] * x, final.mT


MAMBA2 = Mamba2()
