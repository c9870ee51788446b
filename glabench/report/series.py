"""Arranges rows of runs for reports: one panel per pass, with one series per backend and setting over the x axis."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from glabench.errors import UsageError
from glabench.records import Run
from glabench.records.diagnosis import diagnose
from glabench.records.environment import device_name
from glabench.records.metrics import METRICS, TIME, Metric, known
from glabench.records.run import name_runs, rows_of
from glabench.sweeps.words import WORDS, is_size, is_usual, label_of, sort_by_order, value_or_word

Row = Mapping[str, Any]

# Axes that every cell has.
_COMMON = ("batch", "seqlen", "dtype")
# Parameters that need not be shown if the x axis is this one, because it determines them.
_HIDES: Mapping[str, tuple[str, ...]] = {
    "head_dim": ("key_dim", "value_dim"),
    "key_dim": ("head_dim",),
    "value_dim": ("head_dim",),
}
# The axis that sets all sizes of an op, and these; the head dim is also there as that of keys and of values.
_WIDTH = "width"
# The least share of backends, or of lines, in which an axis varies that a report is drawn against.
_LEAST_SHARE_WITH_LINES = 0.25
_SIZES = (*(name for name in WORDS if is_size(name) and name != "head_dim"), "inner")
PASS_TITLES = {
    "infer": "forward without gradients",
    "fwd": "forward",
    "bwd": "backward",
    "fwd+bwd": "forward + backward",
}
# What is timed of models, by their op.
_STEP_TITLES = {
    "training": "step of training",
    "recall": "training",
    "text": "training",
    "decode": "step of decoding",
}


@dataclass(frozen=True)
class Series:
    """One line of a figure or one row of a table: rows by x value. A row at x = None does not depend on x."""

    backend: str
    label: str
    rows: Mapping[Any, Row]

    def at(self, x: Any) -> Row | None:
        """The row at an x value, or the row that does not depend on x."""
        return self.rows.get(x, self.rows.get(None))

    @property
    def is_constant(self) -> bool:
        """Whether it does not depend on x, so that a figure with an x axis shows it as a horizontal line."""
        return None in self.rows


@dataclass(frozen=True)
class Panel:
    """All series of one pass, with all their x values; [None] if there are none."""

    pass_: str
    x_name: str
    x_values: Sequence[Any]
    series: Sequence[Series]
    # The title of a panel of the sweep that has these series alone; of all series, nothing.
    part: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What no other panel has."""
        return self.pass_, self.part

    @property
    def rows(self) -> list[Row]:
        """All rows, series by series."""
        return [row for series in self.series for row in series.rows.values()]

    @property
    def title(self) -> str:
        """What its cells time, in words."""
        ops = {row["op"] for row in self.rows}
        step = _STEP_TITLES.get(ops.pop()) if len(ops) == 1 else None
        return (step or PASS_TITLES[self.pass_]) + (f": {self.part}" if self.part else "")

    @property
    def is_scale(self) -> bool:
        """Whether all x values have a place on a logarithmic scale."""
        return all(is_number(x) and x > 0 for x in self.x_values)


@dataclass(frozen=True)
class View:
    """What a report shows. `rows` are all rows; panels leave out backends of which no cell could run."""

    runs: Sequence[Run]
    rows: Sequence[Row]
    x_name: str
    panels: Sequence[Panel]
    # Constant sizes, for all series and then per op: `B=32, bf16; gla: H=4 K=128; softmax: H=16 D=64`.
    shape: str

    @property
    def has_x(self) -> bool:
        """Whether there is more than one x value."""
        return len({x for panel in self.panels for x in panel.x_values}) > 1

    @property
    def has_lines(self) -> bool:
        """Whether a quarter of the series or more have several x values, so that a figure needs an x axis.

        Those that do not depend on x are not counted.
        """
        series = [each for panel in self.panels for each in panel.series if not each.is_constant]
        return bool(series) and sum(len(each.rows) > 1 for each in series) >= _LEAST_SHARE_WITH_LINES * len(series)

    @property
    def against(self) -> str | None:
        """The backend that ratios refer to by default: that of the first run's sweep."""
        return self.runs[0].sweep.against

    @property
    def labels(self) -> list[str]:
        """The labels of all series, without repeats."""
        return list(dict.fromkeys(series.label for panel in self.panels for series in panel.series))


