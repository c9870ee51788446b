"""Change points: the course of cells over runs, and `glabench history`."""

import json
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from in_process import glabench
from reports import H200, made_up

from glabench.errors import UsageError
from glabench.records import RunFolder
from glabench.records.metrics import BY_NAME, TIME
from glabench.report.history import draw_history, drawn_of
from glabench.verdicts.history import Point, changes_in, common_changes, history_of

START = datetime(2026, 1, 1, tzinfo=UTC)


def points_of(values, **noise):
    return [Point(f"run-{i}", START + timedelta(days=i), None, value, **noise) for i, value in enumerate(values)]


def courses_of(runs, metric=TIME):
    return history_of(runs, metric, 0.03).courses


def noisy(levels, share, seed):
    draw = random.Random(seed)
    return [level * draw.gauss(1, share) for level in levels]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.0], []),
        ([1.0, 1.02], []),
        ([1.0, 1.2], [(1, 1.2)]),
        ([1.0, 1.0, 1.0, 0.8, 0.8], [(3, 0.8)]),
        ([1.0, 1.0, 1.5, 1.5, 1.2, 1.2], [(2, 1.5), (4, 0.8)]),
        ([2.0, 2.0, 2.0, 2.2], [(3, 1.1)]),
        ([1.0, 1.01, 1.02, 1.01, 1.0], []),
    ],
)
def test_levels_end_where_values_change(values, expected):
    found = changes_in(points_of(values), 0.03)
    assert [(int(change.after.run[4:]), pytest.approx(change.ratio)) for change in found] == expected


def test_noise_is_no_change():
    series = [changes_in(points_of(noisy([1.0] * 20, 0.01, seed)), 0.03) for seed in range(200)]
    assert sum(bool(changes) for changes in series) <= 4


@pytest.mark.parametrize("noise", ["own_noise", "assumed_noise"])
@pytest.mark.parametrize("count", [2, 3])
def test_known_noise_of_few_runs_is_no_change_and_large_changes_are(noise, count):
    series = [noisy([1.0] * count, 0.02, seed) for seed in range(300)]
    assert sum(bool(changes_in(points_of(values, **{noise: 0.02}), 0.03)) for values in series) <= 6
    slowed = [[*values[:-1], 1.15 * values[-1]] for values in series]
    assert sum(bool(changes_in(points_of(values, **{noise: 0.02}), 0.03)) for values in slowed) >= 290


def test_noise_that_runs_know_of_themselves_counts_in_long_courses_too():
    values = [1.0, 1.001, 1.0, 1.001, 1.0, 1.06]
    assert changes_in(points_of(values), 0.03)
    assert changes_in(points_of(values, assumed_noise=0.03), 0.03)
    assert not changes_in(points_of(values, own_noise=0.03), 0.03)


def test_a_change_is_found_in_noise():
    levels = [1.0] * 10 + [1.06] * 10
    series = [changes_in(points_of(noisy(levels, 0.01, seed)), 0.03) for seed in range(200)]
    found = [[int(change.after.run[4:]) for change in changes] for changes in series]
    assert sum(len(places) == 1 and abs(places[0] - 10) <= 1 for places in found) >= 190


def runs_of(*factors, environments=None, changes=None):
    """Runs a day apart, whose times are those of the first times a factor, or what a function of the cell says."""
    found = []
    for day, factor in enumerate(factors):
        environment = (environments or {}).get(day, H200) | {"code": {"commit": f"{day}" * 40}}
        run = made_up("gla-340m", changes, name=f"run-{day}", environment=environment)
        times = [record.time_ms * (factor(record.cell) if callable(factor) else factor) for record in run.records]
        at = f"2026-01-{day + 1:02}T00:00:00+00:00"
        records = [replace(r, time_ms=ms, started_at=at) for r, ms in zip(run.records, times, strict=True)]
        found.append(replace(run, records=records))
    return found


def slower(backend):
    return lambda cell: 1.2 if cell.backend == backend else 1.0


def test_courses_are_in_the_order_of_time_and_name_commits():
    runs = runs_of(1.0, 1.0, slower("gla-triton"))
    courses = courses_of(runs[::-1])
    changed = [course for course in courses if course.changes]
    assert {course.cell.backend for course in changed} == {"gla-triton"}
    (change,) = changed[0].changes
    assert (change.before.run, change.after.run, change.after.commit) == ("run-1", "run-2", "2" * 40)
    assert change.ratio == pytest.approx(1.2)
    assert not common_changes(courses)


