"""References of the ops against plain loops over the tokens, and gradients of both."""

import math
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from op_cases import OPS, cell_of
from product import product

from glabench import ops
from glabench.ops import softmax
from glabench.ops.base import as_tuple
from glabench.ops.recurrence import gated_recurrence, selective_scan

NAMED_GATES = {
    "none": None,
    "mild": lambda x: F.logsigmoid(x) / 16,
    "strong": lambda x: F.logsigmoid(30 * x - 30),
    "resets": lambda x: (F.logsigmoid(x) / 16).masked_fill(x[..., :1] > 1, -math.inf),
    "resets of channels": lambda x: F.logsigmoid(x).masked_fill(x > 1, -math.inf),
    "zero": torch.zeros_like,
    "all resets": lambda x: torch.full_like(x, -math.inf),
}


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def values_and_gradients(function, inputs, count=1):
    """The first outputs and the gradient of every input, from fresh leaf tensors."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if x.is_floating_point()}
    outputs = as_tuple(function(inputs | leaves))[:count]
    given = [normal(*out.shape, seed=9 + number) for number, out in enumerate(outputs)]
    grads = torch.autograd.grad(outputs, tuple(leaves.values()), given)
    named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: x.detach() for name, x in zip(("o", "final"), outputs, strict=False)} | named


def assert_same(found, wanted, most=1e-11):
    assert found.keys() == wanted.keys()
    for name in wanted:
        error = (found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-30)
        assert error < most, f"{name}: {error:.1e}"


def token_by_token_attention(inputs):
    q, k, v, g, gv = inputs["q"], inputs["k"], inputs["v"], inputs.get("g"), inputs.get("gv")
    state = inputs.get("initial", q.new_zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3])))
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            state = g[:, t].exp()[..., None] * state
        if gv is not None:
            state = gv[:, t].exp()[..., None, :] * state
        state = state + k[:, t][..., None] * v[:, t][..., None, :]
        outputs.append((q[:, t][..., None] * state).sum(-2) / math.sqrt(q.shape[3]))
    return torch.stack(outputs, 1), state


def token_by_token_delta(inputs):
    """Each token takes what the state holds for its key and puts its own value there, by beta."""
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    state, outputs = q.new_zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3])), []
    for t in range(q.shape[1]):
        state = g[:, t].exp().reshape(*state.shape[:2], -1, 1) * state
        held = (k[:, t][..., None] * state).sum(-2)
        state = state + k[:, t][..., None] * (beta[:, t][..., None] * (v[:, t] - held))[..., None, :]
        outputs.append((q[:, t][..., None] * state).sum(-2) / math.sqrt(q.shape[3]))
    return torch.stack(outputs, 1), state


def token_by_token_mlstm(inputs):
    q, k, v, i, f = (inputs[name] for name in ("q", "k", "v", "i", "f"))
    state, outputs = q.new_zeros((*q.shape[:2], q.shape[3], v.shape[3])), []
    for t in range(q.shape[2]):
        added = i[:, :, t].sigmoid()[..., None, None] * k[:, :, t, :, None] * v[:, :, t, None]
        state = f[:, :, t].sigmoid()[..., None, None] * state + added
        outputs.append((q[:, :, t, :, None] * state).sum(-2) / math.sqrt(q.shape[3]))
    return torch.stack(outputs, 2)


def token_by_token_scalar(inputs):
    return token_by_token_attention({**inputs, "g": inputs["g"][..., None]})


def with_decays(inputs, decay):
    heads = inputs["q"].shape[2]
    decays = torch.tensor([decay(h, heads) for h in range(heads)], dtype=torch.float64)
    return token_by_token_attention({**inputs, "g": decays.log()[:, None].expand(*inputs["q"].shape[:3], 1)})


def token_by_token_retention(inputs):
    return with_decays(inputs, lambda h, _: 1 - 2 ** -(5 + h))


def token_by_token_lightning(inputs):
    return with_decays(inputs, lambda h, heads: math.exp(-8 * h / heads))


def token_by_token_ssd(inputs):
    x, B, C, step = inputs["x"], inputs["B"], inputs["C"], F.softplus(inputs["delta"])
    zeros = x.new_zeros((x.shape[0], x.shape[2], x.shape[3], B.shape[-1]))
    state, outputs = inputs.get("initial", zeros).mT, []
    for t in range(x.shape[1]):
        decay, added = (step[:, t] * inputs["A"]).exp(), step[:, t][..., None, None] * x[:, t][..., None, :]
        state = decay[..., None, None] * state + added * B[:, t][:, None, :, None]
        outputs.append((C[:, t][:, None, :, None] * state).sum(-2))
    return torch.stack(outputs, 1) + inputs["D"][:, None] * x, state.mT


def token_by_token_scan(inputs):
    u, A, step = inputs["u"], inputs["A"], F.softplus(inputs["delta"])
    state = inputs.get("initial", u.new_zeros((*u.shape[:2], A.shape[1])))
    outputs = []
    for t in range(u.shape[2]):
        dt = step[:, :, t, None]
        state = (dt * A).exp() * state + dt * inputs["B"][:, None, :, t] * u[:, :, t, None]
        outputs.append((state * inputs["C"][:, None, :, t]).sum(-1) + inputs["D"] * u[:, :, t])
    return torch.stack(outputs, -1), state


def token_by_token_convolution(inputs):
    u = inputs["k"] * inputs["v"]
    T, outputs = u.shape[-1], []
    for t in range(T):
        past = (inputs["h"][:, : t + 1].flip(-1) * u[..., : t + 1]).sum(-1)
        outputs.append(inputs["q"][..., t] * (past + inputs["skip"] * u[..., t]))
    return torch.stack(outputs, -1)


def token_by_token_mean(inputs):
    """RWKV-4's, as sums of all weights, which fit float64 if keys are not too far from 0."""
    k, v, w, u = (inputs[name] for name in ("k", "v", "w", "u"))
    values, weights, exponent = inputs.get("initial", torch.zeros(len(k), 3, k.shape[2], dtype=k.dtype)).unbind(1)
    values, weights, outputs = values * exponent.exp(), weights * exponent.exp(), []
    for t in range(k.shape[1]):
        own = (k[:, t] + u).exp()
        outputs.append((values + own * v[:, t]) / (weights + own))
        values, weights = (
            (-w.exp()).exp() * past + k[:, t].exp() * new for past, new in ((values, v[:, t]), (weights, 1.0))
        )
    return torch.stack(outputs, 1), torch.stack((values, weights), 1)


