"""Our kernels on a GPU against the float64 recurrence: every output and gradient, materialized or not."""

import pytest
import torch
from gla_cases import (
    GATES,
    Case,
    assert_close,
    cumulative,
    exact_from_checkpoints_alone,
    make_case,
    per_head_case,
    run,
    run_with_a_tail,
    truth,
)
from gla_kernels import chunk_gla, chunk_linear_attn, chunk_simple_gla, naive_recurrent_gla
from gla_kernels.hopper.wide import pieces
from gla_kernels.launching import call
from gla_kernels.launching import plans as launch
from gla_kernels.operators import kinds

BF16_BOUND = 3.5e-3
# Chunks with strong gates are completed after they have been rounded once.
STRONG_BOUND = 5e-3
BOUNDS = {torch.bfloat16: BF16_BOUND, torch.float16: 2e-3, torch.float32: 5e-6}
MODES = [True, False]


def bound_of(gate, dtype=torch.bfloat16):
    mild = gate in (None, "mild", "slow", "logsigmoid", "zero") or dtype != torch.bfloat16
    return BOUNDS[dtype] if mild else STRONG_BOUND


def assert_right_and_the_same_twice(case, gate, materialize):
    function = chunk_linear_attn if gate is None else chunk_gla
    found = run(function, case.inputs, case.grads, materialize=materialize)
    assert_close(found, case, bound_of(gate))
    again = run(function, case.inputs, case.grads, materialize=materialize)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "slow", "logsigmoid", "strong", "resets", "hard resets"])
def test_bf16_is_right_over_2048_tokens(gate, materialize):
    case = make_case(gate, B=2, T=2048, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads, materialize=materialize), case, bound_of(gate))


