# ruff: noqa: ARG001
"""The kernels as PyTorch operators, with fake implementations and autograd.

`gla_kernels::chunk_forward` returns what the user gets (o and the final states) and what `gla_kernels::chunk_backward`
needs (the kept states and the flags). An output that was not requested is an empty tensor. `plan` is the text of a
launch plan; if None, the plan comes from the table in `launch.py`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import library

from gla_kernels import wide, wide_pieces
from gla_kernels.call import (
    Call,
    Flags,
    Gradients,
    Inputs,
    flag_buffer,
    make_call,
    on_meta,
    readable,
    row_flags,
    run_backward,
    run_forward,
    run_strong_backward,
)
from gla_kernels.rehearsal import rehearsing, unrehearsed

# What a forward keeps for the backward. Integers, because an operator's schema has no enums. Checkpoints (a state every
# few chunks) save memory and cost recomputed states.
KEEP_NOTHING, KEEP_STATES, KEEP_CHECKPOINTS = 0, 1, 2


def _absent(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(0, dtype=dtype)


def _chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    output_final_state: bool,
    keep: int,
    chunk_size: int | None,
    plan: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns o, the final states, the kept states or checkpoints, and the flags; empty tensors if not requested."""
    call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens)
    with torch.cuda.device_of(q):
        if unrehearsed(call, "forward", _form(call), initial_state is None, output_final_state, keep):
            _rehearse_forward(call, inputs, initial_state, output_final_state, keep)
        return _launch_forward(call, inputs, initial_state, output_final_state, keep)


def _form(call: Call) -> tuple[object, ...]:
    """The part of a call's sizes that decides which kernels it launches."""
    return wide_pieces.form(call) if call.plan.family == "wide" else ()


def _launch_forward(
    call: Call, inputs: Inputs, initial_state: torch.Tensor | None, output_final_state: bool, keep: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the plain and the exact kernels of the forward, and returns their outputs."""
    o, final, kept, buffer = _forward_outputs(call, inputs.q, inputs.v, output_final_state, keep)
    flags = Flags.of(call, buffer)
    outputs: dict[str, Any] = {
        "o": o,
        "initial": initial_state,
        "final": final if output_final_state else None,
        "states": kept if keep == KEEP_STATES else None,
        "checkpoints": kept if keep == KEEP_CHECKPOINTS else None,
    }
    if call.plan.family == "wide":
        wide.run_forward(call, inputs, flags, **outputs)
    run_forward(call, inputs, flags, **outputs)
    return o, final, kept, buffer


def _rehearse_forward(
    call: Call, inputs: Inputs, initial_state: torch.Tensor | None, output_final_state: bool, keep: int
) -> None:
    """Compiles the kernels of a forward and, if it keeps anything, those of a backward without `dfinal`."""
    with rehearsing(call, inputs.q.device) as rehearsal:
        like, initial = inputs.on_meta(), on_meta(initial_state)
        o, _, kept, flags = _launch_forward(rehearsal, like, initial, output_final_state, keep)
        has_initial = initial is not None
        if keep != KEEP_NOTHING and unrehearsed(call, "backward", _form(call), True, has_initial, keep):
            _launch_backward(rehearsal, like, torch.empty_like(o), None, kept, flags, has_initial, keep)


def _forward_outputs(
    call: Call, q: torch.Tensor, v: torch.Tensor, output_final_state: bool, keep: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    final = kept = None
    if output_final_state:
        final = call.new_states(q)
    if keep != KEEP_NOTHING:
        materialize = keep == KEEP_STATES
        kept = q.new_empty(call.kept_shape(materialize), dtype=call.kept_dtype(materialize))
    return (
        v.new_empty(v.shape),
        _absent(q, torch.float32) if final is None else final,
        _absent(q) if kept is None else kept,
        flag_buffer(call, q),
    )


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, scale: float, output_final_state: bool, keep: int, chunk_size: int | None,
    plan: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
    return _forward_outputs(call, q, v, output_final_state, keep)


def _chunk_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    kept: torch.Tensor,
    flags: torch.Tensor,
    scale: float,
    has_initial: bool,
    keep: int,
    chunk_size: int | None,
    plan: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dq, dk, dv, dg and the gradient of the initial states; the last two are empty if not needed."""
    call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens)
    do = readable(call, do)
    with torch.cuda.device_of(q):
        if unrehearsed(call, "backward", _form(call), dfinal is None, has_initial, keep):
            with rehearsing(call, q.device) as rehearsal:
                like, after = inputs.on_meta(), on_meta(dfinal)
                _launch_backward(
                    rehearsal, like, do.to("meta"), after, kept.to("meta"), flags.to("meta"), has_initial, keep
                )
        return _launch_backward(call, inputs, do, dfinal, kept, flags, has_initial, keep)


