"""Profiles: from traces of a GPU as torch's profiler writes them, kept in records, shown in tables and figures."""

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
from in_process import glabench, shown
from reports import made_up
from simulated import record
from traces import KERNELS, SMALL, complete, trace_of

from glabench import load
from glabench.cli.profile import _show_beside
from glabench.errors import GlabenchError, UsageError
from glabench.profiling.profile import CALL, profile_of, short_name, with_occupancy
from glabench.profiling.trace import Event, Trace, covered, load_trace, self_times
from glabench.records import RunFolder
from glabench.records.metrics import TIME
from glabench.records.profile import Part, Profile, Work, profile_line, read_profile
from glabench.report.kernel_roof import call_dots, draw_kernel_roof, kernel_dots, kernel_roof, kernel_roof_markdown
from glabench.report.profiled import CUT_OFF, describe_profiled
from glabench.report.profiles import describe_profile, draw_profiles, profile_table, profiles_markdown
from glabench.report.write import write_report
from glabench.sweeps import Cell, Parameters

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


def test_a_profile_of_a_cell_is_the_same_when_its_line_is_read_back():
    cell = Cell("linear-torch", "linear", "fwd", 1, 64, "bf16", Parameters(SMALL), "cuda")
    found = with_occupancy(profile_of(trace_of(KERNELS)), "90")
    assert read_profile(profile_line(cell, found)) == (cell, found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "it needs the keys cell and profile"),
        ('{"cell": {}, "profile": {}}', "it has no"),
        ("[3]", "it needs the keys"),
    ],
)
def test_a_line_that_is_no_profile_is_named(line, message, tmp_path):
    (tmp_path / "records.jsonl").touch()
    (tmp_path / "profiles.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=f"profiles.jsonl: line 1 is not a profile: .*{message}"):
        RunFolder(tmp_path).profiles()


def test_of_several_profiles_of_a_cell_the_last_one_counts(tmp_path):
    cells = [Cell("linear-torch", "linear", "fwd", 1, seqlen, "bf16", Parameters(SMALL), "cuda") for seqlen in (1, 2)]
    found = [profile_of(trace_of(KERNELS[:number])) for number in (1, 2, 3)]
    for cell, each in zip([cells[0], cells[1], cells[0]], found, strict=True):
        RunFolder(tmp_path).add_profile(cell, each)
    assert RunFolder(tmp_path).profiles() == {cells[0]: found[2], cells[1]: found[1]}


def test_a_profile_that_a_kill_cut_off_is_made_anew(tmp_path):
    cell = Cell("linear-torch", "linear", "fwd", 1, 64, "bf16", Parameters(SMALL), "cuda")
    line = profile_line(cell, profile_of(trace_of(KERNELS)))
    (tmp_path / "profiles.jsonl").write_text(line[:-9])
    folder = RunFolder(tmp_path)
    assert folder.profiles() == {}
    folder.add_profile(cell, profile_of(trace_of(KERNELS)))
    assert (tmp_path / "profiles.jsonl").read_text() == line + "\n"


def test_profiles_that_are_no_file_are_named(tmp_path):
    (tmp_path / "profiles.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"profiles.jsonl: is no regular file; remove it"):
        RunFolder(tmp_path).profiles()


@pytest.fixture
def two_profiles(tmp_path):
    """A copy of a stored run of `glabench profile` with two profiles of its five."""
    folder = tmp_path / "run"
    copytree(RESULTS / "h200-profile-340m", folder)
    lines = (folder / "profiles.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "profiles.jsonl").write_bytes(b"".join(lines[:2]))
    return folder


@pytest.mark.parametrize(
    ("whole", "part", "lacking", "is_cut"),
    [
        (2, 0, "No profile of 3 of 5", False),
        (1, 99, "No profile of 4 of 5", True),
        (0, 99, "No profile of 5 of 5", True),
    ],
)
def test_a_report_says_what_profiles_that_were_cut_off_leave_out(whole, part, lacking, is_cut, two_profiles):
    file = two_profiles / "profiles.jsonl"
    lines = [*file.read_bytes().splitlines(keepends=True), b""]
    file.write_bytes(b"".join(lines[:whole]) + lines[whole][:part])
    code, _, err = glabench(two_profiles, "report", ".")
    page = (two_profiles / "report.md").read_text()
    assert code == 0
    assert page.count("From the first kernel's start") == whole
    assert (CUT_OFF in err, f"\n- {CUT_OFF}" in page) == (is_cut, is_cut)
    assert f"{lacking} timed cells: " in err
    assert f"\n- {lacking} timed cells: " in page


def test_a_broken_profile_before_others_is_a_mistake(two_profiles):
    file = two_profiles / "profiles.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first[:99] + b"\n" + second)
    code, _, err = glabench(two_profiles, "report", ".")
    assert code == 2
    assert "profiles.jsonl: line 1 is not a profile" in err


def test_a_whole_run_lacks_no_profile_and_one_of_another_command_need_not_have_all():
    for name in ("h200-profile-340m", "h200-chunk-sweep", "h100-profile-340m"):
        assert describe_profiled(load(RESULTS / name)) == []


def test_a_report_names_the_profile_of_a_cell_that_was_not_measured(two_profiles):
    lines = (two_profiles / "records.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"backend": "mamba2"' not in line]
    assert len(kept) == 4
    (two_profiles / "records.jsonl").write_text("".join(kept))
    code, _, err = glabench(two_profiles, "report", ".")
    assert code == 0
    assert "No record of 1 cell with a profile: mamba2 fwd+bwd" in err
    assert "\n- No record of 1 cell with a profile: mamba2 fwd+bwd" in (two_profiles / "report.md").read_text()


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


def test_a_profile_is_the_same_when_it_is_read_back():
    found = profile_of(trace_of(KERNELS))
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("of", "key", "value", "message"),
    [
        ("kernel", "grid", [4, -1, 1], "kernels[0].grid[1]: expected int >= 1"),
        ("kernel", "threads", -32, "kernels[0].threads: expected int >= 1"),
        ("kernel", "calls", 0, "kernels[0].calls: expected int >= 1"),
        ("kernel", "registers", -1, "kernels[0].registers: expected int >= 0"),
        ("kernel", "bytes", -1, "kernels[0].bytes: expected int >= 0"),
        ("host", "launches", -1, "host.launches: expected int >= 0"),
        ("profile", "calls", 0, "calls: expected int >= 1"),
        ("profile", "busy_ms", 0.112, "busy_ms: 0.112 is more than span_ms, 0.11"),
        ("profile", "span_ms", 0.0995, None),
        ("profile", "busy_ms", 0.104, None),
        ("profile", "busy_ms", 0.08, "kernels: together they add 0.1 ms, but busy_ms is 0.08 (allowed: 5% apart)"),
        ("profile", "kernels", [], "kernels: there are none, but a call on a GPU runs one at least"),
        ("kernel", "added_ms", 0.01, "kernels: together they add 0.08 ms, but busy_ms is 0.1"),
        ("kernel", "added_ms", 0.026, None),
        ("kernel", "flops", 10**13, "kernels[0].flops: 10000000000000 in 0.03 ms is beyond any device"),
        ("kernel", "flops", 10**12, None),
        (
            "kernel",
            "bytes",
            10**11,
            "kernels[0].bytes: 100000000000 in 0.03 ms is beyond any device (allowed: 1e+15 B/s)",
        ),
        ("kernel", "bytes", 10**10, None),
        ("kernel", "counters", {"dram_pct": 5000.0}, "kernels[0].counters.dram_pct: 5000 % (allowed: 0 to 1000)"),
        ("kernel", "counters", {"l2_hit_pct": -1.0}, "kernels[0].counters[...]: expected float >= 0"),
        ("kernel", "counters", {"l2_hit_pct": 107.7, "dram_bytes": 1e9, "tensor_pct": None}, None),
        (
            "part",
            "flops",
            10**13,
            "parts[0].flops: 10000000000000 in 0.01 ms is beyond any device (allowed: 1e+17 FLOP/s)",
        ),
        ("part", "bytes", 10**11, "parts[0].bytes: 100000000000 in 0.01 ms is beyond any device"),
        ("part", "bytes", 10**9, None),
    ],
)
def test_impossible_values_are_refused_by_name(of, key, value, message):
    found = replace(profile_of(trace_of(KERNELS)), parts=(Part("across chunks", 0.01),))
    data = json.loads(json.dumps(found.to_json()))
    owner = {"kernel": data["kernels"][0], "host": data["host"], "part": data["parts"][0], "profile": data}[of]
    owner[key] = value
    if message is None:
        assert json.loads(json.dumps(Profile.from_json(data).to_json())) == data
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            Profile.from_json(data)


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


@pytest.fixture
def measured():
    """A run with ceilings and a profile, of which a kernel's work is known."""
    run = made_up("gla-340m", {"backend": "gla-triton", "seqlen": "2k"}, copy_gbps=4000.0, product_tflops=800.0)
    found = profile_of(trace_of(KERNELS)).with_work({"forward": Work(60 * 10**6, 3 * 10**9)})
    return replace(run, profiles={run.records[0].cell: found})


def test_kernels_whose_work_is_known_are_dots_below_the_roof(measured, tmp_path):
    """In 0.03 ms 60 MB and 3 GFLOP: 2 TB/s, half of a copy's."""
    ((name, dot),) = kernel_dots(measured).items()
    assert name == "gla-triton: forward"
    assert (dot.intensity, dot.tflops) == (50.0, pytest.approx(100.0))
    assert "50 operations per byte, so the roof of memory is nearer; 50% of it" in kernel_roof_markdown(measured)
    axes = draw_kernel_roof(measured).axes[0]
    assert [line.get_label() for line in axes.lines[1:]] == ["gla-triton: forward"]
    assert "of the roof |\n" in profiles_markdown(measured)
    assert "| 2000 | 100 | 50% |" in profiles_markdown(measured)
    assert "roof.png" in {path.name for path in write_report([measured], tmp_path, [TIME], None)}


def test_whole_calls_are_dots_by_the_ops_own_work(measured):
    run = replace(measured, records=[replace(record, gbps=500.0, tflops=80.0) for record in measured.records])
    ((name, dot),) = call_dots(run).items()
    assert name == "gla-triton: whole call"
    assert (dot.intensity, dot.tflops) == (160.0, 80.0)
    axes = draw_kernel_roof(run).axes[0]
    assert [line.get_label() for line in axes.lines[1:]] == ["gla-triton: forward", name]
    assert [line.get_markerfacecolor() == "none" for line in axes.lines[1:]] == [False, True]
    assert f"- {name}: 160 operations per byte, so the roof of memory is nearer; 12% of it" in kernel_roof_markdown(run)
    unknown = {cell: found.with_work({}) for cell, found in run.profiles.items()}
    assert kernel_roof(replace(run, profiles=unknown)) is not None


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", r"a\|b"),
        ("`a`", r"\`a\`"),
        ("<b>a</b>", r"\<b>a\</b>"),
        ("[a](b)", r"\[a](b)"),
        ("*a* ~b~ $c$ &d;", r"\*a\* \~b\~ \$c\$ \&d;"),
        ("a\\|b", r"a\\\|b"),
        ("__a_b__", r"\__a_b\_\_"),
        ("_outputs", "_outputs"),
    ],
)
def test_names_are_no_markup_in_a_report(name, shown, measured):
    ((cell, found),) = measured.profiles.items()
    renamed = replace(found, kernels=(replace(found.kernels[0], name=name), *found.kernels[1:]))
    cell = replace(cell, backend=name)
    run = replace(measured, profiles={cell: renamed})
    page = profiles_markdown(run)
    assert f"**{shown} fwd" in page
    assert f"\n| {shown} | 1 |" in page
    assert f"- {shown}: {shown}: 50 operations" in kernel_roof_markdown(run)


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_long_names_are_short_in_figures_and_whole_in_tables(measured):
    ((cell, found),) = measured.profiles.items()
    names = ["a" * 300, "a" * 150 + "b" * 150, "c" * 52]
    kernels = tuple(replace(found.kernels[0], name=name) for name in names)
    cell = replace(cell, backend="d" * 300, parameters=Parameters({**SMALL, "gate": "e" * 300}))
    run = replace(measured, profiles={cell: replace(found, kernels=kernels)})
    figure = draw_profiles(run)
    assert legend_of(figure)[:3] == ["a" * 26 + "…" + "a" * 25, "a" * 26 + "…" + "b" * 25, "c" * 52]
    (label,) = figure.axes[0].get_yticklabels()
    assert [len(line) for line in label.get_text().split("\n")] == [52, 80]
    assert [len(name) for name in legend_of(draw_kernel_roof(run))] == [52, 52, 52]
    assert all(f"| {name} |" in profiles_markdown(run) for name in names)


def test_figures_show_the_kernels_that_add_the_most(measured):
    ((cell, found),) = measured.profiles.items()
    order = [number * 7 % 5000 for number in range(5000)]
    kernels = tuple(replace(found.kernels[0], name=f"k{number}", added_ms=1.0 + number) for number in order)
    run = replace(measured, profiles={cell: replace(found, kernels=kernels)})
    largest = [f"k{number}" for number in order if number >= 4988]
    figure = draw_profiles(run)
    assert legend_of(figure) == [*largest, "others", "idle"]
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == pytest.approx(
        sum(kernel.added_ms for kernel in kernels) + found.span_ms - found.busy_ms
    )
    assert legend_of(draw_kernel_roof(run)) == [f"gla-triton: k{number}" for number in range(4999, 4987, -1)]
    assert len(profile_table(found)[1]) == len(found.kernels)


def test_without_ceilings_or_known_work_there_is_no_roof(measured, tmp_path):
    unknown = {cell: found.with_work({"forward": Work(10**6)}) for cell, found in measured.profiles.items()}
    bare = [replace(record, copy_gbps=None) for record in measured.records]
    for run in (replace(measured, profiles=unknown), replace(measured, records=bare)):
        assert kernel_roof(run) is None
        assert kernel_roof_markdown(run) == ""
        assert "roof.png" not in {path.name for path in write_report([run], tmp_path, [TIME], None)}


def test_a_kernel_that_does_nearly_all_is_the_sole_one():
    nearly_all = [("all", 0.0, 100.0, 1), ("little", 101.0, 2.0, 1)]
    assert profile_of(trace_of(nearly_all)).sole_kernel == "all"
    assert profile_of(trace_of(KERNELS)).sole_kernel is None
