"""An op as a backend computes it, as a function of tensors that a mixer calls in every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import reduce
from typing import Protocol

from torch import Tensor, float32, float64, is_grad_enabled, promote_types
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

    @property
    def features(self) -> frozenset[str]: ...

    def unavailable(self, device: str) -> str | None: ...

    def supports(self, cell: Cell) -> str | None: ...

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]: ...

    def bind_step(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor] | None: ...


class Kernels(Protocol):
    """Backends by name, and the ops that they compute, as a registry has them."""

    @property
    def ops(self) -> Mapping[str, Op]: ...

    def __iter__(self) -> Iterator[str]: ...

    def fused_layer(self, name: str, /) -> Callable[..., Tensor] | None: ...

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
        self._fused = None if self._backend is None else registry.fused_layer(backend)
        # What a call needs to know but does not change from one to the next, by what it depends on.
        self._cells: dict[tuple[object, ...], Cell] = {}
        self._of_heads: dict[int, Kernel] = {}

    def of_heads(self, heads: int) -> Kernel:
        """The same for another number of heads."""
        if heads not in self._of_heads:
            other = self._of_heads[heads] = copy(self)
            other._parameters = Parameters({**self._parameters, "heads": heads})
            other._cells = {}
        return self._of_heads[heads]

    def __call__(self, inputs: Mapping[str, Tensor], batch: int, seqlen: int) -> Tensor:
        """The op's output for its inputs by name, whose shapes the op says."""
        if self._backend is None:
            return _reference(self.op, inputs)[0]
        cell = self._known(next(iter(inputs.values())), batch, seqlen)
        return as_tuple(self._backend.bind(inputs, cell)())[0]

    def with_states(self, inputs: Mapping[str, Tensor], batch: int, seqlen: int) -> tuple[Tensor, Tensor]:
        """The output and the states after the last token; the inputs may have those before the first as `initial`."""
        if self._backend is None:
            o, final = _reference(self.op, inputs)
        else:
            state = "both" if "initial" in inputs else "out"
            cell = self._known(next(iter(inputs.values())), batch, seqlen, state)
            o, final = self._backend.bind(inputs, cell)()
        return o, final

    def step(self, inputs: Mapping[str, Tensor], batch: int) -> Tensor:
        """The output for one token of each sequence. The states after it replace those before it, `initial`."""
        if self._backend is not None:
            cell = self._known(next(iter(inputs.values())), batch, 1, "both")
            if (step := self._backend.bind_step(inputs, cell)) is not None:
                return step()
        o, final = self.with_states(inputs, batch, 1)
        inputs["initial"].copy_(final)
        return o

    def fused_layer(self, like: Tensor) -> Callable[..., Tensor] | None:
        """The backend's function for all of a layer behind its first projection, if it has one that takes this type."""
        return None if like.dtype == float64 else self._fused

    def _known(self, like: Tensor, batch: int, seqlen: int, state: str | None = None) -> Cell:
        if is_compiling():  # a graph must not change what it reads
            return self._cell(like, batch, seqlen, state)
        key = (batch, seqlen, like.dtype, like.device.type, is_grad_enabled(), state)
        if key not in self._cells:
            self._cells[key] = self._cell(like, batch, seqlen, state)
        return self._cells[key]

    def _cell(self, like: Tensor, batch: int, seqlen: int, state: str | None) -> Cell:
        assert self._backend is not None
        device: DeviceKind = "cpu" if like.device.type == "cpu" else "cuda"
        pass_: Pass = "fwd+bwd" if is_grad_enabled() else "infer"
        dtype = _DTYPES[str(like.dtype)]
        own = self._parameters if state is None else Parameters({**self._parameters, "state": state})
        cell = Cell(self._backend.name, self.op.name, pass_, batch, seqlen, dtype, own, device)
        lacks = None if state is None or "state" in self._backend.features else "returns no states"
        if (why := self._backend.unavailable(cell.device) or lacks or self._backend.supports(cell)) is not None:
            raise UsageError(f"kernel: {self._backend.name}: {why}")
        return cell


def _reference(op: Op, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The op's reference in the widest type of its inputs, float32 at least; the output is in the first one's."""
    widest, own = reduce(promote_types, (x.dtype for x in inputs.values()), float32), next(iter(inputs.values())).dtype
    o, *states = as_tuple(op.reference({name: x.to(widest) for name, x in inputs.items()}))
    return o.to(own), *states
