"""The command `glabench run SWEEP`."""

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
            help="A preset's name (see `glabench sweeps`) or a .toml file; with --resume also a run folder.",
            autocompletion=preset_names,
        ),
    ] = "",
) -> None:
    """Run a sweep: a preset, or your own .toml file in the same format. Options change its axes.

    Example: glabench run paper-fig2 --seqlen 1k..4k
    """
    is_resuming = options.resume or options.retry_failed
    if is_resuming and (Path(sweep) / "records.jsonl").is_file() and sweep:
        measure("", options, Path(sweep))
        return
    if not sweep and not is_resuming:
        raise UsageError(f"SWEEP: name a preset ({', '.join(preset_names())}) or a .toml file")
    measure(sweep, options)