def make_view(runs: Sequence[Run]) -> View:
    """Arranges the rows of runs; x is the axis of the first run's sweep, or another one if that is constant."""
    rows = rows_of_runs(runs)
    runnable = {row["backend"] for row in rows if row["status"] != "unsupported"}
    shown = [row for row in rows if row["backend"] in runnable] or rows
    x = choose_x(shown, runs[0].sweep.x)
    parts = runs[0].sweep.panels
    if not {row["backend"] for row in shown} <= {name for own in parts.values() for name in own}:
        parts = {}  # another run has backends that are in none
    return View(runs, rows, x, make_panels(shown, x, parts), describe_shape(shown, x))


def check_metrics(runs: Sequence[Run], metrics: Sequence[Metric]) -> None:
    """Raises UsageError if records have values, but of none of these metrics. Without a time, statuses are shown."""
    rows = rows_of_runs(runs)
    there = [metric.name for metric in known(METRICS, rows)]
    if there and TIME not in metrics and not known(metrics, rows):
        names = ", ".join(metric.name for metric in metrics)
        raise UsageError(f"--metric: no record has these metrics: {names} (there are: {', '.join(there)})")


def backends_in(runs: Iterable[Run]) -> list[str]:
    """The backends that runs have records of, sorted."""
    return sorted({record.cell.backend for run in runs for record in run.records})


def rows_of_runs(runs: Sequence[Run]) -> list[Row]:
    """`rows_of` for several runs, with the keys `run`, `machine` and `doubts` (a tuple of tags) added."""
    rows: list[Row] = []
    for run, name in zip(runs, name_runs(runs), strict=True):
        machine = device_name(run.environment)
        for row, record in zip(rows_of(run.records), run.records, strict=True):
            rows.append({**row, "run": name, "machine": machine, "doubts": tuple(diagnose(record))})
    return rows


def choose_x(rows: Sequence[Row], wanted: str) -> str:
    """The x axis: `wanted`, unless that is constant and exactly one other numeric axis varies.

    An axis that varies in less than a quarter of the backends is none for the rest, and does not count. Seeds are
    numbers, but no scale: each has a line of its own.
    """
    has_square_heads = all(row["key_dim"] == row["value_dim"] for row in rows)
    if wanted == "head_dim" and not has_square_heads:
        wanted = "key_dim"
    if len({x_of(row, wanted) for row in rows} - {None}) > 1:
        return wanted
    backends = _by_backend(rows).values()
    of_each = [{name for name in _varying(own, ["seed"]) if _all_numbers(own, name)} for own in backends]
    if has_square_heads:
        of_each = [_as_head_dim(own) for own in of_each]
    times = Counter(name for own in of_each for name in own)
    varying = [name for name, count in times.items() if count >= _LEAST_SHARE_WITH_LINES * len(backends)]
    return varying[0] if len(varying) == 1 else wanted


def _as_head_dim(axes: set[str]) -> set[str]:
    """Axes with `head_dim` in place of those that it hides."""
    return axes if axes.isdisjoint(_HIDES["head_dim"]) else axes - {*_HIDES["head_dim"]} | {"head_dim"}


def x_of(row: Row, axis: str) -> Any:
    """A row's value on an axis; None if it does not have the axis. `head_dim` falls back to `key_dim`."""
    if axis == "head_dim" and "head_dim" not in _names(row):
        axis = "key_dim"
    return value_or_word(axis, row.get(axis) if axis in (*_names(row), "key_dim", "value_dim", _WIDTH) else None)


