"""A gate per head and token: `chunk_simple_gla` and its kin, on the kernels for Hopper and on the portable ones."""

import math
import sys
from unittest.mock import Mock

import pytest
import torch
from gla_cases import assert_close, cumulative, linear_or_per_head, per_head_case, run, run_with_a_tail
from gla_kernels import (
    chunk_gla,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    naive_recurrent_gla,
)
from gla_kernels.hopper.narrow import launches as narrow_launches
from gla_kernels.hopper.wide import passes as wide
from gla_kernels.hopper.wide import pieces
from gla_kernels.launching import call, plans
from gla_kernels.operators import passes
from gla_kernels.simple import retention_gates
from gluon_on_cpu import Kernel
from hopper_on_cpu import on_hopper, set_multiprocessors
from torch.utils._python_dispatch import TorchDispatchMode

# As on a GPU, most errors in bfloat16 are around 3e-3.
BOUND, EXACT = 5e-3, 2e-6
GATES = ["mild", "logsigmoid", "strong", "resets", "hard resets", "one reset", "at the limit", "zero", "-100", "-inf"]


@pytest.fixture
def hopper(monkeypatch):
    with on_hopper(monkeypatch):
        yield


def narrow(gate, *gates_dtype, **shape):
    return per_head_case(gate, *gates_dtype, **({"K": 64, "V": 64, "H": 2, "dtype": torch.bfloat16} | shape))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("materialize", [True, False])
def test_outputs_and_gradients_for_hopper(hopper, gate, materialize):
    case = narrow(gate, T=200, H=3, V=48)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, materialize=materialize), case, BOUND)


@pytest.mark.parametrize("gate", ["logsigmoid", "mild"])
def test_a_backward_from_checkpoints_is_right_over_several_of_them(hopper, monkeypatch, gate):
    set_multiprocessors(monkeypatch, 1)
    case = narrow(gate, T=1100, H=1, K=32, V=32)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, materialize=False), case, BOUND)


@pytest.mark.parametrize(("gate", "strong"), [("mild", False), ("zero", False), ("strong", True), ("one reset", True)])
def test_strong_chunks_alone_have_decays_of_scores(hopper, monkeypatch, gate, strong):
    calls = Mock(side_effect=sys.modules["gla_kernels.hopper.head_gates"].score_decays)
    monkeypatch.setattr(sys.modules["gla_kernels.hopper.narrow.outputs"], "score_decays", calls)
    case = narrow(gate, T=60, H=1)
    run(chunk_simple_gla, case.inputs, case.grads)
    assert calls.call_count == (1 if strong else 0)


@pytest.mark.parametrize("gate", ["mild", "at the limit", "strong"])
def test_results_of_large_values_are_those_of_small_ones_times_a_power_of_two(hopper, gate):
    case, large = narrow(gate, T=130), 2.0**24
    powers = {"q": 1, "k": 1, "v": 1, "g": 0, "initial": 2}
    inputs = {name: x * large ** powers[name] for name, x in case.inputs.items()}
    grads = case.grads | {"final": case.grads["final"] * large}
    found, expected = run(chunk_simple_gla, inputs, grads), run(chunk_simple_gla, case.inputs, case.grads)
    for name, power in (("o", 3), ("final", 2), ("dq", 2), ("dk", 2), ("dv", 2)):
        assert torch.equal(found[name], expected[name] * large**power), name


@pytest.mark.parametrize("gate", ["mild", "strong"])
def test_a_gate_that_is_nan_reaches_its_head_alone_from_its_token_on(hopper, gate):
    case = narrow(gate, T=130)
    case.inputs["g"][0, 100, 1] = math.nan
    o = run(chunk_simple_gla, case.inputs, case.grads)["o"].double()
    expected = case.truth["o"]
    for here, found in ((expected[:, :100, 1], o[:, :100, 1]), (expected[..., 0, :], o[..., 0, :])):
        assert (found - here).norm() < BOUND * here.norm()
    assert o[:, 100:, 1].isnan().all()


@pytest.mark.parametrize("T", [1, 63, 64, 65])
def test_any_length(hopper, T):
    case = narrow("logsigmoid", T=T, B=2, initial=False)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads), case, BOUND)


