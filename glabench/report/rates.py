"""Learning rates: of every model that learned to recall the best one, what it reached, and how others did."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from glabench.records import Run
from glabench.records.metrics import significant
from glabench.report.describe import surroundings_of, title_of
from glabench.report.grid import Grid
from glabench.report.styles import choose_styles
from glabench.sweeps.model import Cell
from glabench.sweeps.words import label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATE, WIDTH = "rate", "model_width"
# What a task is, besides the model that learns it.
_TASK = ("pairs", "seqlen")
_PANEL_WIDTH, _PANEL_HEIGHT, _MOST_PANELS = 3.9, 3.4, 4
_SMALL_PRINT = 8.5
# Characters in an inch of a title, and of small print.
_IN_TITLE = 10
_IN_SMALL_PRINT = 13
_EXPLAINED = (
    "A model's best learning rate is the one of the highest mean accuracy over the seeds that all its rates have. Its "
    "accuracy is the mean over all seeds at that rate, with the least and the most."
)


@dataclass(frozen=True)
class Learner:
    """A model of one size on one task: shares of values that it named, by learning rate and seed."""

    cell: Cell
    by_rate: Mapping[float, Mapping[int, float]]

    @property
    def best(self) -> float:
        """The rate of the highest mean over the seeds that all rates have; over all seeds, if they have none."""
        shared = set.intersection(*(set(own) for own in self.by_rate.values()))

        def mean(rate: float) -> float:
            own = self.by_rate[rate]
            return fmean(own[seed] for seed in shared or own)

        return max(self.by_rate, key=mean)

    @property
    def reached(self) -> Sequence[float]:
        """What its seeds reached at the best rate."""
        return list(self.by_rate[self.best].values())

    @property
    def task(self) -> tuple[Any, ...]:
        """Pairs, and tokens of a row."""
        return tuple(self.cell.to_json()[name] for name in _TASK)

    @property
    def label(self) -> str:
        """The backend, with its kernel if one was named."""
        kernel = self.cell.get("kernel")
        return self.cell.backend if kernel is None else f"{self.cell.backend} ({label_of('kernel', kernel)})"


def learners_of(runs: Sequence[Run]) -> list[Learner]:
    """The models of all runs that were trained to recall, each with all its rates and seeds, as they first come."""
    found: dict[str, tuple[Cell, dict[float, dict[int, float]]]] = {}
    for record in (record for run in runs for record in run.records):
        cell, rate = record.cell, record.cell.get(RATE)
        if record.accuracy is None or rate is None:
            continue
        same = {k: v for k, v in cell.to_json().items() if k not in (RATE, "seed")}
        by_rate = found.setdefault(str(same), (cell, {}))[1]
        by_rate.setdefault(rate, {})[cell.seed] = record.accuracy
    return [Learner(cell, dict(sorted(by_rate.items()))) for cell, by_rate in found.values()]


def rates_markdown(runs: Sequence[Run]) -> str:
    """A section with a row per model; empty if none has several rates or seeds."""
    learners = learners_of(runs)
    if not _is_choice(learners):
        return ""
    rates = _rates(learners)
    head = ["backend", "d", "pairs", "tokens", "best rate", "accuracy, %", "least", "most", "seeds"]
    head += [f"at {rate:g}" for rate in rates]
    rows = []
    for each in learners:
        reached = each.reached
        numbers = [_percent(x) for x in (fmean(reached), min(reached), max(reached))]
        by_rate = [_percent(fmean(each.by_rate[r].values())) if r in each.by_rate else "-" for r in rates]
        sizes = [str(each.cell.get(WIDTH)), *map(str, each.task)]
        rows.append([each.label, *sizes, f"{each.best:g}", *numbers, str(len(reached)), *by_rate])
    table = Grid("", "", head, rows).to_markdown().rstrip("\n")
    return "\n\n".join(["## Best learning rates", "![accuracy by learning rate](rates.png)", _EXPLAINED, table])


def _is_choice(learners: Sequence[Learner]) -> bool:
    return any(len(each.by_rate) > 1 or len(each.reached) > 1 for each in learners)


def has_rates(runs: Sequence[Run]) -> bool:
    """Whether there is something to draw: a model with several rates or seeds."""
    return _is_choice(learners_of(runs))


def _rates(learners: Sequence[Learner]) -> list[float]:
    return sorted({rate for each in learners for rate in each.by_rate})


def _percent(share: float) -> str:
    return significant(100 * share)


def draw_rates(runs: Sequence[Run]) -> Figure:
    """Per task a panel against the width, if there are several, then panels against the rate, a width each."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    learners = learners_of(runs)
    tasks: dict[tuple[Any, ...], list[Learner]] = {}
    for each in learners:
        tasks.setdefault(each.task, []).append(each)
    of_width = [(task, own) for task, own in tasks.items() if len({each.cell.get(WIDTH) for each in own}) > 1]
    of_rate = [
        (task, width, [each for each in own if each.cell.get(WIDTH) == width])
        for task, own in tasks.items()
        for width in sorted({each.cell.get(WIDTH) for each in own})
        if len(_rates(own)) > 1
    ]
    of_rate = of_rate[: max(0, _MOST_PANELS - len(of_width))]
    styles = choose_styles({each.label: each.cell.backend for each in learners})
    count = len(of_width) + len(of_rate) or 1
    inches = _PANEL_WIDTH * max(1.4, count)
    title = textwrap.wrap(title_of(runs), int(_IN_TITLE * inches))
    with mpl.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(inches + 1.6, _PANEL_HEIGHT + 0.5 + 0.2 * len(title)), layout="constrained", dpi=160)
        figure.suptitle("\n".join(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
        all_axes = figure.subplots(1, count, sharey=True, squeeze=False)[0]
        for axes, (task, own) in zip(all_axes, of_width, strict=False):
            for label in dict.fromkeys(each.label for each in own):
                same = sorted((x for x in own if x.label == label), key=lambda x: x.cell.get(WIDTH))
                _draw_line(axes, [x.cell.get(WIDTH) for x in same], [x.reached for x in same], styles[label], label)
            _finish(axes, task, "width, at the best rate", sorted({each.cell.get(WIDTH) for each in own}))
        for axes, (task, width, own) in zip(all_axes[len(of_width) :], of_rate, strict=False):
            for each in own:
                reached = [list(shares.values()) for shares in each.by_rate.values()]
                _draw_line(axes, list(each.by_rate), reached, styles[each.label], each.label)
            _finish(axes, task, f"learning rate, at width {width}", _rates(own))
        if not of_width and not of_rate:
            _draw_seeds(all_axes[0], learners, styles)
        all_axes[0].set_ylabel("values recalled, %")
        characters = int(_IN_SMALL_PRINT * figure.get_figwidth())
        about = "\n".join(line for text in surroundings_of(runs) for line in textwrap.wrap(text, characters))
        figure.supxlabel(about, x=0.01, ha="left", fontsize=_SMALL_PRINT - 1, color="#444444")
        handles = {
            label: line for axes in all_axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        where: dict[str, Any] = {"loc": "outside right upper"}
        figure.legend(list(handles.values()), list(handles), **where, frameon=False, fontsize=_SMALL_PRINT)
    return figure


def _draw_line(axes: Axes, xs: Sequence[float], reached: Sequence[Sequence[float]], style: Any, label: str) -> None:
    means = [100 * fmean(own) for own in reached]
    low = [mean - 100 * min(own) for mean, own in zip(means, reached, strict=True)]
    high = [100 * max(own) - mean for mean, own in zip(means, reached, strict=True)]
    axes.errorbar(xs, means, yerr=(low, high), label=label, capsize=2, **style.line)


def _draw_seeds(axes: Axes, learners: Sequence[Learner], styles: Mapping[str, Any]) -> None:
    for place, each in enumerate(learners):
        _draw_line(axes, [place], [each.reached], styles[each.label], each.label)
    axes.set_xticks([])
    axes.set_ylim(-3, 103)


def _finish(axes: Axes, task: tuple[Any, ...], x: str, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(-3, 103)
    axes.set_xlabel(x)
    axes.set_title(f"{task[0]} pairs in {task[1]} tokens", fontsize=10)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
