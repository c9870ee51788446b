"""A function for each kernel of wide heads on Hopper, which launches it; `passes.py` says when."""

from dataclasses import dataclass
from typing import Any

import torch

from gla_kernels.hopper.wide.pieces import (
    Run,
    forward_tile,
    is_whole,
    programs_a_piece,
    recurrence_tile,
    sequences_of,
    specializes,
    sums_made,
)
from gla_kernels.launching.buffers import Flags, Gradients, Inputs, named_strides
from gla_kernels.launching.call import Call, arranged
from gla_kernels.launching.plans import WIDE_BACKWARD, wide_frames_tile, wide_gradients_tile, wide_readout_tile
from gla_kernels.portable.launches import gates_of, head_gates_of, scan


@dataclass(frozen=True)
class Direction:
    """The inputs of a recurrence: k and v forward, q and do in reverse."""

    x: torch.Tensor
    y: torch.Tensor
    reverse: bool


def _steps(**states: torch.Tensor | None) -> dict[str, int]:
    """Elements from one piece's state x to the next piece's, x_p. Checkpoints can be views, with more than a state."""
    return {f"{name}_p": 0 if x is None else x.stride(0) for name, x in states.items()}


def parking_of(gradients: Gradients) -> dict[str, torch.Tensor | None]:
    """The memory of dq, dk and dg, as kernels take it that park a state there; without dg, as much other memory."""
    dq, dg = gradients.dq, gradients.dg
    room = dq.new_empty((*dq.shape[:3], 2 * dq.shape[3])) if dg is None else dg.view(dq.dtype)
    return {"dq": dq, "dk": gradients.dk, "parked": room}


NO_PARKING: dict[str, torch.Tensor | None] = dict.fromkeys(("dq", "dk", "parked"))


