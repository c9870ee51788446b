"""Revisions in a git repository: comparing them, checks against a revision or a baseline, saving baselines."""

import json
import re
import shutil
import subprocess
from itertools import count
from pathlib import Path

import in_process
import pytest
from in_process import PLUGIN

from glabench.errors import UsageError
from glabench.records import RunFolder
from glabench.records.environment import device_name
from glabench.scheduling.folders import rounds_in
from glabench.scheduling.revisions import parse_range, worker_variables
from glabench.sweeps import load_sweep
from glabench.verdicts import CONFIRMING_ROUNDS
from glabench.verdicts.occasions import Occasions

SWEEP = """
title = "waiting"
[axes]
seqlen = "16"
batch = 1
heads = 1
head_dim = 16
dtype = "fp32"
pass = "fwd"
[[backends]]
name = "steady"
"""
MEASURING = ["--sweep", "waiting.toml", "--plugin", "steady.py", "--device", "cpu"]
COMPARE = ["compare", "--rev", "WORKTREE", *MEASURING, "--rounds", "2"]
CHECK = ["check", "--rev", "main", *MEASURING]
CHECK_FILE = ["check", "--baseline", "baseline.json", "--plugin", "steady.py"]
# A backend that is as correct as the kernels that it imports.
OF_KERNELS = """
import os
from glabench.backends import Backend

class OfKernels(Backend):
    name, op, title = "steady", "linear", "as right as the kernels"

    def launch(self, inputs, cell):
        return "compiled into " + os.path.basename(os.environ["TRITON_CACHE_DIR"])

    def bind(self, inputs, cell):
        from gla_kernels import unaware_chunk_linear_attn
        from gla_kernels.factor import FACTOR
        return lambda: FACTOR * unaware_chunk_linear_attn(inputs["q"], inputs["k"], inputs["v"])[0]

BACKENDS = [OfKernels]
"""
KERNELS = Path(__file__).parents[2] / "kernels/gla_kernels"
# Busy only the first time that it is called.
BUSY_ONCE = '0.1 if __import__("os").path.exists("was-busy") else [2.5, __import__("os").mkdir("was-busy")][0]'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository with a committed plugin, and a baseline of it."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "steady.py").write_text(PLUGIN)
    (folder / "waiting.toml").write_text(SWEEP)
    (folder / ".gitignore").write_text("runs/\nbaseline.json\nwas-busy\n__pycache__/\n")
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder)
    save = ["baseline", "save", "waiting.toml", "--plugin", "steady.py", "--out", "baseline.json", "--rounds", "2"]
    assert in_process.glabench(folder, *save, "--device", "cpu")[0] == 0
    shutil.rmtree(folder / "runs")
    return folder


@pytest.fixture
def repository(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def run(repository):
    """Runs a command in the repository, in this process; gives (exit code, stdout, stderr)."""
    return lambda *arguments: in_process.glabench(repository, *arguments)


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True).stdout


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")


def change(folder, name, value):
    """Changes a value that the plugin says from now on, and commits nothing."""
    file = folder / "steady.py"
    before = {"ms": "4.0", "error": "0.001", "first_call_s": "0.1"}[name]
    text = file.read_text()
    assert f'"{name}": {before}' in text
    file.write_text(text.replace(f'"{name}": {before}', f'"{name}": {value}'))


def run_names(folder):
    return sorted(path.name for path in folder.iterdir())


# Names and turns


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("main..HEAD", ("main", "HEAD")),
        ("HEAD~2..WORKTREE", ("HEAD~2", "WORKTREE")),
        ("WORKTREE", ("HEAD", "WORKTREE")),
        ("main..", ("main", "HEAD")),
        ("..feature", ("HEAD", "feature")),
    ],
)
def test_a_range_names_two_revisions(text, pair):
    assert parse_range(text) == pair


@pytest.mark.parametrize("text", ["", ".."])
def test_a_range_of_nothing_is_refused(text):
    with pytest.raises(UsageError, match="--rev"):
        parse_range(text)


def test_a_trees_kernels_come_before_what_was_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert worker_variables(tmp_path)["PYTHONPATH"] == f"{tmp_path}/kernels:elsewhere"


# compare --rev


