"""The command `glabench chunk-sweep`."""

from glabench.cli.measuring import measure
from glabench.cli.options import SweepOptions
from glabench.cli.speed import ResumedRun


def chunk_sweep(options: SweepOptions, folder: ResumedRun = None) -> None:
    """Measure time and memory against the chunk size, with states materialized or not (preset chunk-sweep)."""
    measure("chunk-sweep", options, folder)
