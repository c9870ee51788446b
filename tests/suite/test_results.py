"""Published runs: the page is current and says where each run comes from; no run folder is large."""

import json
import shutil
from pathlib import Path

import in_process
import pytest
from conftest import last_line
from repositories import git
from simulated import record

from glabench.devices.provenance import hash_code, hash_package
from glabench.records import RunFolder
from glabench.scheduling.revisions import KERNELS
from glabench.sweeps import load_sweep

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
MOST_BYTES = 10**6
# What a folder has that is published as one thing: a run, or the rounds of a check, a comparison or a validation.
REPORTS = ("records.jsonl", "check.json", "compare.json", "validation.md")

INDEX = """
[[groups]]
title = "All"
[[groups.runs]]
path = "one"
shows = "*something*"
"""
ENVIRONMENT = {
    "device": "cuda",
    "gpu": {"name": "NVIDIA H200", "driver": "580"},
    "packages": {"torch": "2.11", "fla-core": "0.6.0", "mamba-ssm": None},
    "glabench": "0.2.0",
    "command": "glabench run x",
}


# This repository's results


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The results and the kernels without git, as in a checkout without history."""
    folder = tmp_path_factory.mktemp("copied")
    ignored = shutil.ignore_patterns("*.png", "*.svg", "*.csv")
    shutil.copytree(RESULTS, folder / "results", ignore=ignored)
    shutil.copytree(ROOT / KERNELS, folder / KERNELS)
    (folder / "docs").mkdir()
    return folder


def test_the_page_is_what_the_command_makes_now_without_any_history(copied):
    code, _, stderr = in_process.glabench(copied, "results")
    assert (code, stderr.strip()) == (0, "wrote docs/results.md\nwrote docs/claims.md")
    for name in ("docs/results.md", "docs/claims.md", "results/kernels.json"):
        made, kept = ((folder / name).read_text(encoding="utf-8") for folder in (copied, ROOT))
        assert made == kept, f"{name} is not current; run: glabench results"


def folders_with(*names):
    return sorted({path.parent for name in names for path in RESULTS.rglob(name)})


@pytest.mark.parametrize("folder", folders_with(*REPORTS), ids=lambda folder: folder.relative_to(RESULTS).as_posix())
def test_a_published_run_takes_a_megabyte_at_most_with_all_its_rounds(folder):
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= MOST_BYTES


def test_no_file_beside_the_runs_is_large():
    published = folders_with(*REPORTS)
    beside = [path for path in RESULTS.rglob("*") if path.is_file() and not set(published) & set(path.parents)]
    assert all(path.stat().st_size <= MOST_BYTES for path in beside)
    assert len(published) > 20


# Made-up results


@pytest.fixture
def repository(tmp_path):
    """A repository with kernels and one published run of them."""
    (tmp_path / KERNELS).mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results/index.toml").write_text(INDEX)
    kernels(tmp_path, 1)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def kernels(repository, number):
    """Changes the kernels; gives the hash of their code."""
    (repository / KERNELS / "__init__.py").write_text(f"VERSION = {number}\n")
    return hash_code(repository / KERNELS)


def publish(repository, path="one", code=None, **environment):
    folder = RunFolder.create(
        repository / "results" / path, load_sweep("cpu-smoke"), {**ENVIRONMENT, "code": code, **environment}
    )
    folder.append(record([1.0], started_at="2026-11-23T02:50:42+00:00"))


def publish_check(repository, base, new, verdicts, path="check"):
    for side, code in (("base", base), ("new", new)):
        publish(repository, f"{path}/{side}-1", {"kernels": code}, command=None)
    (repository / "results" / path / "check.json").write_text(json.dumps({"verdicts": verdicts}))
    (repository / "results" / path / "check.md").write_text("")
    add = f'[[groups.runs]]\npath = "{path}"\nshows = "a check"\n'
    with (repository / "results/index.toml").open("a") as index:
        index.write(add)


@pytest.fixture
def page(repository, command):
    """Runs the command; gives the columns of a run's row."""

    def make(run="one"):
        code, _, stderr = command("results")
        assert code == 0, stderr
        text = (repository / "docs/results.md").read_text()
        row = next(line for line in text.splitlines() if line.startswith(f"| [{run}]"))
        return dict(zip(("run", "shows", "measured", "kernels", "command"), row.strip("| ").split(" | "), strict=True))

    return make


def test_a_row_tells_what_the_run_recorded(repository, page):
    publish(repository, code={"commit": "0123456789", "changed": True, "kernels": kernels(repository, 1)})
    assert page() == {
        "run": "[one](../results/one)",
        "shows": "*something*",
        "measured": "2026-11-23, 0.2.0 at 0123456 with changes",
        "kernels": "as now",
        "command": "`glabench run x`",
    }
    assert "All on NVIDIA H200, driver 580, torch 2.11.\n" in (repository / "docs/results.md").read_text()


def test_a_run_that_was_interrupted_says_how_far_it_came(repository, page):
    publish(repository, code={"kernels": kernels(repository, 1)}, cells=3)
    assert page()["measured"] == "2026-11-23, 0.2.0, commit unknown, 1 of 3 cells"


def test_a_command_that_was_not_recorded_is_marked(repository, page):
    (repository / "results/index.toml").write_text(INDEX + 'command = "glabench run y"\n')
    publish(repository, command=None)
    found = page()
    assert found["command"] == "`glabench run y` *by hand*"
    assert found["measured"] == "2026-11-23, 0.2.0, commit unknown"
    assert found["kernels"] == "unknown"


