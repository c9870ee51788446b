"""Applies changes to sweeps and expands them into cells."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from glabench.errors import UsageError, allowed_names
from glabench.plain import shown
from glabench.sweeps.axis import axis_text, parse_axis
from glabench.sweeps.model import Cell, Parameters, Sweep, Variant, read_value
from glabench.sweeps.parameters import COMMON, SEED, WIDTH, Parameter, Value, option_of, parse_names

MOST_CELLS = 100_000
# What a sweep's title and description end with if it has other sizes on a CPU.
CPU_TITLE = " (CPU sizes)"
_CPU_DESCRIPTION = "This run has the sweep's smaller sizes for a CPU."
_BACKEND = "backend"


@dataclass(frozen=True)
class Traits:
    """The part of a backend that is needed to expand sweeps: its op, and the parameters of both.

    `aliases` are axes that set several parameters to one value (for GLA, head_dim sets key_dim and value_dim);
    `published` gives the op's parameters for a model width.
    """

    op: str
    parameters: Mapping[str, Parameter]
    aliases: Mapping[str, tuple[str, ...]]
    published: Callable[[int], Mapping[str, Value]]

    def targets(self, axis: str) -> tuple[str, ...]:
        """The parameters that an axis sets; empty for an axis that does not apply to the backend."""
        if axis in self.parameters:
            return (axis,)
        return tuple(self.published(1024)) if axis == WIDTH.name else self.aliases.get(axis, ())

    def rank(self, axis: str) -> int:
        """If several axes set a parameter, the one with the highest rank counts: its own, then an alias, then width."""
        return 2 if axis in self.parameters else 1 if axis in self.aliases else 0

    def owns(self, axis: str) -> bool:
        """Whether an axis applies to the backend."""
        return axis in COMMON or axis == SEED.name or bool(self.targets(axis))

    def choices(self, axis: str, text: str, where: str) -> list[dict[str, Any]]:
        """The parameters that each value of an axis sets. Raises UsageError as `parse_axis`; `where` names the axis."""
        if axis == WIDTH.name:
            widths = parse_axis(where, text, WIDTH.parse, WIDTH.allowed)
            return [{**self.published(width), WIDTH.name: width} for width in widths]
        kind = self.parameters[self.targets(axis)[0]]
        return [dict.fromkeys(self.targets(axis), value) for value in parse_axis(where, text, kind.parse, kind.allowed)]


def parameters_of(traits: Collection[Traits]) -> dict[str, Parameter]:
    """All axes of some backends, aliases included, by name."""
    found = {**COMMON, SEED.name: SEED, WIDTH.name: WIDTH}
    for each in traits:
        for name, parameter in each.parameters.items():
            found.setdefault(name, parameter)
    for each in traits:  # in a second loop, because head_dim is a parameter of one op and an alias in others
        for alias, targets in each.aliases.items():
            found.setdefault(alias, replace(each.parameters[targets[0]], name=alias))
    return found


def override(axes: Mapping[str, str], changes: Mapping[str, str], traits: Collection[Traits]) -> dict[str, str]:
    """Axes with changes applied. A change also removes the axes that would take precedence over it for some backend."""

    def hides(axis: str, change: str, of: Traits) -> bool:
        targets = set(of.targets(axis))
        return bool(targets) and targets <= set(of.targets(change)) and of.rank(axis) >= of.rank(change)

    hiding = {axis for axis in axes for change in changes if any(hides(axis, change, each) for each in traits)}
    return {name: text for name, text in axes.items() if name not in hiding} | dict(changes)


def resolve(sweep: Sweep, device: str, changes: Mapping[str, Any], traits: Mapping[str, Traits]) -> Sweep:
    """The sweep as it will run on `device` ("cuda" or "cpu"): with its CPU values on a CPU, then with `changes`.

    `changes` maps axes to text in the grammar or to Python values. The axis `backend` selects backends: the sweep's
    variants of that name, or the plain backend if the sweep has none. If CPU values count, title and description say
    so. Raises UsageError for an axis that no backend of the sweep has, for an unknown backend, and on a CPU for what
    would be wrong on a GPU alone.
    """
    changes = {name: _text(name, value) for name, value in changes.items()}
    on_cpu, where = dict(sweep.on_cpu), f"sweep {sweep.name}"
    variants, own = sweep.variants, [_find(v.backend, traits, where) for v in sweep.variants]
    of_cpu = f"{where}: [cpu] {_BACKEND}"
    cpu_variants = _named(variants, on_cpu.pop(_BACKEND, None), of_cpu)
    cpu_own = [_find(v.backend, traits, of_cpu) for v in cpu_variants]
    for table, owners in ((sweep.axes, own), (on_cpu, cpu_own)):
        _check_owned(table, owners, traits.values(), lambda axis: f"{where}: {shown(axis)}")
    if _BACKEND in changes:
        variants = cpu_variants = _named(variants, changes.pop(_BACKEND), option_of(_BACKEND))
        own = cpu_own = [_find(v.backend, traits, option_of(_BACKEND)) for v in variants]
    _check_owned(changes, cpu_own if device == "cpu" else own, traits.values(), option_of)
    resolved = _changed(replace(sweep, variants=variants, on_cpu={}), [changes], traits)
    small = _changed(replace(sweep, variants=cpu_variants, on_cpu={}), [on_cpu, changes], traits)
    if device == "cpu" and resolved != small:
        # So that a mistake in what is replaced is found here, too; [cpu] may give what [axes] lack.
        missing = {name: text for name, text in on_cpu.items() if name in COMMON and name not in resolved.axes}
        expand(replace(resolved, axes={**missing, **resolved.axes}), traits, "cuda")
        description = f"{sweep.description} {_CPU_DESCRIPTION}".strip()
        resolved = replace(small, title=sweep.title + CPU_TITLE, description=description)
    against = sweep.against if any(v.backend == sweep.against for v in resolved.variants) else None
    return replace(resolved, against=against, panels=_panels_of(resolved))


def _panels_of(sweep: Sweep) -> dict[str, tuple[str, ...]]:
    """The sweep's panels with the backends that it has; none if one backend would be in no panel, or all in one."""
    backends = {variant.backend for variant in sweep.variants}
    found = {title: tuple(name for name in own if name in backends) for title, own in sweep.panels.items()}
    found = {title: own for title, own in found.items() if own}
    return found if len(found) > 1 and backends <= {name for own in found.values() for name in own} else {}


