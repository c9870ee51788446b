"""Baselines of a plugin, saved and checked against: `glabench baseline save`, `glabench check --baseline`."""

import json

import pytest
from repositories import CHECK, change, git, run_names

from glabench.records.environment import device_name
from glabench.verdicts import CONFIRMING_ROUNDS
from glabench.verdicts.occasions import Occasions

CHECK_FILE = ["check", "--baseline", "baseline.json", "--plugin", "steady.py"]


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


@pytest.mark.usefixtures("repository")
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
