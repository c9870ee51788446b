"""What a run's profiles lack: a line that was cut off, cells without a profile, profiles without a record."""

from __future__ import annotations

from collections.abc import Iterable

from glabench.errors import count_of
from glabench.records import WRONG, Run
from glabench.report.text import escape
from glabench.sweeps.model import Cell

# The title of the sweeps of `glabench profile`, which profiles every cell that it times. Others profile some.
TITLE = "Where the time goes"
CUT_OFF = "profiles.jsonl is cut off: its last line has no end and is left out"
# Cells that are named.
_MOST_NAMED = 5


def describe_profiled(run: Run) -> list[str]:
    """A line per kind of what is missing; none if nothing is."""
    timed = [record.cell for record in run.records if record.status in ("ok", *WRONG)]
    lacking = [cell for cell in timed if cell not in run.profiles] if run.sweep.title == TITLE else []
    measured = {record.cell for record in run.records}
    unknown = [cell for cell in run.profiles if cell not in measured]
    lines = [f"{CUT_OFF}."] if run.profiles_cut_off else []
    if lacking:
        lines.append(f"No profile of {len(lacking)} of {count_of(len(timed), 'timed cell')}: {_named(lacking)}.")
    if unknown:
        lines.append(f"No record of {count_of(len(unknown), 'cell')} with a profile: {_named(unknown)}.")
    return lines


def _named(cells: Iterable[Cell]) -> str:
    names = [str(cell) for cell in cells]
    rest = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return "; ".join([*names[:_MOST_NAMED], *rest])


def profiled_markdown(run: Run) -> str:
    """The lines as a list; empty if nothing is missing."""
    return "\n".join(f"- {escape(line)}" for line in describe_profiled(run))
