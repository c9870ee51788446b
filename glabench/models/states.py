"""What models keep of sequences between steps of one token. It stays where it is in memory, as CUDA graphs need it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

Made = TypeVar("Made")


@dataclass(frozen=True)
class LayerStates:
    """What a layer keeps of B sequences.

    `fixed`: tensors [B, ...] of one size for any number of tokens. `caches`: tensors [B, room, ...], a row for every
    token that there may be.
    """

    fixed: tuple[Tensor, ...] = ()
    caches: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class States:
    """What a model keeps of B sequences: each layer's states, and the place [B] (int32) of the next token.

    `room`: the tokens that a sequence may have. Only layers with caches notice a step beyond it: on a GPU by an error
    of the device, after which the process can do no more there.
    """

    layers: tuple[LayerStates, ...]
    place: Tensor
    room: int

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a sequence that do not depend on how many tokens it has."""
        return _bytes(x for layer in self.layers for x in layer.fixed) // len(self.place)

    def needed_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens needs to go on."""
        cached = _bytes(x for layer in self.layers for x in layer.caches) // len(self.place)
        return self.fixed_bytes + cached * tokens // self.room

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are there for a sequence."""
        return self.needed_bytes(self.room)


class Place:
    """Where the next token of each sequence goes, `tokens` [B], and what layers compute of that once in a step."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._made: dict[object, Any] = {}

    def once(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` returns; a later layer that asks for the same key gets the first one's."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]


class MixerLayer(nn.Module):
    """A mixer: x [B, T, d] to [B, T, d], all tokens at once, or the first ones and then one by one."""

    op: ClassVar[str]

    def reset(self) -> None:
        """Draws parameters that a model's own initialization must not; by default there are none."""

    @abstractmethod
    def make_states(self, batch: int, room: int) -> LayerStates:
        """What sequences of up to `room` tokens need between calls, as zeros."""

    @abstractmethod
    def prefill(self, x: Tensor, states: LayerStates) -> Tensor:
        """As a call for the first tokens of all sequences; keeps what the next ones need."""

    @abstractmethod
    def decode(self, x: Tensor, states: LayerStates, place: Place) -> Tensor:
        """The next token of each sequence, x [B, 1, d] to the same, at its place; moves the states on."""


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
