"""GLA and linear attention from fla-core, the public Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from glabench.backends.base import Backend, Requirement
from glabench.backends.gla import call_on
from glabench.ops import BYTES
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


class _Fla(Backend):
    """fla-core autotunes for minutes at the first call with a shape; this time is in `first_call_s`, in no sample."""

    requires = (Requirement("fla", "pip install 'glabench[fla]'"),)
    packages = ("fla-core", "triton")
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})
    features = frozenset({"packed", "state"})

    def working_bytes(self, cell: Cell) -> int:
        """States per chunk of 64 tokens and their gradients, and copies of the tensors between kernels."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        states = 2 * cell.seqlen // 64 * K * V * 4
        copies = 4 * cell.seqlen * (K + V) * max(4, BYTES[cell.dtype])
        return cell.batch * H * (states + copies)


class FlaGla(_Fla):
    """`fla.ops.gla.chunk_gla`."""

    name, op, title = "fla-gla", "gla", "GLA, fla-core's chunk_gla"

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        from fla.ops.gla import chunk_gla

        return call_on(chunk_gla, inputs, cell)


class FlaLinear(_Fla):
    """`fla.ops.linear_attn.fused_chunk_linear_attn`, without normalization."""

    name, op, title = "fla-linear", "linear", "linear attention, fla-core's fused_chunk_linear_attn"

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        from fla.ops.linear_attn import fused_chunk_linear_attn

        return call_on(fused_chunk_linear_attn, inputs, cell, normalize=False)
