"""Ops: counts against numbers computed by hand, inputs, parameters."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from op_cases import OPS, cell_of

from glabench import ops
from glabench.ops.gla import GATES
from glabench.sweeps import Cell, Parameters

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
    # Inputs 3 * 96 * 2 + 6 * 8 * 4 + 6 * 4 = 792, output 192; 2 * 6 * 8 tokens and channels times 8 + 1 + 4.
    ("hyena", "fwd", "bf16"): (1_248, 984, 984),
    # Inputs 2 * 96 * 2 + 2 * 6 * 4 = 432, output 192; 96 * 9.
    ("rwkv4", "bwd", "bf16"): (2 * 864, 624 + 432, 2 * 624),
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
        ("hyena", 8 * 6 * 8), ("rwkv4", 3 * 6 * 8),
    ],
)  # fmt: skip
def test_what_a_sequence_needs_to_go_on_is_counted(op, size):
    """In float64; of attention, the keys and values of 8 tokens."""
    assert OPS[op].state_bytes(cell_of(op)) == size


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
        ("gated-delta", 6), ("kda", 4.25), ("mamba1", 6.3), ("mamba2", 6.15), ("hyena", 4.04), ("rwkv4", 4),
    ],
)  # fmt: skip
def test_parameters_of_a_layer_are_those_that_its_authors_count(op, squares):
    """About so many squares of the model's width: what gates per head and convolutions have is little."""
    width = 2048
    cell = cell_of(op, **OPS[op].published(width))
    assert OPS[op].layer_parameters(cell) == pytest.approx(squares * width**2, rel=0.01)


@pytest.mark.parametrize(("H", "K", "V"), [(16, 32, 64), (4, 128, 256), (16, 64, 64)])
def test_at_the_head_dims_of_gla_a_fixed_gate_is_in_a_layer_of_the_same_width(H, K, V):
    sizes = {"heads": H, "key_dim": K, "value_dim": V}
    fixed, per_head = (OPS[op].layer_parameters(cell_of(op, **sizes)) for op in ("retention", "simple-gla"))
    assert per_head - fixed == H * V * H


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


@pytest.mark.parametrize("op", list(OPS))
def test_inputs_have_the_shapes_and_types_that_the_op_says(op):
    cell = cell_of(op, dtype="bf16")
    tensors = OPS[op].make_inputs(cell)
    for name, spec in OPS[op].inputs(cell).items():
        assert tuple(tensors[name].shape) == spec.shape
        assert len(spec.dims) == len(spec.shape)
        wide = name in ("g", "gv", "A", "D", "i", "f", "h", "skip", "w") or (op, name) == ("rwkv4", "u")
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
        ("hyena", 1024, {"inner": 1024}),
        ("rwkv4", 1024, {"inner": 1024}),
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