def test_a_slower_working_tree_is_found_and_nothing_is_left_behind(run, repository):
    change(repository, "ms", 6.0)
    code, stdout, stderr = run(*COMPARE, "--json", "-", "--markdown", "c.md", "--figure", "c.pdf")
    assert code == 0, stderr
    found = json.loads(stdout)
    assert found["verdicts"] == {"slower": 1}
    assert found["findings"][0]["ratio"] == pytest.approx(1.5, rel=0.02)
    assert [found["base"].split()[0], found["new"].split()[0]] == ["HEAD", "WORKTREE"]
    assert found["notes"] == []
    assert "slower" in (repository / "c.md").read_text()
    assert (repository / "c.pdf").stat().st_size > 0
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    (folder,) = (repository / "runs").iterdir()
    assert run_names(folder) == ["base-1", "base-2", "new-1", "new-2"]
    # Back and forth, so that steady drift affects both sides equally.
    assert [line.split()[1] for line in stderr.splitlines() if line[0] == "["] == ["base-1", "new-1", "new-2", "base-2"]
    code, stdout, stderr = run("compare", folder, "--json", "-", "--fail-on", "slower")
    assert code == 1, stderr
    assert json.loads(stdout) == found


def test_identical_code_is_said_to_be_so_and_measured_all_the_same(run, repository):
    (repository / "README").write_text("a change that no worker sees")
    code, stdout, _ = run(*COMPARE, "--fail-on", "slower,failed,inaccurate")
    assert code == 0
    assert "the measured code (kernels and plugins) is identical on both sides" in stdout
    assert re.search("1 (same|not slower)", stdout)


def test_rounds_of_one_version_are_compared_as_sides(run, repository):
    for name in ("a", "b"):
        save = ["baseline", "save", "waiting.toml", "--plugin", "steady.py", "--out", f"{name}.json", "--runs", name]
        assert run(*save, "--rounds", "2")[0] == 0
    code, stdout, _ = run("compare", "a", "b", "--same-within", "5%")
    assert code == 0
    assert "1 same" in stdout
    assert "spread between occasions assumed: 1.0%" in stdout
    assert "both sides are the same run" not in stdout
    assert "both sides are the same run" in run("compare", "a", "./a")[1]


def test_runs_of_the_same_sweep_and_day_are_no_rounds(run, repository):
    for name in ("a/guard-20260101-101500", "a/guard-20260101-112000", "b/round-1", "b/round-2", "b/round-10"):
        RunFolder.create(repository / name, load_sweep("cpu-smoke"), {})
    assert [folder.path.name for folder in rounds_in(repository / "b")] == ["round-1", "round-2", "round-10"]
    code, _, stderr = run("compare", "a", "b")
    assert code == 2
    assert "'a' holds runs that are not rounds of one measurement (NAME-1, NAME-2, ...)" in stderr


def test_runs_without_a_common_cell_cannot_be_compared(run):
    for name, seqlen in (("one", 16), ("two", 32)):
        assert run("run", "waiting.toml", "--plugin", "steady.py", "--seqlen", seqlen, "--out", name)[0] == 0
    code, stdout, stderr = run("compare", "one", "two")
    assert (code, stdout) == (2, "")
    assert "nothing to compare: no cell is on both sides" in stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rev", "nothing..HEAD"], "'nothing' is neither a revision of"),
        (["--rev", "--help..HEAD"], "is neither a revision of"),
        (["--rev", "HEAD", "one", "two"], "either run folders or --rev"),
        ([], "needs two run folders, the folder of an earlier --rev, or --rev; got 0"),
        (["one"], "needs two run folders; 'one' alone is not a folder that --rev made"),
        (["one", "two"], "'one' is not a run folder"),
        (["--rev", "HEAD", "--figure", "c.jpg"], "must end in one of .png, .svg, .pdf"),
        (["--rev", "HEAD", "--rounds", "0"], "--rounds: 0 is out of range (allowed: 1 to 100)"),
        (["--rev", "HEAD", "--markdown", "nowhere/c.md"], "--markdown: cannot write 'nowhere/c.md'"),
        (["--rev", "HEAD", "--json", "-", "--markdown", "-"], "--markdown: --json already writes to stdout"),
        (["--rev", "HEAD", "--fail-on", "slow"], "--fail-on: 'slow' is not one of"),
        (["one", "two", "--fail-on", "slowr"], "did you mean 'slower'?"),
        (["one", "two", "--same-within", "much"], "--same-within: 'much' is not a share (allowed: 5%, 0.05"),
        (["--rev", "HEAD", "--occasions", "o.json"], "--occasions: applies to runs that were not measured in turns"),
        (["one", "two", "--seqlen", "64"], "--seqlen: applies to measuring, which only --rev does"),
        (["one", "two", "--rounds", "3"], "--rounds: applies to measuring"),
        (["one", "two", "--sweep", "guard"], "--sweep: applies to measuring"),
        (["one", "two", "--out", "there"], "--out: applies to measuring"),
        (["one", "two", "--resume"], "--resume: applies to measuring"),
        (["one", "two", "--no-energy"], "--energy: applies to measuring"),
        (["--rev", "HEAD", "--out", "."], "--out: '.' is not empty; rounds need a new folder"),
        (["--rev", "HEAD", "--resume"], "--resume: name the folder of the rounds to continue: --out FOLDER"),
        (["--rev", "HEAD", "--resume", "--out", "there"], "--resume: name the folder of the rounds"),
    ],
)
def test_a_mistake_in_a_comparison_is_one_line(run, arguments, words):
    code, stdout, stderr = run("compare", *arguments, *(MEASURING if "--rev" in arguments else []))
    assert (code, stdout) == (2, "")
    assert words in stderr.splitlines()[-1]


