"""Plans: what they hold, how long they are expected to take, and what is said before a run."""

import os
from dataclasses import replace

import pytest
from fake_workers import measured
from small_plan import AXES, SETTINGS, Heard

from glabench.devices.environment import collect
from glabench.errors import (
    NothingToRunError,
    UsageError,
)
from glabench.measure.job import Job
from glabench.measure.settings import Settings
from glabench.records import Record, RunFolder
from glabench.report.describe import describe_environment
from glabench.scheduling.folders import latest_run
from glabench.scheduling.plan import Plan, estimate_cells, expected_seconds, make_plan, settings_for
from glabench.scheduling.runs import Request, announce, check_settings
from glabench.sweeps import Cell, Parameters, Sweep, Variant


def test_a_plan_has_the_changed_axes_and_no_plan_is_empty(place):
    plan = make_plan("cpu-smoke", {"seqlen": [16, 32], "backend": "linear-torch", "pass": "fwd"}, None, place)
    assert [cell.seqlen for cell in plan.cells] == [16, 32]
    assert plan.settings.time_limit_s == 1.0  # a CPU's samples rarely settle
    with pytest.raises(UsageError, match=r"--timing: 'graph' needs a GPU"):
        make_plan("cpu-smoke", {}, Settings(timing="graph"), place)
    with pytest.raises(NothingToRunError, match=r"the sweep none has no cell"):
        make_plan(Sweep("none", {}, ()), {}, None, place)


