"""One call's forward and backward: what is allocated, rehearsed and launched. Outputs not asked for are None."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gla_kernels.hopper.narrow import launches as narrow
from gla_kernels.hopper.wide import passes as wide
from gla_kernels.hopper.wide import pieces as wide_pieces
from gla_kernels.launching.buffers import (
    Flags,
    Gradients,
    Inputs,
    failure_flags,
    flag_buffer,
    on_meta,
    output_parts,
    readable,
    settled,
    sum_of_parts,
)
from gla_kernels.launching.call import Call, make_call
from gla_kernels.operators.launches import (
    run_backward,
    run_exact_backward_from_checkpoints,
    run_forward,
    run_strong_backward,
)
from gla_kernels.operators.rehearsal import rehearsing, unrehearsed
from gla_kernels.portable.launches import (
    clear_tails,
    run_plain_backward,
    run_plain_forward,
    run_recurrence,
    sum_head_gates,
)

# What a forward keeps for the backward. Integers, because an operator's schema has no enums. Checkpoints (a state every
# few chunks) save memory and cost recomputed states.
KEEP_NOTHING, KEEP_STATES, KEEP_CHECKPOINTS = 0, 1, 2

# o, the final states, the kept states or checkpoints, and the flags or, with a gate per head, the sums of gates.
Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]

_FAMILIES = {"wide": wide, "hopper": narrow}  # those that may set flags to 0 themselves
_NO_CHANGE = nullcontext()


def device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """A context with x's device as the current one. It nearly always is, and then this costs nothing."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NO_CHANGE
    return torch.cuda.device_of(x)


def keeps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial_state: torch.Tensor | None,
    materialize: bool, gv: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """What a forward has to keep for the backward of these tensors. Of gv, whatever is no tensor is refused later."""
    trains = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (g is not None and g.requires_grad)
        or (initial_state is not None and initial_state.requires_grad)
        or (isinstance(gv, torch.Tensor) and gv.requires_grad)
    )
    if not trains:
        return KEEP_NOTHING
    return KEEP_STATES if materialize else KEEP_CHECKPOINTS


def forward(
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
) -> Outputs:
    """Runs a forward. `plan` is the text of a launch plan; if None, the plan comes from the table in `plans.py`."""
    initial_state = settled(initial_state)
    call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens)
    with device_of(q):
        if unrehearsed(call, "forward", initial_state is None, output_final_state, keep, call.is_short):
            needs = _probable_needs(q, k, v, g, initial_state)
            _rehearse_forward(call, inputs, initial_state, output_final_state, keep, needs)
        return launch_forward(call, inputs, initial_state, output_final_state, keep)


def launch_forward(
    call: Call, inputs: Inputs, initial_state: torch.Tensor | None, output_final_state: bool, keep: int
) -> Outputs:
    """Launches the kernels of the forward, and returns its outputs."""
    if keep == KEEP_NOTHING and call.is_short:
        return _launch_recurrence(call, inputs, initial_state, output_final_state)
    family = _FAMILIES.get(call.plan.family)
    clears = family is not None and family.forward_clears(call, keep == KEEP_CHECKPOINTS)
    o, final, kept, buffer = forward_outputs(
        call, inputs.q, inputs.v, output_final_state, keep, parts=call.key_parts, zero=not clears
    )
    flags = Flags.of(call, buffer, uncleared=clears)
    if call.head_gated:
        inputs.sums = buffer.view(call.sums_dtype)
        if not _makes_sums(call, keep):
            sum_head_gates(call, inputs)
    outputs: dict[str, Any] = {
        "o": o,
        "initial": initial_state,
        "final": final,
        "states": kept if keep == KEEP_STATES else None,
        "checkpoints": kept if keep == KEEP_CHECKPOINTS else None,
    }
    if call.plan.family == "wide":
        wide.run_forward(call, inputs, flags, **outputs)
    run_forward(call, inputs, flags, **outputs)
    clear_tails(call, inputs, o)
    return sum_of_parts(o, inputs.v), final, kept, buffer


