"""What a model is made of: its mixer, its sizes, and which kernel computes the mixer's op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from glabench.errors import UsageError, allowed_names
from glabench.models import hyena, mamba, recurrent, rwkv4, softmax
from glabench.models.kernels import Kernel, Kernels
from glabench.models.parts import hidden_width
from glabench.models.states import MixerLayer
from glabench.ops.base import REFERENCE
from glabench.sweeps.model import Cell, Parameters
from glabench.sweeps.parameters import Value


@dataclass(frozen=True)
class Mixer:
    """A kind of mixer: its layer, and how its authors size it.

    `sizes`: those of a layer at a model's width. `ratio`: that of the MLP, whose inner width `hidden_width` gives; None
    without an MLP, and then a model has twice as many blocks.
    """

    layer: Callable[..., MixerLayer]
    sizes: Callable[[int], Mapping[str, int]]
    ratio: float | None = 4.0

    @property
    def op(self) -> str:
        """The op's name."""
        return str(getattr(self.layer, "op"))  # noqa: B009 - a class attribute that Callable does not have


def _gla(width: int) -> dict[str, int]:
    return {"heads": 4, "key_dim": width // 8, "value_dim": width // 4}


def _retnet(width: int) -> dict[str, int]:
    return {"heads": 8, "key_dim": width // 8, "value_dim": width // 4}


def _attention(width: int) -> dict[str, int]:
    return {"heads": width // 64, "head_dim": 64}


def _mamba1(width: int) -> dict[str, int]:
    return {"inner": 2 * width, "state_size": 16}


def _hyena(width: int) -> dict[str, int]:
    return {"inner": width, "longest": 2048}


def _rwkv4(width: int) -> dict[str, int]:
    return {"inner": width}


def _mamba2(width: int) -> dict[str, int]:
    return {"heads": width // 32, "head_dim": 64, "state_size": 128}


MIXERS: Mapping[str, Mixer] = {
    "gla": Mixer(recurrent.Gla, _gla),
    "linear": Mixer(recurrent.Linear, _gla),
    "simple-gla": Mixer(recurrent.SimpleGla, _gla),
    "fixed-gate": Mixer(recurrent.FixedGate, _gla),
    "gla-values": Mixer(recurrent.GlaValues, _gla),
    "gla-both": Mixer(recurrent.GlaBoth, _gla),
    "retnet": Mixer(recurrent.Retention, _retnet, ratio=2.0),
    "transformer": Mixer(softmax.Softmax, _attention),
    "mamba1": Mixer(mamba.Mamba1, _mamba1, ratio=None),
    "mamba2": Mixer(mamba.Mamba2, _mamba2, ratio=None),
    "hyena": Mixer(hyena.Hyena, _hyena),
    "rwkv4": Mixer(rwkv4.Rwkv4, _rwkv4),
}


@dataclass(frozen=True)
class ModelConfig:
    """A language model. `layers` counts pairs of a mixer and an MLP; of a mixer without an MLP there are twice as many.

    `sizes` replace those that the mixer's authors use for the width. `kernel`: a backend of the mixer's op, or
    `reference`. `options`: the kernel's, such as `materialize`. Without MLPs, there are as many blocks of any mixer as
    `layers`. If it is tied, the head has the embedding's weights. Raises UsageError.
    """

    mixer: str
    width: int
    layers: int
    vocabulary: int = 32_000
    kernel: str = REFERENCE
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Value] = field(default_factory=dict)
    has_mlps: bool = True
    is_tied: bool = False

    def __post_init__(self) -> None:
        if self.mixer not in MIXERS:
            raise UsageError(f"mixer: '{self.mixer}' is unknown ({allowed_names(MIXERS, self.mixer)})")
        for name in ("width", "layers", "vocabulary"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: {getattr(self, name)} is too small (allowed: whole numbers from 1)")
        if any(size < 1 for size in self.layer_sizes.values()):
            raise UsageError(f"width: {self.width} is too small for {self.mixer}; make it larger, or give sizes")

    @property
    def kind(self) -> Mixer:
        """The mixer's kind."""
        return MIXERS[self.mixer]

    @property
    def layer_sizes(self) -> dict[str, int]:
        """The sizes of a mixer."""
        return {**self.kind.sizes(self.width), **self.sizes}

    @property
    def blocks(self) -> int:
        """How many mixers there are."""
        return 2 * self.layers if self.has_mlps and self.kind.ratio is None else self.layers

    @property
    def hidden(self) -> int | None:
        """The inner width of the MLPs; None without."""
        return hidden_width(self.width, self.kind.ratio) if self.has_mlps and self.kind.ratio is not None else None

    def mixer_cell(self, cell: Cell) -> Cell:
        """A cell of the mixers' op, with the sequences, tokens, dtype and device of a model's cell, and their sizes."""
        sizes = Parameters(self.layer_sizes)
        return replace(cell, backend=self.kernel, op=self.kind.op, parameters=sizes)

    def make_mixer(self, registry: Kernels) -> MixerLayer:
        """A mixer, with parameters that are drawn at random. Raises UsageError for a kernel that there is not."""
        kernel = Kernel(registry, self.kind.op, self.kernel, self.layer_sizes, self.options)
        sizes: dict[str, Any] = self.layer_sizes
        return self.kind.layer(self.width, **sizes, kernel=kernel)
