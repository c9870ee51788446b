"""What a person should know of a measurement before believing it. Each diagnosis carries its own advice."""

from enum import StrEnum
from statistics import median

from glabench.records.record import Record

_MANY_OUTLIERS = 0.05
_MANY_EXPOSED = 0.25  # of the samples; fewer cannot move their median far
_FAR = 1.5  # times the median
_DRIFT = 0.02
_FEWEST_FOR_DRIFT = 20


class Diagnosis(StrEnum):
    """A reason to doubt a time, and what to do about it."""

    UNSETTLED = "sampling stopped at the time limit before the median was known as well as asked; raise --time-limit"
    EXPOSED = "launch latency may be in the time: the GPU begins before the host has queued it all; try --timing graph"
    THROTTLED = "the clock was held back during some samples, which do not count; let the GPU cool down"
    HOT = "the GPU slowed itself down for its temperature or its supply; look to its cooling"
    SHARED = "other processes computed on the GPU; measure when it is free"
    OUTLIERS = "more than one sample in twenty took 1.5 times the median; look for other work on the machine"
    DRIFT = "the time drifted by more than 2 % while it was sampled; a longer --time-limit shows whether it settles"


def diagnose(record: Record) -> list[Diagnosis]:
    """All that is wrong with the circumstances of a record's time; nothing where there is no time."""
    samples = record.samples_ms
    if record.time_ms is None or not samples:
        return []
    slow = sum(sample > _FAR * record.time_ms for sample in samples)
    causes = (record.throttle or "").split(", ")
    found = {
        Diagnosis.UNSETTLED: record.stop_reason == "time limit",
        Diagnosis.EXPOSED: (record.exposed_samples or 0) > _MANY_EXPOSED * len(samples),
        Diagnosis.THROTTLED: bool(record.thrown_out_ms),
        Diagnosis.HOT: any(cause not in ("", "none", "power cap") for cause in causes),
        Diagnosis.SHARED: bool(record.other_processes),
        Diagnosis.OUTLIERS: slow > _MANY_OUTLIERS * len(samples),
        Diagnosis.DRIFT: abs(drift(samples)) > _DRIFT,
    }
    return [diagnosis for diagnosis, holds in found.items() if holds]


def drift(samples: tuple[float, ...]) -> float:
    """How far the median of the last third is from that of the first, as a share; 0 for few samples."""
    if len(samples) < _FEWEST_FOR_DRIFT:
        return 0.0
    third = len(samples) // 3
    first, last = median(samples[:third]), median(samples[-third:])
    return (last - first) / first if first > 0 else 0.0
