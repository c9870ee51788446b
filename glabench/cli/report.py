"""The command `glabench report RUN...`."""

import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from glabench.cli.options import MetricOption
from glabench.cli.output import Messages, check_targets, data_console, warn_of_unknown, write_records
from glabench.errors import GlabenchError, RenamedWarning, UsageError, did_you_mean
from glabench.records import Run, RunFolder
from glabench.records.metrics import parse_metrics
from glabench.report.figures import check_format, draw, save_figure
from glabench.report.series import check_metrics, make_view
from glabench.report.tables import render_tables
from glabench.report.write import choose_drawn, write_report
from glabench.scheduling.folders import new_path


def _measured(ctx: typer.Context) -> list[str]:
    """The backends in the named runs."""
    found = []
    # Without its value, the option is a mistake, after which arguments are left as words.
    for path in map(Path, ctx.params.get("runs") or ctx.args):
        with suppress(GlabenchError, OSError):
            found.append(RunFolder.open(path).load())
    return _backends(found)


def _backends(runs: Iterable[Run]) -> list[str]:
    return sorted({record.cell.backend for run in runs for record in run.records})


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several go into the same tables and figure.")
    ],
    metric: MetricOption = None,
    against: Annotated[
        str | None,
        typer.Option(help="The backend that ratios refer to; by default the sweep's.", autocompletion=_measured),
    ] = None,
    baseline: Annotated[str | None, typer.Option(hidden=True)] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; by default the run's, or a new one for several runs.")
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw the figure into this .png, .svg or .pdf file.")] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", help="Write the records as JSON to this file, or - for stdout.")
    ] = None,
    csv_to: Annotated[
        str | None, typer.Option("--csv", help="Write the records as CSV to this file, or - for stdout.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")] = False,
) -> None:
    """Make tables and figures from the records of one or several runs, on any machine.

    Writes records.csv, report.md, figure.png and figure.svg.
    """
    messages = Messages(quiet)
    if baseline is not None:
        warnings.warn("the option --baseline is now called --against", RenamedWarning, stacklevel=2)
    against = against or baseline
    if figure is not None:
        check_format(figure)
    check_targets({"--json": json_to, "--csv": csv_to, "--figure": None if figure is None else str(figure)})
    loaded = [RunFolder.open(path).load() for path in runs]
    for run in loaded:
        if not run.records:
            raise UsageError(f"RUN: '{run.path}' has no records yet")
    known = _backends(loaded)
    if against is not None and against not in known:
        raise UsageError(
            f"--against: '{against}' is not in the run (allowed: {', '.join(known)}{did_you_mean(against, known)})"
        )
    metrics = parse_metrics(metric)
    check_metrics(loaded, metrics)
    warn_of_unknown(loaded, metric, messages)
    folder = out or (loaded[0].path if len(loaded) == 1 else new_path("report"))
    folder.mkdir(parents=True, exist_ok=True)
    paths = write_report(loaded, folder, metrics, against)
    if figure is not None:
        save_figure(draw(make_view(loaded), choose_drawn(metrics)), figure)
        paths.append(figure)
    if not write_records(loaded, json_to, csv_to) and not quiet:
        console = data_console()
        for table in render_tables(loaded, metrics, console.width, against):
            console.print(table)
    messages.say("wrote " + ", ".join(str(path) for path in paths))
