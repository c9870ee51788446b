"""`glabench check`: the gate."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from glabench.cli.measuring import Place, find_place
from glabench.cli.options import between, share
from glabench.cli.output import Messages, check_targets, data_console, write_json, write_text
from glabench.cli.rounds import Campaign, Version, campaign_folder, compile_cache, measure_rounds, records_of
from glabench.cli.second_look import SecondLook
from glabench.errors import NothingToRunError, UsageError
from glabench.measure.settings import Settings
from glabench.records import Ceilings
from glabench.records.baseline import Baseline
from glabench.records.comparison import device_name, differences
from glabench.records.gate import Finding, Limits, check_cells, check_first_calls, exit_code
from glabench.report.gate import github_annotations, junit, markdown, reasons, rich_table, verdict_line
from glabench.sweeps import Cell

_DEFAULT = Limits()


@dataclass(frozen=True)
class _Outputs:
    json_to: str | None
    markdown_to: str | None
    junit_to: str | None
    strict: bool
    quiet: bool


def check(
    baseline: Annotated[Path, typer.Option(help="A file that `glabench baseline save` wrote.")],
    max_slowdown: Annotated[float, share("--max-slowdown", "By how much a cell's time may grow.")] = _DEFAULT.slowdown,
    max_memory: Annotated[float, share("--max-memory", "By how much its peak memory may grow.")] = _DEFAULT.memory,
    max_error: Annotated[float, share("--max-error", "By how much its largest error may grow.")] = _DEFAULT.error,
    max_first_call: Annotated[
        float, share("--max-first-call", "By how much a backend's first calls may grow, besides one second.")
    ] = _DEFAULT.first_call,
    yardstick: Annotated[
        str | None, typer.Option(help="Judge the ratio to this backend's time in the same round, not the time.")
    ] = None,
    rounds: Annotated[int, between("--rounds", 1, 100, "Times that every cell is measured, in fresh processes.")] = 2,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 6 if some cell is unclear.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the rounds' runs; by default under runs/.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file with more backends.")] = None,
    json_to: Annotated[str | None, typer.Option("--json", help="Write as JSON, - for stdout.")] = None,
    markdown_to: Annotated[str | None, typer.Option("--markdown", help="Write as Markdown, - for stdout.")] = None,
    junit_to: Annotated[str | None, typer.Option("--junit", help="Write as JUnit XML, - for stdout.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No messages and no table, errors only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more, with the tracebacks of failed cells.")] = (
        False
    ),
) -> None:
    """Measure again what a baseline holds, and fail if anything became slower, larger or less accurate.

    What looks slower, first calls too, is measured once more: in turns with the baseline's own revision where this
    repository has it and its code differs, in another round otherwise. In a GitHub workflow it also writes annotations
    and the step summary.
    """
    messages = Messages(quiet, verbose)
    check_targets({"--json": json_to, "--markdown": markdown_to, "--junit": junit_to})
    held = Baseline.load(baseline)
    device = str(held.environment.get("device", "cuda"))
    place = find_place(device if device in ("cuda", "cpu") else "cuda", plugin)
    cells = _cells(held, place, yardstick)
    limits = Limits(max_slowdown, max_memory, max_error, max_first_call)
    for name, before, now in _surroundings(held, place):
        messages.say(f"differs from the baseline: {name}: {before} -> {now}")
    settings = _settings(held)
    folder = campaign_folder(out, "check")
    messages.say(f"{held.sweep.title}: {len(cells)} cells, {rounds} rounds on {device_name(place.known)}")
    campaign = Campaign(held.sweep, cells, settings, place, folder, messages, verbose)
    plugins = tuple(plugin or ())
    with TemporaryDirectory(prefix="glabench-cache-") as cache:
        present = Version(compile_cache(cache), plugins)
        folders = measure_rounds(campaign, {"round": present}, rounds)["round"]
        now, ceilings = records_of(folders), Ceilings(**folders[0].environment()["ceilings"])
        again = SecondLook(campaign, held, limits, yardstick, present, ceilings)
        findings = again.at_times(now, check_cells(held.rounds, now, limits, yardstick))
        findings += again.at_first_calls(check_first_calls(held.rounds, now, limits, yardstick))
    _show(findings, _Outputs(json_to, markdown_to, junit_to, strict, quiet))
    raise typer.Exit(exit_code(findings, strict))


def _cells(held: Baseline, place: Place, yardstick: str | None) -> list[Cell]:
    """The cells to measure: those that the baseline has a time of. Raises UsageError, NothingToRunError."""
    if device_name(held.environment) != device_name(place.known):
        raise UsageError(
            f"--baseline: it was made on {device_name(held.environment)}, this is {device_name(place.known)}; "
            "make one here with: glabench baseline save"
        )
    cells = list(dict.fromkeys(r.cell for records in held.rounds for r in records if r.samples_ms))
    backends = {cell.backend for cell in cells}
    unknown = sorted(backends - set(place.registry))
    if unknown:
        raise UsageError(f"--baseline: it holds backends that are not here: {', '.join(unknown)}; give their --plugin")
    if not cells:
        raise NothingToRunError("the baseline holds no cell with a time")
    if yardstick is not None and yardstick not in backends:
        raise UsageError(
            f"--yardstick: the baseline has no times of '{yardstick}' (allowed: {', '.join(sorted(backends))})"
        )
    if not backends - {yardstick}:
        raise NothingToRunError("the baseline holds no cell to judge, but for the yardstick's own")
    return cells


def _surroundings(held: Baseline, place: Place) -> list[tuple[str, object, object]]:
    """What differs from the baseline's machine, its settings aside, which are taken over."""
    before = {key: value for key, value in held.environment.items() if key != "settings"}
    return differences(before, place.known)


def _settings(held: Baseline) -> Settings:
    try:
        return Settings.from_json(held.environment["settings"])
    except (KeyError, ValueError):
        raise UsageError(
            "--baseline: its settings are not those of this glabench; make one anew with: glabench baseline save"
        ) from None


def _show(findings: Sequence[Finding], outputs: _Outputs) -> None:
    if outputs.json_to is not None:
        write_json([finding.to_json() for finding in findings], outputs.json_to)
    if outputs.markdown_to is not None:
        write_text(markdown(findings, "glabench check"), outputs.markdown_to)
    if outputs.junit_to is not None:
        write_text(junit(findings, outputs.strict), outputs.junit_to)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _tell_github(findings)
    if "-" not in (outputs.json_to, outputs.markdown_to, outputs.junit_to) and not outputs.quiet:
        console = data_console()
        console.print(rich_table(findings))
        for line in reasons(findings):
            console.print(line, markup=False, soft_wrap=True)
        console.print(verdict_line(findings), markup=False, style="bold")


def _tell_github(findings: Sequence[Finding]) -> None:
    """Annotations go to stderr, where a runner reads them as well, and leave stdout to data."""
    Messages().lines(github_annotations(findings))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(markdown(findings, "glabench check"))
