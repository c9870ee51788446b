"""The command line from end to end, on a CPU."""

import csv
import io
import json
import os
import subprocess
import sys

import pytest
from conftest import FAKES

from glabench.backends import load_registry
from glabench.cli.measuring import Place, warn_if_busy
from glabench.cli.output import Messages

FAST = ["--time-limit", "0.02", "--device", "cpu"]
TINY = ["--seqlen", "16,32", "--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32", "--pass", "fwd"]


def test_speed_measures_shows_and_keeps(glabench, tmp_path):
    code, stdout, stderr = glabench("speed", *TINY, *FAST, "--pass", "fwd,fwd+bwd", "--out", "run")
    assert code == 0
    assert "forward: median time, ms" in stdout
    assert "gla-torch" in stdout
    assert "Left out:" in stderr
    assert "gla-triton: needs a GPU" in stderr
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"environment.json", "records.jsonl", "sweep.toml"}
    records = [json.loads(line) for line in (tmp_path / "run/records.jsonl").read_text().splitlines()]
    assert len(records) == 5 * 2 * 2
    assert {r["status"] for r in records} == {"ok"}
    assert all(r["samples_ms"] and r["time_ms"] > 0 and r["first_call_s"] > 0 for r in records)
    assert all(("dq" in r["rel_error"]) == (r["pass"] == "fwd+bwd") for r in records)


def test_report_makes_tables_and_figures_from_the_folder(glabench, tmp_path):
    glabench("run", "cpu-smoke", *TINY, *FAST, "--backend", "sdpa-math,linear-torch", "--out", "run", "-q")
    code, stdout, stderr = glabench("report", "run")
    assert code == 0
    assert "linear-torch" in stdout
    made = {"records.csv", "report.md", "figure.png", "figure.svg"}
    assert made <= {p.name for p in (tmp_path / "run").iterdir()}
    assert all(name in stderr for name in made)
    assert "times as fast as sdpa-math" in (tmp_path / "run/report.md").read_text()


@pytest.mark.parametrize("command", [["speed"], ["chunk-sweep", "--chunk", "16"], ["run", "cpu-smoke"]])
def test_json_and_csv_on_stdout_are_data_alone(glabench, command):
    call = [*command, *TINY, *FAST, "--backend", "linear-torch"]
    code, stdout, _ = glabench(*call, "--json", "-", "--out", "one")
    assert code == 0
    assert [r["seqlen"] for r in json.loads(stdout)] == [16, 32]
    code, stdout, _ = glabench(*call, "--csv", "-", "--out", "two")
    rows = list(csv.DictReader(io.StringIO(stdout)))
    assert [row["seqlen"] for row in rows] == ["16", "32"]
    assert float(rows[0]["rel_error_o"]) < 1e-5


def test_quiet_prints_nothing(glabench):
    code, stdout, stderr = glabench("speed", *TINY, *FAST, "--backend", "linear-torch", "-q")
    assert (code, stdout, stderr) == (0, "", "")


def test_dry_run_lists_cells_and_memory_and_measures_nothing(glabench, tmp_path):
    code, stdout, _ = glabench("run", "paper-fig2", "--dry-run")
    lines = stdout.splitlines()
    assert code == 0
    assert len(lines) == (2 + 8 - 1) * 5 * 2
    # q, k, v, o in bf16 and g in fp32: 12 bytes a channel, 2**25 channels at T = 1k.
    # And with states kept, one of 64 x 64 in bf16 every 16 tokens.
    assert "640 MiB  gla-triton fwd B=32 T=1024 H=16 K=64 V=64 bf16 materialize=on" in lines[0]
    assert "unsupported: needs a GPU" in lines[0]
    assert not (tmp_path / "runs").exists()


