"""The command `glabench compare`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.checking import compare_folders, compare_revisions
from glabench.cli.options import GUARD, MeasuringOptions, OccasionsOption, RevisedSweepOption, between, share
from glabench.cli.output import Messages
from glabench.cli.verdicts import FailOnOption, OutputOptions, parse_fail_on
from glabench.errors import UsageError
from glabench.scheduling.versions import Rounds
from glabench.verdicts import SAME_WITHIN, Limits

_ROUNDS = 4


def compare(
    options: MeasuringOptions,
    outputs: OutputOptions,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN_A RUN_B", help="Two run folders, or one folder that --rev made.", show_default=False
        ),
    ] = None,
    rev: Annotated[
        str | None, typer.Option(help="Measure two git revisions in turns: main..HEAD, HEAD..WORKTREE, WORKTREE.")
    ] = None,
    sweep: RevisedSweepOption = None,
    rounds: Annotated[
        int | None, between("--rounds", 1, 100, f"How many times --rev measures each revision; by default {_ROUNDS}.")
    ] = None,
    same_within: Annotated[
        float, share("--same-within", "How far from 1 a ratio still counts as the same.")
    ] = SAME_WITHIN,
    any_device: Annotated[bool, typer.Option("--any-device", help="Compare even runs from different devices.")] = (
        False
    ),
    occasions: OccasionsOption = None,
    fail_on: FailOnOption = None,
    out: Annotated[Path | None, typer.Option(help="With --rev: folder for the runs; by default under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --rev: continue the rounds in --out.")] = False,
) -> None:
    """Compare two runs, or two git revisions, cell by cell: faster, slower, same, or unclear.

    With --rev both revisions are checked out side by side. This glabench measures their kernels (kernels/, and plugins
    of the repository) in fresh processes, in turns: A B, B A, and so on. A run folder may also be a folder of rounds,
    each a run of the same cells.

    Example: glabench compare --rev main..WORKTREE
    """
    failing = parse_fail_on(fail_on)
    outputs.check()
    limits = Limits.of_comparison(same_within)
    if rev is not None:
        if runs:
            raise UsageError("RUN_A RUN_B: give either run folders or --rev, not both")
        if occasions is not None:
            raise UsageError("--occasions: applies to runs that were not measured in turns; leave it out with --rev")
        messages = Messages(options.quiet, options.verbose)
        request = options.request(sweep or GUARD)
        found = compare_revisions(request, rev, Rounds(rounds or _ROUNDS, out, resume), limits, messages)
    else:
        measuring = {"--sweep": sweep, "--rounds": rounds, "--out": out, "--resume": resume}
        if given := [*options.given, *(option for option, value in measuring.items() if value)]:
            raise UsageError(f"{given[0]}: applies to measuring, which only --rev does; leave it out or give --rev")
        if not runs or len(runs) > 2:
            raise UsageError(
                f"RUN_A RUN_B: needs two run folders, the folder of an earlier --rev, or --rev; got {len(runs or ())}"
            )
        found = compare_folders(runs[0], runs[1] if len(runs) == 2 else None, limits, any_device, occasions)
    outputs.show(found, "compare", failing, options.quiet)