def test_outside_of_a_repository_there_are_no_revisions(tmp_path):
    code, _, stderr = in_process.glabench(tmp_path, "check", "--rev", "main", "--device", "cpu")
    assert code == 2
    assert "--rev: needs a git repository around the working folder" in stderr.splitlines()[-1]


def test_a_plugin_may_be_named_by_its_whole_path_and_has_to_be_in_both_revisions(run, repository):
    named = ["compare", "--rev", "WORKTREE", "--sweep", "waiting.toml", "--rounds", "1", "--device", "cpu"]
    assert run(*named, "--plugin", repository / "steady.py")[0] == 0
    (repository / "later.py").write_text(PLUGIN)
    code, _, stderr = run(*named, "--plugin", "later.py")
    assert code == 2
    assert "--plugin: the revision has no 'later.py'" in stderr.splitlines()[-1]


def test_a_repository_without_code_to_measure_is_refused(run, repository, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "steady.py"
    outside.write_text(PLUGIN)
    code, _, stderr = run("compare", "--rev", "HEAD", "--sweep", "waiting.toml", "--plugin", outside)
    assert code == 2
    assert "neither kernels/gla_kernels nor a --plugin" in stderr.splitlines()[-1]
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_hook_of_git_can_run_a_comparison(run, repository, monkeypatch):
    monkeypatch.setenv("GIT_DIR", ".git")
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git/index"))
    index = (repository / ".git/index").read_bytes()
    assert run(*COMPARE)[0] == 0
    assert (repository / ".git/index").read_bytes() == index


# check --rev


def test_processes_measure_each_revisions_own_kernels(glabench, tmp_path):
    """The only test here with real workers: they find their revision's kernels, with separate compile caches."""
    shutil.copytree(KERNELS, tmp_path / "kernels/gla_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kernels/gla_kernels/factor.py").write_text("FACTOR = 1.0")
    (tmp_path / "waiting.toml").write_text(SWEEP)
    plugin = tmp_path.parent / f"{tmp_path.name}-plugin.py"  # outside of the repository, so the same on both sides
    plugin.write_text(OF_KERNELS)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path)
    (tmp_path / "kernels/gla_kernels/factor.py").write_text("FACTOR = 1.1")
    command = ["check", "--rev", "main", "--sweep", "waiting.toml", "--plugin", plugin, "--device", "cpu"]
    code, stdout, stderr = glabench(*command, "--rounds", "1", "--time-limit", "0.05", "--out", "there")
    assert code == 5, stderr
    assert "1 inaccurate" in stdout
    base, new = (RunFolder.open(tmp_path / "there" / name).load() for name in ("base-1", "new-1"))
    assert [base.records[0].status, new.records[0].status] == ["ok", "inaccurate"]
    assert base.environment["code"]["kernels"] != new.environment["code"]["kernels"]
    assert [base.records[0].launch, new.records[0].launch] == ["compiled into base", "compiled into new"]


@pytest.mark.parametrize("command", [COMPARE, CHECK])
def test_the_table_shows_the_metrics_that_were_asked_for(run, repository, command):
    code, stdout, stderr = run(*command, "--metric", "tokens,energy")
    assert code == 0, stderr
    assert "tokens ×" in stdout
    assert "new / base" not in stdout
    assert "no cell has these metrics: energy" in stdout


