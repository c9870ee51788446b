"""Real runs of a made-up backend in a git repository: comparing revisions, saving a baseline, checking against it."""

import json
import shutil
import subprocess
import sys

import pytest

from glabench.cli.rounds import rounds_in
from glabench.errors import UsageError
from glabench.measure.revisions import parse_range, worker_variables
from glabench.measure.rounds import Turn, turns
from glabench.records import RunFolder
from glabench.sweeps import load_sweep

# A backend whose worker has a clock that says what the plugin says: what is tested is the flow, not this machine.
PLUGIN = """
import os, random, time
from gla_kernels import unaware_chunk_linear_attn
from glabench.backends import Backend
from glabench.measure.timer import Sample, WallTimer
MS, ERROR = 4.0, 1.0
noise = random.Random()
def sample(timer, prepare, call):
    call()
    return Sample(MS * noise.gauss(1, 0.005))
WallTimer._sample = sample
def compile_seconds():
    return 0.0  # seconds
def compiled():
    mark = os.path.join(os.environ.get("TRITON_CACHE_DIR", "."), "compiled")
    if not os.path.exists(mark):
        time.sleep(compile_seconds())
        os.makedirs(os.path.dirname(mark), exist_ok=True)
        open(mark, "w").close()
    return True
class Steady(Backend):
    name, op, title = "steady", "linear", "takes as long as it says"
    def bind(self, inputs, cell):
        return lambda: compiled() and ERROR * unaware_chunk_linear_attn(inputs["q"], inputs["k"], inputs["v"])[0]
class Yard(Steady):
    name = "yard"
    def bind(self, inputs, cell):
        global MS  # of its own worker
        MS = 4.0
        return super().bind(inputs, cell)
BACKENDS = [Steady(), Yard()]
"""
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
QUICK = ["--time-limit", "0.15", "--device", "cpu"]


def make_repository(folder):
    (folder / "steady.py").write_text(PLUGIN)
    (folder / "waiting.toml").write_text(SWEEP)
    (folder / ".gitignore").write_text("runs/\nbaseline.json\ncompiled\nwas-busy\n__pycache__/\n")
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder)


@pytest.fixture
def repository(tmp_path):
    make_repository(tmp_path)
    return tmp_path


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True).stdout


def commit(folder):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")


def change(folder, old, new):
    file = folder / "steady.py"
    file.write_text(file.read_text().replace(old, new))


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


def test_turns_go_there_and_back():
    assert [(t.side, t.round) for t in turns(["A", "B"], 3)] == [
        ("A", 1), ("B", 1), ("B", 2), ("A", 2), ("A", 3), ("B", 3),
    ]  # fmt: skip
    assert turns(["round"], 2) == [Turn("round", 1), Turn("round", 2)]


def test_a_trees_kernels_come_before_what_was_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert worker_variables(tmp_path)["PYTHONPATH"] == f"{tmp_path}/kernels:elsewhere"


# compare --rev


def test_a_slower_working_tree_is_found_and_nothing_is_left_behind(glabench, repository):
    change(repository, "MS, ERROR = 4.0", "MS, ERROR = 6.0")
    command = ["compare", "--rev", "WORKTREE", "--sweep", "waiting.toml", "--plugin", "steady.py", "--rounds", 2]
    code, stdout, stderr = glabench(*command, *QUICK, "--json", "-", "--markdown", "c.md", "--figure", "c.png")
    assert code == 0, stderr
    found = json.loads(stdout)
    (cell,) = found["cells"]
    assert cell["verdict"] == "slower"
    assert cell["ratio"] == pytest.approx(1.5, rel=0.02)
    assert [found["a"].split()[0], found["b"].split()[0]] == ["HEAD", "WORKTREE"]
    assert "slower" in (repository / "c.md").read_text()
    assert (repository / "c.png").stat().st_size > 0
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    (folder,) = (repository / "runs").iterdir()
    assert sorted(run.name for run in folder.iterdir()) == ["A-1", "A-2", "B-1", "B-2"]
    code, stdout, stderr = glabench("compare", folder, "--json", "-")
    assert code == 0, stderr
    assert json.loads(stdout) == found


