"""Models that decode: a prefix at once, then steps of one token per sequence, from a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import Counts
from glabench.backends.graphs import GRAPHS, graph_limits, replayed, uses_graph
from glabench.backends.mixers import GLA, KERNEL, LINEAR, MAMBA1, MAMBA2, RETNET, SIMPLE_GLA, TRANSFORMER, MixerModel
from glabench.backends.sdpa import HALF
from glabench.ops.base import BYTES, torch_dtype
from glabench.sweeps.model import Cell, Parameters
from glabench.sweeps.parameters import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from glabench.models import LanguageModel, ModelConfig

# Tokens behind the prefix for which there is room: more than the steps between two rewinds.
_STEPS = 128
_CALLS_BEFORE_CAPTURE = 3


class Decoder:
    """A model with the states of its sequences. `tokens` [B, 1] has the next ones; every step reads it anew."""

    def __init__(self, model: LanguageModel, tokens: Tensor, room: int) -> None:
        self.model, self.tokens = model, tokens
        self.states = model.make_states(len(tokens), room)
        self._run: Callable[[], Tensor] = self._eager

    def prefill(self, before: Tensor) -> Tensor:
        """The logits [B, vocabulary] after the first tokens [B, P], from no states."""
        import torch

        with torch.no_grad():
            return self.model.prefill(before, self.states)

    def step(self) -> Tensor:
        """The logits [B, vocabulary] after one more token of each sequence; a graph's next step overwrites them."""
        return self._run()

    def rewind(self, place: int) -> None:
        """Goes back to a place in all sequences: later keys and values are written anew; states stay as they are."""
        self.states.place.fill_(place)

    def capture(self) -> None:
        """Has further steps replayed from a CUDA graph. Leaves the states of no prefix: a prefill has to follow.

        Raises RuntimeError if a step cannot be captured.
        """
        self.rewind(0)
        for _ in range(_CALLS_BEFORE_CAPTURE):
            self._eager()
        self._run = replayed(self._eager)

    def _eager(self) -> Tensor:
        import torch

        with torch.no_grad():
            return self.model.decode(self.tokens, self.states)


class DecodingModel(MixerModel):
    """A language model with weights in the cell's dtype, drawn from its seed."""

    op, work = "decode", "decode"
    features: ClassVar[frozenset[str]] = frozenset({"prefix"})
    parameters: ClassVar[tuple[Parameter, ...]] = (KERNEL, GRAPHS)
    only_pass = ("infer", "decoding has no backward")

    def limits(self, cell: Cell) -> str | None:
        if cell.seqlen != 1:
            return "a step has one token per sequence; use --seqlen 1, and --prefix for the tokens before it"
        if cell.get("prefix") is None:
            return "a step goes on after a prefix: give --prefix"
        if (why := graph_limits(cell)) is not None:
            return why
        # What attention keeps is no matter of the kernel.
        keeps_itself = self.kind.op == "softmax"
        return super().limits(cell) or (None if keeps_itself else self.without_states(self.kernel_of(cell)))

    def working_bytes(self, cell: Cell) -> int:
        """About: the widest tensors of a prefill in an MLP."""
        prefix, width = cell.sizes("prefix", "model_width")
        return 12 * cell.batch * prefix * width * BYTES[cell.dtype]

    def config(self, cell: Cell) -> ModelConfig:
        """What the cell's model is made of. Raises UsageError for sizes that the mixer does not have."""
        from glabench.models import ModelConfig

        width, layers, vocabulary = cell.sizes("model_width", "layers", "vocabulary")
        return ModelConfig(self.kind.mixer, width, layers, vocabulary, self.kernel_of(cell))

    def build(self, cell: Cell) -> LanguageModel:
        """The cell's model, on its device."""
        import torch

        from glabench.models import LanguageModel

        torch.manual_seed(cell.seed)
        with torch.device(cell.device):
            model = LanguageModel(self.config(cell), self.registry)
        return model.to(torch_dtype(cell.dtype)).requires_grad_(False)

    def decoder(self, inputs: Mapping[str, Tensor], cell: Cell) -> Decoder:
        """A model with room for the cell's prefix and some steps, before its first call."""
        return Decoder(self.build(cell), inputs["tokens"], int(cell.parameters["prefix"]) + _STEPS)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        """Steps after the prefix; a cache has room for 128."""
        decoder = self.decoder(inputs, cell)
        if uses_graph(cell):
            decoder.capture()
        decoder.prefill(inputs["before"])
        return decoder.step

    def executes(self, cell: Cell) -> Counts:
        """Of a step: two operations per weight of a matrix and sequence, and the mixers' equations'.

        It reads all weights but the embedding's and all states, and writes those that are no caches.
        """
        import torch
        from torch import nn

        from glabench.models import LanguageModel

        config, prefix = self.config(cell), int(cell.parameters["prefix"])
        with torch.device("meta"):
            model = LanguageModel(config, self.registry).to(torch_dtype(cell.dtype))
            states = model.make_states(1, prefix + 1)
        matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        weights = sum(x.numel() for x in model.parameters()) - model.embedding.weight.numel()
        own = Parameters({**config.layer_sizes, "prefix": prefix})
        mixer = self.registry.ops[config.kind.op].forward_flops(replace(config.mixer_cell(cell), parameters=own))
        moved = states.needed_bytes(prefix + 1) + states.fixed_bytes
        return Counts(
            2 * matrices * cell.batch + config.blocks * mixer, weights * BYTES[cell.dtype] + cell.batch * moved
        )