def is_number(value: Any) -> bool:
    """Whether a value is a number, so that it has a place on a scale."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def make_panels(rows: Sequence[Row], x_axis: str, parts: Mapping[str, Sequence[str]] | None = None) -> list[Panel]:
    """One panel per pass, with passes and backends in order of first appearance; or one per pass and part of backends.

    A label begins with the run's name if two runs have the same cell or were made on different machines.
    """
    telling = {name: _varying(own, _hidden(x_axis, own)) for name, own in _by_backend(rows).items()}
    if len({row["seed"] for row in rows}) > 1:  # also a backend that has one of them says which
        telling = {name: [*(each for each in own if each != "seed"), "seed"] for name, own in telling.items()}
    swept = {row["backend"] for row in rows if x_of(row, x_axis) is not None}
    labels = []
    for row in rows:
        words = name_values({name: row.get(name) for name in telling[row["backend"]]})
        if row["backend"] in swept and x_of(row, x_axis) is None:
            words.append("auto")  # a separate line, because the value that the backend chose is not known here
        labels.append(row["backend"] + (f" ({', '.join(words)})" if words else ""))
    keys = {(row["pass"], label, x_of(row, x_axis)) for row, label in zip(rows, labels, strict=True)}
    several = len({row.get("run") for row in rows}) > 1
    if several and (len(keys) < len(rows) or len({row.get("machine") for row in rows}) > 1):
        labels = [f"{row['run']}: {label}" for row, label in zip(rows, labels, strict=True)]
    panels: dict[str, dict[str, dict[Any, Row]]] = {}
    for row, label in zip(rows, labels, strict=True):
        panels.setdefault(row["pass"], {}).setdefault(label, {})[x_of(row, x_axis)] = row
    in_parts: Mapping[str, Sequence[str] | None] = parts or {"": None}
    return [
        _panel(pass_, x_axis, own, part)
        for pass_, lines in panels.items()
        for part, backends in in_parts.items()
        if (own := {label: by_x for label, by_x in lines.items() if backends is None or _backend(by_x) in backends})
    ]


def _panel(pass_: str, x_axis: str, lines: Mapping[str, Mapping[Any, Row]], part: str) -> Panel:
    x_values = _ordered(x for by_x in lines.values() for x in by_x)
    return Panel(pass_, x_axis, x_values, [Series(_backend(own), label, own) for label, own in lines.items()], part)


def _backend(by_x: Mapping[Any, Row]) -> str:
    return str(next(iter(by_x.values()))["backend"])


def describe_shape(rows: Sequence[Row], x_axis: str) -> str:
    """Constant values, for all, per op and per backend: `B=32, bf16; gla: H=4 K=128 V=256; softmax: H=16 D=64`."""
    has_x = len({x_of(row, x_axis) for row in rows}) > 1
    of_backend = {}
    for backend, own in _by_backend(rows).items():
        varying = {*_varying(own), *(_hidden(x_axis, own) if has_x else ())}
        constant = {name: row.get(name) for row in own for name in _names(row) if name not in varying}
        of_backend[backend] = name_values({n: v for n, v in constant.items() if not is_usual(n, v)})
    common = _shared(list(of_backend.values()))
    backends_of: dict[str, list[str]] = {}
    for backend, own in _by_backend(rows).items():
        backends_of.setdefault(own[0]["op"], []).append(backend)
    owners: dict[str, list[str]] = {}
    for op, backends in backends_of.items():
        of_op = [word for word in _shared([of_backend[name] for name in backends]) if word not in common]
        rest = {name: [w for w in of_backend[name] if w not in (*common, *of_op)] for name in backends}
        for owner, words in {op: of_op, **rest}.items() if len(backends) > 1 else [(op, of_op)]:
            if words:
                owners.setdefault(" ".join(words), []).append(owner)
    parts = [", ".join(common), *(f"{', '.join(names)}: {words}" for words, names in owners.items())]
    return "; ".join(filter(None, parts))


def name_values(values: Mapping[str, Any]) -> list[str]:
    """Parameters as texts, without None. Equal key and value dims are shown as one head dim."""
    given = {name: value for name, value in values.items() if value is not None}
    if "key_dim" in given and given["key_dim"] == given.get("value_dim"):
        given["head_dim"] = given.pop("value_dim")
        del given["key_dim"]
    return [label_of(name, given[name]) for name in sort_by_order(given)]


def find_base(panel: Panel, row: Row, x: Any, against: str | None) -> tuple[Series, Row] | None:
    """The series and row of the backend `against` to compare a row with: same x, batch, length, dtype and GPUs.

    Among several, those of the same run, then of the same way to share the work, seed, model width and sizes. None if
    there is none, or if several of different sizes are left.
    """
    of_backend = [(each, base) for each in panel.series if each.backend == against and (base := each.at(x))]
    found = [(each, base) for each, base in of_backend if all(base.get(n) == row.get(n) for n in (*_COMMON, "gpus"))]
    for name in ("run", "parallel", "seed", _WIDTH):
        found = [pair for pair in found if pair[1].get(name) == row.get(name)] or found
    found = [pair for pair in found if _have_same_sizes(pair[1], row)] or found
    is_clear = len({tuple(base.get(name) for name in _SIZES) for _, base in found}) == 1
    return found[0] if is_clear else None


def _have_same_sizes(one: Row, other: Row) -> bool:
    """Whether two rows, of any ops, agree in the sizes that both have."""
    both = ((one.get(name), other.get(name)) for name in _SIZES)
    return all(a == b for a, b in both if a is not None and b is not None)


def _names(row: Row) -> list[str]:
    """The names of a row's axes."""
    return [*_COMMON, *filter(None, row["parameters"].split(","))]


