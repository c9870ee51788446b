"""The table of metrics, used by terminal tables, Markdown, CSV, figures, comparisons and the check."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from glabench.errors import UsageError, did_you_mean

Row = Mapping[str, Any]
Better = Literal["lower", "higher"]


def significant(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, without an exponent: 0.0512, 1.78, 14.5, 1040."""
    if value == 0:
        return "0"
    return f"{Decimal(f'{value:.{digits}g}'):f}"


def _whole(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else significant(value)


def _scientific(value: float) -> str:
    return f"{value:.1e}"


@dataclass(frozen=True)
class Metric:
    """One quantity of a record.

    `name` is for `--metric`, `field` is the column of `Run.table()`. A metric with `better` None has no better or worse
    direction and is never compared. `limit` is the share by which it may become worse in a check (0.05 is 5 %), `slack`
    an amount in its unit that is allowed in addition. Without a limit the check ignores the metric.
    """

    name: str
    field: str
    title: str
    unit: str
    better: Better | None
    format: Callable[[float], str] = significant
    limit: float | None = None
    slack: float = 0.0
    # What a value is multiplied with to be shown in `unit`.
    scale: float = 1.0

    def show(self, value: float) -> str:
        """A value of the column as text, in `unit`."""
        return self.format(value * self.scale)


METRICS: tuple[Metric, ...] = (
    Metric("time", "time_ms", "median time", "ms", "lower", limit=0.05),
    Metric("host", "host_ms", "host's time per call", "ms", "lower"),
    Metric("peak", "peak_mib", "peak memory above the inputs", "MiB", "lower", _whole, limit=0.02),
    Metric("roof", "roofline_pct", "share of the nearer roof", "%", "higher", _whole),
    Metric("floor", "floor_pct", "share of the memory's floor", "%", "higher", _whole),
    Metric("tokens", "tokens_per_s", "tokens per second", "million/s", "higher", scale=1e-6),
    Metric("tflops", "tflops", "the equation's operations", "TFLOP/s", "higher"),
    Metric("gbps", "gbps", "the equation's bytes", "GB/s", "higher", _whole),
    Metric("executed_tflops", "executed_tflops", "operations executed", "TFLOP/s", "higher"),
    Metric("executed_gbps", "executed_gbps", "bytes moved", "GB/s", "higher", _whole),
    Metric("first_call", "first_call_s", "first call", "s", "lower", limit=0.5, slack=1.0),
    Metric("saved", "saved_mib", "held between forward and backward", "MiB", "lower", _whole),
    Metric("reserved", "peak_reserved_mib", "peak memory taken from the device", "MiB", "lower", _whole),
    Metric("process", "process_memory_mib", "memory of the whole process", "MiB", "lower", _whole),
    Metric("energy", "energy_j", "energy per call", "J", "lower"),
    Metric("power", "power_w", "power", "W", None, _whole),
    Metric("clock", "sm_clock_mhz", "SM clock", "MHz", None, _whole),
    Metric("error", "error", "largest relative error", "", "lower", _scientific, limit=0.5, slack=1e-6),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
TIME, PEAK, FIRST_CALL, ERROR = (BY_NAME[name] for name in ("time", "peak", "first_call", "error"))
# What a report shows by default.
USUAL = ("time", "peak", "roof")


def parse_metrics(text: str | None) -> tuple[Metric, ...]:
    """The metrics in a list such as `time,peak`; the usual ones for None. Raises UsageError for an unknown name."""
    found = []
    for name in dict.fromkeys(item.strip() for item in text.split(",")) if text is not None else USUAL:
        if name not in BY_NAME:
            allowed = f"allowed: {', '.join(BY_NAME)}{did_you_mean(name, BY_NAME)}"
            raise UsageError(f"--metric: '{name}' is not a metric ({allowed})")
        found.append(BY_NAME[name])
    return tuple(found)


def derived(row: Row) -> dict[str, Any]:
    """The columns that are computed from a record's fields; None if unknown."""
    time_ms, gbps, ceiling = row["time_ms"], row["gbps"], row["copy_gbps"]
    allocated = row["peak_allocated_mib"]
    errors = [error for error in (row["rel_error"] or {}).values() if error is not None]
    return {
        "peak_mib": allocated if allocated is not None else _whole_mib(row["peak_resident_mib"]),
        "floor_pct": 100 * gbps / ceiling if gbps and ceiling else None,
        "tokens_per_s": 1e3 * row["batch"] * row["seqlen"] / time_ms if time_ms else None,
        "error": max(errors, default=None),
    }


def _whole_mib(resident: float | None) -> float | None:
    """Resident memory as it is known: to about 1 MiB, and at least that."""
    return None if resident is None else float(max(1, round(resident)))


def known(metrics: Iterable[Metric], rows: Iterable[Row]) -> list[Metric]:
    """The metrics that have a value in at least one row."""
    listed = list(rows)
    return [metric for metric in metrics if any(row.get(metric.field) is not None for row in listed)]
