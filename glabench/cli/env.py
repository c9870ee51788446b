"""The command `glabench env`."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from glabench.backends.registry import list_plugins
from glabench.cli.options import DeviceOption, JsonOption, PluginOption
from glabench.cli.output import print_table, write_json
from glabench.devices.environment import probe
from glabench.devices.provenance import describe_code, relevant_variables


def env(device: DeviceOption = "auto", plugin: PluginOption = None, json_to: JsonOption = None) -> None:
    """Show the hardware, versions and code hashes that a run would record, and the plugins that it would load."""
    files = [str(path) for path in plugin or ()]
    plugins = list_plugins(files)
    kept = {**probe(device), "code": describe_code(files), "variables": relevant_variables()}
    if json_to is not None:
        write_json({**kept, "plugins": [asdict(each) for each in plugins]}, json_to)
        return
    kept["gpu"] = kept["gpu"] or "none"
    named = {each.name: each.origin for each in plugins}
    print_table(("what", "value"), list(_flat("", {**kept, "plugins": named})))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Names and values, with the keys of nested dicts in the names; nothing for an empty dict."""
    if not isinstance(value, Mapping):
        yield name, "-" if value is None else str(value)
        return
    for key, item in value.items():
        yield from _flat(f"{name} {key}".strip(), item)
