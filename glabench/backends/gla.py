"""GLA, linear attention and their kin: our Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, ClassVar

from gla_kernels.limits import MAX_KEY_DIM, MAX_VALUE_DIM, WALKED_KEYS, fitting_chunks

from glabench.backends.base import Backend, Counts, Requirement
from glabench.ops import BUILTIN
from glabench.ops.base import torch_dtype
from glabench.ops.simple_gla import LIGHTNING, RETENTION, Retention
from glabench.ops.softmax import returns_states
from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import Parameter, aliased, integers
from glabench.sweeps.words import MATERIALIZE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TRITON = Requirement("triton", "pip install triton")
CHUNK = integers("chunk", "Chunk length C, or auto.", auto=True)
KEPT = aliased(
    "materialize", "What the forward keeps for the backward: all chunk states, some, or nothing.",
    ("states", "checkpoints", "nothing"), MATERIALIZE, for_training=True,
)  # fmt: skip
# Why a backend refuses them.
NO_CHECKPOINTS = "keeps the states of all chunks, or nothing; got checkpoints"


def call_on(
    function: Callable[..., tuple[Tensor, Tensor | None]], inputs: Mapping[str, Tensor], cell: Cell, **options: object
) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """A call of `chunk_gla`, or of a function with its arguments, on q, k, v and, if the op has them, g and beta."""
    tensors = [inputs[name] for name in ("q", "k", "v", "g", "beta") if name in inputs]
    if "initial" in inputs:
        options["initial_state"] = inputs["initial"]
    if "cu_seqlens" in inputs:
        options["cu_seqlens"] = inputs["cu_seqlens"]
    if returns_states(cell):
        return lambda: function(*tensors, output_final_state=True, **options)  # type: ignore[return-value]
    return lambda: function(*tensors, **options)[0]


class _Ours(Backend):
    """Limits and arguments that our kernels share for all ops."""

    parameters: ClassVar[tuple[Parameter, ...]] = (CHUNK, KEPT)
    requires = (_TRITON,)
    packages = ("triton",)
    devices = frozenset({"cuda"})
    dtypes = frozenset({"bf16", "fp16", "fp32"})
    features = frozenset({"packed", "state", "prefix"})

    def limits(self, cell: Cell) -> str | None:
        K, V = cell.sizes("key_dim", "value_dim")
        if K > MAX_KEY_DIM or V > MAX_VALUE_DIM:
            return f"head dims go up to K={MAX_KEY_DIM} V={MAX_VALUE_DIM}; got K={K} V={V}"
        fitting, chunk = fitting_chunks(K, _operand_bytes(cell)), cell.get("chunk")
        if chunk is not None and chunk not in fitting:
            return f"chunk sizes at K={K} in {cell.dtype} are {fitting}; got {chunk}"
        return None

    def working_bytes(self, cell: Cell) -> int:
        """The state before every chunk, or only some of them if not all are kept.

        If K exceeds the keys that one program can hold, a forward without gradients also needs all states.
        """
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        chunks = cell.seqlen // (cell.get("chunk") or 16)
        all_of_them = cell.get("materialize") == "states" or (cell.pass_ == "infer" and K > WALKED_KEYS)
        kept = chunks if all_of_them else 4 * math.isqrt(chunks)
        return cell.batch * H * kept * K * V * _operand_bytes(cell)

    def bind(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        return call_on(self.function(inputs), inputs, cell, materialize=_kept(cell), chunk_size=cell.get("chunk"))

    def function(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The function that is called on the op's tensors."""
        from gla_kernels import chunk_gla, chunk_linear_attn

        return chunk_gla if "g" in inputs else chunk_linear_attn

    def bind_step(self, inputs: Mapping[str, Tensor], cell: Cell) -> Callable[[], Tensor] | None:  # noqa: ARG002
        step = partial(
            self.recurrent(inputs), initial_state=inputs["initial"], output_final_state=True, inplace_final_state=True
        )
        return lambda: step(inputs["q"], inputs["k"], inputs["v"])[0]

    def recurrent(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The function of q, k and v that goes token by token."""
        from gla_kernels import fused_recurrent_gla

        return partial(fused_recurrent_gla, gk=inputs.get("g"), gv=inputs.get("gv"))

    def executes(self, cell: Cell) -> Counts | None:
        """The sums of `kernel_counts`: products on tensor cores, under mild gates."""
        import torch

        op = next((each for each in BUILTIN if each.name == self.op), None)
        if op is None:  # of a plugin, which may call our kernels otherwise
            return None
        like = {  # tensors of these shapes without their memory
            name: torch.empty(1, dtype=torch_dtype(spec.dtype or cell.dtype), device=cell.device).expand(spec.shape)
            for name, spec in op.inputs(cell).items()
        }
        known = self.kernel_counts(like, cell)
        if known is None or not any(each.flops for each in known.values()):  # short calls go token by token
            return None
        return Counts(sum(each.flops for each in known.values()), sum(each.bytes for each in known.values()))

    def kernel_counts(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Counts] | None:
        """Only if all states are kept, or nothing is needed: other calls go over their inputs in slices."""
        if cell.pass_ != "infer" and _kept(cell) != "states":
            return None
        from gla_kernels.inspection.traffic import kernel_work

        known = kernel_work(
            inputs["q"], inputs["k"], inputs["v"], inputs.get("g"), initial_state=inputs.get("initial"),
            output_final_state=returns_states(cell), cu_seqlens=inputs.get("cu_seqlens"),
            chunk_size=cell.get("chunk"), passes=cell.pass_,
        )  # fmt: skip
        return {name: Counts(work.flops, work.bytes) for name, work in known.items()}

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str | None:
        from gla_kernels.tuning import launch_of

        if cell.get("packed"):
            return None
        return launch_of(inputs["q"], inputs["v"], inputs.get("g"), _kept(cell) == "states", cell.get("chunk"))


def _kept(cell: Cell) -> str:
    """What a forward keeps; in a forward without gradients, which has no such parameter, it does not matter."""
    return str(cell.get("materialize") or "checkpoints")


def _operand_bytes(cell: Cell) -> int:
    return 2 if cell.dtype == "bf16" else 4


class GlaTriton(_Ours):
    """`gla_kernels.chunk_gla`."""

    name, op, title = "gla-triton", "gla", "GLA, our Triton kernels"


class LinearTriton(_Ours):
    """`gla_kernels.chunk_linear_attn`."""

    name, op, title = "linear-triton", "linear", "linear attention, our Triton kernels"


class SimpleGlaTriton(_Ours):
    """`gla_kernels.chunk_simple_gla`."""

    name, op, title = "simple-gla-triton", "simple-gla", "scalar gates, our Triton kernels"

    def function(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:  # noqa: ARG002
        from gla_kernels import chunk_simple_gla

        return chunk_simple_gla

    def recurrent(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        from gla_kernels import fused_recurrent_simple_gla

        return partial(fused_recurrent_simple_gla, g=inputs["g"])


@cache
def _made_decays(op: Retention, heads: int, device: torch.device) -> Tensor:
    import torch

    return op.gates(torch.arange(heads, device=device, dtype=torch.float32))


def _decays(op: Retention, q: Tensor) -> Tensor:
    """An op's constant gates of q's heads, [H]. They are kept, so that no step of a model makes them again."""
    return _made_decays(op, q.shape[2], q.device)


class _Constant(_Ours):
    """Gates that are no inputs."""

    def kernel_counts(self, inputs: Mapping[str, Tensor], cell: Cell) -> Mapping[str, Counts] | None:
        import torch

        q = inputs["q"]
        gates = torch.empty(q.shape[2], dtype=torch.float32, device="meta").expand(q.shape[:3])
        return super().kernel_counts({**inputs, "g": gates}, cell)


class RetentionTriton(_Constant):
    """`gla_kernels.chunk_retention`."""

    name, op, title = "retention-triton", "retention", "retention, our Triton kernels"

    def function(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:  # noqa: ARG002
        from gla_kernels import chunk_retention

        return chunk_retention

    def recurrent(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """With gates that are there already: `fused_recurrent_retention` makes them anew in a CUDA graph."""
        from gla_kernels import fused_recurrent_simple_gla

        return partial(fused_recurrent_simple_gla, g_gamma=_decays(RETENTION, inputs["q"]))


class LightningTriton(_Constant):
    """`gla_kernels.chunk_simple_gla` with constant gates."""

    name, op, title = "lightning-triton", "lightning", "Lightning Attention-2, our Triton kernels"

    def function(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        from gla_kernels import chunk_simple_gla

        return partial(chunk_simple_gla, g_gamma=_decays(LIGHTNING, inputs["q"]))

    def recurrent(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        from gla_kernels import fused_recurrent_simple_gla

        return partial(fused_recurrent_simple_gla, g_gamma=_decays(LIGHTNING, inputs["q"]))


class _ValueGated(_Ours):
    """`gla_kernels.chunk_gla` with gates of values."""

    parameters: ClassVar[tuple[Parameter, ...]] = (KEPT,)

    def limits(self, cell: Cell) -> str | None:
        return NO_CHECKPOINTS if cell.get("materialize") == "checkpoints" else super().limits(cell)

    def working_bytes(self, cell: Cell) -> int:
        """The state before every chunk of 32 tokens and, of a backward, its gradient after it."""
        H, K, V = cell.sizes("heads", "key_dim", "value_dim")
        chunks = cell.batch * -(-cell.seqlen // 32)
        return (2 if cell.has_backward else 1) * chunks * H * K * V * _operand_bytes(cell)

    def function(self, inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
        from gla_kernels import chunk_gla

        gated = partial(chunk_gla, gv=inputs["gv"])
        return gated if "g" in inputs else partial(gated, g=None)

    def kernel_counts(self, inputs: Mapping[str, Tensor], cell: Cell) -> None:
        """Not known: programs read the other side's columns again and again."""

    def launch(self, inputs: Mapping[str, Tensor], cell: Cell) -> str | None:  # noqa: ARG002
        return "value gated C=32"


class GlaBothTriton(_ValueGated):
    """Gates of keys and of values."""

    name, op, title = "gla-both-triton", "gla-both", "GLA with gates of keys and values, our Triton kernels"


class GlaValuesTriton(_ValueGated):
    """Gates of values alone."""

    name, op, title = "gla-values-triton", "gla-values", "gates of values alone, our Triton kernels"
