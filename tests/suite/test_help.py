"""Lists, help and completion."""

import json
import os

import pytest
import typer
from in_process import WINDOWED, shown

from glabench.backends import load_registry
from glabench.backends.registry import OPTIONS
from glabench.cli.app import make_app
from glabench.cli.options import complete_list, find_axes
from glabench.records.metrics import METRICS
from glabench.sweeps import preset_names


def test_backends_says_what_is_there_and_what_is_not(run):
    code, stdout, _ = run("backends", "--json", "-")
    rows = {row["name"]: row for row in json.loads(stdout)}
    assert code == 0
    assert rows["gla-torch"]["available"]
    assert set(rows) == set(load_registry())
    assert all(row["available"] == (row["reason"] is None) for row in rows.values())
    code, stdout, _ = run("backends")
    assert "gla-recurrent-torch" in stdout
    assert "glabench[mamba]" in "".join(stdout.split())  # square brackets are not taken for markup
    assert "heads, key_dim, value_dim, gate" in stdout


def test_sweeps_are_listed_as_data_too(run):
    _, stdout, _ = run("sweeps", "--json", "-")
    assert [sweep["name"] for sweep in json.loads(stdout)] == preset_names()


def test_env_names_no_host_and_no_user_and_lists_the_plugins(run):
    code, stdout, _ = run("env", "--json", "-", "--plugin", "steady.py")
    assert code == 0
    found = json.loads(stdout)
    assert found["packages"]["torch"]
    assert found["plugins"] == [{"name": "steady", "origin": "--plugin steady.py"}]
    assert os.uname().nodename not in stdout
    assert "packages torch" in run("env")[1]


COMMANDS = [
    *["speed", "chunk-sweep", "run", "compare", "check", "validate", "report", "backends", "sweeps", "env"],
    *["baseline save", "baseline occasion", "plugin new"],
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    code, stdout, _ = run(*command.split(), "--help")
    assert code == 0
    assert "Usage" in stdout


def test_help_says_what_an_option_takes(run):
    text = shown(run("speed", "--help")[1])
    assert "logsigmoid/16, logsigmoid, slow, strong" in text
    assert "bf16, fp16, fp32, fp64" in text
    assert all(metric.name in text for metric in METRICS)


@pytest.mark.parametrize("columns", ["40", "60", "80", "120"])
@pytest.mark.parametrize("command", ["check", "run"])
def test_help_shows_names_of_options_whole(run, command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    stdout = run(command, "--help")[1]
    named = ["--max-slowdown", "--max-first-call"] if command == "check" else ["--cell-timeout", "--retry-failed"]
    assert all(name in stdout for name in named)
    assert "\\" not in stdout


def test_no_command_shows_the_help_and_is_wrong_usage(run):
    code, stdout, stderr = run()
    assert code == 2
    assert all(command.split()[0] in stdout + stderr for command in COMMANDS)
    assert "error" not in stderr
    assert run("--version") == (0, "glabench 0.2.0\n", "")


def test_lists_are_completed_at_their_last_item_by_what_is_not_yet_in_them():
    complete = complete_list(("fwd", "fwd+bwd", "bwd"))
    assert complete("f") == ["fwd", "fwd+bwd"]
    assert complete("bwd,f") == ["bwd,fwd", "bwd,fwd+bwd"]
    assert complete("fwd,f") == ["fwd,fwd+bwd"]


def test_every_option_with_a_fixed_set_of_values_is_completed():
    commands = typer.main.get_command(make_app(find_axes([]))).commands
    for command, option, text, words in (
        ("speed", "--backend", "gla-torch,sdpa-m", ["gla-torch,sdpa-math"]),
        ("speed", "--gate", "s", ["slow", "strong"]),
        ("run", "--dtype", "bf", ["bf16"]),
        ("run", "--pass", "i", ["infer"]),
        ("run", "--materialize", "", ["states", "checkpoints", "nothing"]),
        ("chunk-sweep", "--timing", "g", ["graph"]),
        ("speed", "--metric", "time,ro", ["time,roof"]),
        ("speed", "--device", "a", ["auto"]),
        ("run", "sweep", "cpu", ["cpu-smoke"]),
        ("sweeps", "name", "gu", ["guard"]),
        ("check", "--sweep", "gu", ["guard"]),
        ("compare", "--sweep", "gu", ["guard"]),
        ("validate", "--sweep", "val", ["validation"]),
        ("compare", "--fail-on", "slower,f", ["slower,failed"]),
    ):
        found = next(p for p in commands[command].params if option in (*p.opts, p.name))
        context = typer.Context(commands[command])
        assert [item.value for item in found.shell_complete(context, text)] == words, (command, option)


def test_no_parameter_can_take_the_name_of_an_option():
    app = typer.main.get_command(make_app({}))
    groups = [app, *app.commands.values()]
    # The options of `inspect` are sizes of calls that are compiled; it has no axes.
    found = {name: each for group in groups for name, each in getattr(group, "commands", {}).items()}
    commands = [each for name, each in found.items() if name != "inspect"]
    shown = {option for each in [app, *commands] for p in each.params for option in (*p.opts, *p.secondary_opts)}
    names = {option[2:].replace("-", "_") for option in shown if option.startswith("--")}
    assert names | {"help"} == OPTIONS


def test_a_hint_at_plugins_is_given_only_where_it_helps(run):
    for arguments in (["speed", "--plugin", "steady.py", "--window", "8"], ["report", "--window", "8"]):
        code, _, stderr = run(*arguments)
        assert (code, "--plugin FILE" in stderr) == (2, False)


def test_square_brackets_in_a_plugins_texts_are_shown_as_they_are(run, tmp_path):
    odd = WINDOWED.replace("Tokens looked back.", "As [/b], [bold] or [x.")
    odd = odd.replace("takes as long as it says", "as [/it]").replace('"steady"', '"[/steady]"')
    (tmp_path / "odd.py").write_text(odd)
    assert "As [/b], [bold] or [x." in shown(run("speed", "--help", "--plugin", "odd.py")[1])
    assert "[/steady] linear as [/it] window yes" in shown(run("backends", "--plugin", "odd.py")[1])


@pytest.mark.parametrize(
    ("parse", "why"), [("int", "TypeError: it returns no tuple"), ("lambda text: ({}[text],)", "KeyError: '8'")]
)
def test_a_parameters_parser_that_fails_is_one_line(run, tmp_path, parse, why):
    parameter = f'Parameter("window", "", {parse}, "a number")'
    (tmp_path / "odd.py").write_text(
        WINDOWED.replace('integers("window", "Tokens looked back.", 64)', parameter).replace("integers", "Parameter")
    )
    code, _, stderr = run("run", "cpu-smoke", "--plugin", "odd.py", "--backend", "steady", "--window", "8")
    assert (code, stderr) == (2, f"glabench: error: --window: its parser fails for '8' (allowed: a number): {why}\n")