@pytest.mark.parametrize("gate", ["logsigmoid", "resets"])
@pytest.mark.parametrize("materialize", [True, False])
def test_packed_sequences_and_what_is_behind_them(hopper, gate, materialize):
    lengths = [70, 0, 1, 130, 64]
    case = narrow(gate, lengths=lengths)
    found = run_with_a_tail(chunk_simple_gla, case, cumulative(lengths), materialize=materialize)
    assert_close(found, case, BOUND)


@pytest.mark.parametrize("lengths", [None, [1600, 64]])
@pytest.mark.parametrize("materialize", [True, False])
def test_few_heads_are_cut_into_pieces(hopper, monkeypatch, lengths, materialize):
    set_multiprocessors(monkeypatch, 16)
    case = narrow("logsigmoid", T=1024, H=1, K=32, V=16, lengths=lengths)
    before = Kernel.launches
    packed = {} if lengths is None else {"cu_seqlens": cumulative(lengths)}
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, materialize=materialize, **packed), case, BOUND)
    assert Kernel.launches > before + 2  # more than a forward and a backward


@pytest.mark.parametrize("lengths", [None, [1500, 0, 100]])
def test_a_piece_may_have_more_chunks_than_are_in_memory_at_once(hopper, monkeypatch, lengths):
    set_multiprocessors(monkeypatch, 5 if lengths else 2)
    monkeypatch.setattr(narrow_launches, "pieces_gain", lambda *_: True)
    monkeypatch.setattr(narrow_launches, "LEAST_NARROW_PIECES", 0)
    cut = Mock(side_effect=narrow_launches._borders)
    monkeypatch.setattr(narrow_launches, "_borders", cut)
    case = narrow("logsigmoid", T=1750, H=1, K=32, V=16, lengths=lengths)
    packed = {} if lengths is None else {"cu_seqlens": cumulative(lengths)}
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, **packed), case, BOUND)
    assert [call.args[4].chunks for call in cut.mock_calls] == [4 if lengths else 7] * 2


@pytest.mark.parametrize("multiprocessors", [1, 16])
@pytest.mark.parametrize("materialize", [True, False])
def test_sums_of_gates_may_come_from_a_kernel_of_their_own(hopper, monkeypatch, multiprocessors, materialize):
    """For whole sequences and for pieces."""
    set_multiprocessors(monkeypatch, multiprocessors)
    for name in ("SUMS_OF_SEQUENCES", "SUMS_OF_PIECES"):
        monkeypatch.setattr(narrow_launches, name, 0)
    case = narrow("logsigmoid", T=700, H=1, K=48, V=16)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, materialize=materialize), case, BOUND)


def test_gates_in_bfloat16_have_gradients_in_bfloat16(hopper):
    case = narrow("logsigmoid", torch.bfloat16, T=100)
    found = run(chunk_simple_gla, case.inputs, case.grads)
    assert found["dg"].dtype == torch.bfloat16
    assert_close(found, case, BOUND)


def test_gates_with_any_strides(hopper):
    case = narrow("logsigmoid", T=100, H=3)
    g = case.inputs["g"]
    strided = (
        torch.stack([g, torch.full_like(g, float("nan"))], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., 0]
    )
    assert not strided.is_contiguous()
    o, _ = chunk_simple_gla(*(case.inputs[name] for name in "qkv"), strided, initial_state=case.inputs["initial"])
    assert (o.double() - case.truth["o"]).norm() < BOUND * case.truth["o"].norm()


@pytest.mark.parametrize("materialize", [True, False])
def test_frozen_gates(hopper, materialize):
    case = narrow("logsigmoid", T=150)
    found = run(chunk_simple_gla, case.inputs, case.grads, frozen={"g"}, materialize=materialize)
    assert "dg" not in found
    assert_close(found, case, BOUND)


def test_a_nan_stays_in_its_head(hopper):
    case = narrow("mild", T=130)
    q = case.inputs["q"].clone()
    q[0, 100, 1] = float("nan")
    found = run(chunk_simple_gla, case.inputs | {"q": q}, case.grads)
    assert found["o"][0, 100, 1].isnan().all()
    assert not any(found[name][:, :, 0].isnan().any() for name in ("o", "dq", "dk", "dv", "dg"))
    assert not found["o"][0, :64, 1].isnan().any()