def test_runs_of_the_same_sweep_and_day_are_no_rounds(glabench, tmp_path):
    for name in ("a/gate-20260101-101500", "a/gate-20260101-112000", "b/round-1", "b/round-2", "b/round-10"):
        RunFolder.create(tmp_path / name, load_sweep("cpu-smoke"), {})
    assert [folder.path.name for folder in rounds_in(tmp_path / "b")] == ["round-1", "round-2", "round-10"]
    code, _, stderr = glabench("compare", "a", "b")
    assert code == 2
    assert "'a' holds runs that are no rounds of one measurement (NAME-1, NAME-2, ...)" in stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rev", "nothing..HEAD"], "'nothing' is not a revision of"),
        (["--rev", "--help..HEAD"], "is not a revision of"),
        (["--rev", "HEAD", "one", "two"], "either two run folders or --rev"),
        ([], "needs two run folders, the folder of an earlier --rev, or --rev; got 0"),
        (["one"], "needs two run folders; 'one' alone is none that --rev made"),
        (["one", "two"], "'one' is not a run folder"),
        (["--rev", "HEAD", "--figure", "c.pdf"], "ends in neither .png nor .svg"),
        (["--rev", "HEAD", "--rounds", "0"], "--rounds: 0 is out of range"),
        (["--rev", "HEAD", "--markdown", "nowhere/c.md"], "--markdown: cannot write 'nowhere/c.md'"),
        (["--rev", "HEAD", "--json", "-", "--markdown", "-"], "--markdown: stdout is taken by --json"),
        (["one", "two", "--seqlen", "64"], "--seqlen: is for measuring, which only --rev does"),
        (["one", "two", "--rounds", "3"], "--rounds: is for measuring"),
        (["one", "two", "--out", "there"], "--out: is for measuring"),
        (["one", "two", "--no-energy"], "--energy: is for measuring"),
        (["--rev", "HEAD", "--out", "."], "--out: '.' is not empty; rounds need a new folder"),
    ],
)
def test_a_mistake_is_one_line(glabench, repository, arguments, words):
    of_made_up = ["--plugin", "steady.py", "--sweep", "waiting.toml"] if "--rev" in arguments else []
    code, _, stderr = glabench("compare", *arguments, *of_made_up)
    assert code == 2
    assert words in stderr.splitlines()[-1]


def test_outside_of_a_repository_there_are_no_revisions(glabench):
    code, _, stderr = glabench("compare", "--rev", "main..HEAD", "--backend", "sdpa-math")
    assert code == 2
    assert "git" in stderr.splitlines()[-1]


# baseline and check


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A repository with a baseline, made once."""
    folder = tmp_path_factory.mktemp("made")
    make_repository(folder)
    command = ["baseline", "save", "waiting.toml", "--plugin", "steady.py", "--out", "baseline.json", "--rounds", "2"]
    subprocess.run([sys.executable, "-m", "glabench", *command, *QUICK], cwd=folder, check=True, timeout=120)
    return folder


@pytest.fixture
def saved(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_check_tells_apart_what_is_unchanged_slower_and_wrong(glabench, saved):
    command = ["check", "--baseline", "baseline.json", "--plugin", "steady.py"]
    held = json.loads((saved / "baseline.json").read_text())
    assert held["revision"] == git(saved, "rev-parse", "HEAD").strip()
    assert len(held["rounds"]) == 2
    code, stdout, stderr = glabench(*command, "--json", "-")
    assert code == 0, stderr
    assert {found["outcome"] for found in json.loads(stdout)} == {"fine"}

    change(saved, "MS, ERROR = 4.0", "MS, ERROR = 4.3")
    code, stdout, stderr = glabench(*command, "--json", "-", "--junit", "j.xml", "--markdown", "m.md")
    assert code == 1, stderr
    assert "1 cells are measured once more" in stderr
    assert "now-4" in stderr
    slow = json.loads(stdout)[0]
    assert slow["outcome"] == "regression"
    assert "in turns with the baseline's revision" in slow["reason"]
    assert 'failures="1"' in (saved / "j.xml").read_text()
    assert "regression" in (saved / "m.md").read_text()

    change(saved, "ERROR = 4.3, 1.0", "ERROR = 4.0, 1.1")
    code, stdout, stderr = glabench(*command)
    assert code == 5, stderr
    assert "inaccurate: relative error beyond" in stdout


def test_a_slow_down_that_the_revisions_cannot_show_is_not_cleared_by_them(glabench, saved):
    """The plugin is not the repository's: in turns, both sides would run the present one."""
    outside = saved.parent / f"{saved.name}-outside.py"
    outside.write_text((saved / "steady.py").read_text().replace("ERROR = 4.0", "ERROR = 4.4"))
    code, stdout, stderr = glabench("check", "--baseline", "baseline.json", "--plugin", outside)
    assert code == 1, stderr
    assert "now-1" not in stderr
    assert "in turns" not in stdout


