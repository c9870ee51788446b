"""The launches of both passes, for every family: its plain form, then what repairs the results of that.

The plain form of wide heads on Hopper takes more than one pass over the inputs; `wide/passes.py` launches it.
"""

from typing import Any

import torch

from gla_kernels.hopper.narrow import launches as narrow
from gla_kernels.launching.buffers import Flags, Gradients, Inputs, named_strides
from gla_kernels.launching.call import Call, arranged
from gla_kernels.launching.plans import exact_tile, strong_shares, strong_tile
from gla_kernels.portable.exact import gla_forward_exact
from gla_kernels.portable.exact_backward import gla_backward_exact, gla_backward_exact_recomputing
from gla_kernels.portable.launches import forward_switches, given_states, run_plain_backward, run_plain_forward
from gla_kernels.portable.strong import gla_backward_strong, gla_forward_strong


def run_forward(
    call: Call,
    inputs: Inputs,
    flags: Flags,
    *,
    o: torch.Tensor,
    initial: torch.Tensor | None = None,
    final: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
) -> None:
    """Runs the forward: o, and those of the other outputs that are not None.

    For wide heads on Hopper, whose plain form is in `wide/passes.py`, only the kernels that repair what that leaves.
    """
    initial, final = given_states(call, inputs, initial, final)
    outputs: dict[str, Any] = {
        "o": o, "initial": initial, "final": final, "states": states, "checkpoints": checkpoints,
    }  # fmt: skip
    if call.plan.family == "triton":
        run_plain_forward(call, inputs, flags, first_chunk=0, count=call.chunks, from_checkpoint=False, **outputs)
    elif call.plan.family == "hopper":
        narrow.run_forward(call, inputs, flags, **outputs)
    if not call.gated:
        return
    _run_strong_forward(call, inputs, o, flags)
    tile, rows = exact_tile(call.K, call.V, call.plan), call.sequences * call.H
    arguments = (
        inputs.arguments
        | call.numbers
        | outputs
        | {"flags": flags.rows, "checkpoint_chunks": call.checkpoint_chunks, "rows": rows}
    )
    programs = min(rows * call.blocks(tile), call.exact_programs)
    switches = forward_switches(**outputs)
    call.launch(gla_forward_exact, tile, (programs,), arranged(gla_forward_exact, arguments), switches)


def strong_kernel(call: Call, backward: bool) -> Any:
    """The kernel of the call's family that completes the results of marked chunks."""
    if call.plan.family == "triton":
        return gla_backward_strong if backward else gla_forward_strong
    from gla_kernels.hopper.strong import gla_backward_strong_hopper, gla_forward_strong_hopper

    return gla_backward_strong_hopper if backward else gla_forward_strong_hopper


def _run_strong_forward(call: Call, inputs: Inputs, o: torch.Tensor, flags: Flags) -> None:
    """Completes the outputs of chunks with strong gates."""
    items = flags.marks.numel()
    partial: dict[str, Any] = {}
    if call.plan.family == "triton":
        programs = min(items, call.strong_programs)
    else:
        shares = strong_shares(call.K)
        groups = min(items, max(1, call.strong_programs // shares))
        programs = groups * shares
        shape = groups, shares // 2, shares, call.plan.chunk_size, call.plan.chunk_size
        partial = {"partial": o.new_empty(shape, dtype=torch.float32)}
    arguments = inputs.arguments | call.numbers | partial
    arguments |= {"o": o, "flags": flags.rows, "marks": flags.marks, "items": items}
    tile = strong_tile(call.K, call.V, call.plan, False)
    kernel = strong_kernel(call, False)
    call.launch(kernel, tile, (programs,), arranged(kernel, arguments), {})


def run_backward(
    call: Call,
    inputs: Inputs,
    do: torch.Tensor,
    states: torch.Tensor,
    flags: Flags,
    failed: torch.Tensor,
    gradients: Gradients,
    *,
    dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None,
) -> None:
    """Runs the backward from the states of all chunks; for wide heads on Hopper only the exact kernel.

    With gates `dinitial` is needed.
    """
    dfinal, dinitial = given_states(call, inputs, dfinal, dinitial)
    if call.plan.family == "triton":
        run_plain_backward(
            call, inputs, do, states, flags, failed, gradients, first_chunk=0, count=call.chunks, from_checkpoint=False,
            dfinal=dfinal, dinitial=dinitial,
        )  # fmt: skip
    elif call.plan.family == "hopper":
        narrow.run_backward(call, inputs, do, states, flags, failed, gradients, dfinal=dfinal, dinitial=dinitial)
    if call.gated:
        rows = call.sequences * call.H
        arguments = inputs.arguments | gradients.arguments | call.numbers | named_strides(do=do) | {
            "do": do, "states": states, "flags": flags.rows, "failed": failed, "dfinal": dfinal, "dinitial": dinitial,
            "rows": rows,
        }  # fmt: skip
        tile = exact_tile(call.K, call.V, call.plan)
        switches = gradients.switches | {"HAS_DFINAL": dfinal is not None}
        programs = min(rows * call.key_parts, call.exact_programs)
        call.launch(gla_backward_exact, tile, (programs,), arranged(gla_backward_exact, arguments), switches)


def run_exact_backward_from_checkpoints(
    call: Call,
    inputs: Inputs,
    do: torch.Tensor,
    checkpoints: torch.Tensor,
    failed: torch.Tensor,
    gradients: Gradients,
    *,
    room: int,
    dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None,
) -> None:
    """Computes all gradients of the sequences and heads in `failed` [N, H] again, in one launch.

    A program has memory of its own for the states behind one checkpoint. `room`: states that fit into the memory which
    the plain form has needed for them, and which is free again; it bounds the number of programs.
    """
    rows = call.sequences * call.H
    programs = min(rows * call.key_parts, call.exact_programs, room // call.checkpoint_chunks)
    states = inputs.q.new_empty((programs, call.checkpoint_chunks, call.K, call.V), dtype=call.operands.dtype)
    arguments = inputs.arguments | gradients.arguments | call.numbers | named_strides(do=do) | {
        "do": do, "checkpoints": checkpoints, "states": states, "failed": failed, "dfinal": dfinal,
        "dinitial": dinitial, "checkpoint_chunks": call.checkpoint_chunks, "rows": rows,
    }  # fmt: skip
    tile = exact_tile(call.K, call.V, call.plan)
    switches = gradients.switches | {"HAS_DFINAL": dfinal is not None}
    kernel = gla_backward_exact_recomputing
    call.launch(kernel, tile, (programs,), arranged(kernel, arguments), switches)


def run_strong_backward(
    call: Call, inputs: Inputs, do: torch.Tensor, flags: Flags, failed: torch.Tensor, gradients: Gradients
) -> None:
    """Completes the gradients of chunks with strong gates, but for the sequences and heads in `failed` [N, H]."""
    tile = strong_tile(call.K, call.V, call.plan, True)
    # dv is an item, and so is every block of key columns of dq, dk and dg.
    items = flags.marks.numel() * (1 + (call.K + tile.block_k - 1) // tile.block_k)
    programs = min(items, call.strong_backward_programs)
    arguments = inputs.arguments | gradients.arguments | call.numbers | named_strides(do=do)
    arguments |= {"do": do, "flags": flags.rows, "failed": failed, "marks": flags.marks, "items": items}
    kernel = strong_kernel(call, True)
    call.launch(kernel, tile, (programs,), arranged(kernel, arguments), gradients.switches)
