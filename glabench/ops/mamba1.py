"""The selective scan of Mamba-1, without its projections and convolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec, wide
from glabench.ops.softmax import PREFIX, STATE, returns_states, takes_states
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, integers

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Mamba1(Op):
    """N states per channel. The channels of a sequence share B and C; all sequences share A and D.

    With a prefix, a call is given the states after it, `initial` [B, D, N], and returns those after its own tokens.
    `state` asks for either.
    """

    name = "mamba1"
    equation = "x_t = exp(D_t A) x_{t-1} + D_t B_t u_t,  y_t = C_t x_t + D u_t, D_t = softplus(delta_t)"
    parameters = (
        integers("inner", "Inner width: channels of the scan.", 2048),
        integers("state_size", "States N per channel.", 16),
        STATE,
        PREFIX,
    )
    independent = ("batch", "inner")
    small: ClassVar[Mapping[str, int]] = {"inner": 128}
    reference_name = "chunked selective scan"

    def published(self, width: int) -> dict[str, Value]:
        """Twice the model's width, 16 states per channel (GLA paper, version 3, section 4.2)."""
        return {"inner": 2 * width, "state_size": 16}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        D, N = cell.sizes("inner", "state_size")
        channels = Spec(("batch", "inner", "seqlen"), (cell.batch, D, cell.seqlen))
        shared = Spec(("batch", "state_size", "seqlen"), (cell.batch, N, cell.seqlen))
        tensors = {
            "u": channels,
            "delta": channels,
            "A": Spec(("inner", "state_size"), (D, N), wide(cell)),
            "B": shared,
            "C": shared,
            "D": Spec(("inner",), (D,), wide(cell)),
        }
        return tensors | ({"initial": self._states(cell)} if takes_states(cell) else {})

    def outputs(self, cell: Cell) -> dict[str, Spec]:
        return super().outputs(cell) | ({"final": self._states(cell)} if returns_states(cell) else {})

    def _states(self, cell: Cell) -> Spec:
        D, N = cell.sizes("inner", "state_size")
        return Spec(("batch", "inner", "state_size"), (cell.batch, D, N), wide(cell))

    def output(self, cell: Cell) -> Spec:
        return self.inputs(cell)["u"]

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """Close to Mamba's initialization: steps of about 0.001 to 0.1 after softplus, A about -1 to -N (S4D-real)."""
        import torch
        import torch.nn.functional as F

        if name == "delta":
            return x.sub_(4.5)
        if name == "A":
            rates = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
            return -rates.expand(x.shape).contiguous() * F.softplus(x * 0.1 + 0.54)
        return x

    def forward_flops(self, cell: Cell) -> int:
        """Per token and channel: 6 per state (step times A, decay, input times B, sum, 2 for C), 3 for step and D."""
        D, N = cell.sizes("inner", "state_size")
        return cell.tokens * D * (6 * N + 3)

    def state_bytes(self, cell: Cell) -> int:
        """N numbers per channel; the state of the layer's convolution is not included."""
        D, N = cell.sizes("inner", "state_size")
        return D * N * BYTES[wide(cell)]

    def layer_parameters(self, cell: Cell) -> int:
        """Projections in and out, a convolution of 4 tokens, B, C and dt from the channels, A and D (mamba-ssm)."""
        D, N = cell.sizes("inner", "state_size")
        width, rank = D // 2, -(-D // 32)
        return 3 * width * D + 5 * D + D * (rank + 2 * N) + (rank + 1) * D + D * N + D

    def reference_numbers(self, cell: Cell) -> int:
        """The states of a channel."""
        (N,) = cell.sizes("state_size")
        return 16 * cell.seqlen * N

    def reference(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The output, and the states after the last token."""
        from glabench.ops.recurrence import selective_scan

        return selective_scan(inputs)


MAMBA1 = Mamba1()
