"""Reports, comparisons and baselines of runs from unknown sources: shown, or refused in one line."""

import json
import os
import re
from dataclasses import replace

import pytest
from hostile import FIXED, ODD, keep, mutated_records, record_at
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from glabench.errors import UsageError
from glabench.records import Record, RunFolder
from glabench.records.metrics import METRICS, parse_metrics
from glabench.report import ci, verdicts
from glabench.report.describe import describe_environment, describe_settings
from glabench.report.tables import render_tables
from glabench.report.write import choose_drawn, make_page, make_view, write_report
from glabench.sweeps import load_sweep
from glabench.sweeps.load import dump_sweep
from glabench.verdicts.baseline import Baseline
from glabench.verdicts.engine import Side, compare_sides
from glabench.verdicts.findings import Limits
from glabench.verdicts.surroundings import differences

USUAL = parse_metrics(None)
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return RunFolder.create(tmp_path_factory.mktemp("runs") / "run", load_sweep("cpu-smoke"), {"cpu": "a CPU"})


@FIXED
@given(rows=mutated_records(), x=st.sampled_from(["seqlen", "heads", "head_dim", "chunk", "gate", "batch"]))
def test_odd_records_are_reported_or_refused(folder, rows, x):
    keep(folder, rows)
    try:
        run = folder.load()
    except UsageError:
        return
    if not run.records:
        return
    run = replace(run, sweep=replace(run.sweep, x=x))
    shown = [table.plain for width in (60, 160) for table in render_tables([run], METRICS, width, "gla-triton")]
    shown.append(make_page(make_view([run]), USUAL, choose_drawn(USUAL), "gla-triton"))
    assert not OBEYED.search("\n".join(shown))


@settings(FIXED, max_examples=60)
@given(ours=mutated_records(), theirs=mutated_records())
def test_odd_records_are_compared_or_refused(folder, ours, theirs):
    sides = []
    for name, rows in (("A", ours), ("B", theirs)):
        keep(folder, rows)
        try:
            sides.append(Side(name, [folder.records()]))
            found = compare_sides(sides[0], sides[-1], Limits.of(time=0.02), any_device=True)
        except UsageError:
            return
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(verdicts.terminal_report(found, 160))
    text = [captured.get(), verdicts.markdown(found, "Comparison"), ci.junit(found, ())]
    assert not OBEYED.search("\n".join(text))
    json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("label", "number", "count"), [("$\\frac{$", 1e-18, 2**62), ("[/nope]", 9e18, 1), ("\x1b]0;\x00\u202e", 1.0, 2**62)]
)
def test_a_whole_report_of_odd_but_valid_records_is_written(folder, label, number, count):
    rows = [record_at(1024), record_at(count) | {"backend": label, "gate": label, "time_ms": number}]
    rows[1] |= {"time_ms_p20": number, "peak_allocated_mib": -number, "heads": count, "status": "ok", "reason": label}
    rows.append(record_at(4096) | {"status": "oom", "time_ms": None, "reason": label})
    keep(folder, rows)
    run = folder.load()
    run = replace(run, sweep=replace(run.sweep, title=label, description=label))
    for path in write_report([run], folder.path, USUAL, label):
        assert path.stat().st_size > 0


def test_a_report_does_not_write_through_links_that_came_with_a_run(folder, tmp_path):
    keep(folder, [record_at(1024)])
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("report.md", "records.csv", "figure.png", "figure.svg"):
        (folder.path / name).unlink(missing_ok=True)
        (folder.path / name).symlink_to(victim)
    paths = write_report([folder.load()], folder.path, USUAL, None)
    assert victim.read_text() == "mine"
    assert not any(path.is_symlink() for path in paths)


def test_a_pipe_is_replaced_and_a_folder_refused_where_a_report_is_written(folder, tmp_path):
    keep(folder, [record_at(1024)])
    os.mkfifo(tmp_path / "report.md")
    (tmp_path / "figure.svg").mkdir()
    with pytest.raises(UsageError, match=r"--out: '.*figure.svg' is a folder"):
        write_report([folder.load()], tmp_path, USUAL, None)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["figure.svg", "report.md"]
    (tmp_path / "figure.svg").rmdir()
    assert all(path.is_file() for path in write_report([folder.load()], tmp_path, USUAL, None))


ENVIRONMENTS = st.one_of(
    ODD,
    st.dictionaries(
        st.sampled_from(["gpu", "cpu", "device", "packages", "settings", "commit", "code", "version"]), ODD
    ),
    st.fixed_dictionaries({"settings": st.dictionaries(st.sampled_from(["precision", "time_limit_s", "timing"]), ODD)}),
    st.fixed_dictionaries({"gpu": st.dictionaries(st.sampled_from(["name", "driver"]), ODD)}),
)


@settings(FIXED, max_examples=300)
@given(environment=ENVIRONMENTS)
def test_an_odd_environment_is_described_or_refused(folder, environment):
    keep(folder, [record_at(1024)])
    (folder.path / "environment.json").write_text(json.dumps(environment))
    try:
        run = folder.load()
        words = [describe_environment(run.environment), describe_settings(run), str(differences(run.environment, {}))]
        assert not OBEYED.search("\n".join(words))
    except UsageError as problem:
        words = str(problem)
        assert "environment.json: not an environment" in words
    finally:
        (folder.path / "environment.json").unlink()


@settings(FIXED, max_examples=60)
@given(
    rows=mutated_records(),
    changes=st.dictionaries(st.sampled_from(["environment", "sweep", "rounds", "revision", "format"]), ODD, max_size=2),
)
def test_an_odd_baseline_is_read_or_refused_by_name(folder, rows, changes):
    sweep = {"name": "guard", "toml": dump_sweep(load_sweep("guard"))}
    data = {"format": 2, "environment": {}, "sweep": sweep, "revision": None, "rounds": [rows]}
    path = folder.path / "baseline.json"
    path.write_text(json.dumps(data | changes))
    try:
        Baseline.load(path)
    except UsageError as problem:
        words = str(problem)
        assert words.startswith("--baseline: ")


@pytest.mark.parametrize("revision", ["main", "--upload-pack=x", "WORKTREE", "HEAD~1", 3])
def test_a_baseline_names_the_code_that_it_came_from_by_its_hash_alone(folder, revision):
    path = folder.path / "baseline.json"
    Baseline(load_sweep("guard"), {}, "0123456789abcdef", [[Record.from_json(record_at(1024))]]).save(path)
    assert Baseline.load(path).revision == "0123456789abcdef"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": revision}))
    with pytest.raises(UsageError, match=r"revision.* the hash of a commit"):
        Baseline.load(path)
