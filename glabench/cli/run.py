"""The command `glabench run SWEEP`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions, complete_sweep_or_run
from glabench.errors import UsageError
from glabench.records import RunFolder
from glabench.sweeps import CPU_TITLE, load_sweep, preset_names


def run(
    options: SweepOptions,
    sweep: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP",
            help="A preset's name (see `glabench sweeps`) or a .toml file; with --resume also a run folder.",
            autocompletion=complete_sweep_or_run,
        ),
    ] = "",
) -> None:
    """Run a sweep: a preset, or your own .toml file in the same format. Options change its axes.

    On a CPU, the axes in a sweep's [cpu] table replace those of the same name; in presets they are smaller sizes.

    Example: glabench run paper-fig2 --seqlen 1k..4k
    """
    is_resuming = options.resume or options.retry_failed
    path = Path(sweep)
    is_folder = RunFolder(path).records_file.exists() or (len(path.parts) > 1 and path.suffix != ".toml")
    if is_resuming and sweep and is_folder:
        measure("", options, path)
        return
    if not sweep and not is_resuming:
        raise UsageError(f"SWEEP: name a preset ({', '.join(preset_names())}) or a .toml file")
    if sweep and is_resuming and options.out is not None:
        begun = RunFolder.open(options.out).sweep().title
        if begun.removesuffix(CPU_TITLE) != load_sweep(sweep).title.removesuffix(CPU_TITLE):
            raise UsageError(f"SWEEP: '{options.out}' holds a run of another sweep ({begun}); leave out '{sweep}'")
    measure(sweep, options)
