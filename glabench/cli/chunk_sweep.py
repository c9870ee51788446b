"""The command `glabench chunk-sweep`."""

from functools import partial
from typing import Annotated

import typer

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions
from glabench.cli.output import Messages
from glabench.cli.profile import TIMED, profile_of_cell
from glabench.cli.speed import ResumedRun
from glabench.errors import GlabenchError
from glabench.records import Run, RunFolder
from glabench.scheduling.plan import Place, default_settings


def chunk_sweep(
    options: SweepOptions,
    folder: ResumedRun = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split/--no-split",
            help="Also profile forwards of backends whose parts can run alone (gla-two-level, linear-two-pass): the "
            "time within chunks and across them.",
        ),
    ] = True,
) -> None:
    """Measure time and memory against the chunk size, with states materialized or not (preset chunk-sweep).

    Ends with the chunk size to take, what it gains, and what it costs in memory.
    """
    if split:
        measure("chunk-sweep", options, folder, then=partial(_profile_parts, options))
    else:
        measure("chunk-sweep", options, folder)


def _profile_parts(options: SweepOptions, run: Run, messages: Messages) -> Run:
    """The run with profiles of its forwards whose parts can run alone. What cannot be profiled is said."""
    place = options.request("chunk-sweep").find_place()
    timeout_s = options.settings.get("cell_timeout_s", default_settings(place.kind).cell_timeout_s)
    folder = RunFolder(run.path)
    for record in run.records:
        cell = record.cell
        if (
            record.status in TIMED
            and not cell.has_backward
            and cell not in run.profiles
            and _has_parts(place, cell.backend)
        ):
            messages.say(f"profiling {cell}")
            try:
                folder.add_profile(cell, profile_of_cell(cell, place, timeout_s))
            except GlabenchError as problem:
                messages.say(f"error: {problem}")
    return folder.load()


def _has_parts(place: Place, backend: str) -> bool:
    return backend in place.registry and place.registry[backend].has_parts
