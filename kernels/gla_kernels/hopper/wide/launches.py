"""The launches of the plain form for wide heads on Hopper, over pieces of sequences and blocks of key columns.

"To walk the state" is to carry it, or its gradient, from chunk to chunk in registers. Which kernels run depends on K:

- Up to 128, one kernel walks the state and computes o.
- Up to 256, one kernel does so in both directions, from operands that another kernel has brought into their frames.
- Above, one kernel walks the states and stores them, and another reads them.

With K and V up to 128 and enough heads, one kernel computes all gradients. `wide/pieces.py` cuts sequences in time.
"""

from dataclasses import dataclass

import torch

from gla_kernels.hopper.wide.pieces import (
    Run,
    carries,
    choose_pieces,
    cut,
    first_run,
    forward_tile,
    groups,
    is_whole,
    one_backward,
    parks_dstates,
    programs_a_piece,
    recurrence_tile,
    scratch_slots,
    slices,
    whole,
)
from gla_kernels.launching.buffers import Flags, Gradients, Inputs, named_strides
from gla_kernels.launching.call import Call, arranged
from gla_kernels.launching.plans import WIDE_BACKWARD, wide_frames_tile, wide_readout_tile
from gla_kernels.limits import WIDE_KEY_BLOCK
from gla_kernels.portable.launches import scan


@dataclass(frozen=True)
class _Direction:
    """The inputs of a recurrence: k and v forward, q and do in reverse."""

    x: torch.Tensor
    y: torch.Tensor
    reverse: bool


def _steps(**states: torch.Tensor | None) -> dict[str, int]:
    """Elements from one piece's state x to the next piece's, x_p. Checkpoints can be views, with more than a state."""
    return {f"{name}_p": 0 if x is None else x.stride(0) for name, x in states.items()}


def _parking(gradients: Gradients) -> dict[str, torch.Tensor | None]:
    """The memory of dq, dk and dg, as kernels take it that park a state there; without dg, as much other memory."""
    dq, dg = gradients.dq, gradients.dg
    room = dq.new_empty((*dq.shape[:3], 2 * dq.shape[3])) if dg is None else dg.view(dq.dtype)
    return {"dq": dq, "dk": gradients.dk, "parked": room}


_NO_PARKING: dict[str, torch.Tensor | None] = dict.fromkeys(("dq", "dk", "parked"))


def _recurrence(
    call: Call, inputs: Inputs, way: _Direction, run: Run, *, initial: torch.Tensor | None = None,
    end: torch.Tensor | None = None, decays: torch.Tensor | None = None, states: torch.Tensor | None = None,
    raised: torch.Tensor | None = None, excesses: torch.Tensor | None = None,
    parking: dict[str, torch.Tensor | None] = _NO_PARKING,
) -> None:  # fmt: skip
    """`parking`: memory that is to hold the states, instead of `states`."""
    from gla_kernels.hopper.wide.recurrence import wide_recurrence

    arguments = call.numbers | run.arguments(call) | parking | _steps(initial=initial, end=end)
    arguments |= named_strides(x=way.x, y=way.y, g=inputs.g) | {
        "x": way.x, "y": way.y, "g": inputs.g, "initial": initial, "end": end, "decays": decays, "excesses": excesses,
        "states": states, "raised": raised, "cu_seqlens": inputs.cu_seqlens,
    }  # fmt: skip
    switches = {
        "REVERSE": way.reverse,
        "HAS_INITIAL": initial is not None,
        "STORE_END": end is not None,
        "STORE_DECAYS": decays is not None,
        "STORE_EXCESS": excesses is not None,
        "STORE_STATES": states is not None,
        "SCRATCH": run.scratch,
        "PARK": parking["parked"] is not None,
        "CHECK": call.gated and raised is not None,
    }
    tile = recurrence_tile(call, run.count)
    programs = (run.count * programs_a_piece(call, tile),)
    call.launch(wide_recurrence, tile, programs, arranged(wide_recurrence, arguments), switches)