def plain_softmax(inputs):
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    past = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return (scores.masked_fill(~past, -math.inf).softmax(-1) @ v).transpose(1, 2)


def gla_inputs(tokens, gate, batch=2, heads=2, K=5, V=7):
    make = NAMED_GATES[gate]
    inputs = {name: normal(batch, tokens, heads, K, seed=seed) for seed, name in enumerate("qk")}
    inputs["v"] = normal(batch, tokens, heads, V, seed=2)
    return inputs if make is None else inputs | {"g": make(normal(batch, tokens, heads, K, seed=3))}


def gla_reference(inputs):
    return gated_recurrence(*(inputs.get(name) for name in ("q", "k", "v", "g", "initial", "gv")))


def document_by_document(slow, inputs):
    """Each packed document as a call of its own."""
    tokens, finals = [], []
    for number, (start, end) in enumerate(pairwise(inputs["cu_seqlens"].tolist())):
        own = {name: inputs[name][:, start:end] for name in ("q", "k", "v", "g", "gv") if name in inputs}
        if "initial" in inputs:
            own["initial"] = inputs["initial"][number : number + 1]
        out, final = slow(own)
        tokens.append(out)
        finals.append(final)
    return torch.cat(tokens, 1), torch.cat(finals)


@pytest.mark.parametrize("gate", list(NAMED_GATES))
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 50])
def test_the_recurrence_is_that_of_the_equation_token_by_token(tokens, gate):
    inputs = gla_inputs(tokens, gate)
    assert_same(
        values_and_gradients(gla_reference, inputs),
        values_and_gradients(token_by_token_attention, inputs),
    )


