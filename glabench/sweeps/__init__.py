"""Sweeps: parameters, the axis grammar, sweep files, presets, and their expansion into cells."""

from glabench.sweeps.expand import CPU_TITLE, Traits, expand, resolve
from glabench.sweeps.load import as_sweep, load_sweep, preset_names
from glabench.sweeps.model import Cell, Parameters, Sweep, Variant
from glabench.sweeps.parameters import Parameter

__all__ = [
    "CPU_TITLE", "Cell", "Parameter", "Parameters", "Sweep", "Traits", "Variant", "as_sweep", "expand", "load_sweep",
    "preset_names", "resolve",
]  # fmt: skip
