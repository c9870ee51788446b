"""Which chunk size to take, and what to keep for the backward: the fastest, what it gains and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from glabench.records import Run
from glabench.records.environment import device_name
from glabench.records.metrics import significant
from glabench.report.series import PASS_TITLES, Row, name_values, rows_of_runs
from glabench.sweeps.words import is_usual

CHUNK = "chunk"
# The axes that are chosen.
_CHOSEN = (CHUNK, "subchunk", "materialize")


def recommend(run: Run) -> list[str]:
    """A sentence or two per pass, backend and size of which the run has several choices; then what to take of all."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    shapes: dict[tuple[object, ...], list[Row]] = {}
    for row in rows_of_runs([run]):
        names = [name for name in row["parameters"].split(",") if name and name not in _CHOSEN]
        sizes = tuple((name, row.get(name)) for name in ("batch", "seqlen", "dtype", *names))
        if row["status"] == "ok" and row["time_ms"]:
            shapes.setdefault((row["pass"], row["op"], sizes), []).append(row)
            if row.get(CHUNK) is not None:
                groups.setdefault((row["pass"], row["backend"], sizes), []).append(row)
    chosen = [own for own in groups.values() if len({row[CHUNK] for row in own}) > 1]
    of_backends = [" ".join(_sentences(own, _apart(own, groups.values()))) for own in chosen]
    device = device_name(run.environment)
    several = [own for own in shapes.values() if len({row["backend"] for row in own}) > 1]
    return [*of_backends, *(_take(own, device) for own in several if chosen)]


def has_other_kernels(one: Row, other: Row) -> bool:
    """Whether two chunk sizes of a backend run kernels of different families."""
    families = [launch.split()[0] for row in (one, other) if " C=" in (launch := row.get("launch") or "")]
    return one.get(CHUNK) != other.get(CHUNK) and len(set(families)) > 1


def _apart(rows: Sequence[Row], groups: Iterable[Sequence[Row]]) -> str:
    """The sizes that tell a group of a pass and backend from its others, in brackets; empty if it is the only one."""
    own = rows[0]
    alike = [each[0] for each in groups if (each[0]["pass"], each[0]["backend"]) == (own["pass"], own["backend"])]
    parameters = [name for each in alike for name in each["parameters"].split(",") if name and name not in _CHOSEN]
    names = dict.fromkeys(("batch", "seqlen", "dtype", *parameters))
    differing = {name: own.get(name) for name in names if any(other.get(name) != own.get(name) for other in alike)}
    without = [f"no {name}" for name, value in differing.items() if value is None]
    return f" ({' '.join((*name_values(differing), *without))})" if differing else ""


def _take(rows: Sequence[Row], device: str) -> str:
    """The fastest of all backends at one shape, and the next one."""
    by_time = sorted(rows, key=lambda row: row["time_ms"])
    best = by_time[0]
    second = next(row for row in by_time if row["backend"] != best["backend"])
    given = {"batch", "seqlen", "dtype", *best["parameters"].split(",")} - {*_CHOSEN}
    sizes = {name: value for name, value in best.items() if name in given and value is not None}
    shape = " ".join(name_values({name: value for name, value in sizes.items() if not is_usual(name, value)}))
    of_forward = best["pass"] == "fwd" and best.get("materialize") is not None
    kept = " To train, take what is best for forward + backward." if of_forward else ""
    return (
        f"To take on {device} for {PASS_TITLES[best['pass']]} of {best['op']} at {shape}: {best['backend']}"
        f"{_with(best)}, {significant(best['time_ms'])} ms{_memory(best)}. The next backend, {second['backend']}"
        f"{_with(second)}, takes {_times(second['time_ms'] / best['time_ms'])}as long{_memory(second)}.{kept}"
    )


def _with(row: Row) -> str:
    return f" with {name}" if (name := _name(row)) else ""


def _sentences(rows: Sequence[Row], apart: str) -> Iterator[str]:
    by_time = sorted(rows, key=lambda row: row["time_ms"])
    best, last = by_time[0], by_time[-1]
    slower = last["time_ms"] / best["time_ms"]
    yield (
        f"{PASS_TITLES[best['pass']]}, {best['backend']}{apart}: the fastest is {_name(best)}, "
        f"{significant(best['time_ms'])} ms{_memory(best)}, {_times(slower, 2)}as fast as {_name(last)}"
        f"{', which runs other kernels' if has_other_kernels(best, last) else ''}."
    )
    least = min(by_time, key=lambda row: _peak(row) or 0.0)  # of several the fastest
    yield from _otherwise(best, [row for row in by_time if row is not best and row is not least])
    alike = [_name(row) for row in by_time[1:] if (row.get("time_ms_p20") or row["time_ms"]) <= _late(best)]
    if alike:
        yield f"Within the scatter of samples {', '.join(alike)} cannot be told from it."
    if (_peak(least) or 0.0) < (_peak(best) or 0.0):
        longer = _times(least["time_ms"] / best["time_ms"])
        time = f"{longer}the time" if longer else "the same time"
        yield f"The least memory takes {_name(least)}:{_memory(least)[1:]}, in {time}."


def _otherwise(best: Row, rows: Sequence[Row]) -> Iterator[str]:
    """What the same chunk takes if something else is kept."""
    for row in rows:
        if row[CHUNK] == best[CHUNK] and row.get("materialize") != best.get("materialize"):
            ratio = _times(row["time_ms"] / best["time_ms"])
            time = f"{ratio}the time" if ratio else "the same time"
            kept = " ".join(name_values({"materialize": row.get("materialize")}))
            yield f"With {kept} it takes {time}{_memory(row)}."


def _times(ratio: float, digits: int = 3) -> str:
    """`2.5 times `; empty if that is once."""
    text = significant(ratio, digits)
    return "" if text == "1" else f"{text} times "


def _name(row: Row) -> str:
    return " ".join(name_values({name: row.get(name) for name in _CHOSEN if row.get(name) is not None}))


def _late(row: Row) -> float:
    late: float = row.get("time_ms_p80") or row["time_ms"]
    return late


def _peak(row: Row) -> float | None:
    peak: float | None = row.get("peak_mib")
    return peak


def _memory(row: Row) -> str:
    peak = _peak(row)
    return "" if peak is None else f", {significant(peak)} MiB above the inputs"
