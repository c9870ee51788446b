"""How the kernels for narrow heads cut time, and which of their programs start before the kernel before has ended."""

import pytest
import torch
from gla_kernels.hopper.narrow import launches as narrow
from gla_kernels.hopper.wide import pieces as wide_pieces
from gla_kernels.launching.buffers import Inputs
from gla_kernels.launching.call import Call
from gla_kernels.launching.plans import SCAN, SCAN_OF_MANY, hopper_plan
from gla_kernels.operators import passes


def make_call(B, T, H, K=64, V=64, gates="per channel", sequences=None):
    plan, per_head = hopper_plan(K, V, torch.bfloat16), gates == "per head"
    return Call(
        B, T, H, K, V, sequences or B, sequences is not None, gates == "per channel", 1.0, torch.bfloat16, plan,
        head_gated=per_head,
    )  # fmt: skip


def chunks_of_a_piece(call, run):
    return None if wide_pieces.is_whole(call, run) else run.chunks


@pytest.mark.parametrize(("B", "T", "H", "gates", "forward", "backward"), [
    (1, 64, 16, "per channel", None, None),
    (1, 256, 16, "per channel", None, 1),
    (1, 512, 16, "per channel", 1, 1),
    (1, 512, 16, "per head", 1, 1),
    (1, 512, 16, "none", None, 1),
    (1, 1024, 16, "none", 1, 1),
    (1, 4096, 16, "none", 4, 4),
    (4, 1024, 16, "per channel", None, 4),
    (4, 4096, 16, "per channel", 16, 16),
    (4, 4096, 16, "none", None, 16),
    (1, 8192, 88, "per channel", None, 43),
    (1, 8192, 89, "per channel", None, None),
])  # fmt: skip
def test_a_pass_is_cut_where_that_was_faster(B, T, H, gates, forward, backward):
    call = make_call(B, T, H, gates=gates)
    assert chunks_of_a_piece(call, narrow.forward_pieces(call, False)) == forward
    assert chunks_of_a_piece(call, narrow.choose_pieces(call)) == backward
    assert narrow.forward_clears(call, False) == (gates == "per channel" and forward is not None)
    assert narrow.backward_clears(call) == (gates == "per channel" and backward is not None)


@pytest.mark.parametrize(("T", "gates", "chunks"), [
    (192, "per channel", None), (256, "per channel", 1), (256, "per head", None), (256, "none", None),
    (320, "per head", 1), (512, "none", 1), (576, "none", 2), (2048, "per channel", 2), (32768, "none", 16),
])  # fmt: skip
def test_wide_heads_are_cut_into_single_chunks_if_these_are_few(T, gates, chunks):
    call = make_call(1, T, 4, 128, 256, gates=gates)
    assert chunks_of_a_piece(call, wide_pieces.choose_pieces(call)) == chunks


def test_a_packed_forward_is_cut_by_the_average_length():
    call = make_call(1, 8 * 256, 2, sequences=8)
    assert chunks_of_a_piece(call, narrow.forward_pieces(call, False)) is None
    assert chunks_of_a_piece(call, narrow.choose_pieces(call)) == 1


@pytest.mark.parametrize(("T", "chunks", "sequences", "tile"), [
    (4096, 8, None, SCAN), (4096, 7, None, SCAN_OF_MANY), (4096, 7, 8, SCAN),
])  # fmt: skip
def test_a_scan_over_many_pieces_has_smaller_programs(T, chunks, sequences, tile):
    assert make_call(1, T, 16, sequences=sequences).tile_of_scan(chunks) == tile


@pytest.fixture
def launched(monkeypatch):
    """Which kernels calls launch, and whether they may start early."""
    notes = []
    monkeypatch.setattr(
        Call, "launch", lambda self, kernel, *_, early=True: notes.append((kernel.__name__, early)),
    )  # fmt: skip
    return notes


def launch_both(call, keep, launched):
    """The kernels that a forward launches, and its backward, in order; the tensors have no data."""
    B, T, H, K, V = call.B, call.T, call.H, call.K, call.V
    q, k, v = (torch.empty(B, T, H, D, dtype=torch.bfloat16, device="meta") for D in (K, K, V))
    g = torch.empty(B, T, H, K, device="meta") if call.gated else None
    head_gates = torch.empty(B, T, H, device="meta") if call.head_gated else None
    cu_seqlens = torch.empty(call.sequences + 1, dtype=torch.int32, device="meta") if call.varlen else None
    inputs = Inputs(q, k, v, g, cu_seqlens, head_gates)
    o, _, kept, buffer = passes.launch_forward(call, inputs, None, False, keep)
    forward = launched.copy()
    launched.clear()
    gates = g is not None or head_gates is not None
    passes.launch_backward(call, inputs, torch.empty_like(o), None, kept, buffer, False, gates, keep)
    return forward, launched


@pytest.mark.parametrize("sequences", [None, 2])
@pytest.mark.parametrize("gates", ["none", "per head", "per channel"])
@pytest.mark.parametrize("keep", [passes.KEEP_STATES, passes.KEEP_CHECKPOINTS])
@pytest.mark.parametrize("T", [256, 1024, 8192])
def test_kernels_that_read_inputs_before_their_wait_are_never_the_first(T, keep, gates, sequences, launched):
    """The kernel before one is of the same call, and writes none of these inputs: a scan, or sums of gates.

    A recurrence reads early if these are made by a kernel of their own.
    """
    call = make_call(1, T, 4, gates=gates, sequences=sequences)
    for kernels in launch_both(call, keep, launched):
        names = [name for name, _ in kernels]
        last = names.index("scan_pieces") if "scan_pieces" in names else None
        if last is not None:  # then those behind it are of pieces, which read early
            assert names[last + 1] in ("gla_forward_hopper", "gla_backward_hopper", "simple_gla_backward_hopper")
            assert set(names[:last]) <= {"head_gate_sums", "gla_recurrence_hopper"}
            summed = gates == "per head" and "gla_forward_hopper" in names
            made = narrow.sums_made(call, keep == passes.KEEP_CHECKPOINTS) > 0
            assert (names[0] == "head_gate_sums") == (summed and not made)
        assert ("gla_recurrence_hopper" in names) == (last is not None)


@pytest.mark.parametrize(("B", "H", "early"), [(11, 6, True), (67, 1, False), (8, 16, False), (133, 1, True)])
def test_programs_that_would_lie_in_twos_beside_idle_multiprocessors_start_late(B, H, early, launched):
    """Up to 66 find enough that are empty; more than 132 have to share them."""
    call = make_call(B, 320, H, gates="per head")
    forward, backward = launch_both(call, passes.KEEP_STATES, launched)
    cut = not wide_pieces.is_whole(call, narrow.choose_pieces(call))
    assert ("gla_forward_hopper", early) in forward
    assert ("simple_gla_backward_hopper", early or cut) in backward
