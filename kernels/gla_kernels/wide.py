"""The launches of the plain form for wide heads on Hopper: time in pieces, key columns in blocks.

One sequence and head is one piece if there are enough of them for the GPU. Else, and if states are not materialized,
sequences are cut: the states at the borders of pieces come first, and then pieces are independent of each other. A
backward that was given borders alone makes the states in them again, for so many pieces at a time as fill the GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gla_kernels.call import Call, Gradients, Inputs
from gla_kernels.launch import MULTIPROCESSORS, wide_readout_tile

# Chunks of a piece at least: below, the borders cost more than the programs gain.
MIN_PIECE_CHUNKS = 4
# How often a group of pieces fills the GPU: fewer launches against more memory for the states in it.
ROUNDS = 4
# Numbers of a state that a program of the scan over pieces does.
_SCAN_BLOCK = 1024


@dataclass(frozen=True)
class Pieces:
    """How time is cut: pieces of `chunks` chunks, `count` in all sequences together; `whole`: a sequence is one."""

    chunks: int
    count: int
    whole: bool


def _programs_a_piece(call: Call) -> int:
    tile = call.plan.forward
    return call.H * call.parts(tile) * ((call.K + tile.block_k - 1) // tile.block_k)


def _cut(call: Call, chunks: int) -> Pieces:
    return Pieces(chunks, call.slots(chunks), False)


def choose_pieces(call: Call) -> Pieces:
    """Whole sequences, or, where these leave half of the multiprocessors idle, pieces that just occupy all."""
    wanted = MULTIPROCESSORS // _programs_a_piece(call)
    if wanted >= 2 * call.sequences:
        # A packed sequence may end in a piece that is nearly empty.
        pieces = wanted - call.sequences if call.varlen else wanted // call.sequences
        chunks = max(-(-call.chunks // pieces), MIN_PIECE_CHUNKS)
        if chunks < call.chunks:
            return _cut(call, chunks)
    # One chunk more than there are: no sequence, nor an empty one behind the last token, begins a second piece.
    return Pieces(call.chunks + 1, call.sequences, True)


@dataclass(frozen=True)
class _Direction:
    """What a recurrence runs on: k and v forward, q and do in reverse."""

    x: torch.Tensor
    y: torch.Tensor
    reverse: bool


def _strides(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3]))


def _recurrence(
    call: Call, inputs: Inputs, way: _Direction, pieces: Pieces, *, base: int = 0, count: int | None = None,
    initial: torch.Tensor | None = None, end: torch.Tensor | None = None, decays: torch.Tensor | None = None,
    states: torch.Tensor | None = None, scratch: bool = False, raised: torch.Tensor | None = None,
) -> None:  # fmt: skip
    from gla_kernels.wide_recurrence import wide_recurrence

    arguments = (
        way.x, way.y, inputs.g, initial, end, decays, states, raised, inputs.cu_seqlens, call.scale,
        *_strides(way.x, way.y, inputs.g), call.T, call.H, call.sequences, base, pieces.chunks,
    )  # fmt: skip
    switches = {
        "REVERSE": way.reverse,
        "HAS_INITIAL": initial is not None,
        "STORE_END": end is not None,
        "STORE_DECAYS": decays is not None,
        "STORE_STATES": states is not None,
        "SCRATCH": scratch,
        "CHECK": call.gated and raised is not None,
    }
    programs = (pieces.count if count is None else count) * _programs_a_piece(call)
    call.launch(wide_recurrence, call.plan.forward, (programs,), arguments, switches)


def _borders(
    call: Call, inputs: Inputs, way: _Direction, pieces: Pieces, borders: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None,
) -> None:  # fmt: skip
    """Fills `borders` with the state before each piece (in reverse its gradient after it), and `final`."""
    from gla_kernels.wide_recurrence import scan_pieces

    local = torch.empty_like(borders)
    decays = borders.new_empty(borders.shape[:3]) if call.gated else None
    _recurrence(call, inputs, way, pieces, end=local, decays=decays)
    arguments = (
        local, decays, initial, borders, final, inputs.cu_seqlens, call.T, call.H,
        pieces.chunks * call.plan.chunk_size,
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
    call: Call, inputs: Inputs, way: _Direction, other: torch.Tensor, states: torch.Tensor, out: torch.Tensor,
    flags: torch.Tensor, raised: torch.Tensor, chunks: int, base: int, piece_chunks: int,
) -> None:  # fmt: skip
    from gla_kernels.wide_readout import wide_readout

    arguments = (
        other, way.x, way.y, inputs.g, states, out, flags, raised, inputs.cu_seqlens, call.scale,
        *_strides(other, way.x, way.y, inputs.g), call.T, call.H, call.sequences, base, piece_chunks,
    )  # fmt: skip
    programs = (chunks * call.H,)
    call.launch(wide_readout, wide_readout_tile(call.K), programs, arguments, {"REVERSE": way.reverse})


def _gradients(
    call: Call, inputs: Inputs, do: torch.Tensor, states: torch.Tensor, dstates: torch.Tensor, flags: torch.Tensor,
    failed: torch.Tensor, gradients: Gradients, chunks: int, base: int, piece_chunks: int,
) -> None:  # fmt: skip
    from gla_kernels.wide_gradients import wide_gradients

    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, do, states, dstates, flags, failed,
        gradients.dq, gradients.dk, gradients.dv, gradients.dg, inputs.cu_seqlens, call.scale,
        *inputs.strides(do), call.T, call.H, call.sequences, base, piece_chunks,
    )  # fmt: skip
    tile = call.plan.backward
    blocks_k = (call.K + tile.block_k - 1) // tile.block_k
    call.launch(wide_gradients, tile, (chunks * call.H * blocks_k,), arguments, {})


def _fused(call: Call) -> bool:
    """Whether key columns are one block, so that one kernel makes the states and what is read from them."""
    return call.K <= call.plan.forward.block_k


@dataclass(frozen=True)
class _Group:
    """A run of pieces that is done at once: `count` from `base` on, `chunks` slots of chunks in its states."""

    base: int
    count: int
    chunks: int
    piece_chunks: int


def _groups(call: Call, pieces: Pieces, whole: bool) -> Iterator[_Group]:
    """All pieces at once, with a slot for every chunk; else so many as fill the GPU `ROUNDS` times."""
    if whole:
        yield _Group(0, pieces.count, call.slots(1), 1)
        return
    at_once = max(1, ROUNDS * MULTIPROCESSORS // _programs_a_piece(call))
    for base in range(0, pieces.count, at_once):
        count = min(at_once, pieces.count - base)
        yield _Group(base, count, count * pieces.chunks, pieces.chunks)


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
    way = _Direction(inputs.k, inputs.v, reverse=False)
    bounded = checkpoints is not None
    pieces = _cut(call, call.every) if bounded else choose_pieces(call)
    before = initial
    if not pieces.whole:
        before = call.new_borders(inputs.q, pieces.count) if checkpoints is None else checkpoints
        _borders(call, inputs, way, pieces, before, initial, final)
    end = final if pieces.whole else None
    if _fused(call):
        _fused_forward(call, inputs, flags, pieces, o, before, end, states)
        return
    # Key columns in several blocks need the states between kernels, even if nobody keeps them.
    if states is None:
        states = _scratch(call, inputs, pieces) if bounded else inputs.q.new_empty(call.kept_shape(True))
    for group in _groups(call, pieces, whole=not bounded):
        _recurrence(
            call, inputs, way, pieces, base=group.base, count=group.count, initial=before, end=end, states=states,
            scratch=bounded, raised=flags,
        )  # fmt: skip
        _readout(
            call, inputs, way, inputs.q, states, o, flags, flags, group.chunks, group.base, group.piece_chunks
        )  # fmt: skip


def _fused_forward(
    call: Call, inputs: Inputs, flags: torch.Tensor, pieces: Pieces, o: torch.Tensor, initial: torch.Tensor | None,
    final: torch.Tensor | None, states: torch.Tensor | None,
) -> None:  # fmt: skip
    from gla_kernels.wide_forward import wide_forward

    arguments = (
        inputs.q, inputs.k, inputs.v, inputs.g, o, initial, final, states, flags, inputs.cu_seqlens, call.scale,
        *inputs.strides(), call.T, call.H, call.sequences, pieces.chunks,
    )  # fmt: skip
    switches = {
        "HAS_INITIAL": initial is not None,
        "STORE_FINAL": final is not None,
        "STORE_STATES": states is not None,
    }
    tile = call.plan.forward
    call.launch(wide_forward, tile, (pieces.count * _programs_a_piece(call),), arguments, switches)


def _scratch(call: Call, inputs: Inputs, pieces: Pieces) -> torch.Tensor:
    """Room for the states of one group of pieces."""
    slots = max(group.chunks for group in _groups(call, pieces, whole=False))
    return inputs.q.new_empty(call.state_shape(slots))


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
    pieces = choose_pieces(call) if materialized else _cut(call, call.every)
    after = dfinal
    if not pieces.whole:
        after = call.new_borders(inputs.q, pieces.count)
        _borders(call, inputs, reverse, pieces, after, dfinal, dinitial)
    states = kept if materialized else _scratch(call, inputs, pieces)
    dstates = torch.empty_like(states)
    for group in _groups(call, pieces, whole=materialized):
        place: dict[str, Any] = {"base": group.base, "count": group.count, "scratch": not materialized}
        if not materialized:
            _recurrence(call, inputs, forward, pieces, initial=kept, states=states, **place)
        end = dinitial if pieces.whole else None
        _recurrence(call, inputs, reverse, pieces, initial=after, end=end, states=dstates, raised=failed, **place)
        chunks = group.chunks, group.base, group.piece_chunks
        if not _fused(call):
            _readout(call, inputs, reverse, inputs.k, dstates, gradients.dv, flags, failed, *chunks)
        _gradients(call, inputs, do, states, dstates, flags, failed, gradients, *chunks)
