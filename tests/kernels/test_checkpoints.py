"""Backwards from checkpoints: what they launch, without a GPU, and heads that the exact kernel has to compute."""

import itertools
import math
from collections import Counter

import pytest
import torch
from gla_cases import Case, assert_close, cumulative, exact_from_checkpoints_alone, make_case, run, truth
from gla_kernels import chunk_gla
from gla_kernels.hopper.narrow import launches as narrow
from gla_kernels.launching.buffers import Inputs, flag_buffer
from gla_kernels.launching.call import Call
from gla_kernels.launching.plans import hopper_plan, triton_plan
from gla_kernels.operators import passes
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
    passes.launch_backward(call, inputs, do, None, kept, flags, False, True, passes.KEEP_CHECKPOINTS)


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
        assert states.shape == (programs, call.checkpoint_chunks, call.K, call.V)
        assert 1 <= programs <= min(call.sequences * call.H, call.exact_programs)
        assert states.shape[:2].numel() <= passes._scratch_states(call)


@pytest.mark.parametrize(
    "size", [SIZES["many narrow heads"], {"B": 32, "H": 4, "K": 256, "V": 512}], ids=["narrow", "wide"]
)
@pytest.mark.parametrize("gated", [True, False])
def test_slices_hand_over_the_gradient_of_the_state_in_one_tensor(size, gated, launched):
    call = make_call(T=4096, gated=gated, **size)
    assert call.chunks > 2 * call.checkpoint_chunks
    launch_backward(call)
    shape = call.state_shape(call.sequences)
    states = [x for name, _, arguments in launched if "exact" not in name for x in arguments if is_state(x, shape)]
    assert len({id(x) for x in states}) <= 1


def is_state(x, shape):
    """Whether it is a state of each sequence and head, and not a view of checkpoints."""
    return isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.shape == shape and x.is_contiguous()


@pytest.mark.parametrize("K", [32, 64, 128, 256, 512])
def test_every_program_of_the_strong_backward_gets_all_parts_of_chunks(K, launched):
    """Parts take different times, so programs that always get the same one would wait for others."""
    launch_backward(make_call(B=4, T=8192, H=16, K=K, V=64))
    ((programs,), (*_, items)) = next(note[1:] for note in launched if "strong" in note[0])
    parts = items // (4 * 128 * 16)
    assert items % parts == 0
    assert parts > 1
    for program in (0, 1, programs - 1):
        found = Counter(item % parts for item in range(program, items, programs))
        assert len(found) == parts
        assert max(found.values()) - min(found.values()) <= 1


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("H", [1, 16, 100])
@pytest.mark.parametrize(("T", "sequences"), [(4096, 2), (65536, 64), (262144, 64)])
def test_packed_narrow_heads_have_no_launch_for_pieces_that_no_sequence_can_have(T, sequences, H, gated, launched):
    """Of a sequence that could have all tokens, there would be sequences * T of them."""
    call = make_call(1, T, H, 64, 64, sequences, gated)
    launch_backward(call)
    programs = [programs for name, (programs, *_), _ in launched if name == "gla_backward_hopper"]
    assert sum(programs) == call.slots(call.checkpoint_chunks) * H
    kinds = Counter(name for name, *_ in launched)
    assert kinds["gla_recurrence_hopper"] == kinds["scan_pieces"] == 1


def test_packed_narrow_heads_with_at_most_one_piece_each_are_not_cut(launched):
    launch_backward(make_call(1, 250, 16, 64, 64, 3))
    assert Counter(name for name, *_ in launched) == {
        "gla_backward_hopper": 1, "gla_backward_exact_recomputing": 1, "gla_backward_strong_hopper": 1,
        "clear_tails_kernel": 1,
    }  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_narrow_calls_of_the_same_form_launch_the_same_kernels(packed, monkeypatch):
    """First calls compile what later calls of the same form launch."""
    launched, seen = set(), {}
    monkeypatch.setattr(
        Call,
        "launch",
        lambda self, kernel, tile, programs, arguments, switches, early=True: launched.add(
            (kernel.__name__, tile, tuple(switches.items()), early)
        ),
    )
    for N, T, H in itertools.product((1, 2, 33), (250, 513, 2048, 32768), (1, 6, 17, 40, 300)):
        call = make_call(1, T, H, 64, 64, N) if packed else make_call(N, T, H, 64, 64)
        launched.clear()
        launch_backward(call)
        assert seen.setdefault(narrow.form(call), set(launched)) == launched, (N, T, H)
    assert len(seen) > 2


