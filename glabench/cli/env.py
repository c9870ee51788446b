"""The command `glabench env`."""

from dataclasses import asdict

from rich.markup import escape
from rich.table import Table

from glabench.backends.registry import list_plugins
from glabench.cli.options import DeviceOption, JsonOption, PluginOption
from glabench.cli.output import data_console, write_json
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
    table = Table("what", "value")
    for key, value in {**kept, "plugins": {each.name: each.origin for each in plugins}}.items():
        for name, item in value.items() if isinstance(value, dict) else [("", value)]:
            table.add_row(f"{key} {name}".strip(), "-" if item is None else escape(str(item)))
    data_console().print(table)