def test_dry_run_as_json_is_data(glabench):
    _, stdout, _ = glabench("run", "paper-fig2", "--seqlen", "1k", "--dry-run", "--json", "-")
    first = json.loads(stdout)[0]
    assert (first["backend"], first["seqlen"], first["least_mib"]) == ("gla-triton", 1024, 384.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["speed", "--seqlen", "5x"], ["--seqlen", "'5x'", "1k..16k doubles"]),
        (["speed", "--seqlen", "16k..1k"], ["--seqlen", "'16k..1k'", "smaller end"]),
        (["speed", "--materialize", "maybe"], ["--materialize", "'maybe'", "on, off"]),
        (["speed", "--dtype", "int8"], ["--dtype", "'int8'", "bf16, fp16, fp32, fp64"]),
        (["speed", "--pass", "back"], ["--pass", "'back'", "infer, fwd, bwd, fwd+bwd"]),
        (["speed", "--backend", "fast"], ["--backend", "'fast'", "gla-triton"]),
        (["speed", "--device", "tpu"], ["--device", "'tpu'", "auto, cuda, cpu"]),
        (["speed", "--precision", "7"], ["--precision", "7", "0.0001 to 0.5"]),
        (["speed", "--sequlen", "1k"], ["--sequlen", "--seqlen"]),
        (["speed", "--plugin", "nope.py"], ["--plugin", "'nope.py'"]),
        (["speed", "--backend", ""], ["--backend", "empty name"]),
        (["speed", "--seqlen", "1..1000:+1", "--batch", "1..1000:+1"], ["more than 100000 cells"]),
        (["speed", "--json", "-", "--csv", "-"], ["--csv", "--json"]),
        (["speed", "--json", "nowhere/x.json"], ["--json", "'nowhere/x.json'"]),
        (["run", "paper-fig3"], ["'paper-fig3'", "paper-fig2"]),
        (["run", "mine.toml"], ["'mine.toml'", "no file"]),
        (["run"], ["SWEEP"]),
        (["report", "nowhere"], ["'nowhere'", "not a run folder"]),
        (["speed", "--resume"], ["--resume", "no run"]),
        (["nope"], ["nope"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_line_and_exit_code_2(glabench, arguments, words):
    code, stdout, stderr = glabench(*arguments)
    assert code == 2
    assert stdout == ""
    line = stderr.strip().splitlines()[-1]
    assert line.startswith("glabench: error: ")
    assert all(word in line for word in words), line
    assert "Traceback" not in stderr


def test_cuda_without_a_gpu_is_a_usage_error(glabench):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, stderr = glabench("speed", "--device", "cuda")
    assert code == 2
    assert "--device: 'cuda' is not there" in stderr


def test_a_missing_backend_asked_for_by_name_is_an_unsupported_record(glabench):
    code, stdout, stderr = glabench(
        "run", "cpu-smoke", *TINY, *FAST, "--backend", "linear-torch,flash-attn", "--seqlen", "16", "--json", "-"
    )
    assert code == 0
    assert [(r["backend"], r["status"]) for r in json.loads(stdout)] == [
        ("linear-torch", "ok"),
        ("flash-attn", "unsupported"),
    ]
    code, _, stderr = glabench("run", "cpu-smoke", *TINY, *FAST, "--backend", "flash-attn")
    assert code == 3
    assert "no cell can run here" in stderr


def test_a_missing_package_is_listed_with_its_install_command():
    import torch

    backend = load_registry()["flash-attn"]
    reason = backend.unavailable("cuda")
    if torch.cuda.is_available() and reason is None:
        pytest.skip("flash-attn is installed")
    assert reason == "flash_attn is not installed; install with: pip install 'glabench[flash-attn]'"
    assert reason in backend.unavailable("cpu")


def test_backends_says_what_is_there_and_what_is_not(glabench):
    code, stdout, _ = glabench("backends", "--json", "-")
    rows = {row["name"]: row for row in json.loads(stdout)}
    assert code == 0
    assert rows["gla-torch"]["available"]
    assert set(rows) == set(load_registry())
    assert all(row["available"] == (row["reason"] is None) for row in rows.values())
    code, stdout, _ = glabench("backends")
    assert "gla-recurrent-torch" in stdout
    assert "glabench[mamba]" in "".join(stdout.split())  # square brackets are not taken for markup


def test_a_preset_printed_is_a_sweep_file_that_runs(glabench, tmp_path):
    code, stdout, _ = glabench("sweeps", "cpu-smoke")
    assert code == 0
    (tmp_path / "mine.toml").write_text(stdout)
    code, stdout, _ = glabench("run", "mine.toml", *TINY, *FAST, "--backend", "linear-torch", "--json", "-")
    assert code == 0
    assert len(json.loads(stdout)) == 2


def test_a_wrong_key_in_a_users_sweep_is_named(glabench, tmp_path):
    (tmp_path / "mine.toml").write_text('[axes]\nseqlne = "1k"\n[[backends]]\nname = "sdpa-math"\n')
    code, _, stderr = glabench("run", "mine.toml")
    assert code == 2
    assert "mine.toml: [axes]: the key 'seqlne' is not known" in stderr


def test_env_names_no_host_and_no_user(glabench):
    code, stdout, _ = glabench("env", "--json", "-")
    assert code == 0
    found = json.loads(stdout)
    assert found["packages"]["torch"]
    assert os.uname().nodename not in stdout


def test_no_color_is_respected(glabench, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "")
    assert "\x1b[3" not in glabench("sweeps")[1]


@pytest.mark.parametrize("command", ["speed", "chunk-sweep", "run", "report", "backends", "sweeps", "env"])
def test_every_command_has_help(glabench, command):
    code, stdout, _ = glabench(command, "--help")
    assert code == 0
    assert "Usage" in stdout


def test_help_and_import_are_quick_and_leave_torch_alone():
    probe = "import sys, time; t = time.perf_counter(); import glabench.cli; print(time.perf_counter() - t)\n"
    probe += "print([m for m in ('torch', 'pandas', 'matplotlib', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    seconds, modules = done.stdout.splitlines()
    assert modules == "[]"
    assert float(seconds) < 1.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "fake-good"', 'label = "fake-good"', "Good needs a text `name`"),
        ('op = "linear"', 'op = "cubic"', "unknown op 'cubic'"),
        ("BACKENDS = [", "OTHERS = [", "needs a list BACKENDS"),
        ("import torch\n", "import no_such_module\n", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_mistake_in_a_plugin_is_named(glabench, tmp_path, old, new, message):
    (tmp_path / "mine.py").write_text(FAKES.read_text().replace(old, new))
    code, _, stderr = glabench("speed", "--plugin", "mine.py", "--dry-run")
    assert code == 2
    assert message in stderr
    assert "Traceback" not in stderr


def test_no_command_shows_the_help_and_is_wrong_usage(glabench):
    code, stdout, stderr = glabench()
    assert code == 2
    assert "chunk-sweep" in stdout + stderr
    assert "error" not in stderr


def test_a_plugin_whose_name_is_taken_is_refused(glabench, tmp_path):
    (tmp_path / "twin.py").write_text(FAKES.read_text().replace('"fake-good"', '"gla-torch"'))
    code, _, stderr = glabench("speed", "--plugin", "twin.py", "--dry-run")
    assert code == 2
    assert "a backend named 'gla-torch' exists already" in stderr


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ({"other_processes": 2, "utilization_pct": 37.0}, "the GPU is busy (2 processes, 37 % of its time in use)"),
        ({"other_processes": None, "utilization_pct": 90.0}, "the GPU is busy (0 processes, 90 % of its time in use)"),
        ({"other_processes": 1, "utilization_pct": None}, "the GPU is busy (1 processes)"),
        ({"other_processes": 0, "utilization_pct": 3.0}, ""),
        (None, ""),
    ],
)
def test_a_busy_gpu_is_warned_of(capsys, busy, words):
    place = Place("cuda", {"busy": busy}, load_registry())
    warn_if_busy(place, Messages())
    said = " ".join(capsys.readouterr().err.split())
    assert words in said
    assert bool(said) == bool(words)
    warn_if_busy(Place("cpu", {"busy": busy}, load_registry()), Messages())
    assert capsys.readouterr().err == ""
