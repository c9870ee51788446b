"""`glabench run SWEEP`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions
from glabench.errors import UsageError
from glabench.sweeps import preset_names


def run(
    options: SweepOptions,
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP",
            help="A preset's name (see `glabench sweeps`), a .toml file, or with --resume a run folder.",
            autocompletion=preset_names,
        ),
    ] = "",
) -> None:
    """Run a sweep: a preset, or a .toml file of your own in the same format. Options change its axes."""
    is_resuming = options.resume or options.retry_failed
    if is_resuming and (Path(sweep) / "records.jsonl").is_file() and sweep:
        measure("", options, Path(sweep))
        return
    if not sweep and not is_resuming:
        raise UsageError(f"SWEEP: name a preset ({', '.join(preset_names())}) or a .toml file")
    measure(sweep, options)
