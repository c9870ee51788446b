"""The settings of a measurement."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from glabench.errors import did_you_mean
from glabench.plain import Amount, Count, Number, Whole, read_as, read_text, shown

Check = Literal["small", "full"]
CHECKS: tuple[Check, ...] = get_args(Check)
Timing = Literal["cold", "hot", "graph", "eager"]
TIMINGS: tuple[Timing, ...] = get_args(Timing)


@dataclass(frozen=True)
class Settings:
    """How cells are sampled. The defaults are for a GPU."""

    # Share of the median: sampling stops once the median's 95 % interval is this narrow on either side.
    precision: Amount = 0.01
    # Samples that are needed to stop for precision.
    min_samples: Whole = 10
    # Samples at which sampling stops in any case.
    max_samples: Count = 1000
    # Seconds after which sampling stops in any case.
    time_limit_s: Amount = 3.0
    # Seconds before which sampling does not stop for precision, because the clocks may still rise.
    least_time_s: Number = 0.2
    # Seconds for which the call runs before the first sample.
    warm_up_s: Number = 0.1
    # Seconds that a whole cell may take, compiling included. The parent process enforces this limit.
    cell_timeout_s: Amount = 300.0
    # Whether our kernels choose their launch plan by timing.
    autotune: bool = False
    # `cold`, `hot` or `graph`; see `CudaTimer`. `eager`: see `EagerTimer`.
    timing: Timing = "cold"
    # `full`: results are also compared with the reference at the cell's own size. `small`: at a small size alone.
    check: Check = "full"
    # Whether to measure joules per call.
    energy: bool = True
    # MiB that torch may hold on the GPU while a backend's first call, and the one whose memory is measured, run.
    memory_limit_mib: Count | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Settings":
        """The inverse of `to_json`. Raises ValueError for a wrong value or an unknown setting."""
        settings = read_as(cls, read_text(data))
        if unknown := sorted(set(data) - set(SETTINGS)):
            raise ValueError(f"unknown settings: {shown(unknown)}{did_you_mean(unknown[0], SETTINGS)}")
        return settings


# The names of all settings.
SETTINGS = tuple(f.name for f in fields(Settings))