@pytest.mark.parametrize("gate", ["none", "strong", "resets", "resets of channels", "all resets"])
@pytest.mark.parametrize("tokens", [1, 16, 50, 1025])
def test_the_recurrence_takes_gates_of_values(tokens, gate):
    inputs = gla_inputs(tokens, gate, batch=1, K=4, V=3)
    inputs["gv"] = NAMED_GATES["mild" if gate == "none" else gate](normal(1, tokens, 2, 3, seed=4))
    inputs["initial"] = normal(1, 2, 4, 3, seed=5)
    assert_same(
        values_and_gradients(gla_reference, inputs, count=2),
        values_and_gradients(token_by_token_attention, inputs, count=2),
    )


@pytest.mark.parametrize("gate", ["none", "strong", "resets"])
def test_the_recurrence_goes_on_from_segment_to_segment(gate):
    inputs = gla_inputs(1025, gate, batch=1, heads=1, K=4, V=3)
    assert_same(
        values_and_gradients(gla_reference, inputs),
        values_and_gradients(token_by_token_attention, inputs),
    )


@pytest.mark.parametrize("gate", ["none", "mild", "all resets"])
@pytest.mark.parametrize("tokens", [1, 17, 1025])
def test_states_go_into_the_recurrence_and_come_out(gate, tokens):
    inputs = gla_inputs(tokens, gate, batch=2, heads=1, K=4, V=3)
    inputs["initial"] = normal(2, 1, 4, 3, seed=5)
    assert_same(
        values_and_gradients(gla_reference, inputs, count=2),
        values_and_gradients(token_by_token_attention, inputs, count=2),
    )


@product(
    lambda op, state: op == "gla" or state == "both",
    op=["gla", "linear", "simple-gla", "retention", "lightning", "gla-both", "gla-values"],
    state=[None, "in", "out", "both"],
)
def test_packed_documents_are_sequences_of_their_own(op, state, monkeypatch):
    tokens = 1100 if (op, state) == ("gla", "both") else 150  # more than a segment of the recurrence, or fewer
    monkeypatch.setattr("glabench.ops.linear._DOCUMENT", 700 * tokens // 1100)
    cell = replace(cell_of(op, packed="on", state=state), seqlen=tokens)
    inputs, specs = OPS[op].make_inputs(cell), OPS[op].inputs(cell)
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {name: s.shape for name, s in specs.items()}
    borders = inputs["cu_seqlens"].tolist()
    assert (borders[0], borders[-1], len(borders)) == (0, 2 * tokens, 4)
    assert borders == sorted(set(borders))
    assert torch.equal(inputs["cu_seqlens"], OPS[op].make_inputs(cell, 5)["cu_seqlens"])
    count = len(OPS[op].outputs(cell))
    assert count == (2 if state in ("out", "both") else 1)
    found = values_and_gradients(OPS[op].reference, inputs, count)
    slow = SLOW.get(op, token_by_token_attention)
    assert_same(found, values_and_gradients(partial(document_by_document, slow), inputs, count))
    assert [found[name].shape for name in OPS[op].outputs(cell)] == [s.shape for s in OPS[op].outputs(cell).values()]


def test_the_recurrence_holds_for_gates_between_a_reset_and_none():
    inputs = gla_inputs(40, "mild") | {"g": -(10 ** (3 * normal(2, 40, 2, 5, seed=4)))}
    assert_same(values_and_gradients(gla_reference, inputs), values_and_gradients(token_by_token_attention, inputs))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 1025])
