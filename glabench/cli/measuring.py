"""The flow that all measuring commands share: resolve the sweep, expand it, run what is not yet done, show it."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import typer

from glabench.backends import Registry, load_registry
from glabench.cli.options import SweepOptions
from glabench.cli.output import Messages, check_targets, print_tables, write_csv, write_json, write_records
from glabench.errors import ExitCode, GlabenchError, InterruptedRunError, NothingToRunError, UsageError
from glabench.measure.process import ProcessWorker
from glabench.measure.runner import run_cells
from glabench.records import FAILED, Record, RunFolder
from glabench.records.environment import probe
from glabench.report.tables import significant
from glabench.sweeps import AXES, Cell, Sweep, expand, resolve
from glabench.sweeps.load import dump_sweep

RUNS = Path("runs")


@dataclass(frozen=True)
class Place:
    """Where a sweep runs: the device that was chosen, the environment as torch sees it, the backends."""

    device: str
    environment: Mapping[str, Any]
    registry: Registry


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
    registry = place.registry
    sweep = resolve(sweep, place.device, _known_axes(options, registry))
    cells = expand(sweep, registry.traits(), place.device)
    check_targets(options.json_to, options.csv_to)
    if not cells:
        raise NothingToRunError(f"the sweep {sweep.name} has no cell")
    if options.dry_run:
        _list_cells(cells, registry, options)
        return
    folder = _folder(sweep, options, place)
    with folder.locked():
        _measure_missing(folder, cells, sweep.title, options, place, messages)
    wanted = set(cells)
    _show([record for record in folder.records() if record.cell in wanted], sweep, options, messages)


def _known_axes(options: SweepOptions, registry: Registry) -> dict[str, str]:
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
    messages.say(f"{title}: {len(todo)} cells on {_device_name(place)}, results in {folder.path}")
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

        def on_record(record: Record) -> None:
            try:
                folder.append(record)
            except OSError as problem:
                raise _stopped(f"the record of {record.cell} cannot be written", problem, folder) from None
            progress.add(record)

        try:
            run_cells(todo, start, folder.run_id, on_record, progress.start)
        except KeyboardInterrupt:
            raise InterruptedRunError(f"interrupted; {_kept(folder)}") from None
        except OSError as problem:  # no process, no temporary file for a worker
            raise _stopped("the next cell cannot be measured", problem, folder) from None


def _stopped(what: str, problem: OSError, folder: RunFolder) -> GlabenchError:
    return GlabenchError(f"{what}: {problem.strerror or problem}; mend that: {_kept(folder)}")


def _kept(folder: RunFolder) -> str:
    return f"what was measured is kept, go on with --resume --out {folder.path}"


def _device_name(place: Place) -> str:
    gpu = place.environment["gpu"]
    return str(gpu["name"]) if place.device == "cuda" and gpu else f"the CPU ({place.environment['cpu']})"


def _folder(sweep: Sweep, options: SweepOptions, place: Place) -> RunFolder:
    settings = options.settings(place.device).to_json()
    environment = {"device": place.device, **place.environment, "settings": settings}
    if options.resume or options.retry_failed:
        path = options.out or _latest(sweep.name)
        folder = RunFolder.open(path)
        if dump_sweep(folder.sweep()) != dump_sweep(sweep):
            raise UsageError(f"--resume: '{path}' holds another sweep; give the same options, or leave out --resume")
        before = folder.environment()
        differing = [key for key in environment if key != "settings" and before.get(key) != environment[key]]
        if differing:
            what = ", ".join(differing)
            raise UsageError(f"--resume: '{path}' was measured elsewhere (it differs in: {what}); start a new run")
        return folder
    path = options.out or _new_path(sweep.name)
    return RunFolder.create(path, sweep, environment)


def _new_path(name: str) -> Path:
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
