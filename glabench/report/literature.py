"""Published times, laid over a run of the same sizes: as ratios to a rival's time, because GPUs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glabench.records.literature import Published, published_series
from glabench.report.series import Panel, Row


@dataclass(frozen=True)
class Overlay:
    """A published series beside the rows of a run: ratios, and the times that they would be here."""

    published: Published
    # The rival here, and by x its rows' times in milliseconds.
    base: str
    base_ms: Mapping[Any, float]
    # Ratios here, by the labels of series and x.
    here: Mapping[str, Mapping[Any, float]]

    @property
    def label(self) -> str:
        """Its entry in a legend."""
        one = self.published
        return f"published: {one.name}, as a multiple of {one.base_name}"

    @property
    def ms(self) -> dict[Any, float]:
        """The times that the published ratios make of the rival's here."""
        return {x: ratio * self.base_ms[x] for x, ratio in self.published.ratios.items() if x in self.base_ms}


def overlays_of(panel: Panel) -> list[Overlay]:
    """The published series that series of a panel have the sizes of."""
    found = []
    for one in published_series():
        if (one.pass_, one.x) != (panel.pass_, panel.x_name):
            continue
        rivals = {each.backend: _times(each.rows, one.base) for each in panel.series}
        base = next((name for name in one.base_backends if rivals.get(name)), None)
        if base is None:
            continue
        base_ms = rivals[base]
        times = {each.label: _times(each.rows, one.cell) for each in panel.series}
        here = {name: {x: ms / base_ms[x] for x, ms in own.items() if x in base_ms} for name, own in times.items()}
        if here := {name: ratios for name, ratios in here.items() if len(ratios) > 1}:
            found.append(Overlay(one, base, base_ms, here))
    return found


def _times(rows: Mapping[Any, Row], sizes: Mapping[str, Any]) -> dict[Any, float]:
    """The times of rows that have these sizes, by x."""
    return {x: row["time_ms"] for x, row in rows.items() if fits(row, sizes) and row.get("time_ms")}


def fits(row: Row, sizes: Mapping[str, Any]) -> bool:
    """Whether a row has these values."""
    return all(row.get(name) == value for name, value in sizes.items())
