"""What commands print: data on stdout, messages on stderr."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from glabench.errors import UsageError, printable
from glabench.records import Record
from glabench.records.diagnosis import diagnose
from glabench.report.series import choose_x
from glabench.report.tables import UNSETTLED_NOTE, rich_tables, significant, to_frame, unsettled
from glabench.sweeps import Cell, Sweep


class Messages:
    """Messages for a person, on stderr; none when quiet."""

    def __init__(self, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """A message that a person wants to see."""
        if not self._quiet:
            self.console.print(printable(text), markup=False, soft_wrap=True)

    def lines(self, texts: Iterable[str]) -> None:
        """Lines for a program that reads this one's log, whether quiet or not, and not wrapped."""
        for text in texts:
            print(text, file=sys.stderr)

    def detail(self, text: str) -> None:
        """A message for --verbose."""
        if self._verbose:
            self.say(text)

    @contextmanager
    def progress(self, cells: int) -> Iterator["CellProgress"]:
        """A bar with the time left on a terminal; a line a cell elsewhere."""
        if self._quiet or not self.console.is_terminal:
            yield CellProgress(self, None, cells)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        # By default rich forgets what is older than 30 s, and slow cells would never have a time left.
        with Progress(*columns, console=self.console, transient=True, speed_estimate_period=3600) as bar:
            yield CellProgress(self, bar, cells)


class CellProgress:
    """Tells how far a sweep is."""

    def __init__(self, messages: Messages, bar: Progress | None, cells: int) -> None:
        self._messages = messages
        self._bar = bar
        self._cells = cells
        self._done = 0
        self._task = bar.add_task("measuring", total=cells) if bar else None

    def start(self, cell: Cell) -> None:
        """A cell is being measured."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=str(cell))

    def add(self, record: Record, turn: str = "") -> None:
        """One more cell has its record; `turn` says whose it was where several versions are measured."""
        self._done += 1
        name = f"{turn} {record.cell}".strip()
        result = record.status if record.time_ms is None else f"{significant(record.time_ms)} ms"
        reason = f" ({record.reason})" if record.reason else ""
        reason += "".join(f"\n  {diagnosis.name.lower()}: {diagnosis}" for diagnosis in diagnose(record))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1)
            if record.status != "ok" or diagnose(record):
                self._messages.say(f"{name}: {result}{reason}")
            else:
                self._messages.detail(f"{name}: {result}")
        else:
            self._messages.say(f"[{self._done}/{self._cells}] {name}: {result}{reason}")


def data_console() -> Console:
    """Where tables go: stdout, wide enough not to cut a table when it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def check_targets(targets: Mapping[str, str | None]) -> None:
    """Raises UsageError, before anything is measured, for places that data cannot be written to, by option."""
    to_stdout = [option for option, to in targets.items() if to == "-"]
    if len(to_stdout) > 1:
        first, second = to_stdout[:2]
        raise UsageError(f"{second}: stdout is taken by {first} already; write one of them to a file")
    for option, to in targets.items():
        if to not in (None, "-") and (not Path(to).parent.is_dir() or Path(to).is_dir()):
            raise UsageError(f"{option}: cannot write '{to}'; it needs a file in a folder that is there, or -")


def write_text(text: str, to: str) -> None:
    """Writes text to a file, or to stdout for `-`."""
    if to == "-":
        sys.stdout.write(text)
    else:
        Path(to).write_text(text, encoding="utf-8")


def write_json(data: Any, to: str) -> None:
    """Writes data as JSON to a file, or to stdout for `-`."""
    write_text(json.dumps(data, indent=2) + "\n", to)


def write_csv(rows: Sequence[Mapping[str, Any]], to: str) -> None:
    """Writes rows as CSV to a file, or to stdout for `-`."""
    import pandas as pd

    write_text(pd.DataFrame(rows).to_csv(index=False), to)


def write_records(records: Sequence[Record], json_to: str | None, csv_to: str | None) -> bool:
    """Writes records where the options say; whether stdout now holds data, so that no table belongs there."""
    if json_to is not None:
        write_json([record.to_json() for record in records], json_to)
    if csv_to is not None:
        write_text(to_frame(records).to_csv(index=False), csv_to)
    return "-" in (json_to, csv_to)


def print_tables(records: Sequence[Record], sweep: Sweep) -> None:
    """The sweep's title and tables, on stdout."""
    console = data_console()
    console.print(printable(sweep.title), markup=False, style="bold")
    for table in rich_tables(records, choose_x(records, sweep.x)):
        console.print(table)
    if any(unsettled(record) for record in records):
        console.print(UNSETTLED_NOTE, markup=False)
