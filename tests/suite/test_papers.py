"""Systems as the papers describe them, against the float64 recurrence, and what they say of themselves."""

import pytest
import torch
import torch.nn.functional as F
from gla_cases import GATES

from glabench.backends.papers import TARGETS, forms
from glabench.backends.papers.backends import GlaParallelNaive, GlaParallelTorch, GlaScanTorch, LinearParallelTorch
from glabench.ops.recurrence import gated_recurrence
from glabench.sweeps.model import Cell, Parameters

NAMES = ("o", "dq", "dk", "dv", "dg")
# A last group of targets that is not whole, and a length that is no power of two.
B, T, H, K, V = 2, 4 * TARGETS + 5, 2, 16, 24


def inputs_of(gate, dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, D) for D in (K, K, V, V))
    tensors = [x.to(dtype) for x in (q, k, v)]
    return tensors + ([] if gate is None else [GATES[gate](torch.randn(B, T, H, K))]), do.to(dtype)


def run(function, tensors, do):
    leaves = [x.clone().requires_grad_() for x in tensors]
    o = function(*leaves)
    found = (o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype)))
    return dict(zip(NAMES, found, strict=False))


def errors(function, gate, dtype=torch.float32):
    """Relative errors; dg is relative to k * dk if gates block everything."""
    tensors, do = inputs_of(gate, dtype)
    wide = [x.double() for x in tensors]
    truth = run(lambda q, k, v, g=None: gated_recurrence(q, k, v, g)[0], wide, do.double())
    sizes = {name: x.norm() for name, x in truth.items()}
    if gate is not None:
        sizes["dg"] = max(sizes["dg"], 1e-6 * (wide[1] * truth["dk"]).norm())
    found = run(function, tensors, do)
    assert found["o"].dtype == dtype
    return {name: ((x.double() - truth[name]).norm() / sizes[name]).item() for name, x in found.items()}


@pytest.mark.parametrize("gate", ["mild", "logsigmoid", "strong", "resets", "-inf", "zero"])
@pytest.mark.parametrize("form", [forms.parallel_gla, forms.scan_gla], ids=lambda form: form.__name__)
def test_forms_are_right_at_every_gate(form, gate):
    assert max(errors(form, gate).values()) < 1e-6


@pytest.mark.parametrize(
    "form", [forms.parallel_gla, forms.scan_gla, forms.naive_parallel_gla], ids=lambda form: form.__name__
)
def test_forms_take_bfloat16(form):
    assert max(errors(form, "mild", torch.bfloat16).values()) < 5e-3


def test_the_parallel_form_without_gates_is_right():
    assert max(errors(forms.parallel_linear, None).values()) < 1e-6


def test_what_divides_by_the_gates_is_right_while_their_sums_are_small_and_fails_beyond():
    """The sum of `logsigmoid` is -0.8 per token: exp of 88 is the largest float32."""
    assert max(errors(forms.naive_parallel_gla, "mild").values()) < 1e-6
    tensors, _ = inputs_of("mild")
    for tokens, finite in ((T, True), (3 * T, False)):
        q, k, v, _ = (x.repeat(1, 3, 1, 1)[:, :tokens] for x in tensors)
        o = forms.naive_parallel_gla(q, k, v, F.logsigmoid(torch.zeros_like(q)))
        assert bool(o.isfinite().all()) == finite


def cell(pass_="fwd", T=64):
    return Cell("x", "gla", pass_, 2, T, "bf16", Parameters({"heads": 2, "key_dim": 32, "value_dim": 64}))


@pytest.mark.parametrize("backend", [LinearParallelTorch(), GlaParallelNaive(), GlaParallelTorch()])
def test_all_pairs_take_four_times_the_operations_of_half_the_tokens(backend):
    ratio = backend.executes(cell(T=512)).flops / backend.executes(cell(T=256)).flops
    assert ratio == pytest.approx(4, rel=0.01)


def test_a_scan_takes_operations_for_every_token_and_step():
    states = 2 * 2 * 32 * 64
    assert GlaScanTorch().executes(cell(T=64)).flops == states * 64 * (3 + 2 * 6)


@pytest.mark.parametrize(
    ("backend", "passes"), [(LinearParallelTorch(), 3), (GlaParallelNaive(), 3), (GlaParallelTorch(), 4)]
)
def test_a_backward_is_two_forwards_and_what_is_recomputed(backend, passes):
    assert backend.executes(cell("fwd+bwd")).flops == passes * backend.executes(cell()).flops
    assert backend.working_bytes(cell("fwd+bwd")) > backend.working_bytes(cell())
