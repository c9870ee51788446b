"""The launches of the portable plain form, and of the small kernels that every family uses."""

from typing import Any

import torch

from gla_kernels.launching.buffers import Flags, Gradients, Inputs
from gla_kernels.launching.call import Call
from gla_kernels.launching.plans import SCAN, TAIL
from gla_kernels.portable.backward import gla_backward_kernel
from gla_kernels.portable.forward import gla_forward_kernel
from gla_kernels.portable.scan import scan_pieces
from gla_kernels.portable.tail import clear_tails_kernel


def given_states(
    call: Call, inputs: Inputs, before: torch.Tensor | None, after: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The states that a pass starts from and those that it ends with; the portable kernels need both."""
    if call.plan.family != "triton":
        return before, after
    before = call.new_states(inputs.q, zero=True) if before is None else before
    return before, call.new_states(inputs.q) if after is None else after


def forward_switches(
    o: torch.Tensor | None, initial: torch.Tensor | None, final: torch.Tensor | None, states: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """The switches of a forward's kernels, plain or exact, for the states and outputs that are not None."""
    return {
        "HAS_INITIAL": initial is not None,
        "STORE_O": o is not None,
        "STORE_FINAL": final is not None,
        "STORE_STATES": states is not None,
        "STORE_CHECKPOINTS": checkpoints is not None,
    }


def run_plain_forward(
    call: Call,
    inputs: Inputs,
    flags: Flags,
    *,
    first: int,
    count: int,
    from_checkpoint: bool,
    o: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    final: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
) -> None:
    """Runs the portable plain form over `count` chunks of every sequence, from chunk `first` on.

    An output of None is not computed. Flags and marks are raised only if o is. `from_checkpoint`: `initial` holds
    checkpoints, and `states` has room for `count` chunks of every sequence.
    """
    initial, final = given_states(call, inputs, initial, final)
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, o, initial, final, states, checkpoints, flags.rows, flags.marks,
        inputs.cu_seqlens, call.scale, *inputs.strides(), call.T, call.H, first, count, call.every,
    )  # fmt: skip
    switches = forward_switches(o, initial, final, states, checkpoints) | {"FROM_CHECKPOINT": from_checkpoint}
    programs = call.sequences * call.H * call.blocks(call.plan.forward)
    call.launch(gla_forward_kernel, call.plan.forward, (programs,), arguments, switches)


def run_plain_backward(
    call: Call,
    inputs: Inputs,
    do: torch.Tensor,
    states: torch.Tensor,
    flags: Flags,
    failed: torch.Tensor,
    gradients: Gradients,
    *,
    first: int,
    count: int,
    from_checkpoint: bool,
    dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None,
) -> None:
    """Runs the portable plain form over `count` chunks of every sequence, from chunk `first` on.

    `from_checkpoint`: `states` has room for `count` chunks of every sequence.
    """
    dfinal, dinitial = given_states(call, inputs, dfinal, dinitial)
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, do, states, flags.rows, failed, dfinal,
        gradients.dq, gradients.dk, gradients.dv, gradients.dg, dinitial, inputs.cu_seqlens,
        call.scale, *inputs.strides(do), call.T, call.H, first, count,
    )  # fmt: skip
    programs = call.sequences * call.H * call.blocks(call.plan.backward)
    switches = {"FROM_CHECKPOINT": from_checkpoint}
    call.launch(gla_backward_kernel, call.plan.backward, (programs,), arguments, switches)


def clear_tails(call: Call, inputs: Inputs, *outputs: torch.Tensor | None) -> None:
    """Sets what is behind the last packed sequence in up to four outputs [1, T, ...] to 0."""
    if inputs.cu_seqlens is None:
        return
    four = (*outputs, *[None] * (4 - len(outputs)))
    widths = [0 if x is None else x.numel() // call.T for x in four]
    arguments = (*four, inputs.cu_seqlens, *widths, call.sequences, call.T)
    # Not early: their memory may have been that of a tensor which the kernel before still reads.
    call.launch(clear_tails_kernel, TAIL, (call.multiprocessors,), arguments, {}, early=False)


def scan(
    call: Call, inputs: Inputs, piece_chunks: int, local: torch.Tensor, decays: torch.Tensor | None,
    borders: torch.Tensor, initial: torch.Tensor | None, final: torch.Tensor | None, *, reverse: bool,
) -> None:  # fmt: skip
    """Fills `borders` and `final` from what each piece of `piece_chunks` chunks adds to the state, `local`.

    `decays`: total gates of each piece. Not of the portable plain form, but of those that cut sequences.
    """
    arguments = (
        local, decays, initial, borders, final, inputs.cu_seqlens, call.T, call.H, piece_chunks * call.plan.chunk_size,
    )  # fmt: skip
    switches = {
        "BLOCK": SCAN.block_v,
        "REVERSE": reverse,
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
    }
    blocks = -(-call.K * call.V // SCAN.block_v)
    call.launch(scan_pieces, SCAN, (call.sequences * call.H, blocks), arguments, switches)