def test_kernels_are_older_once_their_code_changed_but_not_for_a_comment(repository, page):
    publish(repository, code={"kernels": kernels(repository, 1)})
    with (repository / KERNELS / "__init__.py").open("a") as file:
        file.write("# a comment\n")
    assert page()["kernels"] == "as now"
    kernels(repository, 2)
    assert page()["kernels"] == "older"


def test_checks_that_found_no_change_carry_runs_over(repository, page):
    first, second, third = (kernels(repository, number) for number in (1, 2, 3))
    publish(repository, code={"kernels": first})
    publish_check(repository, first, second, {"same": 24})
    publish_check(repository, second, third, {"same": 12}, "again")
    links = "[check](../results/check/check.md), [again](../results/again/check.md)"
    assert page()["kernels"] == f"carried over by {links}"
    assert page("again")["kernels"] == "base: older, new: as now"


@pytest.mark.parametrize("verdicts", [{"same": 23, "slower": 1}, {"same": 23, "unclear": 1}, {"faster": 24}, {}])
def test_checks_that_found_anything_else_carry_nothing_over(repository, page, verdicts):
    first, second = kernels(repository, 1), kernels(repository, 2)
    publish(repository, code={"kernels": first})
    publish_check(repository, first, second, verdicts)
    assert page()["kernels"] == "older"


def test_a_check_carries_over_runs_of_its_own_device_alone(repository, page):
    first, second = kernels(repository, 1), kernels(repository, 2)
    publish(repository, code={"kernels": first}, gpu={"name": "NVIDIA H100"})
    publish_check(repository, first, second, {"same": 24})
    assert page()["kernels"] == "older"


def test_a_hash_of_bytes_stands_for_the_code_of_its_commit_and_is_kept(repository, page):
    commit, bytes_hash = git(repository, "rev-parse", "HEAD"), hash_package(repository / KERNELS)
    publish(repository, code={"commit": commit, "kernels": bytes_hash})
    assert page()["kernels"] == "as now"
    kept = json.loads((repository / "results/kernels.json").read_text())
    assert kept == {bytes_hash: hash_code(repository / KERNELS)}
    shutil.rmtree(repository / ".git")
    assert page()["kernels"] == "as now"
    kernels(repository, 2)
    assert page()["kernels"] == "older"


def test_a_hash_of_bytes_that_is_not_its_commits_is_of_changed_code(repository, page):
    publish(repository, code={"commit": git(repository, "rev-parse", "HEAD"), "kernels": "0123456789abcdef"})
    assert page()["kernels"] == "changed"
    assert json.loads((repository / "results/kernels.json").read_text()) == {"0123456789abcdef": None}


def test_a_run_without_a_commit_has_the_kernels_of_the_commit_that_published_it(repository, page):
    commit = git(repository, "rev-parse", "--short", "HEAD")
    (repository / "results/index.toml").write_text(INDEX + f'published = "{commit}"\n')
    publish(repository)
    found = page()
    assert (found["kernels"], found["measured"]) == ("as now", f"2026-11-23, 0.2.0, published in {commit[:7]}")


def test_without_history_unknown_kernels_stay_unknown_and_a_message_says_so(repository, command, page):
    publish(repository, code={"commit": "0" * 40, "kernels": "0123456789abcdef"})
    code, _, stderr = command("results")
    assert (code, "kernels 0123456789abcdef stay unknown" in stderr) == (0, True)
    assert page()["kernels"] == "unknown"
    assert not (repository / "results/kernels.json").exists()


def test_looking_into_history_leaves_nothing_behind(repository, page):
    publish(repository, code={"commit": git(repository, "rev-parse", "HEAD"), "kernels": "0123456789abcdef"})
    page()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (None, "has no index.toml"),
        ("groups = 3", "groups: expected array"),
        ("[[", "results/index.toml: "),
        (INDEX.replace("one", "two"), "'two' has no records"),
        ("groups = []", "'one' is not in it; add it to a group"),
        (INDEX + INDEX, "a path is in it twice"),
        (INDEX + 'command = "glabench run y"', "'one' records its command; take out `command`"),
    ],
)
def test_an_index_that_is_wrong_is_told_in_one_line_and_nothing_is_written(repository, command, index, words):
    publish(repository)
    path = repository / "results/index.toml"
    path.unlink() if index is None else path.write_text(index)
    code, _, stderr = command("results")
    assert (code, words in last_line(stderr)) == (2, True), stderr
    assert not (repository / "docs/results.md").exists()


@pytest.mark.parametrize(
    ("file", "words"), [("kernels.json", "kernels.json: "), ("one/check.json", "check.json: not a comparison")]
)
def test_other_files_that_are_wrong_are_told_in_one_line(repository, command, file, words):
    publish(repository)
    (repository / "results" / file).write_text("[1]")
    code, _, stderr = command("results")
    assert (code, words in last_line(stderr)) == (2, True), stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nowhere"], "FOLDER: 'nowhere'"), (["results", "--out", "no/page.md"], "--out: cannot write 'no/page.md'")],
)
def test_folders_that_do_not_exist_are_named(repository, command, arguments, words):
    code, _, stderr = command("results", *arguments)
    assert (code, words in last_line(stderr)) == (2, True), stderr


def test_results_need_kernels_beside_them(repository, command):
    publish(repository)
    shutil.rmtree(repository / "kernels")
    assert "has no kernels/gla_kernels beside it" in last_line(command("results")[2])
