"""The command `glabench check`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from glabench.checking import check as measure_and_check
from glabench.cli.options import GUARD, LimitOptions, MeasuringOptions, OccasionsOption, RevisedSweepOption, between
from glabench.cli.output import Messages
from glabench.cli.verdicts import OutputOptions, tell_github
from glabench.errors import ExitCode, GlabenchError, UsageError
from glabench.scheduling.versions import Rounds
from glabench.verdicts import FAILING, Limits, Verdict

# The codes of `git bisect run`, by those of a check.
_OF_BISECT = {
    ExitCode.REGRESSION: ExitCode.REGRESSION,
    ExitCode.ACCURACY: ExitCode.REGRESSION,
    ExitCode.CELL_FAILED: ExitCode.SKIP,
    ExitCode.UNCLEAR: ExitCode.SKIP,
}


def check(
    options: MeasuringOptions,
    outputs: OutputOptions,
    limits: LimitOptions,
    rev: Annotated[
        str | None, typer.Option(help="The git revision to compare with, measured in turns: main, HEAD~3, a commit.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="The baseline file to compare with, from `glabench baseline save`.")
    ] = None,
    sweep: RevisedSweepOption = None,
    rounds: Annotated[
        int, between("--rounds", 1, 100, "How many times to measure every cell, in fresh processes.")
    ] = 2,
    occasions: OccasionsOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 6 if some cell is unclear.")] = False,
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect",
            help="Exit as `git bisect run` understands it: 0 good, 1 bad (slower, larger or less accurate), 125 if "
            "some cell failed or is unclear, 128 if nothing could be checked.",
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the rounds' runs; by default under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the rounds in --out.")] = False,
) -> None:
    """Fail if the working tree is slower, larger or less accurate than a revision or a stored baseline.

    With --rev both versions are measured in turns, in fresh processes, on this machine; no stored file is needed. With
    --baseline the file's cells are measured with the file's settings. Doubtful cells are measured once more. In a
    GitHub workflow the command also writes annotations and the step summary.

    Example: glabench check --rev main
    """
    if strict and bisect:
        raise UsageError("--strict, --bisect: give one of them; --bisect tells of unclear cells by 125")
    fail_on = FAILING | {Verdict.UNCLEAR} if strict or bisect else FAILING
    outputs.check()
    allowed = Limits.of(**limits.by_metric)
    messages = Messages(options.quiet, options.verbose)
    request = options.request(sweep or GUARD)
    if baseline is not None:
        _refuse_what_the_baseline_holds(options, sweep)
    try:
        found = measure_and_check(request, rev, baseline, Rounds(rounds, out, resume), allowed, messages, occasions)
    except GlabenchError as problem:
        if bisect:
            problem.exit_code = ExitCode.STOP
        raise
    if os.environ.get("GITHUB_ACTIONS") == "true":
        tell_github(found, "glabench check")
    outputs.show(found, "check", fail_on, options.quiet, _OF_BISECT if bisect else {})


def _refuse_what_the_baseline_holds(options: MeasuringOptions, sweep: str | None) -> None:
    fixed = [name for name in options.given if name not in ("--device", "--plugin")]
    fixed += ["--sweep"] if sweep is not None else []
    if fixed:
        raise UsageError(f"{fixed[0]}: the baseline fixes the cells and settings; leave out {fixed[0]}")
