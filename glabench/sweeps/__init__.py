"""Sweeps: parameters, the axis grammar, sweep files, presets, and their expansion into cells."""

from glabench.sweeps.expand import Traits, expand, resolve
from glabench.sweeps.load import load_sweep, preset_names
from glabench.sweeps.model import Cell, Parameters, Sweep, Variant
from glabench.sweeps.parameters import Parameter

__all__ = [
    "Cell", "Parameter", "Parameters", "Sweep", "Traits", "Variant", "expand", "load_sweep", "preset_names", "resolve",
]  # fmt: skip
