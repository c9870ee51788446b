"""The command `glabench report RUN...`."""

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from glabench import api
from glabench.cli.options import MetricOption, RecordsCsvOption, RecordsJsonOption
from glabench.cli.output import Messages, check_apart, check_targets, data_console, warn_of_unknown, write_records
from glabench.errors import GlabenchError, RenamedWarning
from glabench.records.metrics import choose_metrics
from glabench.report.figures import check_figure, save_figure
from glabench.report.profiled import describe_profiled
from glabench.report.roofline import describe_roofline, draw_roofline
from glabench.report.series import backends_in, make_view, rows_of_runs
from glabench.report.tables import render_tables


def _measured(ctx: typer.Context) -> list[str]:
    """The backends in the named runs."""
    found = []
    # Without its value, the option is a mistake, after which arguments are left as words.
    for path in ctx.params.get("runs") or ctx.args:
        with suppress(GlabenchError, OSError):
            found.append(api.load(path))
    return backends_in(found)


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
    roofline: Annotated[
        Path | None,
        typer.Option(help="Also draw a roofline, with a dot per cell, into this file, and say what bounds each."),
    ] = None,
    json_to: RecordsJsonOption = None,
    csv_to: RecordsCsvOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")] = False,
) -> None:
    """Make tables and figures from the records of one or several runs, on any machine.

    Writes records.csv, report.md, figure.png and figure.svg.
    """
    messages = Messages(quiet)
    if baseline is not None:
        warnings.warn("the option --baseline is now called --against", RenamedWarning, stacklevel=2)
    against = against or baseline
    figures, texts = {"--figure": figure, "--roofline": roofline}, {"--json": json_to, "--csv": csv_to}
    for option, path in figures.items():
        if path is not None:
            check_figure(path, option)
    check_targets(texts)
    check_apart({**figures, **texts})
    loaded = [api.load(path) for path in runs]
    paths = api.make_report(loaded, out=out, metrics=metric, against=against, figure=figure)
    metric = metric or loaded[0].sweep.metrics
    warn_of_unknown(loaded, metric, messages)
    if not write_records(loaded, json_to, csv_to) and not quiet:
        console = data_console()
        for table in render_tables(loaded, choose_metrics(metric, rows_of_runs(loaded)), console.width, against):
            console.print(table)
    if roofline is not None:
        view = make_view(loaded)
        save_figure(draw_roofline(view), roofline)
        paths = [*paths, roofline]
        for line in () if quiet else describe_roofline(view):
            print(line)
    for line in describe_profiled(loaded[0]) if len(loaded) == 1 else ():
        messages.say(line)
    messages.say("wrote " + ", ".join(str(path) for path in paths))
