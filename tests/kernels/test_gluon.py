"""The Gluon kernels for Hopper end to end on a CPU (`gluon_on_cpu.py`), in bfloat16, against the float64 recurrence."""

import math
import sys
from unittest.mock import Mock

import pytest
import torch
from gla_cases import (
    Case,
    assert_close,
    cumulative,
    exact_from_checkpoints_alone,
    make_case,
    run,
    run_with_a_tail,
    truth,
)
from gla_kernels import chunk_gla, chunk_linear_attn
from gla_kernels.hopper.narrow import launches as narrow
from gla_kernels.launching import call
from gla_kernels.launching.buffers import Flags
from gla_kernels.launching.call import Call, make_call
from gla_kernels.operators import ops, passes
from hopper_on_cpu import on_hopper, set_multiprocessors
from product import product

# As on a GPU, most errors are around 3e-3.
BOUND = 5e-3
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    with on_hopper(monkeypatch):
        yield


@pytest.mark.parametrize(("K", "V"), [(64, 64), (96, 80), (144, 32)])
def test_tokens_behind_the_last_sequence_are_ignored(K, V):
    lengths = [70, 60]
    case = bfloat16_case("mild", H=1, K=K, V=V, lengths=lengths)
    assert_close(run_with_a_tail(chunk_gla, case, cumulative(lengths)), case, BOUND)


def attend(case, gated=True, **options):
    return run(chunk_gla if gated else chunk_linear_attn, case.inputs, case.grads, **options)


def bfloat16_case(gate, **shape):
    return make_case(gate, dtype=torch.bfloat16, **shape)


# One of each way through the kernels: narrow heads, one kernel per pass, pairs of value columns, walks, readouts.
HEADS = [(64, 64), (48, 16), (96, 80), (16, 256), (144, 32), (272, 32)]


@product(
    lambda heads, gate: heads in ((64, 64), (96, 80)) or gate in ("mild", "one channel resets", "-inf"),
    heads=HEADS,
    gate=["mild", "slow", "logsigmoid", "strong", "resets", "one channel resets", "zero", "-inf"],
)
def test_every_gate_is_right(heads, gate):
    K, V = heads
    case = bfloat16_case(gate, T=150, H=1, K=K, V=V)
    assert_close(attend(case), case, BOUND)


@pytest.mark.parametrize("materialize", [True, False])
def test_a_single_head_of_model_width_1024_is_right(materialize):
    case = bfloat16_case("logsigmoid", T=70, H=1, K=512, V=1024)
    assert_close(attend(case, materialize=materialize), case, BOUND)


@pytest.mark.parametrize("gate", ["logsigmoid", "strong", "dead channel", "-inf"])
def test_all_gradients_in_one_kernel_are_right_for_every_gate(gate, monkeypatch):
    """As with enough heads for all multiprocessors."""
    set_multiprocessors(monkeypatch, 1)
    case = bfloat16_case(gate, T=150, H=1, K=96, V=80)
    assert_close(attend(case), case, BOUND)


def assert_same_without_dg(case, **options):
    """All other results are the same bits whether the gate's gradient is computed or not, and right."""
    found, whole = attend(case, frozen=("g",), **options), attend(case, **options)
    assert whole.keys() - found.keys() == {"dg"}
    assert all(torch.equal(x, whole[name]) for name, x in found.items())
    assert_close(found, case, BOUND)


@product(
    lambda heads, gate: gate == ("one channel resets" if heads in ((64, 64), (144, 32)) else "mild"),
    heads=HEADS,
    gate=["mild", "strong", "one channel resets"],
)
def test_gates_that_need_no_gradient_change_no_other_result(heads, gate):
    K, V = heads
    assert_same_without_dg(bfloat16_case(gate, T=150, H=1, K=K, V=V))


@product(
    lambda heads, rows: rows == (2 if heads == (128, 144) else 1),
    heads=[(48, 64), (128, 144), (272, 32)],
    rows=[1, 2],
)
def test_gates_that_need_no_gradient_change_no_other_result_from_checkpoints(heads, rows):
    """In one of the shapes a state is parked in the memory that dg would have."""
    K, V = heads
    assert_same_without_dg(bfloat16_case("mild", B=rows, T=576, H=1, K=K, V=V), materialize=False)


def test_all_gradients_in_one_kernel_are_the_same_without_that_of_the_gate(monkeypatch):
    set_multiprocessors(monkeypatch, 1)
    assert_same_without_dg(bfloat16_case("strong", T=150, H=1, K=96, V=80))


