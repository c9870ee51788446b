"""GitHub's workflows, tested as text: they call what exists and have no more rights than needed."""

import os
import re
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest
import typer

from glabench.cli.app import make_app
from glabench.cli.options import find_axes

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").iterdir()}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

every_workflow = pytest.mark.parametrize("text", WORKFLOWS.values(), ids=WORKFLOWS)


def values(key, text):
    """The values of a key: the text on its line or, for `|` and `>-`, the more deeply indented lines below it."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if found := re.fullmatch(rf"((?:- | )*){key}: (.*)", line):
            deeper = takewhile(
                lambda below: not below.strip() or below.startswith(" " * (len(found[1]) + 1)), lines[number:]
            )
            yield "\n".join(below.strip() for below in deeper).strip() if found[2] in ("|", ">-") else found[2]


def scripts(text):
    return list(values("run", text))


def options(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


[GPU_SCRIPT] = [script for script in scripts(WORKFLOWS["gpu-regression.yml"]) if "make check-gpu" in script]


def test_scripts_are_found():
    assert scripts("  - run: a\n  - run: |\n      b\n\n      c\n    env:\n      d\n") == ["a", "b\n\nc"]
    assert scripts("  - name: n\n    run: |\n      b\n    if: c\n  - uses: d\n") == ["b"]
    assert {name: len(scripts(text)) for name, text in WORKFLOWS.items()} == {"ci.yml": 1, "gpu-regression.yml": 2}


@every_workflow
def test_they_call_only_what_is_there(text):
    for script in scripts(text):
        for target in re.findall(r"^ *make (\S+)", script, re.MULTILINE):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
        for file in re.findall(r"\.ci/\S+", script):
            assert os.access(ROOT / file, os.X_OK)


@every_workflow
def test_a_script_gets_texts_from_its_environment_alone(text):
    assert not [script for script in scripts(text) if "${{" in script]


@every_workflow
def test_rights_are_named_and_few(text):
    assert "\npermissions:\n  contents: read\n\n" in text
    assert "pull_request_target" not in text
    assert "secrets." not in text
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert set(re.findall(r"(\S+): write", text)) <= {"pull-requests"}


@every_workflow
def test_actions_have_a_version(text):
    for action in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"actions/[a-z-]+@v\d+(\.\d+)*|docker://\S+:\d+\.\d+\.\d+", action)


def test_code_of_forks_is_kept_from_our_machine_and_from_tokens_that_write():
    jobs = re.split(r"\n(?=  [a-z]+:\n)", "\n".join(text.split("\njobs:")[1] for text in WORKFLOWS.values()))
    [job] = [job for job in jobs if "self-hosted" in job]
    [condition, group] = (" ".join(value.split()) for value in [next(values("if", job)), *values("group", job)])
    here = "github.event.pull_request.head.repo.full_name == github.repository"
    by_hand = "github.event_name == 'workflow_dispatch'"
    assert condition.startswith(f"{by_hand} || ({here} && contains(")
    assert group == f"${{{{ ({condition}) && 'gpu' || github.run_id }}}}"
    assert ": write" not in job


def dry_run(*arguments):
    """The commands that make would run."""
    alone = {
        name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout


def check_of(done):
    """The call of `glabench check` among the commands of make; the kernels' tests must come before it."""
    done = done.replace("\\\n", "")
    tests, check = (
        re.search(rf"^\.venv/bin/{name} .*", done, re.MULTILINE)[0] for name in ("python -m pytest", "glabench check")
    )
    assert done.index(tests) < done.index(check)
    assert tests.endswith("tests/gpu --junitxml=there/tests.xml")
    return check


def test_the_check_tests_first_and_measures_in_turns_with_a_revision_or_against_a_file():
    check = check_of(dry_run("check-gpu", "ARGS=--strict", "CHECK_OUT=there"))
    assert "--rev main" in check
    assert check.endswith("--strict")
    assert "--rev abc1234" in check_of(dry_run("check-gpu", "REV=abc1234", "BASELINE=", "CHECK_OUT=there"))
    against_file = check_of(dry_run("check-gpu", "REV=abc1234", "BASELINE=b.json", "CHECK_OUT=there"))
    assert "--baseline b.json" in against_file
    assert "--rev" not in against_file


def test_the_check_knows_every_option_that_it_is_given():
    check = check_of(dry_run("check-gpu", "CHECK_OUT=there"))
    app = make_app(find_axes([]))
    known = {name for option in typer.main.get_command(app).commands["check"].params for name in option.opts}
    assert options(GPU_SCRIPT) == {"--max-slowdown", "--strict"}
    assert options(check) | {"--baseline"} | options(GPU_SCRIPT) <= known


def test_a_pull_request_is_checked_against_the_commit_that_it_is_based_on():
    text = WORKFLOWS["gpu-regression.yml"]
    assert next(values("BASE", text)).startswith("${{ inputs.rev || github.event.pull_request.base.sha")
    assert list(values("fetch-depth", text)) == ["0"]
    given = re.search(r"make check-gpu (.*)", GPU_SCRIPT)[1]
    assert set(re.findall(r"([A-Z_]+)=", given)) == {"CHECK_OUT", "REV", "BASELINE", "ARGS"}
    # All declared inputs are used, and all used ones are declared.
    asked = set(re.findall(r"^      ([a-z-]+):$", text.partition("permissions:")[0], re.MULTILINE))
    assert set(re.findall(r"inputs\.([a-z-]+)", text)) == asked == {"rev", "baseline", "max-slowdown", "strict"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("BASE", "main;reboot"), ("BASE", "$(id)"), ("FILE", "a b"), ("MAX_SLOWDOWN", "--json"), ("FILE", "x\ny")],
)
def test_an_input_that_is_no_plain_word_never_reaches_make(tmp_path, name, value):
    (tmp_path / "make").write_text("#!/bin/sh\necho made > made\n")
    (tmp_path / "make").chmod(0o755)
    plain = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BASE": "origin/main", "FILE": "", "MAX_SLOWDOWN": "5%"}

    def call(**changes):
        command = ["bash", "-e", "-c", GPU_SCRIPT]
        return subprocess.run(command, cwd=tmp_path, env={**plain, **changes}, capture_output=True, text=True)

    refused = call(**{name: value})
    assert refused.returncode == 2
    assert refused.stdout.startswith("::error::")
    assert not (tmp_path / "made").exists()
    assert call().returncode == 0
    assert (tmp_path / "made").exists()
