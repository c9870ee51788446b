"""Records ordered for showing: one series a backend and setting, against the swept axis."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glabench.records import Record
from glabench.sweeps.axis import format_number

# Axes of a record that may tell two series of one backend apart, with the words for a label.
LABELS: Mapping[str, Callable[[Any], str]] = {
    "materialize": lambda value: "materialized" if value else "not materialized",
    "chunk": lambda value: f"C={value}",
    "dtype": str,
    "gate": str,
    "batch": lambda value: f"B={value}",
    "seqlen": lambda value: f"T={format_number(value)}",
    "heads": lambda value: f"H={value}",
    "key_dim": lambda value: f"K={value}",
    "value_dim": lambda value: f"V={value}",
}
# Axes with an order, against which a line makes sense.
_X_AXES = ("seqlen", "chunk", "batch", "heads", "key_dim", "value_dim")
_RECORD_FIELD = {"head_dim": "key_dim"}


@dataclass(frozen=True)
class Series:
    """One line of a figure, one row of a table: records by x. A record under x = None does not depend on x."""

    backend: str
    label: str
    records: Mapping[Any, Record]


@dataclass(frozen=True)
class Panel:
    """All series of one pass, with the x values that any of them has."""

    pass_: str
    x_name: str
    x_values: Sequence[Any]
    series: Sequence[Series]

    @property
    def knows_memory(self) -> bool:
        """Whether any of its records holds a peak of memory."""
        return any(r.peak_allocated_mib is not None for s in self.series for r in s.records.values())

    @property
    def knows_bandwidth(self) -> bool:
        """Whether any of its records can be held against the bandwidth of a copy."""
        return any(r.gbps and r.copy_gbps for s in self.series for r in s.records.values())


def x_field(axis: str) -> str:
    """The record field that a sweep's x axis stands for."""
    return _RECORD_FIELD.get(axis, axis)


def choose_x(records: Sequence[Record], wanted: str) -> str:
    """The axis to draw against: the wanted one, unless it has a single value and just one other axis has more."""
    rows = [record.to_json() for record in records]

    def varies(name: str) -> bool:
        return len({row[name] for row in rows} - {None}) > 1

    if varies(x_field(wanted)):
        return wanted
    others = [name for name in LABELS if name in _X_AXES and varies(name)]
    if others == ["key_dim", "value_dim"] and all(row["key_dim"] == row["value_dim"] for row in rows):
        return "head_dim"
    return others[0] if len(others) == 1 else wanted


def show_x(value: Any) -> str:
    """An x value for a table's head or a tick: 4096 -> 4k."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return format_number(value) if isinstance(value, int) else str(value)


def make_panels(records: Iterable[Record], x_axis: str) -> list[Panel]:
    """The records as panels, one a pass, in the order in which passes and backends first appear."""
    rows = [(record, record.to_json()) for record in records]
    x = x_field(x_axis)
    apart = _telling_fields([data for _, data in rows], x, both_dims=x_axis == "head_dim")
    panels: dict[str, dict[str, dict[Any, Record]]] = {}
    backends: dict[str, str] = {}
    swept = {data["backend"] for _, data in rows if data[x] is not None}
    for record, data in rows:
        words = [LABELS[f](data[f]) for f in apart[record.cell.backend] if data[f] is not None]
        if data[x] is None and data["backend"] in swept:
            words.append("auto")  # a line of its own: the backend's choice is one of the other values, or none
        label = record.cell.backend + (f" ({', '.join(words)})" if words else "")
        backends[label] = record.cell.backend
        panels.setdefault(data["pass"], {}).setdefault(label, {})[data[x]] = record
    return [
        Panel(
            pass_,
            x_axis,
            sorted({value for by_x in lines.values() for value in by_x if value is not None}) or [None],
            [Series(backends[label], label, by_x) for label, by_x in lines.items()],
        )
        for pass_, lines in panels.items()
    ]


def _telling_fields(rows: Sequence[Mapping[str, Any]], x: str, both_dims: bool) -> dict[str, list[str]]:
    """Per backend, the axes besides x that take more than one value."""
    hidden = {x, "value_dim"} if both_dims else {x}
    found: dict[str, list[str]] = {}
    for backend in dict.fromkeys(row["backend"] for row in rows):
        own = [row for row in rows if row["backend"] == backend]
        found[backend] = [f for f in LABELS if f not in hidden and len({row[f] for row in own}) > 1]
    return found


def baseline_series(panel: Panel, baseline: str | None) -> Series | None:
    """The first series of the baseline backend."""
    return next((s for s in panel.series if s.backend == baseline), None)
