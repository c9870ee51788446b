"""GLA and linear attention: our Triton kernels, and the plain-PyTorch forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from gla_kernels.limits import MAX_HEAD_DIM, WALKED_KEYS, fitting_chunks

from glabench.backends.base import Backend, Requirement
from glabench.backends.ops import BYTES
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor

_TRITON = Requirement("triton", "pip install triton")


def _output_of(
    function: Callable[..., tuple[Tensor, Tensor | None]], inputs: Mapping[str, Tensor], **options: object
) -> Callable[[], Tensor]:
    """A call of one of `gla_kernels`' functions on q, k, v and, where the op has one, g; it gives the output alone."""
    tensors = [inputs[name] for name in ("q", "k", "v", "g") if name in inputs]
    return lambda: function(*tensors, **options)[0]


class _Ours(Backend):
    """What our kernels can do, whatever the op."""

    requires = (_TRITON,)
    options = frozenset({"chunk", "materialize"})
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})

    def limits(self, cell: Cell) -> str | None:
        if max(cell.key_dim, cell.value_dim) > MAX_HEAD_DIM:
            return f"head dims go up to {MAX_HEAD_DIM}; got K={cell.key_dim} V={cell.value_dim}"
        fitting = fitting_chunks(cell.key_dim, _operand_bytes(cell))
        if cell.chunk is not None and cell.chunk not in fitting:
            return f"chunk sizes at K={cell.key_dim} in {cell.dtype} are {fitting}; got {cell.chunk}"
        return None

    def working_bytes(self, cell: Cell) -> int:
        """The states kept before every chunk; without them only a few.

        The kernels for states of more keys than a program holds need them all for a forward that keeps none, too.
        """
        chunks = cell.seqlen // (cell.chunk or 16)
        all_of_them = cell.materialize or (cell.pass_ == "infer" and cell.key_dim > WALKED_KEYS)
        kept = chunks if all_of_them else 4 * math.isqrt(chunks)
        return cell.batch * cell.heads * kept * cell.key_dim * cell.value_dim * _operand_bytes(cell)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from gla_kernels import chunk_gla, chunk_linear_attn

        function = chunk_gla if self.definition().gated else chunk_linear_attn
        return _output_of(function, inputs, materialize=bool(cell.materialize), chunk_size=cell.chunk)

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str:
        from gla_kernels.tuning import launch_of

        return launch_of(inputs["q"], inputs["v"], inputs.get("g"), bool(cell.materialize), cell.chunk)


def _operand_bytes(cell: Cell) -> int:
    return 2 if cell.dtype == "bf16" else 4


class GlaTriton(_Ours):
    """`gla_kernels.chunk_gla`."""

    name: ClassVar[str] = "gla-triton"
    op: ClassVar[str] = "gla"
    title: ClassVar[str] = "GLA, our Triton kernels"


class LinearTriton(_Ours):
    """`gla_kernels.chunk_linear_attn`."""

    name: ClassVar[str] = "linear-triton"
    op: ClassVar[str] = "linear"
    title: ClassVar[str] = "linear attention, our Triton kernels"


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

    def working_bytes(self, cell: Cell) -> int:
        """Some five float32 tensors of [T, 16, K] a head: every pair inside a subchunk, channel by channel."""
        return 5 * cell.batch * cell.seqlen * cell.heads * 16 * cell.key_dim * 4

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from gla_kernels import two_level_chunk_gla

        return _output_of(two_level_chunk_gla, inputs, chunk_size=cell.chunk or 64)


class GlaRecurrentTorch(Backend):
    """`gla_kernels.naive_recurrent_gla`."""

    name: ClassVar[str] = "gla-recurrent-torch"
    op: ClassVar[str] = "gla"
    title: ClassVar[str] = "GLA, token by token in PyTorch: the reference"

    def working_bytes(self, cell: Cell) -> int:
        """Three states a token, which autograd keeps."""
        wide = 8 if cell.dtype == "fp64" else 4
        return 3 * cell.batch * cell.seqlen * cell.heads * cell.key_dim * cell.value_dim * wide

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        from gla_kernels import naive_recurrent_gla

        return _output_of(naive_recurrent_gla, inputs)


class LinearTorch(Backend):
    """`gla_kernels.unaware_chunk_linear_attn`."""

    name: ClassVar[str] = "linear-torch"
    op: ClassVar[str] = "linear"
    title: ClassVar[str] = "linear attention, I/O-unaware chunks in PyTorch"
    options: ClassVar[frozenset[str]] = frozenset({"chunk"})

    def working_bytes(self, cell: Cell) -> int:
        """A copy of every input, the scores of every chunk twice, the state of every chunk three times."""
        tokens, C = cell.batch * cell.seqlen * cell.heads, cell.chunk or 64
        states = 3 * tokens // C * cell.key_dim * cell.value_dim * 4
        return self.definition().least_bytes(cell) + 2 * tokens * C * BYTES[cell.dtype] + states

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        from gla_kernels import unaware_chunk_linear_attn

        return _output_of(unaware_chunk_linear_attn, inputs, chunk_size=cell.chunk or 64)
