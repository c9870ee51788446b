"""The common part of `speed`, `chunk-sweep` and `run`: measure a sweep and show it, or list what would be measured."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import typer

from glabench.cli.options import SweepOptions
from glabench.cli.output import (
    Messages,
    check_targets,
    data_console,
    warn_of_unknown,
    write_csv,
    write_json,
    write_records,
)
from glabench.errors import ExitCode, NothingToRunError, UsageError, count_of
from glabench.records import FAILED, Run, RunFolder
from glabench.records.metrics import choose_metrics, known, parse_metrics, significant
from glabench.report.choice import CHUNK, recommend
from glabench.report.series import rows_of_runs
from glabench.report.tables import render_tables
from glabench.report.write import write_report
from glabench.scheduling.plan import Plan, describe_totals, estimate_cells
from glabench.scheduling.runs import Request, measure_run, plan_rest, resume_run


def measure(
    sweep: str, options: SweepOptions, folder: Path | None = None, sweep_on_cpu: str | None = None,
    then: Callable[[Run, Request, Messages], tuple[Run, bool]] | None = None, op: str | None = None,
    command: str = "run",
) -> None:  # fmt: skip
    """Measures a sweep, changed by the options, and shows it. Exits with code 4 if a cell failed.

    `folder` is the run to continue, with --resume or --retry-failed. `then` adds to the run before it is shown, and
    says whether that worked for every cell. Backends of another op than `op` are refused. `command` continues
    the run after an interruption. Raises UsageError and NothingToRunError.
    """
    check_targets({"--json": options.json_to, "--csv": options.csv_to})
    parse_metrics(options.metric)  # finds mistakes before anything is measured
    is_resuming = options.resume or options.retry_failed
    if folder is not None and not is_resuming:
        raise UsageError(f"RUN: '{folder}' needs --resume; leave it out to start a new run")
    if folder is not None and options.out is not None:
        raise UsageError(f"--out: '{folder}' is continued in its own folder; leave out --out")
    request = replace(options.request(sweep, sweep_on_cpu), op=op, command=command)
    messages = Messages(options.quiet, options.verbose)
    if options.dry_run:
        rest = plan_rest(request, folder or options.out, options.retry_failed) if is_resuming else request.plan()
        _list_cells(rest, options)
        return
    if is_resuming:
        run = resume_run(request, folder or options.out, messages, options.retry_failed)
    else:
        run = measure_run(request, options.out, messages)
    run, worked = (run, True) if then is None else then(run, request, messages)
    _show(run, options, messages)
    if not worked or any(record.status in FAILED for record in run.records):
        raise typer.Exit(ExitCode.CELL_FAILED)


def _list_cells(plan: Plan, options: SweepOptions) -> None:
    """Prints every cell with its estimated memory and time, or why it cannot run; then the totals.

    Backends that can run no cell follow in a line each.
    """
    if options.out is not None and not (options.resume or options.retry_failed):
        RunFolder.check_free(options.out)
    estimates = estimate_cells(plan)
    if options.json_to is not None:
        write_json([estimate.to_json() for estimate in estimates], options.json_to)
    if options.csv_to is not None:
        write_csv([estimate.to_json() for estimate in estimates], options.csv_to)
    if options.json_to is not None or options.csv_to is not None:
        return
    cells, reasons = Counter(each.cell.backend for each in estimates), defaultdict(set)
    for each in estimates:
        reasons[each.cell.backend].add(each.unsupported)
    idle = {name: reason for name, (reason, *others) in reasons.items() if reason and not others}
    print(f"{plan.sweep.title}: {count_of(len(plan.cells), 'cell')}\n{'memory':>12} {'time':>8}  cell")
    for each in estimates:
        if each.cell.backend not in idle:
            note = f"  unsupported: {each.unsupported}" if each.unsupported else ""
            print(f"{significant(each.estimate_mib):>8} MiB {each.seconds:>6.0f} s  {each.cell}{note}")
    for name, reason in idle.items():
        print(f"{name}, {count_of(cells[name], 'cell')}: unsupported: {reason}")
    print(describe_totals(estimates))


def _show(run: Run, options: SweepOptions, messages: Messages) -> None:
    if all(record.status == "unsupported" for record in run.records):
        first = run.records[0]
        raise NothingToRunError(f"no cell can run here; the first is {first.cell.backend}: {first.reason}")
    asked, rows = options.metric or run.sweep.metrics, rows_of_runs([run])
    warn_of_unknown([run], asked, messages)
    metrics = choose_metrics(asked if known(parse_metrics(asked), rows) else None, rows)
    paths = write_report([run], run.path, metrics, None)
    if not write_records([run], options.json_to, options.csv_to) and not options.quiet:
        console = data_console()
        for table in render_tables([run], metrics, console.width):
            console.print(table)
        for line in recommend(run) if run.sweep.x == CHUNK else ():
            print(line)
    messages.say(f"report: {paths[1]}  figure: {paths[2]}")
