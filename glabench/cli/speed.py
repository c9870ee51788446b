"""The command `glabench speed`: the main measurement with sensible defaults."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions, complete_runs

ResumedRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="With --resume: the run folder to continue.",
        show_default=False,
        autocompletion=complete_runs,
    ),
]


def speed(options: SweepOptions, folder: ResumedRun = None) -> None:
    """Measure time and memory against sequence length: the paper's sweep on a GPU, a small one on a CPU.

    On an NVIDIA GPU this is the preset paper-fig2 (forward and backward, 1k..16k, batch 32, 16 heads, head dim 64,
    bf16), on a CPU the preset cpu-smoke. Every axis can be changed.

    Example: glabench speed --seqlen 1k..4k --batch 8
    """
    measure("paper-fig2", options, folder, sweep_on_cpu="cpu-smoke")