def _named(variants: tuple[Variant, ...], names: str | None, where: str) -> tuple[Variant, ...]:
    """The variants of the named backends, or plain ones; without names all of them."""
    if names is None:
        return variants
    found = parse_axis(where, names, parse_names, "names of backends")
    return tuple(v for name in found for v in [each for each in variants if each.backend == name] or [Variant(name)])


def _changed(sweep: Sweep, layers: Iterable[Mapping[str, str]], traits: Mapping[str, Traits]) -> Sweep:
    """The sweep with layers of axes over its own, without axes that none of its backends has."""
    own = [traits[variant.backend] for variant in sweep.variants]
    axes, variants = sweep.axes, sweep.variants
    for layer in layers:
        axes = override(axes, layer, own)
        variants = tuple(_overridden(v, layer, traits[v.backend]) for v in variants)
    axes = {name: text for name, text in axes.items() if any(each.owns(name) for each in own)}
    return replace(sweep, axes=axes, variants=variants)


def _find(backend: str, traits: Mapping[str, Traits], where: str) -> Traits:
    if backend not in traits:
        allowed = allowed_names(sorted(traits), backend)
        raise UsageError(f"{where}: {shown(backend)} is not a backend ({allowed}); a plugin's needs --plugin FILE")
    return traits[backend]


def _text(name: str, value: Any) -> str:
    try:
        return axis_text(value)
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"{option_of(name)}: {problem}") from None


def _check_owned(
    names: Iterable[str], own: Collection[Traits], everybody: Collection[Traits], where: Callable[[str], str]
) -> None:
    """Raises UsageError for the first axis that none of `own` has. `where` gives the start of the message."""
    for name in names:
        if any(traits.owns(name) for traits in own):
            continue
        at = where(name)
        ops = sorted({traits.op for traits in everybody if traits.owns(name)})
        if ops:
            raise UsageError(
                f"{at}: no backend of this sweep has this parameter (only backends of {', '.join(ops)} do)"
            )
        raise UsageError(f"{at}: there is no such axis ({allowed_names(parameters_of(everybody), name)})")


def _overridden(variant: Variant, layer: Mapping[str, str], traits: Traits) -> Variant:
    """The variant with those axes of a layer that its own axes would otherwise take precedence over."""
    hidden = {target for name in variant.axes for target in (name, *traits.targets(name))}
    hiding = {n: text for n, text in layer.items() if n in hidden or not hidden.isdisjoint(traits.targets(n))}
    return replace(variant, axes=override(variant.axes, hiding, [traits]))


