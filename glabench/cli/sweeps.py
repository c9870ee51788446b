"""`glabench sweeps`."""

from typing import Annotated

import typer
from rich.table import Table

from glabench.cli.output import data_console, write_json
from glabench.sweeps import load_sweep, preset_names
from glabench.sweeps.load import dump_sweep


def sweeps(
    name: Annotated[
        str | None, typer.Argument(metavar="[SWEEP]", help="Print this preset's .toml.", autocompletion=preset_names)
    ] = None,
    json_to: Annotated[str | None, typer.Option("--json", help="Write as JSON, - for stdout.")] = None,
) -> None:
    """List the presets, or print one as a .toml file to start your own from."""
    if name is not None:
        print(dump_sweep(load_sweep(name)), end="")
        return
    presets = [load_sweep(preset) for preset in preset_names()]
    if json_to is not None:
        write_json([{"name": s.name, "title": s.title, "description": s.description} for s in presets], json_to)
        return
    table = Table("preset", "what it shows")
    for sweep in presets:
        table.add_row(sweep.name, f"{sweep.title}\n[dim]{sweep.description}[/]")
    data_console().print(table)
