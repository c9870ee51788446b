"""`glabench backends`."""

from typing import Annotated

import typer
from rich.table import Table

from glabench.backends import load_registry
from glabench.cli.measuring import find_place
from glabench.cli.output import data_console, write_json


def backends(
    json_to: Annotated[str | None, typer.Option("--json", help="Write as JSON, - for stdout.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file with more backends.")] = None,
) -> None:
    """List the backends: what is there, what is missing and how to get it."""
    place = find_place("auto")
    rows = []
    for name, backend in load_registry(plugin or ()).items():
        reason = backend.unavailable(place.device)
        here = {"available": reason is None, "reason": reason}
        rows.append({"name": name, "op": backend.op, "title": backend.title, **here})
    if json_to is not None:
        write_json(rows, json_to)
        return
    table = Table("backend", "op", "what it is", f"here ({place.device})")
    for row in rows:
        table.add_row(str(row["name"]), str(row["op"]), str(row["title"]), str(row["reason"] or "yes"))
    data_console().print(table)
