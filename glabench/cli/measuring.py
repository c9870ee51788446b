"""The flow that all measuring commands share: resolve the sweep, expand it, run what is not yet done, show it."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import typer

from glabench.backends import Registry, load_registry
from glabench.cli.options import MeasuringOptions, SweepOptions
from glabench.cli.output import Messages, check_targets, print_tables, write_csv, write_json, write_records
from glabench.errors import (
    ExitCode,
    GlabenchError,
    InterruptedRunError,
    NothingToRunError,
    RecordNotKeptError,
    UsageError,
)
from glabench.measure.ceiling import measure_ceilings
from glabench.measure.process import ProcessWorker
from glabench.measure.runner import run_cells
from glabench.records import FAILED, Ceilings, Record, RunFolder, with_rates
from glabench.records.comparison import device_name
from glabench.records.environment import probe
from glabench.report.tables import significant
from glabench.sweeps import AXES, Cell, Sweep, expand, resolve
from glabench.sweeps.load import dump_sweep

RUNS = Path("runs")
_BUSY_PCT = 10
# What may differ between a run and its resumption.
_OF_THE_MOMENT = frozenset({"settings", "busy", "ceilings"})


@dataclass(frozen=True)
class Place:
    """Where a sweep runs: the device that was chosen, the environment as torch sees it, the backends."""

    device: str
    environment: Mapping[str, Any]
    registry: Registry

    @property
    def known(self) -> dict[str, Any]:
        """The environment with the device that was chosen, as a run folder keeps it."""
        return {"device": self.device, **self.environment}


def warn_if_busy(place: Place, messages: Messages) -> None:
    """Says so if somebody else used the GPU just before the run."""
    busy = place.environment.get("busy") if place.device == "cuda" else None
    others, load = (busy or {}).get("other_processes"), (busy or {}).get("utilization_pct")
    if others or (load or 0) > _BUSY_PCT:
        share = "" if load is None else f", {load:.0f} % of its time in use"
        messages.say(
            f"warning: the GPU is busy ({others or 0} processes{share}); times will not be those of a free one"
        )


def find_place(device: str = "auto", plugins: Iterable[str] | None = None) -> Place:
    """Looks at the machine and loads the backends; `device` is auto, cuda or cpu, `plugins` are files with more.

    Raises UsageError for a device that is not there or a plugin that is wrong.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise UsageError(f"--device: '{device}' is not a device (allowed: auto, cuda, cpu)")
    registry = load_registry(plugins or ())
    environment = probe()
    has_gpu = environment["gpu"] is not None
    if device == "cuda" and not has_gpu:
        raise UsageError("--device: 'cuda' is not there: torch sees no NVIDIA GPU (allowed here: auto, cpu)")
    return Place("cuda" if has_gpu and device != "cpu" else "cpu", environment, registry)


def measure(sweep: Sweep, options: SweepOptions, place: Place) -> None:
    """Runs a sweep with the options' changes, keeps it in a run folder, prints its tables; exits 4 if a cell failed."""
    messages = Messages(options.quiet, options.verbose)
    sweep, cells = resolved(sweep, options, place)
    check_targets({"--json": options.json_to, "--csv": options.csv_to})
    if options.dry_run:
        _list_cells(cells, place.registry, options)
        return
    folder = _folder(sweep, options, place)
    with folder.locked():
        _measure_missing(folder, cells, sweep.title, options, place, messages)
    wanted = set(cells)
    _show([record for record in folder.records() if record.cell in wanted], sweep, options, messages)


def resolved(sweep: Sweep, options: MeasuringOptions, place: Place) -> tuple[Sweep, list[Cell]]:
    """The sweep with the options' changes, and its cells. Raises NothingToRunError if it has none."""
    sweep = resolve(sweep, place.device, _known_axes(options, place.registry))
    cells = expand(sweep, place.registry.traits(), place.device)
    if not cells:
        raise NothingToRunError(f"the sweep {sweep.name} has no cell")
    return sweep, cells


def _known_axes(options: MeasuringOptions, registry: Registry) -> dict[str, str]:
    axes = options.axes()
    for name in AXES["backend"].parse(axes["backend"]) if "backend" in axes else ():
        if name not in registry:
            raise UsageError(f"--backend: '{name}' is not a backend (allowed: {', '.join(sorted(registry))})")
    return axes