def launch_recurrence(
    call: Call, inputs: Inputs, way: Direction, run: Run, *, initial: torch.Tensor | None = None,
    end: torch.Tensor | None = None, decays: torch.Tensor | None = None, states: torch.Tensor | None = None,
    raised: torch.Tensor | None = None, excesses: torch.Tensor | None = None,
    parking: dict[str, torch.Tensor | None] = NO_PARKING,
) -> None:  # fmt: skip
    """`parking`: memory that is to hold the states, instead of `states`."""
    from gla_kernels.hopper.wide.recurrence import wide_recurrence

    arguments = call.numbers | run.arguments(call) | parking | _steps(initial=initial, end=end)
    arguments |= gates_of(call, inputs) | named_strides(x=way.x, y=way.y) | {
        "x": way.x, "y": way.y, "initial": initial, "end": end, "decays": decays, "excesses": excesses,
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


def compute_borders(
    call: Call, inputs: Inputs, way: Direction, run: Run, borders: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None, cleared: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fills `borders` with the state before each piece of a run (in reverse its gradient after it), and `final`.

    `initial` and `final` are of the run's sequences. Sets `cleared` to 0.
    """
    local = torch.empty_like(borders)
    decays = borders.new_empty(borders.shape[:3]) if call.gated or call.head_gated else None
    launch_recurrence(call, inputs, way, run, end=local, decays=decays)
    part = sequences_of(call, run)
    scan(
        call, inputs, run.chunks, local, decays, borders, initial, final, reverse=way.reverse, cleared=cleared,
        sequences=part.stop - part.start,
    )  # fmt: skip


def launch_readout(
    call: Call, inputs: Inputs, way: Direction, other: torch.Tensor, run: Run, states: torch.Tensor,
    out: torch.Tensor, flags: Flags, raised: torch.Tensor, excesses: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Reads `out`, o or in reverse dv, from the states that a recurrence has stored for the chunks of a run."""
    from gla_kernels.hopper.wide.readout import wide_readout

    run, chunks = run.of_chunks(call)
    # What the recurrence calls x and y is y and z here, because x reads the states out.
    tensors = {"x": other, "y": way.x, "z": way.y}
    arguments = call.numbers | run.arguments(call) | tensors | named_strides(**tensors) | gates_of(call, inputs) | {
        "states": states, "out": out, "flags": flags.rows, "raised": raised, "marks": flags.marks,
        "excesses": excesses, "cu_seqlens": inputs.cu_seqlens,
    }  # fmt: skip
    programs, switches = (chunks * call.H,), {"REVERSE": way.reverse}
    call.launch(wide_readout, wide_readout_tile(call.K), programs, arranged(wide_readout, arguments), switches)


def launch_gradients(
    call: Call, inputs: Inputs, do: torch.Tensor, run: Run, states: torch.Tensor, dstates: torch.Tensor | None,
    excesses: torch.Tensor | None, flags: torch.Tensor, failed: torch.Tensor, gradients: Gradients,
    parked: torch.Tensor | None,
) -> None:  # fmt: skip
    """Computes dq, dk, dg and, for K up to 128, dv of a run's chunks from their states and these states' gradients."""
    from gla_kernels.hopper.wide.gradients import wide_gradients

    run, chunks = run.of_chunks(call)
    arguments = inputs.arguments | gates_of(call, inputs) | gradients.arguments | call.numbers | run.arguments(call)
    arguments |= named_strides(do=do) | {
        "do": do, "states": states, "dstates": dstates, "parked": parked, "excesses": excesses, "flags": flags,
        "failed": failed,
    }  # fmt: skip
    tile = wide_gradients_tile(call.V, call.gated, call.plan.backward)
    blocks_k = (call.K + tile.block_k - 1) // tile.block_k
    switches = gradients.switches | {"PARKED": parked is not None}
    programs = (chunks * call.H * blocks_k,)
    call.launch(wide_gradients, tile, programs, arranged(wide_gradients, arguments), switches, early=False)


def launch_backward(
    call: Call, inputs: Inputs, do: torch.Tensor, run: Run, states: torch.Tensor, after: torch.Tensor | None,
    before: torch.Tensor | None, flags: torch.Tensor, failed: torch.Tensor, gradients: Gradients,
) -> None:  # fmt: skip
    """Computes all gradients of a run from its states, and the gradient of the state before each piece: `before`."""
    from gla_kernels.hopper.wide.backward import wide_backward

    arguments = inputs.arguments | gates_of(call, inputs) | gradients.arguments | call.numbers | run.arguments(call)
    arguments |= named_strides(do=do) | _steps(after=after, before=before) | {
        "do": do, "states": states, "after": after, "before": before, "flags": flags, "failed": failed
    }  # fmt: skip
    switches = {"HAS_AFTER": after is not None, "STORE_BEFORE": before is not None, "SCRATCH": run.scratch}
    switches |= gradients.switches
    programs = (run.count * call.H,)
    call.launch(wide_backward, WIDE_BACKWARD, programs, arranged(wide_backward, arguments), switches)


def launch_forward(
    call: Call, inputs: Inputs, flags: Flags, run: Run, o: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None, states: torch.Tensor | None, checkpoints: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Computes o of a run and, of the other outputs, those that are not None."""
    from gla_kernels.hopper.wide.forward import wide_forward
    from gla_kernels.hopper.wide.head_forward import head_forward
    from gla_kernels.hopper.wide.specialized import specialized_forward

    arguments = inputs.arguments | gates_of(call, inputs) | call.numbers | run.arguments(call)
    arguments |= _steps(initial=initial, final=final) | {
        "o": o, "initial": initial, "final": final, "states": states,
        "checkpoints": checkpoints,
        "flags": flags.rows, "marks": flags.marks, "checkpoint_chunks": call.checkpoint_chunks,
    }  # fmt: skip
    switches: dict[str, Any] = {
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "STORE_STATES": states is not None,
        "STORE_CHECKPOINTS": checkpoints is not None,
    }
    tile = forward_tile(call, run.count)
    programs = (run.count * programs_a_piece(call, tile),)
    if call.gated:
        call.launch(wide_forward, tile, programs, arranged(wide_forward, arguments), switches)
        return
    # Nothing overflows without gates per channel, and sums of gates have no strides.
    for name in ("flags", "marks", "g_b", "g_t", "g_h"):
        del arguments[name]
    if specializes(call, tile):
        sums = sums_made(call) if is_whole(call, run) else 0
        arguments |= head_gates_of(inputs, sums == 0)
        switches["SUMS"] = sums
        call.launch(specialized_forward, tile, programs, arranged(specialized_forward, arguments), switches)
        return
    call.launch(head_forward, tile, programs, arranged(head_forward, arguments), switches)


@dataclass(frozen=True)
class Frames:
    """What `wide_frames` computes from q, k and g for `wide_walk`: Q~, K~, P and 2^r, or what takes its place."""

    q: torch.Tensor
    k: torch.Tensor
    scores: torch.Tensor
    frame_factors: torch.Tensor | None


def make_frames(
    call: Call, inputs: Inputs, q: torch.Tensor, k: torch.Tensor, raised: torch.Tensor, *,
    marks: torch.Tensor | None = None, excesses: torch.Tensor | None = None, reverse: bool,
) -> Frames:  # fmt: skip
    """Computes the frames of all chunks, and marks or, in reverse, excesses; writes Q~ and K~ to `q` and `k`."""
    from gla_kernels.hopper.wide.frames import wide_frames

    chunks = call.slots(1)
    scores = inputs.q.new_empty((*inputs.q.shape[:3], call.plan.chunk_size))
    decays = (chunks, call.H, call.K) if call.gated else (chunks, call.H) if call.head_gated else None
    frame_factors = None if decays is None else inputs.q.new_empty(decays, dtype=torch.float32)
    tensors = {"q": inputs.q, "k": inputs.k}
    arguments = call.numbers | tensors | named_strides(**tensors) | gates_of(call, inputs) | {
        "framed_q": q, "framed_k": k, "scores": scores, "frame_factors": frame_factors, "excesses": excesses,
        "raised": raised, "marks": marks, "cu_seqlens": inputs.cu_seqlens, "N": call.sequences,
    }  # fmt: skip
    programs, switches = (chunks * call.H,), {"REVERSE": reverse}
    call.launch(wide_frames, wide_frames_tile(call.gated), programs, arranged(wide_frames, arguments), switches)
    return Frames(q, k, scores, frame_factors)


def launch_walk(
    call: Call, inputs: Inputs, frames: Frames, z: torch.Tensor, run: Run, out: torch.Tensor, raised: torch.Tensor,
    *, reverse: bool, initial: torch.Tensor | None, end: torch.Tensor | None, states: torch.Tensor | None,
    checkpoints: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Computes `out`, o or in reverse dv, of a run from frames and, of the other outputs, those that are not None."""
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
