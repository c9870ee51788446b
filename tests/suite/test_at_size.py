"""Accuracy at the cell's own size: every part of every result is looked at, and each kind of fault is found."""

from dataclasses import replace

import pytest
import torch

from glabench.measure import at_size
from glabench.measure.at_size import (
    Results,
    check_drawn,
    check_everything,
    check_parts,
    find_changed,
    take,
    unshared_specs,
    worst_of,
)
from glabench.measure.usual import Usual
from glabench.measure.workload import Workload
from glabench.ops import BUILTIN, DECODING, RECALL, TEXT, TRAINING
from glabench.ops.base import as_tuple
from glabench.sweeps import Cell, Parameters

OPS = {op.name: op for op in BUILTIN if op not in (TRAINING, RECALL, TEXT, DECODING)}
HEADS = {"heads": 3, "key_dim": 8, "value_dim": 8}
GATED = HEADS | {"gate": "logsigmoid/16"}
SIZES = {
    "gla": GATED, "linear": HEADS, "softmax": {"heads": 3, "head_dim": 8}, "mamba1": {"inner": 6, "state_size": 4},
    "mamba2": {"heads": 3, "head_dim": 8, "state_size": 4}, "simple-gla": GATED, "retention": HEADS,
    "lightning": HEADS, "gla-both": GATED, "gla-values": GATED, "gated-delta": GATED, "kda": GATED, "mlstm": HEADS,
    "hyena": {"inner": 6}, "rwkv4": {"inner": 6},
}  # fmt: skip
BOUND = 2e-3


def results_of(op, batch=4, seqlen=70, dtype="fp32"):
    """The reference's own results in float32, which are right."""
    cell = Cell("any", op, "fwd+bwd", batch, seqlen, dtype, Parameters(SIZES[op]), "cpu")
    inputs = {name: x.requires_grad_() for name, x in OPS[op].make_inputs(cell).items()}
    given = OPS[op].make_grad_outputs(cell)
    workload = Workload(lambda: as_tuple(OPS[op].reference(inputs))[: len(given)], inputs, given)
    outputs = workload.forward()
    return cell, Results.of(workload, outputs, workload.gradients(outputs))


def beyond(op, cell, results, seed=0):
    """The tensors whose error is beyond its bound, with the place."""
    found = worst_of([check_parts(OPS[op], cell, results, BOUND, seed), check_everything(OPS[op], cell, results)])
    return {name: worst.place for name, worst in found.items() if worst.excess > 1}


def spoiled(results, name, place, factor=1.01, add=0.0):
    """The results with some elements of the output or a gradient changed."""
    tensor = (results.outputs[name] if name in results.outputs else results.gradients[name]).detach().clone()
    tensor[place] = tensor[place] * factor + add
    if name in results.outputs:
        return replace(results, outputs={**results.outputs, name: tensor})
    return replace(results, gradients={**results.gradients, name: tensor})


@pytest.mark.parametrize("compared", [2**28, 50, 1])
@pytest.mark.parametrize(("name", "place"), [("q", (0, 0, 0, 0)), ("k", (0, 69, 2, 7)), ("g", (0, 35, 1, 3))])
def test_one_changed_number_is_found_in_whichever_pieces_inputs_are_compared(name, place, compared, monkeypatch):
    monkeypatch.setattr(at_size, "_COMPARED", compared)
    _, results = results_of("gla", batch=1)
    changed = results.inputs[name].detach().clone()
    changed[place] += 1
    assert find_changed(results, results) == []
    assert find_changed(replace(results, inputs={**results.inputs, name: changed}), results) == [name]


@pytest.mark.parametrize("op", list(OPS))
def test_right_results_are_right_in_every_part(op):
    cell, results = results_of(op)
    assert set(check_everything(OPS[op], cell, results)) == {"o", *(f"d{name}" for name in results.gradients)}
    assert beyond(op, cell, results) == {}


