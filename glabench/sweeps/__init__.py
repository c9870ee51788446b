"""From text to cells: the axis grammar, sweep definitions, presets."""

from glabench.sweeps.expand import Traits, expand, resolve
from glabench.sweeps.load import load_sweep, preset_names
from glabench.sweeps.model import AXES, Cell, Sweep, Variant

__all__ = ["AXES", "Cell", "Sweep", "Traits", "Variant", "expand", "load_sweep", "preset_names", "resolve"]
