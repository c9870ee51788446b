"""`glabench check`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from glabench.checking import Rounds, check_baseline, check_revision
from glabench.cli.options import GUARD, JsonOption, MeasuringOptions, RevisedSweepOption, between, share
from glabench.cli.output import Messages
from glabench.cli.verdicts import Outputs, show_comparison, tell_github
from glabench.errors import UsageError
from glabench.records.metrics import BY_NAME
from glabench.verdicts import FAILING, Limits, Verdict


def _limit(name: str) -> float:
    limit = BY_NAME[name].limit
    assert limit is not None
    return limit


def check(
    options: MeasuringOptions,
    rev: Annotated[
        str | None, typer.Option(help="Measure in turns with this git revision: main, HEAD~3, a commit.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Hold against this file, which `glabench baseline save` wrote.")
    ] = None,
    sweep: RevisedSweepOption = None,
    max_slowdown: Annotated[float, share("--max-slowdown", "By how much a cell's time may grow.")] = _limit("time"),
    max_memory: Annotated[float, share("--max-memory", "By how much its peak memory may grow.")] = _limit("peak"),
    max_error: Annotated[float, share("--max-error", "By how much its largest error may grow.")] = _limit("error"),
    max_first_call: Annotated[
        float, share("--max-first-call", "By how much a backend's first calls may grow, besides one second.")
    ] = _limit("first_call"),
    rounds: Annotated[int, between("--rounds", 1, 100, "Times that every cell is measured, in fresh processes.")] = 2,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 6 if some cell is unclear.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the rounds' runs; by default under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the rounds in --out.")] = False,
    json_to: JsonOption = None,
    markdown_to: Annotated[str | None, typer.Option("--markdown", help="Write as Markdown, - for stdout.")] = None,
    junit_to: Annotated[str | None, typer.Option("--junit", help="Write as JUnit XML, - for stdout.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the ratios: a .png, .svg or .pdf.")] = None,
) -> None:
    """Fail if the working tree is slower, larger or less accurate than a revision, or than a stored baseline.

    With --rev both versions are measured in turns, in fresh processes, on this machine: nothing has to be stored. With
    --baseline the file's cells are measured with its settings. What is doubtful is measured once more. In a GitHub
    workflow it also writes annotations and the step summary.
    """
    fail_on = FAILING | {Verdict.UNCLEAR} if strict else FAILING
    outputs = Outputs("glabench check", json_to, markdown_to, junit_to, figure, options.quiet, fail_on)
    outputs.check()
    if (rev is None) == (baseline is None):
        raise UsageError("--rev: give a revision (--rev main), or a file (--baseline FILE)")
    limits = Limits.of(time=max_slowdown, peak=max_memory, error=max_error, first_call=max_first_call)
    messages = Messages(options.quiet, options.verbose)
    request = options.request(sweep or GUARD)
    if baseline is None:
        found = check_revision(request, str(rev), Rounds(rounds, out, resume), limits, messages)
    else:
        _refuse_what_the_baseline_holds(options, sweep)
        found = check_baseline(request, baseline, Rounds(rounds, out, resume), limits, messages)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        tell_github(found, "glabench check")
    show_comparison(found, outputs)


def _refuse_what_the_baseline_holds(options: MeasuringOptions, sweep: str | None) -> None:
    fixed = [name for name in options.given if name not in ("--device", "--plugin")]
    fixed += ["--sweep"] if sweep is not None else []
    if fixed:
        raise UsageError(f"{fixed[0]}: a baseline is checked with its own cells and settings; leave it out")