@pytest.mark.parametrize("numbers", [1, 10**4, 10**5, 10**9])
@pytest.mark.parametrize("op", ["gla", "mamba1"])
def test_blocks_of_any_size_give_the_same_errors(op, numbers, monkeypatch):
    cell, results = results_of(op)
    expected = check_parts(OPS[op], cell, results, BOUND, 0)
    monkeypatch.setattr(at_size, "_CPU_MEMORY", 4 * numbers)
    found = check_parts(OPS[op], cell, results, BOUND, 0)
    assert {name: worst.error for name, worst in found.items()} == pytest.approx(
        {name: worst.error for name, worst in expected.items()}, abs=1e-6
    )


@pytest.mark.parametrize("name", ["o", "q", "k", "v", "g"])
def test_one_wrong_head_of_one_sequence_is_found_and_named(name):
    cell, results = results_of("gla")
    found = beyond("gla", cell, spoiled(results, name, (2, slice(None), 1), factor=1.2))
    assert found == {name if name == "o" else f"d{name}": "batch 2, heads 1"}


@pytest.mark.parametrize(("batch", "head"), [(0, 0), (3, 2)])
def test_the_first_and_the_last_part_are_looked_at_closely(batch, head):
    cell, results = results_of("gla")
    found = beyond("gla", cell, spoiled(results, "o", (batch, slice(None), head)))
    assert found == {"o": f"batch {batch}, heads {head}"}


def test_other_parts_are_drawn_by_the_seed():
    cell, results = results_of("gla")
    wrong = spoiled(results, "o", (1, slice(None), 1))
    found = {seed: bool(beyond("gla", cell, wrong, seed)) for seed in range(12)}
    assert set(found.values()) == {True, False}
    assert all(bool(beyond("gla", cell, wrong, seed)) == is_found for seed, is_found in found.items())


def test_one_bad_token_among_many_is_found():
    cell, results = results_of("linear", batch=1, seqlen=3000)
    found = beyond("linear", cell, spoiled(results, "o", (0, 2321, 1), add=results.outputs["o"][0, :, 1].std()))
    assert found == {"o": "batch 0, token 2321, heads 1"}


@pytest.mark.parametrize("token", [0, 2, 4095])
def test_a_lost_token_is_found_although_outputs_grow_with_its_number(token):
    """Without gates the first token of 4,096 is 0.02 of the root mean square, far less than rows in bf16 may miss."""
    cell, results = results_of("linear", batch=1, seqlen=4096)
    lost = spoiled(results, "o", (slice(None), token), factor=0.0)
    assert check_parts(OPS["linear"], cell, lost, 1e-2, 0)["o"].excess > 1
    assert check_everything(OPS["linear"], cell, lost)["o"].excess > 1


@pytest.mark.parametrize(("share", "found"), [(8e-3, []), (0.05, ["dq"])])
def test_a_token_that_is_small_by_chance_is_compared_with_the_same_token_elsewhere(share, found):
    cell, results = results_of("softmax", batch=1, seqlen=2048)
    # The second token's gradient is usually far larger than most; here its terms cancel, all but their rounding.
    given = {"o": results.grad_outputs["o"].clone()}
    given["o"][0, 1, 0] = 0
    dq = results.gradients["q"].clone()
    dq[0, 1, 0] = share * dq[0, 1, 1].norm() / dq.shape[-1] ** 0.5
    results = replace(results, grad_outputs=given, gradients={"q": dq}, outputs={})
    worst = check_parts(OPS["softmax"], cell, results, BOUND, 0)
    assert [name for name, error in worst.items() if error.excess > 1] == found


@pytest.mark.parametrize("factor", [10, 40, 1000])
def test_a_token_that_is_lost_in_most_parts_is_not_hidden_by_a_few_huge_ones(factor):
    cell, results = results_of("linear", batch=2, seqlen=4096)
    wrong = spoiled(results, "o", (slice(None), 1500), factor=0.0)
    for part in ((0, 1500, 1), (1, 1500, 0)):
        wrong = spoiled(wrong, "o", part, add=factor * results.outputs["o"][part])
    for seed in range(3):
        assert check_parts(OPS["linear"], cell, wrong, BOUND, seed)["o"].excess > 1