def _hidden(x_axis: str, rows: Sequence[Row]) -> set[str]:
    """The x axis and what it determines: other names of it, and sizes that have one value at each x of a run."""
    own = {x_axis, *_HIDES.get(x_axis, ())}
    by_run: dict[Any, set[Any]] = {}
    for row in rows:
        by_run.setdefault(row.get("run"), set()).add(x_of(row, x_axis))
    if max(len(found - {None}) for found in by_run.values()) < 2:
        return own
    pairs = {name: {(x_of(row, x_axis), row.get(name)) for row in rows} for name in _varying(rows, own)}
    return own | {
        name
        for name, found in pairs.items()
        if (name in (*_COMMON, *_SIZES) or is_size(name)) and len(found) == len({x for x, _ in found})
    }


def _by_backend(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["backend"], []).append(row)
    return found


def _varying(rows: Sequence[Row], hidden: Iterable[str] = ()) -> list[str]:
    """The axes that have more than one value in those rows of one backend whose passes have the axis.

    A row does not name an axis whose value is None, as a call without states, or with a chunk of the backend's choice.
    """
    of_pass: dict[str, set[str]] = {}
    for row in rows:
        of_pass.setdefault(row["pass"], set()).update((*_names(row), "device", "seed"))
    values: dict[str, set[Any]] = {}
    for row in rows:
        for name in of_pass[row["pass"]]:
            values.setdefault(name, set()).add(row.get(name))
    return [name for name, found in values.items() if name not in hidden and len(found) > 1]


def _all_numbers(rows: Sequence[Row], name: str) -> bool:
    """Whether an axis has several values, all of them numbers. None does not count, unless it stands for a number."""
    none = value_or_word(name, None)
    values = {none if row.get(name) is None and is_number(none) else row.get(name) for row in rows} - {None}
    return len(values) > 1 and all(is_number(value) for value in values)


def _ordered(values: Iterable[Any]) -> list[Any]:
    """Numbers by size, then other values in order of appearance; [None] if there are none."""
    found = [value for value in dict.fromkeys(values) if value is not None]
    numbers = sorted(value for value in found if is_number(value))
    return [*numbers, *(value for value in found if not is_number(value))] or [None]


def _shared(lists: Sequence[Sequence[str]]) -> list[str]:
    """The words that all lists have."""
    return [word for word in lists[0] if all(word in words for words in lists)] if lists else []