def on(place, device):
    return replace(place, environment={**place.environment, "device": device})


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [
        ("cuda", {}, (64, 0.5, False)),
        ("cuda", {"memory_limit_mib": 32, "energy": True}, (32, 0.5, True)),
        ("cuda", {"time_limit_s": 2.0}, (64, 2.0, False)),
        ("cpu", {}, (None, 1.0, True)),
        ("cpu", {"time_limit_s": 2.0}, (None, 2.0, True)),
    ],
)
def test_a_sweeps_own_settings_count_on_a_gpu_unless_others_are_given(place, device, given, found):
    own = {"memory_limit_mib": 64, "time_limit_s": 0.5, "energy": False}
    sweep = Sweep("limited", AXES, (Variant("gla-triton"), Variant("linear-torch")), **own)
    settings = settings_for(sweep, device, given)
    assert (settings.memory_limit_mib, settings.time_limit_s, settings.energy) == found
    plan = make_plan(sweep, {}, settings, on(place, device))
    of_sweep = (plan.sweep.memory_limit_mib, plan.sweep.time_limit_s, plan.sweep.energy)
    assert (plan.settings, of_sweep) == (settings, found if device == "cuda" else (64, 0.5, False))
    assert make_plan(sweep, {}, None, on(place, device)).settings == settings_for(sweep, device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("seconds", [-1.0, 0.0, "1", float("inf"), float("nan")])
def test_a_wrong_time_to_sample_is_a_mistake(place, device, seconds):
    sweep = Sweep("limited", AXES, (Variant("linear-torch"),), time_limit_s=seconds)
    with pytest.raises(UsageError, match="sweep limited: time_limit_s: "):
        make_plan(sweep, {}, None, on(place, device))


@pytest.mark.parametrize("limit", [0, -5, "40GiB", 1.5, 2**70])
def test_a_wrong_limit_of_memory_is_a_mistake(place, limit):
    sweep = Sweep("limited", AXES, (Variant("linear-torch"),), memory_limit_mib=limit)
    with pytest.raises(UsageError, match="sweep limited: memory_limit_mib: "):
        make_plan(sweep, {}, None, on(place, "cuda"))


def test_models_have_no_limit_of_memory(place):
    with pytest.raises(UsageError, match="--memory-limit: holds for ops alone, and gla-model is a model"):
        make_plan("train-340m", {"backend": "gla-model"}, Settings(memory_limit_mib=64), on(place, "cuda"))


@pytest.mark.parametrize("package", ["tilelang", "flash_qla", "flash_kda"])
@pytest.mark.parametrize("switch", [None, "0", "1"])
def test_a_plan_tells_what_fla_would_run_in_place_of_its_own(place, tmp_path, monkeypatch, package, switch):
    (tmp_path / f"{package}-0.1.2.dist-info").mkdir()
    (tmp_path / f"{package}-0.1.2.dist-info/METADATA").write_text(f"Name: {package}\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH", raising=False)
    if switch is not None:
        monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", switch)
    sweep = Sweep("fla", AXES, (Variant("fla-gated-delta"), Variant("linear-torch")))
    environment = make_plan(sweep, {}, SETTINGS, place).environment()
    name = package.replace("_", "-")
    told = [backend for backend, one in environment["implementations"].items() if name in one["packages"]]
    assert told == ([] if switch == "1" else ["fla-gated-delta"])
    assert (f"fla-core may run {name} 0.1.2" in describe_environment(environment)) == bool(told)
    assert environment["variables"].get("FLA_DISABLE_BACKEND_DISPATCH") == switch
    assert collect("cpu")["packages"][name] == "0.1.2"


def test_a_cell_is_estimated_by_its_limits_and_by_its_work(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no run is stored

    def seconds(**axes):
        plan = make_plan("cpu-smoke", {"backend": "linear-torch", "pass": "fwd", "seqlen": "1k", **axes}, None, place)
        return [round(estimate.seconds, 1) for estimate in estimate_cells(plan)]

    assert seconds() == [5.1]  # warm-up, sampling and the rest
    assert seconds(seqlen="1m", batch="64", heads="64")[0] == 300  # no cell takes longer than its time-out


def test_a_cell_that_was_measured_is_estimated_by_that_and_an_unsupported_one_takes_nothing(
    place, plan, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "runs/small-20260101-000000", plan.sweep, plan.environment())
    folder.append(measured(Job("linear-torch", "run", "cpu"), plan.cells[0], first_call_s=2.0))
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/records.jsonl").write_text("nonsense\n")
    first, second, *_ = estimate_cells(plan)
    assert first.seconds == pytest.approx(2 + 2 * 0.04 + 0.1 + 1, abs=0.01)
    assert second.seconds > first.seconds
    picky = make_plan(Sweep("p", {**AXES, "seqlen": "16,32"}, (Variant("fake-picky"),)), {}, SETTINGS, place)
    assert [(e.seconds > 0, e.unsupported) for e in estimate_cells(picky)] == [
        (True, None),
        (False, "32 tokens are too many"),
    ]


def test_a_training_that_was_measured_is_estimated_by_all_of_its_steps(place, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "runs/small-20260101-000000", plan.sweep, plan.environment())
    folder.append(replace(measured(Job("linear-torch", "run", "cpu"), plan.cells[0]), train_s=3.0))
    folder.append(Record(run_id="run", cell=plan.cells[1], status="ok", accuracy=0.5, train_s=2.0))
    assert [round(each.seconds, 1) for each in estimate_cells(plan.on(plan.cells[:2]))] == [7.0, 6.0]


def test_a_cell_without_its_ops_parameters_is_expected_to_take_its_samples_time(plan):
    """As a baseline's may be, which anybody can write."""
    bare = plan.on([replace(plan.cells[0], parameters=Parameters())])
    assert expected_seconds(bare) == pytest.approx(expected_seconds(plan.on(plan.cells[:1])))


def test_a_backend_that_fails_at_telling_its_limits_hinders_no_estimate(place):
    sweep = Sweep("s", {**AXES, "seqlen": "16,32", "when": "limits"}, (Variant("fake-raising"),))
    plan = make_plan(sweep, {}, SETTINGS, place)
    told = [estimate.unsupported for estimate in estimate_cells(plan)]
    assert told == ["nothing to measure", "RuntimeError: a made-up fault with a second line"]
    assert (
        expected_seconds(plan) > 0
    )  # which does not call `limits`, so that a plugin cannot end a run before it starts


@pytest.mark.parametrize(("seqlens", "rounds", "words"), [("1..3:+1", 1, ""), ("1..99:+1", 1, "up to 14 minutes")])
def test_a_run_of_more_than_ten_minutes_says_so(place, tmp_path, monkeypatch, seqlens, rounds, words):
    monkeypatch.chdir(tmp_path)
    sweep = Sweep("long", {**AXES, "seqlen": seqlens}, (Variant("linear-torch"), Variant("gla-torch")))
    heard = Heard()
    announce(make_plan(sweep, {}, SETTINGS, place), heard, rounds)
    assert words in " ".join(heard.said)
    assert bool(heard.said) == bool(words)


def test_rounds_take_so_much_longer(place, plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heard = Heard()
    announce(plan, heard, 100)
    assert "this may take up to 41 minutes; --dry-run shows details" in heard.said[0]


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ({"other_processes": 2, "utilization_pct": 37.0}, "the GPU is busy (2 processes, in use 37 % of the time)"),
        ({"other_processes": None, "utilization_pct": 90.0}, "the GPU is busy (0 processes, in use 90 % of the time)"),
        ({"other_processes": 1, "utilization_pct": None}, "the GPU is busy (1 processes)"),
        ({"other_processes": 0, "utilization_pct": 3.0}, ""),
        (None, ""),
    ],
)
def test_a_busy_gpu_is_warned_of(place, busy, words):
    def said(device):
        heard = Heard()
        environment = {"device": device, "gpu": {"index": 0}, "busy": busy}
        announce(Plan(Sweep("s", {}, ()), [], SETTINGS, replace(place, environment=environment)), heard, 1)
        return " ".join(heard.said)

    assert words in said("cuda")
    assert bool(said("cuda")) == bool(words)
    assert said("cpu") == ""


def test_the_latest_run_is_one_of_the_sweeps_and_not_of_one_with_a_longer_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["head-dim-20260101-000000", "head-dim-2-20260102-000000", "a[1]-20260103-000000-2", "mine"]
    for age, name in enumerate(names):
        (tmp_path / "runs" / name).mkdir(parents=True)
        file = tmp_path / "runs" / name / "records.jsonl"
        file.touch()
        os.utime(file, (age, age))
    assert latest_run(["head-dim"]).name == names[0]
    assert latest_run(["head-dim", "head-dim-2"]).name == names[1]
    assert latest_run(["a[1]"]).name == names[2]
    assert latest_run([]).name == names[3]  # whatever its name
    with pytest.raises(UsageError, match=r"there is no run of a or b under runs/; name its folder: --resume FOLDER"):
        latest_run(["a", "b"])


@pytest.mark.parametrize("settings", [{"speed": 1}, {"precision": "x"}, {"warm_up_s": "0"}, {"time_limit_s": -1.0}])
def test_settings_that_cannot_be_are_refused_before_anything_is_measured(settings):
    with pytest.raises(UsageError, match=f"settings: .*{next(iter(settings))}.* .allowed: precision, "):
        check_settings(settings, {})
    check_settings({"warm_up_s": 0, "cell_timeout_s": 5}, {"seqlen": 16})


def test_a_request_takes_the_small_sweep_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("glabench.scheduling.plan.probe", collect)
    plan = Request("paper-fig2", "cpu-smoke", {"seqlen": "16"}, {"time_limit_s": 0.5}, "cpu").plan()
    assert (plan.sweep.name, plan.settings.time_limit_s) == ("cpu-smoke", 0.5)
    assert {cell.device for cell in plan.cells} == {"cpu"}
    cell = Cell(
        "linear-torch", "linear", "fwd", 1, 16, "fp32", Parameters({"heads": 4, "key_dim": 64, "value_dim": 64})
    )
    assert replace(cell, device="cpu") in plan.cells
