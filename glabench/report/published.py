"""What papers have published, in the tables and figures of a run of the same sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glabench.records.metrics import TIME, Metric, significant
from glabench.report.grid import Grid
from glabench.report.literature import overlays_of
from glabench.report.quality import quality_grids
from glabench.report.series import Panel
from glabench.report.versus import PEAK, Ratios, ratios_of
from glabench.sweeps.words import show_x


def published_grids(panel: Panel) -> list[Grid]:
    """Tables of what was published for sizes of a panel, beside what was measured."""
    return [*_multiples(panel), *_ratios(panel), *quality_grids(panel)]


def published_lines(panel: Panel, metric: Metric) -> dict[str, Mapping[Any, float]]:
    """What a figure of a metric shows: by label and x the values that published ratios make of a rival's here."""
    if not panel.is_scale:
        return {}
    found = {each.label: each.ms for each in overlays_of(panel)} if metric.field == TIME.field else {}
    ratios = {_label(each): each.values for each in ratios_of(panel) if each.field == metric.field and each.values}
    return {**found, **ratios}


def _label(ratios: Ratios) -> str:
    return f"{ratios.name}, by its ratio to {ratios.published.rivals[ratios.published.op]}"


def _multiples(panel: Panel) -> list[Grid]:
    """Times as multiples of a rival's."""
    grids = []
    for overlay in overlays_of(panel):
        one, places = overlay.published, [x for x in panel.x_values if x in overlay.base_ms]
        ratios = {f"published: {one.name}": one.ratios, **overlay.here}
        title = f", time as a multiple of {overlay.base}'s; published: {one.base_name}'s, {one.source} ({one.device})"
        grids.append(_table(panel, title, ratios, places))
    return grids


def _ratios(panel: Panel) -> list[Grid]:
    """Times as fast as a rival, and shares of its memory; one table of each per source."""
    tables: dict[tuple[str, str], list[Ratios]] = {}
    for each in ratios_of(panel):
        tables.setdefault((each.field, each.published.source), []).append(each)
    grids = []
    for (field, source), own in tables.items():
        one = own[0].published
        what = "times as fast as" if field == TIME.field else f"{PEAK.title} as a share of that of"
        about = f"{' or '.join(one.rivals.values())}, by op; published: {one.base_name}, {source} ({one.device})"
        rows = {name: found for each in own for name, found in {each.name: each.given, **each.here}.items()}
        places = [x for x in panel.x_values if any(x in found for found in rows.values())]
        grids.append(_table(panel, f", {what} {about}", rows, places))
    return grids


def _table(panel: Panel, title: str, ratios: Mapping[str, Mapping[Any, float | str]], places: Sequence[Any]) -> Grid:
    rows = [[name, *(_show(own.get(x, "")) for x in places)] for name, own in ratios.items()]
    return Grid(panel.title, title, [panel.x_name, *map(show_x, places)], rows)


def _show(value: float | str) -> str:
    return value if isinstance(value, str) else significant(value)
