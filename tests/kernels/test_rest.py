"""Wide heads: full rounds of whole sequences, and the rest of the sequences in pieces."""

from unittest.mock import Mock

import pytest
import torch
from gla_cases import assert_close, make_case, per_head_case, run
from gla_kernels import chunk_gla, chunk_linear_attn, chunk_simple_gla
from gla_kernels.hopper.wide import passes, pieces
from gla_kernels.launching.call import Call
from gla_kernels.launching.plans import hopper_plan
from hopper_on_cpu import on_hopper, set_multiprocessors

BF16 = torch.bfloat16
BOUND = 5e-3


def a_call(sequences, T=2048, H=4, K=128, V=256, multiprocessors=132, varlen=False, **gates):
    B, T = (1, sequences * T) if varlen else (sequences, T)
    plan = hopper_plan(K, V, BF16)
    options = {"gated": False} | gates
    return Call(
        B, T, H, K, V, sequences, varlen, scale=1.0, dtype=BF16, plan=plan, multiprocessors=multiprocessors, **options
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("sequences", "whole", "chunks"),
    [(33, 33, None), (34, 33, 2), (36, 33, 3), (37, 33, 4), (50, 50, None), (66, 66, None), (67, 66, 2), (69, 66, 3)],
)
def test_few_sequences_beyond_full_rounds_are_cut(sequences, whole, chunks, gated):
    first, *rest = pieces.runs(a_call(sequences, gated=gated))
    assert (first.base, first.count) == (0, whole)
    assert [run.chunks for run in rest] == ([] if chunks is None else [chunks])


@pytest.mark.parametrize(
    ("gates", "sequences", "whole", "kept"),
    [
        ("none", 42, 42, 42), ("per head", 42, 33, 42), ("per head", 49, 33, 49), ("per head", 50, 50, 50),
        ("per channel", 42, 33, 42), ("per channel", 49, 33, 49), ("none", 74, 66, 74),
    ],
)  # fmt: skip
def test_more_stay_whole_with_narrower_programs_if_nothing_is_kept(gates, sequences, whole, kept):
    call = a_call(sequences, gated=gates == "per channel", head_gated=gates == "per head")
    first, *rest = pieces.runs(call, kept=False)
    assert first.count == whole
    assert all(pieces.is_whole(call, run) for run in rest)
    assert pieces.runs(call)[0].count == kept


@pytest.mark.parametrize(
    "other",
    [{"T": 256}, {"varlen": True}, {"K": 256, "V": 128, "T": 8192}, {"multiprocessors": 3}, {"multiprocessors": 136}],
)
def test_all_sequences_stay_whole_where_a_rest_gains_nothing_or_was_not_timed(other):
    assert len(pieces.runs(a_call(34, **other))) == 1


def test_heads_with_no_narrower_programs_are_counted_by_their_only_ones():
    whole, rest = pieces.runs(a_call(17, T=4096, H=8, V=128))
    assert (whole.count, rest.chunks) == (16, 4)


@pytest.mark.parametrize(("sequences", "H"), [(34, 4), (36, 4), (69, 4), (9, 16), (17, 16)])
def test_every_sequence_and_chunk_is_in_one_run(sequences, H):
    call = a_call(sequences, H=H)
    whole, rest = pieces.runs(call)
    parts = [pieces.sequences_of(call, part) for part in (whole, rest)]
    assert [n for part in parts for n in range(part.start, part.stop)] == list(range(sequences))
    for part, of in zip((whole, rest), parts, strict=True):
        each = -(-call.chunks // part.chunks)
        assert (part.base, part.count) == (of.start * each, (of.stop - of.start) * each)


@pytest.fixture
def cut(monkeypatch):
    """Calls that cut whatever is beyond full rounds; pieces of the runs that were cut, and their chunks."""
    monkeypatch.setattr(pieces, "REST_LAUNCHES", -100)
    borders = Mock(side_effect=passes.compute_borders)
    monkeypatch.setattr(passes, "compute_borders", borders)
    with on_hopper(monkeypatch):
        yield lambda: [(call.args[3].count, call.args[3].chunks) for call in borders.mock_calls]


FUNCTIONS = {
    "none": (chunk_linear_attn, lambda **shape: make_case(None, **shape)),
    "per head": (chunk_simple_gla, lambda **shape: per_head_case("logsigmoid", **shape)),
    "per channel": (chunk_gla, lambda **shape: make_case("resets", **shape)),
}


@pytest.mark.parametrize(
    ("gates", "initial"), [("none", False), ("per head", True), ("per head", False), ("per channel", True)]
)
@pytest.mark.parametrize(("V", "H", "B"), [(256, 2, 3), (112, 1, 3), (112, 1, 5)])
def test_outputs_and_gradients_are_right_with_a_rest(cut, monkeypatch, gates, V, H, B, initial):
    set_multiprocessors(monkeypatch, 2 * H)
    asked = Mock(side_effect=passes.runs)
    monkeypatch.setattr(passes, "runs", asked)
    function, make = FUNCTIONS[gates]
    case = make(B=B, T=300, H=H, K=128, V=V, dtype=BF16, initial=initial)
    assert_close(run(function, case.inputs, case.grads, materialize=True), case, BOUND)
    assert cut() == [(2, 3), (2, 3)]  # forward and backward: two pieces of three chunks
    assert asked.mock_calls[0].kwargs == {"kept": True}
    with torch.no_grad():
        given = [case.inputs[name] for name in ("q", "k", "v", "g") if case.inputs[name] is not None]
        o, final = function(*given, initial_state=case.inputs["initial"], output_final_state=True)
    assert_close({"o": o, "final": final}, case, BOUND)


@pytest.mark.parametrize(("gates", "at_once"), [("per head", 3), ("per channel", 3), ("none", 1)])
def test_outputs_are_right_if_a_rest_stays_whole(monkeypatch, gates, at_once):
    function, make = FUNCTIONS[gates]
    found = Mock(side_effect=pieces.runs)
    monkeypatch.setattr(passes, "runs", found)
    monkeypatch.setattr(pieces, "REST_GAIN", 0)
    with on_hopper(monkeypatch):
        set_multiprocessors(monkeypatch, at_once)
        case = make(B=4, T=130, H=1, K=112, V=256, dtype=BF16)
        given = [case.inputs[name] for name in ("q", "k", "v", "g") if case.inputs[name] is not None]
        with torch.no_grad():
            o, final = function(*given, initial_state=case.inputs["initial"], output_final_state=True)
    assert_close({"o": o, "final": final}, case, BOUND)
    [call] = found.mock_calls
    assert call.kwargs == {"kept": False}
    counts = [run.count for run in pieces.runs(*call.args, **call.kwargs)]
    assert counts == ([3, 1] if at_once == 3 else [4])
