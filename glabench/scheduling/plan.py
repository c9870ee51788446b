"""Plans: what to measure, where and how, from a sweep expanded for a machine; estimates of memory and time."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from glabench.backends import Registry, load_registry
from glabench.backends.base import Backend, faults_of, refusal
from glabench.backends.sites import on_path, parse_sites
from glabench.devices.environment import package_version, probe
from glabench.devices.provenance import command_line, describe_code, relevant_variables
from glabench.errors import NothingToRunError, UsageError, count_of
from glabench.measure.outcome import one_line
from glabench.measure.settings import Settings
from glabench.records import Record, RunFolder
from glabench.records.environment import device_name, device_number
from glabench.sweeps import Cell, Sweep, as_sweep, expand, resolve

RUNS = Path("runs")
_MOST_RUNS = 20
# Seconds that an unknown cell may take besides sampling: process start, compiling, accuracy, energy.
_BESIDES_S: Mapping[str, float] = {"cuda": 15.0, "cpu": 4.0}
# The fewest calls of a cell, and a cautious FLOP/s: enough to distinguish cells of seconds from cells of minutes.
_CALLS = 10
_FLOPS_PER_S: Mapping[str, float] = {"cuda": 2e13, "cpu": 1e10}
# A measurement that may take longer is announced.
LONG_S = 600.0


@dataclass(frozen=True)
class Place:
    """Where a sweep runs: the machine's environment and the available backends."""

    environment: Mapping[str, Any]
    registry: Registry
    plugins: tuple[str, ...] = ()
    # By backend, the folders of packages that its workers alone see.
    sites: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """`cuda` or `cpu`."""
        return str(self.environment["device"])

    @property
    def device(self) -> str:
        """The device for workers, `cuda:1` or `cpu`."""
        return device_number(self.environment)

    def lacks_gpus(self, cell: Cell) -> str | None:
        """Why there are too few GPUs for a cell, from the chosen one on; None if there are enough.

        On a CPU processes stand for GPUs: as many as it has cores, but two on any.
        """
        wanted, known = cell.gpus, self.environment
        if self.kind == "cpu":
            most = max(2, known.get("cpu_cores") or 1)
            why = f"on a CPU these are processes, at most {most} here"
        else:
            first = (known.get("gpu") or {}).get("index") or 0
            most = max(1, (known.get("gpus") or 1) - first)
            why = f"torch sees {count_of(most, 'GPU')} here{f' from {self.device} on' if first else ''}"
        return f"--gpus {wanted}: {why}" if wanted > most else None

    def unavailable(self, backend: str) -> str | None:
        """Why a backend cannot run here with its own site; None if it can."""
        with on_path(self.sites.get(backend)):
            return self.registry.unavailable(backend, self.kind)


def find_place(device: str = "auto", plugins: Iterable[str | Path] = (), sites: Sequence[str] = ()) -> Place:
    """Probes the machine and loads the backends. `device` is auto, cpu, cuda or cuda:N; `sites` are NAME=PATH.

    Raises UsageError for a missing device, a plugin that cannot be loaded, or a site that is none.
    """
    files = tuple(str(plugin) for plugin in plugins)
    registry = load_registry(files)
    known = parse_sites(sites, registry)
    return Place(probe(device), registry, files, known)


