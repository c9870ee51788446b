"""Systems as the papers describe them, against the float64 recurrence, and what they say of themselves."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gla_cases import GATES
from gla_kernels.inspection.ahead import SHARED
from hopper_on_cpu import interpret_bfloat16
from product import product

from glabench.backends.papers import TARGETS, forms, state_columns, stored_states
from glabench.backends.papers.backends import (
    GlaFiveStep,
    GlaTwoLevel,
    LinearParallelTriton,
    LinearTwoPass,
)
from glabench.backends.papers.five_step import five_step_gla
from glabench.backends.papers.form_backends import (
    GlaBothTorch,
    GlaParallelNaive,
    GlaParallelTorch,
    GlaScanTorch,
    LinearParallelTorch,
)
from glabench.backends.papers.one_pass import one_pass_gla
from glabench.backends.papers.parallel import parallel_linear
from glabench.backends.papers.stored_states import stored_states_gla
from glabench.backends.papers.two_level import two_level_gla
from glabench.backends.papers.two_pass import two_pass_linear
from glabench.backends.torch_forms import GlaTorch, LinearTorch
from glabench.ops.gla import GLA
from glabench.ops.linear import LINEAR
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
    """Without a gate, function gets three tensors."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    o = function(*leaves)
    found = (o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype)))
    return dict(zip(NAMES, found, strict=False))


def errors(function, gate, dtype=torch.float32):
    return errors_of(function, *inputs_of(gate, dtype))


CLOSED_FORM = partial(two_level_gla, over_sequence=True)


def errors_of(function, tensors, do):
    """Relative errors; dg is relative to k * dk if gates block everything."""
    wide = [x.double() for x in tensors]
    truth = run(lambda q, k, v, g=None: gated_recurrence(q, k, v, g)[0], wide, do.double())
    sizes = {name: x.norm() for name, x in truth.items()}
    if "dg" in sizes:
        sizes["dg"] = max(sizes["dg"], 1e-6 * (wide[1] * truth["dk"]).norm())
    found = run(function, tensors, do)
    assert found["o"].dtype == do.dtype
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


@pytest.mark.parametrize("rows", [16, 64])
def test_all_pairs_without_scores_in_memory_are_right(rows):
    tensors, do = two_level_inputs(None, 192)
    assert max(errors_of(partial(parallel_linear, rows=rows), tensors, do).values()) < 1e-6


def test_all_pairs_without_scores_in_memory_are_products_in_bfloat16(monkeypatch):
    interpret_bfloat16(monkeypatch)
    tensors, do = two_level_inputs(None, 64, torch.bfloat16)
    assert 1e-4 < max(errors_of(parallel_linear, tensors, do).values()) < 1e-2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seqlen": 40}, "whole blocks of 16 tokens only; got 40"),
        ({"parameters": Parameters({"heads": 2, "key_dim": 24, "value_dim": 64})}, "powers of two from 16 to 256"),
        ({"seqlen": 48}, None),
    ],
)
def test_what_all_pairs_in_triton_do_not_take_is_said(changes, why):
    said = LinearParallelTriton().limits(replace(cell(), **changes))
    assert (said is None) == (why is None)
    assert why is None or why in said


def test_all_pairs_in_triton_take_rows_that_are_not_contiguous():
    tensors, do = two_level_inputs(None, 64)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    assert max(errors_of(parallel_linear, strided, do).values()) < 1e-6


def test_what_divides_by_the_gates_is_right_while_their_sums_are_small_and_fails_beyond():
    """The sum of `logsigmoid` is -0.8 per token: exp of 88 is the largest float32."""
    assert max(errors(forms.naive_parallel_gla, "mild").values()) < 1e-6
    tensors, _ = inputs_of("mild")
    for tokens, finite in ((T, True), (3 * T, False)):
        q, k, v, _ = (x.repeat(1, 3, 1, 1)[:, :tokens] for x in tensors)
        o = forms.naive_parallel_gla(q, k, v, F.logsigmoid(torch.zeros_like(q)))
        assert bool(o.isfinite().all()) == finite


@product(
    lambda gate, lengths, form: (
        lengths == (64, 32, 16) or (lengths == (64, 64, 32) and gate in ("mild", "resets") and form is two_level_gla)
    ),
    gate=["mild", "strong", "resets"],
    lengths=[(64, 32, 16), (64, 64, 32), (256, 256, 16)],
    form={"states": two_level_gla, "nothing": one_pass_gla, "over the sequence": CLOSED_FORM},
)
def test_two_levels_are_right_at_every_gate(gate, lengths, form):
    tokens, chunk, subchunk = lengths
    tensors, do = two_level_inputs(gate, tokens)
    found = errors_of(partial(form, chunk=chunk, subchunk=subchunk), tensors, do)
    assert max(found.values()) < 2e-5


