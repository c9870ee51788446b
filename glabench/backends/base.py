"""What a backend is. Importing this does not import torch."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from glabench.errors import UsageError, printable
from glabench.plain import shown
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from glabench.ops import Op


@dataclass(frozen=True)
class Requirement:
    """A Python package that a backend needs: its import name and the command that installs it.

    `distribution`: its name for pip, if other packages have modules of the same name.
    """

    module: str
    install: str
    distribution: str | None = None

    @property
    def present(self) -> bool:
        """Whether the package is installed. Does not import it."""
        if self.distribution is not None:
            return any(metadata.distributions(name=self.distribution))
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:  # for a submodule whose package is missing
            return False


@dataclass(frozen=True)
class Counts:
    """What an implementation executes and moves in one call, and which of the operations are off the tensor cores."""

    flops: int
    bytes: int
    scalar_flops: int = 0


# What `torch.compile` loads at its first use.
COMPILER = ("torch._inductor.compile_fx",)

# Passes over a forward's work, if the backward of a product is two.
FORWARDS: Mapping[str, int] = {"infer": 1, "fwd": 1, "bwd": 2, "fwd+bwd": 3}


@dataclass(frozen=True)
class Part:
    """A variant of a call that does one part of its work alone: what it executes and moves, if known."""

    call: Callable[[], object]
    counts: Counts | None = None


class Backends(Mapping[str, "Backend"]):
    """A registry as its backends see it: all of them by name, and the ops that they implement."""

    @property
    @abstractmethod
    def ops(self) -> Mapping[str, Op]:
        """The ops by name."""

    @abstractmethod
    def op_of(self, backend: str) -> Op:
        """The op that a backend implements."""

    @abstractmethod
    def unavailable(self, name: str, device: str) -> str | None:
        """Why a backend cannot run on this machine; None if it can. A fault of its own code is such a reason."""

    @abstractmethod
    def fused_layer(self, name: str) -> Callable[..., Any] | None:
        """A backend's function for a whole layer, if it came with glabench and is there.

        Not of plugins: whether a layer is right at a large size is not checked, that of an op is.
        """


class Backend(ABC):
    """One implementation of one op. Subclasses are cheap to import: heavy imports belong in `bind`.

    Inputs require gradients in every pass except `infer`, so a forward keeps what a backward needs, as in training.
    """

    name: ClassVar[str]
    op: ClassVar[str]
    title: ClassVar[str]
    # The kind of work that its cells are: a row of `glabench.measure.work.KINDS`.
    work: ClassVar[str] = "op"
    # What the implementation can be told besides its op's parameters: axes of a sweep.
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    requires: ClassVar[tuple[Requirement, ...]] = ()
    # The installed packages, as `pip` names them, that decide its times; and whether code of this project, or of a
    # plugin, does so too.
    packages: ClassVar[tuple[str, ...]] = ()
    has_own_code: ClassVar[bool] = True
    # Of glabench's own backends: modules of torch and of general use that the implementation loads at its first call,
    # which takes seconds. A worker loads them before it waits for its turn, so none may use a device.
    early_modules: ClassVar[tuple[str, ...]] = ()
    devices: ClassVar[frozenset[str]] = frozenset({"cuda", "cpu"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"bf16", "fp16", "fp32", "fp64"})
    # The parameters of its op that are features (`packed`, `state`) and that it has.
    features: ClassVar[frozenset[str]] = frozenset()
    # Whether `parts` gives any.
    has_parts: ClassVar[bool] = False

    def join(self, registry: Backends) -> None:  # noqa: B027 - most need no others
        """Called with the registry that the backend is added to, for one that needs others of it."""

    def unavailable(self, device: str) -> str | None:
        """One sentence that says why the backend cannot run on this machine and what to do; None if it can."""
        reasons = []
        if device not in self.devices:
            reasons.append("needs a GPU; none is used here" if device == "cpu" else "runs on a CPU only")
        reasons += [f"{r.module} is not installed; install with: {r.install}" for r in self.requires if not r.present]
        return "; ".join(reasons) or None

    def more_packages(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002
        """Packages that decide a cell's times besides `packages`, if they are installed."""
        return ()

    def supports(self, cell: Cell) -> str | None:
        """One sentence that says why the backend cannot run a cell; None if it can."""
        if cell.dtype not in self.dtypes:
            return f"dtype {cell.dtype} is not supported; it takes {', '.join(sorted(self.dtypes))}"
        return sentence(self, "limits", cell)

    def limits(self, cell: Cell) -> str | None:  # noqa: ARG002
        """As `supports`, for limits other than device, packages and dtype."""
        return None

    def working_bytes(self, cell: Cell) -> int:  # noqa: ARG002
        """Bytes that the implementation needs besides inputs, output and gradients, as a rough estimate."""
        return 0

    def executes(self, cell: Cell) -> Counts | None:  # noqa: ARG002
        """What the implementation executes and moves, if known; recorded beside the counts of the op's equation."""
        return None

    def kernel_counts(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Counts] | None:  # noqa: ARG002
        """What each kernel of the cell's pass executes and moves at the least, by its name; None if unknown."""
        return None

    def parts(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Part]:  # noqa: ARG002
        """Parts of the cell's forward by name, for profiles: what one kernel does together, and how long each takes."""
        return {}

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str | None:  # noqa: ARG002
        """How the implementation launches the cell (kernels, tile sizes), in one line; None if unknown."""
        return None

    def bind_step(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor] | None:  # noqa: ARG002
        """A function for one token of each sequence that moves the states `initial` on in place and returns the output.

        None if the implementation has no such form; who needs it then copies the final states of `bind`.
        """
        return None

    def fused_layer(self) -> Callable[..., Tensor] | None:
        """The package's function for all of a layer behind its first projection; None if it has none.

        Layers of `glabench.models` that know its arguments call it in place of `bind` where they need no states.
        """
        return None

    @abstractmethod
    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        """A function without arguments that computes the op's outputs from `inputs`, as specified by `Op.outputs`.

        Views and fixed arguments are prepared here, because this method is not timed; but no copies of inputs, because
        their values change between calls.
        """


