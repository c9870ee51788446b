"""The launches of both passes, except those of the plain form on Hopper, which are in `narrow.py` and `wide.py`."""

from typing import Any

import torch

from gla_kernels import narrow
from gla_kernels.backward import gla_backward_kernel
from gla_kernels.buffers import Flags, Gradients, Inputs
from gla_kernels.call import Call
from gla_kernels.exact import gla_backward_exact, gla_forward_exact
from gla_kernels.forward import gla_forward_kernel
from gla_kernels.launch import (
    EXACT_PROGRAMS,
    STRONG_PROGRAMS,
    exact_tile,
    strong_shares,
    strong_tile,
)
from gla_kernels.strong import gla_backward_strong, gla_forward_strong


def run_forward(
    call: Call,
    inputs: Inputs,
    flags: Flags,
    *,
    first: int = 0,
    count: int | None = None,
    o: torch.Tensor | None = None,
    initial: torch.Tensor | None = None,
    from_checkpoint: bool = False,
    final: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    checkpoints: torch.Tensor | None = None,
    plain: bool = True,
) -> None:
    """Runs the forward over `count` chunks of every sequence, from chunk `first` on. An output of None is not computed.

    Flags and marks are raised only if o is computed. `from_checkpoint`: `initial` holds checkpoints, and `states` has
    room for `count` chunks of every sequence. `plain`: with the plain form, not only the kernels that repair what it
    cannot do; for wide heads on Hopper it is in `wide.py`.
    """
    if call.plan.family == "triton":
        initial = call.new_states(inputs.q, zero=True) if initial is None else initial
        final = call.new_states(inputs.q) if final is None else final
    count = call.chunks if count is None else count
    if plain and call.plan.family == "hopper":
        narrow.run_forward(
            call, inputs, flags, first=first, count=count, from_checkpoint=from_checkpoint, o=o, initial=initial,
            final=final, states=states, checkpoints=checkpoints,
        )  # fmt: skip
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, o, initial, final, states, checkpoints, flags.rows)
    numbers = (inputs.cu_seqlens, call.scale, *inputs.strides(), call.T, call.H, first, count, call.every)
    switches = {
        "HAS_INITIAL": initial is not None,
        "FROM_CHECKPOINT": from_checkpoint,
        "STORE_O": o is not None,
        "STORE_FINAL": final is not None,
        "STORE_STATES": states is not None,
        "STORE_CHECKPOINTS": checkpoints is not None,
    }
    rows = call.sequences * call.H
    if plain and call.plan.family == "triton":
        tile = call.plan.forward
        call.launch(gla_forward_kernel, tile, (rows * call.parts(tile),), (*tensors, flags.marks, *numbers), switches)
    if call.gated and o is not None:
        _run_strong_forward(call, inputs, o, flags)
    if call.gated:
        tile = exact_tile(call.K, call.V, call.dtype)
        programs = min(rows * call.parts(tile), EXACT_PROGRAMS)
        call.launch(gla_forward_exact, tile, (programs,), (*tensors, *numbers, rows), switches)


def strong_kernel(call: Call, backward: bool) -> Any:
    """The kernel of the call's family that completes the results of marked chunks."""
    if call.plan.family == "triton":
        return gla_backward_strong if backward else gla_forward_strong
    from gla_kernels.hopper_strong import gla_backward_strong_hopper, gla_forward_strong_hopper

    return gla_backward_strong_hopper if backward else gla_forward_strong_hopper


def _run_strong_forward(call: Call, inputs: Inputs, o: torch.Tensor, flags: Flags) -> None:
    """Completes the outputs of chunks with strong gates."""
    items = flags.marks.numel()
    programs = min(items, STRONG_PROGRAMS)
    partial: tuple[torch.Tensor, ...] = ()
    if call.plan.family != "triton":
        shares = strong_shares(call.K)
        groups = min(items, STRONG_PROGRAMS // shares)
        programs = groups * shares
        shape = groups, shares // 2, shares, call.plan.chunk_size, call.plan.chunk_size
        partial = (o.new_empty(shape, dtype=torch.float32),)
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, o, *partial, flags.rows, flags.marks, inputs.cu_seqlens, call.scale,
        *inputs.strides(), call.T, call.H, items,
    )  # fmt: skip
    tile = strong_tile(call.K, call.V, call.plan, False)
    call.launch(strong_kernel(call, False), tile, (programs,), arguments, {})


def run_backward(
    call: Call,
    inputs: Inputs,
    do: torch.Tensor,
    states: torch.Tensor,
    flags: Flags,
    failed: torch.Tensor,
    gradients: Gradients,
    *,
    first: int = 0,
    count: int | None = None,
    from_checkpoint: bool = False,
    dfinal: torch.Tensor | None = None,
    dinitial: torch.Tensor | None = None,
    plain: bool = True,
) -> None:
    """Runs the backward over `count` chunks of every sequence, from chunk `first` on, whose states are in `states`.

    With gates `dinitial` is needed. `plain`: with the plain form, not only the exact kernel; for wide heads on Hopper
    it is in `wide.py`.
    """
    if call.plan.family == "triton":
        dfinal = call.new_states(inputs.q, zero=True) if dfinal is None else dfinal
        dinitial = call.new_states(inputs.q) if dinitial is None else dinitial
    count = call.chunks if count is None else count
    if plain and call.plan.family == "hopper":
        narrow.run_backward(
            call, inputs, do, states, flags, failed, gradients, first=first, count=count,
            from_checkpoint=from_checkpoint, dfinal=dfinal, dinitial=dinitial,
        )  # fmt: skip
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, do, states, flags.rows, failed, dfinal,
        gradients.dq, gradients.dk, gradients.dv, gradients.dg, dinitial, inputs.cu_seqlens,
        call.scale, *inputs.strides(do), call.T, call.H, first, count,
    )  # fmt: skip
    switches = {
        "FROM_CHECKPOINT": from_checkpoint,
        "HAS_DFINAL": dfinal is not None,
        "STORE_DINITIAL": dinitial is not None,
    }
    rows = call.sequences * call.H
    if plain and call.plan.family == "triton":
        call.launch(gla_backward_kernel, call.plan.backward, (rows * call.gradient_parts,), arguments, switches)
    if call.gated:
        tile = exact_tile(call.K, call.V, call.dtype)
        call.launch(gla_backward_exact, tile, (min(rows, EXACT_PROGRAMS),), (*arguments, rows), switches)


def run_strong_backward(
    call: Call, inputs: Inputs, do: torch.Tensor, flags: Flags, failed: torch.Tensor, gradients: Gradients, count: int
) -> None:
    """Completes the gradients of chunks with strong gates, after those of all chunks have been computed.

    `failed` [pieces, N, H] has the flags of pieces of `count` chunks of every sequence.
    """
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, do, flags.rows, failed, flags.marks,
        gradients.dq, gradients.dk, gradients.dv, gradients.dg, inputs.cu_seqlens, call.scale, *inputs.strides(do),
        call.sequences, call.T, call.H, count,
    )  # fmt: skip
    tile = strong_tile(call.K, call.V, call.plan, True)
    # dv is an item, and so is every block of key columns of dq, dk and dg.
    items = flags.marks.numel() * (1 + (call.K + tile.block_k - 1) // tile.block_k)
    call.launch(strong_kernel(call, True), tile, (min(items, STRONG_PROGRAMS),), (*arguments, items), {})
