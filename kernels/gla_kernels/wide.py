"""The launches of the plain form for wide heads on Hopper: time in pieces, key columns in blocks.

A sequence and head is one piece where there are enough of them for the GPU. Else sequences are cut: the states at the
pieces' borders come first, by a scan over pieces that each began at zero, and then pieces know nothing of each other.

A backward that was given a state every so many chunks makes the others again, a run of pieces at a time: the same
piece of every sequence, with the gradient carried from one to the next; or, where sequences are few or packed, as many
pieces as fill the GPU, after another scan for the gradients at their borders.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gla_kernels.call import Call, Gradients, Inputs, strides_of
from gla_kernels.launch import MULTIPROCESSORS, Tile, narrower_state_tile, wide_readout_tile

# Chunks of a piece at least: below, the borders cost more than the programs gain.
MIN_PIECE_CHUNKS = 4
# How often a run of pieces fills the GPU: fewer launches against more memory for the states in it.
ROUNDS = 4
# Numbers of a state that a program of the scan over pieces does.
_SCAN_BLOCK = 1024


@dataclass(frozen=True)
class Run:
    """The pieces that kernels are launched over: number base, base + stride, ..., `count` of them, of `chunks` chunks.

    `scratch`: states go to a buffer that has room for these pieces alone, not to one with a slot for every chunk.
    """

    base: int
    stride: int
    count: int
    chunks: int
    scratch: bool

    def of_chunks(self, call: Call) -> tuple["Run", int]:
        """The same for kernels that do a chunk a program, and how many chunks that is."""
        if self.scratch:
            return self, self.count * self.chunks
        return replace(self, chunks=1), call.slots(1)


def _programs_a_piece(call: Call, tile: Tile) -> int:
    return call.H * call.parts(tile) * ((call.K + tile.block_k - 1) // tile.block_k)


def state_tile(call: Call, pieces: int) -> Tile:
    """The tile of the kernels that walk the state: the plan's where programs of it occupy the GPU, else a narrower."""
    occupied = pieces * _programs_a_piece(call, call.plan.forward) >= MULTIPROCESSORS * 3 // 4
    return call.plan.forward if occupied else narrower_state_tile(call.plan.forward)


def whole(call: Call) -> Run:
    """Every sequence as one piece.

    Of one chunk more than there are, so that no sequence, nor an empty one behind the last token, begins a second.
    """
    return Run(0, 1, call.sequences, call.chunks + 1, False)


def cut(call: Call, chunks: int) -> Run:
    """All pieces of `chunks` chunks."""
    return Run(0, 1, call.slots(chunks), chunks, False)


