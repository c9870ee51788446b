"""Reasons to doubt a measured time. Each has a short tag for tables and an explanation with numbers."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from statistics import median

from glabench.records.metrics import significant
from glabench.records.record import Record

_MANY_OUTLIERS = 0.05
_MANY_EXPOSED = 0.25  # of the samples; fewer cannot move their median far
_FAR = 1.5  # times the median
_DRIFT = 0.02
_FEWEST_FOR_DRIFT = 20
_HARMLESS = ("", "none", "power cap")


class Diagnosis(StrEnum):
    """A reason to doubt a time; its value is the tag that tables show."""

    UNSETTLED = "unsettled"
    EXPOSED = "launch?"
    THROTTLED = "throttled"
    HOT = "hot"
    SHARED = "shared"
    OUTLIERS = "outliers"
    DRIFT = "drift"
    HOST = "host"


def diagnose(record: Record) -> list[Diagnosis]:
    """All reasons to doubt a record's time; empty if there is no time."""
    samples = record.samples_ms
    if record.time_ms is None or not samples:
        return []
    found = {
        Diagnosis.UNSETTLED: record.stop_reason == "time limit",
        Diagnosis.EXPOSED: (record.exposed_samples or 0) > _MANY_EXPOSED * len(samples),
        Diagnosis.THROTTLED: bool(record.thrown_out_ms),
        Diagnosis.HOT: bool(_causes(record)),
        Diagnosis.SHARED: bool(record.other_processes),
        Diagnosis.OUTLIERS: _count_outliers(record) > _MANY_OUTLIERS * len(samples),
        Diagnosis.DRIFT: abs(drift(samples)) > _DRIFT,
        Diagnosis.HOST: (record.host_ms or 0.0) > record.time_ms,
    }
    return [diagnosis for diagnosis, holds in found.items() if holds]


def explain(kind: Diagnosis, records: Sequence[Record]) -> str:
    """One line: how many records have this doubt, numbers of the worst one, and what to do."""
    found = [record for record in records if kind in diagnose(record)]
    if not found:
        return "no cell has it"
    measured = sum(record.time_ms is not None for record in records)
    where = "" if len(records) == 1 else f"{len(found)} of {measured} cells: "
    return where + _EXPLANATIONS[kind](found)


def drift(samples: Sequence[float]) -> float:
    """By which share the median of the last third differs from that of the first; 0 for few samples."""
    if len(samples) < _FEWEST_FOR_DRIFT:
        return 0.0
    third = len(samples) // 3
    first, last = median(samples[:third]), median(samples[-third:])
    return (last - first) / first if first > 0 else 0.0


def _causes(record: Record) -> list[str]:
    """What slowed the device down, other than its power limit."""
    return [cause for cause in (record.throttle or "").split(", ") if cause not in _HARMLESS]


def _count_outliers(record: Record) -> int:
    return sum(sample > _FAR * (record.time_ms or 0) for sample in record.samples_ms or ())


def _count(record: Record) -> int:
    return len(record.samples_ms or ())


def _worst(found: Sequence[Record], count: Callable[[Record], int], total: Callable[[Record], int] = _count) -> str:
    """`12 of 30` for the record with the largest share, or `up to 12 of 30` for several records."""
    worst = max(found, key=lambda record: count(record) / total(record))
    return f"{'up to ' if len(found) > 1 else ''}{count(worst)} of {total(worst)}"


def _explain_unsettled(found: Sequence[Record]) -> str:
    fewest, most = min(map(_count, found)), max(map(_count, found))
    after = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (
        f"sampling stopped at the time limit, after {after} samples, before the median was known as well as asked. "
        "Raise --time-limit."
    )


def _explain_exposed(found: Sequence[Record]) -> str:
    is_graph = all("graph" in (record.timing or "") for record in found)
    hint = "Measure a longer call." if is_graph else "Rerun with --timing graph."
    samples = _worst(found, lambda record: record.exposed_samples or 0)
    return f"{samples} samples may include launch latency: the GPU started before the call was queued. {hint}"


def _explain_throttled(found: Sequence[Record]) -> str:
    def thrown(record: Record) -> int:
        return len(record.thrown_out_ms or ())

    samples = _worst(found, thrown, lambda record: thrown(record) + _count(record))
    return f"the clock was held back during {samples} samples, which do not count. Let the GPU cool down."


def _explain_hot(found: Sequence[Record]) -> str:
    causes = ", ".join(dict.fromkeys(cause for record in found for cause in _causes(record)))
    hottest = max((record.temperature_c for record in found if record.temperature_c is not None), default=None)
    at = "" if hottest is None else f", at up to {hottest:.0f} °C"
    return f"the GPU slowed itself down ({causes}{at}). Look to its cooling and its power supply."


def _explain_shared(found: Sequence[Record]) -> str:
    most = max(record.other_processes or 0 for record in found)
    return f"{most} other {'process' if most == 1 else 'processes'} computed on the GPU. Measure when it is free."


def _explain_outliers(found: Sequence[Record]) -> str:
    samples = _worst(found, _count_outliers)
    word = "sample" if samples == "1" else "samples"
    return f"{samples} {word} took more than {_FAR} times the median. Look for other work on the machine."


def _explain_drift(found: Sequence[Record]) -> str:
    worst = max((drift(record.samples_ms or ()) for record in found), key=abs)
    by = f"{'up to ' if len(found) > 1 else ''}{100 * abs(worst):.1f} %"
    way = "longer" if worst > 0 else "shorter"
    return f"times became {by} {way} while they were sampled. A longer --time-limit shows whether they settle."


def _explain_host(found: Sequence[Record]) -> str:
    worst = max(found, key=lambda record: (record.host_ms or 0.0) / (record.time_ms or 1.0))
    times = f"{significant(worst.host_ms or 0.0)} ms against {significant(worst.time_ms or 0.0)} ms"
    if all((record.timing or "").startswith("eager") for record in found):
        return f"a call keeps the host busy for as long as it takes ({times}), so the device waits for the host."
    return (
        f"a call keeps the host busy for longer than the device ({'up to ' if len(found) > 1 else ''}{times}), so an "
        "uncompiled loop is slower than this; see --timing eager."
    )


_EXPLANATIONS: Mapping[Diagnosis, Callable[[Sequence[Record]], str]] = {
    Diagnosis.UNSETTLED: _explain_unsettled,
    Diagnosis.EXPOSED: _explain_exposed,
    Diagnosis.THROTTLED: _explain_throttled,
    Diagnosis.HOT: _explain_hot,
    Diagnosis.SHARED: _explain_shared,
    Diagnosis.OUTLIERS: _explain_outliers,
    Diagnosis.DRIFT: _explain_drift,
    Diagnosis.HOST: _explain_host,
}
