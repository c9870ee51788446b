"""Backwards from checkpoints: what they launch, without a GPU, and heads that the exact kernel has to compute."""

import itertools
import math
from collections import Counter

import pytest
import torch
from gla_cases import Case, assert_close, cumulative, make_case, run, truth
from gla_kernels import chunk_gla, narrow, passes
from gla_kernels.buffers import Inputs, flag_buffer
from gla_kernels.call import Call
from gla_kernels.launch import EXACT_PROGRAMS, hopper_plan, triton_plan
from product import product

BOUND = 5e-6
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")


@pytest.fixture
def launched(monkeypatch):
    """What calls launch: kernels' names, programs and arguments."""
    notes = []
    monkeypatch.setattr(
        Call,
        "launch",
        lambda self, kernel, tile, programs, arguments, switches, early=True: notes.append(
            (kernel.__name__, programs, arguments)
        ),
    )
    return notes


def make_call(B, T, H, K, V, sequences=None, gated=True, portable=False):
    dtype = torch.bfloat16
    plan = triton_plan(K, V, dtype, None, gated) if portable else hopper_plan(K, V, dtype)
    return Call(B, T, H, K, V, sequences or B, sequences is not None, gated, 1.0, dtype, plan)


def launch_backward(call):
    """A backward from checkpoints, of tensors without data."""
    B, T, H, K, V = call.B, call.T, call.H, call.K, call.V
    q, k, v, do = (torch.empty(B, T, H, D, dtype=torch.bfloat16, device="meta") for D in (K, K, V, V))
    g = torch.empty(B, T, H, K, device="meta") if call.gated else None
    cu_seqlens = torch.empty(call.sequences + 1, dtype=torch.int32, device="meta") if call.varlen else None
    kept = torch.empty(call.kept_shape(False), device="meta")
    inputs, flags = Inputs(q, k, v, g, cu_seqlens), flag_buffer(call, q)
    passes.launch_backward(call, inputs, do, None, kept, flags, False, passes.KEEP_CHECKPOINTS)


