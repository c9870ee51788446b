"""The words of a sweep: an axis' values, a cell (one point), a variant (one backend's own values), a sweep."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from glabench.sweeps.axis import INTEGER_FORM, parse_choices, parse_integers
from glabench.sweeps.fields import Count, read_fields

Pass = Literal["infer", "fwd", "bwd", "fwd+bwd"]
PASSES = ("infer", "fwd", "bwd", "fwd+bwd")
DTYPES = ("bf16", "fp16", "fp32", "fp64")
GATES = ("logsigmoid/16", "logsigmoid", "slow", "strong", "resets")
AUTO = "auto"


def _chunks(text: str) -> tuple[int | None, ...]:
    values: list[int | None] = []
    for item in text.split(","):
        values += [None] if item.strip() == AUTO else parse_integers(item)
    return tuple(dict.fromkeys(values))


def _switches(text: str) -> tuple[bool, ...]:
    return tuple(name == "on" for name in parse_choices(text, ("on", "off")))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names:
        raise ValueError(f"'{text}' has an empty name")
    return names


@dataclass(frozen=True)
class AxisKind:
    """One axis of a sweep: its name in sweep files, how its text is read, and the words for a mistake."""

    name: str
    parse: Callable[[str], tuple[Any, ...]]
    allowed: str

    @property
    def option(self) -> str:
        """The command-line option of the same axis."""
        return "--" + self.name.replace("_", "-")


def _numeric(name: str) -> AxisKind:
    return AxisKind(name, parse_integers, INTEGER_FORM)


def _choice(name: str, allowed: tuple[str, ...]) -> AxisKind:
    return AxisKind(name, partial(parse_choices, allowed=allowed), ", ".join(allowed))


AXES: Mapping[str, AxisKind] = {
    axis.name: axis
    for axis in (
        _numeric("seqlen"),
        _numeric("batch"),
        _numeric("heads"),
        _numeric("head_dim"),
        _numeric("key_dim"),
        _numeric("value_dim"),
        AxisKind("chunk", _chunks, f"auto, or {INTEGER_FORM}"),
        AxisKind("materialize", _switches, "on, off"),
        _choice("dtype", DTYPES),
        _choice("pass", PASSES),
        _choice("gate", GATES),
        AxisKind("backend", _names, "names as `glabench backends` lists them"),
    )
}


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: what to measure. `chunk` None lets the backend choose; None also where it has no meaning.

    For `mamba1` the inner width is heads * value_dim and the state size is key_dim.
    """

    backend: str
    op: str
    pass_: Pass
    batch: Count
    seqlen: Count
    heads: Count
    key_dim: Count
    value_dim: Count
    chunk: Count | None
    materialize: bool | None
    dtype: str
    gate: str | None
    device: str
    seed: int = 0

    @property
    def has_backward(self) -> bool:
        """Whether gradients are computed in the pass, timed or not."""
        return self.pass_ in ("bwd", "fwd+bwd")

    def to_json(self) -> dict[str, Any]:
        """Plain data; the pass is called `pass`, which Python keeps for itself."""
        data = asdict(self)
        data["pass"] = data.pop("pass_")
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Cell":
        """The way back of `to_json`; other keys are passed over. Raises ValueError that names a wrong key."""
        return cls(**read_fields(cls, data, names={"pass_": "pass"}))

    def __str__(self) -> str:
        parts = [self.backend, self.pass_, f"B={self.batch} T={self.seqlen} H={self.heads}"]
        parts.append(f"K={self.key_dim} V={self.value_dim} {self.dtype}")
        if self.chunk is not None:
            parts.append(f"C={self.chunk}")
        if self.materialize is not None:
            parts.append("materialize=" + ("on" if self.materialize else "off"))
        return " ".join(parts)


@dataclass(frozen=True)
class Variant:
    """A backend in a sweep, with axis values of its own (as text) where it departs from the sweep's."""

    backend: str
    axes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Axes (as text, see the grammar) times variants. `x` is the axis that figures are drawn against.

    `baseline` is the backend that ratios in reports refer to; `on_cpu` replaces axes where there is no GPU.
    """

    name: str
    axes: Mapping[str, str]
    variants: tuple[Variant, ...]
    title: str = ""
    description: str = ""
    x: str = "seqlen"
    baseline: str | None = None
    on_cpu: Mapping[str, str] = field(default_factory=dict)