def _makes_sums(call: Call, keep: int) -> bool:
    """Whether the first kernel of a forward makes the sums of a gate per head."""
    if call.plan.family == "wide":
        return wide_pieces.sums_made(call) > 0
    return call.plan.family == "hopper" and narrow.sums_made(call, keep == KEEP_CHECKPOINTS) > 0


def _launch_recurrence(
    call: Call, inputs: Inputs, initial_state: torch.Tensor | None, output_final_state: bool
) -> Outputs:
    """The forward of few tokens in one launch. Its flags stay uninitialised: nothing reads them."""
    o = output_parts(inputs.v, 1)
    final = call.new_states(inputs.q) if output_final_state else None
    run_recurrence(call, inputs, o, initial_state, final)
    return o, final, None, flag_buffer(call, inputs.q, zero=False)


def _rehearse_forward(
    call: Call, inputs: Inputs, initial_state: torch.Tensor | None, output_final_state: bool, keep: int,
    needs: tuple[bool, bool],
) -> None:  # fmt: skip
    """Compiles the kernels of a forward and, if it keeps anything, those of a backward without `dfinal`.

    `needs`: whether that is likely to compute the gradients of the initial state and of g.
    """
    with rehearsing(call, inputs.q.device) as rehearsal:
        like, initial = inputs.on_meta(), on_meta(initial_state)
        o, _, kept, flags = launch_forward(rehearsal, like, initial, output_final_state, keep)
        if kept is not None and unrehearsed(call, "backward", True, *needs, keep):
            launch_backward(rehearsal, like, torch.empty_like(o), None, kept, flags, *needs, keep)


def _probable_needs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, initial_state: torch.Tensor | None
) -> tuple[bool, bool]:
    """Whether the gradients of the initial state and of g will be needed: those that autograd has to compute.

    If it has to compute none at all, as in a compiled graph, of all that are given.
    """
    unknown = not any(x is not None and x.requires_grad for x in (q, k, v, g, initial_state))
    dinitial, dg = (x is not None and (unknown or x.requires_grad) for x in (initial_state, g))
    return dinitial, dg


def forward_outputs(
    call: Call, q: torch.Tensor, v: torch.Tensor, output_final_state: bool, keep: int, parts: int = 1,
    zero: bool = True,
) -> Outputs:  # fmt: skip
    """Allocates a forward's outputs, o in `parts` partial sums. q and v give the device and the dtypes.

    `zero`: flags are 0.
    """
    final = kept = None
    if output_final_state:
        final = call.new_states(q)
    if keep != KEEP_NOTHING:
        materialize = keep == KEEP_STATES
        kept = q.new_empty(call.kept_shape(materialize), dtype=call.kept_dtype(materialize))
    return output_parts(v, parts), final, kept, flag_buffer(call, q, zero=zero)