def _borders(
    call: Call, inputs: Inputs, way: _Direction, run: Run, borders: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fills `borders` with the state before each piece (in reverse its gradient after it), and `final`."""
    local = torch.empty_like(borders)
    decays = borders.new_empty(borders.shape[:3]) if call.gated else None
    _recurrence(call, inputs, way, run, end=local, decays=decays)
    scan(call, inputs, run.chunks, local, decays, borders, initial, final, reverse=way.reverse)


def _readout(
    call: Call, inputs: Inputs, way: _Direction, other: torch.Tensor, run: Run, states: torch.Tensor,
    out: torch.Tensor, flags: Flags, raised: torch.Tensor, excesses: torch.Tensor | None = None,
) -> None:  # fmt: skip
    from gla_kernels.hopper.wide.readout import wide_readout

    run, chunks = run.of_chunks(call)
    # What the recurrence calls x and y is y and z here, because x reads the states out.
    tensors = {"x": other, "y": way.x, "z": way.y, "g": inputs.g}
    arguments = call.numbers | run.arguments(call) | tensors | named_strides(**tensors) | {
        "states": states, "out": out, "flags": flags.rows, "raised": raised, "marks": flags.marks,
        "excesses": excesses, "cu_seqlens": inputs.cu_seqlens,
    }  # fmt: skip
    programs, switches = (chunks * call.H,), {"REVERSE": way.reverse}
    call.launch(wide_readout, wide_readout_tile(call.K), programs, arranged(wide_readout, arguments), switches)


def _gradients(
    call: Call, inputs: Inputs, do: torch.Tensor, run: Run, states: torch.Tensor, dstates: torch.Tensor | None,
    excesses: torch.Tensor | None, flags: torch.Tensor, failed: torch.Tensor, gradients: Gradients,
    parked: torch.Tensor | None,
) -> None:  # fmt: skip
    from gla_kernels.hopper.wide.gradients import wide_gradients

    run, chunks = run.of_chunks(call)
    arguments = inputs.arguments | gradients.arguments | call.numbers | run.arguments(call) | named_strides(do=do) | {
        "do": do, "states": states, "dstates": dstates, "parked": parked, "excesses": excesses, "flags": flags,
        "failed": failed,
    }  # fmt: skip
    tile = call.plan.backward
    blocks_k = (call.K + tile.block_k - 1) // tile.block_k
    switches = gradients.switches | {"PARKED": parked is not None}
    programs = (chunks * call.H * blocks_k,)
    call.launch(wide_gradients, tile, programs, arranged(wide_gradients, arguments), switches, early=False)


def _backward(
    call: Call, inputs: Inputs, do: torch.Tensor, run: Run, states: torch.Tensor, after: torch.Tensor | None,
    before: torch.Tensor | None, flags: torch.Tensor, failed: torch.Tensor, gradients: Gradients,
) -> None:  # fmt: skip
    from gla_kernels.hopper.wide.backward import wide_backward

    arguments = inputs.arguments | gradients.arguments | call.numbers | run.arguments(call) | named_strides(do=do)
    arguments |= _steps(after=after, before=before) | {
        "do": do, "states": states, "after": after, "before": before, "flags": flags, "failed": failed
    }  # fmt: skip
    switches = {"HAS_AFTER": after is not None, "STORE_BEFORE": before is not None, "SCRATCH": run.scratch}
    switches |= gradients.switches
    programs = (run.count * call.H,)
    call.launch(wide_backward, WIDE_BACKWARD, programs, arranged(wide_backward, arguments), switches)


def _forward(
    call: Call, inputs: Inputs, flags: Flags, run: Run, o: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None, states: torch.Tensor | None, checkpoints: torch.Tensor | None = None,
) -> None:  # fmt: skip
    from gla_kernels.hopper.wide.forward import wide_forward

    arguments = inputs.arguments | call.numbers | run.arguments(call) | _steps(initial=initial, final=final) | {
        "o": o, "initial": initial, "final": final, "states": states, "checkpoints": checkpoints,
        "flags": flags.rows, "marks": flags.marks, "checkpoint_chunks": call.checkpoint_chunks,
    }  # fmt: skip
    switches = {
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "STORE_STATES": states is not None,
        "STORE_CHECKPOINTS": checkpoints is not None,
    }
    tile = forward_tile(call, run.count)
    programs = (run.count * programs_a_piece(call, tile),)
    call.launch(wide_forward, tile, programs, arranged(wide_forward, arguments), switches)


@dataclass(frozen=True)
class _Frames:
    """What `wide_frames` computes from q, k and g for `wide_walk`: Q~, K~, P and 2^r (None without gates)."""

    q: torch.Tensor
    k: torch.Tensor
    scores: torch.Tensor
    frame_factors: torch.Tensor | None


def _make_frames(
    call: Call, inputs: Inputs, q: torch.Tensor, k: torch.Tensor, raised: torch.Tensor, *,
    marks: torch.Tensor | None = None, excesses: torch.Tensor | None = None, reverse: bool,
) -> _Frames:  # fmt: skip
    """Computes the frames of all chunks, and marks or, in reverse, excesses; writes Q~ and K~ to `q` and `k`."""
    from gla_kernels.hopper.wide.frames import wide_frames

    chunks = call.slots(1)
    scores = inputs.q.new_empty((*inputs.q.shape[:3], call.plan.chunk_size))
    frame_factors = inputs.q.new_empty((chunks, call.H, call.K), dtype=torch.float32) if call.gated else None
    tensors = {"q": inputs.q, "k": inputs.k, "g": inputs.g}
    arguments = call.numbers | tensors | named_strides(**tensors) | {
        "framed_q": q, "framed_k": k, "scores": scores, "frame_factors": frame_factors, "excesses": excesses,
        "raised": raised, "marks": marks, "cu_seqlens": inputs.cu_seqlens, "N": call.sequences,
    }  # fmt: skip
    programs, switches = (chunks * call.H,), {"REVERSE": reverse}
    call.launch(wide_frames, wide_frames_tile(call.gated), programs, arranged(wide_frames, arguments), switches)
    return _Frames(q, k, scores, frame_factors)


def _walk(
    call: Call, inputs: Inputs, frames: _Frames, z: torch.Tensor, run: Run, out: torch.Tensor, raised: torch.Tensor,
    *, reverse: bool, initial: torch.Tensor | None, end: torch.Tensor | None, states: torch.Tensor | None,
    checkpoints: torch.Tensor | None = None,
) -> None:  # fmt: skip
    from gla_kernels.hopper.wide.walk import wide_walk

    x, y = (frames.k, frames.q) if reverse else (frames.q, frames.k)
    arguments = call.numbers | run.arguments(call) | named_strides(z=z) | _steps(initial=initial, end=end) | {
        "x": x, "y": y, "z": z, "scores": frames.scores, "frame_factors": frames.frame_factors, "out": out,
        "initial": initial, "end": end, "states": states, "checkpoints": checkpoints, "raised": raised,
        "cu_seqlens": inputs.cu_seqlens, "checkpoint_chunks": call.checkpoint_chunks,
    }  # fmt: skip
    switches = {
        "REVERSE": reverse,
        "HAS_INITIAL": initial is not None,
        "STORE_END": end is not None,
        "STORE_STATES": states is not None,
        "STORE_CHECKPOINTS": checkpoints is not None,
        "SCRATCH": run.scratch,
    }
    tile = forward_tile(call, run.count)
    programs = (run.count * programs_a_piece(call, tile),)
    call.launch(wide_walk, tile, programs, arranged(wide_walk, arguments), switches)


def fused(call: Call) -> bool:
    """Whether a program holds all key columns, so that one kernel computes the states and what is read from them."""
    return call.plan.forward.block_k >= call.K


def walks(call: Call) -> bool:
    """Whether that kernel is `wide_walk`, which needs frames."""
    return fused(call) and call.K > WIDE_KEY_BLOCK


@dataclass(frozen=True)
class _Forward:
    """What all launches of one forward have in common."""

    call: Call
    inputs: Inputs
    flags: Flags
    o: torch.Tensor
    frames: _Frames | None

    def run(
        self, run: Run, initial: torch.Tensor | None, final: torch.Tensor | None, states: torch.Tensor | None,
        checkpoints: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Computes o, the final states of a run of pieces from their initial states, and the states of their chunks."""
        call, inputs = self.call, self.inputs
        if self.frames is not None:
            _walk(
                call, inputs, self.frames, inputs.v, run, self.o, self.flags.rows,
                reverse=False, initial=initial, end=final, states=states, checkpoints=checkpoints,
            )  # fmt: skip
            return
        if fused(call):
            _forward(call, inputs, self.flags, run, self.o, initial, final, states, checkpoints)
            return
        # With several blocks of key columns, states go through memory even if they are not kept.
        if states is None:
            slots = run.count * run.chunks if run.scratch else call.slots(1)
            states = inputs.q.new_empty(call.state_shape(slots))
        way = _Direction(inputs.k, inputs.v, reverse=False)
        _recurrence(call, inputs, way, run, initial=initial, end=final, states=states, raised=self.flags.rows)
        _readout(call, inputs, way, inputs.q, run, states, self.o, self.flags, self.flags.rows)


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
        frames = _make_frames(call, inputs, q, k, flags.rows, marks=flags.marks, reverse=False)
    forward = _Forward(call, inputs, flags, o, frames)
    if checkpoints is not None and fused(call) and is_whole(call, choose_pieces(call)):
        forward.run(whole(call), initial, final, None, checkpoints)
        return
    if checkpoints is not None and not fused(call) and carries(call):
        slots = checkpoints.unflatten(0, (call.sequences, -1))
        slots[:, 0] = 0 if initial is None else initial
        after = [*slots.unbind(1)[1:], call.new_states(inputs.q) if final is None else final]
        for run, state in zip(slices(call), after, strict=True):
            forward.run(run, slots[:, run.base], state, None)
        return
    run = choose_pieces(call) if checkpoints is None else cut(call, call.checkpoint_chunks)
    if checkpoints is None and is_whole(call, run):
        forward.run(run, initial, final, states)
        return
    borders = call.new_states(inputs.q, run.count) if checkpoints is None else checkpoints
    _borders(call, inputs, _Direction(inputs.k, inputs.v, reverse=False), run, borders, initial, final)
    if checkpoints is None or fused(call):
        forward.run(run, borders, None, states)
        return
    for group in groups(call):
        forward.run(group, borders[group.base : group.base + group.count], None, None)


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
    forward = _Direction(inputs.k, inputs.v, reverse=False)
    reverse = _Direction(inputs.q, do, reverse=True)
    run = choose_pieces(call) if materialized else cut(call, call.checkpoint_chunks)
    one_kernel = one_backward(call, run.count if materialized else first_run(call).count)
    parking = _parking(gradients) if parks_dstates(call) and not one_kernel else _NO_PARKING
    frames = excesses = None
    if call.gated and not one_kernel:
        excesses = inputs.q.new_empty((call.slots(1), call.H, call.K), dtype=torch.float32)
    if walks(call):
        # Frames are in the memory of dq and dk, which are written after the last read of a chunk's frames.
        frames = _make_frames(call, inputs, gradients.dq, gradients.dk, failed, excesses=excesses, reverse=True)

    def walk_back(
        run: Run, after: torch.Tensor | None, before: torch.Tensor | None, dstates: torch.Tensor | None
    ) -> None:
        """Computes the gradients of a run's states, and dv unless `_gradients` does."""
        if frames is not None:
            _walk(
                call, inputs, frames, do, run, gradients.dv, failed,
                reverse=True, initial=after, end=before, states=dstates,
            )  # fmt: skip
            return
        _recurrence(
            call, inputs, reverse, run, initial=after, end=before, states=dstates, raised=failed,
            parking=parking, excesses=excesses,
        )  # fmt: skip
        if dstates is not None and not fused(call):
            _readout(call, inputs, reverse, inputs.k, run, dstates, gradients.dv, flags, failed, excesses)

    def do_run(
        run: Run, after: torch.Tensor | None, before: torch.Tensor | None, states: torch.Tensor,
        dstates: torch.Tensor | None,
    ) -> None:  # fmt: skip
        if one_kernel:
            _backward(call, inputs, do, run, states, after, before, flags.rows, failed, gradients)
            return
        walk_back(run, after, before, dstates)
        _gradients(
            call, inputs, do, run, states, dstates, excesses, flags.rows, failed, gradients, parking["parked"]
        )  # fmt: skip

    def new_dstates(chunks: int) -> torch.Tensor | None:
        """A buffer for the gradients of so many states; None if they need none."""
        return None if one_kernel or parking["parked"] is not None else inputs.q.new_empty(call.state_shape(chunks))

    after = dfinal
    carried = not materialized and carries(call)
    if not carried and not (materialized and is_whole(call, run)):
        after = call.new_states(inputs.q, run.count)
        _borders(call, inputs, reverse, run, after, dfinal, dinitial)
    if materialized:
        do_run(run, after, dinitial if is_whole(call, run) else None, kept, new_dstates(len(kept)))
        return
    states = inputs.q.new_empty(call.state_shape(scratch_slots(call)))
    dstates = new_dstates(len(states))
    if carried and not carries_gradient(call):
        # There is room for the gradients of all states at once, so only the states are recomputed slice by slice.
        walk_back(whole(call), dfinal, dinitial, None)
        slots = kept.unflatten(0, (call.sequences, -1))
        for run in reversed(list(slices(call))):
            _recurrence(call, inputs, forward, run, initial=slots[:, run.base], states=states)
            _gradients(
                call, inputs, do, run, states, None, excesses, flags.rows, failed, gradients, parking["parked"]
            )  # fmt: skip
        return
    if carried:
        # Each slice's gradient after it is replaced by that before it. The last one's is never missing, so that all
        # slices use the same variant of the kernel.
        before = call.new_states(inputs.q, zero=dfinal is None) if dinitial is None else dinitial
        after = before if after is None else after
        slots = kept.unflatten(0, (call.sequences, -1))
        for run in reversed(list(slices(call))):
            _recurrence(call, inputs, forward, run, initial=slots[:, run.base], states=states)
            do_run(run, after, before, states, dstates)
            after = before
        return
    for run in groups(call):
        pieces = slice(run.base, run.base + run.count)
        _recurrence(call, inputs, forward, run, initial=kept[pieces], states=states)
        do_run(run, None if after is None else after[pieces], None, states, dstates)
