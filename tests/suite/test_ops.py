"""Ops: references against plain loops, counts against numbers computed by hand, inputs, parts."""

import math
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from product import product

from glabench import ops
from glabench.ops import softmax
from glabench.ops.base import as_tuple
from glabench.ops.gla import GATES
from glabench.ops.recurrence import gated_recurrence, selective_scan
from glabench.sweeps import Cell, Parameters

OPS = {op.name: op for op in ops.BUILTIN}
HEADS = {"heads": 3, "key_dim": 16, "value_dim": 32}
SIZES = {
    "gla": HEADS | {"gate": "resets"},
    "linear": HEADS,
    "softmax": {"heads": 3, "head_dim": 16},
    "mamba1": {"inner": 6, "state_size": 4},
    "mamba2": {"heads": 3, "head_dim": 8, "state_size": 4},
    "simple-gla": HEADS | {"gate": "resets"},
    "retention": HEADS,
    "lightning": HEADS,
    "gla-both": HEADS | {"gate": "resets"},
    "gla-values": HEADS | {"gate": "resets"},
    "gated-delta": HEADS | {"gate": "resets"},
    "kda": HEADS | {"gate": "resets"},
    "mlstm": HEADS,
}
NAMED_GATES = {
    "none": None,
    "mild": lambda x: F.logsigmoid(x) / 16,
    "strong": lambda x: F.logsigmoid(30 * x - 30),
    "resets": lambda x: (F.logsigmoid(x) / 16).masked_fill(x[..., :1] > 1, -math.inf),
    "resets of channels": lambda x: F.logsigmoid(x).masked_fill(x > 1, -math.inf),
    "zero": torch.zeros_like,
    "all resets": lambda x: torch.full_like(x, -math.inf),
}


def cell_of(op, pass_="fwd", dtype="fp64", **changes):
    return Cell("any", op, pass_, 2, 8, dtype, Parameters(SIZES[op] | changes), "cpu")


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


# References


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
def test_packed_documents_are_sequences_of_their_own(op, state):
    cell = replace(cell_of(op, packed="on", state=state), seqlen=1100)
    inputs, specs = OPS[op].make_inputs(cell), OPS[op].inputs(cell)
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {name: s.shape for name, s in specs.items()}
    borders = inputs["cu_seqlens"].tolist()
    assert (borders[0], borders[-1], len(borders)) == (0, 2200, 4)
    assert borders == sorted(set(borders))
    assert torch.equal(inputs["cu_seqlens"], OPS[op].make_inputs(cell, 5)["cu_seqlens"])
    count = len(OPS[op].outputs(cell))
    assert count == (2 if state in ("out", "both") else 1)
    found = values_and_gradients(OPS[op].reference, inputs, count)
    slow = SLOW.get(op, token_by_token_attention)
    assert_same(found, values_and_gradients(partial(document_by_document, slow), inputs, count))
    assert [found[name].shape for name in OPS[op].outputs(cell)] == [s.shape for s in OPS[op].outputs(cell).values()]


@pytest.mark.parametrize("op", ["gla", "linear"])
def test_kinds_of_inputs_are_what_they_say(op):
    correlated = OPS[op].make_inputs(replace(cell_of(op, inputs="correlated"), seqlen=400))
    assert correlated["q"].mean(-1).abs().max() < 1e-12
    assert correlated["k"].mean() == pytest.approx(3, abs=0.05)
    cell = cell_of(op, "fwd+bwd", "fp32", inputs="orthogonal")
    inputs = OPS[op].make_inputs(cell)
    assert min(inputs["q"].min(), inputs["k"].min()) >= 0
    o, given = OPS[op].reference(inputs)[0], OPS[op].make_grad_outputs(cell)["o"]
    cosine = (o * given).sum(-1) / (o.norm(dim=-1) * given.norm(dim=-1))
    assert cosine.abs().max() < 1e-5


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
}  # fmt: skip


@pytest.mark.parametrize("op", list(OPS))
def test_a_reference_works_on_the_inputs_that_its_op_makes(op):
    cell = cell_of(op)
    inputs, out = OPS[op].make_inputs(cell), OPS[op].output(cell)
    found = values_and_gradients(OPS[op].reference, inputs)
    assert found["o"].shape == out.shape
    assert_same(found, values_and_gradients(SLOW.get(op, token_by_token_attention), inputs))