def test_what_nearly_all_cells_have_in_common_is_said_apart():
    ((before, after, ratio),) = common_changes(courses_of(runs_of(1.0, 1.0, 1.1)))
    assert (before, after) == ("run-1", "run-2")
    assert ratio == pytest.approx(1.1)


def test_devices_have_courses_of_their_own():
    other = {"device": "cuda", "gpu": {"name": "NVIDIA H100"}}
    courses = courses_of(runs_of(1.0, 2.0, 1.0, environments={1: other}))
    assert {course.device for course in courses} == {"NVIDIA H200"}
    assert not any(course.changes for course in courses)


def test_runs_in_folders_of_the_same_name_are_told_apart():
    runs = [replace(r, path=Path(p)) for r, p in zip(runs_of(1.0, 1.0, 1.1), ("x/a/run", "x/b/run", "c"), strict=True)]
    courses = courses_of(runs)
    assert [point.run for point in courses[0].points] == ["a/run", "b/run", "c"]
    assert [tick.get_text() for tick in draw_history(courses, TIME).axes[0].get_xticklabels()] == [
        "a/run",
        "b/run",
        "c",
    ]
    ((before, after, _),) = common_changes(courses)
    assert (before, after) == ("b/run", "c")


def with_fields(run, **fields):
    return replace(run, records=[replace(record, **fields) for record in run.records])


@pytest.mark.parametrize(
    "starts",
    [
        ("2026-01-01T01:30:00+02:00", "2026-01-01T00:00:00Z", "2025-12-31T23:30:00-01:00"),
        ("2026-01-01T00:59:59", "2026-01-01T03:00:00+02:00", "2026-01-01T01:00:01Z"),
    ],
)
def test_runs_are_in_the_order_of_time_in_all_time_zones(starts):
    runs = [with_fields(run, started_at=at) for run, at in zip(runs_of(1.0, 1.0, 1.0), starts, strict=True)]
    for course in courses_of(runs[::-1]):
        assert [point.run for point in course.points] == ["run-0", "run-1", "run-2"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"started_at": None}, "without a readable started_at"),
        ({"started_at": "yesterday"}, "without a readable started_at"),
        ({"started_at": "0001-01-01T00:00:00+02:00"}, "without a readable started_at"),
        ({"status": "inaccurate"}, "inaccurate"),
        ({"status": "unsupported", "time_ms": None}, "unsupported"),
        ({"time_ms": None}, "without a time"),
    ],
)
def test_records_that_cannot_be_used_are_counted_by_reason(fields, reason):
    first, second, other = runs_of(1.0, 1.0, 1.5)
    found = history_of([first, second, with_fields(other, **fields)], TIME, 0.03)
    assert found.left_out == {reason: len(other.records)}
    assert not any(course.changes for course in found.courses)


def test_without_a_readable_start_the_error_says_so():
    runs = [with_fields(run, started_at=None) for run in runs_of(1.0, 1.0)]
    with pytest.raises(UsageError, match=f"left out {2 * len(runs[0].records)} records: .* without a readable started"):
        courses_of(runs)


