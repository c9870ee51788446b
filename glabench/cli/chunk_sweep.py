"""The command `glabench chunk-sweep`."""

from typing import Annotated

import typer

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions
from glabench.cli.output import Messages
from glabench.cli.profile import TIMED, profile_of_cell
from glabench.cli.speed import ResumedRun
from glabench.errors import GlabenchError, InterruptedRunError
from glabench.records import Run, RunFolder
from glabench.scheduling.plan import Place, Plan
from glabench.scheduling.runs import Request, plan_to_resume
from glabench.sweeps import Cell


def chunk_sweep(
    options: SweepOptions,
    folder: ResumedRun = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split/--no-split",
            help="Also profile forwards of backends whose parts can run alone (gla-two-level, linear-two-pass, "
            "fla-gla): the time within chunks and across them.",
        ),
    ] = True,
) -> None:
    """Measure time and memory against the chunk size, with states materialized or not (preset chunk-sweep).

    Ends with the chunk size to take, what it gains, and what it costs in memory.
    """
    measure("chunk-sweep", options, folder, then=_profile_parts if split else None, command="chunk-sweep")


def _profile_parts(run: Run, request: Request, messages: Messages) -> tuple[Run, bool]:
    """The run with profiles of its forwards whose parts can run alone, made as it was measured; whether all worked.

    What cannot be profiled is said.
    """
    folder, worked = RunFolder(run.path), True
    plan = plan_to_resume(folder, request)
    for record in run.records:
        cell = record.cell
        if (
            record.status in TIMED
            and not cell.has_backward
            and cell not in run.profiles
            and _has_parts(plan.place, cell.backend)
        ):
            messages.say(f"profiling {cell}")
            try:
                failure = _profile_cell(cell, plan, folder)
            except KeyboardInterrupt:
                kept = "what was measured and profiled is kept"
                raise InterruptedRunError(f"interrupted; {kept}, {request.go_on(run.path)}") from None
            if failure is not None:
                messages.say(f"error: {failure}")
                worked = False
    return folder.load(), worked


def _profile_cell(cell: Cell, plan: Plan, folder: RunFolder) -> str | None:
    """Adds a cell's profile to the run; what failed of it."""
    try:
        answer = profile_of_cell(cell, plan.place, plan.settings.cell_timeout_s)
    except GlabenchError as problem:
        return str(problem)
    folder.add_profile(cell, answer.profile)
    return answer.failure


def _has_parts(place: Place, backend: str) -> bool:
    return backend in place.registry and place.registry[backend].has_parts