@pytest.mark.parametrize(("K", "V"), HEADS)
def test_linear_attention_is_right(K, V):
    case = bfloat16_case(None, T=150, H=1, K=K, V=V)
    assert_close(attend(case, gated=False), case, BOUND)


# 600 tokens are ten chunks, the last one not whole: two checkpoints, or three pieces. 576 are nine whole ones.
LENGTHS = [(600, 600), (150, 0, 1, 450, 64), (100, 50), (64,)]
SHAPES = [(K, V, lengths) for K, V in HEADS[2:] for lengths in LENGTHS]
SHAPES += [(128, 144, lengths) for lengths in [(576, 576), (600, 600), (100, 28, 64), (64,)]]


def every_way_to_cut_time(shape, gate, multiprocessors, kept):
    """Short sequences are never cut, and packed ones not by 12 multiprocessors. Gates do not change how time is cut."""
    K, _, lengths = shape
    packed = len(set(lengths)) > 1
    if max(lengths) <= 256:
        return multiprocessors == 1 and gate == ("gates" if kept == "states" else "one reset")
    if gate == "none":
        without = K in (16, 144) or shape == (128, 144, (600, 600))
        return multiprocessors == 12 and kept == "states" and not packed and without
    if gate == "one reset":
        return multiprocessors == 132 and K > 256 and kept == "checkpoints" and packed
    few = multiprocessors == 12 and not packed and K == 272 and kept == "checkpoints"
    # What is kept and whether sequences are packed do not meet in one kernel's code.
    return few or (multiprocessors == 132 and packed == (kept == "states") and shape != (128, 144, (600, 600)))


@product(
    every_way_to_cut_time,
    shape=SHAPES,
    gate={"gates": "mild", "one reset": "one reset", "none": None},
    multiprocessors=[1, 12, 132],
    materialize={"states": True, "checkpoints": False},
)
def test_sequences_are_right_however_time_is_cut(shape, gate, multiprocessors, materialize, monkeypatch):
    """Few multiprocessors: sequences stay whole. Many: they are cut in pieces that run side by side."""
    set_multiprocessors(monkeypatch, multiprocessors)
    K, V, lengths = shape
    options = {"materialize": materialize}
    if len(set(lengths)) > 1:
        options["cu_seqlens"] = cumulative(lengths)
        case = bfloat16_case(gate, H=1, K=K, V=V, lengths=lengths)
    else:
        case = bfloat16_case(gate, B=len(lengths), T=lengths[0], H=1, K=K, V=V)
    assert_close(attend(case, gated=gate is not None, **options), case, BOUND)


# Packed ones have at most one piece of 8 chunks each, or more.
@product(
    lambda lengths, gate, heads: (lengths == "rows") == (gate == "mild") and heads == (1 if lengths == "long" else 2),
    lengths={"rows": None, "short": (150, 0, 1, 200, 64), "long": (600, 0, 1, 100, 64)},
    gate=["mild", "strong"],
    heads=[1, 2],
)
def test_narrow_heads_are_right_from_checkpoints(lengths, gate, heads):
    shape = {"B": 2, "T": 600} if lengths is None else {"lengths": lengths}
    options = {} if lengths is None else {"cu_seqlens": cumulative(lengths)}
    case = bfloat16_case(gate, H=heads, K=64, V=64, **shape)
    assert_close(attend(case, materialize=False, **options), case, BOUND)


@pytest.fixture
def made_flags(monkeypatch):
    """The flags that backwards raise, in the order in which they are made."""
    made = []
    flags_of = passes.failure_flags
    monkeypatch.setattr(passes, "failure_flags", lambda *of, **how: made.append(flags_of(*of, **how)) or made[-1])
    return made


# For each kind of gates whether sequences are packed and states are kept, unless all cases are run.
PIECES = {"mild": (False, True), "strong": (True, True), "resets": (True, False), None: (False, False)}


@product(
    lambda gate, packed, materialize: (packed, materialize) == PIECES[gate],
    gate=list(PIECES),
    packed=[False, True],
    materialize=[True, False],
)
def test_narrow_heads_are_right_in_pieces(gate, packed, materialize, made_flags, monkeypatch):
    """As with few heads of a long sequence."""
    set_multiprocessors(monkeypatch, 6 if packed else 3)
    monkeypatch.setattr(narrow, "LEAST_NARROW_PIECES", 0)
    monkeypatch.setattr(narrow, "pieces_gain", lambda *_: True)
    cut = Mock(side_effect=narrow._borders)
    monkeypatch.setattr(narrow, "_borders", cut)
    lengths = (700, 0, 1, 350)
    case = bfloat16_case(gate, H=1, K=48, V=64, **({"lengths": lengths} if packed else {"B": 2, "T": 600}))
    options = {"cu_seqlens": cumulative(lengths)} if packed else {}
    assert_close(attend(case, gated=gate is not None, materialize=materialize, **options), case, BOUND)
    assert [call.args[4].chunks > 2 for call in cut.mock_calls] == [True, True]
    assert not any(flags.any() for flags in made_flags)  # else the exact kernel would be what is right