def is_change(factor, samples, metric=TIME, scale=1.0):
    """Whether the second of two runs counts as changed, if the samples of both are these shares of their medians."""
    low, high = (sorted(samples)[len(samples) * part // 5] for part in (1, 4))
    mixed = random.Random(0).sample(samples, len(samples))

    def sampled(record):
        ms = scale * record.time_ms
        percentiles = {"time_ms_p20": low * ms, "time_ms_p80": high * ms}
        return replace(
            record, time_ms=ms, samples_ms=tuple(share * ms for share in mixed), tflops=1 / ms, **percentiles
        )

    runs = [replace(run, records=[sampled(record) for record in run.records]) for run in runs_of(1.0, factor)]
    return all(course.changes for course in courses_of(runs, metric))


@pytest.mark.parametrize("metric", ["time", "tflops"])
def test_few_and_scattered_samples_need_a_larger_change(metric):
    narrow, wide = ([1 + spread * (place - 10) / 10 for place in range(21)] for spread in (0.01, 0.2))
    assert is_change(1.06, narrow, BY_NAME[metric])
    assert not is_change(1.06, wide, BY_NAME[metric])
    assert is_change(1.06, wide * 40, BY_NAME[metric])


def test_calls_of_microseconds_need_a_larger_change():
    assert is_change(1.06, [1.0] * 21)
    assert not is_change(1.06, [1.0] * 21, scale=1e-4)


def test_a_copy_of_a_run_counts_once():
    first, second = runs_of(1.0, 1.1)
    found = history_of([first, second, replace(first, path=Path("copy/run-0"))], TIME, 0.03)
    assert found.left_out == {"copied from another run": len(first.records)}
    assert all(len(course.points) == 2 for course in found.courses)


def test_ways_of_timing_have_courses_of_their_own_of_times_but_not_of_memory():
    ways = ("cold, events", "hot, events")
    runs = [with_fields(run, timing=ways[day % 2]) for day, run in enumerate(runs_of(1.0, 0.5, 1.0, 0.5))]
    courses = courses_of(runs)
    assert {(course.timing, len(course.points)) for course in courses} == {(way, 2) for way in ways}
    assert not any(course.changes for course in courses)
    assert {(course.timing, len(course.points)) for course in courses_of(runs, BY_NAME["peak"])} == {(None, 4)}
    labels = [line.get_label() for line in draw_history(courses, TIME).axes[0].lines[:-1]]
    assert all(label.endswith(("(cold, events)", "(hot, events)")) for label in labels)


def test_without_a_common_cell_there_is_no_history():
    runs = [*runs_of(1.0), *runs_of(1.0, changes={"batch": "1"})]
    with pytest.raises(UsageError, match="no cell has a value of time in two of the runs on one device"):
        courses_of(runs)


def test_a_figure_shows_what_changed_most_and_where():
    courses = courses_of(runs_of(1.0, 1.0, slower("gla-triton")))
    assert {course.cell.backend for course in drawn_of(courses)} == {"gla-triton"}
    axes = draw_history(courses, TIME).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["run-0", "run-1", "run-2"]
    assert all(line.get_ydata()[-1] == pytest.approx(1.2) for line in axes.lines[:-1])
    (ring,) = {tuple(each.get_offsets()[0]) for each in axes.collections}
    assert ring == pytest.approx((2, 1.2))


def test_other_metrics_have_courses_too():
    assert len(courses_of(runs_of(1.0, 1.0), BY_NAME["peak"])) == len(runs_of(1.0)[0].records)


def store(runs, path):
    for run in runs:
        folder = RunFolder.create(path / run.name, run.sweep, run.environment)
        for record in run.records:
            folder.append(record)


@pytest.fixture
def stored(tmp_path):
    """Three runs in a folder; the kernel is slower in the last one."""
    store(runs_of(1.0, 1.0, slower("gla-triton")), tmp_path / "all")
    return tmp_path


def test_the_command_shows_between_which_commits_a_level_ended(stored, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = glabench(stored, "history", "all", "--figure", "history.png", "--json", "history.json")
    assert code == 0, err
    rows = [line for line in out.splitlines() if "gla-triton" in line]
    assert rows
    assert all("run-1 (1111111111) to run-2 (2222222222)" in row and "x1.2" in row for row in rows)
    assert "sdpa" not in out
    assert (stored / "history.png").stat().st_size > 1000
    found = json.loads((stored / "history.json").read_text())
    assert {course["cell"]["backend"] for course in found if course["changes"]} == {"gla-triton"}
    code, out, _ = glabench(stored, "history", "all/run-0", "all/run-2", "--all")
    assert code == 0
    assert "sdpa-flash" in out


def test_the_command_says_what_it_left_out(stored):
    store([with_fields(runs_of(1.0)[0], status="inaccurate")], stored / "more")
    code, out, err = glabench(stored, "history", "all", "more", "--json", "history.json")
    assert code == 0
    assert f"left out {len(runs_of(1.0)[0].records)} records" in err
    assert "timing" not in out
    points = json.loads((stored / "history.json").read_text())[0]["points"]
    assert [point["run"] for point in points] == ["all/run-0", "run-1", "run-2"]
    assert points[0]["at"] == "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize("arguments", [(), ("--all",)])
def test_the_command_shows_the_timing_where_it_tells_courses_apart(arguments, stored, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    runs = [with_fields(run, timing="hot, events", run_id="hot") for run in runs_of(1.0, 1.2)]
    store([replace(run, path=Path(f"hot-{i}")) for i, run in enumerate(runs)], stored / "hot")
    code, out, _ = glabench(stored, "history", "all", "hot", *arguments)
    assert code == 0
    assert "timing" in out
    assert "hot, events" in out
    assert "unknown" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all/run-0",), "name at least two runs"),
        (("missing",), "RUN: 'missing' is not a run folder"),
        (("missing", "all/run-0"), "RUN: 'missing' is not a run folder"),
        (("all", "--metric", "tim"), "--metric: 'tim' is unknown"),
        (("all", "--figure", "x.txt"), "--figure: 'x.txt' must end in"),
    ],
)
def test_what_has_no_history_is_said(arguments, message, stored):
    code, _, err = glabench(stored, "history", *arguments)
    assert code == 2
    assert message in err