# With one multiprocessor, programs with a state of 256 columns need fewer rounds.
@pytest.mark.parametrize(
    ("K", "V", "multiprocessors"), [(96, 80, 132), (128, 256, 1), (128, 128, 1), (144, 32, 132), (272, 48, 132)]
)
@pytest.mark.parametrize(("gate", "materialize"), [("logsigmoid", True), ("resets", False)])
def test_wide_heads_for_hopper(hopper, monkeypatch, gate, materialize, K, V, multiprocessors):
    set_multiprocessors(monkeypatch, multiprocessors)
    case = narrow(gate, T=150, K=K, V=V)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, materialize=materialize), case, BOUND)
    found = run(chunk_simple_gla, case.inputs, case.grads, frozen={"g"}, materialize=materialize)
    assert_close(found, case, BOUND)


# Ten chunks; one multiprocessor has more programs than one, three and five have them all at once.
@pytest.mark.parametrize("gate", ["logsigmoid", None])
@pytest.mark.parametrize(("V", "multiprocessors"), [(48, 1), (48, 3), (144, 1), (144, 5)])
def test_however_many_chunks_are_copied_ahead(hopper, monkeypatch, V, multiprocessors, gate):
    set_multiprocessors(monkeypatch, multiprocessors)
    stages = Mock(side_effect=plans.recurrence_stages)
    monkeypatch.setattr(pieces, "recurrence_stages", stages)
    function, case = linear_or_per_head(gate, B=1, T=600, H=2, K=128, V=V, dtype=torch.bfloat16)
    assert_close(run(function, case.inputs, case.grads), case, BOUND)
    stages.assert_any_call(64 if V < 64 else 128, False, multiprocessors > 1)


@pytest.mark.parametrize(("gate", "materialize"), [("logsigmoid", True), ("resets", False)])
def test_one_kernel_can_compute_all_gradients_of_wide_heads(hopper, monkeypatch, gate, materialize):
    monkeypatch.setattr(wide, "one_backward", lambda call, pieces: True)
    case = narrow(gate, T=150, K=128, V=112)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, materialize=materialize), case, BOUND)
    found = run(chunk_simple_gla, case.inputs, case.grads, frozen={"g"}, materialize=materialize)
    assert_close(found, case, BOUND)


@pytest.mark.parametrize(
    ("gate", "K", "V", "lengths"),
    [("logsigmoid", 128, 48, None), (None, 80, 144, None), ("resets", 96, 144, [300, 0, 1, 270, 64])],
)
def test_wide_heads_with_several_checkpoints(hopper, monkeypatch, gate, K, V, lengths):
    """Of whole sequences and packed ones, and with two programs per head."""
    set_multiprocessors(monkeypatch, 1)
    monkeypatch.setattr(call, "chunks_per_checkpoint", lambda chunks: 2)
    shape = {"B": 1, "T": 300, "H": 1, "K": K, "V": V, "dtype": torch.bfloat16, "lengths": lengths}
    function, case = linear_or_per_head(gate, **shape)
    packed = {} if lengths is None else {"cu_seqlens": cumulative(lengths)}
    assert_close(run(function, case.inputs, case.grads, materialize=False, **packed), case, BOUND)
    assert "head_forward" in Kernel.flops


@pytest.mark.parametrize(("K", "V", "materialize"), [(128, 64, True), (256, 48, False)])
def test_packed_wide_heads_in_pieces(hopper, monkeypatch, K, V, materialize):
    set_multiprocessors(monkeypatch, 16)
    lengths = [70, 0, 1, 600]
    case = narrow("logsigmoid", H=1, K=K, V=V, lengths=lengths)
    found = run_with_a_tail(chunk_simple_gla, case, cumulative(lengths), materialize=materialize)
    assert_close(found, case, BOUND)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("materialize", [True, False])
def test_the_portable_kernels(gate, materialize):
    """Several rows, blocks of key columns and blocks of value columns."""
    case = per_head_case(gate, B=2, T=70, K=40, V=100)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, materialize=materialize), case, EXACT)


@pytest.mark.parametrize("gate", ["mild", "strong", "resets"])
def test_the_portable_kernels_in_half_precision(gate):
    case = per_head_case(gate, T=70, K=144, V=72, dtype=torch.float16)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads), case, 5e-4)


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("T", [1, 64, 129])
def test_portable_chunks_of_any_length(C, T):
    case = per_head_case("strong", B=2, T=T)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, chunk_size=C), case, EXACT)


