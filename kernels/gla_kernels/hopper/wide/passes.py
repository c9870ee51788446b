"""The plain form for wide heads on Hopper: which kernels a pass launches, over pieces of sequences and blocks of keys.

"To walk the state" is to carry it, or its gradient, from chunk to chunk in registers. Which kernels run depends on K:

- Up to 128, one kernel walks the state and computes o: `wide_forward`, `head_forward` or `specialized_forward`.
- Up to 256, one kernel does so in both directions, from operands that another kernel has brought into their frames.
- Above, one kernel walks the states and stores them, and another reads them.

With K and V up to 128 and enough heads, one kernel computes all gradients. `pieces.py` cuts sequences in time.
"""

from dataclasses import dataclass

import torch

from gla_kernels.hopper.wide.launches import (
    NO_PARKING,
    Direction,
    Frames,
    compute_borders,
    launch_backward,
    launch_forward,
    launch_gradients,
    launch_readout,
    launch_recurrence,
    launch_walk,
    make_frames,
    parking_of,
)
from gla_kernels.hopper.wide.pieces import (
    Run,
    carries,
    choose_pieces,
    cut,
    first_run,
    groups,
    is_whole,
    one_backward,
    parks_dstates,
    runs,
    scratch_slots,
    sequences_of,
    slices,
    whole,
)
from gla_kernels.launching.buffers import Flags, Gradients, Inputs
from gla_kernels.launching.call import Call, decided_once
from gla_kernels.limits import WIDE_KEY_BLOCK


def fused(call: Call) -> bool:
    """Whether a program holds all key columns, so that one kernel computes the states and what is read from them."""
    return call.plan.forward.block_k >= call.K


def walks(call: Call) -> bool:
    """Whether that kernel is `wide_walk`, which needs frames."""
    return fused(call) and call.K > WIDE_KEY_BLOCK


@decided_once
def forward_clears(call: Call, checkpoints: bool) -> bool:
    """Whether a forward, with checkpoints or not, sets its flags to 0 itself.

    `compute_borders` does, if it comes first. Before that of a rest (`runs`), other sequences have raised theirs, and
    `wide_frames` raises some, too.
    """
    if not call.gated or walks(call):
        return False
    if not checkpoints or fused(call):
        return not is_whole(call, choose_pieces(call))
    return not carries(call)


def backward_clears(call: Call) -> bool:
    """The same for a backward from all states."""
    return forward_clears(call, False)


@dataclass(frozen=True)
class _Forward:
    """What all launches of one forward have in common."""

    call: Call
    inputs: Inputs
    flags: Flags
    o: torch.Tensor
    frames: Frames | None

    def run(
        self, run: Run, initial: torch.Tensor | None, final: torch.Tensor | None, states: torch.Tensor | None,
        checkpoints: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Computes o, the final states of a run of pieces from their initial states, and the states of their chunks."""
        call, inputs = self.call, self.inputs
        if self.frames is not None:
            launch_walk(
                call, inputs, self.frames, inputs.v, run, self.o, self.flags.rows,
                reverse=False, initial=initial, end=final, states=states, checkpoints=checkpoints,
            )  # fmt: skip
            return
        if fused(call):
            launch_forward(call, inputs, self.flags, run, self.o, initial, final, states, checkpoints)
            return
        # With several blocks of key columns, states go through memory even if they are not kept.
        if states is None:
            slots = run.count * run.chunks if run.scratch else call.slots(1)
            states = inputs.q.new_empty(call.state_shape(slots))
        way = Direction(inputs.k, inputs.v, reverse=False)
        launch_recurrence(call, inputs, way, run, initial=initial, end=final, states=states, raised=self.flags.rows)
        launch_readout(call, inputs, way, inputs.q, run, states, self.o, self.flags, self.flags.rows)


def _of_run(call: Call, run: Run, states: torch.Tensor | None) -> torch.Tensor | None:
    """Those of the states of all sequences that are of the run's."""
    return None if states is None else states[sequences_of(call, run)]


def run_forward(
    call: Call,
    inputs: Inputs,
    flags: Flags,
    *,
    o: torch.Tensor,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    states: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
) -> None:
    """Launches the plain form's forward: o, and those of the other outputs that are not None."""
    frames = None
    if walks(call):
        q, k = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.q, inputs.k))
        frames = make_frames(call, inputs, q, k, flags.rows, marks=flags.marks, reverse=False)
    forward = _Forward(call, inputs, flags, o, frames)
    forwards = Direction(inputs.k, inputs.v, reverse=False)
    if checkpoints is None:
        for run in runs(call, kept=states is not None):
            before, after = _of_run(call, run, initial), _of_run(call, run, final)
            if not is_whole(call, run):
                borders = call.new_states(inputs.q, run.count)
                compute_borders(call, inputs, forwards, run, borders, before, after, flags.uncleared)
                before, after = borders, None
            forward.run(run, before, after, states)
        return
    if fused(call) and is_whole(call, choose_pieces(call)):
        forward.run(whole(call), initial, final, None, checkpoints)
        return
    if not fused(call) and carries(call):
        slots = checkpoints.unflatten(0, (call.sequences, -1))
        slots[:, 0] = 0 if initial is None else initial
        states_after = [*slots.unbind(1)[1:], call.new_states(inputs.q) if final is None else final]
        for run, state in zip(slices(call), states_after, strict=True):
            forward.run(run, slots[:, run.base], state, None)
        return
    run = cut(call, call.checkpoint_chunks)
    compute_borders(call, inputs, forwards, run, checkpoints, initial, final, flags.uncleared)
    for part in (run,) if fused(call) else groups(call):
        forward.run(part, checkpoints[part.base : part.base + part.count], None, None)