@pytest.fixture
def poisoned():
    """Memory that is not initialised is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# At chunks of 16, pieces are of at most 8 chunks. These tokens are a chunk of the second piece.
LATE = slice(128, 144)
LENGTHS = {"rows": None, "packed": [150, 0, 1, 16]}
EXACT = [("mild", "packed", 80, True), ("resets", "rows", 16, False)]  # unless all cases are run


def too_large_queries(case, head):
    """Scaled queries beyond float32's range in a chunk of 16 tokens: the forward flags the head."""
    case.inputs["q"][:, LATE, head] *= 1e25
    case.inputs["g"][:, LATE, head] = -110 * math.log(2) / 16


def too_large_gradients(case, head):
    """The same of what a backward scales: only one piece's plain backward fails."""
    case.grads["o"][:, LATE, head] *= 1e30
    case.inputs["g"][:, LATE, head] = -110 * math.log(2) / 16


CAUSES = {"the forward": too_large_queries, "the backward of one piece": too_large_gradients}


def case_of(lengths, V, initial=True, gate="mild"):
    shape = {"B": 2, "T": 150} if lengths is None else {"lengths": lengths}
    return make_case(gate, H=2, K=20, V=V, initial=initial, **shape)


def spoilt(case, cause, head, lengths):
    cause(case, head)
    return Case(case.inputs, case.grads, truth(case.inputs, case.grads, lengths))


def recomputed(case, lengths, **options):
    packed = {} if lengths is None else {"cu_seqlens": cumulative(lengths)}
    return run(chunk_gla, case.inputs, case.grads, materialize=False, chunk_size=16, **packed, **options)


@product(lambda cause, lengths: (cause == "the forward") == (lengths == "packed"), cause=CAUSES, lengths=LENGTHS)
def test_a_flagged_head_is_right_over_several_checkpoints(cause, lengths, poisoned):
    case = spoilt(case_of(lengths, 16), cause, 1, lengths)
    assert_close(recomputed(case, lengths), case, BOUND)


@product(
    lambda gate, lengths, V, initial: (gate, lengths, V, initial) in EXACT,
    gate=["mild", "strong", "resets", "one channel resets", "-inf"],
    lengths=LENGTHS,
    V=[16, 80],  # one block of value columns, or two
    initial=[True, False],
)
def test_the_exact_kernel_is_right_over_several_checkpoints(gate, lengths, V, initial, poisoned, monkeypatch):
    exact_from_checkpoints_alone(monkeypatch)
    case = case_of(lengths, V, initial, gate)
    assert_close(recomputed(case, lengths), case, BOUND)


def test_the_exact_kernel_takes_no_gradient_of_final_states(poisoned, monkeypatch):
    exact_from_checkpoints_alone(monkeypatch)
    case = case_of(None, 16, False)
    leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")]
    o, _ = chunk_gla(*leaves, materialize=False, chunk_size=16)
    found = torch.autograd.grad(o, leaves, case.grads["o"])
    case.grads["final"].zero_()
    right = truth(case.inputs, case.grads)
    for name, x in zip(("dq", "dk", "dv", "dg"), found, strict=True):
        assert ((x.double() - right[name]).norm() / right[name].norm()).item() < BOUND


def test_a_program_does_several_flagged_heads_one_after_the_other(poisoned, monkeypatch):
    """In the same scratch memory."""
    monkeypatch.setattr(Call, "exact_programs", 2)
    exact_from_checkpoints_alone(monkeypatch)
    case = case_of(LENGTHS["packed"], 16)
    assert_close(recomputed(case, LENGTHS["packed"]), case, BOUND)


@product(lambda cause, lengths: (cause == "the forward") == (lengths == "rows"), cause=CAUSES, lengths=LENGTHS)
def test_heads_beside_a_flagged_one_have_the_same_bits_as_without_it(cause, lengths):
    plain = recomputed(case_of(lengths, 16), lengths)
    beside = recomputed(spoilt(case_of(lengths, 16), cause, 1, lengths), lengths)
    for name, x in plain.items():
        heads = 1 if name in ("final", "dinitial") else 2
        assert torch.equal(x.select(heads, 0), beside[name].select(heads, 0)), name


def test_a_gradient_that_is_nan_spoils_only_earlier_tokens_of_its_own_sequence_and_head(poisoned):
    lengths = [150, 30]
    case = case_of(lengths, 16)
    whole = recomputed(case, lengths)
    case.grads["o"][0, 100, 1] = math.nan
    found = recomputed(case, lengths)
    for name in ("dq", "dk", "dv", "dg"):
        same = (found[name] - whole[name]).abs().amax(-1)[0] <= 1e-4 * whole[name].abs().max()
        assert same[:, 0].all(), name
        assert same[112:].all(), name  # from the next 16 tokens on
    assert not found["dk"][0, :100, 1].isfinite().any()
