"""Reads the device's state while a cell is sampled: now and then between samples, in the same thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median

from glabench.devices.nvml import DeviceState, Nvml

_BETWEEN_READINGS_S = 0.05


@dataclass(frozen=True)
class Watched:
    """A summary of readings: median clock and power, the highest temperature, every throttle reason.

    `throttle` holds the reasons joined by commas, or `none`. A field is None if it could not be read.
    """

    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    throttle: str | None


class Watch:
    """Collects readings. Call `look` after every sample. `is_loop`: samples are a loop's, whose idle time counts."""

    def __init__(self, nvml: Nvml | None, clock: Callable[[], float] = time.monotonic, is_loop: bool = False) -> None:
        self._nvml = nvml
        self._clock = clock
        self._is_loop = is_loop
        self._readings: list[DeviceState] = []
        self._busy: list[float] = []
        self._next_at = -float("inf")

    def look(self) -> None:
        """Reads the device's state, but at most every 50 ms."""
        if self._nvml is None or self._clock() < self._next_at:
            return
        self._readings.append(self._nvml.state())
        if self._is_loop and (busy := self._nvml.utilization_pct()) is not None:
            self._busy.append(busy)
        self._next_at = self._clock() + _BETWEEN_READINGS_S

    def summary(self) -> Watched:
        """A summary of the readings so far."""
        reasons = [reading.throttle for reading in self._readings if reading.throttle is not None]
        seen = sorted(frozenset[str]().union(*reasons))
        return Watched(
            _median(reading.memory_clock_mhz for reading in self._readings),
            max((r.temperature_c for r in self._readings if r.temperature_c is not None), default=None),
            _median(reading.power_w for reading in self._readings),
            (", ".join(seen) or "none") if reasons else None,
        )

    def idle_pct(self) -> float | None:
        """The share of time in which no kernel ran, as the driver counts it over up to a second before a reading."""
        return 100.0 - fmean(self._busy) if self._busy else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