def choose_pieces(call: Call) -> Run:
    """Whole sequences, or, where these leave half of the multiprocessors idle, pieces that just occupy all."""
    if 2 * call.sequences * _programs_a_piece(call, narrower_state_tile(call.plan.forward)) > MULTIPROCESSORS:
        return whole(call)
    wanted = MULTIPROCESSORS // _programs_a_piece(call, call.plan.forward)
    # A packed sequence may end in a piece that is nearly empty.
    pieces = wanted - call.sequences if call.varlen else wanted // call.sequences
    chunks = max(-(-call.chunks // pieces), MIN_PIECE_CHUNKS)
    return cut(call, chunks) if chunks < call.chunks else whole(call)


def _is_whole(call: Call, run: Run) -> bool:
    return run.chunks > call.chunks


def _carries(call: Call) -> bool:
    """Whether pieces of `call.every` chunks are done one after the other in every sequence, all sequences at once."""
    return not call.varlen and _is_whole(call, choose_pieces(call))


def _slices(call: Call) -> Iterator[Run]:
    """The first piece of `call.every` chunks of every sequence, then the second, ..."""
    pieces = -(-call.chunks // call.every)
    for piece in range(pieces):
        yield Run(piece, pieces, call.sequences, call.every, True)


def _groups(call: Call) -> Iterator[Run]:
    """As many pieces of `call.every` chunks as fill the GPU `ROUNDS` times, then the next, ..."""
    at_once = max(1, ROUNDS * MULTIPROCESSORS // _programs_a_piece(call, narrower_state_tile(call.plan.forward)))
    pieces = call.slots(call.every)
    for base in range(0, pieces, at_once):
        yield Run(base, 1, min(at_once, pieces - base), call.every, True)


def scratch_slots(call: Call) -> int:
    """Chunks whose states a call needs room for at once when they are not kept."""
    runs = _slices(call) if _carries(call) else _groups(call)
    return max(run.count * run.chunks for run in runs)


def form(call: Call) -> tuple[object, ...]:
    """What of a call's sizes decides which kernels it launches: how its time is cut, and the tiles for that."""
    pieces = choose_pieces(call)
    runs = (pieces, cut(call, call.every))
    return _is_whole(call, pieces), call.chunks > call.every, *(state_tile(call, run.count) for run in runs)


@dataclass(frozen=True)
class _Direction:
    """What a recurrence runs on: k and v forward, q and do in reverse."""

    x: torch.Tensor
    y: torch.Tensor
    reverse: bool


def _steps(*states: torch.Tensor | None) -> tuple[int, ...]:
    """From one piece's state to the next one's: checkpoints of every sequence are views with a step of their own."""
    return tuple(0 if x is None else x.stride(0) for x in states)


def _recurrence(
    call: Call, inputs: Inputs, way: _Direction, run: Run, *, initial: torch.Tensor | None = None,
    end: torch.Tensor | None = None, decays: torch.Tensor | None = None, states: torch.Tensor | None = None,
    raised: torch.Tensor | None = None,
) -> None:  # fmt: skip
    from gla_kernels.wide_recurrence import wide_recurrence

    arguments = (
        way.x, way.y, inputs.g, initial, end, decays, states, raised, inputs.cu_seqlens, call.scale,
        *strides_of(way.x, way.y, inputs.g), *_steps(initial, end),
        call.T, call.H, call.sequences, run.base, run.stride, run.chunks,
    )  # fmt: skip
    switches = {
        "REVERSE": way.reverse,
        "HAS_INITIAL": initial is not None,
        "STORE_END": end is not None,
        "STORE_DECAYS": decays is not None,
        "STORE_STATES": states is not None,
        "SCRATCH": run.scratch,
        "CHECK": call.gated and raised is not None,
    }
    tile = state_tile(call, run.count)
    call.launch(wide_recurrence, tile, (run.count * _programs_a_piece(call, tile),), arguments, switches)


def _borders(
    call: Call, inputs: Inputs, way: _Direction, run: Run, borders: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fills `borders` with the state before each piece (in reverse its gradient after it), and `final`."""
    from gla_kernels.wide_recurrence import scan_pieces

    local = torch.empty_like(borders)
    decays = borders.new_empty(borders.shape[:3]) if call.gated else None
    _recurrence(call, inputs, way, run, end=local, decays=decays)
    arguments = (
        local, decays, initial, borders, final, inputs.cu_seqlens, call.T, call.H, run.chunks * call.plan.chunk_size,
    )  # fmt: skip
    switches = {
        "BLOCK": _SCAN_BLOCK,
        "REVERSE": way.reverse,
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
    }
    blocks = -(-call.K * call.V // _SCAN_BLOCK)
    call.launch(scan_pieces, call.plan.forward, (call.sequences * call.H, blocks), arguments, switches)


def _readout(
    call: Call, inputs: Inputs, way: _Direction, other: torch.Tensor, run: Run, states: torch.Tensor,
    out: torch.Tensor, flags: torch.Tensor, raised: torch.Tensor,
) -> None:  # fmt: skip
    from gla_kernels.wide_readout import wide_readout

    run, chunks = run.of_chunks(call)
    arguments = (
        other, way.x, way.y, inputs.g, states, out, flags, raised, inputs.cu_seqlens, call.scale,
        *strides_of(other, way.x, way.y, inputs.g), call.T, call.H, call.sequences, run.base, run.stride, run.chunks,
    )  # fmt: skip
    programs = (chunks * call.H,)
    call.launch(wide_readout, wide_readout_tile(call.K), programs, arguments, {"REVERSE": way.reverse})


def _gradients(
    call: Call, inputs: Inputs, do: torch.Tensor, run: Run, states: torch.Tensor, dstates: torch.Tensor,
    flags: torch.Tensor, failed: torch.Tensor, gradients: Gradients,
) -> None:  # fmt: skip
    from gla_kernels.wide_gradients import wide_gradients

    run, chunks = run.of_chunks(call)
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, do, states, dstates, flags, failed,
        gradients.dq, gradients.dk, gradients.dv, gradients.dg, inputs.cu_seqlens, call.scale,
        *inputs.strides(do), call.T, call.H, call.sequences, run.base, run.stride, run.chunks,
    )  # fmt: skip
    tile = call.plan.backward
    blocks_k = (call.K + tile.block_k - 1) // tile.block_k
    call.launch(wide_gradients, tile, (chunks * call.H * blocks_k,), arguments, {})


def forward_kernel(tile: Tile) -> Any:
    """The kernel that makes o and the states at once, for K up to 128, by columns of the state that a program holds."""
    if tile.block_v == 256:
        from gla_kernels.wide_forward_pair import wide_forward_pair

        return wide_forward_pair
    from gla_kernels.wide_forward import wide_forward

    return wide_forward


def _forward(
    call: Call, inputs: Inputs, flags: torch.Tensor, run: Run, o: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None, states: torch.Tensor | None, checkpoints: torch.Tensor | None = None,
) -> None:  # fmt: skip
    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, o, initial, final, states, checkpoints, flags, inputs.cu_seqlens,
        call.scale,
        *inputs.strides(), *_steps(initial, final),
        call.T, call.H, call.sequences, run.base, run.stride, run.chunks, call.every,
    )  # fmt: skip
    switches = {
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "STORE_STATES": states is not None,
        "STORE_CHECKPOINTS": checkpoints is not None,
    }
    tile = state_tile(call, run.count)
    call.launch(forward_kernel(tile), tile, (run.count * _programs_a_piece(call, tile),), arguments, switches)


def _fused(call: Call) -> bool:
    """Whether key columns are one block, so that one kernel makes the states and what is read from them."""
    return call.plan.forward.block_k >= call.K


def _outputs(
    call: Call, inputs: Inputs, flags: torch.Tensor, run: Run, o: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None, states: torch.Tensor | None,
) -> None:  # fmt: skip
    """o and the final states of a run of pieces from their initial ones, and the states of their chunks."""
    if _fused(call):
        _forward(call, inputs, flags, run, o, initial, final, states)
        return
    # Key columns in several blocks need the states between kernels, even if nobody keeps them.
    if states is None:
        slots = run.count * run.chunks if run.scratch else call.slots(1)
        states = inputs.q.new_empty(call.state_shape(slots))
    way = _Direction(inputs.k, inputs.v, reverse=False)
    _recurrence(call, inputs, way, run, initial=initial, end=final, states=states, raised=flags)
    _readout(call, inputs, way, inputs.q, run, states, o, flags, flags)


def run_forward(
    call: Call,
    inputs: Inputs,
    flags: torch.Tensor,
    *,
    o: torch.Tensor,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    states: torch.Tensor | None,
    checkpoints: torch.Tensor | None,
) -> None:
    """The plain form's o and what else is not None; `checkpoints` are the states before every `call.every` chunks."""
    if checkpoints is not None and _fused(call) and _is_whole(call, choose_pieces(call)):
        _forward(call, inputs, flags, whole(call), o, initial, final, None, checkpoints)
        return
    if checkpoints is not None and _carries(call):
        slots = checkpoints.unflatten(0, (call.sequences, -1))
        slots[:, 0] = 0 if initial is None else initial
        after = [*slots.unbind(1)[1:], call.new_states(inputs.q) if final is None else final]
        for run, state in zip(_slices(call), after, strict=True):
            _outputs(call, inputs, flags, run, o, slots[:, run.base], state, None)
        return
    run = choose_pieces(call) if checkpoints is None else cut(call, call.every)
    if checkpoints is None and _is_whole(call, run):
        _outputs(call, inputs, flags, run, o, initial, final, states)
        return
    borders = call.new_states(inputs.q, run.count) if checkpoints is None else checkpoints
    _borders(call, inputs, _Direction(inputs.k, inputs.v, reverse=False), run, borders, initial, final)
    if checkpoints is None or _fused(call):
        _outputs(call, inputs, flags, run, o, borders, None, states)
        return
    for group in _groups(call):
        _outputs(call, inputs, flags, group, o, borders[group.base : group.base + group.count], None, None)


def run_backward(
    call: Call,
    inputs: Inputs,
    do: torch.Tensor,
    kept: torch.Tensor,
    flags: torch.Tensor,
    failed: torch.Tensor,
    gradients: Gradients,
    *,
    dfinal: torch.Tensor | None,
    dinitial: torch.Tensor | None,
    materialized: bool,
) -> None:
    """The plain form's gradients; `kept` holds the state before every chunk or, else, every `call.every`-th."""
    forward = _Direction(inputs.k, inputs.v, reverse=False)
    reverse = _Direction(inputs.q, do, reverse=True)

    def do_run(
        run: Run, after: torch.Tensor | None, before: torch.Tensor | None, states: torch.Tensor, dstates: torch.Tensor
    ) -> None:
        _recurrence(call, inputs, reverse, run, initial=after, end=before, states=dstates, raised=failed)
        if not _fused(call):
            _readout(call, inputs, reverse, inputs.k, run, dstates, gradients.dv, flags, failed)
        _gradients(call, inputs, do, run, states, dstates, flags, failed, gradients)

    after = dfinal
    run = choose_pieces(call) if materialized else cut(call, call.every)
    carries = not materialized and _carries(call)
    if not carries and not (materialized and _is_whole(call, run)):
        after = call.new_states(inputs.q, run.count)
        _borders(call, inputs, reverse, run, after, dfinal, dinitial)
    if materialized:
        do_run(run, after, dinitial if _is_whole(call, run) else None, kept, torch.empty_like(kept))
        return
    states = inputs.q.new_empty(call.state_shape(scratch_slots(call)))
    dstates = torch.empty_like(states)
    if carries:
        before = call.new_states(inputs.q) if dinitial is None else dinitial
        # With a gradient after the last slice as after the others, all have the same kernel to compile.
        after = call.new_states(inputs.q, zero=True) if after is None else after
        slots = kept.unflatten(0, (call.sequences, -1))
        for run in reversed(list(_slices(call))):
            _recurrence(call, inputs, forward, run, initial=slots[:, run.base], states=states)
            do_run(run, after, before, states, dstates)
            after = before
        return
    for run in _groups(call):
        pieces = slice(run.base, run.base + run.count)
        _recurrence(call, inputs, forward, run, initial=kept[pieces], states=states)
        do_run(run, None if after is None else after[pieces], None, states, dstates)