SIZES = {
    "many narrow heads": {"B": 32, "H": 16, "K": 64, "V": 64},
    "few narrow heads": {"B": 1, "H": 4, "K": 48, "V": 64},
    "packed narrow heads": {"B": 1, "H": 16, "K": 64, "V": 64, "sequences": 64},
    "many wide heads": {"B": 32, "H": 4, "K": 128, "V": 256},
    "few wide heads": {"B": 1, "H": 4, "K": 256, "V": 512},
    "packed wide heads": {"B": 1, "H": 16, "K": 512, "V": 512, "sequences": 64},
    "portable": {"B": 2, "H": 4, "K": 60, "V": 100, "portable": True},
    "portable, packed": {"B": 1, "H": 4, "K": 60, "V": 100, "portable": True, "sequences": 5},
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_one_exact_kernel_is_launched_for_any_number_of_tokens(size, launched):
    for T in (1000, 4096, 65536):
        launched.clear()
        launch_backward(make_call(T=T, **size))
        assert [name for name, *_ in launched if "exact" in name] == ["gla_backward_exact_recomputing"], T


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_exact_kernel_needs_no_more_scratch_memory_than_the_plain_form_has_needed(size, launched):
    for T in (1000, 65536):
        call = make_call(T=T, **size)
        launched.clear()
        launch_backward(call)
        ((programs,), arguments) = next((note[1:]) for note in launched if "exact" in note[0])
        states = arguments[6]
        assert states.shape == (programs, call.every, call.K, call.V)
        assert 1 <= programs <= min(call.sequences * call.H, EXACT_PROGRAMS)
        assert programs == 1 or states.shape[:2].numel() <= passes._scratch_states(call)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("H", [1, 16, 100])
@pytest.mark.parametrize(("T", "sequences"), [(4096, 2), (65536, 64), (262144, 64)])
def test_packed_narrow_heads_have_no_launch_for_pieces_that_no_sequence_can_have(T, sequences, H, gated, launched):
    """Of a sequence that could have all tokens, there would be sequences * T of them."""
    call = make_call(1, T, H, 64, 64, sequences, gated)
    launch_backward(call)
    for name in ("gla_forward_hopper", "gla_backward_hopper"):
        assert sum(programs for kernel, (programs, *_), _ in launched if kernel == name) == call.slots(call.every) * H
    kinds = Counter(name for name, *_ in launched)
    assert kinds["gla_recurrence_hopper"] == kinds["scan_pieces"] == 1


def test_packed_narrow_heads_with_at_most_one_piece_each_are_not_cut(launched):
    launch_backward(make_call(1, 250, 16, 64, 64, 3))
    assert Counter(name for name, *_ in launched) == {
        "gla_forward_hopper": 1, "gla_backward_hopper": 1, "gla_backward_exact_recomputing": 1,
        "gla_backward_strong_hopper": 1,
    }  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_narrow_calls_of_the_same_form_launch_the_same_kernels(packed, monkeypatch):
    """First calls compile what later calls of the same form launch."""
    launched, seen = set(), {}
    monkeypatch.setattr(
        Call,
        "launch",
        lambda self, kernel, tile, programs, arguments, switches, early=True: launched.add(
            (kernel.__name__, tile, tuple(switches.items()))
        ),
    )
    for N, T, H in itertools.product((1, 2, 33), (250, 513, 2048, 32768), (1, 6, 17, 40, 300)):
        call = make_call(1, T, H, 64, 64, N) if packed else make_call(N, T, H, 64, 64)
        launched.clear()
        launch_backward(call)
        # How many pieces a sequence has decides whether the gradient of its last state is one that was given.
        several = call.chunks > call.every and not narrow.recomputed_groups(call)
        assert seen.setdefault((narrow.form(call), several), set(launched)) == launched, (N, T, H)
    assert len(seen) > 2


@pytest.fixture
def poisoned():
    """Memory that is not initialised is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def too_large_queries(case, head):
    """Scaled queries beyond float32's range in chunks of 16: the forward flags the head."""
    case.inputs["q"][..., head, :] *= 1e25
    case.inputs["g"][..., head, :] = -110 * math.log(2) / 16


def too_large_gradients(case, head):
    """The same of what a backward scales, at a few tokens in the middle: only that piece's plain backward fails."""
    case.inputs["g"][..., head, :] = -110 * math.log(2) / 16
    case.grads["o"][:, 150:160, head] *= 1e30


def resets_beside_them(case, head):
    """The first, and the head's state is reset now and then."""
    too_large_queries(case, head)
    case.inputs["g"][:, ::37, head] = -math.inf


CAUSES = {
    "the forward": too_large_queries,
    "the backward of one piece": too_large_gradients,
    "the forward, beside resets": resets_beside_them,
}
# At chunks of 16, pieces are of at most 8 chunks.
LENGTHS = {"rows": None, "packed": [290, 0, 1, 16, 160]}


def case_of(lengths, V, initial=True):
    shape = {"B": 2, "T": 300} if lengths is None else {"lengths": lengths}
    return make_case("mild", H=3, K=20, V=V, initial=initial, **shape)


def spoilt(case, cause, head, lengths):
    cause(case, head)
    return Case(case.inputs, case.grads, truth(case.inputs, case.grads, lengths))


def recomputed(case, lengths, **options):
    packed = {} if lengths is None else {"cu_seqlens": cumulative(lengths)}
    return run(chunk_gla, case.inputs, case.grads, materialize=False, chunk_size=16, **packed, **options)


@product(
    lambda cause, lengths, V, initial: (V == 80) == initial == (lengths == "packed"),
    cause=CAUSES,
    lengths=LENGTHS,
    V=[16, 80],  # one block of value columns, or two
    initial=[True, False],
)
def test_a_flagged_head_is_right_over_several_checkpoints(cause, lengths, V, initial, poisoned):
    case = spoilt(case_of(lengths, V, initial), cause, 1, lengths)
    assert_close(recomputed(case, lengths), case, BOUND)


@pytest.mark.parametrize("programs", [1, 2])
def test_a_program_does_several_flagged_heads_one_after_the_other(programs, poisoned, monkeypatch):
    """In the same scratch memory."""
    monkeypatch.setattr("gla_kernels.launches.EXACT_PROGRAMS", programs)
    case = spoilt(case_of(None, 80), too_large_queries, slice(1, 3), None)
    assert_close(recomputed(case, None), case, BOUND)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_heads_beside_a_flagged_one_have_the_same_bits_as_without_it(cause, lengths):
    plain = recomputed(case_of(lengths, 16), lengths)
    beside = recomputed(spoilt(case_of(lengths, 16), cause, 1, lengths), lengths)
    for name, x in plain.items():
        heads = 1 if x.shape[1] == 3 else 2
        others = torch.tensor([0, 2])
        assert torch.equal(x.index_select(heads, others), beside[name].index_select(heads, others)), name


def test_a_gradient_that_is_nan_spoils_only_earlier_tokens_of_its_own_sequence_and_head(poisoned):
    lengths = [290, 40]
    case = case_of(lengths, 16)
    whole = recomputed(case, lengths)
    case.grads["o"][0, 150, 1] = math.nan
    found = recomputed(case, lengths)
    for name in ("dq", "dk", "dv", "dg"):
        same = (found[name] - whole[name]).abs().amax(-1)[0] <= 1e-4 * whole[name].abs().max()
        assert same[:, [0, 2]].all(), name
        assert same[160:].all(), name  # from the next 16 tokens on
    assert not found["dk"][0, :150, 1].isfinite().any()
