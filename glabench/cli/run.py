"""`glabench run SWEEP`."""

from typing import Annotated

import typer

from glabench.cli.measuring import find_place, measure
from glabench.cli.options import SweepOptions, with_options
from glabench.sweeps import load_sweep, preset_names


@with_options
def run(
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP",
            help="A preset's name (see `glabench sweeps`) or a .toml file.",
            autocompletion=preset_names,
        ),
    ],
    options: SweepOptions,
) -> None:
    """Run a sweep: a preset, or a .toml file of your own in the same format. Options change its axes."""
    loaded = load_sweep(sweep)
    measure(loaded, options, find_place(options.device, options.plugin))
