"""What a layer has besides times, by backend: the state of a sequence and the layer's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from glabench.records.metrics import BY_NAME, Metric, known
from glabench.report.grid import Grid
from glabench.report.series import Row, View

_PARAMETERS = BY_NAME["parameters"]
_SHOWN = (BY_NAME["state"], _PARAMETERS)


def layer_grids(view: View, metrics: Sequence[Metric]) -> list[Grid]:
    """A table by backend, from the least to the most over its cells.

    There is none if all backends have the same op, if one has layers of several shapes, or if the metrics have one of
    these tables already.
    """
    if not {metric.name for metric in metrics}.isdisjoint(metric.name for metric in _SHOWN):
        return []
    rows: dict[str, list[Row]] = {}
    for panel in view.panels:
        for series in panel.series:
            told = [row for row in series.rows.values() if any(row.get(each.field) is not None for each in _SHOWN)]
            rows.setdefault(series.backend, []).extend(told)
    rows = {backend: own for backend, own in rows.items() if own}
    every = [row for own in rows.values() for row in own]
    has_shapes = any(len({row.get(_PARAMETERS.field) for row in own}) > 1 for own in rows.values())
    if len({row["op"] for row in every}) < 2 or has_shapes:
        return []
    fitted = [each.fitted(every, only_finer=True) for each in known(_SHOWN, every)]
    head = ["backend", *(f"{each.title}, {each.unit}" for each in fitted)]
    table = [[backend, *(_range(own, each) for each in fitted)] for backend, own in rows.items()]
    return [Grid("a layer", ", by backend", head, table)]


def _range(rows: Sequence[Row], metric: Metric) -> str:
    found = sorted({row[metric.field] for row in rows if row.get(metric.field) is not None})
    return " to ".join(dict.fromkeys(metric.show(value) for value in (*found[:1], *found[-1:])))