def test_a_decay_has_its_own_rounding_not_that_of_the_sums_before_it():
    """Most tokens are resets, whose sum is 1,500; what the others pass on decays by little."""
    case = per_head_case("mild", T=64, K=16, V=16, initial=False)
    case.inputs["g"][:, :44] = -40.0
    expected, _ = naive_recurrent_gla(
        *(case.inputs[name].double() for name in "qkv"), case.inputs["g"].double()[..., None].expand(-1, -1, -1, 16)
    )
    o, _ = chunk_simple_gla(*(case.inputs[name] for name in "qkvg"), chunk_size=64)
    assert (o[:, 44:] - expected[:, 44:]).norm() < EXACT * expected[:, 44:].norm()


@pytest.mark.parametrize("materialize", [True, False])
def test_packed_sequences_for_the_portable_kernels(materialize):
    lengths = [70, 0, 1, 150, 16]
    case = per_head_case("resets", lengths=lengths)
    found = run_with_a_tail(chunk_simple_gla, case, cumulative(lengths), materialize=materialize)
    assert_close(found, case, EXACT)


@pytest.mark.parametrize("frozen", [{"g"}, {"initial"}])
def test_frozen_inputs_of_the_portable_kernels(frozen):
    case = per_head_case("logsigmoid", T=70)
    assert_close(run(chunk_simple_gla, case.inputs, case.grads, frozen=frozen), case, EXACT)


def test_gates_in_bfloat16_on_the_portable_kernels():
    case = per_head_case("logsigmoid", torch.bfloat16, T=70, K=64, V=96)
    found = run(chunk_simple_gla, case.inputs, case.grads)
    assert found["dg"].dtype == torch.bfloat16
    assert_close(found, case, BOUND)


def test_a_gate_that_is_nan_reaches_its_head_alone_on_the_portable_kernels():
    case = per_head_case("mild", T=70)
    case.inputs["g"][0, 50, 1] = math.nan
    found = run(chunk_simple_gla, case.inputs, case.grads)
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert not found[name][:, :, 0].isnan().any(), name
    assert found["o"][0, 50:, 1].isnan().all()
    assert (found["o"][0, :50, 1] - case.truth["o"][0, :50, 1]).norm() < EXACT * case.truth["o"][0, :50, 1].norm()
    for name in ("dk", "dv"):
        assert found[name][0, :51, 1].isnan().all(), name