def carries_gradient(call: Call) -> bool:
    """Whether a backward from checkpoints hands the gradient of the state from slice to slice, in memory."""
    if call.plan.family != "wide" or not carries(call):
        return False
    return not parks_dstates(call) or one_backward(call, first_run(call).count)


def run_backward(
    call: Call,
    inputs: Inputs,
    do: torch.Tensor,
    kept: torch.Tensor,
    flags: Flags,
    failed: torch.Tensor,
    gradients: Gradients,
    *,
    dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None,
    materialized: bool,
) -> None:
    """Launches the plain form's backward. `kept`: states before every chunk if `materialized`, else checkpoints.

    `dinitial` is to be zeros if `carries_gradient` and there is no `dfinal`.
    """
    forward = Direction(inputs.k, inputs.v, reverse=False)
    reverse = Direction(inputs.q, do, reverse=True)
    first = runs(call)[0] if materialized else first_run(call)
    one_kernel = one_backward(call, first.count)
    parking = parking_of(gradients) if parks_dstates(call) and not one_kernel else NO_PARKING
    frames = excesses = None
    if call.gated and not one_kernel:
        excesses = inputs.q.new_empty((call.slots(1), call.H, call.K), dtype=torch.float32)
    if walks(call):
        # Frames are in the memory of dq and dk, which are written after the last read of a chunk's frames.
        frames = make_frames(call, inputs, gradients.dq, gradients.dk, failed, excesses=excesses, reverse=True)

    def walk_back(
        run: Run, after: torch.Tensor | None, before: torch.Tensor | None, states: torch.Tensor,
        dstates: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Computes the gradients of a run's states, and dv unless `launch_gradients` does, or all gradients."""
        if one_kernel:
            launch_backward(call, inputs, do, run, states, after, before, flags.rows, failed, gradients)
            return
        if frames is not None:
            launch_walk(
                call, inputs, frames, do, run, gradients.dv, failed,
                reverse=True, initial=after, end=before, states=dstates,
            )  # fmt: skip
            return
        launch_recurrence(
            call, inputs, reverse, run, initial=after, end=before, states=dstates, raised=failed,
            parking=parking, excesses=excesses,
        )  # fmt: skip
        if dstates is not None and not fused(call):
            launch_readout(call, inputs, reverse, inputs.k, run, dstates, gradients.dv, flags, failed, excesses)

    def read_out(run: Run, states: torch.Tensor, dstates: torch.Tensor | None) -> None:
        """Computes the gradients of a run's inputs, unless `walk_back` has."""
        if not one_kernel:
            launch_gradients(
                call, inputs, do, run, states, dstates, excesses, flags.rows, failed, gradients, parking["parked"]
            )  # fmt: skip

    def new_dstates(chunks: int) -> torch.Tensor | None:
        """A buffer for the gradients of so many states; None if they need none."""
        return None if one_kernel or parking["parked"] is not None else inputs.q.new_empty(call.state_shape(chunks))

    if materialized:
        dstates = new_dstates(len(kept))
        for run in runs(call):
            after, before = _of_run(call, run, dfinal), _of_run(call, run, dinitial)
            if not is_whole(call, run):
                borders = call.new_states(inputs.q, run.count)
                cleared = failed if backward_clears(call) else None
                compute_borders(call, inputs, reverse, run, borders, after, before, cleared)
                after, before = borders, None
            walk_back(run, after, before, kept, dstates)
        read_out(whole(call), kept, dstates)
        return
    carried = carries(call)
    if not carried:
        run = cut(call, call.checkpoint_chunks)
        borders = call.new_states(inputs.q, run.count)
        compute_borders(call, inputs, reverse, run, borders, dfinal, dinitial)
    states = inputs.q.new_empty(call.state_shape(scratch_slots(call)))
    dstates = new_dstates(len(states))
    if carried and not carries_gradient(call):
        # There is room for the gradients of all states at once, so only the states are recomputed slice by slice.
        walk_back(whole(call), dfinal, dinitial, states, None)
        slots = kept.unflatten(0, (call.sequences, -1))
        for run in reversed(list(slices(call))):
            launch_recurrence(call, inputs, forward, run, initial=slots[:, run.base], states=states)
            read_out(run, states, None)
        return
    if carried:
        # Each slice's gradient after it is replaced by that before it. The last one's is never missing, so that all
        # slices use the same variant of the kernel.
        before = call.new_states(inputs.q, zero=dfinal is None) if dinitial is None else dinitial
        after = before if dfinal is None else dfinal
        slots = kept.unflatten(0, (call.sequences, -1))
        for run in reversed(list(slices(call))):
            launch_recurrence(call, inputs, forward, run, initial=slots[:, run.base], states=states)
            walk_back(run, after, before, states, dstates)
            read_out(run, states, dstates)
            after = before
        return
    for run in groups(call):
        pieces = slice(run.base, run.base + run.count)
        launch_recurrence(call, inputs, forward, run, initial=kept[pieces], states=states)
        walk_back(run, borders[pieces], None, states, dstates)
        read_out(run, states, dstates)
