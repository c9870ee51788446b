"""Learning to recall: a small model that is trained on rows of keys and values (MQAR; final paper, section 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import Op, Spec
from glabench.sweeps.axis import parse_amounts
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter, Value, integers

if TYPE_CHECKING:
    from torch import Tensor

RATE = Parameter("rate", "Highest learning rate; it falls as a cosine.", parse_amounts, "numbers (1e-3,3e-3)", 1e-3)


class Recall(Op):
    """tokens [B, T] to logits [B, n, vocabulary] at the n places where a row asks for a value; see `ops.mqar`."""

    name = "recall"
    equation = "accuracy = share of values that the model names, after training on other rows"
    parameters = (
        integers("model_width", "Width d of the model.", 64),
        integers("layers", "Layers, of a mixer without an MLP each.", 2),
        integers("vocabulary", "Tokens that there are.", 8192),
        integers("pairs", "Pairs of a key and a value in a row.", 4),
        RATE,
        integers("rows", "Rows to learn from.", 100_000),
        integers("epochs", "Times that these are gone through, at most.", 64),
    )
    independent = ()
    small: ClassVar[Mapping[str, int]] = {"vocabulary": 256}
    reference_name = "the same model in float64"

    def published(self, width: int) -> dict[str, Value]:
        """The width itself."""
        return {"model_width": width}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        n = cell.sizes("pairs")[0]
        return {
            "tokens": Spec(("batch", "seqlen"), (cell.batch, cell.seqlen), "int64"),
            "places": Spec(("batch", "pairs"), (cell.batch, n), "int64"),
        }

    def make_indices(self, cell: Cell) -> dict[str, Tensor]:
        import torch

        from glabench.ops.mqar import make_rows

        generator = torch.Generator().manual_seed(cell.seed)
        pairs, vocabulary = cell.sizes("pairs", "vocabulary")
        rows = make_rows(cell.batch, cell.seqlen, pairs, vocabulary, generator)
        return {"tokens": rows.tokens.to(cell.device), "places": rows.places.to(cell.device)}

    def output(self, cell: Cell) -> Spec:
        n, vocabulary = cell.sizes("pairs", "vocabulary")
        return Spec(("batch", "pairs", "vocabulary"), (cell.batch, n, vocabulary))

    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError("a model is compared with the same model in float64, which its backend makes")

    def least_bytes(self, cell: Cell) -> int:
        """The rows that it learns from."""
        rows, pairs = cell.sizes("rows", "pairs")
        return 8 * rows * (cell.seqlen + 2 * pairs)

    def forward_flops(self, cell: Cell) -> int:
        """Two per weight of a matrix and token of all rows and epochs, without the mixers' own."""
        d, layers, vocabulary, pairs = cell.sizes("model_width", "layers", "vocabulary", "pairs")
        rows, epochs = cell.sizes("rows", "epochs")
        return 2 * rows * epochs * (4 * d * d * layers * cell.seqlen + vocabulary * d * pairs)


RECALL = Recall()
