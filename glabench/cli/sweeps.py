"""The command `glabench sweeps`."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from glabench.cli.options import JsonOption
from glabench.cli.output import print_table, write_json
from glabench.sweeps import load_sweep, preset_names
from glabench.sweeps.load import dump_sweep, preset_text


def sweeps(
    name: Annotated[
        str | None, typer.Argument(metavar="SWEEP", help="Print this preset's .toml.", autocompletion=preset_names)
    ] = None,
    json_to: JsonOption = None,
) -> None:
    """List the presets, or print one as a .toml file, as a start for your own sweep."""
    presets = [load_sweep(preset) for preset in (preset_names() if name is None else [name])]
    if json_to is not None:
        write_json([asdict(sweep) for sweep in presets], json_to)
        return
    if name is not None:
        print(dump_sweep(presets[0]) if name.endswith(".toml") else preset_text(presets[0].name), end="")
        return
    rows = [(sweep.name, Text.assemble(f"{sweep.title}\n", (sweep.description, "dim"))) for sweep in presets]
    print_table(("preset", "what it shows"), rows)
