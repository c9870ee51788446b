"""The kernels as PyTorch operators and around them: torch's requirements, and the features that depend on them."""

import warnings
from functools import partial

import pytest
import torch
from gla_cases import cumulative, make_case, run
from gla_kernels import chunk_gla, chunk_linear_attn, chunk_simple_gla, fused_recurrent_gla
from gla_kernels.launching import call
from gla_kernels.launching.plans import hopper_plan
from gla_kernels.operators import eager, kinds, ops, passes
from product import product
from torch import library
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

NAMES = ("q", "k", "v", "g")


def leaves_of(case):
    return [case.inputs[name].clone().requires_grad_() for name in NAMES]


def through_operators(monkeypatch):
    """Lets calls on plain tensors go through the operators too."""
    monkeypatch.setattr(eager, "is_plain", lambda *tensors: False)
    for module in (eager, kinds):
        monkeypatch.setattr(module, "is_unwatched", lambda: False)


@pytest.fixture(params=["eager", "operators"])
def path(request, monkeypatch):
    """Both ways of a call: around the operators, as calls on plain tensors go, and through them."""
    if request.param == "operators":
        through_operators(monkeypatch)
    return request.param


class Operators(TorchDispatchMode):
    """Notes which of our operators are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gla_kernels":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [passes.KEEP_STATES, passes.KEEP_CHECKPOINTS])
@pytest.mark.parametrize("packed", [False, True])
def test_the_forward_operator_passes_torchs_checks(keep, packed):
    lengths = [20, 0, 13]
    case = make_case("mild", K=16, V=16, lengths=lengths) if packed else make_case("mild", T=20, K=16, V=16)
    cu_seqlens = cumulative(lengths) if packed else None
    initial = case.inputs["initial"].clone().requires_grad_()
    arguments = (*leaves_of(case), initial, cu_seqlens, 0.25, True, keep, None, None)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if packed:  # between packed sequences a few slots of what is kept are never written: nothing to compare
        checks.pop()
    library.opcheck(ops.chunk_forward, arguments, test_utils=checks)


def test_the_forward_operator_without_gates_has_the_same_outputs_whatever_memory_holds():
    q, k, v, _ = leaves_of(make_case("mild", T=20, K=16, V=16))
    torch.use_deterministic_algorithms(True)  # memory that is not initialised is not 0
    try:
        *_, flags = ops.chunk_forward(q, k, v, None, None, None, 0.25, False, passes.KEEP_STATES, None, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert flags.tolist() == [0]


@pytest.mark.parametrize("function", [chunk_gla, chunk_simple_gla, chunk_linear_attn])
@pytest.mark.parametrize(("B", "H", "K", "V"), [(1, 2, 64, 64), (2, 4, 128, 128), (2, 4, 384, 64)])
def test_a_call_for_hopper_is_traced_with_symbols_for_sizes(B, H, K, V, function, monkeypatch):
    """Long sequences of few heads, which are cut into pieces."""
    monkeypatch.setattr(call, "plan", lambda K, V, dtype, chunk, *_: hopper_plan(K, V, dtype, chunk))
    sizes = [(K,), (K,), (V,), (K,) if function is chunk_gla else ()][: 3 if function is chunk_linear_attn else 4]
    tensors = [torch.empty(B, 8192, H, *size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    for materialize in (True, False):
        options = {"materialize": materialize}
        traced = make_fx(lambda *xs, options=options: function(*xs, **options)[0], tracing_mode="symbolic")(*tensors)
        assert "gla_kernels.chunk_forward" in traced.code


def test_the_backward_operator_passes_torchs_checks():
    case = make_case("mild", T=33, K=16, V=16)
    q, k, v, g = (case.inputs[name] for name in NAMES)
    initial = case.inputs["initial"]
    _, _, kept, flags = ops.chunk_forward(q, k, v, g, initial, None, 0.25, True, passes.KEEP_STATES, None, None)
    do, dfinal = case.grads["o"], case.grads["final"]
    for needs in ((True, True), (False, True), (True, False)):
        arguments = (q, k, v, g, None, do, dfinal, kept, flags, 0.25, *needs, passes.KEEP_STATES, None, None)
        library.opcheck(ops.chunk_backward, arguments)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, which goes over the batch in a loop
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "initial"])
def test_transforms_of_functions_give_the_gradients_of_autograd(name):
    case = make_case("mild", T=33, H=1, K=16, V=16)

    def loss(x):
        inputs = case.inputs | {name: x}
        o, final = chunk_gla(*(inputs[n] for n in NAMES), initial_state=inputs["initial"], output_final_state=True)
        return o.square().sum() + final.sum()

    leaf = case.inputs[name].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(case.inputs[name]), expected)
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(case.inputs[name][None])[0], expected)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(case.inputs[name])


@pytest.mark.parametrize("materialize", [True, False])
def test_a_compiled_call_is_one_graph_and_gives_the_same(materialize):
    case = make_case("mild", T=40, K=16, V=16)

    def loss(q, k, v, g):
        o, final = chunk_gla(q * 2, k, v, -g.exp(), output_final_state=True, materialize=materialize)
        return o.square().sum() + final.sum()

    plain, compiled = leaves_of(case), leaves_of(case)
    loss(*plain).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled).backward()
    for x, y in zip(plain, compiled, strict=True):
        assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_bits(path, use_reentrant):
    case = make_case("mild", T=40, K=16, V=16)
    plain, again = leaves_of(case), leaves_of(case)
    chunk_gla(*plain)[0].square().sum().backward()
    checkpoint(lambda *x: chunk_gla(*x)[0], *again, use_reentrant=use_reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(plain, again, strict=True))


def test_autocast_takes_q_k_and_v_in_its_type_and_leaves_gate_and_state(path):
    case = make_case("mild", T=20, K=16, V=16)
    q, k, v, g = leaves_of(case)
    with torch.autocast("cpu", dtype=torch.float16):
        o, final = chunk_gla(q, k, v, g, initial_state=case.inputs["initial"], output_final_state=True)
    assert (o.dtype, final.dtype) == (torch.float16, torch.float32)
    o.float().sum().backward()
    assert (q.grad.dtype, g.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_both_ways_give_the_same_bits(materialize, packed, gated, monkeypatch):
    lengths = [20, 0, 13]
    case = make_case("strong", K=16, V=16, lengths=lengths) if packed else make_case("strong", T=40, K=16, V=16)
    options = {"output_final_state": True, "materialize": materialize}
    options |= {"cu_seqlens": cumulative(lengths)} if packed else {}

    def results():
        leaves = leaves_of(case) if gated else leaves_of(case)[:3]
        initial = case.inputs["initial"].clone().requires_grad_()
        o, final = (chunk_gla if gated else chunk_linear_attn)(*leaves, initial_state=initial, **options)
        grads = torch.autograd.grad((o, final), (*leaves, initial), (case.grads["o"], case.grads["final"]))
        return o, final, *grads

    around = results()
    through_operators(monkeypatch)
    through = results()
    assert "Chunk" in around[0].grad_fn.name() != through[0].grad_fn.name()
    assert all(torch.equal(x, y) for x, y in zip(around, through, strict=True))


def test_a_gradient_of_one_output_only(path):
    case = make_case("mild", T=40, K=16, V=16)
    leaves = leaves_of(case)
    do, dfinal = case.grads["o"], case.grads["final"]
    o, final = chunk_gla(*leaves, output_final_state=True)
    of_o = torch.autograd.grad(o, leaves, do, retain_graph=True)
    of_final = torch.autograd.grad(final, leaves, dfinal, retain_graph=True, allow_unused=True)
    of_both = torch.autograd.grad((o, final), leaves, (do, dfinal))
    for x, y, both in zip(of_o, of_final, of_both, strict=True):
        assert torch.allclose(x + y, both, rtol=1e-4, atol=1e-4)


def test_inputs_without_a_gradient_get_none(path):
    case = make_case("mild", T=40, K=16, V=16)
    q, k, v, g = (case.inputs[name].clone() for name in NAMES)
    k.requires_grad_()
    chunk_gla(q, k, v, g, initial_state=case.inputs["initial"])[0].sum().backward()
    assert k.grad is not None
    assert q.grad is v.grad is g.grad is None


# What is frozen and what is kept do not meet in one kernel's code.
@product(
    lambda frozen, kept, gate: (kept == "checkpoints") == ("g" in frozen),
    frozen={"g": ("g",), "initial": ("initial",), "g and initial": ("g", "initial")},
    materialize={"states": True, "checkpoints": False},
    gate={name or "none": name for name in ("mild", "one channel resets", None)},
)
def test_gradients_that_nobody_needs_are_not_made(gate, materialize, frozen, path, monkeypatch):
    """The others are the same bits. Strong chunks and heads that the exact kernels compute are among them."""
    made = []
    launch = passes.launch_backward
    monkeypatch.setattr(passes, "launch_backward", lambda *given: made.append(launch(*given)) or made[-1])
    case, attend = make_case(gate, T=40, K=16, V=16), chunk_gla if gate else chunk_linear_attn
    found = run(attend, case.inputs, case.grads, frozen, materialize=materialize)
    *_, dg, dinitial = made[0]
    assert (dg is None) == (gate is None or "g" in frozen)
    assert (dinitial is None) == ("initial" in frozen)
    whole = run(attend, case.inputs, case.grads, materialize=materialize)
    assert whole.keys() - found.keys() == {f"d{name}" for name in frozen if gate or name != "g"}
    assert all(torch.equal(x, whole[name]) for name, x in found.items())


def test_a_compiled_call_makes_no_gradient_that_nobody_needs(monkeypatch):
    made = []
    launch = passes.launch_backward
    monkeypatch.setattr(passes, "launch_backward", lambda *given: made.append(launch(*given)) or made[-1])
    q, k, v, g = leaves_of(make_case("mild", T=20, K=16, V=16))
    compiled = torch.compile(chunk_gla, fullgraph=True, backend="aot_eager")
    compiled(q, k, v, g.detach())[0].sum().backward()
    *_, dg, dinitial = made[0]
    assert dg is dinitial is None


def test_the_sign_that_a_view_only_notes_counts(path):
    """`torch._neg_view` negates no memory; such are imaginary parts of conjugated tensors."""
    q, k, v, g = (x.detach() for x in leaves_of(make_case("mild", T=20, K=16, V=16)))
    conjugated = torch.complex(g, -v).conj()
    assert conjugated.imag.is_neg()
    for _ in range(2):
        assert torch.equal(chunk_gla(q, k, conjugated.imag, g)[0], chunk_gla(q, k, v, g)[0])


def test_gradients_cannot_be_differentiated_again(path):
    leaves = leaves_of(make_case("mild", T=20, K=16, V=16))
    grads = torch.autograd.grad(chunk_gla(*leaves)[0].square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="chunk_gla and chunk_linear_attn cannot be differentiated again"):
        grads[0].sum().backward()


def test_a_second_backward_needs_a_retained_graph(path):
    leaves = leaves_of(make_case("mild", T=20, K=16, V=16))
    loss = chunk_gla(*leaves)[0].sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_what_was_changed_after_the_forward_is_noticed(path):
    leaves = leaves_of(make_case("mild", T=20, K=16, V=16))
    q = leaves[0] * 1
    o, _ = chunk_gla(q, *leaves[1:])
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_hooks_on_saved_tensors_see_all_that_is_saved_and_may_put_it_elsewhere(path):
    leaves = leaves_of(make_case("strong", T=20, K=16, V=16))
    expected = torch.autograd.grad(chunk_gla(*leaves)[0].sum(), leaves)
    packed = []

    def pack(x):
        packed.append(x)
        return x

    def unpack(x):
        """A copy that does not begin where its memory does."""
        return torch.cat([x.new_zeros(8), x.flatten()])[8:].view(x.shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        o, _ = chunk_gla(*leaves)
    assert len(packed) == 6  # q, k, v, g, the states and the flags
    found = torch.autograd.grad(o.sum(), leaves)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_hooks_on_saved_tensors_may_change_how_they_lie_in_memory(path):
    """As `torch.autograd.graph.save_on_cpu` does with views; three times, since later calls repeat earlier ones."""
    case = make_case("strong", T=40, K=16, V=16)
    leaves = [*leaves_of(case), case.inputs["initial"].clone().requires_grad_()]
    options = {"initial_state": leaves[-1], "output_final_state": True}
    expected = torch.autograd.grad([x.sum() for x in chunk_gla(*leaves[:4], **options)], leaves)

    def unpack(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            outputs = chunk_gla(*leaves[:4], **options)
        found = torch.autograd.grad([x.sum() for x in outputs], leaves)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("zeros", ["g", "initial", "v"])
def test_zeros_without_memory_are_zeros(zeros, path):
    """Torch makes such tensors for derivatives that are 0."""
    case = make_case("mild", T=40, K=16, V=16)
    dense = case.inputs | {zeros: torch.zeros_like(case.inputs[zeros])}
    found = []
    for inputs in (dense, dense | {zeros: torch._efficientzerotensor(dense[zeros].shape)}):
        *tensors, initial = (inputs[name] for name in (*NAMES, "initial"))
        found.append(chunk_gla(*tensors, initial_state=initial, output_final_state=True))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("function", [fused_recurrent_gla, partial(chunk_gla, gv=torch.zeros(1, 20, 2, 16))])
def test_zeros_without_memory_are_zeros_in_other_forms_too(function):
    q, k, v, g = (torch.randn(1, 20, 2, 16) for _ in range(4))
    none = torch._efficientzerotensor((1, 2, 16, 16))
    expected = function(q, k, v, -g.abs(), initial_state=torch.zeros(1, 2, 16, 16), output_final_state=True)
    found = function(q, k, v, -g.abs(), initial_state=none, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_without_gradients_nothing_is_saved(path):
    leaves = leaves_of(make_case("mild", T=20, K=16, V=16))
    saved = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        o, _ = chunk_gla(*leaves)
    assert not saved
    assert not o.requires_grad


def test_a_batch_of_gradients_at_once(path):
    leaves = leaves_of(make_case("mild", T=20, K=16, V=16))
    o, _ = chunk_gla(*leaves)
    one = torch.ones_like(o)
    expected = torch.autograd.grad(o, leaves, one, retain_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch runs the operator for each
        found = torch.autograd.grad(o, leaves, torch.stack([one, 2 * one]), is_grads_batched=True)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[0], y)


class OfOwnKind(torch.Tensor):
    """A subclass without code of its own."""


class WatchingFunctions(TorchFunctionMode):
    """Sees functions and changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_plain_tensors_go_around_the_operators_and_all_else_goes_through_them():
    q = torch.zeros(1)
    assert eager.is_plain(q, None, torch.nn.Parameter(q))
    assert not eager.is_plain(q, q.as_subclass(OfOwnKind))
    assert not eager.is_plain(q.to("meta"))
    with Operators():
        assert not eager.is_plain(q)
    with WatchingFunctions():
        assert not eager.is_plain(q)
    with forward_ad.dual_level():
        assert not eager.is_plain(q)
    assert eager.is_plain(q)
    seen = []
    torch.vmap(lambda x: (seen.append(eager.is_plain(x)), x)[1])(torch.zeros(2, 1))
    torch.func.grad(lambda x: (seen.append(eager.is_plain(x)), x.sum())[1])(q)
    assert seen == [False, False]