@pytest.mark.parametrize("name", ["clock", "tme"])
def test_a_wrong_metric_is_found_before_anything_is_measured(run, repository, name):
    code, _, stderr = run(*CHECK, "--metric", name)
    assert (code, "--metric: " in stderr) == (2, True)
    assert not (repository / "runs").exists()


def test_a_check_of_unchanged_code_passes(run):
    code, stdout, stderr = run(*CHECK, "--strict")
    assert code == 0, stderr
    assert "identical on both sides" in stdout
    assert "1 same" in stdout
    assert "once more" not in stderr


def test_a_slow_down_is_looked_at_twice_and_fails(run, repository):
    change(repository, "ms", 4.3)
    outputs = ["--json", "-", "--junit", "j.xml", "--markdown", "m.md", "--figure", "c.svg"]
    code, stdout, stderr = run(*CHECK, *outputs)
    assert code == 1, stderr
    assert "measuring 1 cell once more" in stderr
    found = json.loads(stdout)
    assert found["verdicts"] == {"slower": 1}
    assert "measured once more, in turns; before that: time ×1.07" in found["findings"][0]["reason"]
    assert 'failures="1"' in (repository / "j.xml").read_text()
    assert "### glabench check" in (repository / "m.md").read_text()
    assert "</svg>" in (repository / "c.svg").read_text()
    (folder,) = (repository / "runs").iterdir()
    assert run_names(folder / "again") == [
        f"{side}-{n}" for side in ("base", "new") for n in range(1, CONFIRMING_ROUNDS + 1)
    ]
    code, stdout, _ = run("compare", folder, "--json", "-", "--same-within", "5%", "--fail-on", "slower")
    assert (code, json.loads(stdout)["findings"][0]["reason"]) == (1, found["findings"][0]["reason"])
    assert run(*CHECK, "--max-slowdown", "10%")[0] == 0


@pytest.mark.parametrize(
    ("name", "value", "code", "verdict"), [("error", 0.5, 5, "inaccurate"), ("status", '"crashed"', 4, "failed")]
)
def test_what_is_wrong_or_fails_has_a_code_of_its_own(run, repository, name, value, code, verdict):
    if name == "status":
        change(repository, "error", f'0, "status": {value}')
    else:
        change(repository, name, value)
    found, stdout, stderr = run(*CHECK)
    assert found == code, stderr
    assert f"1 {verdict}" in stdout
    assert "once more" not in stderr


@pytest.mark.parametrize(("seconds", "code", "words"), [("2.5", 1, "slower"), (BUSY_ONCE, 0, "cleared")])
def test_slow_first_calls_are_compiled_once_more(run, repository, seconds, code, words):
    change(repository, "first_call_s", seconds)
    found, stdout, stderr = run(*CHECK)
    assert found == code, stderr
    assert "first calls of steady are measured once more" in stderr
    assert f"first calls of steady: {words}: " in stdout
    assert "compiled once more, in turns; before that:" in stdout
    (folder,) = (repository / "runs").iterdir()
    assert run_names(folder / "first-calls") == ["base-1", "new-1"]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("ms", "9.0", 1), ("error", "0.5", 1), ("error", '0, "status": "crashed"', 125), ("ms", '4.0, "noise": 0.5', 125)],
)
def test_a_check_can_speak_to_git_bisect(run, repository, name, value, code):
    assert run(*CHECK, "--bisect")[0] == 0
    change(repository, name, value)
    found, _, stderr = run(*CHECK, "--bisect")
    assert found == code, stderr


def test_a_check_that_cannot_be_made_stops_git_bisect(run, repository):
    code, _, stderr = run("check", "--rev", "no-such-revision", "--bisect")
    assert code == 128
    assert "no-such-revision" in stderr


@pytest.mark.parametrize(
    "wrong", [["--strict"], ["--precision", "banana"], ["--nosuch"], ["--rounds"], ["more", "words"], ["--axis=1"]]
)
def test_a_mistake_in_the_command_stops_git_bisect(run, repository, wrong):
    """2, the code of mistakes elsewhere, would blame a commit."""
    code, _, stderr = run(*CHECK, "--bisect", *wrong)
    assert code == 128
    assert "error" in stderr


