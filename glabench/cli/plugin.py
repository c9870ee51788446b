"""The command `glabench plugin new`."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from glabench.errors import UsageError


def new(file: Annotated[Path, typer.Argument(metavar="FILE", help="The .py file to write.")]) -> None:
    """Write a working example plugin with comments, as a start for your own backend."""
    if file.suffix != ".py":
        raise UsageError(f"FILE: '{file}' must end in .py")
    if file.exists():
        raise UsageError(f"FILE: '{file}' already exists; give another name")
    if not file.parent.is_dir():
        raise UsageError(f"FILE: there is no folder '{file.parent}'; create it first")
    text = (resources.files("glabench.backends") / "plugin_template.txt").read_text(encoding="utf-8")
    file.write_text(text.replace("FILE", str(file)), encoding="utf-8")
    print(f"wrote {file}; try it: glabench run cpu-smoke --plugin {file} --backend my-linear,linear-torch")
