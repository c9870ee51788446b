"""The base class of ops: named inputs and outputs, parameters, a float64 reference, counts of FLOPs and bytes.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, ClassVar

from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter, Value

if TYPE_CHECKING:
    from torch import Generator, Tensor

# In place of a backend, where a model names one: the op's own reference.
REFERENCE = "reference"
BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int64": 8}


@dataclass(frozen=True)
class Spec:
    """One tensor: names and sizes of its dimensions, and its dtype (None: the cell's).

    An input of dtype `int64` holds indices: it has no gradient, and its values are the same in all calls of a cell.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str | None = None

    @property
    def is_index(self) -> bool:
        """Whether the tensor holds indices."""
        return self.dtype == "int64"

    def bytes(self, cell: Cell) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * BYTES[self.dtype or cell.dtype]


class Op(ABC):
    """A function of named input tensors. Subclasses import torch only in methods that make tensors.

    `independent` names the dimensions along which parts do not influence each other's output, such as sequences and
    heads. A tensor without such a dimension is shared by all parts along it, and its gradient is a sum over them.
    """

    name: ClassVar[str]
    equation: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]]
    # Axes that set several parameters to one value.
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    independent: ClassVar[tuple[str, ...]]
    # Upper limits of parameters in the small cell that is compared with the reference.
    small: ClassVar[Mapping[str, int]] = {"heads": 2}
    # A description of the reference, for the record.
    reference_name: ClassVar[str]

    @abstractmethod
    def published(self, width: int) -> dict[str, Value]:
        """The parameters that the op's authors use for a model of this width. Raises ValueError if it has none."""

    @abstractmethod
    def inputs(self, cell: Cell) -> dict[str, Spec]:
        """The input tensors by name."""

    @abstractmethod
    def output(self, cell: Cell) -> Spec:
        """The output tensor."""

    def outputs(self, cell: Cell) -> dict[str, Spec]:
        """All output tensors by name, in the order in which a call returns them; by default `output` alone."""
        return {"o": self.output(cell)}

    @abstractmethod
    def reference(self, inputs: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        """The outputs, in the type of the inputs (float64 in comparisons), on any device, differentiable.

        May return more than a cell's outputs, which are the first ones. Should work in chunks, so that 16k tokens of
        one head take seconds.
        """

    @abstractmethod
    def forward_flops(self, cell: Cell) -> int:
        """Multiplications plus additions of the equation; exponentials do not count."""

    def make(self, name: str, x: Tensor, cell: Cell, generator: Generator) -> Tensor:  # noqa: ARG002
        """The values of an input, from standard normal `x` of its shape and type; by default `x` itself."""
        return x

    def make_inputs(self, cell: Cell, other: int = 0) -> dict[str, Tensor]:
        """Random inputs on the cell's device, from its seed; others for each `other`, but for indices."""
        return self.make_values(cell, other) | self.make_indices(cell)

    def make_values(self, cell: Cell, other: int = 0) -> dict[str, Tensor]:
        """The inputs that are no indices, made without a wait for the device."""
        generator = _generator(cell, 0, other)
        return {
            name: self.make(name, _normal(s, cell, generator), cell, generator)
            for name, s in self.inputs(cell).items()
            if not s.is_index
        }

    def make_indices(self, cell: Cell) -> dict[str, Tensor]:  # noqa: ARG002
        """The inputs that hold indices, on the cell's device; by default there are none."""
        return {}

    def make_grad_outputs(self, cell: Cell, other: int = 0) -> dict[str, Tensor]:
        """Random gradients of the outputs, from the cell's seed; others for each `other`."""
        generator = _generator(cell, 1, other)
        return {name: _normal(spec, cell, generator) for name, spec in self.outputs(cell).items()}

    def reference_numbers(self, cell: Cell) -> int:
        """About how many numbers the reference of one part holds at a time, its backward included.

        By default 40 for each number of the part's tensors; an op whose reference holds more has to say so.
        """
        specs = [*self.inputs(cell).values(), *self.outputs(cell).values()]
        return 40 * sum(
            math.prod(n for name, n in zip(s.dims, s.shape, strict=True) if name not in self.independent) for s in specs
        )

    def least_bytes(self, cell: Cell) -> int:
        """Bytes of inputs and output, and of their gradients if the pass has a backward: what any cell must hold."""
        inputs, outputs, gradients = self._bytes(cell)
        return inputs + outputs + (outputs + gradients if cell.has_backward else 0)

    def moved_bytes(self, cell: Cell) -> int:
        """Bytes that a perfect pass moves: each tensor once, and nothing else kept between forward and backward.

        The forward reads the inputs and writes the output; the backward reads the inputs and the output's gradient and
        writes the inputs' gradients.
        """
        inputs, outputs, gradients = self._bytes(cell)
        forward, backward = inputs + outputs, inputs + outputs + gradients
        return {"infer": forward, "fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.pass_]

    def least_moved_bytes(self, cell: Cell) -> int:
        """Bytes that nothing can avoid: as `moved_bytes`, but a backward need not read its inputs again."""
        inputs, outputs, gradients = self._bytes(cell)
        forward, backward = inputs + outputs, outputs + gradients
        return {"infer": forward, "fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[cell.pass_]

    def written_share(self, cell: Cell) -> float:
        """The share of `least_moved_bytes` that is written: the outputs, and in a backward the inputs' gradients."""
        _, outputs, gradients = self._bytes(cell)
        both = outputs + gradients
        written = {"infer": outputs, "fwd": outputs, "bwd": gradients, "fwd+bwd": both}[cell.pass_]
        return written / self.least_moved_bytes(cell)

    def flops(self, cell: Cell) -> int:
        """Floating-point operations of a pass, with two operations in the backward for each one in the forward.

        What an implementation computes in addition (products within a chunk, recomputation) does not count.
        """
        forward = self.forward_flops(cell)
        return {"infer": forward, "fwd": forward, "bwd": 2 * forward, "fwd+bwd": 3 * forward}[cell.pass_]

    def state_bytes(self, cell: Cell) -> int | None:  # noqa: ARG002
        """Bytes that one sequence needs to go on after its last token, in one layer; None if unknown."""
        return None

    def layer_parameters(self, cell: Cell) -> int | None:  # noqa: ARG002
        """Parameters of the layer in which the op's authors use it, at the cell's sizes; None if unknown."""
        return None

    def least_flops(self, cell: Cell) -> int:
        """A lower bound of `flops` over all forms of the equation; by default `flops` itself."""
        return self.flops(cell)

    def _bytes(self, cell: Cell) -> tuple[int, int, int]:
        """The bytes of inputs, of outputs, and of the inputs' gradients."""
        inputs, outputs = self.inputs(cell).values(), self.outputs(cell).values()
        gradients = (spec.bytes(cell) for spec in inputs if not spec.is_index)
        return sum(spec.bytes(cell) for spec in inputs), sum(spec.bytes(cell) for spec in outputs), sum(gradients)


def check_width(width: int, step: int) -> None:
    """Raises ValueError for a model width that is no multiple of `step`, as whole heads need."""
    if width % step:
        below = width // step * step
        near = " or ".join(str(valid) for valid in (below, below + step) if valid)
        raise ValueError(f"whole heads need a multiple of {step}; use {near}")


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a call returned, as a tuple also if it is a single tensor."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def wide(cell: Cell) -> str:
    """The dtype of gates and decays: float64 in float64 cells, otherwise float32."""
    return "fp64" if cell.dtype == "fp64" else "fp32"


def torch_dtype(name: str) -> torch.dtype:  # type: ignore[name-defined]  # noqa: F821
    """The torch dtype of a short name: bf16, fp16, fp32, fp64, int64."""
    import torch

    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "int64": "int64"}
    return getattr(torch, names[name])


def _generator(cell: Cell, stream: int, other: int) -> Generator:
    import torch

    # With the GPU's number, because a generator for plain "cuda" need not be on the current GPU.
    device = torch.device(cell.device, torch.cuda.current_device()) if cell.device == "cuda" else cell.device
    # A hash, so that the seed of the inputs does not tell that of the outputs' gradients. On a CPU a generator takes
    # the lower 32 bits.
    name = f"{cell.seed} {stream} {other}".encode()
    seed = int.from_bytes(blake2b(name, digest_size=8).digest()) if other else 2 * cell.seed + stream
    return torch.Generator(device=device).manual_seed(seed)


def _normal(spec: Spec, cell: Cell, generator: Generator) -> Tensor:
    import torch

    dtype = torch_dtype(spec.dtype or cell.dtype)
    return torch.randn(spec.shape, generator=generator, device=cell.device, dtype=dtype)