def test_what_cannot_be_told_passes_unless_the_check_is_strict(run, repository):
    change(repository, "ms", '4.0, "noise": 0.5')
    code, stdout, stderr = run(*CHECK)
    assert code == 0, stderr
    assert "1 unclear" in stdout
    assert run(*CHECK, "--strict")[0] == 6


def test_a_check_that_measured_nothing_does_not_pass(run, repository):
    command = ["check", "--rev", "main", "--plugin", "steady.py", "--backend", "gla-triton", "--device", "cpu"]
    code, stdout, stderr = run(*command)
    assert (code, stdout) == (3, "")
    assert "no cell has a time in main" in stderr.splitlines()[-1]
    assert "needs a GPU" in stderr.splitlines()[-1]


@pytest.mark.parametrize("at", [2, 5], ids=["in the first look", "in the second look"])
def test_an_interrupted_check_goes_on_where_it_was(run, repository, monkeypatch, at):
    change(repository, "ms", 4.3)
    measure, calls = in_process.MadeUpWorker.measure, count(1)

    def measure_or_stop(worker, cell):
        if next(calls) == at:
            raise KeyboardInterrupt
        return measure(worker, cell)

    monkeypatch.setattr(in_process.MadeUpWorker, "measure", measure_or_stop)
    command = [*CHECK, "--rounds", "1", "--out", "there"]
    code, stdout, stderr = run(*command)
    assert (code, stdout) == (130, "")
    how = f"continue with: glabench {' '.join(command)} --resume"
    assert stderr.splitlines()[-1] == f"glabench: interrupted; what was measured is kept, {how}"
    code, stdout, stderr = run(*command, "--resume")
    assert code == 1, stderr
    assert "1 slower" in stdout
    # No cell was measured twice: two in the first look, twelve in the second, plus the one that was stopped.
    assert next(calls) == 2 + 2 * CONFIRMING_ROUNDS + 1 + 1


def test_rounds_go_on_with_the_same_settings_and_code_alone(run, repository):
    command = [*COMPARE, "--out", "there"]
    assert run(*command)[0] == 0
    assert "[1/" not in run(*command, "--resume")[2]
    code, _, stderr = run(*command, "--resume", "--time-limit", "2")
    assert code == 2
    assert "--time-limit: 'there/base-1' was measured with 1.0, not 2.0" in stderr.splitlines()[-1]
    change(repository, "ms", 5.0)
    code, _, stderr = run(*command, "--resume")
    assert code == 2
    assert (
        "'there/new-1' was measured elsewhere or with other code (it differs in: code of the --plugin)"
        in stderr.splitlines()[-1]
    )


def test_rounds_go_on_with_the_same_commit_whatever_its_name(run, repository):
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "nothing")
    out = [*MEASURING, "--out", "there", "--rounds", "1"]
    assert run("check", "--rev", "HEAD", *out)[0] == 0
    assert run("check", "--rev", "main", *out, "--resume")[0] == 0
    first, last = (git(repository, "rev-parse", name)[:10] for name in ("HEAD~1", "HEAD"))
    code, _, stderr = run("check", "--rev", "HEAD~1", *out, "--resume")
    words = f"--rev: 'there/base-1' was begun with HEAD ({last}), which is another commit than HEAD~1 ({first})"
    assert (code, words in stderr.splitlines()[-1]) == (2, True)


# baseline save and check --baseline


def test_a_baseline_holds_its_rounds_and_the_commit_that_was_measured(repository):
    held = json.loads((repository / "baseline.json").read_text())
    assert held["revision"] == git(repository, "rev-parse", "HEAD").strip()
    assert len(held["rounds"]) == 2


def test_a_check_against_a_file_tells_apart_what_is_unchanged_slower_and_wrong(run, repository):
    code, stdout, stderr = run(*CHECK_FILE, "--json", "-")
    assert code == 0, stderr
    assert json.loads(stdout)["verdicts"] == {"same": 1}
    (folder,) = (repository / "runs").iterdir()
    assert run_names(folder) == ["new-1", "new-2"]

    change(repository, "ms", 4.3)
    code, stdout, stderr = run(*CHECK_FILE, "--json", "-", "--out", "slow")
    assert code == 1, stderr
    # In turns with the baseline's own revision, so that a commit is not blamed for a warm day.
    assert "measured once more, in turns; before that:" in json.loads(stdout)["findings"][0]["reason"]
    assert len(run_names(repository / "slow/again")) == 2 * CONFIRMING_ROUNDS

    change(repository, "error", 0.5)
    code, stdout, stderr = run(*CHECK_FILE)
    assert code == 5, stderr
    assert "1 inaccurate" in stdout


