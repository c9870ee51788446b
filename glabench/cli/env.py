"""`glabench env`."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from glabench.cli.output import data_console, write_json
from glabench.records.environment import probe


def env(
    json_to: Annotated[str | None, typer.Option("--json", help="Write as JSON, - for stdout.")] = None,
) -> None:
    """Show the hardware and versions that a run would record."""
    found = probe()
    if json_to is not None:
        write_json(found, json_to)
        return
    table = Table("what", "value")
    for key, value in found.items():
        for name, item in value.items() if isinstance(value, dict) else [("", value)]:
            table.add_row(f"{key} {name}".strip(), "-" if item is None else escape(str(item)))
    data_console().print(table)
