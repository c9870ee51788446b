"""What an op is: a function of named inputs, its parameters, a float64 reference, and its counts.

Importing this does not import torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter, Value

if TYPE_CHECKING:
    from torch import Generator, Tensor

BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Spec:
    """One tensor: what its dimensions are called, their sizes, and its type; None means the cell's."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str | None = None

    def bytes(self, cell: Cell) -> int:
        """Size in memory."""
        return math.prod(self.shape) * BYTES[self.dtype or cell.dtype]


class Op(ABC):
    """A function of named inputs with one output. Subclasses are light: torch is imported in what makes tensors.

    `independent` names the dimensions along which parts do not influence each other's output, such as sequences and
    heads; a tensor that lacks one of them is shared by all parts along it (its gradient is a sum over them).
    """

    name: ClassVar[str]
    equation: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]]
    # Axes that set several parameters to one value.
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    independent: ClassVar[tuple[str, ...]]
    # The most of some parameters in the small cell that stands for others in the accuracy check.
    small: ClassVar[Mapping[str, int]] = {"heads": 2}
    # What the reference is, for the record.
    reference_name: ClassVar[str]

    @abstractmethod
    def published(self, width: int) -> dict[str, Value]:
        """The parameters that the op's authors use in a model of a width."""

    @abstractmethod
    def inputs(self, cell: Cell) -> dict[str, Spec]:
        """The input tensors by name."""

    @abstractmethod
    def output(self, cell: Cell) -> Spec:
        """The output tensor."""

    @abstractmethod
    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The output in the inputs' type, which is float64 where it matters; differentiable, any device.

        In chunks, so that a part of 16k tokens takes seconds.
        """

    @abstractmethod
    def forward_flops(self, cell: Cell) -> int:
        """The equation's multiplications and additions, exponentials left out."""

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """The values of an input, from standard normal `x` of its shape and type."""
        return x

    def make_inputs(self, cell: Cell) -> dict[str, Tensor]:
        """Random inputs from the cell's seed, on its device."""
        generator = _generator(cell, 0)
        return {
            name: self.make(name, _normal(s, cell, generator), cell, generator) for name, s in self.inputs(cell).items()
        }

    def make_grad_output(self, cell: Cell) -> Tensor:
        """A random gradient of the output."""
        return _normal(self.output(cell), cell, _generator(cell, 1))

    def last_part(self, tensor: Tensor, spec: Spec, tokens: int) -> Tensor:
        """The first `tokens` of a tensor in its last part: the last sequence, and the last head or channel."""
        for dim, name in enumerate(spec.dims):
            if name in self.independent:
                tensor = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
            elif name == "seqlen":
                tensor = tensor.narrow(dim, 0, min(tokens, tensor.shape[dim]))
        return tensor

    def least_bytes(self, cell: Cell) -> int:
        """Inputs and output, and for a pass with a backward the gradients of both: the least that a cell must hold."""
        both = self._input_bytes(cell) + self.output(cell).bytes(cell)
        return 2 * both if cell.has_backward else both

    def moved_bytes(self, cell: Cell) -> int:
        """What a perfect pass moves: each tensor read or written once, and nothing kept between forward and backward.

        The forward reads the inputs and writes the output; the backward reads the inputs and the gradient of the
        output, and writes the gradients of the inputs.
        """
        inputs, output = self._input_bytes(cell), self.output(cell).bytes(cell)
        forward, backward = inputs + output, 2 * inputs + output
        return {"infer": forward, "fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.pass_]

    def flops(self, cell: Cell) -> int:
        """Floating-point operations of a pass: a backward takes two products for each one of the forward.

        What an implementation computes beyond that (products within a chunk, recomputation) is its own affair.
        """
        forward = self.forward_flops(cell)
        return {"infer": forward, "fwd": forward, "bwd": 2 * forward, "fwd+bwd": 3 * forward}[cell.pass_]

    def _input_bytes(self, cell: Cell) -> int:
        return sum(spec.bytes(cell) for spec in self.inputs(cell).values())


def wide(cell: Cell) -> str:
    """The dtype of gates and decays: float32, in float64 cells float64."""
    return "fp64" if cell.dtype == "fp64" else "fp32"


def torch_dtype(name: str) -> torch.dtype:  # type: ignore[name-defined]  # noqa: F821
    """The torch dtype of a short name: bf16, fp16, fp32, fp64."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]


def _generator(cell: Cell, stream: int) -> Generator:
    import torch

    # A generator of "cuda" alone is not that of the current GPU.
    device = torch.device(cell.device, torch.cuda.current_device()) if cell.device == "cuda" else cell.device
    return torch.Generator(device=device).manual_seed(2 * cell.seed + stream)


def _normal(spec: Spec, cell: Cell, generator: Generator) -> Tensor:
    import torch

    dtype = torch_dtype(spec.dtype or cell.dtype)
    return torch.randn(spec.shape, generator=generator, device=cell.device, dtype=dtype)
