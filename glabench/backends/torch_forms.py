"""GLA and linear attention in plain PyTorch: chunks in two levels or one, and token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import COMPILER, FORWARDS, Backend, Counts
from glabench.backends.compiling import compiled
from glabench.backends.gla import CHUNK, call_on
from glabench.ops import BYTES, GLA, LINEAR
from glabench.ops.base import wide
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


def padded_tokens(cell: Cell, chunk: int) -> int:
    """Tokens of all rows in whole chunks."""
    return cell.batch * -(-cell.seqlen // chunk) * chunk


def chunk_of(cell: Cell) -> int:
    """Tokens of a chunk: 64 unless the cell says another number."""
    return cell.get("chunk") or 64


def with_freed(cell: Cell, working: int) -> int:
    """Twice as much for a backward on a CPU, whose C library keeps blocks that were freed."""
    return 2 * working if cell.device == "cpu" and cell.has_backward else working


class _Chunked(Backend):
    """Chunks of any number of tokens, in PyTorch."""

    packages: ClassVar[tuple[str, ...]] = ("torch",)
    parameters = (CHUNK,)

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str:  # noqa: ARG002
        return f"C={chunk_of(cell)}"


class TwoLevels(_Chunked):
    """Chunks of whole subchunks of 16 tokens."""

    def limits(self, cell: Cell) -> str | None:
        chunk = cell.get("chunk")
        return f"chunk sizes are multiples of 16; got {chunk}" if chunk is not None and chunk % 16 else None


class GlaTorch(TwoLevels):
    """`gla_kernels.two_level_chunk_gla`."""

    name, op, title = "gla-torch", "gla", "GLA, two-level chunks in PyTorch"
    features = frozenset({"state", "prefix"})
    # Whether products have operands in the inputs' dtype.
    half: ClassVar[bool] = False

    def working_bytes(self, cell: Cell) -> int:
        """Six tensors of [T, 16, K] per head: all pairs of tokens in a subchunk, for every channel.

        Besides, copies of the rows, of those that each later subchunk reads, and of the states.
        """
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        C = chunk_of(cell)
        numbers = 6 * 16 * K + (8 + C // 16) * (K + V) + 3 * K * V // C
        return with_freed(cell, padded_tokens(cell, C) * H * numbers * BYTES[wide(cell)])

    def executes(self, cell: Cell) -> Counts:
        """States and products between subchunks, and pairs within them: a product of three numbers, and a sum."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        C = chunk_of(cell)
        tokens, times = padded_tokens(cell, C) * H, FORWARDS[cell.pass_]
        states = 4 * K * V * times
        if cell.has_backward and cell.seqlen <= C:  # nothing follows, and what is read is zero and has no gradient
            states -= 6 * K * V
        pairs, products = times * 4 * 16 * K, states + times * ((C - 16) * (K + V) + 2 * 16 * V)
        moved = times * tokens * 6 * 2 * 16 * K * BYTES[wide(cell)]
        scalar = pairs + (products if wide(cell) == "fp32" and not self.half else 0)
        return Counts(tokens * (pairs + products), GLA.moved_bytes(cell) + moved, tokens * scalar)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        return call_on(self.function(), inputs, cell, chunk_size=chunk_of(cell))

    def function(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The function that is called on the op's tensors."""
        from gla_kernels import two_level_chunk_gla

        return two_level_chunk_gla


class GlaTorchHalf(GlaTorch):
    """`gla_kernels.two_level_chunk_gla` with matrix products in the inputs' dtype (final paper, section 4.3)."""

    name, title = "gla-torch-half", "GLA, two-level chunks in PyTorch, half-precision products"
    dtypes = frozenset({"bf16", "fp16"})
    half = True

    def function(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return partial(super().function(), half=True)


class GlaTorchCompiled(GlaTorchHalf):
    """The same, compiled by torch."""

    name, title = "gla-torch-compiled", "GLA, two-level chunks with half-precision products, compiled by torch"
    packages = ("torch", "triton")
    early_modules = COMPILER
    devices = frozenset({"cuda"})

    def executes(self, cell: Cell) -> None:  # type: ignore[override]
        """Not known: what is kept on chip is torch's choice."""

    def function(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        return compiled(super().function(), dynamic=False)


class GlaRecurrentTorch(Backend):
    """`gla_kernels.naive_recurrent_gla`."""

    name, op, title = "gla-recurrent-torch", "gla", "GLA, token by token in PyTorch"
    packages = ("torch",)
    features = frozenset({"state", "prefix"})

    def working_bytes(self, cell: Cell) -> int:
        """Three states per token, kept by autograd."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        return 3 * cell.tokens * H * K * V * (8 if cell.dtype == "fp64" else 4)

    def executes(self, cell: Cell) -> Counts:
        """As the equation; every token's state is written three times and read four."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        moved = FORWARDS[cell.pass_] * cell.tokens * H * K * V * 7 * BYTES[wide(cell)]
        return Counts(GLA.flops(cell), GLA.moved_bytes(cell) + moved, GLA.flops(cell))

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        from gla_kernels import naive_recurrent_gla

        return call_on(naive_recurrent_gla, inputs, cell)


class LinearTorch(_Chunked):
    """`gla_kernels.unaware_chunk_linear_attn`."""

    name, op, title = "linear-torch", "linear", "linear attention, chunks in plain PyTorch"
    features = frozenset({"state", "prefix"})

    def working_bytes(self, cell: Cell) -> int:
        """Seven copies of the rows, two of every chunk's scores, four of every chunk's state."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        C = chunk_of(cell)
        per_token = (7 * (K + V) + 2 * C) * BYTES[cell.dtype] + 4 * K * V // C * BYTES[wide(cell)]
        return with_freed(cell, padded_tokens(cell, C) * H * per_token)

    def executes(self, cell: Cell) -> Counts:
        """States and all pairs of a chunk as products; rows, scores and states are written and read."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        C = chunk_of(cell)
        tokens = FORWARDS[cell.pass_] * padded_tokens(cell, C) * H
        flops = tokens * (4 * K * V + 2 * C * (K + V))
        moved = tokens * 4 * (C * BYTES[cell.dtype] + K * V // C * BYTES[wide(cell)])
        return Counts(flops, LINEAR.moved_bytes(cell) + moved, flops if cell.dtype == "fp32" else 0)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        from gla_kernels import unaware_chunk_linear_attn

        return call_on(unaware_chunk_linear_attn, inputs, cell, chunk_size=chunk_of(cell))
