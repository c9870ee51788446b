"""Output of commands: data on stdout, messages on stderr."""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from glabench.errors import UsageError, printable
from glabench.records import Record, Run
from glabench.records.diagnosis import diagnose
from glabench.records.metrics import known, parse_metrics, significant
from glabench.report.series import rows_of_runs
from glabench.report.write import to_csv, to_frame
from glabench.scheduling.observer import Observer
from glabench.sweeps import Cell

# Columns of a terminal below which there is no progress bar, and wide tables become blocks of lines.
_WIDE = 100


class Messages(Observer):
    """Messages on stderr: a progress bar on a terminal, otherwise one line per cell."""

    def __init__(self, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose
        self.console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._cells = self._done = 0

    def say(self, text: str) -> None:
        if not self._quiet:
            self.console.print(printable(text), markup=False, soft_wrap=True)

    def begin(self, cells: int, done: int) -> None:
        self._cells, self._done = cells, done
        if self._quiet or not self.console.is_terminal:
            return
        columns = (
            *([BarColumn()] if self.console.width >= _WIDE else []),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            # The name of the cell, which takes the room that the others leave.
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        )
        # By default rich estimates from the last 30 s only, and slow cells would never show a remaining time.
        self._bar = Progress(*columns, console=self.console, transient=True, expand=True, speed_estimate_period=3600)
        self._bar.add_task("measuring", total=cells, completed=done)
        self._bar.start()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def start(self, cell: Cell, lane: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"{lane} {cell}".strip())

    def record(self, record: Record, lane: str) -> None:
        self._done += 1
        tags = [str(doubt) for doubt in diagnose(record)]
        result = record.status if record.time_ms is None else f"{significant(record.time_ms)} ms"
        reason = f" ({record.reason})" if record.reason else ""
        text = f"{lane} {record.cell}: {result}{reason}".strip() + (f"  [{', '.join(tags)}]" if tags else "")
        if self._bar is None:
            self.say(f"[{self._done}/{self._cells}] {text}")
            return
        self._bar.update(self._bar.task_ids[0], advance=1)
        if self._verbose or record.status not in ("ok", "unsupported"):
            self.say(text)


def data_console() -> Console:
    """A console on stdout for tables. If stdout is not a terminal, $COLUMNS or else 160 columns wide."""
    console = Console(highlight=False)
    has_width = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return console if has_width else Console(highlight=False, width=160)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Prints rows on stdout, as blocks of lines if there is no room for the columns. Cuts nothing."""
    console = data_console()
    if len(head) < 3 or console.width >= _WIDE:
        first, *others = head
        # As Text, because heads may have names of the user's, in which brackets are no markup.
        columns = [Column(Text(printable(each)), overflow="fold") for each in others]
        table = Table(Column(first, no_wrap=True), *columns)
        for row in rows:
            table.add_row(*(Text(printable(each)) if isinstance(each, str) else each for each in row))
        console.print(table)
        return
    for name, *values in rows:
        console.print(Text.assemble((f"{head[0]} ", "dim"), (printable(str(name)), "bold")), soft_wrap=True)
        for title, value in zip(head[1:], values, strict=True):
            if value:
                console.print(
                    Padding(
                        Text.assemble(
                            (f"{title}: ", "dim"),
                            printable(value) if isinstance(value, str) else value,
                            overflow="fold",
                        ),
                        (0, 0, 0, 2),
                    )
                )


def check_targets(targets: Mapping[str, str | None]) -> None:
    """Raises UsageError, before anything is measured, if an option's file cannot be written or is another option's."""
    to_stdout = [option for option, to in targets.items() if to == "-"]
    if len(to_stdout) > 1:
        first, second = to_stdout[:2]
        raise UsageError(f"{second}: {first} already writes to stdout; write one of them to a file")
    for option, to in targets.items():
        if to not in (None, "-") and not _is_writable(Path(to)):
            raise UsageError(f"{option}: cannot write '{to}'; give a file in an existing folder, or -")
    check_apart(targets)


def check_files(files: Mapping[str, Path | None]) -> None:
    """As `check_targets`, for options whose files are not for stdout."""
    for option, path in files.items():
        if path == Path("-"):
            raise UsageError(f"{option}: cannot write to stdout; give a file in an existing folder")
        if path is not None and not _is_writable(path):
            raise UsageError(f"{option}: cannot write '{path}'; give a file in an existing folder")


def check_apart(files: Mapping[str, str | Path | None]) -> None:
    """Raises UsageError if two options name the same file; what is no regular file, such as /dev/null, may be both."""
    found: dict[Path, str] = {}
    for option, to in files.items():
        path = None if to in (None, "-") else Path(str(to)).resolve()
        if path is None or (path.exists() and not path.is_file()):
            continue
        if path in found:
            raise UsageError(f"{option}: {found[path]} already writes to '{to}'; give another file")
        found[path] = option


def _is_writable(path: Path) -> bool:
    return path.parent.is_dir() and not path.is_dir()


def write_text(text: str, to: str) -> None:
    """Writes text to a file, or to stdout for `-`."""
    if to == "-":
        sys.stdout.write(text)
    else:
        Path(to).write_text(text, encoding="utf-8")


def to_json_text(data: Any) -> str:
    """Data as JSON, for a file."""
    return json.dumps(data, indent=2) + "\n"


def write_json(data: Any, to: str) -> None:
    """Writes data as JSON to a file, or to stdout for `-`."""
    write_text(to_json_text(data), to)


def write_csv(rows: Iterable[Mapping[str, Any]], to: str) -> None:
    """Writes rows as CSV to a file, or to stdout for `-`."""
    import pandas as pd

    write_text(to_csv(pd.DataFrame(list(rows))), to)


def warn_of_unknown(runs: Sequence[Run], asked_for: str | None, messages: Messages) -> None:
    """Names the requested metrics that no record has, because reports leave them out."""
    if asked_for is None:
        return
    metrics = parse_metrics(asked_for)
    there = known(metrics, rows_of_runs(runs))
    missing = [metric.name for metric in metrics if metric not in there]
    if missing:
        messages.say(f"no record has these metrics: {', '.join(missing)}")


def write_records(runs: Iterable[Run], json_to: str | None, csv_to: str | None) -> bool:
    """Writes records to the given files. Returns whether stdout got data, so that no table may be printed there."""
    listed = list(runs)
    if json_to is not None:
        write_json([record.to_json() for run in listed for record in run.records], json_to)
    if csv_to is not None:
        write_text(to_csv(to_frame(listed)), csv_to)
    return "-" in (json_to, csv_to)
