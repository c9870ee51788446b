"""Small models that learn to recall, as in the papers' experiment: two layers of a mixer, no MLPs, a tied head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.graphs import GRAPHS, graph_limits
from glabench.backends.mixers import (
    GLA,
    HYENA,
    KERNEL,
    LINEAR,
    MAMBA1,
    MAMBA2,
    RETNET,
    RWKV4,
    SIMPLE_GLA,
    TRANSFORMER,
    MixerModel,
)
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

    @property
    def step(self) -> int:
        """Of two heads, with half as many keys as values."""
        return 8

    def limits(self, cell: Cell) -> str | None:
        from glabench.ops.mqar import check_sizes

        try:
            check_sizes(cell.seqlen, *cell.sizes("pairs", "vocabulary"))
        except ValueError as problem:
            return str(problem)
        return graph_limits(cell) or super().limits(cell)

    def mixer_sizes(self, width: int, seqlen: int) -> Mapping[str, int]:  # noqa: ARG002
        """The mixer's sizes, where they are not those of a model of that width."""
        return {"heads": 2, "key_dim": width // 4, "value_dim": width // 2}

    def build(self, cell: Cell) -> LanguageModel:
        """The cell's model, on its device, in float32 or float64."""
        import torch

        from glabench.models import LanguageModel, ModelConfig

        torch.manual_seed(cell.seed)
        width, layers, vocabulary = cell.sizes("model_width", "layers", "vocabulary")
        config = ModelConfig(
            self.kind.mixer,
            width,
            layers,
            vocabulary,
            self.kernel_of(cell),
            self.mixer_sizes(width, cell.seqlen),
            has_mlps=False,
            is_tied=True,
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

    def __init__(self, like: Learner) -> None:
        self.kind, self.registry, self._like = like.kind, like.registry, like

    def mixer_sizes(self, width: int, seqlen: int) -> Mapping[str, int]:
        return self._like.mixer_sizes(width, seqlen)


class GlaRecall(Learner):
    """Gated linear attention."""

    name, title, kind = "gla-recall", "GLA, learning to recall", GLA


class LinearRecall(Learner):
    """GLA's layer without gates."""

    name, title, kind = "linear-recall", "linear attention, learning to recall", LINEAR


class SimpleGlaRecall(Learner):
    """GLA's layer with a gate per head."""

    name, title, kind = "simple-gla-recall", "a scalar gate per head, learning to recall", SIMPLE_GLA


class RetNetRecall(Learner):
    """RetNet."""

    name, title, kind = "retnet-recall", "RetNet, learning to recall", RETNET

    def mixer_sizes(self, width: int, seqlen: int) -> Mapping[str, int]:  # noqa: ARG002
        return {"heads": 2, "key_dim": width // 2, "value_dim": width}


class TransformerRecall(Learner):
    """Softmax attention with rotary positions, in heads of 64."""

    name, title, kind = "transformer-recall", "attention, learning to recall", TRANSFORMER

    def mixer_sizes(self, width: int, seqlen: int) -> Mapping[str, int]:  # noqa: ARG002
        return {} if width >= 64 else {"heads": 1, "head_dim": width}


class Mamba1Recall(Learner):
    """Mamba-1."""

    name, title, kind = "mamba1-recall", "Mamba-1, learning to recall", MAMBA1

    def mixer_sizes(self, width: int, seqlen: int) -> Mapping[str, int]:  # noqa: ARG002
        return {}


class Mamba2Recall(Learner):
    """Mamba-2."""

    name, title, kind = "mamba2-recall", "Mamba-2, learning to recall", MAMBA2

    def mixer_sizes(self, width: int, seqlen: int) -> Mapping[str, int]:  # noqa: ARG002
        return {}


class HyenaRecall(Learner):
    """Hyena, whose filters are as long as the rows."""

    name, title, kind = "hyena-recall", "Hyena, learning to recall", HYENA
    step = HYENA.step

    def mixer_sizes(self, width: int, seqlen: int) -> Mapping[str, int]:  # noqa: ARG002
        return {"longest": seqlen}


class Rwkv4Recall(Learner):
    """RWKV-4's mixer of tokens."""

    name, title, kind = "rwkv4-recall", "RWKV-4, learning to recall", RWKV4
    step = RWKV4.step

    def mixer_sizes(self, width: int, seqlen: int) -> Mapping[str, int]:  # noqa: ARG002
        return {}
