"""GLA and linear attention from fla-core, the public Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

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
    features: ClassVar[frozenset[str]] = frozenset({"packed", "state"})
    # Below `fla.ops`, and the function's arguments besides the op's tensors.
    function: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        module, _, name = self.function.rpartition(".")
        return call_on(getattr(import_module(f"fla.ops.{module}"), name), inputs, cell, **self.options)

    def working_bytes(self, cell: Cell) -> int:
        """States per chunk of 64 tokens and their gradients, and copies of the tensors between kernels."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        states = 2 * cell.seqlen // 64 * K * V * 4
        copies = 4 * cell.seqlen * (K + V) * max(4, BYTES[cell.dtype])
        return cell.batch * H * (states + copies)


class FlaGla(_Fla):
    """`fla.ops.gla.chunk_gla`."""

    name, op, title, function = "fla-gla", "gla", "GLA, fla-core's chunk_gla", "gla.chunk_gla"


class FlaGlaRecurrent(_Fla):
    """`fla.ops.gla.fused_recurrent_gla`."""

    name, op, title = "fla-gla-recurrent", "gla", "GLA, fla-core's fused_recurrent_gla, token by token"
    function = "gla.fused_recurrent_gla"


class FlaLinear(_Fla):
    """`fla.ops.linear_attn.fused_chunk_linear_attn`, without normalization."""

    name, op, title = "fla-linear", "linear", "linear attention, fla-core's fused_chunk_linear_attn"
    function = "linear_attn.fused_chunk_linear_attn"
    options: ClassVar[Mapping[str, object]] = {"normalize": False}


class FlaSimpleGla(_Fla):
    """`fla.ops.simple_gla.chunk_simple_gla`. Its backward refuses Triton 3.4 to 3.7.0 on Hopper."""

    name, op, title = "fla-simple-gla", "simple-gla", "scalar gates, fla-core's chunk_simple_gla"
    function = "simple_gla.chunk_simple_gla"


class FlaRetention(_Fla):
    """`fla.ops.retention.chunk_retention`."""

    name, op, title, function = "fla-retention", "retention", "fla-core's chunk_retention", "retention.chunk_retention"


class FlaLightning(_Fla):
    """`fla.ops.lightning_attn.chunk_lightning_attn`, with the decays of a model's first layer."""

    name, op, title = "fla-lightning", "lightning", "fla-core's chunk_lightning_attn"
    function = "lightning_attn.chunk_lightning_attn"
    options: ClassVar[Mapping[str, object]] = {"layer_idx": 0, "num_layers": 1}


class _FlaDelta(_Fla):
    """A delta rule: no packed rows and states in this suite."""

    features = frozenset()

    def limits(self, cell: Cell) -> str | None:
        (K,) = cell.sizes("key_dim")
        return f"key head dims go up to 256; got {K}" if K > 256 else None


class FlaGatedDelta(_FlaDelta):
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`. Its backward refuses Triton 3.4 to 3.7.0 on Hopper."""

    name, op, title = "fla-gated-delta", "gated-delta", "fla-core's chunk_gated_delta_rule"
    function = "gated_delta_rule.chunk_gated_delta_rule"


class FlaKda(_FlaDelta):
    """`fla.ops.kda.chunk_kda`."""

    name, op, title, function = "fla-kda", "kda", "fla-core's chunk_kda", "kda.chunk_kda"