class PlainDecoder(DecodingModel):
    """A model with any mixer, by its row of `glabench.models.MIXERS`: what others are compared with."""

    name, title = "plain-decode", "a language model that decodes"

    def __init__(self, like: MixerModel) -> None:
        self.kind, self.registry = like.kind, like.registry


class GlaDecode(DecodingModel):
    """Gated linear attention."""

    name, title, kind = "gla-decode", "GLA, decoding", GLA


class LinearDecode(DecodingModel):
    """GLA's model without gates."""

    name, title, kind = "linear-decode", "linear attention, decoding", LINEAR


class SimpleGlaDecode(DecodingModel):
    """GLA's model with a gate per head."""

    name, title, kind = "simple-gla-decode", "a scalar gate per head, decoding", SIMPLE_GLA


class RetNetDecode(DecodingModel):
    """RetNet with a SwiGLU."""

    name, title, kind = "retnet-decode", "RetNet, decoding", RETNET


class TransformerDecode(DecodingModel):
    """Transformer++ with a cache of keys and values."""

    name, title, kind = "transformer-decode", "Transformer++, decoding", TRANSFORMER

    def working_bytes(self, cell: Cell) -> int:
        """And the cache."""
        prefix, width, layers = cell.sizes("prefix", "model_width", "layers")
        cache = 2 * cell.batch * (prefix + _STEPS) * width * layers * BYTES[cell.dtype]
        return super().working_bytes(cell) + cache

    def more_packages(self, cell: Cell) -> tuple[str, ...]:
        """And the one that a step takes, if it is there."""
        return (*super().more_packages(cell), "flash-attn")

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str:  # noqa: ARG002
        """The kernels of a prefill and of a step, which are two."""
        from glabench.models.softmax import fused_attention

        is_fused = cell.device == "cuda" and cell.dtype in HALF and fused_attention() is not None
        step = "flash_attn_with_kvcache" if is_fused else "scaled_dot_product_attention with a mask"
        return f"prefill {self.kernel_of(cell)}, step {step}"


class Mamba1Decode(DecodingModel):
    """Mamba-1, whose blocks have no MLP."""

    name, title, kind = "mamba1-decode", "Mamba-1, decoding", MAMBA1


class Mamba2Decode(DecodingModel):
    """Mamba-2, whose blocks have no MLP."""

    name, title, kind = "mamba2-decode", "Mamba-2, decoding", MAMBA2
