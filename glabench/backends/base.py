"""What a backend is. Importing this does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Requirement:
    """A Python package that a backend needs: its import name and the command that installs it."""

    module: str
    install: str

    @property
    def present(self) -> bool:
        """Whether the package is installed; it is looked for, not imported."""
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:  # of a submodule whose package is missing
            return False


@dataclass(frozen=True)
class Counts:
    """What an implementation executes and moves in one call."""

    flops: int
    bytes: int


class Backend(ABC):
    """One implementation of one op. Subclasses are light: heavy imports happen in `bind`.

    Inputs ask for gradients in every pass but `infer`: a forward is that of training, and keeps what a backward needs.
    """

    name: ClassVar[str]
    op: ClassVar[str]
    title: ClassVar[str]
    # The kind of work that its cells are: a row of `glabench.measure.work.KINDS`.
    work: ClassVar[str] = "op"
    # What the implementation can be told besides its op's parameters: axes of a sweep.
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    requires: ClassVar[tuple[Requirement, ...]] = ()
    devices: ClassVar[frozenset[str]] = frozenset({"cuda", "cpu"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bf16", "fp16", "fp32", "fp64"})

    def unavailable(self, device: str) -> str | None:
        """Why the backend cannot run here at all, in one sentence that says how to mend it; None if it can."""
        reasons = []
        if device not in self.devices:
            reasons.append("needs a GPU; there is none here" if device == "cpu" else "runs on a CPU only")
        reasons += [f"{r.module} is not installed; install with: {r.install}" for r in self.requires if not r.present]
        return "; ".join(reasons) or None

    def supports(self, cell: Cell) -> str | None:
        """Why the backend cannot run a cell, in one sentence; None if it can."""
        if cell.dtype not in self.dtypes:
            return f"dtype {cell.dtype} is not supported; it takes {', '.join(sorted(self.dtypes))}"
        return self.limits(cell)

    def limits(self, cell: Cell) -> str | None:  # noqa: ARG002
        """Limits of the implementation beyond device, packages and dtype; same form as `supports`."""
        return None

    def working_bytes(self, cell: Cell) -> int:  # noqa: ARG002
        """A rough figure of what the implementation takes beyond inputs, output and gradients."""
        return 0

    def executes(self, cell: Cell) -> Counts | None:  # noqa: ARG002
        """What the implementation executes and moves, if that is known; recorded beside the equation's counts."""
        return None

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str | None:  # noqa: ARG002
        """How the implementation launches the cell (kernels, tile sizes), in a line, where it can tell."""
        return None

    @abstractmethod
    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        """A call without arguments that computes the op's output, in the op's shape, from `inputs`.

        Views and fixed arguments are prepared here, outside of what is timed.
        """
