"""What commands show on terminals of any width, complete, list before they measure, and explain."""

import io
import os
import re
from pathlib import Path

import pytest
import typer
from conftest import last_line
from rich.console import Console
from simulated import record

from glabench.backends import load_registry
from glabench.cli.app import make_app
from glabench.cli.options import find_axes
from glabench.cli.output import Messages
from glabench.records.metrics import METRICS
from glabench.sweeps import preset_names

# Without a batch, which presets then choose for a CPU.
TINY = ["--seqlen", "16,32", "--pass", "fwd", "--heads", "1", "--head-dim", "16", "--dtype", "fp32"]
MADE_UP = [*TINY, "--plugin", "steady.py", "--backend", "steady", "--device", "cpu"]
RECORDS = (Path(__file__).parents[2] / "docs/records.md").read_text(encoding="utf-8")


# Lists


@pytest.mark.parametrize("width", [40, 60, 80, 120, None])
def test_lists_cut_no_name_and_no_command_and_are_as_wide_as_the_terminal(run, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width or ""))
    backends, sweeps, env = (run(command)[1] for command in ("backends", "sweeps", "env"))
    assert set(load_registry()) <= set(backends.split())
    assert set(preset_names()) <= set(sweeps.split())
    assert "packages causal-conv1d" in env
    assert "'glabench[flash-attn]'" in backends
    for text in (backends, sweeps, env):
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= (width or 160)


def test_env_shows_no_dicts_and_that_there_is_no_gpu(run):
    stdout = run("env")[1]
    assert "{" not in stdout
    assert "code plugins" not in stdout
    assert re.search(r"gpu +│ none ", stdout)


# Before anything is measured


def test_where_no_backend_can_run_no_folder_is_made(run, tmp_path):
    command = ["run", "paper-fig2", "--backend", "gla-triton,mamba1", "--device", "cpu", "--out", "here"]
    code, _, stderr = run(*command)
    assert (code, stderr.count("\n")) == (3, 1)
    assert "no cell can run here: gla-triton (needs a GPU; none is used here), mamba1 (needs a GPU" in stderr
    assert not (tmp_path / "here").exists()


def test_the_small_sweep_says_what_is_left_out_unless_backends_were_chosen(run):
    chosen = run("speed", *MADE_UP)[2]
    assert "so this is the small CPU sweep\n" in chosen
    everything = run("speed", "--seqlen", "16", "--device", "cpu", "--pass", "fwd")[2]
    assert "so this is the small CPU sweep, without: gla-triton, " in everything


def test_a_dry_run_refuses_a_folder_that_holds_a_run(run):
    assert run("run", "cpu-smoke", *MADE_UP, "--out", "here")[0] == 0
    code, stdout, stderr = run("run", "cpu-smoke", *MADE_UP, "--out", "here", "--dry-run")
    assert (code, stdout) == (2, "")
    assert "--out: 'here' already holds a run" in last_line(stderr)


def test_a_dry_run_has_a_line_for_each_backend_that_cannot_run(run):
    chosen = ["--backend", "flash-attn,linear-torch", "--device", "cpu", "--dry-run"]
    title, head, first, second, idle, totals = run("run", "paper-fig2", *TINY, *chosen)[1].splitlines()
    assert title.endswith("against sequence length (CPU sizes): 4 cells")
    assert head.split() == ["memory", "time", "cell"]
    assert [first.split()[4], second.split()[4]] == ["linear-torch"] * 2
    assert idle.startswith("flash-attn, 2 cells: unsupported: needs a GPU")
    assert totals.startswith("4 cells, 2 skipped as unsupported; up to about ")


def test_a_run_at_sizes_for_a_cpu_says_so_and_is_resumed_by_its_sweep(run):
    code, stdout, stderr = run("run", "paper-fig2", *MADE_UP, "--out", "here")
    assert code == 0
    assert "against sequence length (CPU sizes): 2 cells" in stderr
    assert "(CPU sizes)" in stdout
    assert run("run", "paper-fig2", "--resume", "--out", "here")[0] == 0
    assert run("run", "chunk-sweep", "--resume", "--out", "here")[0] == 2


def test_a_dry_run_of_a_resumed_run_lists_what_is_left(run, tmp_path):
    assert run("run", "cpu-smoke", *MADE_UP, "--out", "here")[0] == 0
    records = tmp_path / "here/records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text(lines[0])
    for arguments in (("run", "here"), ("speed", "here"), ("run", "--out", "here")):
        code, stdout, _ = run(*arguments, "--resume", "--dry-run")
        assert (code, len(lines) - 1) == (0, len(stdout.splitlines()) - 3)
    assert records.read_text() == lines[0]
    for name in ("run", "speed"):
        code, _, stderr = run(name, "here", "--resume", "--out", "there")
        assert (code, last_line(stderr)) == (
            2,
            "glabench: error: --out: 'here' is continued in its own folder; leave out --out",
        )