@product(
    lambda form, lengths, dims: lengths == (64, 32) or (form is two_pass_linear and dims == (32, 128)),
    form={"states": two_pass_linear, "nothing": one_pass_gla},
    lengths=[(64, 64), (64, 16), (64, 32), (256, 128), (512, 256)],
    dims=[(32, 128), (128, 32), (16, 256)],
)
def test_two_passes_without_gates_are_right(form, lengths, dims):
    """Several chunks and one, blocks of rows in a chunk, and blocks of columns of keys and of values."""
    (tokens, chunk), (keys, values) = lengths, dims
    tensors, do = two_level_inputs(None, tokens, values=values, keys=keys)
    assert max(errors_of(partial(form, chunk=chunk), tensors, do).values()) < 2e-6


@product(
    lambda sizes, dtype: (sizes, dtype) == ((256, 64, 64), "bf16"),
    sizes=[(256, 64, 64), (64, 64, 64), (16, 128, 256), (256, 128, 256), (256, 256, 256), (64, 32, 64)],
    dtype=["bf16", "fp32"],
)
def test_two_passes_compile_for_hopper_without_spills_or_wrong_descriptors(sizes, dtype):
    """Chunks of 256 in two blocks of key columns once had a wrong descriptor. In a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "compile_papers.py"), *map(str, sizes), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    for name, stack_bytes, shared_bytes, faults in found:
        assert stack_bytes <= 64, name
        assert shared_bytes <= SHARED["90"], name
        assert not faults, name


def test_two_passes_without_gates_have_room_for_large_scores_in_float16():
    """q k is beyond float16, its scaled score is not."""
    q = torch.full((1, 64, 1, 256), 26.0, dtype=torch.float16)
    v = torch.ones(1, 64, 1, 16, dtype=torch.float16) / 1024
    leaves = [x.clone().requires_grad_() for x in (q, q, v)]
    o = two_pass_linear(*leaves, chunk=64)
    found = torch.autograd.grad(o, leaves, v)
    assert all(bool(x.isfinite().all()) for x in (o, *found))
    expected = 26.0**2 * 256**0.5 * torch.arange(1, 65) / 1024
    torch.testing.assert_close(o[0, :, 0, 0].double(), expected.double(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("form", [two_pass_linear, one_pass_gla])
def test_two_passes_without_gates_multiply_in_bfloat16(form, monkeypatch):
    interpret_bfloat16(monkeypatch)
    tensors, do = two_level_inputs(None, 128, torch.bfloat16)
    assert 1e-4 < max(errors_of(form, tensors, do).values()) < 1e-2


@pytest.mark.parametrize(
    ("sizes", "blocks"), [((64, 64, 64), (1, 1)), ((64, 64, 128), (1, 2)), ((128, 128, 64), (2, 1))]
)
def test_two_passes_without_gates_count_what_each_program_computes(sizes, blocks):
    """In blocks of 64 rows: scores for each block of value columns, their gradients for each of key columns."""
    C, K, V = sizes
    of_keys, of_values = blocks
    one = replace(cell(), op="linear", seqlen=128, parameters=Parameters(
        {"heads": 2, "key_dim": K, "value_dim": V, "chunk": C, "materialize": "states"}))  # fmt: skip
    tokens = one.tokens * 2
    within, scores = (C + 64) // 2, 2 * K * of_values
    forward = 2 * 2 * K * V + within * (scores + 2 * V)
    backward = 4 * 2 * K * V + within * (scores + 2 * V + 2 * 2 * K) + C * 2 * V * of_keys
    assert LinearTwoPass().executes(replace(one, pass_="fwd")).flops == tokens * forward
    assert LinearTwoPass().executes(replace(one, pass_="fwd+bwd")).flops == tokens * (forward + backward)


@pytest.mark.parametrize("gate", ["mild", "strong", "resets", "-inf"])
@pytest.mark.parametrize(("values", "multiprocessors"), [(48, 132), (64, 1), (128, 1), (128, 132)])
def test_stored_states_are_right_at_every_gate(monkeypatch, gate, values, multiprocessors):
    """In three blocks of value columns, one, two and eight."""
    monkeypatch.setattr(stored_states, "multiprocessors", lambda _: multiprocessors)
    tensors, do = two_level_inputs(gate, 20, values=values)
    assert max(errors_of(stored_states_gla, tensors, do).values()) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [
        ((64, 64, 512), 64),
        ((64, 64, 132), 64),
        ((64, 64, 66), 32),
        ((64, 64, 32), 16),
        ((128, 128, 256), 64),
        ((256, 512, 1), 16),
        ((256, 512, 8), 32),
        ((64, 48, 512), 16),
    ],
)
def test_few_heads_with_stored_states_are_shared_by_more_programs(sizes, columns):
    assert state_columns(*sizes) == columns


def test_stored_states_with_gates_of_values_are_right():
    torch.manual_seed(0)
    shapes = (16, 16, 32, 16, 32, 32)
    *tensors, do = (torch.randn(1, 20, 2, D) for D in shapes)
    tensors[3:] = [F.logsigmoid(x) for x in tensors[3:]]
    found, wanted = [], []
    for results, function, dtype in (
        (found, stored_states_gla, torch.float32),
        (wanted, lambda q, k, v, g, gv: gated_recurrence(q, k, v, g, None, gv)[0], torch.float64),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        o = function(*leaves)
        results += [o.detach(), *torch.autograd.grad(o, leaves, do.to(dtype))]
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() < 1e-6 * y.norm()


@pytest.mark.parametrize("gate", ["mild", "logsigmoid", "strong", "resets", "-inf", "zero"])
def test_five_steps_are_right_at_every_gate(gate):
    """In two blocks of key columns. Sums of resets have fewer digits left for the other gates, as in the two levels."""
    torch.manual_seed(0)
    B = 2 if gate == "resets" else 1
    q, k, v = (torch.randn(B, 48, 2, D) for D in (128, 128, 32))
    g = GATES[gate](torch.randn(B, 48, 2, 128))
    wide = gated_recurrence(*(x.double() for x in (q, k, v, g)))[0]
    with torch.no_grad():
        assert (five_step_gla(q, k, v, g) - wide).norm() < 2e-5 * wide.norm()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pass_": "fwd"}, "has no backward: --pass infer; got fwd"),
        ({"seqlen": 40}, "whole chunks of 16 tokens only; got 40"),
        ({}, None),
    ],
)
def test_what_five_steps_do_not_take_is_said(changes, why):
    sizes = Parameters({"heads": 2, "key_dim": 64, "value_dim": 64})
    cell = replace(Cell("gla-five-step", "gla", "infer", 1, 48, "bf16", sizes), **changes)
    assert GlaFiveStep().limits(cell) == why


@pytest.mark.parametrize("form", [two_level_gla, one_pass_gla])
@pytest.mark.parametrize("gate", ["mild", "strong"])
def test_two_levels_multiply_in_bfloat16(gate, form, monkeypatch):
    """Scores within a subchunk are sums in float32."""
    interpret_bfloat16(monkeypatch)
    tensors, do = two_level_inputs(gate, 64, torch.bfloat16)
    assert 1e-4 < max(errors_of(form, tensors, do).values()) < 1e-2


def test_what_follows_a_chunk_loses_nothing_over_many_chunks_but_by_the_closed_form(monkeypatch):
    interpret_bfloat16(monkeypatch)
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 512, 1, 16).bfloat16() for _ in range(4))
    tensors = [q, k, v, GATES["mild"](torch.randn(1, 512, 1, 16))]
    states, nothing, closed = (
        errors_of(partial(form, chunk=32, subchunk=16), tensors, do)
        for form in (two_level_gla, one_pass_gla, CLOSED_FORM)
    )
    assert max(states.values()) < 6e-3
    assert max(nothing.values()) < 6e-3
    assert nothing["dg"] < 1.2 * max(nothing["dq"], nothing["dk"])
    assert closed["dg"] > 2 * states["dg"]
    assert (closed["dq"], closed["dk"]) == (states["dq"], states["dk"])


def two_level_inputs(gate, tokens, dtype=torch.float32, values=128, keys=32):
    """Inputs whose head dims are powers of two; the values are wider than a program's columns."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, tokens, 2, D).to(dtype) for D in (keys, keys, values, values))
    return [q, k, v, *([] if gate is None else [GATES[gate](torch.randn(1, tokens, 2, keys))])], do


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"key_dim": 24}, "head dims are powers of two from 16 to 256; got K=24 V=64"),
        ({"chunk": 48}, "chunks and subchunks are powers of two from 16 to 256; got 48 and 16"),
        ({"chunk": 16, "subchunk": 32}, "chunks and subchunks are powers of two from 16 to 256; got 16 and 32"),
        ({"chunk": 128}, "whole chunks of 128 tokens only; got 64"),
        ({"materialize": "checkpoints"}, "keeps the states of all chunks, or nothing; got checkpoints"),
        ({"materialize": "nothing", "key_dim": 256}, "K is at most 128 if nothing is kept; got K=256"),
        ({"materialize": "nothing"}, None),
        ({}, None),
    ],
)
def test_what_two_levels_do_not_take_is_said(sizes, why):
    one = replace(cell(), parameters=Parameters({**cell().parameters, **sizes}))
    assert GlaTwoLevel().limits(one) == why


