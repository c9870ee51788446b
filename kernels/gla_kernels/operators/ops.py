# ruff: noqa: ARG001
"""The kernels as PyTorch operators, with fake implementations and autograd, for what traces or changes calls.

`gla_kernels::chunk_forward` returns what the user gets (o and the final states) and what `gla_kernels::chunk_backward`
needs (the kept states, and the flags or the sums of a gate per head). An output that was not requested is an empty
tensor. `plan` is the text of a launch plan; if None, the plan comes from the table in `plans.py`. Eager calls go around
them: see `eager.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from gla_kernels.launching.call import make_call
from gla_kernels.operators import passes


def _present(x: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(0, dtype=dtype) if x is None else x


def _all_present(outputs: passes.Outputs, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    o, final, kept, flags = outputs
    return o, _present(final, q, torch.float32), _present(kept, q), flags


def _chunk_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, *others: Any
) -> tuple[torch.Tensor, ...]:
    """Returns o, the final states, the kept states or checkpoints, and the flags or sums; empty if not requested."""
    outputs = passes.forward(q, k, v, g, *others)
    if g is None:
        outputs[3].zero_()  # nothing reads it, but checks of operators compare all outputs
    return _all_present(outputs, q)


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, scale: float, output_final_state: bool, keep: int, chunk_size: int | None,
    plan: str | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
    return _all_present(passes.forward_outputs(call, q, v, output_final_state, keep), q)


def _chunk_backward(q: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk, dv, dg and the gradient of the initial states; the last two are empty if not needed."""
    dq, dk, dv, dg, dinitial = passes.backward(q, *others)
    return dq, dk, dv, _present(dg, q, torch.float32), _present(dinitial, q, torch.float32)


def _fake_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    do: torch.Tensor, dfinal: torch.Tensor | None, kept: torch.Tensor, flags: torch.Tensor, scale: float,
    needs_dinitial: bool, needs_dg: bool, keep: int, chunk_size: int | None, plan: str | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        _present(None, q, torch.float32) if g is None or not needs_dg else g.new_empty(g.shape),
        call.new_states(q) if needs_dinitial else _present(None, q, torch.float32),
    )


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """What a forward saves for `gradients`."""
    q, k, v, g, _, cu_seqlens, scale, _, keep, chunk_size, plan = inputs
    _, _, kept, flags = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(kept, flags)
    ctx.save_for_backward(q, k, v, g, cu_seqlens, kept, flags)
    ctx.settings = scale, keep, chunk_size, plan


def backward_settings(ctx: Any) -> tuple[Any, ...]:
    """The options of `chunk_backward`, from a forward's and from which of its tensors need a gradient."""
    scale, keep, chunk_size, plan = ctx.settings
    _, _, _, needs_dg, needs_dinitial, *_ = ctx.needs_input_grad
    return scale, needs_dinitial, needs_dg, keep, chunk_size, plan


def gradients(
    run: Callable[..., tuple[torch.Tensor | None, ...]],
    saved: tuple[Any, ...],
    settings: tuple[Any, ...],
    do: torch.Tensor | None,
    dfinal: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the forward's arguments, computed by `run`, from what a forward has saved."""
    q, k, v, g, cu_seqlens, kept, flags = saved
    _, needs_dinitial, needs_dg, *_ = settings
    do = torch.zeros_like(v) if do is None else do
    dfinal = None if dfinal is None else dfinal.contiguous()
    dq, dk, dv, dg, dinitial = run(q, k, v, g, cu_seqlens, do, dfinal, kept, flags, *settings)
    return (
        dq, dk, dv, dg if needs_dg else None, dinitial if needs_dinitial else None, None, None, None, None, None, None,
    )  # fmt: skip


def _backward(
    ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None, *_: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    return gradients(chunk_backward, ctx.saved_tensors, backward_settings(ctx), do, dfinal)


def refuse(ctx: Any, *grads: torch.Tensor | None) -> None:
    """The backward of the backward. Raises RuntimeError."""
    raise RuntimeError("the gradients of chunk_gla and chunk_linear_attn cannot be differentiated again")


# Defined by hand: the wrappers of `custom_op` slow down every call and import torch's compiler.
_LIBRARY = library.Library("gla_kernels", "DEF")
_LIBRARY.define(
    "chunk_forward(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, float scale,"
    " bool output_final_state, int keep, int? chunk_size, str? plan) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "chunk_backward(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? cu_seqlens, Tensor do, Tensor? dfinal,"
    " Tensor kept, Tensor flags, float scale, bool needs_dinitial, bool needs_dg, int keep, int? chunk_size, str? plan)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):  # on a CPU: Triton's interpreter
    _LIBRARY.impl("chunk_forward", _chunk_forward, _device)
    _LIBRARY.impl("chunk_backward", _chunk_backward, _device)
library.register_fake("gla_kernels::chunk_forward", _fake_forward, lib=_LIBRARY)
library.register_fake("gla_kernels::chunk_backward", _fake_backward, lib=_LIBRARY)
library.register_autograd("gla_kernels::chunk_forward", _backward, setup_context=setup, lib=_LIBRARY)
library.register_autograd("gla_kernels::chunk_backward", refuse, lib=_LIBRARY)

chunk_forward = torch.ops.gla_kernels.chunk_forward.default
chunk_backward = torch.ops.gla_kernels.chunk_backward.default
