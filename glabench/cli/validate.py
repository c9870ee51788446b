"""The command `glabench validate`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.checking import validate_harness
from glabench.cli.options import MeasuringOptions, between
from glabench.cli.output import Messages
from glabench.scheduling.versions import Rounds
from glabench.sweeps import preset_names


def validate(
    options: MeasuringOptions,
    sweep: Annotated[
        str, typer.Option(help="The sweep whose spread between processes is measured.", autocompletion=preset_names)
    ] = "validation",
    processes: Annotated[int, between("--processes", 2, 100, "How many fresh processes measure every cell.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the processes in --out.")] = False,
) -> None:
    """Test the timers on work of known size and against other timers, and measure the spread between processes.

    Writes known-work.json, validation.md, and one run folder per process. Needs an NVIDIA GPU. The other timers are
    Triton's do_bench and, if it is installed, NVIDIA's cuda-bench.
    """
    messages = Messages(options.quiet, options.verbose)
    page = validate_harness(options.request(sweep), Rounds(processes, out, resume), messages)
    if not options.quiet:
        print(page.read_text(encoding="utf-8"))
