"""Which mixers models have, and what all models of one mixer share, whatever is measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import Backend, Backends
from glabench.errors import allowed_names
from glabench.ops.base import REFERENCE, check_width, torch_dtype
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import AUTO, Parameter, Pass, parse_names

if TYPE_CHECKING:
    import torch


def _kernels(text: str) -> tuple[str | None, ...]:
    return tuple(None if name == AUTO else name for name in parse_names(text))


KERNEL = Parameter(
    "kernel", "Backend that computes the mixers' op; `reference` is the op's own.", _kernels,
    f"{AUTO}, or names of backends",
)  # fmt: skip


@dataclass(frozen=True)
class MixerKind:
    """A mixer: its row of `glabench.models.MIXERS`, its op, and the kernel that computes it by default, by device.

    With the heads that its authors use, widths are multiples of `step`. `packages`: those that its layer takes besides
    the kernel's, if they are installed.
    """

    mixer: str
    op: str
    kernels: Mapping[str, str]
    step: int = 8
    packages: tuple[str, ...] = ()


GLA = MixerKind("gla", "gla", {"cuda": "gla-triton", "cpu": "gla-torch"})
LINEAR = MixerKind("linear", "linear", {"cuda": "linear-triton", "cpu": "linear-torch"})
SIMPLE_GLA = MixerKind("simple-gla", "simple-gla", {"cuda": "simple-gla-triton"})
FIXED_GATE = MixerKind("fixed-gate", "retention", {"cuda": "retention-triton"})
GLA_VALUES = MixerKind("gla-values", "gla-values", {"cuda": "gla-values-triton", "cpu": "gla-values-torch"})
GLA_BOTH = MixerKind("gla-both", "gla-both", {"cuda": "gla-both-triton", "cpu": "gla-both-torch"})
RETNET = MixerKind("retnet", "retention", {"cuda": "retention-triton"}, step=16)
TRANSFORMER = MixerKind("transformer", "softmax", {"cuda": "sdpa-flash", "cpu": "sdpa-math"}, 64)
MAMBA1 = MixerKind("mamba1", "mamba1", {"cuda": "mamba1"}, packages=("causal-conv1d",))
MAMBA2 = MixerKind("mamba2", "mamba2", {"cuda": "mamba2"}, 32, ("causal-conv1d",))
HYENA = MixerKind("hyena", "hyena", {"cuda": "hyena-fft", "cpu": "hyena-fft"}, 1)
RWKV4 = MixerKind("rwkv4", "rwkv4", {"cuda": "fla-rwkv4"}, 1)


class MixerModel(Backend):
    """A model with one kind of mixer, whose op some backend computes."""

    packages: ClassVar[tuple[str, ...]] = ("torch", "triton")
    kind: MixerKind
    # The pass of its cells, and why there is no other.
    only_pass: ClassVar[tuple[Pass, str]] = ("fwd+bwd", "training has a forward and a backward")
    registry: Backends

    @property
    def step(self) -> int:
        """Widths are multiples of this, so that heads are whole."""
        return self.kind.step

    def join(self, registry: Backends) -> None:
        """Keeps the registry, whose backends are the kernels that there are."""
        self.registry = registry

    def kernel_of(self, cell: Cell) -> str:
        """The backend of the mixers' op, or `reference`."""
        return str(cell.get("kernel") or self.kind.kernels.get(cell.device, REFERENCE))

    def casts(self, cell: Cell) -> bool:
        """Whether a forward casts to the cell's dtype, because the weights have another."""
        return cell.dtype in ("bf16", "fp16") and cell.get("weights") != "pure"

    def autocast(self, cell: Cell) -> torch.autocast:
        """The context of a forward: it casts to the cell's dtype, unless that is the weights' own."""
        import torch

        return torch.autocast(cell.device, torch_dtype(cell.dtype), enabled=self.casts(cell))

    def without_states(self, kernel: str) -> str | None:
        """That a kernel returns no states, with those that do; None if it does."""
        if kernel == REFERENCE or "state" in self.registry[kernel].features:
            return None
        able = [name for name, each in self.registry.items() if each.op == self.kind.op and "state" in each.features]
        return f"the kernel '{kernel}' returns no states (allowed: {', '.join([REFERENCE, *able])})"

    def more_packages(self, cell: Cell) -> tuple[str, ...]:
        """Those of the mixers' kernels, and those that layers take if they are there."""
        kernel = self.registry.get(self.kernel_of(cell))
        return (*self.kind.packages, *((*kernel.packages, *kernel.more_packages(cell)) if kernel is not None else ()))

    def limits(self, cell: Cell) -> str | None:
        pass_, why_only = self.only_pass
        if cell.pass_ != pass_:
            return f"{why_only}; use --pass {pass_}"
        (width,) = cell.sizes("model_width")
        if "vocabulary" in cell.parameters and cell.sizes("vocabulary") < (2,):
            return "a vocabulary has 2 tokens at least"
        try:
            check_width(width, self.step)
        except ValueError as problem:
            return f"width {width}: {problem}"
        name, registry = self.kernel_of(cell), self.registry
        if name == REFERENCE:
            return None
        known = [REFERENCE, *(each for each, backend in registry.items() if backend.op == self.kind.op)]
        if name not in known:
            return f"the kernel '{name}' does not compute {self.kind.op} ({allowed_names(known, name)})"
        why = registry.unavailable(name, cell.device)
        return None if why is None else f"{name}: {why}; name another with --kernel"