def test_a_slow_down_that_the_revisions_cannot_show_is_not_cleared_by_them(run, repository, tmp_path_factory):
    """The plugin is outside of the repository, so in turns both sides would run the same one."""
    outside = tmp_path_factory.mktemp("outside") / "steady.py"
    outside.write_text((repository / "steady.py").read_text().replace('"ms": 4.0', '"ms": 4.4'))
    code, stdout, stderr = run("check", "--baseline", "baseline.json", "--plugin", outside, "--out", "there")
    assert code == 1, stderr
    assert "in turns" not in stdout
    assert run_names(repository / "there/again") == [f"new-{n}" for n in range(1, CONFIRMING_ROUNDS + 1)]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("ms", 4.3, "measured once more; before that:"), ("first_call_s", 2.5, "compiled once more; before that:")],
)
def test_without_the_baselines_revision_a_suspicion_is_confirmed_by_fresh_rounds(run, repository, name, value, words):
    file = repository / "baseline.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"revision": "0" * 40}))
    change(repository, name, value)
    code, stdout, stderr = run(*CHECK_FILE)
    assert code == 1, stderr
    assert words in stdout
    assert "base-1" not in stderr


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"environment": {"device": "cpu", "cpu": "another", "settings": {}}}, [], "it was made on another, this is"),
        ({"environment": {"device": "cuda", "gpu": {"name": "H200"}, "settings": {}}}, [], "it was made on H200, this"),
        ({"environment": {"settings": {"speed": "high"}}}, [], "its settings do not fit this version of glabench"),
        ({"rounds": []}, [], "is not a baseline"),
        ({}, ["--max-slowdown", "much"], "--max-slowdown: 'much' is not a share (allowed: 5%, 0.05; from 0 up)"),
        ({}, ["--max-memory", "-5%"], "--max-memory: '-5%' is not a share"),
        ({}, ["--rev", "main"], "give either a revision (--rev main) or a file (--baseline FILE)"),
        ({}, ["--sweep", "guard"], "--sweep: the baseline fixes the cells and settings; leave out --sweep"),
        ({}, ["--seqlen", "32"], "--seqlen: the baseline fixes the cells and settings; leave out --seqlen"),
        ({}, ["--device", "cuda:1"], "--device: 'cuda:1' does not exist"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_a_mistake(run, repository, changes, arguments, words):
    file = repository / "baseline.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    code, stdout, stderr = run(*CHECK_FILE, *arguments)
    assert (code, stdout) == (2, "")
    assert words in stderr.splitlines()[-1]


def test_a_baseline_may_be_compared_with_occasions_of_ones_own(run, repository):
    device = device_name(json.loads((repository / "baseline.json").read_text())["environment"])
    Occasions("another").save(repository / "another.json")
    Occasions(device).save(repository / "mine.json")
    code, _, stderr = run(*CHECK_FILE, "--occasions", "another.json", "--out", "there")
    assert code == 2
    assert "--occasions: 'another.json' holds occasions of another" in stderr.splitlines()[-1]
    assert not (repository / "there").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Occasions, "of", lambda *_: pytest.fail("the packaged file is read"))
        code, stdout, stderr = run(*CHECK_FILE, "--occasions", "mine.json", "--out", "there")
    assert code == 0, stderr
    assert "spread between occasions assumed" in stdout
    code, _, stderr = run(*CHECK, "--occasions", "mine.json")
    assert code == 2
    assert "--occasions: sides that are measured in turns are from one occasion" in stderr.splitlines()[-1]


def test_a_baseline_needs_its_plugin(run):
    code, _, stderr = run("check", "--baseline", "baseline.json")
    assert code == 2
    assert "it holds unknown backends: steady; give their --plugin" in stderr.splitlines()[-1]


def test_in_a_workflow_the_findings_become_annotations_and_a_summary(run, repository, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(repository / "summary.md"))
    change(repository, "error", 0.5)
    code, stdout, stderr = run(*CHECK, "--json", "-")
    assert code == 5
    json.loads(stdout)
    assert "::error title=glabench%3A inaccurate::steady fwd" in stderr
    assert "| steady fwd" in (repository / "summary.md").read_text()
