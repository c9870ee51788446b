"""Two runs cell by cell: which is faster, by how much, and whether that can be told at all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glabench.errors import UsageError
from glabench.records.record import Record
from glabench.records.statistics import Ratio, compare_samples, false_discovery, median_of_known
from glabench.sweeps.model import Cell

Verdict = Literal["faster", "slower", "same", "unclear"]
VERDICTS: tuple[Verdict, ...] = ("slower", "unclear", "same", "faster")

SIGNIFICANCE = 0.05
# Two single runs cannot be known to be nearer than 1.1 %, the spread between processes alone.
SAME_WITHIN = 0.02
# What differs from moment to moment, or was not asked for, is no difference between machines.
_OF_THE_MOMENT = frozenset({"busy", "ceilings", "glabench", "version"})


@dataclass(frozen=True)
class CellComparison:
    """One cell on both sides.

    `ratio` is b's time over a's, None where one of them has no time, and `reason` then says why. `q_value` is the rank
    test's p value adjusted for the number of cells. `memory_ratio` and `error_ratio` are b's peak memory and largest
    relative error over a's.
    """

    cell: Cell
    verdict: Verdict
    ratio: Ratio | None = None
    q_value: float | None = None
    time_a_ms: float | None = None
    time_b_ms: float | None = None
    memory_ratio: float | None = None
    error_ratio: float | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """One flat dict."""
        ratio = self.ratio
        return {
            **self.cell.to_json(),
            "verdict": self.verdict,
            "ratio": ratio.ratio if ratio else None,
            "ratio_low": ratio.low if ratio else None,
            "ratio_high": ratio.high if ratio else None,
            "p_value": ratio.p_value if ratio else None,
            "q_value": self.q_value,
            "time_a_ms": self.time_a_ms,
            "time_b_ms": self.time_b_ms,
            "memory_ratio": self.memory_ratio,
            "error_ratio": self.error_ratio,
            "reason": self.reason,
        }


def by_cell(rounds: Iterable[Iterable[Record]]) -> dict[Cell, list[Record]]:
    """The records of every cell, one a round, in the order in which cells first appear."""
    found: dict[Cell, list[Record]] = {}
    for records in rounds:
        for record in records:
            found.setdefault(record.cell, []).append(record)
    return found


def compare_runs(
    a: Sequence[Sequence[Record]],
    b: Sequence[Sequence[Record]],
    same_within: float = SAME_WITHIN,
    paired: bool = False,
) -> list[CellComparison]:
    """Compares the cells that either side has; each side is a row of rounds, which are the records of one process each.

    Slower: the interval of the ratio lies above 1, the rank test says so too once it is adjusted for the number of
    cells, and the interval does not lie within `same_within` of 1 as a whole. Faster likewise. Same: the interval lies
    within that margin. Unclear: everything else, and whatever has no time on one side.
    """
    cells_a, cells_b = by_cell(a), by_cell(b)
    cells = list(dict.fromkeys([*cells_a, *cells_b]))
    ratios: dict[Cell, Ratio] = {}
    reasons: dict[Cell, str] = {}
    for cell in cells:
        in_a, in_b = cells_a.get(cell, []), cells_b.get(cell, [])
        reason = _not_comparable(in_a, in_b)
        if reason is not None:
            reasons[cell] = reason
            continue
        pairs = paired and len(in_a) == len(in_b)
        ratios[cell] = compare_samples(samples_of(in_a), samples_of(in_b), pairs)
    adjusted = dict(zip(ratios, false_discovery([r.p_value for r in ratios.values()]), strict=True))
    found = []
    for cell in cells:
        if cell in ratios:
            verdict = judge(ratios[cell], adjusted[cell], same_within)
            found.append(_compared(cell, verdict, ratios[cell], adjusted[cell], cells_a[cell], cells_b[cell]))
        else:
            found.append(CellComparison(cell, "unclear", reason=reasons[cell]))
    return found


def judge(ratio: Ratio, q_value: float, same_within: float) -> Verdict:
    """The verdict of `compare_runs` on one ratio."""
    if 1 / (1 + same_within) <= ratio.low and ratio.high <= 1 + same_within:
        return "same"
    if q_value < SIGNIFICANCE and ratio.low > 1:
        return "slower"
    if q_value < SIGNIFICANCE and ratio.high < 1:
        return "faster"
    return "unclear"


def _not_comparable(in_a: Sequence[Record], in_b: Sequence[Record]) -> str | None:
    """Why a cell cannot be compared; None if it can."""
    for side, records in (("A", in_a), ("B", in_b)):
        if not records:
            return f"not in {side}"
        failed = next((r for r in records if not r.samples_ms), None)
        if failed is not None:
            return f"{side}: {failed.status}" + (f", {failed.reason}" if failed.reason else "")
    ways = {record.timing for record in (*in_a, *in_b)}
    return f"timed in different ways: {', '.join(sorted(map(str, ways)))}" if len(ways) > 1 else None


def samples_of(records: Sequence[Record]) -> list[tuple[float, ...]]:
    """The samples of each round, milliseconds."""
    return [record.samples_ms for record in records if record.samples_ms]


def _compared(
    cell: Cell, verdict: Verdict, ratio: Ratio, q_value: float, in_a: Sequence[Record], in_b: Sequence[Record]
) -> CellComparison:
    memory = quotient(peak_memory(in_b), peak_memory(in_a))
    error = quotient(_largest_error(in_b), _largest_error(in_a))
    return CellComparison(cell, verdict, ratio, q_value, time_ms(in_a), time_ms(in_b), memory, error)


def time_ms(records: Sequence[Record]) -> float | None:
    """The median over rounds of the median times."""
    return median_of_known([r.time_ms for r in records])


def peak_memory(records: Sequence[Record]) -> float | None:
    """The median over rounds of the peak memory, MiB."""
    return median_of_known([r.peak_allocated_mib for r in records])


def errors(records: Sequence[Record]) -> dict[str, float]:
    """The largest relative error of each tensor in any round."""
    found: dict[str, float] = {}
    for record in records:
        for name, error in (record.rel_error or {}).items():
            if error is not None:
                found[name] = max(found.get(name, 0.0), error)
    return found


def _largest_error(records: Sequence[Record]) -> float | None:
    return max(errors(records).values(), default=None)


def quotient(b: float | None, a: float | None) -> float | None:
    """b over a; None where either is not known, or a is 0."""
    return b / a if a and b is not None else None


def device_name(environment: Mapping[str, Any]) -> str:
    """The GPU, or the CPU where the run was made on one."""
    gpu = environment.get("gpu")
    if environment.get("device") != "cpu" and isinstance(gpu, Mapping):
        return str(gpu.get("name"))
    return str(environment.get("cpu") or "an unknown machine")


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What differs between two environments: a name, and both values."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    names = dict.fromkeys([*flat_a, *flat_b])
    return [(name, flat_a.get(name), flat_b.get(name)) for name in names if flat_a.get(name) != flat_b.get(name)]


def _flat(environment: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in environment.items():
        if not prefix and key in _OF_THE_MOMENT:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value


def check_same_device(a: Mapping[str, Any], b: Mapping[str, Any], allow: bool) -> None:
    """Raises UsageError for runs of different devices, unless that is allowed."""
    if device_name(a) != device_name(b) and not allow:
        raise UsageError(
            f"A was measured on {device_name(a)}, B on {device_name(b)}: their times say nothing of the code; "
            "compare all the same with --any-device"
        )


def clocks(rounds: Iterable[Iterable[Record]]) -> float | None:
    """The median SM clock over all cells of a side, MHz."""
    return median_of_known([record.sm_clock_mhz for records in rounds for record in records])
