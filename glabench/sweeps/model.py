"""The data types of sweeps: a cell (one point), a variant (a backend with its own values), a sweep."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from glabench.plain import Count, Name, Number, Whole, read_as
from glabench.sweeps.parameters import DeviceKind, Dtype, Pass, Value
from glabench.sweeps.words import MATERIALIZE, WORDS, is_usual, show_value, symbol_of

_MOST_PARAMETERS = 100
# The parameters that say how many GPUs share a cell's work, and how.
GPUS, PARALLEL = "gpus", "parallel"
# Of PARALLEL: GPUs share the tokens of every sequence, not the rows of a batch.
SEQUENCE = "sequence"
# Fields that every record has, because scripts read them; null if the op does not have them.
_ALWAYS = ("heads", "key_dim", "value_dim", "chunk", "materialize", "gate")


class Parameters(Mapping[str, Value]):
    """A cell's parameters: values by name, sorted, without None. Hashable."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value | None] | None = None) -> None:
        given = sorted((values or {}).items())
        self._values = MappingProxyType({name: value for name, value in given if value is not None})

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"Parameters({dict(self._values)})"


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: what to measure. `parameters` are those of its op and its backend."""

    backend: str
    op: str
    pass_: Pass
    batch: int
    seqlen: int
    dtype: Dtype
    parameters: Parameters = field(default_factory=Parameters)
    # The kind of device; the run's environment says which of several GPUs it was.
    device: DeviceKind = "cuda"
    seed: int = 0
    # The model width that an axis named, if all sizes are what its op publishes. The same cell without it is equal.
    width: int | None = field(default=None, compare=False)

    def copy(self) -> "Cell":
        """A cell of its own for code of a plugin, whose changes then reach nothing else."""
        return replace(self, parameters=Parameters(self.parameters))

    @property
    def has_backward(self) -> bool:
        """Whether the pass computes gradients."""
        return self.pass_ in ("bwd", "fwd+bwd")

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return self.batch * self.seqlen

    @property
    def gpus(self) -> int:
        """How many GPUs share the work; on a CPU, how many processes."""
        found = self.parameters.get(GPUS)
        return found if isinstance(found, int) and found > 1 else 1  # a stored record may say anything

    @property
    def alone(self) -> "Cell":
        """The same cell on one GPU."""
        return replace(self, parameters=Parameters({**self.parameters, GPUS: None, PARALLEL: None}))

    def get(self, name: str) -> Any:
        """The value of a parameter; None if the implementation chooses it or the cell does not have it."""
        return self.parameters.get(name)

    def sizes(self, *names: str) -> tuple[int, ...]:
        """The values of whole-number parameters. Raises KeyError for one that the cell does not have."""
        return tuple(int(self.parameters[name]) for name in names)

    def to_json(self) -> dict[str, Any]:
        """One flat dict. The key of `pass_` is `pass`; `parameters` lists the keys that are parameters.

        A cell with `head_dim` also has it as `key_dim` and `value_dim`.
        """
        head_dim = self.parameters.get("head_dim")
        return {
            "backend": self.backend,
            "op": self.op,
            "pass": self.pass_,
            "batch": self.batch,
            "seqlen": self.seqlen,
            **dict.fromkeys(_ALWAYS),
            **({} if self.width is None else {"width": self.width}),
            **({"key_dim": head_dim, "value_dim": head_dim} if head_dim is not None else {}),
            **self.parameters,
            "dtype": self.dtype,
            "device": self.device,
            "seed": self.seed,
            "parameters": list(self.parameters),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Cell":
        """The inverse of `to_json`; other keys are ignored. Raises ValueError that names the wrong key."""
        flat = read_as(_FlatCell, data)
        if flat.parameters is None:
            own = _from_first_schema(flat.op, read_as(_FirstSchema, data))
        else:
            own = {name: data.get(name) for name in flat.parameters}
        if flat.backend in _KEPT_STATES_ALONE and flat.pass_ != "infer":
            own.setdefault("materialize", "states")
        parameters = Parameters({name: read_value(name, value) for name, value in own.items()})
        common = (flat.backend, flat.op, flat.pass_, flat.batch, flat.seqlen, flat.dtype)
        return cls(*common, parameters, flat.device, flat.seed, flat.width)

    def __str__(self) -> str:
        own = {n: v for n, v in self.parameters.items() if not is_usual(n, v)}
        sizes = [f"{words.symbol}={own.pop(name)}" for name, words in WORDS.items() if words.is_size and name in own]
        others = [f"{symbol_of(name)}={show_value(value)}" for name, value in own.items()]
        others += [f"seed={self.seed}"] if self.seed else []
        return " ".join([self.backend, self.pass_, f"B={self.batch} T={self.seqlen}", *sizes, self.dtype, *others])


_PlainValue = Whole | Number | Name | bool | None


def read_value(name: str, value: Any) -> Value | None:
    """Checks that a record can hold a parameter's value. Raises ValueError that names the parameter.

    `materialize` was a boolean before it had words.
    """
    if name == "materialize" and isinstance(value, bool):
        return MATERIALIZE["on" if value else "off"]
    try:
        return read_as(_PlainValue, value)  # type: ignore[arg-type]  # a union is no type to mypy
    except ValueError as problem:
        raise ValueError(f"{name}: {problem}") from None


# Backends whose first records do not say what they keep, because they could not choose.
_KEPT_STATES_ALONE = ("gla-two-level", "linear-two-pass")


class _FlatCell(msgspec.Struct, rename={"pass_": "pass"}):
    """The fields of a cell in a record, other than its parameters."""

    backend: Name
    op: Name
    pass_: Pass
    batch: Count
    seqlen: Count
    dtype: Dtype
    device: DeviceKind
    parameters: Annotated[list[Name], msgspec.Meta(max_length=_MOST_PARAMETERS)] | None = None
    seed: Whole = 0
    width: Count | None = None


@dataclass(frozen=True)
class _FirstSchema:
    """The parameters in records of the first schema, in which all ops had the same."""

    heads: Count
    key_dim: Count
    value_dim: Count
    chunk: Count | None
    materialize: bool | None
    gate: str | None


def _from_first_schema(op: str, old: _FirstSchema) -> dict[str, Any]:
    if op == "softmax" and old.key_dim == old.value_dim:
        return {"heads": old.heads, "head_dim": old.key_dim}
    if op == "mamba1":
        return {"inner": old.heads * old.value_dim, "state_size": old.key_dim}
    return asdict(old)


@dataclass(frozen=True)
class Variant:
    """A backend in a sweep, with axes (as text) that replace the sweep's for this backend."""

    backend: str
    axes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """A sweep: every variant is measured at every combination of the axes, which are text in the axis grammar."""

    name: str
    axes: Mapping[str, str]
    variants: tuple[Variant, ...]
    title: str = ""
    description: str = ""
    # The axis that figures are drawn against.
    x: str = "seqlen"
    # The backend that ratios in reports refer to.
    against: str | None = None
    # The metrics that reports show if none are named: a list of names, or None for the usual ones.
    metrics: str | None = None
    # Axes that replace those above on a CPU.
    on_cpu: Mapping[str, str] = field(default_factory=dict)
    # What reports show apart: backends by a title. Without, each pass is shown once.
    panels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Settings on a GPU, if the one who measures does not say: MiB that torch may hold, seconds for which a cell is
    # sampled at most, and whether joules are measured.
    memory_limit_mib: int | None = None
    time_limit_s: float | None = None
    energy: bool | None = None
