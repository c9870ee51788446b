"""Profiles in a run's folder: read back as they were, refused if no call can have them, named if some are missing."""

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
from in_process import glabench
from traces import KERNELS, SMALL, trace_of

from glabench import load
from glabench.errors import UsageError
from glabench.profiling.profile import profile_of, with_occupancy
from glabench.records import RunFolder
from glabench.records.profile import Part, Profile, profile_line, read_profile
from glabench.report.profiled import CUT_OFF, describe_profiled
from glabench.sweeps import Cell, Parameters

RESULTS = Path(__file__).parents[2] / "results"


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


def test_a_report_of_several_runs_says_whose_profiles_it_leaves_out(two_profiles):
    other = RESULTS / "h200-profile-fig2"
    code, _, err = glabench(two_profiles, "report", ".", str(other), "--out", "both", "-q")
    assert code == 0, err
    page = (two_profiles / "both" / "report.md").read_text()
    assert f"are shown in reports of one run alone: run, {other.name}." in page
    assert "profile.png" not in page


def test_a_report_names_the_profile_of_a_cell_that_was_not_measured(two_profiles):
    lines = (two_profiles / "records.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"backend": "mamba2"' not in line]
    assert len(kept) == 4
    (two_profiles / "records.jsonl").write_text("".join(kept))
    code, _, err = glabench(two_profiles, "report", ".")
    assert code == 0
    assert "No record of 1 cell with a profile: mamba2 fwd+bwd" in err
    assert "\n- No record of 1 cell with a profile: mamba2 fwd+bwd" in (two_profiles / "report.md").read_text()


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
