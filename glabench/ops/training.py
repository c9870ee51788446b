"""One step of training a language model: forward, backward, clipping and AdamW, on tokens drawn at random."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.ops.base import BYTES, Op, Spec
from glabench.sweeps.axis import INTEGER_FORM, parse_integers
from glabench.sweeps.model import GPUS, PARALLEL, Cell
from glabench.sweeps.parameters import Parameter, Value, integers

if TYPE_CHECKING:
    from torch import Tensor

MODEL_SIZES = (
    integers("model_width", "Width d of the model.", 1024),
    integers("layers", "Layers; twice as many blocks of a mixer without an MLP.", 24),
    integers("vocabulary", "Tokens that there are.", 32_000),
)
# A weight, its gradient and both of AdamW's moments.
_NUMBERS_PER_PARAMETER = 4


def _gpus(text: str) -> tuple[int | None, ...]:
    return tuple(None if number == 1 else number for number in parse_integers(text))


def parameters_about(cell: Cell) -> int:
    """Parameters of a language model of the cell's size, about: 12 d^2 per layer, embedding and head."""
    d, layers, vocabulary = cell.sizes("model_width", "layers", "vocabulary")
    return 12 * d * d * layers + 2 * vocabulary * d


class Training(Op):
    """tokens and targets [B, T], whole numbers, to the loss, a number. Backends are models; see `glabench.models`.

    The batch and its sequences are those of all GPUs together.
    """

    name = "training"
    equation = "loss = cross_entropy(model(tokens), targets); weights -= AdamW(clip(d loss / d weights))"
    parameters = (
        *MODEL_SIZES,
        Parameter(GPUS, "GPUs that share a step; 1 if it is not given.", _gpus, INTEGER_FORM),
    )
    independent = ()
    small: ClassVar[Mapping[str, int]] = {"model_width": 128, "layers": 2, "vocabulary": 64}
    reference_name = "the same model in float64"

    def published(self, width: int) -> dict[str, Value]:
        """The width itself."""
        return {"model_width": width}

    def inputs(self, cell: Cell) -> dict[str, Spec]:
        tokens = Spec(("batch", "seqlen"), (cell.batch, cell.seqlen), "int64")
        return {"tokens": tokens, "targets": tokens}

    def make_indices(self, cell: Cell) -> dict[str, Tensor]:
        return self.make_batch(cell, 0)

    def make_batch(self, cell: Cell, number: int) -> dict[str, Tensor]:
        """Tokens from the cell's seed, others for each number; every token's target is the next one."""
        import torch

        generator = torch.Generator().manual_seed((cell.seed << 20) + number)
        (vocabulary,) = cell.sizes("vocabulary")
        rows = torch.randint(vocabulary, (cell.batch, cell.seqlen + 1), generator=generator).to(cell.device)
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}

    def output(self, cell: Cell) -> Spec:  # noqa: ARG002
        return Spec((), (), "fp32")

    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError("a step is compared with one of the same model in float64, which its backend makes")

    def least_bytes(self, cell: Cell) -> int:
        """Weights, gradients and AdamW's moments of one GPU, without what the backward needs."""
        kind = cell.dtype if cell.get("weights") == "pure" or cell.dtype == "fp64" else "fp32"
        whole = _NUMBERS_PER_PARAMETER * BYTES[kind] * parameters_about(cell)
        return whole // cell.gpus if cell.get(PARALLEL) == "fsdp" else whole

    def forward_flops(self, cell: Cell) -> int:
        """Two per weight of a matrix and token, without the mixers' own operations; a backend's counts have these."""
        d, layers, vocabulary = cell.sizes("model_width", "layers", "vocabulary")
        return 2 * cell.tokens * (12 * d * d * layers + vocabulary * d)


TRAINING = Training()
