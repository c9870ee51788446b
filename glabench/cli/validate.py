"""`glabench validate`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.checking import Rounds, validate_harness
from glabench.cli.options import MeasuringOptions, between
from glabench.cli.output import Messages
from glabench.sweeps import preset_names


def validate(
    options: MeasuringOptions,
    sweep: Annotated[
        str, typer.Option(help="The cells whose spread between processes is measured.", autocompletion=preset_names)
    ] = "validation",
    processes: Annotated[int, between("--processes", 2, 100, "Fresh processes that measure every cell.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the processes in --out.")] = False,
) -> None:
    """Hold this harness against work of a known size and other people's timers, and against itself.

    Writes known-work.json, validation.md, and one run folder per process. Needs an NVIDIA GPU; NVIDIA's cuda-bench is
    compared with if it is installed.
    """
    messages = Messages(options.quiet, options.verbose)
    page = validate_harness(options.request(sweep), Rounds(processes, out, resume), messages)
    if not options.quiet:
        print(page.read_text(encoding="utf-8"))