@pytest.mark.parametrize("command", ["report here", "run --resume here", "speed --resume here", "compare here here"])
def test_records_that_are_no_regular_file_are_refused(run, tmp_path, command):
    (tmp_path / "here").mkdir()
    os.mkfifo(tmp_path / "here/records.jsonl")
    code, _, stderr = run(*command.split())
    assert code == 2
    assert "'here' is not a run folder (its records.jsonl is no regular file)" in last_line(stderr)


# Completion


def completed(command, option, text, *before):
    found = typer.main.get_command(make_app(find_axes([]))).commands[command]
    context = found.make_context(command, list(before), resilient_parsing=True)
    parameter = next(p for p in found.params if option in (*p.opts, p.name))
    return [item.value for item in parameter.shell_complete(context, text)]


@pytest.mark.parametrize(
    ("command", "option", "text", "words"),
    [
        ("run", "sweep", "", [*preset_names(), "deep/", "mine.toml", "one", "runs/"]),
        ("run", "sweep", "mi", ["mine.toml"]),
        ("run", "sweep", "runs/", ["runs/a", "runs/b"]),
        ("run", "sweep", "ru", ["runs/a", "runs/b"]),
        ("run", "sweep", "deep", ["deep/er/run"]),
        ("run", "sweep", "./runs/../one", ["./runs/../one"]),
        ("run", "sweep", "nowhere/", []),
        ("run", "sweep", ".h", [".hidden/run"]),
        ("speed", "folder", "", ["deep/", "one", "runs/"]),
    ],
)
def test_runs_and_sweep_files_are_completed_by_their_paths(tmp_path, monkeypatch, command, option, text, words):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/a", "runs/b", "deep/er/run", "one", ".hidden/run"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "records.jsonl").touch()
    for file in ("mine.toml", "notes.txt"):
        (tmp_path / file).touch()
    assert completed(command, option, text) == words


def test_the_backends_of_named_runs_are_completed(run):
    assert run("speed", *MADE_UP, "--backend", "steady,linear-torch", "--out", "here")[0] == 0
    assert completed("report", "--against", "", "here", "--against") == ["linear-torch", "steady"]
    assert completed("report", "--against", "st", "nothing", "here", "--against") == ["steady"]
    assert completed("report", "--against", "", "--against") == []


# Help


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("report", "RUN..."),
        ("compare", "[RUN_A RUN_B]"),
        ("run", "[SWEEP]"),
        ("plugin new", "FILE"),
        ("baseline save", "[SWEEP]"),
        ("baseline occasion", "RUN..."),
    ],
)
def test_help_shows_arguments_and_flags_as_they_are_typed(run, command, usage):
    stdout = run(*command.split(), "--help")[1]
    assert f"{command} [OPTIONS] {usage}\n" in re.sub(" +\n", "\n", stdout)
    assert "bool" not in stdout
    assert "bool" not in run("--help")[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("40", "--memory-limit: '40' is no amount of memory, such as 40GiB or 500MiB"),
        ("0MiB", "--memory-limit: '0MiB' is no amount of memory"),
        ("1.5GiB", "--memory-limit: needs a GPU; on a CPU, limit the process (ulimit, cgroups)"),
    ],
)
def test_a_limit_of_memory_is_an_amount_and_needs_a_gpu(run, given, words):
    code, _, stderr = run("run", "paper-v3-table3", "--memory-limit", given, "--device", "cpu")
    assert code == 2
    assert words in stderr


def test_help_says_whose_an_axis_is_and_explains_values_metrics_and_codes(run):
    text = " ".join(run("run", "--help")[1].replace("│", " ").split())
    for words in (
        "States N per channel. (mamba1, mamba2)",
        "Head dim: K and V together. (gla, linear, softmax, mamba2, simple-gla,",
        "What the forward keeps for the backward: all chunk states, some, or nothing. (gla-triton, linear-triton,",
        "Sequence length T. --batch",
        "`glabench backends` lists them",
        "1k..1m:*4 multiplies",
        "in a sweep's [cpu] table",
        "70 a bug in glabench",
        "docs/records.md explains them",
    ):
        assert words in text


def test_every_metric_is_explained():
    table = RECORDS.partition("## Metrics")[2].partition("## ")[0]
    rows = [re.split(r" *\| *", line.strip("|").strip())[:3] for line in table.splitlines() if line.startswith("| `")]
    assert rows == [[f"`{metric.name}`", metric.title, metric.unit] for metric in METRICS]


# Progress


@pytest.mark.parametrize(("width", "has_bar"), [(60, False), (140, True)])
def test_the_progress_of_a_resumed_run_counts_what_was_there_and_fits_the_terminal(width, has_bar):
    messages, out = Messages(), io.StringIO()
    messages.console = Console(file=out, force_terminal=True, width=width, color_system=None)
    found = record([1.0])
    messages.begin(12, 3)
    messages.start(found.cell, "again base-1")
    messages.record(found, "again base-1")
    messages.end()
    shown = out.getvalue()
    assert " 4/12 " in shown
    assert re.search(rf"left \S+ again base-1 {found.cell.backend} ", shown)
    assert ("━" in shown) == has_bar