def _launch_backward(
    call: Call, inputs: Inputs, do: torch.Tensor, dfinal: torch.Tensor | None, kept: torch.Tensor,
    buffer: torch.Tensor, has_initial: bool, keep: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launches all kernels of the backward, recomputing states from checkpoints if needed. `buffer`: see `Flags`."""
    q = inputs.q
    gradients = Gradients.empty(call, inputs)
    flags, failed = Flags.of(call, buffer), row_flags(call, q)
    dinitial = call.new_states(q) if has_initial or call.gated else None
    materialized = keep == KEEP_STATES
    if call.plan.family == "wide":
        wide.run_backward(
            call, inputs, do, kept, flags, failed, gradients, dfinal=dfinal, dinitial=dinitial,
            materialized=materialized,
        )  # fmt: skip
        if not materialized:
            # The exact kernels recompute the states of heads that either pass has flagged.
            failed = torch.maximum(flags.rows, failed)
            flags = replace(flags, rows=failed)
    if materialized:
        run_backward(call, inputs, do, kept, flags, failed, gradients, dfinal=dfinal, dinitial=dinitial)
    elif call.gated or call.plan.family != "wide":
        count = call.every
        if call.plan.family == "wide":
            # As many chunks at a time as the plain form had scratch memory for, which is free again.
            count *= max(1, wide_pieces.scratch_slots(call) // (call.sequences * call.every))
        scratch = q.new_empty(call.state_shape(call.sequences * count), dtype=call.operands.dtype)
        dafter = dfinal
        for first in reversed(range(0, call.chunks, count)):
            piece: dict[str, Any] = {"first": first, "count": count, "from_checkpoint": True}
            run_forward(call, inputs, flags, initial=kept, states=scratch, **piece)
            dbefore = call.new_states(q) if first > 0 else dinitial
            run_backward(call, inputs, do, scratch, flags, failed, gradients, dfinal=dafter, dinitial=dbefore, **piece)
            dafter = dbefore
    if call.gated:
        run_strong_backward(call, inputs, do, flags, failed, gradients)
    dq, dk, dv, dg = gradients.summed(inputs)
    return (
        dq,
        dk,
        dv,
        _absent(q, torch.float32) if dg is None else dg,
        dinitial if dinitial is not None and has_initial else _absent(q, torch.float32),
    )


def _fake_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    do: torch.Tensor, dfinal: torch.Tensor | None, kept: torch.Tensor, flags: torch.Tensor, scale: float,
    has_initial: bool, keep: int, chunk_size: int | None,
    plan: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        _absent(q, torch.float32) if g is None else g.new_empty(g.shape),
        call.new_states(q) if has_initial else _absent(q, torch.float32),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, g, initial_state, cu_seqlens, scale, _, keep, chunk_size, plan = inputs
    _, _, kept, flags = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(kept, flags)
    ctx.save_for_backward(q, k, v, g, cu_seqlens, kept, flags)
    ctx.settings = scale, initial_state is not None, keep, chunk_size, plan


def _backward(
    ctx: Any, do: torch.Tensor | None, dfinal: torch.Tensor | None, *_: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, g, cu_seqlens, kept, flags = ctx.saved_tensors
    scale, has_initial, keep, chunk_size, plan = ctx.settings
    do = torch.zeros_like(v) if do is None else do
    dfinal = None if dfinal is None else dfinal.contiguous()
    dq, dk, dv, dg, dinitial = chunk_backward(
        q, k, v, g, cu_seqlens, do, dfinal, kept, flags, scale, has_initial, keep, chunk_size, plan
    )
    return (
        dq, dk, dv, None if g is None else dg, dinitial if has_initial else None, None, None, None, None, None, None,
    )  # fmt: skip


def _refuse(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise RuntimeError("the gradients of chunk_gla and chunk_linear_attn cannot be differentiated again")


# Defined by hand: the wrappers of `custom_op` slow down every call and import torch's compiler.
_LIBRARY = library.Library("gla_kernels", "DEF")
_LIBRARY.define(
    "chunk_forward(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, float scale,"
    " bool output_final_state, int keep, int? chunk_size, str? plan) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "chunk_backward(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? cu_seqlens, Tensor do, Tensor? dfinal,"
    " Tensor kept, Tensor flags, float scale, bool has_initial, int keep, int? chunk_size,"
    " str? plan)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):  # on a CPU: Triton's interpreter
    _LIBRARY.impl("chunk_forward", _chunk_forward, _device)
    _LIBRARY.impl("chunk_backward", _chunk_backward, _device)
library.register_fake("gla_kernels::chunk_forward", _fake_forward, lib=_LIBRARY)
library.register_fake("gla_kernels::chunk_backward", _fake_backward, lib=_LIBRARY)
library.register_autograd("gla_kernels::chunk_forward", _backward, setup_context=_setup, lib=_LIBRARY)
library.register_autograd("gla_kernels::chunk_backward", _refuse, lib=_LIBRARY)

chunk_forward = torch.ops.gla_kernels.chunk_forward.default
chunk_backward = torch.ops.gla_kernels.chunk_backward.default
