"""What commands refuse, in one line that says what is allowed; and how they end when something goes wrong."""

import signal
import subprocess
import sys

import in_process
import pytest
from conftest import FAKES
from in_process import MADE_UP


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("speed --seqlen 5x", ["--seqlen", "'5x'", "1k..16k doubles"]),
        ("speed --seqlen 16k..1k", ["--seqlen", "'16k..1k'", "smaller end"]),
        ("speed --materialize maybe", ["--materialize", "'maybe'", "states, checkpoints, nothing"]),
        ("speed --gate slo", ["--gate", "did you mean 'slow'?", "logsigmoid/16, logsigmoid, slow, strong"]),
        ("speed --dtype int8", ["--dtype", "'int8'", "bf16, fp16, fp32, fp64"]),
        ("speed --pass back", ["--pass", "'back'", "infer, fwd, bwd, fwd+bwd"]),
        ("speed --backend fast", ["--backend", "'fast'", "gla-triton"]),
        ("speed --backend sdpa-fast", ["did you mean 'sdpa-flash'?"]),
        ("train --backend gla-torch", ["--backend", "op of 'gla-torch' is gla, not training", "gla-model"]),
        ("decode --backend gla-model", ["not decode", "did you mean 'gla-decode'?"]),
        ("recall --backend gla-text", ["is text, not recall"]),
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
        ("run paper-fig22", ["'paper-fig22'", "did you mean 'paper-fig2'?"]),
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
        ("paper-fig2 --dry-run", ["'paper-fig2' is a preset", "glabench run paper-fig2"]),
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
