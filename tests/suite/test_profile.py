"""Profiles: from traces of a GPU as torch's profiler writes them, and shown in tables and words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import shown
from reports import made_up
from simulated import record
from traces import KERNELS, complete, trace_of

from glabench.cli.profile import _show_beside
from glabench.errors import GlabenchError
from glabench.profiling.profile import CALL, profile_of, short_name, with_occupancy
from glabench.profiling.trace import Event, Trace, covered, load_trace, self_times
from glabench.records.profile import Profile, Work
from glabench.report.profiles import describe_profile, draw_profiles, profile_table, profiles_markdown

RESULTS = Path(__file__).parents[2] / "results"


def test_kernels_of_a_call_are_those_that_it_launched():
    found = profile_of(trace_of(KERNELS, KERNELS, KERNELS))
    assert (found.calls, found.on_device) == (3, True)
    assert [(kernel.name, kernel.calls, kernel.grid) for kernel in found.kernels] == [
        ("forward", 1, (64, 1, 1)), ("backward", 2, (132, 1, 1)), ("backward", 1, (8, 1, 1))
    ]  # fmt: skip
    assert [kernel.ms for kernel in found.kernels] == pytest.approx([0.03, 0.065, 0.01])
    assert [kernel.added_ms for kernel in found.kernels] == pytest.approx([0.03, 0.06, 0.01])
    assert [kernel.gap_ms for kernel in found.kernels] == pytest.approx([0.0, 0.01, 0.0])
    first = found.kernels[0]
    assert (first.threads, first.registers, first.shared_bytes) == (256, 168, 40960)


def test_the_span_is_from_the_first_start_to_the_last_end_and_counts_overlaps_once():
    found = profile_of(trace_of(KERNELS))
    assert found.span_ms == pytest.approx(0.11)
    assert found.busy_ms == pytest.approx(0.1)
    long_first = [("a", 0.0, 90.0, 1), ("b", 10.0, 20.0, 1)]
    assert profile_of(trace_of(long_first)).span_ms == pytest.approx(0.09)


def test_times_are_medians_over_calls():
    calls = [[("a", 0.0, duration, 1)] for duration in (10.0, 20.0, 90.0)]
    assert profile_of(trace_of(*calls)).kernels[0].ms == pytest.approx(0.02)


def test_the_host_is_split_into_launches_operators_and_the_rest():
    host = profile_of(trace_of(KERNELS)).host
    assert host.call_ms == pytest.approx(0.1)
    assert host.launches == 4
    assert host.launch_ms == pytest.approx(0.02)
    assert host.operators_ms == pytest.approx(0.01)  # 20 us from 10 on, in which two launches take 5 each
    assert host.rest_ms == pytest.approx(0.07)


def test_autograds_engine_is_apart_from_the_operators_that_it_calls():
    events = [
        complete(CALL, "user_annotation", 0.0, 100.0),
        complete("autograd::engine::evaluate_function: MulBackward0", "cpu_op", 10.0, 50.0, 2),
        complete("aten::mul", "cpu_op", 20.0, 15.0, 2),
        complete("cudaLaunchKernel", "cuda_runtime", 25.0, 5.0, 2, correlation=1),
        complete("kernel", "kernel", 40.0, 5.0, 7, correlation=1),
    ]
    host = profile_of(Trace.of(events)).host
    parts = (host.launch_ms, host.operators_ms, host.autograd_ms, host.rest_ms)
    assert parts == pytest.approx((0.005, 0.010, 0.035, 0.05))
    assert ", 0.035 in autograd, 0.05 in Python." in describe_profile(profile_of(Trace.of(events)), None)[-1]


def test_variants_of_a_template_that_need_different_registers_are_apart():
    events = [complete(CALL, "user_annotation", 0.0, 100.0)]
    for number, registers in enumerate((16, 64, 16), 1):
        events.append(complete("cudaLaunchKernel", "cuda_runtime", 10.0 * number, 5.0, correlation=number))
        needs = {"grid": [8, 1, 1], "block": [128, 1, 1], "registers per thread": registers, "shared memory": 0}
        name = f"void elementwise<Functor{registers}>(int)"
        events.append(complete(name, "kernel", 200.0 + 10 * number, 5.0, 7, correlation=number, **needs))
    found = profile_of(Trace.of(events)).kernels
    assert [(each.name, each.calls, each.registers) for each in found] == [
        ("elementwise", 2, 16),
        ("elementwise", 1, 64),
    ]


def test_a_launch_without_its_kernel_is_an_error_even_if_all_calls_lack_it():
    lost = Trace.of([
        complete(CALL, "user_annotation", 0.0, 100.0),
        *(complete("cuLaunchKernelEx", "cuda_driver", 10.0 * n, 5.0, correlation=n) for n in (1, 2)),
        complete("cudaLaunchHostFunc", "cuda_runtime", 40.0, 5.0, correlation=3),
        complete("kernel", "kernel", 200.0, 5.0, 7, correlation=1),
    ])  # fmt: skip
    with pytest.raises(GlabenchError, match="lost the kernels of 1 of 2 launches; profile again"):
        profile_of(lost)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((KERNELS, KERNELS[1:]), r"calls differ in their kernels \(4, 3 in the calls profiled\)"),
        ((KERNELS, []), "recorded no kernel of a call"),
        ((), "recorded no call"),
    ],
)
def test_lost_kernels_are_an_error(calls, message):
    with pytest.raises(GlabenchError, match=message):
        profile_of(trace_of(*calls))


def test_work_is_known_of_kernels_with_one_grid():
    found = profile_of(trace_of(KERNELS)).with_work({"forward": Work(10**6, 10**9), "backward": Work(5)})
    assert [(kernel.bytes, kernel.flops) for kernel in found.kernels] == [(10**6, 10**9), (None, None), (None, None)]


def test_a_profile_of_a_gpu_as_a_table():
    found = with_occupancy(profile_of(trace_of(KERNELS)).with_work({"forward": Work(10**8, 3 * 10**9)}), "90")
    head, rows = profile_table(found, replace(record([0.1]), copy_gbps=4000.0, product_tflops=800.0))
    assert dict(zip(head, rows[0], strict=True)) == {
        "kernel": "forward", "calls": "1", "ms": "0.03", "adds, ms": "0.03", "share": "27.3%", "idle before, us": "0",
        "grid": "64x1x1", "threads": "256", "registers": "168", "shared, KiB": "40",
        "programs per SM": "1 (registers)", "GB/s": "3330", "TFLOP/s": "100",
        "of the roof": "83%",
    }  # fmt: skip
    assert [row[0] for row in rows] == ["forward", "backward", "backward"]


def test_kernels_of_little_time_are_one_row_unless_asked_for():
    found = profile_of(trace_of([*KERNELS, ("tiny", 120.0, 0.2, 1), ("small", 121.0, 0.3, 1)]))
    assert profile_table(found)[1][-1][:5] == ["2 others", "2", "0.0005", "0.0005", "0.4%"]
    assert [row[0] for row in profile_table(found, all_kernels=True)[1]][-2:] == ["tiny", "small"]


def test_what_a_table_does_not_say_is_said_below():
    measured = replace(record([0.1]), time_ms=0.1, gbps=3000.0, tflops=100.0)
    span, agrees, rate, host = describe_profile(profile_of(trace_of(KERNELS)), measured)
    assert "0.11 ms, of which kernels run for 0.1 and the device is idle for 0.01 ms" in span
    assert "The suite measures 0.1 ms; the profile is 10.0% longer: they differ" in agrees
    assert "3000 GB/s" in rate
    assert (
        "0.1 ms per call, 0.02 of it in CUDA's driver and runtime (4 launches), 0.01 in torch's operators, 0.07" in host
    )
    far = describe_profile(profile_of(trace_of(KERNELS)), replace(measured, time_ms=0.01))[1]
    assert "they differ so much that shares do not count either; profile again" in far
    near = replace(measured, time_ms=0.112)
    assert "they agree" in describe_profile(profile_of(trace_of(KERNELS)), near)[1]


def test_two_profiles_are_shown_side_by_side(capsys):
    slower = [(name, begin, 2 * duration, grid) for name, begin, duration, grid in KERNELS[:3]]
    found = profile_of(trace_of(KERNELS)), profile_of(trace_of([*slower, ("new", 200.0, 10.0, 1)]))
    _show_beside([("HEAD~1", found[0]), ("[b]", found[1])])
    printed = capsys.readouterr().out
    assert shown(printed).startswith("kernel adds, ms, HEAD~1 adds, ms, [b] ratio backward")
    rows = [line.split("│")[1:-1] for line in printed.splitlines() if "│" in line]
    assert [[word.strip() for word in row] for row in rows] == [
        ["backward", "0.07", "0.08", "x1.14"],
        ["forward", "0.03", "0.06", "x2"],
        ["new", "-", "0.01", "-"],
        ["all, from the first start to the last end", "0.11", "0.21", "x1.91"],
    ]


def test_names_of_kernels_are_short():
    assert short_name("void at::native::copy<4, at::native::A>(int, std::array<char*, 2>)") == "at::native::copy"
    for nameless in ("(anonymous namespace)", "<unnamed>"):
        assert short_name(f"void at::native::{nameless}::norm<float>(int, {nameless}::A)") == "at::native::norm"
    assert short_name("value_gated_chunks") == "value_gated_chunks"
    assert short_name("Memset (Device)") == "Memset"
    assert len(short_name("x" * 1000)) == 300


def test_operators_of_several_threads_take_no_longer_than_the_call():
    marks = [Event(CALL, "", 0.0, 100.0)]
    found = profile_of(Trace([], [], [Event("a", "", 0.0, 90.0, 1), Event("b", "", 5.0, 80.0, 2)], marks))
    assert (found.span_ms, found.busy_ms) == (0.1, 0.1)
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_operators_add_up_to_the_busy_time_unless_that_is_all_of_the_call():
    marks = [Event(CALL, "", 0.0, 100.0)]
    threads = [Event("a", "", 0.0, 90.0, 1), Event("b", "", 5.0, 80.0, 2), Event("c", "", 6.0, 70.0, 3)]
    data = profile_of(Trace([], [], threads, marks)).to_json()
    Profile.from_json({**data, "kernels": data["kernels"][:2]})
    with pytest.raises(ValueError, match=r"kernels: together they add 0.07 ms, but busy_ms is 0.1"):
        Profile.from_json({**data, "kernels": data["kernels"][2:]})
    with pytest.raises(ValueError, match=r"kernels: together they add 0 ms"):
        Profile.from_json({**data, "kernels": []})


def test_a_call_on_a_cpu_may_run_no_operator(tmp_path):
    found = profile_of(Trace([], [], [], [Event(CALL, "", 0.0, 100.0)]))
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found
    run = made_up("gla-340m", {"backend": "gla-triton", "seqlen": "2k"})
    run = replace(run, profiles={run.records[0].cell: found})
    assert "of which torch's operators take 0." in profiles_markdown(run)
    draw_profiles(run)


def test_time_that_is_covered_and_time_of_ones_own():
    events = [
        Event("a", "", 0.0, 10.0),
        Event("b", "", 2.0, 3.0),
        Event("c", "", 8.0, 4.0, 2),
        Event("d", "", 20.0, 1.0),
    ]
    assert covered(events, 0.0, 15.0) == 12.0
    assert covered(events, 5.0, 9.0) == 4.0
    assert {event.name: own for event, own in self_times(events)} == {"a": 7.0, "b": 3.0, "c": 4.0, "d": 1.0}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}']
)
def test_what_is_no_trace_is_named(text, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(GlabenchError, match=r"trace.json: no trace"):
        load_trace(path)


def test_a_kernel_that_does_nearly_all_is_the_sole_one():
    nearly_all = [("all", 0.0, 100.0, 1), ("little", 101.0, 2.0, 1)]
    assert profile_of(trace_of(nearly_all)).sole_kernel == "all"
    assert profile_of(trace_of(KERNELS)).sole_kernel is None