def settings_for(sweep: Sweep, device: str, given: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    """The settings for a sweep on "cuda" or "cpu": those that were given, then the sweep's own on a GPU, then defaults.

    A CPU gets less time, because its samples rarely settle. Raises UsageError for a wrong setting of the sweep.
    """
    own = {name: getattr(sweep, name) for name in ("memory_limit_mib", "time_limit_s", "energy")}
    own = {name: value for name, value in own.items() if value is not None}
    try:
        on_gpu = Settings.from_json(Settings().to_json() | own)
    except ValueError as problem:
        raise UsageError(f"sweep {sweep.name}: {problem}") from None
    return replace(on_gpu if device == "cuda" else Settings(time_limit_s=1.0), **given)


@dataclass(frozen=True)
class Plan:
    """The cells of a resolved sweep, and everything that workers need to measure them."""

    sweep: Sweep
    cells: Sequence[Cell]
    settings: Settings
    place: Place
    # The command as it was typed, for the record.
    arguments: Sequence[str] = field(default_factory=tuple)

    def on(self, cells: Sequence[Cell]) -> "Plan":
        """The same plan with other cells."""
        return replace(self, cells=cells)

    def environment(self) -> dict[str, Any]:
        """The contents of a run's environment.json: hardware, versions, settings, and the origin of the code."""
        return {
            **self.place.environment,
            "settings": self.settings.to_json(),
            "cells": len(self.cells),
            "plugins": [Path(plugin).name for plugin in self.place.plugins],
            "implementations": self._implementations(),
            "code": describe_code(self.place.plugins),
            "variables": relevant_variables(),
            "command": command_line(self.arguments) if self.arguments else None,
        }

    def _implementations(self) -> dict[str, Any]:
        """Whether each backend has code of its own, and the versions of the packages that decide its times."""
        found = {}
        for name in dict.fromkeys(cell.backend for cell in self.cells):
            each = self.place.registry[name]
            with on_path(self.place.sites.get(name)):
                packages = {package: package_version(package) for package in each.packages}
                others = {p for cell in self.cells if cell.backend == name for p in _more_packages(each, cell)}
                versions = {package: package_version(package) for package in sorted(others - packages.keys())}
            packages |= {package: version for package, version in versions.items() if version is not None}
            found[name] = {"own_code": each.has_own_code, "packages": packages}
        return found


def _more_packages(backend: Backend, cell: Cell) -> tuple[str, ...]:
    """The backend's own words; none of a plugin's that are wrong, because its cells will say so."""
    try:
        with faults_of():
            return tuple(str(package) for package in backend.more_packages(cell))
    except UsageError:
        return ()


def make_plan(
    sweep: str | Path | Sweep,
    axes: Mapping[str, Any],
    settings: Settings | None,
    place: Place,
    arguments: Sequence[str] = (),
) -> Plan:
    """The plan of a sweep (a preset's name, a .toml file's path or a `Sweep`), changed by `axes`.

    Without settings, the sweep's own count. Raises UsageError for a wrong sweep or axis, NothingToRunError if the sweep
    has no cell.
    """
    loaded = as_sweep(sweep)
    settings = settings or settings_for(loaded, place.kind)
    if settings.timing == "graph" and place.kind != "cuda":
        raise UsageError("--timing: 'graph' needs a GPU (allowed here: cold, hot, eager)")
    if settings.memory_limit_mib is not None and place.kind != "cuda":
        raise UsageError("--memory-limit: needs a GPU; on a CPU, limit the process (ulimit, cgroups)")
    traits = place.registry.traits()
    resolved = resolve(loaded, place.kind, axes, traits)
    if place.kind == "cuda":
        resolved = _with_settings(resolved, settings)
    cells = expand(resolved, traits, place.kind)
    if not cells:
        raise NothingToRunError(f"the sweep {resolved.name} has no cell")
    if settings.memory_limit_mib is not None:
        _check_limited(cells, place.registry)
    return Plan(resolved, cells, settings, place, arguments)


def _with_settings(sweep: Sweep, settings: Settings) -> Sweep:
    """The sweep with the settings that count in place of its own, so that its file says how it was measured."""
    return replace(
        sweep,
        memory_limit_mib=settings.memory_limit_mib,
        time_limit_s=None if sweep.time_limit_s is None else settings.time_limit_s,
        energy=None if sweep.energy is None else settings.energy,
    )


def _check_limited(cells: Sequence[Cell], registry: Registry) -> None:
    """Raises UsageError for what a limit of memory does not hold for."""
    for cell in cells:
        if registry[cell.backend].work != "op":
            raise UsageError(f"--memory-limit: holds for ops alone, and {cell.backend} is a model; leave it out")


@dataclass(frozen=True)
class Estimate:
    """The estimated MiB and seconds of one cell. Seconds are 0 if it cannot run, for the reason in `unsupported`."""

    cell: Cell
    least_mib: float
    estimate_mib: float
    seconds: float
    unsupported: str | None

    def to_json(self) -> dict[str, Any]:
        """One flat dict with the fields of the cell and the estimate."""
        own = {name: getattr(self, name) for name in ("least_mib", "estimate_mib", "seconds", "unsupported")}
        return {**self.cell.to_json(), **own}


def estimate_cells(plan: Plan) -> list[Estimate]:
    """An estimate per cell: seconds from a stored run under `runs/` on the same device, else an upper bound."""
    stored = _stored_seconds(plan)
    return [_estimate(cell, plan, stored) for cell in plan.cells]


def _estimate(cell: Cell, plan: Plan, stored: Mapping[Cell, float]) -> Estimate:
    backend, op = plan.place.registry[cell.backend], plan.place.registry.op_of(cell.backend)
    reason = None
    try:
        with faults_of(), on_path(plan.place.sites.get(cell.backend)):
            reason = refusal(backend, op, cell) or plan.place.lacks_gpus(cell)
            least, working = float(op.least_bytes(cell)), float(backend.working_bytes(cell))
    except UsageError as problem:  # a faulty plugin affects only its own cells; what is refused may have no size
        return Estimate(cell, 0.0, 0.0, 0.0, reason or one_line(str(problem)))
    seconds = 0.0 if reason else _bound_seconds(cell, plan, stored)
    return Estimate(cell, least / 2**20, (least + working) / 2**20, seconds, reason)


def describe_totals(estimates: Sequence[Estimate]) -> str:
    """One line: cells, those that cannot run, the most memory at a time, and the time of all."""
    can_run = [each for each in estimates if not each.unsupported]
    skipped = f"{count_of(len(estimates), 'cell')}, {len(estimates) - len(can_run)} skipped as unsupported"
    if not can_run:
        return f"{skipped}: none can run here"
    seconds, mib = sum(each.seconds for each in can_run), max(each.estimate_mib for each in can_run)
    time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    if seconds > 2 * 3600:
        time = f"{seconds / 3600:.1f} hours"
    memory = f"{max(1, mib):.0f} MiB" if mib < 10 * 1024 else f"{mib / 1024:.0f} GiB"
    return f"{skipped}; up to about {memory} at a time, up to about {time}"


def expected_seconds(plan: Plan) -> float:
    """An upper bound of the seconds that all cells of available backends take.

    Calls no method of backends except `unavailable`, because a plugin's may be slow, load torch or end the process.
    """
    stored, backends = _stored_seconds(plan), dict.fromkeys(cell.backend for cell in plan.cells)
    can_run = {name for name in backends if not plan.place.unavailable(name)}
    there = [cell for cell in plan.cells if cell.backend in can_run and not plan.place.lacks_gpus(cell)]
    return sum(_bound_seconds(cell, plan, stored) for cell in there)


def _bound_seconds(cell: Cell, plan: Plan, stored: Mapping[Cell, float]) -> float:
    bound = plan.settings.warm_up_s + plan.settings.time_limit_s + _BESIDES_S[cell.device]
    # A baseline's cell may lack a parameter, and a plugin's op may be wrong: their cells fail when they are measured.
    with suppress(UsageError), faults_of():
        flops = plan.place.registry.op_of(cell.backend).flops(cell)
        bound = max(bound, _CALLS * flops / _FLOPS_PER_S[cell.device])
    return min(stored.get(cell, bound), plan.settings.cell_timeout_s)


def _stored_seconds(plan: Plan) -> dict[Cell, float]:
    """Seconds that cells took in the newest runs on the same device."""
    found: dict[Cell, float] = {}
    for folder in sorted(RunFolder.found_in(RUNS), key=changed_at)[-_MOST_RUNS:]:
        try:
            run = RunFolder.open(folder).load()
        except (UsageError, OSError):
            continue
        if device_name(run.environment) == device_name(plan.place.environment):
            found |= {
                record.cell: _seconds(record, plan.settings)
                for record in run.records
                if record.samples_ms or record.train_s
            }
    return found


def changed_at(run: Path) -> float:
    """When a record was last added to a run folder, in seconds; 0 if it was removed meanwhile."""
    try:
        return RunFolder(run).records_file.stat().st_mtime
    except OSError:
        return 0.0


def _seconds(record: Record, settings: Settings) -> float:
    if record.train_s is not None:  # samples are of some of a training's steps
        return record.train_s + _BESIDES_S[record.cell.device]
    sampled = sum(record.samples_ms or ()) / 1e3
    return (record.first_call_s or 0.0) + 2 * sampled + settings.warm_up_s + 1.0