def test_modes_see_the_operators_of_both_passes():
    leaves = leaves_of(make_case("mild", T=20, K=16, V=16))
    with Operators() as seen:
        chunk_gla(*leaves)[0].sum().backward()
    assert seen.names == ["chunk_forward", "chunk_backward"]


def test_a_mode_that_is_entered_for_the_backward_sees_its_operator():
    leaves = leaves_of(make_case("mild", T=20, K=16, V=16))
    o, _ = chunk_gla(*leaves)
    with Operators() as seen:
        o.sum().backward()
    assert seen.names == ["chunk_backward"]


@pytest.mark.parametrize("pre_dispatch", [True, False])
def test_a_trace_holds_the_operator(pre_dispatch):
    case = make_case("mild", T=20, K=16, V=16)
    inputs = [case.inputs[name] for name in NAMES]
    graph = make_fx(lambda *x: chunk_gla(*x)[0], pre_dispatch=pre_dispatch)(*inputs)
    assert any(node.target is ops.chunk_forward for node in graph.graph.nodes)
    assert torch.equal(graph(*inputs), chunk_gla(*inputs)[0])


def test_nothing_is_kept_when_no_gradient_is_wanted():
    case = make_case("mild", T=40, K=16, V=16)
    q, k, v, g = (case.inputs[name] for name in NAMES)
    kept = ops.chunk_forward(q, k, v, g, None, None, 0.25, False, passes.KEEP_NOTHING, None, None)[2]
    assert kept.numel() == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, once
