"""Learning text: a small model that is trained to predict the next byte of a text that every machine has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec
from glabench.ops.recall import RATE
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value, integers

if TYPE_CHECKING:
    from torch import Tensor

BYTES_THAT_THERE_ARE = 256
# A weight, its gradient and both of AdamW's moments.
_NUMBERS_PER_PARAMETER = 4


class Text(Op):
    """tokens [B, T], bytes as whole numbers, to logits [B, T, 256] of the next byte."""

    name = "text"
    equation = "bits = mean of -log2 p(next byte), of files that the model has not learned from"
    parameters = (
        integers("model_width", "Width d of the model.", 512),
        integers("layers", "Layers, of a mixer and an MLP each.", 6),
        RATE,
        integers("steps", "Steps of training.", 1500),
    )
    independent = ()
    small: ClassVar[Mapping[str, int]] = {"model_width": 128, "layers": 2}
    reference_name = "the same model in float64"

    def published(self, width: int) -> dict[str, Value]:
        """The width itself."""
        return {"model_width": width}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        return {"tokens": Spec(("batch", "seqlen"), (cell.batch, cell.seqlen), "int64")}

    def make_indices(self, cell: Cell) -> dict[str, Tensor]:
        import torch

        generator = torch.Generator().manual_seed(cell.seed)
        tokens = torch.randint(BYTES_THAT_THERE_ARE, (cell.batch, cell.seqlen), generator=generator)
        return {"tokens": tokens.to(cell.device)}

    def output(self, cell: Cell) -> Spec:
        return Spec(("batch", "seqlen", "vocabulary"), (cell.batch, cell.seqlen, BYTES_THAT_THERE_ARE))

    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError("a model is compared with the same model in float64, which its backend makes")

    def least_bytes(self, cell: Cell) -> int:
        """Weights, gradients and AdamW's moments."""
        return _NUMBERS_PER_PARAMETER * BYTES["fp64" if cell.dtype == "fp64" else "fp32"] * _parameters_about(cell)

    def forward_flops(self, cell: Cell) -> int:
        """Two per weight of a matrix and token of all steps, without the mixers' own."""
        (steps,) = cell.sizes("steps")
        return 2 * cell.tokens * steps * _parameters_about(cell)


def _parameters_about(cell: Cell) -> int:
    """Weights of a model's matrices: 12 d^2 per layer, and the head's."""
    d, layers = cell.sizes("model_width", "layers")
    return 12 * d * d * layers + BYTES_THAT_THERE_ARE * d


TEXT = Text()