@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize(("dtype", "chunk_size"), [
    *((torch.bfloat16, C) for C in (16, 32, 64, 128)), (torch.float16, 32), (torch.float16, 64), (torch.float32, 32),
])  # fmt: skip
def test_every_chunk_size_is_right_for_every_gate(dtype, chunk_size, gate):
    case = make_case(gate, T=300, K=64, V=64, dtype=dtype, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads, chunk_size=chunk_size), case, bound_of(gate, dtype))


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", [None, "mild", "resets"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256), (256, 256), (60, 100), (300, 20)])
def test_tokens_behind_the_last_sequence_are_ignored(K, V, gate, materialize):
    lengths = [300, 1, 0, 700]
    case = make_case(gate, K=K, V=V, dtype=torch.bfloat16, device="cuda", lengths=lengths)
    function = chunk_linear_attn if gate is None else chunk_gla
    found = run_with_a_tail(function, case, cumulative(lengths).cuda(), materialize=materialize)
    assert_close(found, case, bound_of(gate))


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("gate", ["mild", "resets"])
@pytest.mark.parametrize(
    ("K", "V"),
    [
        (64, 64), (128, 128), (128, 256), (256, 256), (60, 100), (16, 200), (256, 64), (32, 48), (320, 64), (64, 512),
        (80, 112), (176, 336), (256, 512), (512, 320),
    ],
)  # fmt: skip
def test_every_head_dim_and_dtype_is_right(K, V, gate, dtype):
    case = make_case(gate, T=257, K=K, V=V, dtype=dtype, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads), case, bound_of(gate, dtype))


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "resets"])
@pytest.mark.parametrize("T", [500, 512])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256), (60, 100), (256, 128)])
def test_what_training_calls_is_right_and_gives_the_same_bits_twice(K, V, T, gate, materialize):
    """Without initial and final states, different kernels are compiled."""
    case = make_case(gate, B=2, T=T, K=K, V=V, dtype=torch.bfloat16, initial=False, device="cuda")
    leaves = [case.inputs[name].clone().requires_grad_() for name in ("q", "k", "v", "g")]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact, _ = naive_recurrent_gla(*wide)
    expected = [exact.detach(), *torch.autograd.grad(exact, wide, case.grads["o"].double())]
    runs = []
    for _ in range(2):
        poison = torch.full((2**26,), float("nan"), device="cuda")
        del poison
        o, _ = chunk_gla(*leaves, materialize=materialize)
        runs.append([o.detach(), *torch.autograd.grad(o, leaves, case.grads["o"])])
    for found, again, right in zip(*runs, expected, strict=True):
        assert torch.equal(found, again)
        assert (found.double() - right).norm() <= bound_of(gate) * right.norm()


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "resets", "dead channel"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (128, 256), (256, 128), (320, 64), (60, 100)])
def test_gates_in_bfloat16_are_taken_as_they_are(K, V, gate, materialize):
    case = make_case(gate, T=257, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    case.inputs["g"] = case.inputs["g"].bfloat16()
    case = Case(case.inputs, case.grads, truth(case.inputs, case.grads))
    found = run(chunk_gla, case.inputs, case.grads, materialize=materialize)
    assert found["dg"].dtype == torch.bfloat16
    assert_close(found, case, STRONG_BOUND)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(("T", "K", "V"), [(1, 64, 64), (512, 64, 64), (333, 128, 96)])
def test_linear_attention_is_right(T, K, V, dtype, materialize):
    case = make_case(None, T=T, K=K, V=V, dtype=dtype, device="cuda")
    found = run(chunk_linear_attn, case.inputs, case.grads, materialize=materialize)
    assert_close(found, case, BOUNDS[dtype])


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", [None, "mild", "resets"])
@pytest.mark.parametrize(
    ("B", "K", "V"), [(17, 128, 256), (34, 128, 256), (50, 128, 256), (17, 128, 512), (10, 320, 256)]
)
def test_many_programs_are_right_in_one_round_or_several(B, K, V, gate, materialize):
    """Programs hold more columns of the state or fewer, whichever needs fewer or shorter rounds."""
    case = make_case(gate, B=B, T=150, H=4, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    function = chunk_linear_attn if gate is None else chunk_gla
    found = run(function, case.inputs, case.grads, materialize=materialize)
    assert_close(found, case, bound_of(gate))


@pytest.mark.parametrize("gate", [None, "resets", "per head"])
@pytest.mark.parametrize(("H", "K", "V"), [(4, 128, 256), (8, 112, 128)])
def test_sequences_beyond_full_rounds_of_programs_are_right(H, K, V, gate, monkeypatch):
    """They are cut into pieces."""
    monkeypatch.setattr(pieces, "REST_LAUNCHES", -100)
    B = torch.cuda.get_device_properties(0).multi_processor_count // H + 2
    shape = {"B": B, "T": 200, "H": H, "K": K, "V": V, "dtype": torch.bfloat16, "device": "cuda"}
    case = per_head_case("logsigmoid", **shape) if gate == "per head" else make_case(gate, **shape)
    function = {None: chunk_linear_attn, "per head": chunk_simple_gla}.get(gate, chunk_gla)
    assert_close(run(function, case.inputs, case.grads), case, STRONG_BOUND)
    given = [case.inputs[name] for name in ("q", "k", "v", "g") if case.inputs[name] is not None]
    with torch.no_grad():
        o, final = function(*given, initial_state=case.inputs["initial"], output_final_state=True)
    assert_close({"o": o, "final": final}, case, STRONG_BOUND)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 65, 1000])
def test_every_length_is_right(T):
    case = make_case("mild", T=T, K=64, V=64, dtype=torch.bfloat16, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads), case, BF16_BOUND)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "resets"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 256)])
def test_two_runs_give_the_same_bits(K, V, gate, materialize):
    case = make_case(gate, B=4, T=1000, H=4, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    first = run(chunk_gla, case.inputs, case.grads, materialize=materialize)
    for _ in range(5):
        again = run(chunk_gla, case.inputs, case.grads, materialize=materialize)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "resets"])
