"""Published perplexities of models beside the times of their mixers here: a table, and a figure with both as axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glabench.records.literature import Quality, published_quality
from glabench.records.metrics import TIME
from glabench.report.canvas import label_log_axis
from glabench.report.describe import surroundings_of
from glabench.report.grid import Grid
from glabench.report.literature import fits
from glabench.report.series import Panel, Row, View, name_values
from glabench.report.styles import choose_styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches: a panel, the whole height, and the title.
_PANEL_WIDTH, _HEIGHT, _TITLE = 4.8, 5.4, 0.3
_LEAST_WIDTH = 6.6  # the title and two columns of the legend fit in
_SMALL_PRINT = 8.5
_PLAIN_TEXT: Any = {"text.parse_math": False}


@dataclass(frozen=True)
class Trained:
    """A cell whose sizes are those of models in published tables, with their perplexities by source.

    `series` is the label of its series, `sizes` those of the models and what else differs between the cells.
    """

    gate: str
    series: str
    sizes: str
    row: Row
    perplexity: dict[str, float]

    @property
    def label(self) -> str:
        """`keys: gla-triton, H=4 K=128 V=256`."""
        return f"{self.gate}: {self.series}, {self.sizes}"


def trained_in(panel: Panel) -> list[Trained]:
    """The cells of a panel with perplexities of the tables of which it has all models."""
    tables, found = _tables(panel), []
    cells = [(series.label, row) for series in panel.series for row in series.rows.values() if row.get(TIME.field)]
    telling = [name for name in ("batch", "seqlen", "dtype") if len({row.get(name) for _, row in cells}) > 1]
    for label, row in cells:
        models = {one.source: next((each for each in one.models if fits(row, each.cell)), None) for one in tables}
        named = next((each for each in models.values() if each is not None), None)
        if named is not None:
            values = {name: value for name, value in named.cell.items() if name != "op"}
            sizes = " ".join(name_values(values | {name: row.get(name) for name in telling}))
            by_source = {source: each.perplexity for source, each in models.items() if each is not None}
            found.append(Trained(named.gate, label, sizes, row, by_source))
    return found


def quality_grids(panel: Panel) -> list[Grid]:
    """A table of a panel's times beside perplexities, if there are any."""
    found = trained_in(panel)
    if not found:
        return []
    sources, about = _sources(found), _tables(panel)[0].about
    rows = []
    for each in found:
        numbers = [f"{each.perplexity[source]:.2f}" if source in each.perplexity else "" for source in sources]
        rows.append([each.gate, each.series, each.sizes, TIME.show(each.row[TIME.field]), *numbers])
    head = ["gate", "backend", "sizes", "median time, ms", *sources]
    return [Grid(panel.title, f", median time beside published {about}", head, rows, words=("backend", "sizes"))]


def has_quality(view: View) -> bool:
    """Whether there is a figure."""
    return bool(_panels(view))


def quality_markdown(view: View) -> str:
    """The figure in a page; empty if there is none."""
    image = "![published perplexities of models against times of their mixers](quality.png)"
    caption = "*Published perplexities of models against the times of their mixers here.*"
    return f"{image}\n\n{caption}" if has_quality(view) else ""


def draw_quality(view: View) -> Figure:
    """A panel per published table: its perplexities against the times here. The view has some, see `has_quality`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = [(panel, found, source) for panel, found in _panels(view) for source in _sources(found)]
    styles = choose_styles({each.label: str(each.row["backend"]) for _, found, _ in panels for each in found})
    with mpl.rc_context(_PLAIN_TEXT):
        width = max(_PANEL_WIDTH * len(panels), _LEAST_WIDTH)
        figure = Figure(figsize=(width, _HEIGHT), layout="constrained", dpi=160)
        about = [f"Published: {_tables(panels[0][0])[0].about}", *surroundings_of(view.runs)]
        title = "Published quality of models against the cost of their mixers" + "\n" * (1 + len(about))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        small: dict[str, Any] = {"x": 0.01, "ha": "left", "va": "top", "fontsize": _SMALL_PRINT, "color": "#444444"}
        figure.text(y=1 - _TITLE / _HEIGHT, s="\n".join(about), **small)
        all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (panel, found, source) in zip(all_axes, panels, strict=True):
            for each in found:
                if source in each.perplexity:
                    look = {**styles[each.label].line, "linestyle": "none", "markersize": 8}
                    axes.plot(each.row[TIME.field], each.perplexity[source], label=each.label, **look)
            _frame(axes, f"{source}; {panel.title}")
        for axes in all_axes:  # which share their scales
            label_log_axis(axes.xaxis, *axes.get_xlim())
        lines = {line.get_label(): line for axes in all_axes for line in axes.lines}
        place: dict[str, Any] = {"loc": "outside lower left", "ncols": 2, "frameon": False, "fontsize": _SMALL_PRINT}
        figure.legend(handles=list(lines.values()), **place)
        all_axes[0].set_ylabel("published perplexity (less is better)")
    return figure


def _frame(axes: Axes, title: str) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("median time of the mixer here, ms")
    axes.set_title(title, fontsize=_SMALL_PRINT + 0.5)
    axes.grid(color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _panels(view: View) -> list[tuple[Panel, list[Trained]]]:
    return [(panel, found) for panel in view.panels if (found := trained_in(panel))]


def _sources(found: Sequence[Trained]) -> list[str]:
    return list(dict.fromkeys(source for each in found for source in each.perplexity))


def _tables(panel: Panel) -> list[Quality]:
    """The published tables of which a panel has all models."""
    return [one for one in published_quality() if one.pass_ == panel.pass_ and _has_all(panel, one)]


def _has_all(panel: Panel, one: Quality) -> bool:
    times = [row for row in panel.rows if row.get(TIME.field)]
    return all(any(fits(row, model.cell) for row in times) for model in one.models)
