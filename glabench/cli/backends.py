"""The command `glabench backends`."""

from typing import Any

from rich.markup import escape
from rich.table import Table

from glabench.cli.options import DeviceOption, JsonOption, PluginOption
from glabench.cli.output import data_console, write_json
from glabench.errors import printable
from glabench.scheduling.plan import find_place


def backends(device: DeviceOption = "auto", plugin: PluginOption = None, json_to: JsonOption = None) -> None:
    """List the backends (available or not, and how to install them) and the ops with their parameters."""
    place = find_place(device, plugin or ())
    traits = place.registry.traits()
    rows: list[dict[str, Any]] = []
    for name, backend in place.registry.items():
        reason = place.registry.unavailable(name, place.kind)
        known = {"name": name, "op": backend.op, "title": backend.title, "parameters": list(traits[name].parameters)}
        rows.append({**known, "available": reason is None, "reason": reason})
    if json_to is not None:
        write_json(rows, json_to)
        return
    table = Table("backend", "op", "what it is", "own parameters", f"here ({place.kind})")
    for row in rows:
        own = ", ".join(parameter.name for parameter in place.registry[row["name"]].parameters)
        table.add_row(*map(_safe, (row["name"], row["op"], row["title"], own, row["reason"] or "yes")))
    ops = Table("op", "what it computes", "parameters")
    for op in place.registry.ops.values():
        ops.add_row(_safe(op.name), _safe(op.equation), ", ".join(parameter.name for parameter in op.parameters))
    console = data_console()
    console.print(table)
    console.print(ops)


def _safe(text: str) -> str:
    """Text of a plugin for a table, where square brackets would be markup."""
    return escape(printable(text))