@pytest.mark.parametrize("lengths", [[300, 1, 64, 500], [0, 16], [65, 0, 0, 130, 0], [3000, 1, 1200]], ids=str)
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (256, 64), (60, 100)])
def test_packed_sequences_are_right(K, V, lengths, gate, materialize):
    case = make_case(gate, K=K, V=V, lengths=lengths, dtype=torch.bfloat16, device="cuda")
    options = {"cu_seqlens": cumulative(lengths, torch.int64, "cuda"), "materialize": materialize}
    assert_close(run(chunk_gla, case.inputs, case.grads, **options), case, bound_of(gate))


@pytest.mark.parametrize("gate", ["mild", "resets", None])
@pytest.mark.parametrize("H", [2, 100])
def test_packed_narrow_heads_are_right_from_checkpoints(H, gate):
    """With few heads, forwards are cut into pieces too."""
    lengths = [3000, 0, 1, 1200, 64]
    case = make_case(gate, H=H, K=64, V=64, lengths=lengths, dtype=torch.bfloat16, device="cuda")
    options = {"cu_seqlens": cumulative(lengths, torch.int32, "cuda"), "materialize": False}
    function = chunk_linear_attn if gate is None else chunk_gla
    assert_close(run(function, case.inputs, case.grads, **options), case, bound_of(gate))


@pytest.mark.parametrize("lengths", [None, [1300, 0, 1, 700]], ids=str)
@pytest.mark.parametrize("gate", ["mild", "strong", "resets", "-inf"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (48, 16), (128, 256), (256, 512), (320, 64), (60, 100)])
def test_the_exact_backward_is_right_over_several_checkpoints(K, V, gate, lengths, monkeypatch):
    exact_from_checkpoints_alone(monkeypatch)
    monkeypatch.setattr(kinds, "_passes_by_kind", {})
    shape = {"B": 2, "T": 1300} if lengths is None else {"lengths": lengths}
    case = make_case(gate, K=K, V=V, dtype=torch.bfloat16, device="cuda", **shape)
    options = {} if lengths is None else {"cu_seqlens": cumulative(lengths, torch.int32, "cuda")}
    found = run(chunk_gla, case.inputs, case.grads, materialize=False, **options)
    assert_close(found, case, STRONG_BOUND)
    again = run(chunk_gla, case.inputs, case.grads, materialize=False, **options)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "logsigmoid", "resets", None])
@pytest.mark.parametrize(
    ("K", "V", "T"),
    [
        (64, 64, 2500),
        (48, 16, 2560),
        (128, 256, 2500),
        (128, 256, 2560),
        (128, 192, 2560),
        (256, 128, 2500),
        (320, 64, 2500),
    ],
)
def test_a_long_sequence_with_few_heads_is_right(K, V, T, gate, materialize):
    """Sequences are cut into pieces, which run in parallel. If all chunks are full, gradients' memory holds states."""
    case = make_case(gate, T=T, H=1, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    function = chunk_linear_attn if gate is None else chunk_gla
    assert_close(run(function, case.inputs, case.grads, materialize=materialize), case, bound_of(gate))


@pytest.mark.parametrize("gate", ["mild", "resets", None])
@pytest.mark.parametrize(("K", "V", "T"), [(128, 256, 1100), (128, 192, 1088), (256, 256, 1100), (320, 64, 1100)])
def test_many_wide_heads_without_kept_states_are_right(K, V, T, gate):
    """All sequences run slice by slice, passing on the state and its gradient."""
    case = make_case(gate, B=4, T=T, H=9, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    function = chunk_linear_attn if gate is None else chunk_gla
    assert_close(run(function, case.inputs, case.grads, materialize=False), case, bound_of(gate))


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "logsigmoid", "strong", "resets", "dead channel", None])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (80, 112), (32, 128)])
def test_enough_heads_for_one_backward_kernel_are_right(K, V, gate, materialize):
    """K and V up to 128: whole sequences or slices of them, with the state's gradient in registers."""
    case = make_case(gate, B=4, T=600, H=34, K=K, V=V, dtype=torch.bfloat16, device="cuda")
    assert_right_and_the_same_twice(case, gate, materialize)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "resets", None])