def test_a_piece_without_gates_may_have_more_chunks_than_are_in_memory_at_once(monkeypatch):
    set_multiprocessors(monkeypatch, 2)
    monkeypatch.setattr(narrow, "pieces_gain", lambda *_: True)
    cut = Mock(side_effect=narrow._borders)
    monkeypatch.setattr(narrow, "_borders", cut)
    case = bfloat16_case(None, B=1, T=1750, H=1, K=48, V=64)
    assert_close(attend(case, gated=False), case, BOUND)
    assert [call.args[4].chunks for call in cut.mock_calls] == [7, 7]


@pytest.fixture
def poisoned():
    """Memory that is not initialised has values that are flags."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("keep", [passes.KEEP_STATES, passes.KEEP_CHECKPOINTS])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 112), (272, 48)])
def test_flags_are_cleared_where_time_is_cut(K, V, keep, made_flags):
    T = 1100 if keep == passes.KEEP_CHECKPOINTS else 600
    tensors = [bfloat16_case("mild", T=T, H=1, K=K, V=V).inputs[name] for name in ("q", "k", "v", "g")]
    _, _, kept, flags = passes.forward(*tensors, None, None, 1.0, False, keep, None, None)
    assert not flags.any()
    settings = 1.0, False, True, keep, None, None
    passes.backward(*tensors, None, torch.ones_like(tensors[2]), None, kept, flags, *settings)
    assert not made_flags[0].any()


@product(lambda heads: heads not in ((48, 16), (144, 32)), heads=HEADS)
def test_exactly_the_chunks_with_a_strong_channel_are_marked(heads):
    K, V = heads
    case = bfloat16_case("mild", B=2, T=130, H=2, K=K, V=V)
    case.inputs["g"][1, 70:75, 1, K - 1] = -100.0  # each counts as -34 in log2; four of them leave the chunk mild
    case.inputs["g"][0, 70:74, 0, K - 1] = -100.0
    q, k, v, g, initial = (case.inputs[name] for name in ("q", "k", "v", "g", "initial"))
    buffer = ops.chunk_forward(q, k, v, g, initial, None, 0.1, False, passes.KEEP_NOTHING, None, None)[3]
    flags = Flags.of(make_call(q, v, g, None, 0.1, None, None), buffer)
    assert not flags.rows.any()
    assert flags.marks.view(2, 3, 2).nonzero().tolist() == [[1, 1, 1]]
    case = Case(case.inputs, case.grads, truth(case.inputs, case.grads))
    assert_close(attend(case), case, BOUND)


@product(lambda heads: heads not in ((48, 16), (96, 80), (144, 32)), heads=[*HEADS, (256, 64)])
def test_strong_chunks_are_the_same_whether_programs_share_them_or_not(heads, monkeypatch):
    """First every group of programs finds one chunk, which it shares; then one group finds all, three at a time."""
    K, V = heads
    case = bfloat16_case("mild", T=800, H=1, K=K, V=V)
    q, k, v, g, initial = (case.inputs[name] for name in ("q", "k", "v", "g", "initial"))
    strong = [1, 6, 7, 8, 12]
    for chunk in strong:
        g[:, chunk * 64 : chunk * 64 + 64] *= 100.0
    for module in ("levels", "strong"):
        monkeypatch.setattr(sys.modules[f"gla_kernels.hopper.{module}"], "MARKS_AT_ONCE", 3)
    found = []
    for programs in (264, 4):
        monkeypatch.setattr(Call, "strong_programs", programs)
        o, *_, buffer = ops.chunk_forward(q, k, v, g, initial, None, 0.1, False, passes.KEEP_NOTHING, None, None)[:4]
        marks = Flags.of(make_call(q, v, g, None, 0.1, None, None), buffer).marks
        assert marks.flatten().nonzero().flatten().tolist() == strong
        found.append((o, marks))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(("K", "V"), HEADS)
def test_chunks_with_a_large_gate_are_right_beside_others(K, V):
    """A gate beyond -2 in log2 takes a chunk through the branch for large gates, though its channels are mild."""
    case = bfloat16_case("mild", T=200, H=1, K=K, V=V)
    g = case.inputs["g"]
    g.clamp_(min=-1.0)
    g[0, 70, 0, K - 1] = -3.0
    case = Case(case.inputs, case.grads, truth(case.inputs, case.grads))
    assert_close(attend(case), case, BOUND)


@product(lambda heads: heads not in ((48, 16), (144, 32)), heads=HEADS)
def test_gates_that_are_nan_reach_the_results_and_the_flags(heads):
    K, V = heads
    case = bfloat16_case("mild", B=2, T=100, H=1, K=K, V=V)
    case.inputs["g"][1, 70, 0, 0] = float("nan")
    q, k, v, g, initial = (case.inputs[name] for name in ("q", "k", "v", "g", "initial"))
    o, *_, buffer = ops.chunk_forward(q, k, v, g, initial, None, 0.1, False, passes.KEEP_NOTHING, None, None)[:4]
    flags = Flags.of(make_call(q, v, g, None, 0.1, None, None), buffer)
    assert flags.rows.flatten().tolist() == [0, 1]
    assert o[0].isfinite().all()
    assert o[1, 70:].isnan().all()


@product(
    lambda shape, frozen: (
        shape in ((64, 64, 300, True), (144, 32, 100, True), (96, 80, 100, False))
        and (frozen == "all gradients" or shape[0] == 64)
    ),
    shape=[(64, 64, 100, True), (64, 64, 300, True), (64, 64, 600, False), (144, 32, 100, True), (96, 80, 100, False)],
    frozen={"all gradients": (), "no dg": ("g",)},
)
def test_values_beyond_the_scaled_operands_range_go_to_the_exact_kernels(shape, frozen, monkeypatch):
    K, V, T, materialize = shape
    # Two pieces of 300 or 600 tokens, of which the first is flagged.
    monkeypatch.setattr(narrow, "LEAST_NARROW_PIECES", 0)
    case = bfloat16_case("zero", T=T, H=1, K=K, V=V, initial=False)
    case.inputs["g"][...] = -1.2
    case.inputs["q"][:, :256] *= 1e25
    case = Case(case.inputs, case.grads, truth(case.inputs, case.grads))
    found = attend(case, materialize=materialize, frozen=frozen)
    assert_close({name: found[name] for name in ("o", "dq", "dv", "final")}, case, BOUND)


@product(
    lambda materialize, frozen: (materialize == "states") == (frozen == "no dg"),
    materialize={"states": True, "checkpoints": False},
    frozen={"all gradients": (), "no dg": ("g",)},
)
def test_a_head_whose_backward_fails_in_one_chunk_is_computed_again(materialize, frozen, monkeypatch):
    """One kernel goes through ten chunks. In one of a head, dq and dk are beyond float32's range, but no state is."""
    set_multiprocessors(monkeypatch, 1)
    case = bfloat16_case("mild", T=600, H=2, K=96, V=80)
    case.grads["o"][:, 320:384, 1] *= 1e8
    case.inputs["v"][:, 320:384, 1] *= 1e20
    case.inputs["g"][:, 320:384, 1] = -110 * math.log(2) / 64
    case = Case(case.inputs, case.grads, truth(case.inputs, case.grads))
    found = attend(case, materialize=materialize, frozen=frozen)
    assert_close({name: x for name, x in found.items() if x is not None}, case, BOUND)


