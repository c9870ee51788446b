"""`glabench report RUN`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.cli.output import Messages, check_targets, print_tables, write_records
from glabench.errors import UsageError
from glabench.records import RunFolder
from glabench.report.write import write_report


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    baseline: Annotated[
        str | None, typer.Option(help="The backend that ratios refer to; by default the sweep's.")
    ] = None,
    json_to: Annotated[str | None, typer.Option("--json", help="Write the records as JSON, - for stdout.")] = None,
    csv_to: Annotated[str | None, typer.Option("--csv", help="Write the records as CSV, - for stdout.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files only.")] = False,
) -> None:
    """Tables and figures from a run's records, on any machine.

    Writes records.csv, report.md, figure.png and figure.svg into the run folder.
    """
    folder = RunFolder.open(run)
    records, sweep = folder.records(), folder.sweep()
    if not records:
        raise UsageError(f"RUN: '{run}' has no records yet")
    known = sorted({record.cell.backend for record in records})
    if baseline is not None and baseline not in known:
        raise UsageError(f"--baseline: '{baseline}' is not in the run (allowed: {', '.join(known)})")
    check_targets({"--json": json_to, "--csv": csv_to})
    paths = write_report(folder, sweep, records, baseline)
    if not write_records(records, json_to, csv_to) and not quiet:
        print_tables(records, sweep)
    Messages(quiet).say("wrote " + ", ".join(str(path) for path in paths))
