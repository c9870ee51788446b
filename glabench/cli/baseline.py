"""The commands `glabench baseline save` and `glabench baseline occasion`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.checking import save_baseline, save_occasion
from glabench.cli.options import GUARD, MeasuringOptions, between
from glabench.cli.output import Messages
from glabench.errors import ExitCode
from glabench.records import FAILED
from glabench.scheduling.versions import Rounds
from glabench.sweeps import preset_names


def save(
    options: MeasuringOptions,
    sweep: Annotated[
        str, typer.Argument(metavar="SWEEP", help="A preset's name or a .toml file.", autocompletion=preset_names)
    ] = GUARD,
    to: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("baseline.json"),
    rounds: Annotated[
        int, between("--rounds", 1, 100, "How many times to measure every cell, in fresh processes.")
    ] = 3,
    runs: Annotated[Path | None, typer.Option(help="Folder for the rounds' runs; by default under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the rounds in --runs.")] = False,
) -> None:
    """Measure a sweep in several rounds and store them in one file, for later checks on the same kind of device.

    Kernels are compiled anew, so that first calls can be compared.
    """
    messages = Messages(options.quiet, options.verbose)
    saved = save_baseline(options.request(sweep), to, Rounds(rounds, runs, resume), messages)
    messages.say(f"wrote {to}")
    if any(record.status in FAILED for found in saved.rounds for record in found):
        messages.say("some cells failed; glabench check will compare only cells with a time in some round")
        raise typer.Exit(ExitCode.CELL_FAILED)


def occasion(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="The rounds: run folders, or folders of rounds of one version."),
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The file to add to; by default the device's that ships with glabench, and that it reads."
        ),
    ] = None,
) -> None:
    """Add the times of some rounds, measured within minutes on one GPU, to the known occasions of its model.

    Comparisons of runs that were not taken in turns count with the spread between occasions. It is assumed until there
    are three that share two cells of the same code, an hour or more apart; measure on other GPUs of the model, too.

    Example: glabench baseline occasion runs/baseline-20260101-120000
    """
    found, path = save_occasion(runs, to)
    typer.echo(f"wrote {path}; {found.describe()}")
