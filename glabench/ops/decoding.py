"""Decoding: one more token of every sequence by a language model that has seen a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec
from glabench.ops.softmax import PREFIX
from glabench.ops.training import MODEL_SIZES, parameters_about
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Value

if TYPE_CHECKING:
    from torch import Tensor


class Decoding(Op):
    """`before` [B, P] and `tokens` [B, 1], whole numbers, to the logits [B, vocabulary] after the last token.

    A call has the model's states after `before`, the prefix. Backends are models; see `glabench.models`.
    """

    name = "decode"
    equation = "logits, states = model(token, states)"
    parameters = (*MODEL_SIZES, PREFIX)
    independent = ("batch",)
    small: ClassVar[Mapping[str, int]] = {"model_width": 128, "layers": 2, "vocabulary": 64, "prefix": 200}
    reference_name = "the same model's logits of all tokens at once in float64"

    def published(self, width: int) -> dict[str, Value]:
        """The width itself."""
        return {"model_width": width}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        prefix = cell.get("prefix") or 0
        return {
            "before": Spec(("batch", "prefix"), (cell.batch, prefix), "int64"),
            "tokens": Spec(("batch", "seqlen"), (cell.batch, 1), "int64"),
        }

    def make_indices(self, cell: Cell) -> dict[str, Tensor]:
        rows = self.make_rows(cell, 1)
        return {"before": rows[:, :-1].contiguous(), "tokens": rows[:, -1:].contiguous()}

    def make_rows(self, cell: Cell, steps: int) -> Tensor:
        """Tokens [B, P + steps] from the cell's seed."""
        import torch

        generator = torch.Generator().manual_seed(cell.seed)
        (vocabulary,) = cell.sizes("vocabulary")
        shape = (cell.batch, (cell.get("prefix") or 0) + steps)
        return torch.randint(vocabulary, shape, generator=generator).to(cell.device)

    def output(self, cell: Cell) -> Spec:
        return Spec(("batch", "vocabulary"), (cell.batch, *cell.sizes("vocabulary")))

    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError("a model is compared with the same model in float64, which its backend makes")

    def least_bytes(self, cell: Cell) -> int:
        """The weights, without states and caches."""
        return BYTES[cell.dtype] * parameters_about(cell)

    def forward_flops(self, cell: Cell) -> int:
        """Two per weight of a matrix and sequence, without the mixers' own, which a backend's counts have."""
        d, layers, vocabulary = cell.sizes("model_width", "layers", "vocabulary")
        return 2 * cell.batch * (12 * d * d * layers + vocabulary * d)


DECODING = Decoding()