def expand(sweep: Sweep, traits: Mapping[str, Traits], device: Any) -> list[Cell]:
    """The cells of a resolved sweep on `device` ("cuda" or "cpu"), backend by backend, without repeats.

    A backend's cells ignore axes that do not apply to it. Raises UsageError for a wrong axis.
    """
    _check_axes(sweep, traits)
    cells: dict[Cell, None] = {}
    visited = 0
    for variant in sweep.variants:
        of_backend = traits[variant.backend]
        axes = override(sweep.axes, variant.axes, [of_backend])
        for cell in _variant_cells(axes, variant.backend, of_backend, sweep.name, device):
            cells[cell] = None
            visited += 1  # repeats count, too, so that a sweep with endless repeats ends
            if visited > MOST_CELLS:
                raise UsageError(f"sweep {sweep.name}: it has more than {MOST_CELLS} cells; give fewer values per axis")
    return list(cells)


def _check_axes(sweep: Sweep, traits: Mapping[str, Traits]) -> None:
    """Raises UsageError if a variant has an axis that its backend lacks, or if x is not an axis."""
    known = parameters_of(traits.values())
    for variant in sweep.variants:
        for name in variant.axes:
            if not traits[variant.backend].owns(name):
                allowed = allowed_names(parameters_of([traits[variant.backend]]), name)
                raise UsageError(
                    f"sweep {sweep.name}: backend {variant.backend} has no parameter {shown(name)} ({allowed})"
                )
    given = {name for axes in (sweep.axes, *(variant.axes for variant in sweep.variants)) for name in axes}
    for name in sorted(given & known.keys()):
        needed = known[name].needs
        if needed is not None and needed not in given and known[needed].default is None:
            raise UsageError(f"sweep {sweep.name}: {name} has no effect without {needed}; give --{needed} too")
    if sweep.x not in known:
        allowed = allowed_names(known, sweep.x)
        raise UsageError(f"sweep {sweep.name}: x is {shown(sweep.x)}, which is not an axis ({allowed})")


def _variant_cells(axes: Mapping[str, str], backend: str, traits: Traits, sweep: str, device: Any) -> Iterator[Cell]:
    common = {}
    for name, kind in COMMON.items():
        if name not in axes:
            raise UsageError(f"sweep {sweep}: the axis {name} is missing; every sweep needs {', '.join(COMMON)}")
        common[name] = parse_axis(f"sweep {sweep}: {name}", axes[name], kind.parse, kind.allowed)
    seed = f"sweep {sweep}: seed"
    common["seed"] = parse_axis(seed, axes["seed"], SEED.parse, SEED.allowed) if "seed" in axes else (0,)
    for chosen in product(*_settings(axes, traits, sweep)):
        parameters = {name: value for setting in chosen for name, value in setting.items()}
        width = parameters.pop(WIDTH.name, None)
        names = ("dtype", "batch", "seqlen", "pass", "seed")
        for dtype, batch, seqlen, pass_, seed in product(*(common[name] for name in names)):
            kept = {n: v for n, v in parameters.items() if _counts(traits.parameters[n], pass_, parameters)}
            yield Cell(backend, traits.op, pass_, batch, seqlen, dtype, Parameters(kept), device, seed, width)


def _counts(kind: Parameter, pass_: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a parameter has an effect in a pass, with the values of the others."""
    is_alone = kind.needs is not None and parameters.get(kind.needs) is None
    return not is_alone and (pass_ != "infer" or not kind.for_training)


def _settings(axes: Mapping[str, str], traits: Traits, sweep: str) -> list[list[dict[str, Any]]]:
    """One list of parameter settings per axis. Their product gives the cells."""
    winner = dict.fromkeys(traits.parameters, "")
    for axis in sorted(axes, key=traits.rank):
        winner |= dict.fromkeys(traits.targets(axis), axis)
    found = [[{name: traits.parameters[name].default}] for name, axis in winner.items() if not axis]
    for axis in dict.fromkeys(axis for axis in winner.values() if axis):
        choices = traits.choices(axis, axes[axis], f"sweep {sweep}: {axis}")
        # A width that only some sizes follow is not the cell's.
        own = {n for n, by in winner.items() if by == axis}
        if own.issuperset(traits.targets(axis)):
            own.add(WIDTH.name)
        found.append([{n: value for n, value in each.items() if n in own} for each in choices])
    _check_values(found)
    return found


def _check_values(settings: Iterable[Iterable[Mapping[str, Any]]]) -> None:
    """Raises UsageError for a value that a record cannot hold, because plugins' parameters may return anything."""
    for name, value in (item for axis in settings for setting in axis for item in setting.items()):
        try:
            read_value(name, value)
        except ValueError as problem:
            raise UsageError(f"{problem}; a record cannot hold this value") from None