def _measure_missing(
    folder: RunFolder, cells: list[Cell], title: str, options: SweepOptions, place: Place, messages: Messages
) -> None:
    """Measures the cells that have no record yet, and adds theirs."""
    done = {r.cell for r in folder.records() if r.status == "ok" or not options.retry_failed}
    todo = [cell for cell in cells if cell not in done]
    warn_if_busy(place, messages)
    messages.say(f"{title}: {len(todo)} cells on {device_name(place.known)}, results in {folder.path}")
    if done:
        messages.say(f"{len(cells) - len(todo)} of {len(cells)} cells are done already")
    start = partial(
        ProcessWorker,
        run_id=folder.run_id,
        settings=options.settings(place.device),
        plugins=tuple(options.plugin or ()),
        show_errors=options.verbose,
    )
    with messages.progress(len(todo)) as progress:
        ceilings = Ceilings(**folder.environment().get("ceilings") or {})

        def on_record(record: Record) -> None:
            record = rated(record, place.registry, ceilings)
            folder.append(record)
            progress.add(record)

        go_on = f"go on with --resume --out {folder.path}"
        try:
            run_cells(todo, start, folder.run_id, on_record, progress.start)
        except KeyboardInterrupt:
            raise InterruptedRunError(f"interrupted; what was measured is kept, {go_on}") from None
        except RecordNotKeptError as problem:
            raise RecordNotKeptError(f"{problem}, {go_on}") from None
        except OSError as problem:  # no process, no temporary file for a worker
            why = problem.strerror or problem
            message = f"the next cell cannot be measured: {why}; what was measured is kept, {go_on}"
            raise GlabenchError(message) from None


def rated(record: Record, registry: Registry, ceilings: Ceilings) -> Record:
    """The record with what its op's counts make of its time."""
    op = registry[record.cell.backend].definition()
    return with_rates(record, op.moved_bytes(record.cell), op.flops(record.cell), ceilings)


def _folder(sweep: Sweep, options: SweepOptions, place: Place) -> RunFolder:
    settings = options.settings(place.device).to_json()
    environment = {**place.known, "settings": settings}
    if options.resume or options.retry_failed:
        path = options.out or _latest(sweep.name)
        folder = RunFolder.open(path)
        if dump_sweep(folder.sweep()) != dump_sweep(sweep):
            raise UsageError(f"--resume: '{path}' holds another sweep; give the same options, or leave out --resume")
        before = folder.environment()
        differing = [key for key in environment if key not in _OF_THE_MOMENT and before.get(key) != environment[key]]
        if differing:
            what = ", ".join(differing)
            raise UsageError(f"--resume: '{path}' was measured elsewhere (it differs in: {what}); start a new run")
        return folder
    path = options.out or new_path(sweep.name)
    ceilings = measure_ceilings() if place.device == "cuda" else Ceilings()
    return RunFolder.create(path, sweep, {**environment, "ceilings": asdict(ceilings)})


def new_path(name: str) -> Path:
    """A folder under runs/ that is not there yet."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(p for n in count(1) if not (p := RUNS / (stem if n == 1 else f"{stem}-{n}")).exists())


def _latest(name: str) -> Path:
    found = sorted(RUNS.glob(f"{name}-*/records.jsonl"))
    if not found:
        raise UsageError(f"--resume: there is no run of {name} under {RUNS}/; name its folder with --out")
    return found[-1].parent


def _list_cells(cells: list[Cell], registry: Registry, options: SweepOptions) -> None:
    """Prints the cells with an estimate of the memory that each takes, and why one would not run."""
    rows = []
    for cell in cells:
        backend = registry[cell.backend]
        least = backend.definition().least_bytes(cell)
        estimate = {"least_mib": least / 2**20, "estimate_mib": (least + backend.working_bytes(cell)) / 2**20}
        reason = backend.unavailable(cell.device) or backend.supports(cell)
        rows.append({**cell.to_json(), **estimate, "unsupported": reason})
    if options.json_to is not None:
        write_json(rows, options.json_to)
    if options.csv_to is not None:
        write_csv(rows, options.csv_to)
    if options.json_to is None and options.csv_to is None:
        for cell, row in zip(cells, rows, strict=True):
            note = f"  unsupported: {row['unsupported']}" if row["unsupported"] else ""
            print(f"{significant(row['estimate_mib']):>8} MiB  {cell}{note}")


def _show(records: list[Record], sweep: Sweep, options: SweepOptions, messages: Messages) -> None:
    if not write_records(records, options.json_to, options.csv_to) and not options.quiet:
        print_tables(records, sweep)
    for record in records:
        if record.status != "ok":
            messages.detail(f"{record.cell}: {record.status}: {record.reason}")
    if all(record.status == "unsupported" for record in records):
        raise NothingToRunError(f"no cell can run here; the first one: {records[0].cell.backend}: {records[0].reason}")
    if any(record.status in FAILED for record in records):
        raise typer.Exit(ExitCode.CELL_FAILED)
