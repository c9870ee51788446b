"""Values that papers have published, from `literature.toml` beside this file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from glabench.plain import read_as


@dataclass(frozen=True)
class _Compared:
    """Something beside a rival, from one figure or table. `cell`: its sizes."""

    source: str
    device: str
    name: str
    base_name: str
    pass_: str
    x: str
    cell: dict[str, str | int]


@dataclass(frozen=True)
class Published(_Compared):
    """A series of times and of a rival's."""

    base: dict[str, str | int]
    # Backends that are the rival, the nearest first.
    base_backends: list[str]
    at: list[int]
    values: list[float]
    base_values: list[float]

    @property
    def ratios(self) -> dict[int, float]:
        """Its time over the rival's, by x."""
        times = zip(self.values, self.base_values, strict=True)
        return {x: own / base for x, (own, base) in zip(self.at, times, strict=True)}


@dataclass(frozen=True)
class Stack:
    """Times of a forward's parts by x, in milliseconds, from one figure."""

    source: str
    device: str
    name: str
    x: str
    cell: dict[str, str | int]
    at: list[int]
    parts: dict[str, list[float]]
    # A sentence on what is not stated, for whoever sees the parts beside others.
    note: str = ""


@dataclass(frozen=True)
class Versus(_Compared):
    """How many times as fast as a rival, and with what share of its memory; both have the sizes."""

    # By op the backend that is the rival; the first op is the one that the table is of.
    rivals: dict[str, str]
    at: list[int]
    # Texts are what the table has in place of a number.
    speedups: list[float | str]
    memory: list[float | str]

    @property
    def op(self) -> str:
        """The op that was measured."""
        return next(iter(self.rivals))


@dataclass(frozen=True)
class Model:
    """A trained model and the cell that times its mixer."""

    gate: str
    perplexity: float
    cell: dict[str, str | int]


@dataclass(frozen=True)
class Quality:
    """What models reached, from one table."""

    source: str
    about: str
    pass_: str
    models: list[Model]


@cache
def published_series() -> tuple[Published, ...]:
    """All series of the file."""
    return tuple(read_as(Published, {**one, "pass_": one["pass"]}) for one in _file()["series"])


@cache
def published_stacks() -> tuple[Stack, ...]:
    """All stacks of the file."""
    return tuple(read_as(Stack, one) for one in _file()["stack"])


@cache
def published_versus() -> tuple[Versus, ...]:
    """All ratios to rivals of the file."""
    return tuple(read_as(Versus, {**one, "pass_": one["pass"]}) for one in _file()["versus"])


@cache
def published_quality() -> tuple[Quality, ...]:
    """All tables of trained models of the file."""
    return tuple(read_as(Quality, {**one, "pass_": one["pass"]}) for one in _file()["quality"])


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("literature.toml").read_text(encoding="utf-8"))
