"""`glabench backends`."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from glabench.backends.ops import OPS
from glabench.cli.measuring import find_place
from glabench.cli.output import data_console, write_json


def backends(
    json_to: Annotated[str | None, typer.Option("--json", help="Write as JSON, - for stdout.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file with more backends.")] = None,
) -> None:
    """List the backends: what is there, what is missing and how to get it."""
    place = find_place(plugins=plugin)
    rows = []
    for name, backend in place.registry.items():
        reason = backend.unavailable(place.device)
        here = {"available": reason is None, "reason": reason}
        rows.append({"name": name, "op": backend.op, "title": backend.title, **here})
    if json_to is not None:
        write_json(rows, json_to)
        return
    table = Table("backend", "op", "what it is", f"here ({place.device})")
    for row in rows:
        table.add_row(*(escape(str(row[key])) for key in ("name", "op", "title")), escape(str(row["reason"] or "yes")))
    ops = Table("op", "what it computes")
    for op in OPS.values():
        ops.add_row(op.name, escape(op.equation))
    console = data_console()
    console.print(table)
    console.print(ops)
