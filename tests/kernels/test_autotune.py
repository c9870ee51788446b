"""Choosing a launch plan by timing: which plans are tried, which one is kept, and when none is."""

import json
from dataclasses import replace

import pytest
import torch
import triton
from gla_cases import assert_close, make_case, run
from gla_kernels import chunk_gla
from gla_kernels.launching import autotune
from gla_kernels.launching.device import Gpu
from gla_kernels.launching.plans import HOPPER, hopper_plan, parse_plan, plan, plan_text
from gla_kernels.tuning import launch_of
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def times(monkeypatch, tmp_path):
    """Makes up times, the last candidate's being the shortest, and counts the requests."""
    monkeypatch.setenv("GLA_KERNELS_CACHE", str(tmp_path / "cache"))
    asked = []

    def median_ms(call):
        call()
        asked.append(1.0 / (1 + len(asked)))
        return asked[-1]

    monkeypatch.setattr(autotune, "median_ms", median_ms)
    return asked


@pytest.fixture
def two_candidates(monkeypatch):
    """The first and the last plan are tried, whose chunks differ, for tests of something else than what is tried."""
    candidates = autotune.candidates
    monkeypatch.setattr(autotune, "candidates", lambda *kind: candidates(*kind)[:: len(candidates(*kind)) - 1])


def small_case(T=20):
    return make_case("mild", T=T, H=1, K=16, V=16)


def kept():
    return json.loads(autotune.plans_path().read_text())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (64, 64), (128, 256), (512, 512)])
def test_every_plan_survives_being_written_as_a_line(K, V, dtype):
    choices = [*autotune.candidates(K, V, dtype, CPU), HOPPER, hopper_plan(128, 256, torch.bfloat16)]
    assert [parse_plan(plan_text(choice)) for choice in choices] == choices


def test_no_chunk_is_tried_that_tensor_memory_does_not_hold(monkeypatch):
    monkeypatch.setattr(autotune, "gpu_of", lambda device: Gpu(tensor_memory=True))
    portable = [each for each in autotune.candidates(64, 64, torch.bfloat16, CPU) if each.family == "triton"]
    assert {each.chunk_size for each in portable} == {16, 32}


@pytest.mark.parametrize("text", ["", "triton", "cuda C=16: 64x64 4 warps 2 stages / 64x64 4 warps 2 stages"])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="plan: got"):
        parse_plan(text)


@pytest.mark.parametrize("gated", [True, False])
def test_the_tables_plan_is_the_first_candidate_and_none_comes_twice(gated):
    choices = autotune.candidates(64, 64, torch.bfloat16, CPU, gated)
    assert choices[0] == plan(64, 64, torch.bfloat16, gated=gated)
    assert len(set(choices)) == len(choices) > 4


@pytest.mark.parametrize("materialize", [True, False])
def test_the_fastest_plan_is_taken_kept_and_not_timed_again(times, materialize):
    case = small_case()
    found = run(chunk_gla, case.inputs, case.grads, autotune=True, materialize=materialize)
    assert_close(found, case, 5e-6)
    (entry,) = kept().values()
    tried = len(times)
    assert tried == len(entry["ms"]) > 4
    assert entry["ms"][entry["plan"]] == min(entry["ms"].values())
    run(chunk_gla, case.inputs, case.grads, autotune=True, materialize=materialize)
    assert len(times) == tried


def test_the_environment_asks_as_well_and_the_plan_is_told(times, two_candidates, monkeypatch):
    case = small_case()
    q, v, g = (case.inputs[name] for name in "qvg")
    usual = launch_of(q, v, g, True, None)
    run(chunk_gla, case.inputs, case.grads)
    assert not times
    monkeypatch.setenv("GLA_AUTOTUNE", "1")
    run(chunk_gla, case.inputs, case.grads)
    assert times
    (entry,) = kept().values()
    trained = q.clone().requires_grad_()
    assert launch_of(trained, v, g, True, None) == entry["plan"] != usual
    assert launch_of(q, v, g, True, None) == usual  # without gradients it is another kind of call
    assert launch_of(q, v, g, True, 32).startswith("triton C=32")


def test_tuning_inside_of_a_checkpoint_does_not_disturb_it(times, two_candidates):
    case = small_case()
    leaves = [case.inputs[name].requires_grad_() for name in ("q", "k", "v", "g")]
    for _ in range(2):
        o = checkpoint(lambda *x: chunk_gla(*x, autotune=True)[0] * 2, *leaves, use_reentrant=False)
        torch.autograd.grad(o.sum(), leaves)
    assert times


def test_kinds_of_calls_are_kept_apart_and_lengths_by_their_power_of_two(times, two_candidates):
    for T, backward in ((17, True), (32, True), (33, True), (17, False)):
        case = small_case(T)
        with torch.set_grad_enabled(backward):
            chunk_gla(*(case.inputs[name].requires_grad_() for name in ("q", "k", "v", "g")), autotune=True)
    assert len(kept()) == 3


def test_a_chunk_size_of_the_callers_own_is_not_tuned(times):
    case = small_case()
    run(chunk_gla, case.inputs, case.grads, chunk_size=16, autotune=True)
    assert not times


@pytest.mark.parametrize("text", ["", "[]", "{", '{"some call": 3}'])
def test_a_file_that_holds_something_else_is_written_anew(times, two_candidates, text):
    autotune.plans_path().parent.mkdir(parents=True)
    autotune.plans_path().write_text(text)
    case = small_case()
    run(chunk_gla, case.inputs, case.grads, autotune=True)
    assert any(isinstance(entry, dict) and "plan" in entry for entry in kept().values())


def test_a_kept_plan_that_is_no_candidate_any_more_is_chosen_anew(times, two_candidates):
    case = small_case()
    run(chunk_gla, case.inputs, case.grads, autotune=True)
    tried = len(times)
    entries = kept()
    for entry in entries.values():
        entry["plan"] = plan_text(replace(parse_plan(entry["plan"]), chunk_size=256))
    autotune.plans_path().write_text(json.dumps(entries))
    autotune._CHOSEN.clear()
    run(chunk_gla, case.inputs, case.grads, autotune=True)
    assert len(times) == 2 * tried


def test_a_plan_that_does_not_fit_the_gpu_is_passed_over(times):
    first, second, *_ = (plan_text(choice) for choice in autotune.candidates(64, 64, torch.bfloat16, CPU))

    def does_not_fit(text):
        if text == first:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

    kind = autotune.CallKind(64, 64, torch.bfloat16, True, 64, 4, True, True)
    autotune.tuned_plan(kind, CPU, does_not_fit)
    (entry,) = kept().values()
    assert first not in entry["ms"]
    assert second in entry["ms"]