def backward(
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
    needs_dinitial: bool,
    needs_dg: bool,
    keep: int,
    chunk_size: int | None,
    plan: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Runs a backward: dq, dk, dv, and those of dg and the gradient of the initial states that are needed."""
    call = make_call(q, v, g, cu_seqlens, scale, chunk_size, plan)
    inputs = Inputs.of(call, q, k, v, g, cu_seqlens)
    do, dfinal, kept, flags = readable(call, do), settled(dfinal), kept.contiguous(), flags.contiguous()
    with device_of(q):
        if unrehearsed(call, "backward", dfinal is None, needs_dinitial, needs_dg, keep):
            with rehearsing(call, q.device) as rehearsal:
                like, after, needs = inputs.on_meta(), on_meta(dfinal), (needs_dinitial, needs_dg)
                launch_backward(
                    rehearsal, like, do.to("meta"), after, kept.to("meta"), flags.to("meta"), *needs, keep
                )  # fmt: skip
        return launch_backward(call, inputs, do, dfinal, kept, flags, needs_dinitial, needs_dg, keep)


def launch_backward(
    call: Call, inputs: Inputs, do: torch.Tensor, dfinal: torch.Tensor | None, kept: torch.Tensor,
    buffer: torch.Tensor, needs_dinitial: bool, needs_dg: bool, keep: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Launches all kernels of the backward, recomputing states from checkpoints if needed.

    `buffer`: what `flag_buffer` has made for the forward.
    """
    if call.head_gated:
        inputs.sums = buffer.view(call.sums_dtype)
    gradients = Gradients.empty(call, inputs, needs_dg)
    flags = Flags.of(call, buffer)
    materialized = keep == KEEP_STATES
    # From checkpoints, one exact kernel computes what either pass has flagged; it needs no states of the plain form.
    family = _FAMILIES.get(call.plan.family)
    clears = family is not None and materialized and family.backward_clears(call)
    failed = failure_flags(call, flags, after_forward=not materialized, zero=not clears)
    # With gates, the exact kernel passes the state's gradient on in it.
    zero = dfinal is None and not materialized and wide.carries_gradient(call)
    dinitial = call.new_states(inputs.q, zero=zero) if needs_dinitial or call.gated else None
    states: dict[str, Any] = {"dfinal": dfinal, "dinitial": dinitial}
    if call.plan.family == "wide":
        wide.run_backward(
            call, inputs, do, kept, flags, failed, gradients, materialized=materialized, **states
        )  # fmt: skip
    elif not materialized and call.plan.family == "hopper":
        narrow.run_backward_from_checkpoints(call, inputs, do, kept, flags, failed, gradients, **states)
    elif not materialized:
        _run_plain_backward_from_checkpoints(call, inputs, do, kept, flags, failed, gradients, **states)
    if materialized:
        run_backward(call, inputs, do, kept, flags, failed, gradients, **states)
    elif call.gated:
        run_exact_backward_from_checkpoints(
            call, inputs, do, kept, failed, gradients, room=_scratch_states(call), **states
        )  # fmt: skip
    if call.gated:
        run_strong_backward(call, inputs, do, flags, failed, gradients)
    clear_tails(call, inputs, gradients.dq, gradients.dk, gradients.dv, gradients.dg)
    return *gradients.summed(inputs), dinitial if needs_dinitial else None


def _scratch_states(call: Call) -> int:
    """States that the plain form has in memory at the same time in a backward from checkpoints."""
    if call.plan.family == "wide":
        chunks = wide_pieces.scratch_slots(call)
    elif groups := narrow.recomputed_groups(call):
        chunks = groups[0].count * groups[0].chunks
    else:
        chunks = call.sequences * call.checkpoint_chunks
    return chunks * call.H


def _run_plain_backward_from_checkpoints(
    call: Call, inputs: Inputs, do: torch.Tensor, checkpoints: torch.Tensor, flags: Flags, failed: torch.Tensor,
    gradients: Gradients, *, dfinal: torch.Tensor | None, dinitial: torch.Tensor | None,
) -> None:  # fmt: skip
    """The portable plain form's backward, which recomputes the states slice by slice."""
    count = call.checkpoint_chunks
    scratch = inputs.q.new_empty(call.state_shape(call.sequences * count), dtype=call.operands.dtype)
    # A program reads its part of the gradient after a slice before it writes that of the one before, in its place.
    before = call.new_states(inputs.q) if dinitial is None and call.chunks > count else dinitial
    after = dfinal
    for first_chunk in reversed(range(0, call.chunks, count)):
        piece: dict[str, Any] = {"first_chunk": first_chunk, "count": count, "from_checkpoint": True}
        run_plain_forward(call, inputs, flags, initial=checkpoints, states=scratch, **piece)
        run_plain_backward(
            call, inputs, do, scratch, flags, failed, gradients, dfinal=after, dinitial=before, **piece
        )  # fmt: skip
        after = before
