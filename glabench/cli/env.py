"""`glabench env`."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from glabench.backends.registry import list_plugins
from glabench.cli.output import data_console, write_json
from glabench.records.environment import probe


def env(
    json_to: Annotated[str | None, typer.Option("--json", help="Write as JSON, - for stdout.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file with more backends.")] = None,
) -> None:
    """Show the hardware and versions that a run would record, and the plugins whose code it would load."""
    plugins = list_plugins(plugin or ())
    found = {**probe(), "plugins": [asdict(each) for each in plugins]}
    if json_to is not None:
        write_json(found, json_to)
        return
    table = Table("what", "value")
    for key, value in {**found, "plugins": {each.name: each.origin for each in plugins}}.items():
        for name, item in value.items() if isinstance(value, dict) else [("", value)]:
            table.add_row(f"{key} {name}".strip(), "-" if item is None else escape(str(item)))
    data_console().print(table)
