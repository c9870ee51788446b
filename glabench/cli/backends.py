"""The command `glabench backends`."""

from collections.abc import Iterable
from typing import Any

from glabench.cli.options import DeviceOption, JsonOption, PluginOption
from glabench.cli.output import print_table, write_json
from glabench.scheduling.plan import find_place
from glabench.sweeps import Parameter


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
    print_table(
        ("backend", "op", "what it is", "own parameters", f"here ({place.kind})"),
        [
            (
                row["name"],
                row["op"],
                row["title"],
                _names(place.registry[row["name"]].parameters),
                row["reason"] or "yes",
            )
            for row in rows
        ],
    )
    print_table(
        ("op", "what it computes", "parameters"),
        [(op.name, op.equation, _names(op.parameters)) for op in place.registry.ops.values()],
    )


def _names(parameters: Iterable[Parameter]) -> str:
    return ", ".join(parameter.name for parameter in parameters)
