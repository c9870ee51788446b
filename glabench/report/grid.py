"""A table of texts, written in columns for a terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from glabench.records import FAILED, Status
from glabench.report.text import escape

if TYPE_CHECKING:
    from rich.text import Text

DOUBTS = "doubts"
_GAP = "  "
_STYLES = {status: "red" if status in FAILED else "dim" for status in get_args(Status)}


@dataclass(frozen=True)
class Grid:
    """A table of texts. `topic` starts its title. A row with a single text is a heading for the rows below it."""

    topic: str
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    # Heads of columns of words, besides the first one and the doubts; other columns hold numbers.
    words: Sequence[str] = ()
    # Rich's styles of cells with these texts.
    styles: Mapping[str, str] = field(default_factory=lambda: _STYLES)

    @property
    def width(self) -> int:
        """The width in characters on a terminal, without titles and headings, which may be wrapped."""
        widths = self._widths()
        return sum(widths) + len(_GAP) * (len(widths) - 1)

    def to_text(self) -> Text:
        """The table in columns, for a terminal."""
        from rich.text import Text

        title = f"{self.topic}{self.title}"
        text = Text(title and f"{title}\n", "bold")
        widths = self._widths()
        for number, row in enumerate([self.head, *self.rows]):
            style = "not bold underline" if number == 0 else "not bold"
            cells = [row[0]] if len(row) == 1 else [self._place(i, cell, widths[i]) for i, cell in enumerate(row)]
            for i, cell in enumerate(cells):
                if i:
                    text.append(_GAP, "not bold")
                text.append(cell, f"{style} {self.styles.get(row[i], '') if i else ''}")
            text.rstrip()
            text.append("\n")
        return text

    def to_markdown(self) -> str:
        """The table as Markdown, with the topic in bold. The table must have no heading rows."""
        dashes = ["---" if self._holds_words(i) else "---:" for i in range(len(self.head))]
        title = f"**{escape(self.topic)}**{escape(self.title)}\n\n" if self.topic else ""
        lines = [self.head, dashes, *self.rows]
        return title + "".join(f"| {' | '.join(map(escape, row))} |\n" for row in lines)

    def _holds_words(self, column: int) -> bool:
        return column == 0 or self.head[column] in (DOUBTS, *self.words)

    def _widths(self) -> list[int]:
        from rich.cells import cell_len

        full = [self.head, *(row for row in self.rows if len(row) > 1)]
        return [max(map(cell_len, column)) for column in zip(*full, strict=True)]

    def _place(self, column: int, cell: str, width: int) -> str:
        """A cell padded to its column's width: text on the left, numbers on the right."""
        from rich.cells import cell_len

        spaces = " " * (width - cell_len(cell))
        return cell + spaces if self._holds_words(column) else spaces + cell
