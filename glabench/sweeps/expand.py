"""From a sweep to its cells."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from glabench.errors import UsageError
from glabench.sweeps.axis import parse_axis
from glabench.sweeps.model import AXES, Cell, Sweep, Variant

MOST_CELLS = 100_000
_NEEDED = ("seqlen", "batch", "heads", "dtype", "pass")
_DIMS = frozenset({"head_dim", "key_dim", "value_dim"})
_DEFAULTS = {"chunk": "auto", "materialize": "on", "gate": "logsigmoid/16"}


@dataclass(frozen=True)
class Traits:
    """What expanding needs to know of a backend: its op, and which optional axes mean something to it."""

    op: str
    options: frozenset[str]


def _head_dims(values: Mapping[str, tuple[Any, ...]], sweep: str) -> list[tuple[int, int]]:
    """The (key_dim, value_dim) pairs: `head_dim` sets both, `key_dim` and `value_dim` are crossed."""
    split = [name for name in ("key_dim", "value_dim") if name in values]
    if "head_dim" in values:
        if split:
            raise UsageError(f"sweep {sweep}: head_dim sets both key_dim and value_dim; give either it or {split[0]}")
        return [(d, d) for d in values["head_dim"]]
    if len(split) < 2:
        raise UsageError(f"sweep {sweep}: head dims are missing; give head_dim, or key_dim and value_dim")
    return list(product(values["key_dim"], values["value_dim"]))


def override(axes: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Axes with changes put over them; naming head_dim drops key_dim and value_dim, and the other way round."""
    merged = dict(axes)
    if "head_dim" in changes:
        merged.pop("key_dim", None)
        merged.pop("value_dim", None)
    elif "key_dim" in changes or "value_dim" in changes:
        both = merged.pop("head_dim", None)
        if both is not None:
            merged |= {"key_dim": both, "value_dim": both}
    return merged | dict(changes)


def resolve(sweep: Sweep, device: str, changes: Mapping[str, str]) -> Sweep:
    """The sweep as it will run: its CPU values where there is no GPU, then `changes` over everything.

    `changes` maps axes to text. The axis `backend` picks backends: the sweep's own variants of that name, or the
    plain backend where the sweep has none.
    """
    axes, variants = sweep.axes, sweep.variants
    if "backend" in changes:
        names = AXES["backend"].parse(changes["backend"])
        variants = tuple(v for n in names for v in [o for o in variants if o.backend == n] or [Variant(n)])
    baseline = sweep.baseline if any(v.backend == sweep.baseline for v in variants) else None
    for layer in (sweep.on_cpu if device == "cpu" else {}, {k: v for k, v in changes.items() if k != "backend"}):
        axes = override(axes, layer)
        variants = tuple(replace(v, axes=override(v.axes, _touching(v.axes, layer))) for v in variants)
    return replace(sweep, axes=axes, variants=variants, baseline=baseline, on_cpu={})


def _touching(own: Mapping[str, str], layer: Mapping[str, str]) -> dict[str, str]:
    """The part of a layer that would otherwise be hidden by a variant's own axes."""
    dims_of_its_own = not _DIMS.isdisjoint(own)
    return {k: v for k, v in layer.items() if k in own or (k in _DIMS and dims_of_its_own)}


def _variant_cells(axes: Mapping[str, str], backend: str, traits: Traits, sweep: str, device: str) -> Iterator[Cell]:
    values = {name: parse_axis(name, text, AXES[name].parse, AXES[name].allowed) for name, text in axes.items()}
    for name in _NEEDED:
        if name not in values:
            raise UsageError(f"sweep {sweep}: the axis {name} is missing; needed are {', '.join(_NEEDED)}")

    def optional(name: str) -> tuple[Any, ...]:
        return values[name] if name in traits.options else (None,)

    for dtype, (K, V), H, B, chunk, materialize, gate, T, pass_ in product(
        values["dtype"], _head_dims(values, sweep), values["heads"], values["batch"], optional("chunk"),
        optional("materialize"), optional("gate"), values["seqlen"], values["pass"],
    ):  # fmt: skip
        # Where no gradients are asked for there are no states to keep.
        kept = None if pass_ == "infer" else materialize
        yield Cell(backend, traits.op, pass_, B, T, H, K, V, chunk, kept, dtype, gate, device)


def expand(sweep: Sweep, traits: Mapping[str, Traits], device: str) -> list[Cell]:
    """The cells of a resolved sweep on `device` ("cuda" or "cpu"), backend by backend, without repeats.

    An axis that means nothing to a backend is left out of its cells. Raises UsageError for a wrong axis or a
    backend that `traits` does not know.
    """
    cells: dict[Cell, None] = {}
    visited = 0
    for variant in sweep.variants:
        if variant.backend not in traits:
            known = ", ".join(sorted(traits))
            raise UsageError(f"sweep {sweep.name}: '{variant.backend}' is not a backend (allowed: {known})")
        axes = override(_DEFAULTS | dict(sweep.axes), variant.axes)
        for cell in _variant_cells(axes, variant.backend, traits[variant.backend], sweep.name, device):
            cells[cell] = None
            visited += 1  # repeats too: a sweep of nothing else would be gone through for ever
            if visited > MOST_CELLS:
                raise UsageError(f"sweep {sweep.name}: it has more than {MOST_CELLS} cells; give fewer values an axis")
    return list(cells)
