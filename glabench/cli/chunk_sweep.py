"""`glabench chunk-sweep`."""

from glabench.cli.measuring import find_place, measure
from glabench.cli.options import SweepOptions, with_options
from glabench.sweeps import load_sweep


@with_options
def chunk_sweep(options: SweepOptions) -> None:
    """Time and memory against the chunk size, states materialized or not (preset chunk-sweep)."""
    measure(load_sweep("chunk-sweep"), options, find_place(options.device, options.plugin))
