"""The table of metrics, used by terminal tables, Markdown, CSV, figures, comparisons and the check.

A new row is all that a new metric needs. With a `limit` it is judged by `check`, with an `option` the limit has one.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from statistics import geometric_mean, median
from typing import Any, Literal

from glabench.errors import UsageError, allowed_names

Row = Mapping[str, Any]
Better = Literal["lower", "higher"]
# The verdicts on a metric that became worse.
Worse = Literal["slower", "larger", "inaccurate"]


def significant(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, without an exponent: 0.0512, 1.78, 14.5, 1040."""
    if value == 0:
        return "0"
    return f"{Decimal(f'{value:.{digits}g}'):f}"


def _whole(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else significant(value)


def _scientific(value: float) -> str:
    return f"{value:.1e}"


# The unit to take from a largest value on (below it, if the factor is above 1), and what values are multiplied with.
_UNITS: Mapping[str, tuple[float, str, float]] = {
    "KiB": (8192, "MiB", 1 / 1024),
    "MiB": (8192, "GiB", 1 / 1024),
    "million/s": (0.5, "thousand/s", 1e3),
    "kJ": (0.5, "J", 1e3),
}


@dataclass(frozen=True)
class Metric:
    """One quantity of a record.

    `name` is for `--metric`, `field` is the column of `Run.table()`. A metric with `better` None has no better or worse
    direction and is never compared.
    """

    name: str
    field: str
    title: str
    unit: str
    better: Better | None
    format: Callable[[float], str] = significant
    # What a value is multiplied with to be shown in `unit`.
    scale: float = 1.0
    # The share by which it may become worse in a check (0.05 is 5 %), and an amount that is allowed in addition.
    # Without a limit it is judged only if the user gives one.
    limit: float | None = None
    slack: float = 0.0
    # The option of `check` that sets the limit, if there is one, and its help.
    option: str = ""
    help: str = ""
    # The value of several rounds, from the rounds' values.
    combine: Callable[[Sequence[float]], float] = median
    # The columns that it is judged by, each for itself; by default `field`. `*` stands for any text.
    judged_by: str = ""
    # By default `larger` if lower is better, otherwise `slower`.
    worse: Worse | None = None
    # What the sum over a backend's cells in the first round is called, if that is judged and not single cells.
    total: str = ""
    # Whether it differs from pass to pass; if not, reports show it for the first one alone.
    of_pass: bool = True
    # Whether it depends on how calls are timed (`--timing`).
    timed: bool = True

    def show(self, value: float) -> str:
        """A value of the column as text, in `unit`."""
        return self.format(value * self.scale)

    def fitted(self, rows: Iterable[Row], only_finer: bool = False) -> "Metric":
        """The metric in the unit that fits the largest value of some rows; coarser ones drop digits of values."""
        most = max((row[self.field] for row in rows if row.get(self.field) is not None), default=0) * self.scale
        limit, unit, factor = _UNITS.get(self.unit, (math.inf, self.unit, 1.0))
        if not math.isfinite(most):
            return self
        fits = (most >= limit or not most) if factor > 1 else (most < limit or only_finer)
        return self if fits else replace(self, unit=unit, scale=self.scale * factor).fitted(rows, only_finer)


METRICS: tuple[Metric, ...] = (
    Metric(
        "time", "time_ms", "median time", "ms", "lower",
        limit=0.05, option="--max-slowdown", help="How much a cell's time may grow.", worse="slower",
        combine=geometric_mean,  # as in the ratio of the samples, by which it is judged
    ),
    Metric("host", "host_ms", "host's time per call", "ms", "lower"),
    Metric(
        "peak", "peak_mib", "peak memory above the inputs", "MiB", "lower", _whole,
        limit=0.02, option="--max-memory", help="How much a cell's peak memory may grow.",
        judged_by="peak_allocated_mib",  # resident memory on a CPU is too noisy
        timed=False,
    ),
    Metric("roof", "roofline_pct", "share of the nearer roof", "%", "higher", _whole),
    Metric("floor", "floor_pct", "share of the memory's floor", "%", "higher", _whole),
    Metric("tokens", "tokens_per_s", "tokens per second", "million/s", "higher", scale=1e-6),
    Metric("tokens_gpu", "tokens_per_s_gpu", "tokens per second and GPU", "million/s", "higher", scale=1e-6),
    Metric("efficiency", "efficiency_pct", "efficiency against one GPU", "%", "higher", _whole),
    Metric("tflops", "tflops", "the equation's operations", "TFLOP/s", "higher"),
    Metric("gbps", "gbps", "the equation's bytes", "GB/s", "higher", _whole),
    Metric("operations", "executed_gflop", "operations executed", "GFLOP", "lower", timed=False),
    Metric("executed_tflops", "executed_tflops", "operations executed per second", "TFLOP/s", "higher"),
    Metric("executed_gbps", "executed_gbps", "bytes moved", "GB/s", "higher", _whole),
    Metric("scalar", "scalar_pct", "operations off the tensor cores", "%", "lower", timed=False),
    Metric("mfu", "mfu_pct", "MFU", "%", "higher", _whole),
    Metric("mixer", "mixer_pct", "mixers' kernels, of a step", "%", None, _whole),
    Metric("sent", "sent_mib", "sent by a GPU for mixers, by sizes", "MiB", "lower", timed=False),
    Metric("idle", "gpu_idle_pct", "GPU idle", "%", None, _whole),
    Metric("prefill", "prefill_ms", "prefill", "ms", "lower"),
    Metric(
        "first_call", "first_call_s", "first call", "s", "lower",
        limit=0.5, slack=1.0, option="--max-first-call", worse="slower",
        help="How much a backend's first calls may grow, in addition to one second.",
        total="first calls",  # what a cell's first call compiles depends on the cells before it
        timed=False,
    ),
    Metric("state", "state_kib", "state of a sequence", "KiB", "lower", _whole, of_pass=False, timed=False),
    Metric("allocated", "allocated_state_kib", "memory there for a sequence", "KiB", "lower", _whole,
           of_pass=False, timed=False),
    Metric("parameters", "layer_parameters", "parameters of a layer", "million", None, scale=1e-6,
           of_pass=False, timed=False),
    Metric("saved", "saved_mib", "held between forward and backward", "MiB", "lower", _whole, timed=False),
    Metric("reserved", "peak_reserved_mib", "peak memory taken from the device", "MiB", "lower", _whole, timed=False),
    Metric("process", "process_memory_mib", "memory of the whole process", "MiB", "lower", _whole),
    Metric("energy", "energy_j", "energy per call", "J", "lower", timed=False),
    Metric("energy_tokens", "energy_mtoken_j", "energy per million tokens", "kJ", "lower", scale=1e-3, timed=False),
    Metric("power", "power_w", "power", "W", None, _whole),
    Metric("clock", "sm_clock_mhz", "SM clock", "MHz", None, _whole),
    Metric("accuracy", "accuracy", "values recalled", "%", "higher", scale=100, timed=False),
    Metric("training", "train_s", "time of training", "s", "lower"),
    Metric("bits", "bits_per_byte", "bits per byte of unseen text", "", "lower", lambda x: f"{x:.3f}", timed=False),
    Metric(
        "error", "error", "largest relative error", "", "lower", _scientific,
        limit=0.5, slack=1e-6, option="--max-error", help="How much the error of a tensor may grow.",
        judged_by="rel_error_*", combine=max, worse="inaccurate",
        timed=False,
    ),
)  # fmt: skip
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
TIME = BY_NAME["time"]
# Those whose limit has an option.
LIMITED = tuple(metric for metric in METRICS if metric.option)
# Ops whose records have all memory of a model, with its weights and the optimizer's moments, as peak.
_TRAINED = ("training", "text")
# What a report shows by default.
USUAL = ("time", "peak", "roof")


def parse_metrics(text: str | None, where: str = "--metric") -> tuple[Metric, ...]:
    """The metrics in a list such as `time,peak`; the usual ones for None.

    Raises UsageError for an unknown name, with a message that starts with `where`.
    """
    found = []
    for name in dict.fromkeys(item.strip() for item in text.split(",")) if text is not None else USUAL:
        if name not in BY_NAME:
            raise UsageError(f"{where}: '{name}' is not a metric ({allowed_names(BY_NAME, name)})")
        found.append(BY_NAME[name])
    return tuple(found)


def choose_metrics(text: str | None, rows: Iterable[Row]) -> tuple[Metric, ...]:
    """The metrics in a list; for None the usual ones, and the host's time if most times are shorter than it.

    Raises UsageError for an unknown name.
    """
    rows = list(rows)
    chosen = parse_metrics(text)
    if rows and all(row.get("op") in _TRAINED for row in rows):
        chosen = tuple(replace(each, title="peak memory") if each.name == "peak" else each for each in chosen)
    timed = [row for row in rows if row["time_ms"]] if text is None else []
    waits = [row for row in timed if (row["host_ms"] or 0.0) > row["time_ms"]]
    return chosen if 2 * len(waits) <= len(timed) else (*chosen[:1], BY_NAME["host"], *chosen[1:])


def parse_compared(text: str | None) -> tuple[Metric, ...] | None:
    """The metrics in a list, or None for None. Raises UsageError for one that is never compared, or unknown."""
    metrics = None if text is None else parse_metrics(text)
    for metric in metrics or ():
        if metric.better is None:
            allowed = ", ".join(each.name for each in METRICS if each.better)
            raise UsageError(f"--metric: '{metric.name}' has no better and worse to compare (allowed: {allowed})")
    return metrics


def derived(row: Row, gpus: int = 1, alone_ms: float | None = None) -> dict[str, Any]:
    """The columns that are computed from a record's fields; None if unknown.

    `gpus` share the cell's work; `alone_ms` is the time of the same cell on one of them, in the same run.
    """
    time_ms, gbps, ceiling = row["time_ms"], row["gbps"], row["copy_gbps"]
    tflops, product = row["tflops"], row["product_tflops"]
    executed = row["executed_tflops"]
    tokens_per_s = 1e3 * row["batch"] * row["seqlen"] / time_ms if time_ms else None
    allocated = row["peak_allocated_mib"]
    errors = [error for error in (row["rel_error"] or {}).values() if error is not None]
    return {
        "peak_mib": allocated if allocated is not None else _whole_mib(row["peak_resident_mib"]),
        "executed_gflop": executed * time_ms if executed is not None and time_ms else None,
        "floor_pct": 100 * gbps / ceiling if gbps and ceiling else None,
        "mfu_pct": 100 * tflops / gpus / product if tflops and product else None,
        "mixer_pct": 100 * row["mixer_ms"] / time_ms if row["mixer_ms"] and time_ms else None,
        "energy_mtoken_j": 1e6 * row["energy_j"] / row["batch"] / row["seqlen"] if row["energy_j"] else None,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_gpu": tokens_per_s / gpus if tokens_per_s else None,
        "efficiency_pct": 100 * alone_ms / time_ms / gpus if time_ms and alone_ms else None,
        "error": max(errors, default=None),
    }


def _whole_mib(resident: float | None) -> float | None:
    """Resident memory as it is known: to about 1 MiB, and at least that."""
    return None if resident is None else float(max(1, round(resident)))


def known(metrics: Iterable[Metric], rows: Iterable[Row]) -> list[Metric]:
    """The metrics that have a value in at least one row."""
    listed = list(rows)
    return [metric for metric in metrics if any(row.get(metric.field) is not None for row in listed)]
