"""GitHub's workflows, as far as text can tell: they call what is there, and give nobody more than needed."""

import os
import re
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest
import typer

from glabench.cli.app import app

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").iterdir()}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

every_workflow = pytest.mark.parametrize("text", WORKFLOWS.values(), ids=WORKFLOWS)


def values(key, text):
    """The values of a key: what stands on its line, or, for `|` and `>-`, deeper than the key below it."""
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
    """What make would do."""
    alone = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout


def test_the_check_tests_first_and_knows_every_option_that_it_is_given():
    done = dry_run("check-gpu", "ARGS=--strict", "CHECK_OUT=there").replace("\\\n", "")
    tests, check = (
        re.search(rf"^\.venv/bin/{name} .*", done, re.MULTILINE)[0] for name in ("python -m pytest", "glabench check")
    )
    assert done.index(tests) < done.index(check)
    assert tests.endswith("tests/gpu --junitxml=there/tests.xml")
    assert check.endswith("--strict")
    [script] = [script for script in scripts(WORKFLOWS["gpu-regression.yml"]) if "make check-gpu" in script]
    known = {name for option in typer.main.get_command(app).commands["check"].params for name in option.opts}
    assert options(check) >= {"--baseline", "--out", "--strict"}
    assert options(script) == {"--max-slowdown", "--yardstick", "--strict"}
    assert options(check) | options(script) <= known
