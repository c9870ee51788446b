"""The kernels as PyTorch operators: torch's requirements, and the features that depend on them."""

import pytest
import torch
from gla_cases import cumulative, make_case
from gla_kernels import chunk_gla, ops, passes
from torch import library
from torch.utils.checkpoint import checkpoint

NAMES = ("q", "k", "v", "g")


def leaves_of(case):
    return [case.inputs[name].clone().requires_grad_() for name in NAMES]


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


def test_the_backward_operator_passes_torchs_checks():
    case = make_case("mild", T=33, K=16, V=16)
    q, k, v, g = (case.inputs[name] for name in NAMES)
    initial = case.inputs["initial"]
    _, _, kept, flags = ops.chunk_forward(q, k, v, g, initial, None, 0.25, True, passes.KEEP_STATES, None, None)
    do, dfinal = case.grads["o"], case.grads["final"]
    arguments = (q, k, v, g, None, do, dfinal, kept, flags, 0.25, True, passes.KEEP_STATES, None, None)
    library.opcheck(ops.chunk_backward, arguments)


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


def test_activation_checkpointing_gives_the_same_bits():
    case = make_case("mild", T=40, K=16, V=16)
    plain, again = leaves_of(case), leaves_of(case)
    chunk_gla(*plain)[0].square().sum().backward()
    checkpoint(lambda *x: chunk_gla(*x)[0], *again, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(plain, again, strict=True))


def test_autocast_takes_q_k_and_v_in_its_type_and_leaves_gate_and_state():
    case = make_case("mild", T=20, K=16, V=16)
    q, k, v, g = leaves_of(case)
    with torch.autocast("cpu", dtype=torch.float16):
        o, final = chunk_gla(q, k, v, g, initial_state=case.inputs["initial"], output_final_state=True)
    assert (o.dtype, final.dtype) == (torch.float16, torch.float32)
    o.float().sum().backward()
    assert (q.grad.dtype, g.grad.dtype) == (torch.float32, torch.float32)


def test_nothing_is_kept_when_no_gradient_is_wanted():
    case = make_case("mild", T=40, K=16, V=16)
    q, k, v, g = (case.inputs[name] for name in NAMES)
    kept = ops.chunk_forward(q, k, v, g, None, None, 0.25, False, passes.KEEP_NOTHING, None, None)[2]
    assert kept.numel() == 0
