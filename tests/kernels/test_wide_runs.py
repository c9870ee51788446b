"""How the kernels for wide heads cut time: every chunk is done once, by whatever pieces and runs of them."""

from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gla_kernels.hopper.wide import pieces as wide_pieces
from gla_kernels.launching.buffers import readable
from gla_kernels.launching.call import Call
from gla_kernels.launching.plans import hopper_plan
from gla_kernels.portable.scan import scan_pieces

C = 64
LENGTHS = [[300, 1, 64, 500], [0, 16], [65, 0, 0, 130, 0], [4096], [64, 64, 64]]


def make_call(sequences, T, H=2, K=128, V=256, varlen=False):
    B = 1 if varlen else sequences
    return Call(B, T, H, K, V, sequences, varlen, True, 1.0, torch.bfloat16, hopper_plan(K, V, torch.bfloat16))


def first_slots(call, lengths, rows):
    """Where the pieces of `rows` tokens of each sequence begin, as the kernels reckon."""
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    if call.varlen:
        return [begin // rows + n for n, begin in enumerate(begins[:-1])]
    return [n * -(-call.T // rows) for n in range(len(lengths))]


def chunks_of(call, lengths, run):
    """The chunks (sequence, number) that a recurrence does when it is launched over a run, in order."""
    firsts = first_slots(call, lengths, run.chunks * C)
    for piece in range(run.count):
        slot = run.base + piece * run.stride
        n = bisect_right(firsts, slot) - 1
        begin = (slot - firsts[n]) * run.chunks
        for chunk in range(begin, min(begin + run.chunks, -(-lengths[n] // C))):
            yield n, chunk


def all_chunks(lengths):
    return [(n, chunk) for n, length in enumerate(lengths) for chunk in range(-(-length // C))]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("H", [1, 64])
def test_every_chunk_of_packed_sequences_is_done_once(lengths, H):
    call = make_call(len(lengths), sum(lengths), H=H, varlen=True)
    for run in (
        wide_pieces.whole(call),
        wide_pieces.choose_pieces(call),
        wide_pieces.cut(call, call.checkpoint_chunks),
    ):
        assert sorted(chunks_of(call, lengths, run)) == all_chunks(lengths)
    done = [chunk for run in wide_pieces.groups(call) for chunk in chunks_of(call, lengths, run)]
    assert sorted(done) == all_chunks(lengths)


@pytest.mark.parametrize(("sequences", "T"), [(1, 1), (1, 32768), (3, 4097), (40, 64)])
@pytest.mark.parametrize("H", [1, 64])
def test_every_chunk_of_a_batch_is_done_once(sequences, T, H):
    call, lengths = make_call(sequences, T, H=H), [T] * sequences
    for run in (
        wide_pieces.whole(call),
        wide_pieces.choose_pieces(call),
        wide_pieces.cut(call, call.checkpoint_chunks),
    ):
        assert sorted(chunks_of(call, lengths, run)) == all_chunks(lengths)
    for runs in (wide_pieces.groups(call), wide_pieces.slices(call)):
        assert sorted(chunk for run in runs for chunk in chunks_of(call, lengths, run)) == all_chunks(lengths)


def test_a_slice_is_the_same_piece_of_every_sequence_and_slices_go_forward():
    call = make_call(3, 4097)
    slices = [list(chunks_of(call, [4097] * 3, run)) for run in wide_pieces.slices(call)]
    assert all({n for n, _ in chunks} == {0, 1, 2} for chunks in slices)
    assert all(max(a)[1] < min(b, key=lambda chunk: chunk[1])[1] for a, b in pairwise(slices))


def test_few_heads_are_cut_and_many_are_not():
    assert wide_pieces.choose_pieces(make_call(1, 32768, H=4)).count == 32
    assert wide_pieces.choose_pieces(make_call(32, 2048, H=4)) == wide_pieces.whole(make_call(32, 2048, H=4))


# Heads of all sequences, and the value columns of a program, with gates per channel and without. A GPU of 132
# multiprocessors runs 2 x 66 programs of 128 columns in one round, 2 x 198 in three.
COLUMNS = [
    (1, 128, 128), (66, 128, 128), (67, 256, 256), (132, 256, 256), (133, 256, 128), (198, 256, 128), (199, 256, 256),
    (264, 256, 256), (265, 256, 256), (1000, 256, 256),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "gated", "others"), COLUMNS)
def test_programs_hold_the_columns_of_the_state_whose_rounds_take_less_time(heads, gated, others):
    call = replace(make_call(1, 2048, H=heads), multiprocessors=132)
    for tile in (wide_pieces.forward_tile, wide_pieces.recurrence_tile):
        assert tile(call, 1).block_v == gated
        assert tile(replace(call, gated=False), 1).block_v == others
        assert tile(replace(call, gated=False, head_gated=True), 1).block_v == others


@pytest.mark.parametrize(
    ("multiprocessors", "heads", "K", "V", "columns"),
    [
        (78, 39, 128, 256, 128), (78, 40, 128, 256, 256), (78, 79, 128, 256, 128), (78, 118, 128, 256, 256),
        (132, 16, 512, 256, 128), (132, 17, 512, 256, 256), (132, 34, 512, 256, 128),
        (132, 22, 128, 768, 128), (132, 23, 128, 768, 256), (132, 45, 128, 768, 128),
    ],
)  # fmt: skip
def test_programs_are_counted_by_blocks_of_keys_and_values_and_rounds_by_multiprocessors(
    multiprocessors, heads, K, V, columns
):
    call = replace(make_call(1, 2048, H=heads, K=K, V=V), multiprocessors=multiprocessors, gated=False)
    assert wide_pieces.recurrence_tile(call, 1).block_v == columns


def test_pieces_count_as_sequences_do_and_values_of_320_columns_have_narrow_programs():
    few = make_call(1, 32768, H=4)
    assert wide_pieces.recurrence_tile(few, wide_pieces.choose_pieces(few).count).block_v == 256
    assert wide_pieces.recurrence_tile(few, 8).block_v == 128
    assert wide_pieces.recurrence_tile(make_call(32, 2048, H=4, V=320), 32).block_v == 128


@pytest.mark.parametrize(("V", "heads", "stages"), [(64, 132, 6), (64, 133, 4), (128, 132, 3), (128, 133, 2)])
def test_a_recurrence_without_gates_has_more_chunks_in_memory_if_there_is_a_multiprocessor_for_each_program(
    V, heads, stages
):
    call = make_call(1, 2048, H=heads, V=V)
    assert wide_pieces.recurrence_tile(call, 1).stages == 2
    assert wide_pieces.recurrence_tile(replace(call, gated=False, multiprocessors=132), 1).stages == stages


@pytest.mark.parametrize(("K", "forward", "recurrence"), [
    (128, (128, 256), (128, 256)), (144, (256, 128), (128, 256)), (256, (256, 128), (128, 256)),
    (272, (128, 256), (128, 256)),
])  # fmt: skip
def test_a_state_of_up_to_256_keys_is_walked_whole_when_it_is_read_out_too(K, forward, recurrence):
    call = make_call(32, 2048, H=4, K=K)
    tiles = (wide_pieces.forward_tile(call, 32), wide_pieces.recurrence_tile(call, 32))
    assert [(tile.block_k, tile.block_v) for tile in tiles] == [forward, recurrence]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("lengths", [[300, 0, 65], None], ids=str)
def test_the_scan_gives_the_state_at_every_border(lengths, gated, reverse):
    generator = torch.Generator().manual_seed(0)
    rows, H, K, V = 64, 2, 4, 6
    each = lengths or [200, 200]
    call = make_call(len(each), sum(each) if lengths else 200, H=H, K=K, V=V, varlen=lengths is not None)
    cu = torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32) if lengths else None
    firsts = first_slots(call, each, rows)
    pieces = call.T // rows + len(each) if lengths else firsts[-1] + -(-call.T // rows)
    local = torch.randn(pieces, H, K, V, generator=generator)
    decays = -torch.rand(pieces, H, K, generator=generator)
    initial = torch.randn(len(each), H, K, V, generator=generator)
    borders, final = torch.full_like(local, float("nan")), torch.full_like(initial, float("nan"))
    flags = torch.ones(1000, dtype=torch.int32)
    scan_pieces[(len(each) * H, 1)](
        local, decays, initial, borders, final, flags, cu, call.T, H, rows, 999, K=K, V=V, BLOCK=32, STAGES=2,
        GATED=gated, VARLEN=lengths is not None, REVERSE=reverse, HAS_INITIAL=True, STORE_FINAL=True, PDL=False,
        CLEAR=gated,
    )  # fmt: skip
    assert flags.tolist() == [int(not gated)] * 999 + [1]
    for n, length in enumerate(each):
        state = initial[n]
        order = range(firsts[n], firsts[n] - (-length // rows))
        for slot in reversed(order) if reverse else order:
            torch.testing.assert_close(borders[slot], state)
            state = state * (decays[slot].exp2()[..., None] if gated else 1.0) + local[slot]
        torch.testing.assert_close(final[n], state)


@pytest.mark.parametrize("make", [
    lambda: torch.randn(2 * 64 * 128 + 8).bfloat16()[1 : 1 + 2 * 64 * 128].view(2, 64, 1, 128),
    lambda: torch.randn(2, 64, 128).bfloat16()[..., None].transpose(-1, -2),
], ids=["an address that is not aligned", "a stride of 1 for a single head"])  # fmt: skip
def test_what_copies_of_16_bytes_cannot_read_is_copied_although_contiguous(make):
    x = readable(make_call(2, 64), make())
    assert x.data_ptr() % 16 == 0
    assert all(stride % 16 == 0 for stride in x.stride()[:3])
    assert x.shape == (2, 64, 1, 128)


@pytest.mark.parametrize(
    ("B", "T", "H", "checkpoint_chunks"),
    [(1, 4096, 16, 4), (1, 32768, 16, 32), (1, 32768, 4, 8), (2, 300, 2, 4), (32, 4096, 16, 16), (1, 8192, 89, 16)],
)
def test_checkpoints_of_few_narrow_heads_fill_the_gpu(B, T, H, checkpoint_chunks):
    call = make_call(B, T, H, 64, 64)
    assert call.checkpoint_chunks == checkpoint_chunks
    assert call.slots(checkpoint_chunks) * H >= 256 or checkpoint_chunks == 4
