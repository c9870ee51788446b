"""The figure of a comparison: every cell's ratio of times with its interval."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from glabench.report.verdicts import LOOKS, ComparisonTexts
from glabench.verdicts.comparison import Comparison
from glabench.verdicts.findings import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARGIN = 1.01
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)
_MOST_TICKS = 10
# Of a line of the heading, so that it fits the figure.
_CHARACTERS = 130


def draw_ratios(comparison: Comparison) -> Figure:
    """Draws the ratios of times with their intervals, sorted, on a log axis. The range within the limit is shaded."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    texts = ComparisonTexts(comparison)
    known = [(finding, finding.ratio) for finding in comparison.cells if finding.ratio is not None]
    known.sort(key=lambda pair: pair[1].ratio)
    # So that a dollar sign in a name does not start a formula.
    with mpl.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(9.5, 2.1 + 0.26 * max(1, len(known))), layout="constrained")
        axes = figure.subplots()
        for place, (finding, ratio) in enumerate(known):
            look = LOOKS[finding.verdict]
            axes.plot([ratio.low, ratio.high], [place, place], color=look.color, linewidth=2, solid_capstyle="butt")
            axes.plot([ratio.ratio], [place], marker=look.marker, color=look.color, markersize=5)
        ends = [end for _, ratio in known for end in (ratio.low, ratio.high)]
        _dress_ratio_axis(axes, ends, comparison.limits.time)
        axes.set_yticks(range(len(known)), [texts.name(finding) for finding, _ in known], fontsize=7.5)
        axes.set_ylim(-0.8, len(known) - 0.2)
        heading = [line for text in (*texts.heading, comparison.summary()) for line in textwrap.wrap(text, _CHARACTERS)]
        figure.suptitle("\n".join(heading), x=0.01, ha="left", fontsize=9)
        _add_legend(figure, {finding.verdict for finding, _ in known}, comparison.limits.time)
    return figure


def _dress_ratio_axis(axes: Axes, ends: Sequence[float], limit: float) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    low, high = min([*ends, 1 / (1 + limit)]) / _MARGIN, max([*ends, 1 + limit]) * _MARGIN
    axes.axvspan(1 / (1 + limit), 1 + limit, color="#f0f0f0", zorder=0)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(_ticks(low, high))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("new time over base time, with its 99 % interval (left of 1: new is faster)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _ticks(low: float, high: float) -> list[float]:
    """Round ratios from `low` to `high`: even steps if a few cover the range, else 1, 2, 5 per decade, or fewer."""
    for step in _STEPS:
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < _MOST_TICKS:
            return [round(step * n, 10) for n in range(first, last + 1)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        ticks = [digit * 10.0**power for power in decades for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= _MOST_TICKS:
            return ticks
    return ticks[:: math.ceil(len(ticks) / _MOST_TICKS)]


def _add_legend(figure: Figure, verdicts: Collection[Verdict], limit: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [(verdict, LOOKS[verdict]) for verdict in reversed(Verdict) if verdict in verdicts]
    lines = [Line2D([], [], color=k.color, marker=k.marker, linewidth=2, label=str(v)) for v, k in shown]
    handles = [*lines, Patch(color="#f0f0f0", label=f"within {100 * limit:.3g} %")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