@pytest.mark.parametrize("tokens", [9, 20])
@pytest.mark.parametrize("function", [chunk_gla, fused_recurrent_gla])
def test_forward_mode_derivatives_are_refused(function, tokens):
    q, g = torch.randn(1, tokens, 2, 16), -torch.ones(1, tokens, 2, 16)

    def output(q):
        return function(q, q, q, g)[0]

    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        torch.func.jvp(output, (q,), (q,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
            output(forward_ad.make_dual(q, q))
        assert torch.equal(output(q), output(q.clone()))


def test_states_with_values_first_are_cast_by_autocast_too():
    q, g = torch.randn(1, 70, 2, 16), -torch.rand(1, 70, 2, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        o, final = chunk_gla(q, q, q.half(), g, output_final_state=True, state_v_first=True)
    assert o.dtype == torch.float16
    assert final.shape == (1, 2, 16, 16)


def test_checked_gates_end_with_the_last_packed_sequence():
    q, g = torch.randn(1, 9, 2, 16), -torch.rand(1, 9, 2, 16)
    g[:, 7:] = torch.nan
    o, _ = chunk_gla(q, q, q, g, cu_seqlens=torch.tensor([0, 7]), check=True)
    assert not o[:, 7:].any()
    with pytest.raises(ValueError, match="g: got a gate of nan"):
        chunk_gla(q, q, q, g, cu_seqlens=torch.tensor([0, 8]), check=True)
