"""glabench measures how fast, how memory-hungry and how accurate sequence-mixing layers are.

Its Python API is `run`, `resume`, `load`, `compare`, `compare_versions` and `check` (see `glabench.api`).
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glabench.api import check, compare, compare_versions, load, resume, run
    from glabench.records import Record, Run
    from glabench.sweeps import Cell, Sweep

__version__ = "0.2.0"
__all__ = ["Cell", "Record", "Run", "Sweep", "check", "compare", "compare_versions", "load", "resume", "run"]

_HOME = {
    **dict.fromkeys(("check", "compare", "compare_versions", "load", "resume", "run"), "glabench.api"),
    **dict.fromkeys(("Record", "Run"), "glabench.records"),
    **dict.fromkeys(("Cell", "Sweep"), "glabench.sweeps"),
}


def __getattr__(name: str) -> object:
    # Imported on first use, so that workers and `import glabench` stay light.
    if name not in _HOME:
        raise AttributeError(f"module 'glabench' has no attribute '{name}'")
    return getattr(_import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
