"""An op as a backend computes it, as a function of tensors that a mixer calls in every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Protocol

from torch import Tensor, is_grad_enabled, promote_types
from torch.compiler import is_compiling

from glabench.errors import UsageError, allowed_names
from glabench.ops import Op
from glabench.ops.base import REFERENCE, as_tuple
from glabench.sweeps.model import Cell, Parameters
from glabench.sweeps.parameters import DeviceKind, Dtype, Parameter, Pass, Value

_DTYPES: Mapping[str, Dtype] = {
    "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32", "torch.float64": "fp64"
}  # fmt: skip


class Implementation(Protocol):
    """What a kernel has to know of a backend."""

    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...

    def unavailable(self, device: str) -> str | None: ...

    def supports(self, cell: Cell) -> str | None: ...

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]: ...


class Kernels(Protocol):
    """Backends by name, and the ops that they compute, as a registry has them."""

    @property
    def ops(self) -> Mapping[str, Op]: ...

    def __iter__(self) -> Iterator[str]: ...

    def __getitem__(self, name: str, /) -> Implementation: ...


class Kernel:
    """An op for heads of fixed sizes and any number of sequences and tokens.

    `options` are parameters of the op and the backend besides its sizes; those that they do not have are left out.
    Raises UsageError if there is no such backend of the op; a call does so for what the backend does not take.
    """

    def __init__(
        self, registry: Kernels, op: str, backend: str, sizes: Mapping[str, int],
        options: Mapping[str, Value] | None = None,
    ) -> None:  # fmt: skip
        known = [REFERENCE, *(name for name in registry if registry[name].op == op)]
        if backend not in known:
            raise UsageError(f"kernel: '{backend}' does not compute {op} ({allowed_names(known, backend)})")
        self.op = registry.ops[op]
        self._backend: Implementation | None = None if backend == REFERENCE else registry[backend]
        own = (*self.op.parameters, *(self._backend.parameters if self._backend is not None else ()))
        defaults = {each.name: each.default for each in own}
        given = {name: value for name, value in (options or {}).items() if name in defaults}
        self._parameters = Parameters({**defaults, **sizes, **given})
        # What a call needs to know but does not change from one to the next, by what it depends on.
        self._cells: dict[tuple[object, ...], Cell] = {}

    def __call__(self, inputs: Mapping[str, Tensor], batch: int, seqlen: int) -> Tensor:
        """The op's output for its inputs by name, whose shapes the op says."""
        if self._backend is None:
            return _reference(self.op, inputs)
        return as_tuple(self._backend.bind(inputs, self._known(next(iter(inputs.values())), batch, seqlen))())[0]

    def _known(self, like: Tensor, batch: int, seqlen: int) -> Cell:
        if is_compiling():  # a graph must not change what it reads
            return self._cell(like, batch, seqlen)
        key = (batch, seqlen, like.dtype, like.device.type, is_grad_enabled())
        if key not in self._cells:
            self._cells[key] = self._cell(like, batch, seqlen)
        return self._cells[key]

    def _cell(self, like: Tensor, batch: int, seqlen: int) -> Cell:
        assert self._backend is not None
        device: DeviceKind = "cpu" if like.device.type == "cpu" else "cuda"
        pass_: Pass = "fwd+bwd" if is_grad_enabled() else "infer"
        dtype = _DTYPES[str(like.dtype)]
        cell = Cell(self._backend.name, self.op.name, pass_, batch, seqlen, dtype, self._parameters, device)
        if (why := self._backend.unavailable(cell.device) or self._backend.supports(cell)) is not None:
            raise UsageError(f"kernel: {self._backend.name}: {why}")
        return cell


def _reference(op: Op, inputs: Mapping[str, Tensor]) -> Tensor:
    """The op's reference in the widest type of its inputs; the output is in the first one's."""
    widest, own = reduce(promote_types, (x.dtype for x in inputs.values())), next(iter(inputs.values())).dtype
    return as_tuple(op.reference({name: x.to(widest) for name, x in inputs.items()}))[0].to(own)