def test_a_share_of_the_operations_is_within_subchunks():
    """4 per pair and channel within a subchunk, where a product would take 2."""
    of_c = [replace(cell(), parameters=Parameters({**cell().parameters, "subchunk": c})) for c in (16, 32)]
    one, two = (GlaTwoLevel().executes(each).flops for each in of_c)
    assert two - one == one_more(16)
    with_gates, without = GlaTwoLevel().executes(cell()), LinearTwoPass().executes(replace(cell(), op="linear"))
    assert with_gates.bytes > without.bytes


@pytest.mark.parametrize("materialize", ["states", "nothing"])
def test_scores_within_subchunks_are_off_the_tensor_cores(materialize):
    one = replace(cell(), parameters=Parameters({**cell().parameters, "subchunk": 16, "materialize": materialize}))
    H, K = one.sizes("heads", "key_dim")
    counts = GlaTwoLevel().executes(one)
    assert counts.scalar_flops == one.tokens * H * 4 * 16 * K
    without = LinearTwoPass().executes(replace(one, op="linear"))
    assert without.scalar_flops == 0
    wide = GlaTwoLevel().executes(replace(one, dtype="fp32"))
    assert wide.scalar_flops == wide.flops == counts.flops


def test_a_backward_without_states_computes_states_and_gradients_of_scores_again():
    """Of a chunk of 64, all scores are computed as one block."""
    one = replace(cell(), op="linear", pass_="fwd+bwd")
    kept, anew = (
        LinearTwoPass().executes(replace(one, parameters=Parameters({**one.parameters, "materialize": word})))
        for word in ("states", "nothing")
    )
    H, K, V = one.sizes("heads", "key_dim", "value_dim")
    assert anew.flops - kept.flops == one.tokens * H * (2 * K * V + 2 * 64 * V)


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_scores_above_the_diagonal_do_not_count(chunk):
    """Rows of scores are written, and read again, in blocks up to the diagonal's, which is whole."""
    one = cell(T=512)
    one = replace(one, parameters=Parameters({**one.parameters, "chunk": chunk, "subchunk": 16}))
    H, K, V = one.sizes("heads", "key_dim", "value_dim")
    blocks = {"written": 16, "read": min(chunk, 64)}
    scores = sum(i // block * block + block for block in blocks.values() for i in range(chunk)) / chunk
    moved = (GlaTwoLevel().executes(one).bytes - GLA.moved_bytes(one)) / (one.tokens * H)
    assert moved == pytest.approx((scores + 2 * K * V / chunk) * 2)


@pytest.mark.parametrize(("pass_", "times"), [("fwd", 2), ("bwd", 3), ("fwd+bwd", 5)])
def test_without_gates_states_alone_are_in_memory(pass_, times):
    """A forward writes and reads them, a backward reads them and writes and reads their gradients."""
    one = replace(cell(pass_), op="linear")
    H, K, V = one.sizes("heads", "key_dim", "value_dim")
    moved = (LinearTwoPass().executes(one).bytes - LINEAR.moved_bytes(one)) / (one.tokens * H)
    assert moved == times * K * V / 64 * 2


def one_more(tokens):
    """What `tokens` more in every subchunk cost a forward of `cell`: 4 in place of 1 per pair and channel."""
    return 2 * 64 * 2 * 3 * tokens * 32


def cell(pass_="fwd", T=64):
    return Cell("x", "gla", pass_, 2, T, "bf16", Parameters({"heads": 2, "key_dim": 32, "value_dim": 64}))


@pytest.mark.parametrize(
    "backend", [LinearParallelTorch(), LinearParallelTriton(), GlaParallelNaive(), GlaParallelTorch()]
)
def test_all_pairs_take_four_times_the_operations_of_half_the_tokens(backend):
    ratio = backend.executes(cell(T=8192)).flops / backend.executes(cell(T=4096)).flops
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


@pytest.mark.parametrize(
    ("backend", "chunk", "launch"),
    [
        (GlaTwoLevel(), None, "C=64 c=16"),
        (GlaTwoLevel(), 32, "C=32 c=16"),
        (LinearTwoPass(), None, "C=64"),
        (GlaTorch(), None, "C=64"),
        (GlaBothTorch(), 32, "C=32"),
        (LinearTorch(), 128, "C=128"),
    ],
)
def test_a_record_says_which_chunks_a_cell_had(backend, chunk, launch):
    one = cell(T=256)
    one = replace(one, op=backend.op, parameters=Parameters({**one.parameters, "chunk": chunk}))
    assert backend.launch({}, one) == launch