@pytest.mark.parametrize("T", [192, 200])
def test_enough_heads_for_256_value_columns_a_program_are_right(T, gate, materialize):
    """Few heads, as in most models, get a narrower tile of the state."""
    case = make_case(gate, B=4, T=T, H=25, K=128, V=256, dtype=torch.bfloat16, device="cuda")
    assert_right_and_the_same_twice(case, gate, materialize)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("V", [192, 256])
def test_packed_sequences_whose_total_is_whole_chunks_are_right(V, materialize):
    lengths = [100, 28, 64]
    case = make_case("mild", K=128, V=V, lengths=lengths, dtype=torch.bfloat16, device="cuda")
    options = {"cu_seqlens": cumulative(lengths, torch.int32, "cuda"), "materialize": materialize}
    assert_close(run(chunk_gla, case.inputs, case.grads, **options), case, BF16_BOUND)


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("gate", ["mild", "resets", None])
@pytest.mark.parametrize("T", [64, 200])
def test_more_narrow_heads_than_programs_at_once_are_right(T, gate, materialize):
    """A program of the forward computes one sequence and head after another."""
    case = make_case(gate, B=5, T=T, H=60, K=64, V=48, dtype=torch.bfloat16, device="cuda")
    assert_right_and_the_same_twice(case, gate, materialize)


@pytest.mark.parametrize("materialize", MODES)
def test_packed_sequences_in_one_backward_kernel_are_right(materialize):
    lengths = [300, 0, 1, 64, 500]
    case = make_case("mild", H=34, K=128, V=128, lengths=lengths, dtype=torch.bfloat16, device="cuda")
    options = {"cu_seqlens": cumulative(lengths, torch.int32, "cuda"), "materialize": materialize}
    assert_close(run(chunk_gla, case.inputs, case.grads, **options), case, BF16_BOUND)


def without_gluon_kernels(monkeypatch):
    monkeypatch.setattr(launch, "hopper_device", lambda index: False)
    monkeypatch.setattr(call, "_remembered_call", call._call)  # another test may have had such a call


@pytest.mark.parametrize("gate", ["mild", "slow", "strong", "resets"])
def test_the_plain_triton_twin_is_right_on_a_hopper_gpu(gate, monkeypatch):
    without_gluon_kernels(monkeypatch)
    case = make_case(gate, T=300, K=64, V=96, dtype=torch.bfloat16, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads), case, bound_of(gate))


@pytest.mark.parametrize("materialize", MODES)
def test_the_plain_triton_twin_of_linear_attention_is_right_on_a_hopper_gpu(materialize, monkeypatch):
    without_gluon_kernels(monkeypatch)
    case = make_case(None, T=300, K=64, V=96, dtype=torch.bfloat16, device="cuda")
    assert_close(run(chunk_linear_attn, case.inputs, case.grads, materialize=materialize), case, BF16_BOUND)


@pytest.mark.parametrize("K", [64, 60, 128])
def test_a_cut_from_one_projection_gives_the_same_bits(K):
    case = make_case("mild", B=2, T=200, K=K, V=K, dtype=torch.bfloat16, device="cuda")
    cut = torch.stack([case.inputs[name] for name in ("q", "k", "v")], dim=2).unbind(2)
    whole = run(chunk_gla, case.inputs, case.grads)
    leaves = [*(x.detach().requires_grad_() for x in cut), case.inputs["g"].clone().requires_grad_()]
    o, _ = chunk_gla(*leaves, initial_state=case.inputs["initial"])
    assert torch.equal(o, whole["o"])


