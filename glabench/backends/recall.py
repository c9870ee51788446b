"""Small models that learn to recall, as in the papers' experiment: two layers of a mixer, no MLPs, a tied head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.graphs import GRAPHS, graph_limits
from glabench.backends.models import KERNEL, MixerModel
from glabench.ops.base import torch_dtype
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from glabench.models import LanguageModel


class Learner(MixerModel):
    """A model whose mixers have two heads, if they have heads; weights are drawn from the cell's seed."""

    op, work = "recall", "recall"
    parameters: ClassVar[tuple[Parameter, ...]] = (KERNEL, GRAPHS)

    def limits(self, cell: Cell) -> str | None:
        from glabench.ops.mqar import check_sizes

        try:
            check_sizes(cell.seqlen, *cell.sizes("pairs", "vocabulary"))
        except ValueError as problem:
            return str(problem)
        return graph_limits(cell) or super().limits(cell)

    def heads(self, width: int) -> Mapping[str, int]:
        """The mixer's sizes, where they are not those of a model of that width."""
        return {"heads": 2, "key_dim": width // 4, "value_dim": width // 2}

    def build(self, cell: Cell) -> LanguageModel:
        """The cell's model, on its device, in float32 or float64."""
        import torch

        from glabench.models import LanguageModel, ModelConfig

        torch.manual_seed(cell.seed)
        width, layers, vocabulary = cell.sizes("model_width", "layers", "vocabulary")
        config = ModelConfig(
            self.mixer, width, layers, vocabulary, self.kernel_of(cell), self.heads(width), has_mlps=False, is_tied=True
        )
        with torch.device(cell.device):
            model = LanguageModel(config, self.registry)
        return model.to(torch_dtype("fp64" if cell.dtype == "fp64" else "fp32"))

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        """A forward of an untrained model, under autocast to the cell's dtype."""
        model, autocast = self.build(cell), self.autocast(cell)

        def forward() -> Tensor:
            with autocast:
                logits: Tensor = model(inputs["tokens"], inputs["places"])
            return logits

        return forward


class PlainLearner(Learner):
    """A model with any mixer, by its row of `glabench.models.MIXERS`: what others are compared with."""

    name, title = "plain-recall", "a model that learns to recall"
    kernels: ClassVar[Mapping[str, str]] = {}

    def __init__(self, like: Learner) -> None:
        self.mixer, self.mixer_op = like.mixer, like.mixer_op  # type: ignore[misc]  # of the class in all others
        self.registry, self._like = like.registry, like

    def heads(self, width: int) -> Mapping[str, int]:
        return self._like.heads(width)


class GlaRecall(Learner):
    """Gated linear attention."""

    name, title, mixer, mixer_op = "gla-recall", "GLA, learning to recall", "gla", "gla"
    kernels: ClassVar[Mapping[str, str]] = {"cuda": "gla-triton", "cpu": "gla-torch"}


class LinearRecall(Learner):
    """GLA's layer without gates."""

    name, title, mixer, mixer_op = "linear-recall", "linear attention, learning to recall", "linear", "linear"
    kernels: ClassVar[Mapping[str, str]] = {"cuda": "linear-triton", "cpu": "linear-torch"}


class SimpleGlaRecall(Learner):
    """GLA's layer with a gate per head."""

    name, title, mixer = "simple-gla-recall", "a scalar gate per head, learning to recall", "simple-gla"
    mixer_op, kernels = "simple-gla", {"cuda": "simple-gla-triton"}


class RetNetRecall(Learner):
    """RetNet."""

    name, title, mixer, mixer_op = "retnet-recall", "RetNet, learning to recall", "retnet", "retention"
    kernels: ClassVar[Mapping[str, str]] = {"cuda": "retention-triton"}

    def heads(self, width: int) -> Mapping[str, int]:
        return {"heads": 2, "key_dim": width // 2, "value_dim": width}


class TransformerRecall(Learner):
    """Softmax attention with rotary positions, in heads of 64."""

    name, title, mixer, mixer_op = "transformer-recall", "attention, learning to recall", "transformer", "softmax"
    kernels: ClassVar[Mapping[str, str]] = {"cuda": "sdpa-flash", "cpu": "sdpa-math"}

    def heads(self, width: int) -> Mapping[str, int]:
        return {} if width >= 64 else {"heads": 1, "head_dim": width}


class Mamba1Recall(Learner):
    """Mamba-1."""

    name, title, mixer, mixer_op = "mamba1-recall", "Mamba-1, learning to recall", "mamba1", "mamba1"
    kernels: ClassVar[Mapping[str, str]] = {"cuda": "mamba1"}

    def heads(self, width: int) -> Mapping[str, int]:  # noqa: ARG002
        return {}


class Mamba2Recall(Learner):
    """Mamba-2."""

    name, title, mixer, mixer_op = "mamba2-recall", "Mamba-2, learning to recall", "mamba2", "mamba2"
    kernels: ClassVar[Mapping[str, str]] = {"cuda": "mamba2"}

    def heads(self, width: int) -> Mapping[str, int]:  # noqa: ARG002
        return {}