@product(
    lambda heads, lengths: (heads[0], lengths) in [(48, "one"), (96, "packed")],
    heads=HEADS,
    lengths={"one": None, "packed": (200, 0, 1, 70)},
)
def test_the_exact_backward_is_right_over_several_checkpoints(heads, lengths, monkeypatch):
    exact_from_checkpoints_alone(monkeypatch)
    monkeypatch.setattr(call, "chunks_per_checkpoint", lambda chunks: 2)
    K, V = heads
    shape = {"T": 270} if lengths is None else {"lengths": lengths}
    case = bfloat16_case("one channel resets", H=1, K=K, V=V, **shape)
    options = {} if lengths is None else {"cu_seqlens": cumulative(lengths)}
    assert_close(attend(case, materialize=False, **options), case, BOUND)


@product(
    lambda heads, gate: (gate == "resets") == (heads in ((48, 16), (96, 80), (144, 32))),
    heads=[*HEADS, (128, 192)],
    gate=["mild", "resets"],
)
def test_gates_in_bfloat16_are_taken_as_they_are(heads, gate):
    K, V = heads
    case = bfloat16_case(gate, T=128, H=1, K=K, V=V)
    case.inputs["g"] = case.inputs["g"].bfloat16()
    case = Case(case.inputs, case.grads, truth(case.inputs, case.grads))
    found = attend(case)
    assert found["dg"].dtype == torch.bfloat16
    assert_close(found, case, BOUND)
