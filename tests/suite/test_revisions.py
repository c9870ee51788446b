"""Revisions in a git repository, and comparing them: `glabench compare --rev`."""

import json
import re

import in_process
import pytest
from in_process import PLUGIN
from repositories import COMPARE, MEASURING, change, git, run_names

from glabench.errors import UsageError
from glabench.records import RunFolder
from glabench.scheduling.folders import rounds_in
from glabench.scheduling.revisions import parse_range, worker_variables
from glabench.sweeps import load_sweep

# Busy only the first time that it is called.
BUSY_ONCE = '0.1 if __import__("os").path.exists("was-busy") else [2.5, __import__("os").mkdir("was-busy")][0]'


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


@pytest.mark.usefixtures("repository")
def test_runs_without_a_common_cell_cannot_be_compared(run):
    for name, seqlen in (("one", 16), ("two", 32)):
        assert run("run", "waiting.toml", "--plugin", "steady.py", "--seqlen", seqlen, "--out", name)[0] == 0
    code, stdout, stderr = run("compare", "one", "two")
    assert (code, stdout) == (2, "")
    assert "nothing to compare: no cell is on both sides" in stderr.splitlines()[-1]


@pytest.mark.usefixtures("repository")
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