def test_a_repository_without_code_to_measure_is_refused(glabench, repository, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "steady.py"
    outside.write_text(PLUGIN)
    code, _, stderr = glabench("compare", "--rev", "HEAD", "--sweep", "waiting.toml", "--plugin", outside, *QUICK)
    assert code == 2
    assert "neither kernels/gla_kernels nor a --plugin" in stderr.splitlines()[-1]
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    ("seconds", "code", "words"),
    [
        ("2.5", 1, "first calls of steady: regression: "),
        ("0 if os.path.exists('was-busy') else 2.5 * bool(open('was-busy', 'w'))", 0, "first calls of steady: cleared"),
    ],
)
def test_slow_first_calls_are_compiled_once_more_beside_the_old_code(glabench, saved, seconds, code, words):
    change(saved, "return 0.0  # seconds", f"return {seconds}")
    found, stdout, stderr = glabench("check", "--baseline", "baseline.json", "--plugin", "steady.py")
    assert found == code, stderr
    assert "first calls of steady are measured once more" in stderr
    assert words in stdout
    assert "measured in turns with the baseline's revision; before that:" in stdout
    (folder,) = (saved / "runs").glob("check-*")
    assert sorted(run.name for run in (folder / "first-calls").iterdir()) == ["before-1", "now-1"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("MS, ERROR = 4.0", "MS, ERROR = 4.3", "with one more round; before that:"),
        ("return 0.0  # seconds", "return 2.5", "compiled once more; before that:"),
    ],
)
def test_without_the_baselines_revision_a_suspicion_is_confirmed_by_another_round(glabench, saved, old, new, words):
    file = saved / "baseline.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"revision": "0" * 40}))
    change(saved, old, new)
    code, stdout, stderr = glabench("check", "--baseline", "baseline.json", "--plugin", "steady.py")
    assert code == 1
    assert "measured once more" in stderr
    assert "before-1" not in stderr
    assert words in stdout


def test_a_yardstick_is_measured_again_beside_what_is_doubtful(glabench, repository):
    (repository / "both.toml").write_text(SWEEP + '[[backends]]\nname = "yard"\n')
    save = ["baseline", "save", "both.toml", "--plugin", "steady.py", "--out", "both.json", "--rounds", "1"]
    code, _, stderr = glabench(*save, "--time-limit", "2", "--device", "cpu")  # an unsettled yardstick is not trusted
    assert code == 0, stderr
    change(repository, "MS, ERROR = 4.0", "MS, ERROR = 4.6")
    check = ["check", "--baseline", "both.json", "--plugin", "steady.py", "--rounds", "1", "--yardstick", "yard"]
    code, stdout, stderr = glabench(*check, "--json", "-")
    assert code == 1, stderr
    (slow, _) = json.loads(stdout)
    assert slow["ratio"] == pytest.approx(1.15, rel=0.02)
    assert "with one more round; before that:" in slow["reason"]
    (folder,) = (repository / "runs").glob("check-*")
    (again,) = (folder / "again").iterdir()
    assert {json.loads(line)["backend"] for line in (again / "records.jsonl").read_text().splitlines()} == {
        "steady",
        "yard",
    }


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, ["--yardstick", "sdpa-flash"], "the baseline has no times of 'sdpa-flash' (allowed: steady)"),
        ({"environment": {"device": "cpu", "cpu": "another", "settings": {}}}, [], "it was made on another, this is"),
        ({"rounds": []}, [], "is not a baseline"),
        ({}, ["--max-slowdown", "much"], "--max-slowdown: 'much' is not a share (allowed: 5%, 0.05, from 0 up)"),
        ({}, ["--max-memory", "-5%"], "--max-memory: '-5%' is not a share"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_a_mistake(glabench, saved, changes, arguments, words):
    file = saved / "baseline.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    code, _, stderr = glabench("check", "--baseline", "baseline.json", "--plugin", "steady.py", *arguments)
    assert code == 2
    assert words in stderr.splitlines()[-1]


def test_in_a_workflow_the_findings_become_annotations_and_a_summary(glabench, saved, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(saved / "summary.md"))
    change(saved, "ERROR = 4.0, 1.0", "ERROR = 4.0, 1.1")
    code, stdout, stderr = glabench("check", "--baseline", "baseline.json", "--plugin", "steady.py", "--json", "-")
    assert code == 5
    json.loads(stdout)
    assert "::error title=glabench%3A accuracy::steady fwd" in stderr
    assert "| steady fwd" in (saved / "summary.md").read_text()
