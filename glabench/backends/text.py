"""Small models that learn text, alike but for the gate of their mixer: what each kind of gate is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.mixers import FIXED_GATE, GLA, GLA_BOTH, GLA_VALUES, KERNEL, LINEAR, SIMPLE_GLA, MixerModel
from glabench.ops.base import BYTES, torch_dtype
from glabench.ops.text import BYTES_THAT_THERE_ARE
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from glabench.models import LanguageModel


class Reader(MixerModel):
    """A language model over bytes; weights are drawn from the cell's seed."""

    op, work = "text", "text"
    parameters: ClassVar[tuple[Parameter, ...]] = (KERNEL,)

    def working_bytes(self, cell: Cell) -> int:
        """About: logits and their gradient, and per layer 17 numbers per channel, besides what the mixer keeps."""
        width, layers = cell.sizes("model_width", "layers")
        return cell.tokens * (8 * BYTES_THAT_THERE_ARE + 17 * layers * width * BYTES[cell.dtype])

    def build(self, cell: Cell) -> LanguageModel:
        """The cell's model, on its device, in float32 or float64."""
        import torch

        from glabench.models import LanguageModel, ModelConfig

        torch.manual_seed(cell.seed)
        width, layers = cell.sizes("model_width", "layers")
        config = ModelConfig(self.kind.mixer, width, layers, BYTES_THAT_THERE_ARE, self.kernel_of(cell))
        with torch.device(cell.device):
            model = LanguageModel(config, self.registry)
        return model.to(torch_dtype("fp64" if cell.dtype == "fp64" else "fp32"))

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        """A forward of an untrained model, under autocast to the cell's dtype."""
        model, autocast = self.build(cell), self.autocast(cell)

        def forward() -> Tensor:
            with autocast:
                logits: Tensor = model(inputs["tokens"])
            return logits

        return forward


class PlainReader(Reader):
    """A model with any mixer, by its row of `glabench.models.MIXERS`: what others are compared with."""

    name, title = "plain-text", "a language model over bytes"

    def __init__(self, like: MixerModel) -> None:
        self.kind, self.registry = like.kind, like.registry


class LinearText(Reader):
    """No gate."""

    name, title, kind = "linear-text", "no gate, learning text", LINEAR


class FixedText(Reader):
    """A fixed decay per head."""

    name, title, kind = "fixed-gate-text", "a fixed gate per head, learning text", FIXED_GATE


class SimpleGlaText(Reader):
    """A gate per head."""

    name, title, kind = "simple-gla-text", "a scalar gate per head, learning text", SIMPLE_GLA


class GlaText(Reader):
    """A gate per key channel."""

    name, title, kind = "gla-text", "gates of keys, learning text", GLA


class GlaValuesText(Reader):
    """A gate per value channel."""

    name, title, kind = "gla-values-text", "gates of values, learning text", GLA_VALUES


class GlaBothText(Reader):
    """A gate per key channel and one per value channel."""

    name, title, kind = "gla-both-text", "gates of keys and values, learning text", GLA_BOTH
