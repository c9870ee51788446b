"""The command line on a CPU: once from end to end, otherwise in this process with made-up workers."""

import csv
import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import in_process
import pytest
from importing import fastest_import
from in_process import MADE_UP, PLUGIN, SIZES, TINY, WINDOWED, shown

from glabench.cli.output import Messages
from glabench.records import RunFolder
from glabench.scheduling.runs import Request, announce
from glabench.sweeps import preset_names

OF_THE_PAPER = ["--seqlen", "1k..16k", "--batch", "32", "--heads", "16", "--head-dim", "64", "--dtype", "bf16"]
QUICK = ["--time-limit", "0.02", "--device", "cpu"]


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


# From end to end


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run with real workers: a backend from `plugin new`, a built-in one and one that is not installed."""
    folder = tmp_path_factory.mktemp("measured")
    assert in_process.glabench(folder, "plugin", "new", "my.py")[0] == 0
    backends = ["--plugin", "my.py", "--backend", "my-linear,sdpa-math,flash-attn"]
    axes = ["--seqlen", "16,32", "--pass", "fwd,fwd+bwd", *SIZES]
    command = [sys.executable, "-m", "glabench", "speed", *axes, *backends, *QUICK, "--out", "run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return folder / "run", done.returncode, done.stdout, done.stderr


def test_speed_measures_shows_and_keeps(measured):
    folder, code, stdout, stderr = measured
    assert code == 0, stderr
    assert "forward, median time" in stdout
    assert "my-linear" in stdout
    assert "so this is the small CPU sweep\n" in stderr
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert [r["status"] for r in records] == ["ok"] * 8 + ["unsupported"] * 4
    timed = records[:8]
    assert all(r["samples_ms"] and r["time_ms"] > 0 and r["first_call_s"] > 0 for r in timed)
    assert all(("dq" in r["rel_error"]) == (r["pass"] != "infer") for r in timed)


def test_a_run_ends_with_a_report_and_a_line_that_names_it(measured):
    folder, _, _, stderr = measured
    begun = {"environment.json", "plugins.json", "records.jsonl", "sweep.toml"}
    assert {path.name for path in folder.iterdir()} == begun | {"records.csv", "report.md", "figure.png", "figure.svg"}
    assert stderr.splitlines()[-1] == "report: run/report.md  figure: run/figure.png"
    assert "times as fast as sdpa-math" in (folder / "report.md").read_text()


def test_a_backend_that_is_not_installed_says_how_to_install_it(measured):
    record = RunFolder.open(measured[0]).records()[-1]
    assert record.cell.backend == "flash-attn"
    assert record.reason.startswith("needs a GPU; none is used here")
    if find_spec("flash_attn") is None:
        assert "flash_attn is not installed; install with: pip install 'glabench[flash-attn]'" in record.reason


@pytest.mark.full
def test_every_backend_for_a_cpu_measures_every_pass(glabench):
    passes = ["--pass", "infer,fwd,bwd,fwd+bwd"]
    code, stdout, stderr = glabench("speed", "--seqlen", "16,32", *SIZES, *passes, *QUICK, "--json", "-")
    assert code == 0, stderr
    records = json.loads(stdout)
    assert len(records) == 5 * 2 * 4
    assert {r["status"] for r in records} == {"ok"}


def test_importing_the_command_line_is_quick_and_leaves_torch_alone(tmp_path):
    heavy = ("torch", "pandas", "matplotlib", "triton", "scipy")
    seconds, loaded = fastest_import("import glabench.cli.app", heavy, tmp_path)
    assert loaded == set()
    assert seconds < 1.0


def test_a_reader_that_leaves_and_a_full_disk_are_one_line_at_most(glabench, run):
    for start, arguments in (
        (glabench, ["sweeps"]),  # until the process has ended
        (run, ["sweeps", "--json", "-"]),
        (run, ["--help"]),
        (run, ["--version"]),
    ):
        read, write = os.pipe()
        os.close(read)
        with open(write, "w") as stdout:  # noqa: PTH123
            code, _, stderr = start(*arguments, stdout=stdout)
        assert (code, stderr) == (141, "")
    with open("/dev/full", "w") as full:  # noqa: PTH123
        code, _, stderr = glabench("sweeps", "--json", "-", stdout=full)
    assert code == 2
    assert stderr == "glabench: error: cannot write: No space left on device\n"


def test_no_color_is_respected(glabench, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "")
    assert "\x1b[3" not in glabench("sweeps")[1]


# What commands print


@pytest.mark.parametrize("command", [["speed"], ["chunk-sweep"], ["run", "cpu-smoke"]], ids=lambda words: words[0])
def test_json_and_csv_on_stdout_are_data_alone(run, tmp_path, command):
    code, stdout, stderr = run(*command, *MADE_UP, "--json", "-", "--csv", "rows.csv", "--out", "one")
    assert code == 0, stderr
    assert [r["seqlen"] for r in json.loads(stdout)] == [16, 32]
    rows = rows_of((tmp_path / "rows.csv").read_text())
    assert [row["seqlen"] for row in rows] == ["16", "32"]
    assert float(rows[0]["rel_error_o"]) == 0.001
    _, again, _ = run("report", "one", "--csv", "-")
    assert rows_of(again) == rows


def test_quiet_prints_nothing(run, tmp_path):
    assert run("speed", *MADE_UP, "-q", "--out", "run") == (0, "", "")
    assert run("report", "run", "-q", "--out", "there") == (0, "", "")
    assert (tmp_path / "there/figure.png").exists()


def test_a_line_per_cell_tells_how_far_it_is(run):
    _, _, stderr = run("speed", *MADE_UP, "--out", "run")
    lines = stderr.splitlines()
    assert any(line.startswith("[1/2] steady fwd B=1 T=16") for line in lines)
    assert any(line.startswith("[2/2] steady fwd B=1 T=32") for line in lines)


def test_a_failed_cell_is_kept_and_exits_4(run, tmp_path):
    file = tmp_path / "steady.py"
    file.write_text(PLUGIN.replace('"ms": 4.0', '**({"status": "crashed"} if cell.seqlen == 32 else {}), "ms": 4.0'))
    code, stdout, stderr = run("speed", *MADE_UP, "--json", "-", "--out", "run")
    assert code == 4
    assert [r["status"] for r in json.loads(stdout)] == ["ok", "crashed"]
    assert "T=32 H=1 K=16 V=16 fp32: crashed (as it says)" in stderr
    file.write_text(PLUGIN)
    code, stdout, _ = run("speed", "--retry-failed", "run", "--json", "-", "--device", "cpu")
    assert code == 0
    assert [r["status"] for r in json.loads(stdout)] == ["ok", "ok"]


def test_where_no_cell_can_run_the_exit_code_is_3(run):
    code, _, stderr = run("run", "cpu-smoke", *TINY, "--backend", "flash-attn", "--device", "cpu")
    assert code == 3
    assert "no cell can run here: flash-attn (needs a GPU" in stderr.splitlines()[-1]


def test_dry_run_lists_cells_memory_and_totals_and_measures_nothing(run, tmp_path):
    code, stdout, _ = run("run", "paper-fig2", *OF_THE_PAPER, "--pass", "fwd,fwd+bwd", "--dry-run", "--device", "cpu")
    title, _, *cells, totals = stdout.splitlines()
    assert code == 0
    assert title.endswith(": 160 cells")
    assert len(cells) == 3 * 5 * 2 + 9
    assert "1790 MiB" in cells[0]
    assert "linear-torch fwd B=32 T=1024 H=16 K=64 V=64 bf16" in cells[0]
    assert "gla-triton, 20 cells: unsupported: needs a GPU; none is used here" in cells
    assert totals.startswith("160 cells, ")
    assert "skipped as unsupported; up to " in totals
    assert not (tmp_path / "runs").exists()


def test_dry_run_as_json_is_data(run):
    command = ["run", "paper-fig2", *OF_THE_PAPER, "--seqlen", "1k", "--pass", "fwd", "--dry-run", "--json", "-"]
    _, stdout, _ = run(*command, "--device", "cpu")
    first = json.loads(stdout)[0]
    assert (first["backend"], first["seqlen"], first["least_mib"]) == ("gla-triton", 1024, 384.0)
    # q, k, v, o in bf16 and g in fp32: 12 bytes a channel, 2**25 channels at T = 1k.
    # And with states kept, one of 64 x 64 in bf16 every 16 tokens.
    assert first["estimate_mib"] == 640.0


@pytest.mark.parametrize("text", ["2%", "0.02", " 2 %"])
def test_a_share_is_a_percentage_or_a_number(run, tmp_path, text):
    assert run("speed", *MADE_UP, "--precision", text, "--out", "run")[0] == 0
    assert RunFolder.open(tmp_path / "run").environment()["settings"]["precision"] == 0.02


def test_a_busy_gpu_is_warned_of_on_stderr(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    busy = {"other_processes": 2, "utilization_pct": 37.0}
    for kind, words in (("cuda", "the GPU is busy (2 processes, in use 37 % of the time)"), ("cpu", "")):
        seen = {"device": kind, "gpu": {"name": "a GPU", "index": 0}, "busy": busy}
        monkeypatch.setattr("glabench.scheduling.plan.probe", lambda _, seen=seen: seen)
        announce(Request("cpu-smoke", axes={"backend": "sdpa-math", "seqlen": "16"}).plan(), Messages(), 1)
        said = " ".join(capsys.readouterr().err.split())
        assert words in said
        assert bool(said) == bool(words)


# Resumed runs


def test_a_run_goes_on_with_what_it_was_begun_with(run, tmp_path):
    assert run("speed", *MADE_UP, "--time-limit", "2", "--out", "there")[0] == 0
    file = tmp_path / "there/records.jsonl"
    first = file.read_text().splitlines(keepends=True)[0]
    for command in (
        ["speed", "--resume", "there"],
        ["run", "there", "--resume"],
        ["speed", "--resume", "--out", "there"],
    ):
        file.write_text(first)
        code, _, stderr = run(*command, "--cell-timeout", "30", "--device", "cpu")
        assert code == 0, stderr
        assert "1 of 2 cells are already measured" in stderr
        assert len(file.read_text().splitlines()) == 2
    for change, words in (
        (["--time-limit", "1"], "--time-limit: 'there' was measured with 2.0, not 1.0; leave out the option"),
        (["--timing", "hot"], "--timing: 'there' was measured with cold, not hot"),
        (["--seqlen", "64"], "--seqlen: 'there' was started with another sweep"),
    ):
        code, _, stderr = run("speed", "--resume", "there", *change)
        assert code == 2
        assert words in stderr.splitlines()[-1]


def test_the_latest_run_of_a_sweep_is_the_one_that_is_gone_on_with(run, tmp_path):
    assert run("run", "cpu-smoke", *MADE_UP)[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    code, _, stderr = run("run", "cpu-smoke", "--resume")
    assert code == 0
    assert f"in runs/{folder.name}" in stderr


# Plugins, presets and old names


def test_a_plugins_parameter_is_an_axis(run, tmp_path):
    (tmp_path / "steady.py").write_text(WINDOWED)
    code, stdout, stderr = run("run", "cpu-smoke", *MADE_UP, "--seqlen", "16", "--window", "8,16", "--json", "-")
    assert code == 0, stderr
    assert [(r["window"], r["parameters"][-1]) for r in json.loads(stdout)] == [(8, "window"), (16, "window")]
    assert "Tokens looked back." in shown(run("speed", "--help", "--plugin", "steady.py")[1])
    code, _, stderr = run("run", "cpu-smoke", "--plugin", "steady.py", "--backend", "sdpa-math", "--window", "8")
    assert code == 2
    assert "--window: no backend of this sweep has this parameter" in stderr


def test_a_preset_printed_is_a_sweep_file_that_runs(run, tmp_path):
    code, stdout, _ = run("sweeps", "cpu-smoke")
    assert code == 0
    (tmp_path / "mine.toml").write_text(stdout)
    code, stdout, _ = run("run", "mine.toml", *MADE_UP, "--json", "-")
    assert code == 0
    assert len(json.loads(stdout)) == 2


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_planned_on_a_cpu_at_sizes_of_its_own(run, name):
    code, stdout, stderr = run("run", name, "--dry-run", "--device", "cpu")
    assert code == 0, stderr
    assert stdout.splitlines()[-1].split(" cells")[0].isdecimal()


def test_a_dry_run_says_if_nothing_can_run_here(run):
    code, stdout, _ = run("run", "gates", "--backend", "gla-triton", "--dry-run", "--device", "cpu")
    assert code == 0
    assert stdout.splitlines()[-1].endswith("skipped as unsupported: none can run here")


def test_names_of_one_version_ago_work_with_a_notice(run, tmp_path):
    code, stdout, stderr = run("sweeps", "gate")
    assert code == 0
    assert stderr == "glabench: note: the preset 'gate' is now called 'guard'\n"
    assert stdout == run("sweeps", "guard")[1]
    mine = (
        'baseline = "steady"\n[axes]\nseqlen = 16\nbatch = 1\nheads = 1\nhead_dim = 16\ndtype = "fp32"\npass = "fwd"\n'
    )
    (tmp_path / "mine.toml").write_text(mine + '[[backends]]\nname = "steady"\n')
    code, _, stderr = run("run", "mine.toml", "--plugin", "steady.py", "--device", "cpu", "--out", "run")
    assert code == 0
    assert stderr.splitlines()[0] == "glabench: note: mine.toml: the key 'baseline' is now called 'against'"
    code, stdout, stderr = run("report", "run", "--baseline", "steady")
    assert code == 0
    assert stderr.splitlines()[0] == "glabench: note: the option --baseline is now called --against"
    assert "--baseline" not in run("report", "--help")[1]


def test_a_new_plugin_is_listed_and_never_overwrites(run, tmp_path):
    code, stdout, _ = run("plugin", "new", "mine.py")
    assert code == 0
    assert "glabench run cpu-smoke --plugin mine.py --backend my-linear,linear-torch" in stdout
    code, stdout, _ = run("backends", "--plugin", "mine.py", "--json", "-")
    assert next(row for row in json.loads(stdout) if row["name"] == "my-linear")["available"]
    assert run("plugin", "new", "mine.py")[0] == 2


# Reports


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A folder with two runs, `one` and `two`."""
    folder = tmp_path_factory.mktemp("two")
    for name, milliseconds in (("one", "4.0"), ("two", "6.0")):
        (folder / "steady.py").write_text(PLUGIN.replace("4.0", milliseconds))
        assert in_process.glabench(folder, "speed", *MADE_UP, "--out", name)[0] == 0
    return folder


