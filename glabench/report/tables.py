"""Records as a rich table, as Markdown with ratios, and as a DataFrame for CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from glabench.records import Record
from glabench.records.diagnosis import Diagnosis, diagnose
from glabench.report.series import Panel, Series, baseline_series, make_panels, show_x

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

UNSETTLED_NOTE = "~ sampling stopped at the time limit, before the median was known as well as asked"
FLOOR_TITLE = "share of the memory's floor, %"
PASS_TITLES = {
    "infer": "forward without gradients",
    "fwd": "forward",
    "bwd": "backward",
    "fwd+bwd": "forward + backward",
}


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """One row a record, one column a field, `rel_error` spread over `rel_error_o`, ...; samples are counted."""
    import pandas as pd

    rows = []
    for record in records:
        row = record.to_json()
        row["samples"] = len(row.pop("samples_ms") or ()) or None
        row |= {f"rel_error_{name}": error for name, error in (row.pop("rel_error") or {}).items()}
        rows.append(row)
    return pd.DataFrame(rows)


def significant(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent: 0.0512, 1.78, 14.5, 1040."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    return f"{float(text):.0f}" if abs(value) >= 1 else f"{float(text):.12f}".rstrip("0")


def _spread(record: Record) -> str:
    if record.time_ms is None or record.time_ms_p20 is None or record.time_ms_p80 is None:
        return record.status
    half = max(record.time_ms_p80 - record.time_ms, record.time_ms - record.time_ms_p20)
    return f"{_mark(record)}{significant(record.time_ms)} ±{100 * half / record.time_ms:.0f}%"


def unsettled(record: Record) -> bool:
    """Whether sampling stopped before the median was known as well as asked; tables then show a `~`."""
    return record.stop_reason == "time limit"


def _mark(record: Record) -> str:
    return "~" if unsettled(record) else ""


def _at(series: Series, x: Any) -> Record | None:
    return series.records.get(x, series.records.get(None))


def rich_tables(records: Sequence[Record], x_axis: str) -> list[Table]:
    """A pass: median times (with the larger distance to p20 or p80), and peak memory and the floor's share if known."""
    from rich.table import Table

    tables = []
    for panel in make_panels(records, x_axis):
        heading = f"{PASS_TITLES[panel.pass_]}: median time, ms, and its distance to p20 or p80"
        tables.append(_rich_table(Table(title=heading, title_justify="left"), panel, _spread))
        if panel.knows_memory:
            heading = f"{PASS_TITLES[panel.pass_]}: peak memory above the inputs, MiB"
            tables.append(_rich_table(Table(title=heading, title_justify="left"), panel, _memory))
        if panel.knows_bandwidth:
            heading = f"{PASS_TITLES[panel.pass_]}: {FLOOR_TITLE}"
            tables.append(_rich_table(Table(title=heading, title_justify="left"), panel, _floor_share))
    return tables


def _memory(record: Record) -> str:
    return record.status if record.peak_allocated_mib is None else f"{record.peak_allocated_mib:.0f}"


def _floor_share(record: Record) -> str:
    """The time of a copy of what a perfect pass moves, as a share of the time that it took."""
    if record.gbps is None or record.copy_gbps is None:
        return record.status if record.status != "ok" else ""
    return f"{100 * record.gbps / record.copy_gbps:.0f}"


def _rich_table(table: Table, panel: Panel, show: Any) -> Table:
    from rich.markup import escape

    table.add_column(f"backend / {panel.x_name}", no_wrap=True)
    for x in panel.x_values:
        table.add_column(escape(show_x(x)), justify="right", no_wrap=True, min_width=4)
    for series in panel.series:
        found = [_at(series, x) for x in panel.x_values]
        table.add_row(escape(series.label), *("" if r is None else _colored(show(r), r) for r in found))
    return table


def _colored(text: str, record: Record) -> str:
    return text if record.status == "ok" else f"[dim]{text}[/]" if record.status == "unsupported" else f"[red]{text}[/]"


def markdown(records: Sequence[Record], x_axis: str, baseline: str | None) -> str:
    """Markdown tables: median times, each with its speed-up over the baseline backend, peak memory, the floor's share.

    `2.31 (×6.3)` reads: 2.31 ms, 6.3 times as fast as the baseline at the same x. What failed shows its status, and
    every failure's reason stands below the tables.
    """
    parts = []
    for panel in make_panels(records, x_axis):
        base = baseline_series(panel, baseline)
        against = f"; in brackets: times as fast as {base.label}" if base else ""
        parts.append(f"**{PASS_TITLES[panel.pass_]}**, median ms{against}\n")
        parts.append(_markdown_table(panel, lambda r, x, base=base: _time_and_ratio(r, base, x)))
        if panel.knows_memory:
            parts.append(f"**{PASS_TITLES[panel.pass_]}**, peak memory above the inputs, MiB\n")
            parts.append(_markdown_table(panel, lambda r, _x: _memory(r)))
        if panel.knows_bandwidth:
            parts.append(f"**{PASS_TITLES[panel.pass_]}**, {FLOOR_TITLE}\n")
            parts.append(_markdown_table(panel, lambda r, _x: _floor_share(r)))
    if any(unsettled(r) for r in records):
        parts.append(UNSETTLED_NOTE + "\n")
    doubts = [f"- {r.cell}: {doubt}" for r in records for doubt in diagnose(r) if doubt is not Diagnosis.UNSETTLED]
    if doubts:
        parts.append("To be taken with care:\n")
        parts.append("\n".join(doubts) + "\n")
    failed = [r for r in records if r.status != "ok"]
    if failed:
        parts.append("Not measured:\n")
        parts.append("\n".join(f"- {r.cell}: {r.status}, {r.reason}" for r in failed) + "\n")
    return "\n".join(parts)


def _markdown_table(panel: Panel, show: Any) -> str:
    lines = [f"| {panel.x_name} | " + " | ".join(show_x(x) for x in panel.x_values) + " |"]
    lines.append("| --- |" + " ---: |" * len(panel.x_values))
    for series in panel.series:
        cells = [(_at(series, x), x) for x in panel.x_values]
        lines.append(f"| {series.label} | " + " | ".join("" if r is None else show(r, x) for r, x in cells) + " |")
    return "\n".join(lines) + "\n"


def _time_and_ratio(record: Record, base: Series | None, x: Any) -> str:
    if record.time_ms is None:
        return record.status
    reference = _at(base, x) if base else None
    ratio = f" (×{significant(reference.time_ms / record.time_ms, 2)})" if reference and reference.time_ms else ""
    return _mark(record) + significant(record.time_ms) + ratio