@pytest.mark.parametrize("materialize", MODES)
@pytest.mark.parametrize("factors", [{"k": 1e12, "v": 1e12}, {"q": 1e25}, {"k": 1e25}, {"k": 1e-25}, {"do": 1e30}])
@pytest.mark.parametrize(("H", "K", "V"), [(2, 64, 64), (2, 128, 64), (2, 256, 64), (68, 128, 128)])
def test_finite_inputs_of_any_size_never_give_nan(H, K, V, factors, materialize):
    case = make_case("zero", T=200, H=H, K=K, V=V, dtype=torch.bfloat16, initial=False, device="cuda")
    case.inputs["g"][...] = -1.2
    case.grads["final"].zero_()
    for name, factor in factors.items():
        (case.grads if name == "do" else case.inputs)["o" if name == "do" else name].mul_(factor)
    found = run(chunk_gla, case.inputs, case.grads, materialize=materialize)
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("T", [1024, 8192, 65536])
@pytest.mark.parametrize("K", [64, 128])
def test_the_error_does_not_grow_with_the_sequence(K, T):
    case = make_case("mild", T=T, H=1, K=K, V=64, dtype=torch.bfloat16, initial=False, device="cuda")
    assert_close(run(chunk_gla, case.inputs, case.grads), case, BF16_BOUND)


@pytest.mark.parametrize(("K", "H"), [(64, 2), (64, 280), (128, 2), (128, 64), (256, 2)])
def test_one_sequence_with_resets_does_not_touch_the_others(K, H):
    case = make_case("mild", B=2, T=256, H=H, K=K, V=min(K, 128), dtype=torch.bfloat16, device="cuda")
    before = run(chunk_gla, case.inputs, case.grads)
    case.inputs["g"][0, 100, 0] = -float("inf")
    after = run(chunk_gla, case.inputs, case.grads)
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert torch.equal(before[name][1], after[name][1])
        assert not torch.equal(before[name][0], after[name][0])


@pytest.mark.parametrize("gate", ["mild", "resets"])
@pytest.mark.parametrize(("K", "H"), [(64, 2), (128, 2), (128, 128), (256, 2)])
def test_a_nan_gate_shows_in_its_sequence_alone(K, H, gate):
    case = make_case(gate, T=64, H=H, K=K, V=min(K, 128), dtype=torch.bfloat16, device="cuda")
    clean = run(chunk_gla, case.inputs, case.grads)
    case.inputs["g"][0, 40, 0, 5] = float("nan")
    found = run(chunk_gla, case.inputs, case.grads)
    assert found["o"][0, 40:, 0].isnan().all()
    for name in ("dq", "dg"):
        assert found[name][0, :, 0].isnan().any()
    for name in ("o", "dq", "dk", "dv", "dg"):
        assert torch.equal(found[name][:, :, 1], clean[name][:, :, 1])


def test_tensors_of_more_than_2_to_the_31_elements_are_addressed_right():
    B, T, H, K = 513, 4096, 16, 64
    if torch.cuda.mem_get_info()[0] < 110 * 2**30:
        pytest.skip("needs 110 GiB of free memory")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(dtype):
        return torch.randn(B, T, H, K, generator=generator, device="cuda", dtype=dtype)

    inputs = [
        normal(torch.bfloat16),
        normal(torch.bfloat16),
        normal(torch.bfloat16),
        normal(torch.bfloat16).abs_().neg_(),
    ]
    fewer = [x[-64:].clone() for x in inputs]  # enough for the same plan: one sequence alone is cut into pieces
    found = []
    for tensors in (inputs, fewer):
        leaves = [x.requires_grad_() for x in tensors]
        o, _ = chunk_gla(*leaves)
        o.backward(leaves[2].detach())
        found.append([o[-1:].detach().clone(), *(x.grad[-1:].clone() for x in leaves)])
        del o
    assert all(torch.equal(large, small) for large, small in zip(*found, strict=True))


def test_tensors_on_another_device_than_the_current_one_are_right():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make_case("resets", T=300, K=64, V=64, dtype=torch.bfloat16, device="cuda:1")
    assert_close(run(chunk_gla, case.inputs, case.grads, materialize=False), case, BF16_BOUND)
