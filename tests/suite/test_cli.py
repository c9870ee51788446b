"""The command line on a CPU: once from end to end, otherwise in this process with made-up workers."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import in_process
import pytest
import typer
from conftest import FAKES
from in_process import PLUGIN

from glabench.backends import load_registry
from glabench.backends.registry import OPTIONS
from glabench.cli.app import make_app
from glabench.cli.options import complete_list, find_axes
from glabench.cli.output import Messages
from glabench.records import RunFolder
from glabench.records.metrics import METRICS
from glabench.scheduling.runs import Request, announce
from glabench.sweeps import preset_names

SIZES = ["--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32"]
TINY = ["--seqlen", "16,32", "--pass", "fwd", *SIZES]
MADE_UP = [*TINY, "--plugin", "steady.py", "--backend", "steady", "--device", "cpu"]
OF_THE_PAPER = ["--seqlen", "1k..16k", "--batch", "32", "--heads", "16", "--head-dim", "64", "--dtype", "bf16"]
QUICK = ["--time-limit", "0.02", "--device", "cpu"]
# A parameter of a plugin's own.
WINDOWED = PLUGIN.replace(
    '    name, op, title = "steady"',
    '    parameters = (integers("window", "Tokens looked back.", 64),)\n    name, op, title = "steady"',
).replace("import Backend", "import Backend\nfrom glabench.sweeps.parameters import integers")


@pytest.fixture
def run(tmp_path):
    """Runs a command in a folder with a plugin, in this process; gives (exit code, stdout, stderr)."""
    (tmp_path / "steady.py").write_text(PLUGIN)
    return lambda *arguments: in_process.glabench(tmp_path, *arguments)


def shown(text):
    """The words of a table or a help text, without its layout."""
    return " ".join("".join(c for c in text if c not in "│╭╮╰╯─━┃┏┓┗┛┡┩┠┨╇┳┻╋").split())


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


def test_importing_the_command_line_is_quick_and_leaves_torch_alone():
    probe = "import sys, time, glabench.cli.app; print(time.process_time())\n"
    probe += "print([m for m in ('torch', 'pandas', 'matplotlib', 'triton', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    seconds, modules = done.stdout.splitlines()
    assert modules == "[]"
    assert float(seconds) < 1.0


def test_a_reader_that_leaves_and_a_full_disk_are_one_line_at_most(glabench):
    for arguments in (["sweeps"], ["sweeps", "--json", "-"], ["--help"], ["--version"]):
        read, write = os.pipe()
        os.close(read)
        code, _, stderr = glabench(*arguments, stdout=write)
        os.close(write)
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
    code, stdout, _ = run("run", "paper-fig2", *OF_THE_PAPER, "--dry-run", "--device", "cpu")
    title, _, *cells, totals = stdout.splitlines()
    assert code == 0
    assert title.endswith(": 110 cells")
    assert len(cells) == 3 * 5 * 2 + 7
    assert "1790 MiB" in cells[0]
    assert "linear-torch fwd B=32 T=1024 H=16 K=64 V=64 bf16" in cells[0]
    assert "gla-triton, 20 cells: unsupported: needs a GPU; none is used here" in cells
    assert totals.startswith("110 cells, ")
    assert "skipped as unsupported; up to " in totals
    assert not (tmp_path / "runs").exists()


def test_dry_run_as_json_is_data(run):
    command = ["run", "paper-fig2", *OF_THE_PAPER, "--seqlen", "1k", "--dry-run", "--json", "-", "--device", "cpu"]
    _, stdout, _ = run(*command)
    first = json.loads(stdout)[0]
    assert (first["backend"], first["seqlen"], first["least_mib"]) == ("gla-triton", 1024, 384.0)
    # q, k, v, o in bf16 and g in fp32: 12 bytes a channel, 2**25 channels at T = 1k.
    # And with states kept, one of 64 x 64 in bf16 every 16 tokens.
    assert first["estimate_mib"] == 640.0


# What commands refuse


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("speed --seqlen 5x", ["--seqlen", "'5x'", "1k..16k doubles"]),
        ("speed --seqlen 16k..1k", ["--seqlen", "'16k..1k'", "smaller end"]),
        ("speed --materialize maybe", ["--materialize", "'maybe'", "on, off"]),
        ("speed --gate slo", ["--gate", "did you mean 'slow'?", "logsigmoid/16, logsigmoid, slow, strong"]),
        ("speed --dtype int8", ["--dtype", "'int8'", "bf16, fp16, fp32, fp64"]),
        ("speed --pass back", ["--pass", "'back'", "infer, fwd, bwd, fwd+bwd"]),
        ("speed --backend fast", ["--backend", "'fast'", "gla-triton"]),
        ("speed --backend sdpa-fast", ["did you mean 'sdpa-flash'?"]),
        ("speed --backend=", ["--backend", "empty name"]),
        ("speed --device tpu", ["--device", "'tpu'", "auto, cpu, cuda"]),
        ("speed --device cuda:1", ["--device: 'cuda:1' does not exist: torch sees no GPU (allowed here: auto, cpu)"]),
        ("speed --timing graf", ["--timing", "did you mean 'graph'?"]),
        ("speed --timing graph", ["--timing: 'graph' needs a GPU"]),
        ("speed --precision 7", ["--precision", "'7' is not a share (allowed: 5%, 0.05; 0.0001 to 0.5)"]),
        ("speed --time-limit 0", ["--time-limit: 0 is out of range (allowed: 0.01 to 3600)"]),
        ("speed --sequlen 1k", ["--sequlen", "--seqlen"]),
        ("speed --window 8", ["--window", "; if it belongs to a plugin, also give --plugin FILE"]),
        ("speed --backend mine", ["'mine' is not a backend", "; a plugin's needs --plugin FILE"]),
        ("speed --metric tim", ["--metric: 'tim'", "did you mean 'time'?"]),
        ("speed --plugin nope.py", ["--plugin", "'nope.py'"]),
        ("speed --plugin broken.py --window 8", ["'broken.py' cannot be loaded: ModuleNotFoundError"]),
        ("speed --seqlen 1..1000:+1 --batch 1..1000:+1", ["more than 100000 cells"]),
        ("speed --json - --csv -", ["--csv", "--json"]),
        ("speed --json nowhere/x.json", ["--json", "'nowhere/x.json'"]),
        ("speed --resume", ["--resume", "no run"]),
        ("speed --resume nowhere", ["'nowhere' is not a run folder (it does not exist)"]),
        ("run --resume no/where", ["'no/where' is not a run folder (it does not exist)"]),
        ("speed run1", ["RUN: 'run1' needs --resume"]),
        ("run cpu-smoke --out steady.py", ["--out", "it is not a folder"]),
        ("run paper-fig3", ["'paper-fig3'", "did you mean 'paper-fig2'?"]),
        ("run mine.toml", ["'mine.toml'", "no file"]),
        ("run", ["SWEEP", "cpu-smoke"]),
        ("sweeps paper", ["'paper'", "paper-fig2"]),
        ("report nowhere", ["'nowhere'", "not a run folder"]),
        ("report --figure x.jpg nowhere", ["--figure: 'x.jpg' must end in one of .png, .svg, .pdf"]),
        ("plugin new steady.py", ["'steady.py' already exists"]),
        ("plugin new mine.txt", ["must end in .py"]),
        ("plugin new nowhere/mine.py", ["there is no folder 'nowhere'"]),
        ("validate --device cpu", ["--device: validate needs an NVIDIA GPU"]),
        ("spede", ["Did you mean 'speed'?"]),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(run, tmp_path, arguments, words):
    (tmp_path / "broken.py").write_text("import nothing_there")
    code, stdout, stderr = run(*arguments.split())
    assert (code, stdout) == (2, "")
    (line,) = stderr.strip().splitlines()
    assert line.startswith("glabench: error: ")
    assert all(word in line for word in words), line
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["broken.py", "steady.py"]


def test_a_wrong_key_in_a_users_sweep_is_named(run, tmp_path):
    (tmp_path / "mine.toml").write_text('[axes]\nseqlne = "1k"\n[[backends]]\nname = "sdpa-math"\n')
    code, _, stderr = run("run", "mine.toml")
    assert code == 2
    assert "'seqlne': there is no such axis" in stderr
    assert "did you mean 'seqlen'?" in stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "fake-good"', 'label = "fake-good"', "Good needs a text `name`"),
        ('name = "fake-good"', 'name = "gla-torch"', "a backend named 'gla-torch' exists already"),
        ('op = "linear"', 'op = "cubic"', "unknown op 'cubic'"),
        ("BACKENDS = [", "OTHERS = [", "needs a list BACKENDS"),
        ("import time\n", "import no_such_module\n", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_a_mistake_in_a_plugin_is_named(run, tmp_path, old, new, message):
    (tmp_path / "mine.py").write_text(FAKES.read_text().replace(old, new))
    code, _, stderr = run("speed", "--plugin", "mine.py", "--dry-run")
    assert code == 2
    assert message in stderr
    assert len(stderr.splitlines()) == 1


def test_a_bug_is_a_traceback_and_a_code_of_its_own(run, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(in_process.MadeUpWorker, "measure", fail)
    code, _, stderr = run("speed", *MADE_UP)
    assert code == 70
    assert "ZeroDivisionError" in stderr


def test_an_interruption_is_said_and_is_no_error(run, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("glabench.cli.env.list_plugins", stop)
    assert run("env") == (130, "", "glabench: interrupted\n")


def test_a_closed_terminal_and_a_batch_system_end_a_run_as_ctrl_c_does():
    probe = "import signal, glabench.cli as c; c._end_like_an_interruption()\n"
    probe += "print([signal.getsignal(n) is c._interrupt for n in (signal.SIGTERM, signal.SIGHUP)])"
    for ignored, taken in ((signal.SIG_DFL, [True, True]), (signal.SIG_IGN, [True, False])):
        done = subprocess.run(
            [sys.executable, "-c", probe],
            capture_output=True,
            text=True,
            check=True,
            preexec_fn=lambda handler=ignored: signal.signal(signal.SIGHUP, handler),  # as nohup does
        )
        assert done.stdout.strip() == str(taken)


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
    code, stdout, stderr = in_process.glabench(there, "report", "one", "two", *chosen, "--out", "there")
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


# Lists, help and completion


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
        ("run", "--materialize", "o", ["on", "off"]),
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
    commands = [each for group in groups for each in getattr(group, "commands", {}).values()]
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


@pytest.mark.parametrize("text", ["2%", "0.02", " 2 %"])
def test_a_share_is_a_percentage_or_a_number(run, tmp_path, text):
    assert run("speed", *MADE_UP, "--precision", text, "--out", "run")[0] == 0
    assert RunFolder.open(tmp_path / "run").environment()["settings"]["precision"] == 0.02


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ({"other_processes": 2, "utilization_pct": 37.0}, "the GPU is busy (2 processes, in use 37 % of the time)"),
        ({"other_processes": None, "utilization_pct": 90.0}, "the GPU is busy (0 processes, in use 90 % of the time)"),
        ({"other_processes": 1, "utilization_pct": None}, "the GPU is busy (1 processes)"),
        ({"other_processes": 0, "utilization_pct": 3.0}, ""),
        (None, ""),
    ],
)
def test_a_busy_gpu_is_warned_of(capsys, monkeypatch, tmp_path, busy, words):
    monkeypatch.chdir(tmp_path)
    for kind, expected in (("cuda", words), ("cpu", "")):
        seen = {"device": kind, "gpu": {"name": "a GPU", "index": 0}, "busy": busy}
        monkeypatch.setattr("glabench.scheduling.plan.probe", lambda _, seen=seen: seen)
        announce(Request("cpu-smoke", axes={"backend": "sdpa-math", "seqlen": "16"}).plan(), Messages(), 1)
        said = " ".join(capsys.readouterr().err.split())
        assert expected in said
        assert bool(said) == bool(expected)
