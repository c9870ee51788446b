"""Output of `compare` and `check`: terminal, files, GitHub."""

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from glabench.cli.options import complete_list
from glabench.cli.output import check_targets, data_console, write_json, write_text
from glabench.errors import UsageError, did_you_mean
from glabench.report.figures import check_format, save_figure
from glabench.report.verdicts import draw_ratios, github_annotations, junit, markdown, terminal_report
from glabench.verdicts import FAILING, Comparison, Verdict

_WORDS = tuple(sorted((*FAILING, Verdict.UNCLEAR)))

FailOnOption = Annotated[
    str | None,
    typer.Option(
        help=f"Fail if some cell has one of these verdicts, as a list: {', '.join(_WORDS)}.",
        metavar="VERDICTS",
        autocompletion=complete_list(_WORDS),
    ),
]


@dataclass(frozen=True)
class Outputs:
    """Where a comparison is written besides the terminal, and which verdicts make the command fail."""

    heading: str
    json_to: str | None
    markdown_to: str | None
    junit_to: str | None
    figure: Path | None
    quiet: bool
    fail_on: Collection[Verdict]

    def check(self) -> None:
        """Raises UsageError, before anything is measured, for places that cannot be written to."""
        if self.figure is not None:
            check_format(self.figure)
        figure = None if self.figure is None else str(self.figure)
        check_targets(
            {"--json": self.json_to, "--markdown": self.markdown_to, "--junit": self.junit_to, "--figure": figure}
        )


def parse_fail_on(text: str | None) -> tuple[Verdict, ...]:
    """The verdicts in a list such as `slower,failed`. Raises UsageError for a word that is not one of them."""
    found = []
    for word in (item.strip() for item in text.split(",")) if text else ():
        if word not in _WORDS:
            raise UsageError(f"--fail-on: '{word}' is not one of {', '.join(_WORDS)}{did_you_mean(word, _WORDS)}")
        found.append(Verdict(word))
    return tuple(found)


def show_comparison(found: Comparison, outputs: Outputs) -> NoReturn:
    """Writes and prints a comparison, and exits with its exit code."""
    if outputs.json_to is not None:
        write_json(found.to_json(), outputs.json_to)
    if outputs.markdown_to is not None:
        write_text(markdown(found, outputs.heading), outputs.markdown_to)
    if outputs.junit_to is not None:
        write_text(junit(found, outputs.fail_on), outputs.junit_to)
    if outputs.figure is not None:
        save_figure(draw_ratios(found), outputs.figure)
    if "-" not in (outputs.json_to, outputs.markdown_to, outputs.junit_to) and not outputs.quiet:
        console = data_console()
        console.print(terminal_report(found, console.width))
    raise typer.Exit(found.exit_code(outputs.fail_on))


def tell_github(found: Comparison, heading: str) -> None:
    """Writes annotations to stderr, which GitHub's runner reads too, and the step summary. Leaves stdout to data."""
    for line in github_annotations(found):
        print(line, file=sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(markdown(found, heading))
