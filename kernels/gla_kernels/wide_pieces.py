"""How the plain form for wide heads on Hopper cuts time: pieces of sequences, and the runs of them in a launch.

A sequence and head is one piece where there are enough of them for the GPU. Else sequences are cut: the states at the
pieces' borders come first, by a scan over pieces that each began at zero, and then pieces know nothing of each other.

A backward that was given a state every so many chunks makes the others again, a run of pieces at a time: the same
piece of every sequence, with the gradient carried from one to the next; or, where sequences are few or packed, as many
pieces as fill the GPU, after another scan for the gradients at their borders.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gla_kernels.call import Call
from gla_kernels.launch import MULTIPROCESSORS, WIDE_BACKWARD, Tile, narrower_state_tile, wide_recurrence_tile
from gla_kernels.limits import WIDE_KEY_BLOCK

# Chunks of a piece at least: below, the borders cost more than the programs gain.
MIN_PIECE_CHUNKS = 4
# How often a run of pieces fills the GPU: fewer launches against more memory for the states in it.
ROUNDS = 4


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


def programs_a_piece(call: Call, tile: Tile) -> int:
    """Programs that walk the state through one piece of a sequence, all heads together."""
    return call.H * call.parts(tile) * ((call.K + tile.block_k - 1) // tile.block_k)


def occupies(call: Call, tile: Tile, pieces: int) -> bool:
    """Whether the programs of a kernel that walks the state through so many pieces occupy the GPU."""
    return pieces * programs_a_piece(call, tile) >= MULTIPROCESSORS * 3 // 4


def state_tile(call: Call, wider: Tile, pieces: int) -> Tile:
    """The tile of a kernel that walks the state: `wider` where programs of it occupy the GPU, else a narrower."""
    return wider if occupies(call, wider, pieces) else narrower_state_tile(wider)


def forward_tile(call: Call, pieces: int) -> Tile:
    """The tile of the kernel that makes o and walks the state."""
    return state_tile(call, call.plan.forward, pieces)


def recurrence_tile(call: Call, pieces: int) -> Tile:
    """The tile of `wide_recurrence`."""
    return state_tile(call, wide_recurrence_tile(call.V), pieces)


def fits_one_backward(call: Call) -> bool:
    """Whether a program can hold the gradient of the state whole. V up to 64 is left to tiles of 64 columns."""
    tile = WIDE_BACKWARD
    return tile.block_k >= call.K and tile.block_v >= call.V > tile.block_v // 2


def one_backward(call: Call, pieces: int) -> bool:
    """Whether one kernel makes all gradients of so many pieces: it can, and its programs occupy the GPU."""
    return fits_one_backward(call) and occupies(call, WIDE_BACKWARD, pieces)


def whole(call: Call) -> Run:
    """Every sequence as one piece.

    Of one chunk more than there are, so that no sequence, nor an empty one behind the last token, begins a second.
    """
    return Run(0, 1, call.sequences, call.chunks + 1, False)


def cut(call: Call, chunks: int) -> Run:
    """All pieces of `chunks` chunks."""
    return Run(0, 1, call.slots(chunks), chunks, False)


def half_occupied(call: Call, tile: Tile) -> bool:
    """Whether programs that do a whole sequence, in the narrower form of `tile`, leave half of the GPU idle at most."""
    return 2 * call.sequences * programs_a_piece(call, narrower_state_tile(tile)) > MULTIPROCESSORS


def choose_pieces(call: Call) -> Run:
    """Whole sequences, or, where these leave half of the multiprocessors idle, pieces that just occupy all."""
    if half_occupied(call, call.plan.forward):
        return whole(call)
    wanted = MULTIPROCESSORS // programs_a_piece(call, call.plan.forward)
    # A packed sequence may end in a piece that is nearly empty.
    pieces = wanted - call.sequences if call.varlen else wanted // call.sequences
    chunks = max(-(-call.chunks // pieces), MIN_PIECE_CHUNKS)
    return cut(call, chunks) if chunks < call.chunks else whole(call)


def is_whole(call: Call, run: Run) -> bool:
    """Whether a run's pieces are whole sequences."""
    return run.chunks > call.chunks


def carries(call: Call) -> bool:
    """Whether pieces of `call.every` chunks are done one after the other in every sequence, all sequences at once.

    `wide_recurrence` decides, which makes the states again.
    """
    return not call.varlen and (call.chunks <= call.every or half_occupied(call, wide_recurrence_tile(call.V)))


def slices(call: Call) -> Iterator[Run]:
    """The first piece of `call.every` chunks of every sequence, then the second, ..."""
    pieces = -(-call.chunks // call.every)
    for piece in range(pieces):
        yield Run(piece, pieces, call.sequences, call.every, True)


def groups(call: Call) -> Iterator[Run]:
    """As many pieces of `call.every` chunks as fill the GPU `ROUNDS` times, then the next, ..."""
    narrower = narrower_state_tile(wide_recurrence_tile(call.V))
    at_once = max(1, ROUNDS * MULTIPROCESSORS // programs_a_piece(call, narrower))
    pieces = call.slots(call.every)
    for base in range(0, pieces, at_once):
        yield Run(base, 1, min(at_once, pieces - base), call.every, True)


def first_run(call: Call) -> Run:
    """The first run of pieces whose states are made again, and the largest."""
    return next(slices(call) if carries(call) else groups(call))


def parks(call: Call) -> bool:
    """Whether the gradient of a chunk's state waits in the memory of its dq, dk and dg (`wide_recurrence`).

    They have room for 256 value columns, with gates, and where all chunks have all of their rows: of packed sequences
    nobody knows. Up to 128 columns, `wide_backward` needs no memory for it where programs are enough.
    """
    fits = call.K == WIDE_KEY_BLOCK and WIDE_KEY_BLOCK < call.V <= 2 * WIDE_KEY_BLOCK
    return fits and call.gated and not call.varlen and call.T % call.plan.chunk_size == 0


def scratch_slots(call: Call) -> int:
    """Chunks whose states a call needs room for at once when they are not kept."""
    first = first_run(call)
    return first.count * first.chunks


def form(call: Call) -> tuple[object, ...]:
    """What of a call's sizes decides which kernels it launches: how its time is cut, and the tiles for that."""
    pieces = choose_pieces(call)
    *_, last = slices(call) if carries(call) else groups(call)
    counts = (pieces.count, cut(call, call.every).count, first_run(call).count, last.count)
    tiles = (tile(call, count) for tile in (forward_tile, recurrence_tile) for count in counts)
    one = (one_backward(call, count) for count in counts)
    return is_whole(call, pieces), call.chunks > call.every, carries(call), parks(call), *tiles, *one
