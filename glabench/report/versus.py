"""Published ratios to a rival that is among a run's backends, beside the run's own ratios."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glabench.records.literature import Versus, published_versus
from glabench.records.metrics import BY_NAME, TIME
from glabench.report.literature import fits
from glabench.report.series import Panel, Row, name_values

PEAK = BY_NAME["peak"]
# A ratio, or the status of a cell without a value: `oom`, or `rival oom`.
_Ratio = float | str


@dataclass(frozen=True)
class Ratios:
    """A published table beside the rows of a run, as times as fast as the rival or as the share of its memory."""

    published: Versus
    # The column of rows that the ratios are of.
    field: str
    # By label and x.
    here: Mapping[str, Mapping[Any, _Ratio]]
    # The rows of the rival that has the table's op, by x.
    base: Mapping[Any, Row]

    @property
    def name(self) -> str:
        """What was published, with its sizes."""
        sizes = {name: value for name, value in self.published.cell.items() if name != "batch"}
        return f"published: {self.published.name} ({', '.join(name_values(sizes))})"

    @property
    def given(self) -> dict[Any, _Ratio]:
        """The published ratios, by x."""
        one = self.published
        return dict(zip(one.at, one.speedups if self.field == TIME.field else one.memory, strict=True))

    @property
    def values(self) -> dict[Any, float]:
        """The times or sizes that the published ratios make of the rival's here."""
        found = {}
        for x, ratio in self.given.items():
            value = self.base[x].get(self.field) if x in self.base else None
            if value and not isinstance(ratio, str):
                found[x] = value / ratio if self.field == TIME.field else value * ratio
        return found


def ratios_of(panel: Panel) -> list[Ratios]:
    """The published ratios that series of a panel have the sizes and the rival of: of time, then of memory."""
    tables = [one for one in published_versus() if (one.pass_, one.x) == (panel.pass_, panel.x_name)]
    found = [_beside(panel, one, field) for field in (TIME.field, PEAK.field) for one in tables]
    return [each for each in found if each.here]


def _beside(panel: Panel, one: Versus, field: str) -> Ratios:
    bases: dict[str, dict[Any, Row]] = {}
    others: dict[str, dict[Any, Row]] = {}
    for series in panel.series:
        rows = {x: row for x, row in series.rows.items() if fits(row, one.cell) and row["op"] in one.rivals}
        if rows:
            op = next(iter(rows.values()))["op"]
            if series.backend == one.rivals[op]:
                bases[op] = rows
            else:
                others[series.label] = rows
    here = {}
    own_op_first = sorted(others.items(), key=lambda each: next(iter(each[1].values()))["op"] != one.op)
    for label, rows in own_op_first:
        ratios = {x: _ratio(row, bases.get(row["op"], {}).get(x), field) for x, row in rows.items()}
        if any(isinstance(ratio, float) for ratio in ratios.values()):
            here[label] = ratios
    return Ratios(one, field, here, bases.get(one.op, {}))


def _ratio(row: Row, base: Row | None, field: str) -> _Ratio:
    """The ratio of two cells, or the status of the one that has no value."""
    if base is None:
        return ""
    for each, whose in ((row, ""), (base, "rival ")):
        if not each.get(field):
            return "" if each["status"] == "ok" else f"{whose}{each['status']}"
    return float(base[field] / row[field] if field == TIME.field else row[field] / base[field])
