"""Output of `compare` and `check`: terminal, files, GitHub."""

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NoReturn

import typer

from glabench.cli.options import JsonOption, MetricOption, complete_list
from glabench.cli.output import check_targets, data_console, to_json_text, write_text
from glabench.errors import ExitCode, UsageError, did_you_mean
from glabench.records.metrics import parse_compared
from glabench.report.ci import github_annotations, junit
from glabench.report.figures import check_figure, save_figure
from glabench.report.ratios import draw_ratios
from glabench.report.verdicts import markdown, terminal_report
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
class OutputOptions:
    """What the table of a comparison shows, and where the comparison is written besides the terminal."""

    metric: MetricOption = None
    json_to: JsonOption = None
    markdown_to: Annotated[
        str | None, typer.Option("--markdown", help="Write Markdown to this file, or - for stdout.")
    ] = None
    junit_to: Annotated[str | None, typer.Option("--junit", help="Write JUnit XML to this file, or - for stdout.")] = (
        None
    )
    figure: Annotated[Path | None, typer.Option(help="Draw the ratios into this .png, .svg or .pdf file.")] = None

    @property
    def texts(self) -> dict[str, str | None]:
        """The target of every format of text, by its option."""
        return {"--json": self.json_to, "--markdown": self.markdown_to, "--junit": self.junit_to}

    def check(self) -> None:
        """Raises UsageError, before anything is measured, for a wrong metric, and for places that cannot be written."""
        parse_compared(self.metric)
        if self.figure is not None:
            check_figure(self.figure)
        check_targets(self.texts)

    def show(
        self, found: Comparison, command: str, fail_on: Collection[Verdict], quiet: bool,
        codes: Mapping[ExitCode, ExitCode] = MappingProxyType({}),
    ) -> NoReturn:  # fmt: skip
        """Writes and prints a comparison, and exits with its exit code, or with what `codes` has for that."""
        metrics = parse_compared(self.metric)
        if self.json_to is not None:
            write_text(to_json_text(found.to_json()), self.json_to)
        if self.markdown_to is not None:
            write_text(markdown(found, f"glabench {command}", metrics), self.markdown_to)
        if self.junit_to is not None:
            write_text(junit(found, fail_on), self.junit_to)
        if self.figure is not None:
            save_figure(draw_ratios(found), self.figure)
        if "-" not in self.texts.values() and not quiet:
            console = data_console()
            console.print(terminal_report(found, console.width, metrics))
        code = found.exit_code(fail_on)
        raise typer.Exit(codes.get(code, code))


def parse_fail_on(text: str | None) -> tuple[Verdict, ...]:
    """The verdicts in a list such as `slower,failed`. Raises UsageError for a word that is not one of them."""
    found = []
    for word in (item.strip() for item in text.split(",")) if text else ():
        if word not in _WORDS:
            raise UsageError(f"--fail-on: '{word}' is not one of {', '.join(_WORDS)}{did_you_mean(word, _WORDS)}")
        found.append(Verdict(word))
    return tuple(found)


def tell_github(found: Comparison, heading: str) -> None:
    """Writes annotations to stderr, which GitHub's runner reads too, and the step summary. Leaves stdout to data."""
    for line in github_annotations(found):
        print(line, file=sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(markdown(found, heading))
