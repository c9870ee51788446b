"""Output of `compare` and `check`: terminal, files, GitHub."""

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from glabench.cli.options import JsonOption, complete_list
from glabench.cli.output import check_targets, data_console, to_json_text, write_text
from glabench.errors import UsageError, did_you_mean
from glabench.report.ci import github_annotations, junit
from glabench.report.figures import check_format, save_figure
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


# Formats of text, by the names of their options.
_FORMATS: Mapping[str, Callable[[Comparison, str, Collection[Verdict]], str]] = {
    "json": lambda found, *_: to_json_text(found.to_json()),
    "markdown": lambda found, heading, _: markdown(found, heading),
    "junit": lambda found, _, fail_on: junit(found, fail_on),
}


@dataclass(frozen=True)
class OutputOptions:
    """Where a comparison is written besides the terminal."""

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
        """The target of every format."""
        return {name: getattr(self, f"{name}_to") for name in _FORMATS}

    def check(self) -> None:
        """Raises UsageError, before anything is measured, for places that cannot be written to."""
        if self.figure is not None:
            check_format(self.figure)
        targets = {f"--{name}": to for name, to in self.texts.items()}
        check_targets({**targets, "--figure": None if self.figure is None else str(self.figure)})

    def show(self, found: Comparison, command: str, fail_on: Collection[Verdict], quiet: bool) -> NoReturn:
        """Writes and prints a comparison, and exits with its exit code."""
        for name, to in self.texts.items():
            if to is not None:
                write_text(_FORMATS[name](found, f"glabench {command}", fail_on), to)
        if self.figure is not None:
            save_figure(draw_ratios(found), self.figure)
        if "-" not in self.texts.values() and not quiet:
            console = data_console()
            console.print(terminal_report(found, console.width))
        raise typer.Exit(found.exit_code(fail_on))


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
