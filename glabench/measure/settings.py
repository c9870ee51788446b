"""How a cell is measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from glabench.measure.timer import Timing
from glabench.sweeps.fields import read_fields, shown


@dataclass(frozen=True)
class Settings:
    """Sampling stops when the median is known within `precision`, or after `time_limit_s`, or at `max_samples`.

    Before it, the call runs for `warm_up_s`, and it goes on for `least_time_s`, so that a short call is not judged
    while the clocks still rise.

    `cell_timeout_s` bounds a whole cell, compiling included; the runner enforces it from outside. `autotune` lets our
    kernels choose their launch plan by timing. `timing` is how a sample is taken; `energy` asks for joules a call.
    """

    precision: float = 0.01
    min_samples: int = 10
    max_samples: int = 1000
    time_limit_s: float = 3.0
    least_time_s: float = 0.2
    warm_up_s: float = 0.1
    cell_timeout_s: float = 300.0
    autotune: bool = False
    timing: Timing = "cold"
    energy: bool = True

    def to_json(self) -> dict[str, Any]:
        """Plain data for the worker."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Settings":
        """The way back of `to_json`. Raises ValueError for a wrong value, or one that this version does not know."""
        values = read_fields(cls, data)
        if unknown := set(data) - set(values):
            raise ValueError(f"unknown settings: {shown(sorted(unknown))}")
        return cls(**values)
