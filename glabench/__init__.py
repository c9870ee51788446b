"""glabench measures how fast, how memory-hungry and how accurate sequence-mixing layers are.

Its Python API, see `glabench.api`: `run`, `resume`, `load`, `make_report`, `compare`, `compare_versions` and `check`.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glabench.api import check, compare, compare_versions, load, make_report, resume, run
    from glabench.records import Record, Run
    from glabench.sweeps import Cell, Sweep

__version__ = "0.2.0"
__all__ = [
    "Cell", "Record", "Run", "Sweep",
    "check", "compare", "compare_versions", "load", "make_report", "resume", "run",
]  # fmt: skip

# The modules of what is not in `glabench.api`.
_HOME = {
    "Record": "glabench.records",
    "Run": "glabench.records",
    "Cell": "glabench.sweeps",
    "Sweep": "glabench.sweeps",
}


def __getattr__(name: str) -> object:
    # Imported on first use, so that workers and `import glabench` stay light.
    if name not in __all__:
        raise AttributeError(f"module 'glabench' has no attribute '{name}'")
    return getattr(_import_module(_HOME.get(name, "glabench.api")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
