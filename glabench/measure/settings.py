"""How a cell is measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from glabench.plain import Amount, Count, Number, Whole, read_as, shown

Timing = Literal["cold", "hot", "graph"]
TIMINGS: tuple[Timing, ...] = get_args(Timing)


@dataclass(frozen=True)
class Settings:
    """How long and in what way cells are sampled; the defaults are those of a GPU."""

    # Sampling stops when the median's 95 % interval is within this share of it on either side,
    precision: Amount = 0.01
    min_samples: Whole = 10
    # or at so many samples,
    max_samples: Count = 1000
    # or after so many seconds.
    time_limit_s: Amount = 3.0
    # It goes on for so long at least, so that a short call is not judged while the clocks still rise.
    least_time_s: Number = 0.2
    # The call runs for so long before it is sampled.
    warm_up_s: Number = 0.1
    # Bounds a whole cell, compiling included; enforced from outside the worker.
    cell_timeout_s: Amount = 300.0
    # Our kernels choose their launch plan by timing.
    autotune: bool = False
    timing: Timing = "cold"
    # Whether joules per call are measured.
    energy: bool = True

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Settings":
        """The inverse of `to_json`. Raises ValueError for a wrong value, or one that this version does not know."""
        settings = read_as(cls, data)
        if unknown := set(data) - {f.name for f in fields(cls)}:
            raise ValueError(f"unknown settings: {shown(sorted(unknown))}")
        return settings