def sentence(backend: Backend, method: str, about: Any) -> str | None:
    """What a backend's `unavailable`, `supports` or `limits` says. Raises TypeError for neither text nor None."""
    said = getattr(backend, method)(about.copy() if isinstance(about, Cell) else about)
    if said is None or isinstance(said, str):
        return said or None
    raise TypeError(f"{backend.name}: {method} returned {shown(said)}; it must be a sentence, or None")


def refusal(backend: Backend, op: Op, cell: Cell) -> str | None:
    """Why a backend cannot run a cell of its op, here or at all; None if it can. Raises what its methods raise."""
    lacks = (
        p for p in op.parameters if p.is_feature and cell.get(p.name) is not None and p.name not in backend.features
    )
    why = next((f"does not take {p.option} {cell.get(p.name)}" for p in lacks), None)
    return sentence(backend, "unavailable", cell.device) or why or sentence(backend, "supports", cell)


@contextmanager
def faults_of(what: str = "") -> Iterator[None]:
    """Runs a plugin's code: whatever it raises is a UsageError that begins with `what`, and what it prints is no data.

    An interruption stays one, and a UsageError stays as it is.
    """
    try:
        with redirect_stdout(sys.stderr):  # stdout is for data
            yield
    except (KeyboardInterrupt, UsageError):
        raise
    except BaseException as problem:  # also SystemExit, which would end the command without a word
        raise UsageError(what + _said(problem)) from problem


def _said(problem: BaseException) -> str:
    try:
        return printable(f"{type(problem).__name__}: {problem}")
    except Exception:
        return printable(type(problem).__name__)