def test_a_lost_token_of_a_small_part_is_found():
    cell, results = results_of("linear", batch=1, seqlen=4096)
    inputs = {**results.inputs, "v": results.inputs["v"].detach() * torch.tensor([0.2, 1, 1])[:, None]}
    small = replace(results, inputs=inputs, gradients={}, outputs={"o": as_tuple(OPS["linear"].reference(inputs))[0]})
    assert check_parts(OPS["linear"], cell, small, BOUND, 0)["o"].excess < 1
    assert check_parts(OPS["linear"], cell, spoiled(small, "o", (0, 1500, 0), 0.0), BOUND, 0)["o"].excess > 1


def test_parts_without_rows_and_rows_without_more_are_compared(monkeypatch):
    cell, results = results_of("linear")
    op = OPS["linear"]
    monkeypatch.setattr(type(op), "independent", ("batch", "seqlen", "heads"))
    assert Usual.of(results.outputs["o"], op, op.output(cell)).rows is None
    monkeypatch.setattr(type(op), "independent", ())
    usual = Usual.of(torch.arange(1.0, 5), op, replace(op.output(cell), shape=(4,), dims=("seqlen",)))
    assert usual.rows.tolist() == [1, 2, 3, 4]
    assert usual.part == pytest.approx(30**0.5)


def test_huge_parts_where_the_usual_size_is_taken_from_hide_no_others():
    cell, results = results_of("linear", batch=64, seqlen=300)
    wrong = {"o": torch.zeros_like(results.outputs["o"])}
    wrong["o"][:: 63 // 7] = 1e6
    spoilt = replace(results, outputs=wrong, gradients={})
    regions = [{"batch": (batch, 1), "heads": (1, 1)} for batch in (1, 5, 33)]
    taken = take(spoilt, unshared_specs(OPS["linear"], cell), regions)
    assert check_drawn(OPS["linear"], cell, spoilt, BOUND, regions, taken)["o"].error > 0.1


@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("start", [64, 512])
def test_what_is_lost_after_some_tokens_is_found(op, start):
    cell, results = results_of(op, batch=2, seqlen=start + 60)
    tokens = OPS[op].output(cell).dims.index("seqlen")
    late = (slice(None),) * tokens + (slice(start, None),)
    first = next(iter(results.gradients))
    assert "o" in beyond(op, cell, spoiled(results, "o", late, factor=0.0))
    assert f"d{first}" in beyond(op, cell, spoiled(results, first, late, factor=0.0))


def test_nan_anywhere_is_beyond_every_bound():
    cell, results = results_of("softmax")
    assert beyond("softmax", cell, spoiled(results, "v", (1, 5, 1, 0), add=float("nan"))) == {"dv": "batch 1, heads 1"}


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_a_gradient_that_parts_share_is_compared_as_their_sum(name):
    cell, results = results_of("mamba1")
    assert set(beyond("mamba1", cell, spoiled(results, name, ..., factor=1.2))) == {f"d{name}"}


def test_a_shared_gradient_is_looked_at_closely_over_one_sequence():
    cell, results = results_of("mamba1", batch=1)
    assert set(beyond("mamba1", cell, spoiled(results, "B", ..., factor=1.01))) == {"dB"}


def test_an_op_whose_parts_all_depend_on_each_other_is_one_part(monkeypatch):
    cell, results = results_of("linear", batch=1)
    monkeypatch.setattr(type(OPS["linear"]), "independent", ())
    assert beyond("linear", cell, results) == {}
    assert set(beyond("linear", cell, spoiled(results, "q", ..., factor=1.01))) == {"dq"}


def test_a_result_of_zeros_is_right_only_if_zeros_are():
    cell, results = results_of("gla")
    assert "dg" in beyond("gla", cell, spoiled(results, "g", ..., factor=0.0))
    zero = replace(results, grad_outputs={name: torch.zeros_like(x) for name, x in results.grad_outputs.items()})
    none = replace(zero, gradients={name: torch.zeros_like(x) for name, x in zero.gradients.items()})
    assert beyond("gla", cell, none) == {}
