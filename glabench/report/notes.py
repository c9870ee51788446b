"""Notes below tables: an explanation of each doubt, and the cells that were not measured, in one line per reason."""

import re
from collections.abc import Mapping, Sequence

from glabench.records.diagnosis import Diagnosis, diagnose, explain
from glabench.report.series import Row, View, x_of
from glabench.sweeps.words import show_x

_LONGEST_REASON = 240


def explain_doubts(view: View) -> list[str]:
    """One line for each doubt that some record has, such as `drift: 3 of 90 cells: ...`."""
    records = [record for run in view.runs for record in run.records]
    found = {kind for record in records for kind in diagnose(record)}
    return [f"{kind}: {explain(kind, records)}" for kind in Diagnosis if kind in found]


def list_failures(view: View) -> list[str]:
    """One line per reason, such as `oom: gla-torch at 16k (fwd, fwd+bwd): CUDA out of memory.`

    Reasons that differ only in numbers share a line, except those of crashes: an exit code tells what happened.
    """
    label_of: dict[int, str] = {
        id(row): s.label for panel in view.panels for s in panel.series for row in s.rows.values()
    }
    rows_of: dict[str, list[Row]] = {}
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in view.rows:
        label: str = label_of[id(row)] if id(row) in label_of else row["backend"]
        rows_of.setdefault(label, []).append(row)
        if row["status"] != "ok":
            reason = row["reason"] or ""
            kind = (row["status"], reason if row["status"] == "crashed" else re.sub(r"[\d.]+", "#", reason))
            groups.setdefault(kind, {}).setdefault(label, []).append(row)
    lines = []
    for (status, _), by_label in groups.items():
        reason = next(iter(by_label.values()))[0]["reason"] or "no reason was recorded"
        reason = reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON].rstrip() + "…"
        cells = [_name_cells(label, rows, rows_of[label], view) for label, rows in by_label.items()]
        lines.append(f"{status}: {', '.join(cells)}: {reason}")
    return lines


def _name_cells(label: str, rows: Sequence[Row], all_rows: Sequence[Row], view: View) -> str:
    """Short text for cells of a series: `gla-torch at 8k 16k (fwd, fwd+bwd)`, or the label alone for all its cells."""
    if len(rows) == len(all_rows):
        return label
    by_pass: dict[str, list[str]] = {}
    for row in rows:
        by_pass.setdefault(row["pass"], []).append(show_x(x_of(row, view.x_name)))
    passes: dict[str, list[str]] = {}
    for pass_, places in by_pass.items():
        passes.setdefault(" ".join(places), []).append(pass_)
    return ", ".join(_name_place(label, places, names, view.has_x) for places, names in passes.items())


def _name_place(label: str, places: str, passes: Sequence[str], has_x: bool) -> str:
    return f"{label}{f' at {places}' if has_x else ''} ({', '.join(passes)})"


def tag_series(rows: Mapping[object, Row]) -> str:
    """The doubts of a series with their x values, as in `launch? 1k 2k; drift 4k`; without them if all x have it."""
    places: dict[str, list[str]] = {}
    for x, row in rows.items():
        for tag in row["doubts"]:
            places.setdefault(tag, []).append(show_x(x))
    return "; ".join(tag if len(found) == len(rows) else f"{tag} {' '.join(found)}" for tag, found in places.items())
