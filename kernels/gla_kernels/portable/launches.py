"""The launches of the portable plain form, and of the small kernels that every family uses."""

from typing import Any

import torch

from gla_kernels.launching.buffers import Flags, Gradients, Inputs, named_strides
from gla_kernels.launching.call import Call, arranged
from gla_kernels.launching.plans import SUMS, TAIL, recurrent_tile
from gla_kernels.portable.backward import gla_backward_kernel
from gla_kernels.portable.forward import gla_forward_kernel
from gla_kernels.portable.recurrence import gla_recurrent_kernel
from gla_kernels.portable.scan import scan_pieces
from gla_kernels.portable.sums import head_gate_sums
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
    first_chunk: int,
    count: int,
    from_checkpoint: bool,
    o: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    final: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
) -> None:
    """Runs the portable plain form over `count` chunks of every sequence, from chunk `first_chunk` on.

    An output of None is not computed. Flags and marks are raised only if o is. `from_checkpoint`: `initial` holds
    checkpoints, and `states` has room for `count` chunks of every sequence.
    """
    initial, final = given_states(call, inputs, initial, final)
    arguments = inputs.arguments | gates_of(call, inputs) | call.numbers | {
        "o": o, "initial": initial, "final": final, "states": states, "checkpoints": checkpoints,
        "flags": flags.rows, "marks": flags.marks, "first_chunk": first_chunk, "count": count,
        "checkpoint_chunks": call.checkpoint_chunks,
    }  # fmt: skip
    switches = forward_switches(o, initial, final, states, checkpoints) | {"FROM_CHECKPOINT": from_checkpoint}
    programs = call.sequences * call.H * call.blocks(call.plan.forward)
    call.launch(
        gla_forward_kernel, call.plan.forward, (programs,), arranged(gla_forward_kernel, arguments), switches
    )  # fmt: skip


def run_plain_backward(
    call: Call,
    inputs: Inputs,
    do: torch.Tensor,
    states: torch.Tensor,
    flags: Flags,
    failed: torch.Tensor,
    gradients: Gradients,
    *,
    first_chunk: int,
    count: int,
    from_checkpoint: bool,
    dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None,
) -> None:
    """Runs the portable plain form over `count` chunks of every sequence, from chunk `first_chunk` on.

    `from_checkpoint`: `states` has room for `count` chunks of every sequence.
    """
    dfinal, dinitial = given_states(call, inputs, dfinal, dinitial)
    arguments = inputs.arguments | gates_of(call, inputs) | gradients.arguments | call.numbers | named_strides(do=do)
    arguments |= {
        "do": do, "states": states, "flags": flags.rows, "failed": failed, "dfinal": dfinal, "dinitial": dinitial,
        "first_chunk": first_chunk, "count": count,
    }  # fmt: skip
    programs = call.sequences * call.H * call.blocks(call.plan.backward)
    switches = gradients.switches | {"FROM_CHECKPOINT": from_checkpoint}
    call.launch(
        gla_backward_kernel, call.plan.backward, (programs,), arranged(gla_backward_kernel, arguments), switches
    )  # fmt: skip


def run_recurrence(
    call: Call, inputs: Inputs, o: torch.Tensor, initial: torch.Tensor | None, final: torch.Tensor | None,
    state_v_first: bool = False,
) -> None:  # fmt: skip
    """Goes token by token: all of o, and the final states, which may be in the memory of the initial ones."""
    tile = recurrent_tile(call.K, call.V)
    arguments = inputs.arguments | call.numbers | {"o": o, "initial": initial, "final": final}
    if call.head_gated:
        arguments |= {"g": inputs.head_gates} | named_strides(g=inputs.head_gates)
    switches = {"HAS_INITIAL": initial is not None, "STORE_FINAL": final is not None, "V_FIRST": state_v_first}
    programs = (call.sequences * call.H * call.parts(tile),)
    kernel = gla_recurrent_kernel
    # Not early: it reads its inputs at once.
    call.launch(kernel, tile, programs, arranged(kernel, arguments), switches, early=False)
    clear_tails(call, inputs, o)


def sum_head_gates(call: Call, inputs: Inputs) -> None:
    """Fills `inputs.sums`, which the kernels of a `head_gated` call read in place of g."""
    arguments = head_gates_of(inputs) | {
        "sums": inputs.sums, "cu_seqlens": inputs.cu_seqlens, "T": call.T, "H": call.H, "N": call.sequences,
    }  # fmt: skip
    programs = (call.slots(1), -(-call.H // SUMS.block_v))
    call.launch(head_gate_sums, SUMS, programs, arranged(head_gate_sums, arguments), {})


def gates_of(call: Call, inputs: Inputs) -> dict[str, Any]:
    """g and its strides as the kernels of the plain form take them, by name: of a gate per head, g is sums."""
    return {"g": inputs.sums if call.head_gated else inputs.g} | named_strides(g=inputs.g)


def head_gates_of(inputs: Inputs, summed: bool = False) -> dict[str, Any]:
    """A gate per head and its strides, by name, for kernels that make sums of it; None if these are `summed`."""
    gates = None if summed else inputs.head_gates
    return {"gates": gates} | named_strides(gates=gates)


def clear_tails(call: Call, inputs: Inputs, *outputs: torch.Tensor | None) -> None:
    """Sets what is behind the last packed sequence in up to four outputs [1, T, ...] to 0."""
    if inputs.cu_seqlens is None:
        return
    arguments: dict[str, Any] = {"cu_seqlens": inputs.cu_seqlens, "N": call.sequences, "T": call.T}
    for name, x in zip("abcd", (*outputs, *[None] * (4 - len(outputs))), strict=True):
        arguments |= {name: x, f"{name}_width": 0 if x is None else x.numel() // call.T}
    # Not early: their memory may have been that of a tensor which the kernel before still reads.
    programs = (call.multiprocessors,)
    call.launch(clear_tails_kernel, TAIL, programs, arranged(clear_tails_kernel, arguments), {}, early=False)


def scan(
    call: Call, inputs: Inputs, piece_chunks: int, local: torch.Tensor, decays: torch.Tensor | None,
    borders: torch.Tensor, initial: torch.Tensor | None, final: torch.Tensor | None, *, reverse: bool,
    cleared: torch.Tensor | None, sequences: int | None = None,
) -> None:  # fmt: skip
    """Fills `borders` and `final` from what each piece of `piece_chunks` chunks adds to the state, `local`.

    `decays`: total gates of each piece. `cleared`: int32, set to 0 as well. `sequences`: of how many the tensors are,
    if not of all. Not of the portable plain form, but of those that cut sequences.
    """
    arguments = {
        "local": local, "decays": decays, "initial": initial, "borders": borders, "final": final,
        "cu_seqlens": inputs.cu_seqlens, "T": call.T, "H": call.H, "rows": piece_chunks * call.plan.chunk_size,
        "cleared": cleared, "words": 0 if cleared is None else cleared.numel(),
    }  # fmt: skip
    tile = call.tile_of_scan(piece_chunks)
    switches = {
        "BLOCK": tile.block_v,
        "CLEAR": cleared is not None,
        "GATED": decays is not None,
        "REVERSE": reverse,
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
    }
    blocks = -(-call.K * call.V // tile.block_v)
    programs = ((call.sequences if sequences is None else sequences) * call.H, blocks)
    call.launch(scan_pieces, tile, programs, arranged(scan_pieces, arguments), switches)
