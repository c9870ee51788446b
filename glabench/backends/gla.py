"""GLA and linear attention: our Triton kernels, and the plain-PyTorch forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import Backend, Requirement
from glabench.backends.ops import torch_dtype
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

_TRITON = Requirement("triton", "pip install triton")


def _first(function: Callable[..., tuple[Tensor, Tensor | None]], *tensors: Tensor, **options: object) -> Tensor:
    return function(*tensors, **options)[0]


class _Ours(Backend):
    """What our kernels can do, whatever the op."""

    requires = (_TRITON,)
    options = frozenset({"chunk", "materialize"})
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})

    def limits(self, cell: Cell) -> str | None:
        if max(cell.key_dim, cell.value_dim) > 256:
            return f"head dims go up to 256; got K={cell.key_dim} V={cell.value_dim}"
        if cell.chunk is None:
            return None
        # Only here, because it brings torch along.
        from gla_kernels.launch import CHUNK_SIZES, largest_chunk

        fitting = [size for size in CHUNK_SIZES if size <= largest_chunk(cell.key_dim, torch_dtype(cell.dtype))]
        if cell.chunk not in fitting:
            return f"chunk sizes at K={cell.key_dim} in {cell.dtype} are {fitting}; got {cell.chunk}"
        return None


class GlaTriton(_Ours):
    """`gla_kernels.chunk_gla`."""

    name: ClassVar[str] = "gla-triton"
    op: ClassVar[str] = "gla"
    title: ClassVar[str] = "GLA, our Triton kernels"

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from gla_kernels import chunk_gla

        options = {"materialize": bool(cell.materialize), "chunk_size": cell.chunk}
        return partial(_first, chunk_gla, inputs["q"], inputs["k"], inputs["v"], inputs["g"], **options)


class LinearTriton(_Ours):
    """`gla_kernels.chunk_linear_attn`."""

    name: ClassVar[str] = "linear-triton"
    op: ClassVar[str] = "linear"
    title: ClassVar[str] = "linear attention, our Triton kernels"

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from gla_kernels import chunk_linear_attn

        options = {"materialize": bool(cell.materialize), "chunk_size": cell.chunk}
        return partial(_first, chunk_linear_attn, inputs["q"], inputs["k"], inputs["v"], **options)


class GlaTorch(Backend):
    """`gla_kernels.two_level_chunk_gla`."""

    name: ClassVar[str] = "gla-torch"
    op: ClassVar[str] = "gla"
    title: ClassVar[str] = "GLA, two-level chunks in PyTorch (paper, Fig. 7)"
    options: ClassVar[frozenset[str]] = frozenset({"chunk"})

    def limits(self, cell: Cell) -> str | None:
        if cell.chunk is not None and cell.chunk % 16:
            return f"chunk sizes are multiples of 16; got {cell.chunk}"
        return None

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from gla_kernels import two_level_chunk_gla

        tensors = (inputs["q"], inputs["k"], inputs["v"], inputs["g"])
        return partial(_first, two_level_chunk_gla, *tensors, chunk_size=cell.chunk or 64)


class GlaRecurrentTorch(Backend):
    """`gla_kernels.naive_recurrent_gla`."""

    name: ClassVar[str] = "gla-recurrent-torch"
    op: ClassVar[str] = "gla"
    title: ClassVar[str] = "GLA, token by token in PyTorch: the reference"

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from gla_kernels import naive_recurrent_gla

        return partial(_first, naive_recurrent_gla, inputs["q"], inputs["k"], inputs["v"], inputs["g"])


class LinearTorch(Backend):
    """`gla_kernels.unaware_chunk_linear_attn`."""

    name: ClassVar[str] = "linear-torch"
    op: ClassVar[str] = "linear"
    title: ClassVar[str] = "linear attention, I/O-unaware chunks in PyTorch"
    options: ClassVar[frozenset[str]] = frozenset({"chunk"})

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from gla_kernels import unaware_chunk_linear_attn

        tensors = (inputs["q"], inputs["k"], inputs["v"])
        return partial(_first, unaware_chunk_linear_attn, *tensors, chunk_size=cell.chunk or 64)