def test_several_runs_share_a_report_with_the_metrics_and_the_figure_asked_for(there):
    chosen = ["--metric", "time,first_call,error", "--against", "steady", "--figure", "x.pdf"]
    code, stdout, stderr = in_process.glabench(there, "report", "one", "two", *chosen, "--out", "there", renders=True)
    assert code == 0, stderr
    assert "one" in stdout
    assert "two" in stdout
    assert "first call" in stdout
    assert (there / "x.pdf").read_bytes().startswith(b"%PDF")
    made = ["records.csv", "report.md", "figure.png", "figure.svg"]
    assert stderr.splitlines()[-1] == "wrote " + ", ".join([*(f"there/{name}" for name in made), "x.pdf"])
    rows = rows_of((there / "there/records.csv").read_text())
    assert [row["run"] for row in rows] == ["one", "one", "two", "two"]
    assert rows_of(in_process.glabench(there, "report", "one", "two", "--csv", "-")[1]) == rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "stedy"], "--against: 'stedy' is not in the run (allowed: steady; did you mean 'steady'?)"),
        (["--metric", "tim"], "--metric: 'tim' is not a metric"),
        (["--metric", "energy", "--out", "new"], "--metric: no record has these metrics: energy (there are: time, "),
        (["--figure", "nowhere/x.pdf"], "--figure: cannot write 'nowhere/x.pdf'"),
        (["--json", "-", "--csv", "-"], "--csv: --json already writes to stdout"),
        (["--json", "x", "--csv", "./x"], "--csv: --json already writes to './x'; give another file"),
        (["--figure", "x.png", "--roofline", "x.png"], "--roofline: --figure already writes to 'x.png'"),
        (["two", "./one"], "RUN: 'one' is named twice"),
    ],
)
def test_a_mistake_in_a_report_is_one_line(there, arguments, words):
    code, stdout, stderr = in_process.glabench(there, "report", "one", *arguments)
    assert (code, stdout) == (2, "")
    assert words in stderr
    assert len(stderr.splitlines()) == 1
    assert not (there / "new").exists()


def test_a_measured_run_is_shown_even_without_the_metric_asked_for(run):
    code, stdout, stderr = run("speed", *MADE_UP, "--metric", "energy")
    assert code == 0
    assert "no record has these metrics: energy" in stderr
    assert "median time" in stdout