class _Devices(TorchDispatchMode):
    """Notes the devices of what operations return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.seen.add(made.device.type)
        return made


def test_constant_gates_are_made_on_the_device():
    """A copy from the host could not be captured in a CUDA graph."""
    with _Devices() as devices:
        assert retention_gates(3, torch.device("meta")).dtype == torch.float32
    assert devices.seen == {"meta"}


def test_constant_gates():
    case = per_head_case("zero", T=70, H=3)
    gates = retention_gates(3)
    assert gates.tolist() == pytest.approx([torch.log(torch.tensor(1 - 2.0 ** (-5 - h))).item() for h in range(3)])
    tensors = [case.inputs[name] for name in "qkv"]
    wide = naive_recurrent_gla(*(x.double() for x in tensors), gates.double()[:, None].expand_as(tensors[0]))[0]
    for o in (
        chunk_retention(*tensors)[0],
        chunk_simple_gla(*tensors, g_gamma=gates)[0],
        fused_recurrent_retention(*(x[:, :20] for x in tensors))[0],
    ):
        assert (o - wide[:, : o.shape[1]]).norm() < EXACT * wide.norm()


@pytest.mark.parametrize(("gate", "kin"), [("zero", chunk_linear_attn), ("mild", chunk_gla)])
def test_the_kin_are_special_cases(hopper, gate, kin):
    """No gate is one of 0; a gate per head is the same gate in all channels."""
    case = narrow(gate, T=130)
    inputs = case.inputs | {"g": None if gate == "zero" else case.inputs["g"][..., None].expand_as(case.inputs["q"])}
    one, other = run(chunk_simple_gla, case.inputs, case.grads), run(kin, inputs, case.grads)
    for name in ("o", "final", "dq", "dk", "dv", "dinitial"):
        assert (one[name].double() - other[name].double()).norm() < BOUND * other[name].double().norm()


@pytest.mark.parametrize("gate", [None, "logsigmoid"])
@pytest.mark.parametrize(("T", "lengths"), [(20, None), (None, [9, 0, 20, 1]), (100, None)])
def test_token_by_token(T, lengths, gate):
    """Of the last, chunks are computed."""
    shape = {"B": 2, "T": T} if lengths is None else {"lengths": lengths}
    case = per_head_case(gate or "zero", **shape)
    gates = () if gate is None else (case.inputs["g"],)
    function = fused_recurrent_linear_attn if gate is None else fused_recurrent_simple_gla
    state = case.inputs["initial"].clone()
    o, final = function(
        *(case.inputs[name] for name in "qkv"), *gates, initial_state=state, inplace_final_state=True,
        cu_seqlens=None if lengths is None else cumulative(lengths),
    )  # fmt: skip
    assert final is state
    for name, x in (("o", o), ("final", final)):
        assert (x - case.truth[name]).norm() < EXACT * case.truth[name].norm()


@pytest.mark.parametrize("T", [12, 13])
def test_calls_of_few_tokens_go_token_by_token(monkeypatch, T):
    launched = Mock(side_effect=passes.run_recurrence)
    monkeypatch.setattr(passes, "run_recurrence", launched)
    case = per_head_case("logsigmoid", B=3, T=T)
    o, _ = chunk_simple_gla(*(case.inputs[name] for name in "qkvg"), initial_state=case.inputs["initial"])
    assert launched.called == (T == 12)
    assert (o - case.truth["o"]).norm() < EXACT * case.truth["o"].norm()


@pytest.mark.parametrize("tokens", [5, 20])
def test_gates_per_head_are_none_of_the_kin_though_a_call_of_that_shape_is_known(tokens):
    q, g = torch.randn(1, tokens, 2, 32), torch.zeros(1, tokens, 2)
    for function, kin in ((chunk_simple_gla, chunk_gla), (fused_recurrent_simple_gla, fused_recurrent_gla)):
        for _ in range(2):
            function(q, q, q, g)
        with pytest.raises(ValueError, match=r"got shape \(1, \d+, 2\)"):
            kin(q, q, q, g)


@pytest.mark.parametrize("T", [20, 100])
def test_token_by_token_with_gradients(T):
    """The kernels for chunks compute these, with the gate per head that they are given."""
    case = per_head_case("logsigmoid", T=T)
    assert_close(run(fused_recurrent_simple_gla, case.inputs, case.grads), case, EXACT)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"g": None}, "g, g_gamma: got none"),
        ({"g_gamma": torch.zeros(2)}, "g, g_gamma: got both"),
        ({"g": None, "g_gamma": torch.zeros(3)}, r"g_gamma: got shape \(3,\); it needs \[H\] = \[2\]"),
        ({"g": torch.zeros(1, 9, 2, 32)}, r"g: got shape \(1, 9, 2, 32\); it needs \[B, T, H\] = \[1, 9, 2\]"),
    ],
)
@pytest.mark.parametrize("function", [chunk_simple_gla, fused_recurrent_simple_gla])
def test_wrong_gates_are_named(function, changes, named):
    q = torch.zeros(1, 9, 2, 32)
    with pytest.raises(ValueError, match=named):
        function(q, q, q, **({"g": torch.zeros(1, 9, 2)} | changes))


@pytest.mark.parametrize("function", [chunk_simple_gla, fused_recurrent_simple_gla])
@pytest.mark.parametrize(
    ("gates", "named"),
    [
        ({"g_gamma": -0.1}, r"g_gamma: got float; it needs a tensor \[H\]"),
        ({"g_gamma": torch.zeros(2, dtype=torch.int64)}, "g_gamma: got torch.int64; it needs float32"),
        ({"g": torch.zeros(1, 9, 2, dtype=torch.float64)}, "g: got torch.float64; it needs float32"),
        ({"g": torch.zeros(1, 9, 2, device="meta")}, "g: got device meta; it needs q's device cpu"),
    ],
)
def test_gates_of_another_kind_are_named(function, gates, named):
    q = torch.zeros(1, 9, 2, 32)
    with pytest.raises(ValueError, match=named):
        function(q, q, q, **gates)


@pytest.mark.parametrize("function", [chunk_retention, fused_recurrent_retention])
def test_queries_without_a_head_are_named(function):
    q = torch.zeros(9, 2, 2)
    with pytest.raises(ValueError, match=r"q: got shape \(9, 2, 2\); it needs four dimensions"):
        function(q, q, q)


def test_gates_per_head_are_none_of_chunk_gla():
    q = torch.zeros(1, 9, 2, 32)
    with pytest.raises(ValueError, match="g: got shape"):
        chunk_gla(q, q, q, torch.zeros(1, 9, 2))