def test_the_selective_scan_is_that_of_the_equation_token_by_token(tokens):
    B, D, N = (1, 2, 3) if tokens > 100 else (2, 3, 4)
    inputs = {
        "u": normal(B, D, tokens, seed=1),
        "delta": normal(B, D, tokens, seed=2) * 3,
        "A": -normal(D, N, seed=3).exp() * 3,
        "B": normal(B, N, tokens, seed=4),
        "C": normal(B, N, tokens, seed=5),
        "D": normal(D, seed=6),
    }
    assert_same(values_and_gradients(selective_scan, inputs), values_and_gradients(token_by_token_scan, inputs))


def mean_inputs(tokens):
    inputs = {name: normal(2, tokens, 5, seed=seed) for seed, name in enumerate("kv")}
    return inputs | {"w": normal(5, seed=2), "u": normal(5, seed=3)}


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 300])
def test_the_mean_of_rwkv_is_that_of_the_equation_token_by_token(tokens):
    inputs = mean_inputs(tokens)
    assert_same(values_and_gradients(ops.RWKV4.reference, inputs), values_and_gradients(token_by_token_mean, inputs))


@pytest.mark.parametrize("first", [1, 16, 25])
def test_the_mean_of_rwkv_goes_on_from_its_states(first):
    inputs = mean_inputs(40)
    whole, final = ops.RWKV4.reference(inputs)
    parts = [inputs | {name: inputs[name][:, part] for name in "kv"} for part in (slice(first), slice(first, None))]
    before, states = ops.RWKV4.reference(parts[0])
    after, end = ops.RWKV4.reference(parts[1] | {"initial": states})
    torch.testing.assert_close(torch.cat((before, after), 1), whole)
    torch.testing.assert_close(end[:, :2] * end[:, 2:].exp(), final[:, :2] * final[:, 2:].exp())


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_the_mean_of_rwkv_depends_on_differences_of_keys_alone(shift):
    inputs = mean_inputs(40)
    shifted = ops.RWKV4.reference(inputs | {"k": inputs["k"] + shift})[0]
    torch.testing.assert_close(shifted, ops.RWKV4.reference(inputs)[0], rtol=1e-9, atol=1e-9)


def test_the_mean_of_rwkv_keeps_old_tokens_with_far_larger_keys():
    """The same as of keys that hardly differ, if nothing is forgotten: then o is the first value."""
    inputs = mean_inputs(40) | {"w": torch.full((5,), -100.0, dtype=torch.float64)}
    inputs["k"][:, 0] += 2000
    out = ops.RWKV4.reference(inputs)[0]
    torch.testing.assert_close(out[:, 1:], inputs["v"][:, :1].expand(2, 39, 5))


def test_the_mean_of_rwkv_may_forget_all_at_once():
    inputs = {name: x.float() for name, x in mean_inputs(40).items()}
    out = ops.RWKV4.reference(inputs | {"w": torch.full((5,), 100.0)})[0]
    k, v, u = inputs["k"], inputs["v"], inputs["u"]
    before, own = k[:, :-1].exp(), (k[:, 1:] + u).exp()
    torch.testing.assert_close(out[:, 1:], (before * v[:, :-1] + own * v[:, 1:]) / (before + own))


@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_the_long_convolution_is_that_of_the_equation_token_by_token(tokens):
    inputs = {name: normal(2, 3, tokens, seed=seed) for seed, name in enumerate("qkv")}
    inputs |= {"h": normal(3, tokens, seed=3), "skip": normal(3, seed=4)}
    assert_same(
        values_and_gradients(ops.HYENA.reference, inputs), values_and_gradients(token_by_token_convolution, inputs)
    )


