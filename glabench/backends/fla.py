"""GLA and its kin, delta rules and RWKV-4 from fla-core, the public Triton kernels."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from glabench.backends.base import COMPILER, Backend, Counts, Part, Requirement
from glabench.backends.gla import call_on
from glabench.ops import BYTES, GLA, GLA_BOTH, Op
from glabench.ops.base import wide
from glabench.sweeps.model import Cell

if TYPE_CHECKING:
    from torch import Tensor


class _Fla(Backend):
    """fla-core autotunes for minutes at the first call with a shape; this time is in `first_call_s`, in no sample."""

    requires = (Requirement("fla", "pip install 'glabench[fla]'"),)
    packages = ("fla-core", "triton")
    early_modules = COMPILER
    has_own_code = False
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})
    features: ClassVar[frozenset[str]] = frozenset({"packed", "state", "prefix"})
    # The function's arguments besides the op's tensors.
    options: ClassVar[Mapping[str, object]] = {}

    @staticmethod
    @abstractmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The package's function, imported here."""

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        return call_on(self.function(), inputs, cell, **self.options)

    def more_packages(self, cell: Cell) -> tuple[str, ...]:  # noqa: ARG002
        """Those that fla-core runs in place of its own kernels, unless it is told not to."""
        return () if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1" else ("tilelang", "flash-qla", "flash-kda")

    def working_bytes(self, cell: Cell) -> int:
        """States per chunk of 64 tokens and their gradients, and copies of the tensors between kernels."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        states = 2 * cell.seqlen // 64 * K * V * 4
        copies = 4 * cell.seqlen * (K + V) * max(4, BYTES[cell.dtype])
        return cell.batch * H * (states + copies)


class FlaGla(_Fla):
    """`fla.ops.gla.chunk_gla`."""

    name, op, title = "fla-gla", "gla", "GLA, fla-core's chunk_gla"
    has_parts = True

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.gla import chunk_gla

        return chunk_gla  # type: ignore[no-any-return]

    def parts(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Part]:
        """Of a forward from no state: fla's four calls, each with what those before it made.

        Outputs are those of chunks and of states in one kernel. Each tensor counts once, and products in whole chunks.
        """
        if cell.has_backward or any(cell.get(name) is not None for name in self.features):
            return {}
        from fla.ops.common.chunk_h import chunk_fwd_h
        from fla.ops.gla.chunk import chunk_gla_fwd, chunk_gla_fwd_intra_gk, chunk_gla_fwd_o_gk
        from fla.ops.utils.constant import RCP_LN2
        from fla.ops.utils.cumsum import chunk_local_cumsum

        q, k, v, g = (inputs[name].detach() for name in ("q", "k", "v", "g"))
        C = min(64, max(16, 1 << (cell.seqlen - 1).bit_length()))  # as chunk_gla chooses it
        scale = q.shape[-1] ** -0.5
        sums, scores, states, *_ = chunk_gla_fwd(
            q=q, k=k, v=v, g=g, g_cumsum=None, scale=scale, initial_state=None, output_final_state=False, chunk_size=C
        )
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        tokens, size, of_gates, of_scores = cell.tokens * H, BYTES[cell.dtype], 4 * K, 4 * C
        of_states = K * V * size // C
        return {
            "within chunks": Part(
                lambda: chunk_gla_fwd_intra_gk(q=q, k=k, g=sums, scale=scale, chunk_size=C),
                Counts(tokens * 2 * C * K, tokens * (2 * K * size + of_gates + of_scores)),
            ),
            "across chunks": Part(
                lambda: chunk_fwd_h(k=k, v=v, gk=sums, chunk_size=C),
                Counts(tokens * 2 * K * V, tokens * ((K + V) * size + of_gates + of_states)),
            ),
            "outputs of both": Part(
                lambda: chunk_gla_fwd_o_gk(q=q, v=v, g=sums, A=scores, h=states, scale=scale, chunk_size=C),
                Counts(tokens * 2 * (K + C) * V, tokens * ((K + 2 * V) * size + of_gates + of_scores + of_states)),
            ),
            "sums of gates": Part(
                lambda: chunk_local_cumsum(g, C, scale=RCP_LN2),
                Counts(tokens * K, tokens * (BYTES[wide(cell)] * K + of_gates)),
            ),
        }

    def bind_step(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:
        """By fla's function for single tokens, whose final states are copied, since it writes them elsewhere."""
        go_on = call_on(FlaGlaRecurrent.function(), inputs, cell)

        def forward() -> Tensor:
            o, final = go_on()
            inputs["initial"].copy_(final)
            return o

        return forward


class FlaGlaRecurrent(_Fla):
    """`fla.ops.gla.fused_recurrent_gla`."""

    name, op, title = "fla-gla-recurrent", "gla", "GLA, fla-core's fused_recurrent_gla, token by token"
    equation: ClassVar[Op] = GLA

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.gla import fused_recurrent_gla

        return fused_recurrent_gla  # type: ignore[no-any-return]

    def executes(self, cell: Cell) -> Counts:
        """As the equation, none of it on tensor cores, with states on chip."""
        flops = self.equation.flops(cell)
        return Counts(flops, self.equation.moved_bytes(cell), flops)


