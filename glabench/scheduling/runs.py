"""Measures a new run, or resumes one."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from glabench.errors import NothingToRunError, UsageError, allowed_names, count_of
from glabench.measure.settings import SETTINGS, Settings
from glabench.records import Run, RunFolder
from glabench.records.environment import device_name, device_number
from glabench.records.metrics import parse_metrics
from glabench.scheduling.folders import (
    check_plugins,
    check_same_machine,
    create_run,
    kept_settings,
    latest_run,
    new_path,
)
from glabench.scheduling.loop import Lane, Version, measure_lanes, missing_cells
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import LONG_S, Place, Plan, expected_seconds, find_place, make_plan, settings_for
from glabench.scheduling.process import ProcessWorker
from glabench.sweeps import Sweep, as_sweep

_BUSY_PCT = 10


@dataclass(frozen=True)
class Request:
    """A request to measure: the sweep with changes to its axes, the device, and changes to the default settings."""

    sweep: str | Path | Sweep
    # The preset to measure instead on a CPU.
    sweep_on_cpu: str | None = None
    axes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    plugins: Sequence[str | Path] = ()
    # NAME=PATH: folders of packages that a backend's workers alone see.
    sites: Sequence[str] = ()
    arguments: Sequence[str] = ()
    show_errors: bool = False
    # The op of all backends, for a command that measures nothing else.
    op: str | None = None
    # The command that continues the run, after an interruption.
    command: str = "run"

    def go_on(self, path: Path) -> str:
        """How to continue the run in a folder."""
        sites = [f"--site={site}" for site in self.sites]
        return f"continue with: {shlex.join(['glabench', self.command, '--resume', str(path), *sites])}"

    def find_place(self) -> Place:
        """Probes the machine and loads the backends. Raises UsageError."""
        return find_place(self.device, self.plugins, self.sites)

    def plan(self) -> Plan:
        """The plan for the request. Raises UsageError, NothingToRunError."""
        place = self.find_place()
        sweep = self.sweep_on_cpu if self.sweep_on_cpu and place.kind == "cpu" else self.sweep
        loaded = as_sweep(sweep)
        settings = settings_for(loaded, place.kind, self.settings)
        plan = make_plan(loaded, self.axes, settings, place, self.arguments)
        _check_op(plan, self.op)
        parse_metrics(plan.sweep.metrics, f"{plan.sweep.name}: metrics")  # finds mistakes before anything is measured
        return plan


def _check_op(plan: Plan, op: str | None) -> None:
    """Raises UsageError for the first backend of another op, if all must have this one."""
    registry = plan.place.registry
    for name in dict.fromkeys(cell.backend for cell in plan.cells) if op else ():
        if (own := registry.op_of(name).name) != op:
            allowed = allowed_names([each for each in registry if registry.op_of(each).name == op], name)
            raise UsageError(f"--backend: the op of '{name}' is {own}, not {op} ({allowed})")


def measure_run(request: Request, out: Path | None, observer: Observer, go_on: str | None = None) -> Run:
    """Measures a new run into `out`, or into a new folder under runs/.

    `go_on` is what to do after an interruption, for messages, unless that is to resume the run.
    Raises NothingToRunError, before any folder is made, if no backend of the sweep is available here.
    """
    plan = request.plan()
    _refuse_unavailable(plan)
    if request.sweep_on_cpu and plan.place.kind == "cpu":
        left_out = [name for name in plan.place.registry if plan.place.unavailable(name)]
        without = "" if "backend" in request.axes else f", without: {', '.join(left_out)}"
        observer.say(f"No NVIDIA GPU is used, so this is the small CPU sweep{without}")
    announce(plan, observer, 1)
    folder = create_run(out or new_path(plan.sweep.name), plan, observer)
    return _measure(folder, plan, request, observer, go_on=go_on)


def _refuse_unavailable(plan: Plan) -> None:
    backends = dict.fromkeys(cell.backend for cell in plan.cells)
    reasons = {name: plan.place.unavailable(name) for name in backends}
    if all(reasons.values()):
        listed = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
        raise NothingToRunError(f"no cell can run here: {listed}")


def resume_run(request: Request, path: Path | None, observer: Observer, retry_failed: bool = False) -> Run:
    """Continues a run with its stored sweep, plugins and settings.

    `path` None stands for the latest run of the request's sweep. Apart from time-outs, the request must not change
    anything; raises UsageError for the first difference.
    """
    folder, plan = _open_to_resume(request, path, retry_failed)
    announce(_rest(folder, plan, retry_failed), observer, 1)
    return _measure(folder, plan, request, observer, retry_failed)


def plan_rest(request: Request, path: Path | None, retry_failed: bool = False) -> Plan:
    """The plan of the cells that `resume_run` would measure. Raises UsageError as that does."""
    return _rest(*_open_to_resume(request, path, retry_failed), retry_failed)


def _open_to_resume(request: Request, path: Path | None, retry_failed: bool) -> tuple[RunFolder, Plan]:
    names = [Path(str(name)).stem for name in (request.sweep, request.sweep_on_cpu) if name]
    folder = RunFolder.open(path or latest_run(names))
    plan = plan_to_resume(folder, request)
    # What failed may have been mended; each record keeps the hash of the code that it was measured with.
    check_same_machine(folder, plan, may_differ=("code",) if retry_failed else ())
    return folder, plan


def _rest(folder: RunFolder, plan: Plan, retry_failed: bool) -> Plan:
    missing = missing_cells(folder, plan.cells, retry_failed)
    return plan.on([cell for cell in plan.cells if cell in missing])


def plan_to_resume(folder: RunFolder, request: Request) -> Plan:
    """The plan that a run was begun with, and what the request changes of it.

    Raises UsageError for a changed setting, and for other plugins.
    """
    settings = kept_settings(folder, request.settings)
    check_plugins(folder, request.plugins)
    device = request.device if request.device != "auto" else device_number(folder.environment())
    place = find_place(device, request.plugins or folder.plugins(), request.sites)
    return make_plan(folder.sweep(), request.axes, settings, place, request.arguments)


def _measure(
    folder: RunFolder, plan: Plan, request: Request, observer: Observer, retry_failed: bool = False,
    go_on: str | None = None,
) -> Run:  # fmt: skip
    cells = count_of(len(plan.cells), "cell")
    observer.say(f"{plan.sweep.title}: {cells} on {device_name(plan.place.environment)}, in {folder.path}")
    lane = Lane(folder, Version.installed(plan.place.plugins))
    start = partial(ProcessWorker, show_errors=request.show_errors)
    measure_lanes([lane], plan, observer, go_on or request.go_on(folder.path), retry_failed, start)
    return folder.load()


def announce(plan: Plan, observer: Observer, rounds: int) -> None:
    """Warns the user before a measurement if the GPU is busy or if it may take long."""
    busy = plan.place.environment.get("busy") if plan.place.kind == "cuda" else None
    others, load = (busy or {}).get("other_processes"), (busy or {}).get("utilization_pct")
    if others or (load or 0) > _BUSY_PCT:
        share = "" if load is None else f", in use {load:.0f} % of the time"
        observer.say(
            f"warning: the GPU is busy ({others or 0} processes{share}); times will not be those of a free GPU"
        )
    seconds = rounds * expected_seconds(plan)
    if seconds > LONG_S:
        observer.say(
            f"this may take up to {seconds / 60:.0f} minutes; --dry-run shows details, --backend and axes reduce it"
        )


def check_settings(settings: Mapping[str, Any], axes: Mapping[str, Any]) -> None:
    """Raises UsageError for an unknown setting or a wrong value, and for a setting that is given as an axis."""
    for name, value in axes.items():
        if known := [setting for setting in (name, f"{name}_s") if setting in SETTINGS]:
            raise UsageError(f'{name}: no axis but a setting; give settings={{"{known[0]}": {value!r}}}')
    try:
        Settings.from_json({**Settings().to_json(), **settings})
    except ValueError as problem:
        raise UsageError(f"settings: {problem} (allowed: {', '.join(SETTINGS)})") from None
