# ruff: noqa: ARG001
"""The calls with gates of keys and of values as PyTorch operators, with fake implementations and autograd."""

from typing import Any

import torch
from torch import library

from gla_kernels.launching.buffers import rows, settled
from gla_kernels.operators.ops import refuse
from gla_kernels.operators.passes import device_of
from gla_kernels.value_gated.launches import Tensors, ValueGated


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor,
    cu_seqlens: torch.Tensor | None, scale: float,
) -> ValueGated:  # fmt: skip
    gates = None if g is None else rows(g)
    return ValueGated(Tensors(rows(q), rows(k), rows(v), gates, rows(gv), settled(cu_seqlens)), scale)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor,
    initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None, scale: float, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns o, the final states and, if they are kept, the states before every chunk, else an empty tensor."""
    with device_of(q):
        start = settled(initial)
        o, final, states = _call(q, k, v, g, gv, cu_seqlens, scale).forward(start)
    return o, final, states if keep else states.new_empty(0)


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor,
    initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None, scale: float, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    call = _call(q, k, v, g, gv, cu_seqlens, scale)
    states = call.new_states(call.dtype, call.tensors.slots) if keep else q.new_empty(0, dtype=call.dtype)
    return v.new_empty(v.shape), call.new_states(torch.float32), states


def _backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor,
    initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None, do: torch.Tensor, dfinal: torch.Tensor | None,
    states: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Returns dq, dk, dv, dg, dgv and the gradient of the initial states.

    Without g, dg is empty. `states`: kept ones, or an empty tensor.
    """
    with device_of(q):
        call = _call(q, k, v, g, gv, cu_seqlens, scale)
        if not states.numel():
            start = settled(initial)
            states, _ = call.walk(call.tensors.k, call.tensors.v, start, reverse=False)
        return call.backward(rows(do), settled(dfinal), states.contiguous())


def _fake_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, gv: torch.Tensor,
    initial: torch.Tensor | None, cu_seqlens: torch.Tensor | None, do: torch.Tensor, dfinal: torch.Tensor | None,
    states: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    gates = q.new_empty(0, dtype=torch.float32) if g is None else g.new_empty(g.shape)
    made = (x.new_empty(x.shape) for x in (q, k, v))
    return *made, gates, gv.new_empty(gv.shape), _call(q, k, v, g, gv, cu_seqlens, scale).new_states(torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *gated, initial, cu_seqlens, scale, keep = inputs
    states = output[2]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(states)
    # Kept states hold the initial ones, so a caller may overwrite those before the backward pass.
    ctx.save_for_backward(*gated, None if keep else initial, cu_seqlens, states)
    ctx.scale = scale


def _gradients(
    ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None, _: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    *tensors, states = ctx.saved_tensors
    do = torch.zeros_like(tensors[2]) if do is None else do
    dq, dk, dv, dg, dgv, dinitial = backward(*tensors, do, dfinal, states, ctx.scale)
    found = (dq, dk, dv, dg, dgv, dinitial, None, None, None)
    return tuple(x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=True))


_LIBRARY = library.Library("gla_kernels", "FRAGMENT")
_LIBRARY.define(
    "value_gated_forward(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor gv, Tensor? initial, Tensor? cu_seqlens,"
    " float scale, bool keep) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "value_gated_backward(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor gv, Tensor? initial, Tensor? cu_seqlens,"
    " Tensor do, Tensor? dfinal, Tensor states, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):  # on a CPU: Triton's interpreter
    _LIBRARY.impl("value_gated_forward", _forward, _device)
    _LIBRARY.impl("value_gated_backward", _backward, _device)
library.register_fake("gla_kernels::value_gated_forward", _fake_forward, lib=_LIBRARY)
library.register_fake("gla_kernels::value_gated_backward", _fake_backward, lib=_LIBRARY)
library.register_autograd("gla_kernels::value_gated_forward", _gradients, setup_context=_setup, lib=_LIBRARY)
library.register_autograd("gla_kernels::value_gated_backward", refuse, lib=_LIBRARY)

forward = torch.ops.gla_kernels.value_gated_forward.default
backward = torch.ops.gla_kernels.value_gated_backward.default
