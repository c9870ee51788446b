"""Checks against a revision: `glabench check --rev`, also for git bisect."""

import json
import shutil
from itertools import count
from pathlib import Path

import in_process
import pytest
from repositories import CHECK, COMPARE, MEASURING, SWEEP, change, commit, git, run_names

from glabench.records import RunFolder
from glabench.verdicts import CONFIRMING_ROUNDS

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


def test_processes_measure_each_revisions_own_kernels(command, tmp_path):
    """The only test here with real workers: they find their revision's kernels, with separate compile caches."""
    shutil.copytree(KERNELS, tmp_path / "kernels/gla_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kernels/gla_kernels/factor.py").write_text("FACTOR = 1.0")
    (tmp_path / "waiting.toml").write_text(SWEEP)
    plugin = tmp_path.parent / f"{tmp_path.name}-plugin.py"  # outside of the repository, so the same on both sides
    plugin.write_text(OF_KERNELS)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path)
    (tmp_path / "kernels/gla_kernels/factor.py").write_text("FACTOR = 1.1")
    check = ["check", "--rev", "main", "--sweep", "waiting.toml", "--plugin", plugin, "--device", "cpu"]
    code, stdout, stderr = command(*check, "--rounds", "1", "--time-limit", "0.05", "--out", "there")
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


@pytest.mark.usefixtures("repository")
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