@pytest.mark.parametrize(("tokens", "rows"), [(1, 512), (16, 16), (17, 16), (50, 16), (600, 512)])
def test_softmax_over_blocks_of_rows_is_softmax(monkeypatch, tokens, rows):
    monkeypatch.setattr(softmax, "_ROWS_AT_ONCE", rows)
    inputs = {name: 3 * normal(2, tokens, 2, 8, seed=seed) for seed, name in enumerate("qkv")}
    assert_same(values_and_gradients(ops.SOFTMAX.reference, inputs), values_and_gradients(plain_softmax, inputs))


# By op, if it is not that of gated or ungated linear attention.
SLOW = {
    "softmax": plain_softmax, "mamba1": token_by_token_scan, "mamba2": token_by_token_ssd,
    "simple-gla": token_by_token_scalar, "retention": token_by_token_retention, "lightning": token_by_token_lightning,
    "gated-delta": token_by_token_delta, "kda": token_by_token_delta, "mlstm": token_by_token_mlstm,
    "hyena": token_by_token_convolution, "rwkv4": token_by_token_mean,
}  # fmt: skip


@pytest.mark.parametrize("op", list(OPS))
def test_a_reference_works_on_the_inputs_that_its_op_makes(op):
    cell = cell_of(op)
    inputs, out = OPS[op].make_inputs(cell), OPS[op].output(cell)
    found = values_and_gradients(OPS[op].reference, inputs)
    assert found["o"].shape == out.shape
    assert_same(found, values_and_gradients(SLOW.get(op, token_by_token_attention), inputs))


@pytest.mark.parametrize("op", ["mamba1", "mamba2"])
@pytest.mark.parametrize("given", [{"prefix": 64}, {"state": "both"}])
@pytest.mark.parametrize("tokens", [1, 17])
def test_mamba_goes_on_from_the_states_that_it_is_given(op, given, tokens):
    cell = replace(cell_of(op, "infer", **given), seqlen=tokens)
    inputs = OPS[op].make_inputs(cell)
    found = values_and_gradients(OPS[op].reference, inputs, count=2)
    assert [found[name].shape for name in ("o", "final")] == [s.shape for s in OPS[op].outputs(cell).values()]
    assert_same(found, values_and_gradients(SLOW[op], inputs, count=2))


def test_attention_after_a_prefix_is_the_end_of_attention_without():
    inputs = {name: normal(2, 40, 3, 16, seed=seed) for seed, name in enumerate("qkv")}
    whole = OPS["softmax"].reference(inputs)
    last = OPS["softmax"].reference(inputs | {"q": inputs["q"][:, 33:]})
    assert torch.allclose(last, whole[:, 33:], rtol=1e-12)


@pytest.mark.parametrize("gate", ["none", "mild", "strong", "resets"])
@pytest.mark.parametrize("tokens", [1, 17, 1025])
def test_the_delta_rule_is_that_of_the_equation_token_by_token(tokens, gate):
    inputs = gla_inputs(tokens, gate, batch=1, K=4, V=3)
    inputs = {"g": torch.zeros_like(inputs["k"])} | inputs | {"k": F.normalize(inputs["k"], dim=-1)}
    inputs["beta"] = normal(1, tokens, 2, seed=4).sigmoid()
    assert_same(values_and_gradients(ops.KDA.reference, inputs), values_and_gradients(token_by_token_delta, inputs))


@pytest.mark.parametrize("op", ["gla", "mamba1"])
def test_a_part_of_16k_tokens_takes_seconds(op):
    sizes = {"heads": 1, "key_dim": 16, "value_dim": 16} if op == "gla" else {"inner": 1, "state_size": 16}
    cell = replace(cell_of(op, **sizes), batch=1, seqlen=2**14)
    inputs = OPS[op].make_inputs(cell)
    start = time.process_time()
    found = values_and_gradients(OPS[op].reference, inputs)
    assert time.process_time() - start < 20  # about 2 s; token by token it would take minutes with gradients
    assert all(x.isfinite().all() for x in found.values())
