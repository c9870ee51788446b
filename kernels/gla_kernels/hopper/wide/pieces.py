"""How the plain form for wide heads on Hopper cuts sequences in time: pieces, and the run of pieces of each launch.

If there are enough sequences and heads to fill the GPU, each sequence is one piece. Otherwise sequences are cut: first
every piece is computed from a state of zero and a scan gives the states at the borders, then pieces are independent. If
sequences fill the GPU a number of times and a few are left, these are a run apart (`runs`), most often cut.

A backward that was given checkpoints recomputes the other states for a run of pieces at a time. A run is the same piece
of every sequence, with the state's gradient carried from one run to the next. If sequences are few or packed, it is as
many pieces as fill the GPU, after another scan for the gradients at the borders.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from gla_kernels.launching.call import Call, decided_once
from gla_kernels.launching.plans import (
    WIDE_BACKWARD,
    Tile,
    narrower_state_tile,
    recurrence_stages,
    wide_recurrence_tile,
)
from gla_kernels.limits import WIDE_KEY_BLOCK

# Sequences of at most so many chunks may be cut into single ones. Of longer ones, so many states at borders cost more
# than they save: at 1, 2k, 4, 128, 256, pieces of 1, 2 and 4 chunks take 0.072, 0.054 and 0.054 ms forward + backward
# without gates, 0.097, 0.083 and 0.098 with one per channel.
SHORT_CHUNKS = 8
# How often a run of pieces fills the GPU: more takes fewer launches, but more memory for the run's states.
ROUNDS = 4
# Time of a round of programs with 256 columns of the state over that of a round with 128, with gates per channel and
# otherwise. H200, forward, nothing kept, K = 128, 32 chunks, us per round: 180 and 130 with gates per channel, 97 (112
# if full) and 62 without gates, 107 (119) and 79 with a gate per head.
ROUND_OF_256_COLUMNS_GATED = Fraction(7, 5)
ROUND_OF_256_COLUMNS = Fraction(5, 3)
# The same for `runs` and a gate per head. It is what full rounds take in a forward that keeps nothing. With states, two
# rounds with 256 columns take 319 us and three with 128 take 291 (44 and 48, 2k, 4, 128, 256), so tiles are not chosen
# by this.
FULL_ROUND_OF_256_COLUMNS_PER_HEAD = Fraction(3, 2)
# Sequences beyond full rounds may be cut into pieces. What these take, in chunks of a round of whole sequences: so many
# for each chunk of a piece, because the state is first walked alone; for launches; and for states at borders, if there
# is a piece for each multiprocessor. 34, 2k, 4, 128, 256 takes 23 us more than 33, 37 takes 55, and a chunk 3.4.
REST_CHUNK, REST_LAUNCHES, REST_BORDERS = 2, 2, 5
# The part of the time that to do the rest apart must save at least.
REST_GAIN = Fraction(1, 8)


# The most chunks of a whole sequence whose sums of gates its program makes.
SUMS_OF_SEQUENCES = 32


@dataclass(frozen=True)
class Run:
    """The pieces of a launch: `count` pieces of `chunks` chunks, with numbers base, base + stride, ...

    `scratch`: states go to a buffer with room for these pieces only, not to one with a slot for every chunk.
    """

    base: int
    stride: int
    count: int
    chunks: int
    scratch: bool

    def arguments(self, call: Call) -> dict[str, int]:
        """The run as kernels take it, by name."""
        return {"N": call.sequences, "base": self.base, "stride": self.stride, "piece_chunks": self.chunks}

    def of_chunks(self, call: Call) -> tuple["Run", int]:
        """The same run for kernels with one program per chunk, and its number of chunks."""
        if self.scratch:
            return self, self.count * self.chunks
        return replace(self, chunks=1), call.slots(1)


def programs_a_piece(call: Call, tile: Tile) -> int:
    """Programs that walk the state through one piece of a sequence, for all heads."""
    return call.H * call.parts(tile) * ((call.K + tile.block_k - 1) // tile.block_k)


def occupies(call: Call, tile: Tile, pieces: int) -> bool:
    """Whether a kernel that walks the state through so many pieces has programs for three quarters of the GPU."""
    return pieces * programs_a_piece(call, tile) >= call.multiprocessors * 3 // 4


def rounds(call: Call, tile: Tile, pieces: int) -> int:
    """Rounds of programs that walk the state through so many pieces, if each fills a multiprocessor."""
    return -(-pieces * programs_a_piece(call, tile) // call.multiprocessors)


def _round(call: Call) -> Fraction:
    return ROUND_OF_256_COLUMNS_GATED if call.gated else ROUND_OF_256_COLUMNS


def state_tile(call: Call, wider: Tile, pieces: int) -> Tile:
    """The tile of a kernel that walks the state: `wider` or a narrower one, whichever takes less time in all rounds.

    If both take as long, the wider one, whose programs read less.
    """
    narrower = narrower_state_tile(wider)
    longer = _round(call)
    return wider if longer * rounds(call, wider, pieces) <= rounds(call, narrower, pieces) else narrower


@decided_once
def forward_tile(call: Call, pieces: int) -> Tile:
    """The tile of the kernel that walks the state and computes o."""
    return state_tile(call, call.plan.forward, pieces)


def specializes(call: Call, tile: Tile) -> bool:
    """Whether the kernel with such a tile that computes o has warps of its own for copies."""
    return tile.block_v == 2 * WIDE_KEY_BLOCK and not call.gated


@decided_once
def recurrence_tile(call: Call, pieces: int) -> Tile:
    """The tile of `wide_recurrence`."""
    tile = state_tile(call, wide_recurrence_tile(call.V), pieces)
    alone = pieces * programs_a_piece(call, tile) <= call.multiprocessors
    return replace(tile, stages=recurrence_stages(tile.block_v, call.gated, alone))


def fits_one_backward(call: Call) -> bool:
    """Whether a program can hold the full gradient of the state. V up to 64 is left to tiles of 64 columns."""
    tile = WIDE_BACKWARD
    return tile.block_k >= call.K and tile.block_v >= call.V > tile.block_v // 2


@decided_once
def one_backward(call: Call, pieces: int) -> bool:
    """Whether one kernel computes all gradients of so many pieces: they fit, and its programs occupy the GPU."""
    return fits_one_backward(call) and occupies(call, WIDE_BACKWARD, pieces)


@decided_once
def whole(call: Call) -> Run:
    """Every sequence as one piece.

    The piece has one chunk more than the longest sequence, so that no sequence has a second piece, not even an empty
    sequence after the last token.
    """
    return Run(0, 1, call.sequences, call.chunks + 1, False)


@decided_once
def cut(call: Call, chunks: int) -> Run:
    """All sequences cut into pieces of `chunks` chunks."""
    return Run(0, 1, call.slots(chunks), chunks, False)


def cut_into(call: Call, wanted: int, multiple: int = 1, least: int = 1) -> Run:
    """All sequences cut into at most `wanted` pieces of a multiple of `multiple` chunks, or whole if they are short.

    `least`: the fewest chunks of a piece.
    """
    # The last piece of a packed sequence may be nearly empty.
    pieces = wanted - call.sequences if call.varlen else wanted // call.sequences
    chunks = max(-(-call.chunks // pieces), least)
    chunks = -(-chunks // multiple) * multiple
    return cut(call, chunks) if chunks < call.chunks else whole(call)


def half_occupied(call: Call, tile: Tile) -> bool:
    """Whether programs for whole sequences, with the narrower form of `tile`, occupy more than half of the GPU."""
    return 2 * call.sequences * programs_a_piece(call, narrower_state_tile(tile)) > call.multiprocessors


@decided_once
def choose_pieces(call: Call) -> Run:
    """Whole sequences or, if these are long enough and leave half of the GPU idle, pieces that just occupy all.

    Forward + backward of 1, 256, 4, 128, 256 (4 chunks) takes 0.032 ms whole and 0.035 in pieces without gates, 0.066
    and 0.057 with one per channel; of 128 tokens, all take longer in pieces.
    """
    if call.chunks < (4 if call.gated else 5) or half_occupied(call, call.plan.forward):
        return whole(call)
    least = 1 if call.chunks <= SHORT_CHUNKS else 2
    return cut_into(call, call.multiprocessors // programs_a_piece(call, call.plan.forward), least=least)


def is_whole(call: Call, run: Run) -> bool:
    """Whether the pieces of a run are whole sequences."""
    return run.chunks > call.chunks


def sequences_of(call: Call, run: Run) -> slice:
    """The sequences of which a run has all pieces."""
    if call.varlen:
        return slice(0, call.sequences)
    pieces = -(-call.chunks // run.chunks)
    return slice(run.base // pieces, (run.base + run.count) // pieces)


@decided_once
def runs(call: Call, kept: bool = True) -> tuple[Run, ...]:
    """The runs of a pass over all chunks: one (`choose_pieces`), or full rounds of whole sequences, and the rest.

    With the others, a rest of few sequences would take as long as a full round. Apart, it is cut into pieces or, in a
    forward of which nothing is `kept`, has narrower programs. Writing states takes full rounds so long that the latter
    would gain nothing. All passes count by the forward's programs and times; a backward's recurrence has as many.
    """
    run, tile = choose_pieces(call), call.plan.forward
    programs = programs_a_piece(call, tile)
    at_once = call.multiprocessors // programs
    full, rest = divmod(call.sequences, max(at_once, 1))
    if call.varlen or call.K > WIDE_KEY_BLOCK or not is_whole(call, run) or not full or not rest:
        return (run,)

    narrower = narrower_state_tile(tile)
    longer = FULL_ROUND_OF_256_COLUMNS_PER_HEAD if call.head_gated else _round(call)
    longer = Fraction(1) if narrower == tile else longer

    def whole_time(sequences: int) -> Fraction:
        return call.chunks * min(Fraction(rounds(call, tile, sequences)), rounds(call, narrower, sequences) / longer)

    chunks = max(-(-call.chunks // (at_once // rest)), 2)
    pieces = -(-call.chunks // chunks)
    borders = Fraction(REST_BORDERS * rest * pieces * programs, call.multiprocessors)
    apart = Run(full * at_once * pieces, 1, rest * pieces, chunks, False)
    time = REST_CHUNK * chunks + REST_LAUNCHES + borders
    if not kept and whole_time(rest) < time:
        apart, time = replace(run, base=full * at_once, count=rest), whole_time(rest)
    if call.chunks * full + time > (1 - REST_GAIN) * whole_time(call.sequences):
        return (run,)
    return replace(run, count=full * at_once), apart


@decided_once
def sums_made(call: Call) -> int:
    """For how many chunks a program of a forward's first kernel makes the sums of gates; 0 if another kernel has to.

    `specialized_forward` makes them, if it is the only kernel: over whole sequences, in one round of programs (then
    nothing is a rest, see `runs`).
    """
    run = choose_pieces(call)
    if not call.head_gated or call.K > WIDE_KEY_BLOCK or call.chunks > SUMS_OF_SEQUENCES or not is_whole(call, run):
        return 0
    tile = forward_tile(call, run.count)
    return SUMS_OF_SEQUENCES if specializes(call, tile) and rounds(call, tile, run.count) == 1 else 0


@decided_once
def carries(call: Call) -> bool:
    """Whether a run is the same piece of `call.every` chunks of all sequences, and the state's gradient is carried on.

    This depends on how `wide_recurrence`, which recomputes the states, occupies the GPU.
    """
    return not call.varlen and (
        call.chunks <= call.checkpoint_chunks or half_occupied(call, wide_recurrence_tile(call.V))
    )


def slices(call: Call) -> Iterator[Run]:
    """Runs with the first piece of `call.every` chunks of every sequence, then the second, ..."""
    pieces = -(-call.chunks // call.checkpoint_chunks)
    for piece in range(pieces):
        yield Run(piece, pieces, call.sequences, call.checkpoint_chunks, True)


def groups(call: Call) -> Iterator[Run]:
    """Runs with as many pieces of `call.every` chunks as fill the GPU `ROUNDS` times, then the next, ..."""
    narrower = narrower_state_tile(wide_recurrence_tile(call.V))
    at_once = max(1, ROUNDS * call.multiprocessors // programs_a_piece(call, narrower))
    pieces = call.slots(call.checkpoint_chunks)
    for base in range(0, pieces, at_once):
        yield Run(base, 1, min(at_once, pieces - base), call.checkpoint_chunks, True)


@decided_once
def first_run(call: Call) -> Run:
    """The first and largest run of pieces whose states are recomputed."""
    return next(slices(call) if carries(call) else groups(call))


@decided_once
def parks_dstates(call: Call) -> bool:
    """Whether the gradient of a chunk's state is parked in the memory of its dq, dk and dg (see `wide/recurrence.py`).

    There is room for 256 value columns with float32 gates, if all chunks are full, which is not known of packed
    sequences. Up to 128 columns, `wide_backward` needs no memory for the gradient if there are enough programs.
    """
    fits = call.K == WIDE_KEY_BLOCK and WIDE_KEY_BLOCK < call.V <= 2 * WIDE_KEY_BLOCK
    return fits and call.gated and not call.bfloat16_gates and not call.varlen and call.T % call.plan.chunk_size == 0


@decided_once
def scratch_slots(call: Call) -> int:
    """Chunks whose states need room at the same time if states are not kept."""
    first = first_run(call)
    return first.count * first.chunks


@decided_once
def form(call: Call) -> tuple[object, ...]:
    """The part of a call's sizes that decides which kernels it launches: how sequences are cut, and which tiles fit."""
    passes = runs(call), runs(call, kept=False)
    *_, last = slices(call) if carries(call) else groups(call)
    checkpointed = cut(call, call.checkpoint_chunks)
    counts = [run.count for run in (*passes[0], *passes[1], checkpointed, first_run(call), last)]
    tiles = (tile(call, count) for tile in (forward_tile, recurrence_tile) for count in counts)
    one = (one_backward(call, count) for count in counts)
    return (
        *(is_whole(call, run) or call.tile_of_scan(run.chunks) for of_pass in passes for run in of_pass),
        call.tile_of_scan(call.checkpoint_chunks),
        call.chunks > call.checkpoint_chunks,
        sums_made(call),
        carries(call),
        parks_dstates(call),
        *tiles,
        *one,
    )