class FlaBothRecurrent(FlaGlaRecurrent):
    """`fla.ops.gla.fused_recurrent_gla` with gates of values: fla's chunks do not take these."""

    name, op = "fla-both-recurrent", "gla-both"
    title = "gates of keys and values, fla-core's fused_recurrent_gla, token by token"
    equation = GLA_BOTH

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        return call_on(self.function(), inputs, cell, gv=inputs["gv"])


class FlaLinear(_Fla):
    """`fla.ops.linear_attn.fused_chunk_linear_attn`, without normalization."""

    name, op, title = "fla-linear", "linear", "linear attention, fla-core's fused_chunk_linear_attn"
    options: ClassVar[Mapping[str, object]] = {"normalize": False}

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.linear_attn import fused_chunk_linear_attn

        return fused_chunk_linear_attn  # type: ignore[no-any-return]


class FlaLinearChunk(FlaLinear):
    """`fla.ops.linear_attn.chunk_linear_attn`, the default of fla's layer: `chunk_simple_gla` without gates."""

    name, title = "fla-linear-chunk", "linear attention, fla-core's chunk_linear_attn"

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.linear_attn import chunk_linear_attn

        return chunk_linear_attn  # type: ignore[no-any-return]


class FlaSimpleGla(_Fla):
    """`fla.ops.simple_gla.chunk_simple_gla`. Its backward refuses Triton 3.4 to 3.7.0 on Hopper."""

    name, op, title = "fla-simple-gla", "simple-gla", "scalar gates, fla-core's chunk_simple_gla"

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.simple_gla import chunk_simple_gla

        return chunk_simple_gla  # type: ignore[no-any-return]


class FlaRetention(_Fla):
    """`fla.ops.retention.chunk_retention`."""

    name, op, title = "fla-retention", "retention", "fla-core's chunk_retention"

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.retention import chunk_retention

        return chunk_retention  # type: ignore[no-any-return]


class FlaLightning(_Fla):
    """`fla.ops.lightning_attn.chunk_lightning_attn`, with the decays of a model's first layer."""

    name, op, title = "fla-lightning", "lightning", "fla-core's chunk_lightning_attn"
    options: ClassVar[Mapping[str, object]] = {"layer_idx": 0, "num_layers": 1}

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.lightning_attn import chunk_lightning_attn

        return chunk_lightning_attn  # type: ignore[no-any-return]


class FlaRwkv4(_Fla):
    """`fla.ops.rwkv4.fused_recurrent_rwkv4`, token by token, in float32 as in RWKV's own code.

    It would keep states for the backward in the type of k. It keeps those of all tokens, three numbers per channel.
    """

    name, op, title = "fla-rwkv4", "rwkv4", "RWKV-4, fla-core's fused_recurrent_rwkv4, token by token"
    features = frozenset()

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.rwkv4 import fused_recurrent_rwkv4

        return fused_recurrent_rwkv4  # type: ignore[no-any-return]

    def working_bytes(self, cell: Cell) -> int:
        """States of all tokens twice, because they are joined with the first, and copies of four tensors."""
        (D,) = cell.sizes("inner")
        return (2 * 3 + 4) * cell.tokens * D * 4

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor]:  # noqa: ARG002
        import torch

        function, k, w = self.function(), inputs["k"], inputs["w"]
        empty = torch.zeros(k.shape[0], 3, 1, k.shape[2], dtype=w.dtype, device=k.device)
        empty[:, 2] = torch.finfo(w.dtype).min  # the exponent of sums that have no terms

        def forward() -> Tensor:
            v = inputs["v"]
            o, _ = function(w, inputs["u"], k.to(w.dtype), v.to(w.dtype), empty)
            return o.to(k.dtype)

        return forward


class _FlaDelta(_Fla):
    """A delta rule: no packed rows and states in this suite."""

    features = frozenset()

    def limits(self, cell: Cell) -> str | None:
        (K,) = cell.sizes("key_dim")
        return f"key head dims go up to 256; got {K}" if K > 256 else None


class FlaGatedDelta(_FlaDelta):
    """`fla.ops.gated_delta_rule.chunk_gated_delta_rule`. Its backward refuses Triton 3.4 to 3.7.0 on Hopper."""

    name, op, title = "fla-gated-delta", "gated-delta", "fla-core's chunk_gated_delta_rule"

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule  # type: ignore[no-any-return]


class FlaKda(_FlaDelta):
    """`fla.ops.kda.chunk_kda`."""

    name, op, title = "fla-kda", "kda", "fla-core's chunk_kda"

    @staticmethod
    def function() -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fla.ops.kda import chunk_kda

        return chunk_kda  # type: ignore[no-any-return]