@pytest.mark.parametrize("op", ["mamba1", "mamba2"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_mamba_goes_on_from_the_states_after_a_prefix(op, tokens):
    cell = replace(cell_of(op, "infer", prefix=64), seqlen=tokens)
    inputs = OPS[op].make_inputs(cell)
    found = values_and_gradients(OPS[op].reference, inputs, count=2)
    assert [found[name].shape for name in ("o", "final")] == [s.shape for s in OPS[op].outputs(cell).values()]
    assert_same(found, values_and_gradients(SLOW[op], inputs, count=2))


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


# Counts

# (op, pass, dtype): (operations, bytes that a perfect pass moves, bytes that a cell holds at the least).
COUNTS = {
    # Inputs 2 * 768 * 2 + 1536 * 2 + 768 * 4 = 9216, output 3072; 2 * 8 * 3 tokens and heads times 5 * 16 * 32.
    ("gla", "fwd+bwd", "bf16"): (3 * 122_880, 12_288 + 21_504, 24_576),
    # Inputs 2 * 768 * 2 + 1536 * 2 = 6144, output 3072; 48 * 4 * 16 * 32.
    ("linear", "fwd", "bf16"): (98_304, 9_216, 9_216),
    # Inputs 3 * 768 * 2 = 4608, output 1536; 2 * 3 * 36 pairs * 4 * 16.
    ("softmax", "bwd", "fp16"): (2 * 13_824, 10_752, 12_288),
    # Inputs 2 * 96 * 2 + 24 * 4 + 2 * 64 * 2 + 6 * 4 = 760, output 192; 2 * 8 * 6 * (6 * 4 + 3).
    ("mamba1", "infer", "bf16"): (2_592, 952, 952),
    # Inputs (384 + 48 + 2 * 64) * 2 + 2 * 3 * 4 = 1144, output 768; 2 * 8 * 3 tokens and heads times 5 * 4 * 8 + 3 * 8.
    ("mamba2", "infer", "bf16"): (8_832, 1_912, 1_912),
    # Inputs 9216 - 3072 + 48 * 4 = 6336, output 3072.
    ("simple-gla", "fwd", "bf16"): (122_880, 9_408, 9_408),
    # Inputs 9216 + 1536 * 4 = 15360, output 3072; 48 * 6 * 16 * 32.
    ("gla-both", "fwd", "bf16"): (147_456, 18_432, 18_432),
    # Inputs 15360 - 3072 = 12288, output 3072; 48 * 5 * 16 * 32.
    ("gla-values", "fwd", "bf16"): (122_880, 15_360, 15_360),
    # As linear, and 48 * 16 * 32 for the decay.
    ("retention", "fwd", "bf16"): (122_880, 9_216, 9_216),
    # Inputs 6336 + 48 * 2 = 6432, output 3072; 48 * 7 * 16 * 32.
    ("gated-delta", "fwd", "bf16"): (172_032, 9_504, 9_504),
    # Inputs 9216 + 48 * 2 = 9312, output 3072.
    ("kda", "bwd", "bf16"): (2 * 172_032, 12_384 + 9_312, 24_768),
    # Inputs 6144 + 2 * 48 * 4 = 6528, output 3072.
    ("mlstm", "fwd", "bf16"): (122_880, 9_600, 9_600),
    # Gates of a float64 cell are float64: (2 * 768 + 1536 + 768) * 8 = 30720, output 12288.
    ("gla", "infer", "fp64"): (122_880, 43_008, 43_008),
}


@pytest.mark.parametrize(("op", "pass_", "dtype"), list(COUNTS))
def test_counts_are_those_made_by_hand(op, pass_, dtype):
    cell = cell_of(op, pass_, dtype)
    found = (OPS[op].flops(cell), OPS[op].moved_bytes(cell), OPS[op].least_bytes(cell))
    assert found == COUNTS[op, pass_, dtype]


@pytest.mark.parametrize(
    ("op", "size"),
    [
        ("gla", 3 * 16 * 32 * 8), ("kda", 3 * 16 * 32 * 8), ("retention", 3 * 16 * 32 * 8), ("mlstm", 3 * 16 * 32 * 8),
        ("softmax", 2 * 8 * 3 * 16 * 8), ("mamba1", 6 * 4 * 8), ("mamba2", 3 * 8 * 4 * 8),
    ],
)  # fmt: skip
def test_what_a_sequence_needs_to_go_on_is_counted(op, size):
    """In float64; of attention, the keys and values of 8 tokens."""
    assert OPS[op].state_bytes(cell_of(op)) == size


def test_attention_after_a_prefix_is_the_end_of_attention_without():
    inputs = {name: normal(2, 40, 3, 16, seed=seed) for seed, name in enumerate("qkv")}
    whole = OPS["softmax"].reference(inputs)
    last = OPS["softmax"].reference(inputs | {"q": inputs["q"][:, 33:]})
    assert torch.allclose(last, whole[:, 33:], rtol=1e-12)


def test_a_prefix_adds_keys_pairs_and_state_to_attention_and_states_to_the_others():
    attention, gla = cell_of("softmax", prefix=20), cell_of("gla", prefix=20)
    of_attention, of_gla = OPS["softmax"], OPS["gla"]
    shapes = {name: spec.shape for name, spec in of_attention.inputs(attention).items()}
    assert shapes == {"q": (2, 8, 3, 16), "k": (2, 28, 3, 16), "v": (2, 28, 3, 16)}
    assert of_attention.output(attention).shape == shapes["q"]
    assert of_attention.forward_flops(attention) == 2 * 3 * (8 * 20 + 36) * 4 * 16
    assert of_attention.state_bytes(attention) == 2 * 28 * 3 * 16 * 8
    assert of_gla.inputs(gla)["initial"].shape == of_gla.outputs(gla)["final"].shape == (2, 3, 16, 32)
    assert of_gla.state_bytes(gla) == of_gla.state_bytes(cell_of("gla"))


@pytest.mark.parametrize(
    ("op", "squares"),
    [
        ("softmax", 4), ("linear", 3), ("gla", 4), ("simple-gla", 4), ("retention", 8), ("lightning", 5), ("mlstm", 4),
        ("gated-delta", 6), ("kda", 4.25), ("mamba1", 6.3), ("mamba2", 6.15),
    ],
)  # fmt: skip
def test_parameters_of_a_layer_are_those_that_its_authors_count(op, squares):
    """About so many squares of the model's width: what gates per head and convolutions have is little."""
    width = 2048
    cell = cell_of(op, **OPS[op].published(width))
    assert OPS[op].layer_parameters(cell) == pytest.approx(squares * width**2, rel=0.01)


@pytest.mark.parametrize("op", list(OPS))
def test_the_bytes_of_a_pass_are_those_of_its_tensors(op):
    cell = cell_of(op, "fwd+bwd", "bf16")
    tensors = OPS[op].make_inputs(cell)
    assert {name: spec.bytes(cell) for name, spec in OPS[op].inputs(cell).items()} == {
        name: x.numel() * x.element_size() for name, x in tensors.items()
    }
    held = sum(x.numel() * x.element_size() for x in (*tensors.values(), *OPS[op].make_grad_outputs(cell).values()))
    assert OPS[op].least_bytes(cell) == 2 * held


@pytest.mark.parametrize("op", list(OPS))
def test_a_forward_and_a_backward_count_as_much_as_both_together(op):
    by_pass = {name: cell_of(op, name) for name in ("infer", "fwd", "bwd", "fwd+bwd")}
    for count in (OPS[op].flops, OPS[op].moved_bytes):
        found = {name: count(cell) for name, cell in by_pass.items()}
        assert found["infer"] == found["fwd"]
        assert found["fwd"] + found["bwd"] == found["fwd+bwd"]


# Inputs


@pytest.mark.parametrize("op", list(OPS))
def test_inputs_have_the_shapes_and_types_that_the_op_says(op):
    cell = cell_of(op, dtype="bf16")
    tensors = OPS[op].make_inputs(cell)
    for name, spec in OPS[op].inputs(cell).items():
        assert tuple(tensors[name].shape) == spec.shape
        assert len(spec.dims) == len(spec.shape)
        wide = name in ("g", "gv", "A", "D", "i", "f")
        assert tensors[name].dtype == (torch.float32 if wide else torch.bfloat16)
    assert tuple(OPS[op].make_grad_outputs(cell)["o"].shape) == OPS[op].output(cell).shape


@pytest.mark.parametrize("op", list(OPS))
def test_inputs_depend_on_the_seed_alone(op):
    cell = cell_of(op)
    first, again, other = (OPS[op].make_inputs(c) for c in (cell, cell, replace(cell, seed=1)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def gates_of(kind, seqlen=2048):
    return ops.GLA.make_inputs(replace(cell_of("gla", gate=kind), seqlen=seqlen))["g"]


@pytest.mark.parametrize("kind", GATES)
def test_gates_are_never_above_0_and_resets_are_of_whole_tokens(kind):
    g = gates_of(kind)
    assert (g <= 0).all()
    reset = g.isinf()
    assert (reset == reset[..., :1]).all()


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [("resets", 0.01, 0.03), ("resets-1024", 2e-4, 3e-3), ("documents", 1 / 1050, 1 / 350), ("strong", 0, 0)],
)
def test_tokens_are_reset_as_often_as_promised(kind, least, most):
    assert least <= gates_of(kind).isinf()[..., 0].double().mean() <= most


def test_documents_begin_at_the_same_token_in_all_heads_of_a_sequence():
    reset = gates_of("documents").isinf()[..., 0]
    assert (reset == reset[:, :, :1]).all()
    assert not (reset[0] == reset[1]).all()


@pytest.mark.parametrize("kind", ["one-reset", "one-strong-chunk"])
@pytest.mark.parametrize("seqlen", [1, 100])
def test_one_token_or_chunk_of_one_head_differs_from_glas_own(kind, seqlen):
    differs = (gates_of(kind, seqlen) != gates_of("logsigmoid/16", seqlen)).any(-1)
    assert differs.any(1).sum() == 1  # of all sequences and heads
    assert 1 <= differs.sum() <= (1 if kind == "one-reset" else 64)


def test_one_channel_is_dead_and_a_bias_is_that_of_a_channel():
    assert ((gates_of("dead-channel") == -1e4).sum(-1) == 1).all()
    by_channel = gates_of("channel-bias").mean((0, 1))
    assert by_channel.std() > 0.2
    assert gates_of("logsigmoid").mean((0, 1)).std() < 0.1


def test_gates_decay_as_their_names_say():
    means = [gates_of(kind).mean() for kind in ("strong", "logsigmoid-x2", "logsigmoid", "logsigmoid/16", "slow")]
    assert means == sorted(means)
    assert gates_of("rwkv6").mean() < -1


@pytest.mark.parametrize("op", ["mamba1", "mamba2"])
def test_mamba_starts_with_small_steps_and_decaying_states(op):
    inputs = OPS[op].make_inputs(replace(cell_of(op), seqlen=256))
    assert (inputs["A"] < 0).all()
    assert 0.001 < F.softplus(inputs["delta"]).median() < 0.1


# Parameters


@pytest.mark.parametrize(
    ("op", "width", "parameters"),
    [
        ("gla", 1024, {"heads": 4, "key_dim": 128, "value_dim": 256}),
        ("linear", 2048, {"heads": 4, "key_dim": 256, "value_dim": 512}),
        ("softmax", 1024, {"heads": 16, "head_dim": 64}),
        ("mamba1", 1024, {"inner": 2048, "state_size": 16}),
        ("mamba2", 1024, {"heads": 32, "head_dim": 64, "state_size": 128}),
        ("simple-gla", 1024, {"heads": 4, "key_dim": 128, "value_dim": 256}),
        ("retention", 1024, {"heads": 4, "key_dim": 256, "value_dim": 512}),
        ("lightning", 1024, {"heads": 8, "key_dim": 128, "value_dim": 128}),
        ("gated-delta", 2048, {"heads": 6, "key_dim": 256, "value_dim": 512}),
        ("kda", 2048, {"heads": 16, "key_dim": 128, "value_dim": 128}),
        ("mlstm", 4096, {"heads": 8, "key_dim": 256, "value_dim": 512}),
        ("gla", 8, {"heads": 4, "key_dim": 1, "value_dim": 2}),
        ("softmax", 64, {"heads": 1, "head_dim": 64}),
    ],
)
def test_published_parameters_are_the_papers(op, width, parameters):
    assert OPS[op].published(width) == parameters


@pytest.mark.parametrize("op", list(OPS))
def test_the_defaults_of_an_op_make_a_cell_that_it_can_count(op):
    own = {each.name: each.default for each in OPS[op].parameters}
    cell = Cell("any", op, "fwd", 1, 2, "bf16", Parameters(own), "cpu")
    assert OPS[op].flops(cell) > 0
    assert own.keys() >= OPS[op].published(1024).keys() | OPS[op].small.keys()
    assert set(OPS[op].independent) <= set(OPS[op].output(cell).dims)
