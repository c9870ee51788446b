"""Resuming runs through the command line and the Python API, with made-up workers."""

import json
import shutil

import in_process
import pytest
from conftest import FAKES, last_line
from fake_workers import Workers

import glabench
from glabench.devices.environment import collect
from glabench.records import RunFolder

AXES = ["--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32", "--pass", "fwd", "--device", "cpu"]
SEQLENS = ["--seqlen", "16..160:+16"]
BEGUN = ["run", "cpu-smoke", *SEQLENS, *AXES, "--backend", "fake-good,fake-slow", "--time-limit", "0.02"]
STOPPED = {("fake-good", 32): "error", ("fake-good", 80): KeyboardInterrupt()}
NAME = "cpu-smoke-20260102-030405"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 20 cells that Ctrl-C ended after four cells, one of which had failed; and the command's outcome."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copy(FAKES, folder / "mine.py")
    out = ["--out", f"runs/{NAME}"]
    ended = in_process.glabench(folder, *BEGUN, "--plugin", "mine.py", *out, workers=Workers(STOPPED))
    return folder, ended


@pytest.fixture
def begun(stopped, tmp_path):
    """A copy of that run in an empty folder, in which the commands run."""
    shutil.copytree(stopped[0], tmp_path, dirs_exist_ok=True)
    return RunFolder.open(tmp_path / "runs" / NAME)


@pytest.fixture
def resume(command, begun, monkeypatch):
    """Runs a command with made-up workers, without drawing figures; gives (workers, exit code, stdout, stderr)."""
    monkeypatch.setattr("glabench.cli.measuring.write_report", lambda *_: ["records.csv", "report.md", "figure.png"])

    def call(*arguments, script=()):
        workers = Workers(script)
        return workers, *command(*arguments, workers=workers)

    return call


def test_an_interrupted_command_says_what_is_kept_and_how_to_go_on(stopped):
    code, stdout, stderr = stopped[1]
    assert (code, stdout) == (130, "")
    how = f"continue with: glabench run --resume runs/{NAME}"
    assert last_line(stderr) == f"glabench: interrupted; what was measured is kept, {how}"
    assert "[4/20] fake-good fwd B=1 T=64" in stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["speed", "--resume", f"runs/{NAME}"],
        ["speed", "--resume", "--out", f"runs/{NAME}"],
        ["run", "--resume", f"runs/{NAME}"],
        ["run", "cpu-smoke", "--resume"],
        ["run", "cpu-smoke", "--resume", "--out", f"runs/{NAME}"],
        ["speed", "--resume"],
        ["run", "--resume"],
    ],
    ids=" ".join,
)
def test_sweep_plugins_and_settings_are_those_that_the_run_was_begun_with(resume, begun, arguments):
    workers, code, _, stderr = resume(*arguments)
    assert code == 4  # of a cell that failed before
    assert "4 of 20 cells are already measured" in stderr
    assert [line.split()[0] for line in stderr.splitlines() if "] fake-" in line] == [f"[{n}/20]" for n in range(5, 21)]
    assert [cell.seqlen for cell in workers.asked] == [*range(80, 161, 16), *range(16, 161, 16)]
    assert {(w.job.run_id, w.job.plugins, w.job.settings.time_limit_s) for w in workers.started} == {
        (NAME, ("mine.py",), 0.02)
    }
    run = begun.load()
    assert (run.complete, len(run.records)) == (True, 20)
    lines = (begun.path / "records.jsonl").read_text().splitlines()
    assert len(lines) == 20


def test_a_run_of_another_sweep_is_not_gone_on_with(resume, begun):
    workers, code, _, stderr = resume("run", "chunk-sweep", "--resume", "--out", f"runs/{NAME}")
    assert (workers.asked, code) == ([], 2)
    assert f"SWEEP: 'runs/{NAME}' holds a run of another sweep" in stderr


def test_the_same_command_again_goes_on(resume, begun):
    workers, *_ = resume(*BEGUN, "--plugin", "mine.py", "--resume", "--out", f"runs/{NAME}")
    assert len(workers.asked) == 16


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            ["--time-limit", "1"],
            "--time-limit: 'runs/{}' was measured with 0.02, not 1.0; leave out the option, or start a new run",
        ),
        (["--precision", "5%"], "--precision: 'runs/{}' was measured with 0.01, not 0.05"),
        (["--timing", "hot"], "--timing: 'runs/{}' was measured with cold, not hot"),
        (["--autotune"], "--autotune: 'runs/{}' was measured without autotune; leave out the option"),
        (["--no-energy"], "--no-energy: 'runs/{}' was measured with energy; leave out the option"),
        (["--seqlen", "64"], "--seqlen: 'runs/{}' was started with another sweep; leave out --seqlen to continue it"),
        (["--head-dim", "32"], "--head-dim: 'runs/{}' was started with another sweep"),
        (["--materialize", "on"], "--materialize: no backend of this sweep has this parameter"),
        (["--backend", "fake-good"], "--backend: 'runs/{}' was started with another sweep"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_changed_is_refused_by_the_options_name(resume, begun, option, words):
    before = (begun.path / "records.jsonl").read_bytes()
    workers, code, _, stderr = resume("speed", "--resume", *option)
    assert (code, workers.started) == (2, [])
    assert words.format(NAME) in last_line(stderr)
    assert (begun.path / "records.jsonl").read_bytes() == before


def test_the_time_out_may_change(resume):
    workers, *_ = resume("speed", "--resume", "--cell-timeout", "9", "--time-limit", "0.02")
    assert {(w.job.settings.cell_timeout_s, w.job.settings.time_limit_s) for w in workers.started} == {(9.0, 0.02)}


def test_changed_code_is_refused_but_for_what_failed_and_each_record_keeps_its_own(resume, begun, tmp_path):
    before = {record.code for record in begun.records()}
    plugin = tmp_path / "mine.py"
    plugin.write_text(plugin.read_text().replace("bad_seqlen = 32", "bad_seqlen = 0"))
    _, code, _, stderr = resume("speed", "--resume")
    assert code == 2
    assert "was measured elsewhere or with other code (it differs in: code of the --plugin)" in last_line(stderr)
    workers, code, _, stderr = resume("speed", "--retry-failed")
    assert code == 0
    assert "3 of 20 cells are already measured" in stderr
    assert workers.asked[0].seqlen == 32
    codes = {record.cell.seqlen: record.code for record in begun.records() if record.cell.backend == "fake-good"}
    assert len(before) == 1
    assert {seqlen for seqlen, code in codes.items() if code in before} == {16, 48, 64}
    assert len(set(codes.values())) == 2
    assert None not in codes.values()


def test_other_plugins_than_those_it_was_begun_with_are_refused_by_the_options_name(resume, begun, tmp_path):
    (tmp_path / "mine.py").rename(tmp_path / "other.py")
    workers, code, _, stderr = resume("speed", "--resume", "--plugin", "other.py")
    assert (code, workers.started) == (2, [])
    assert f"--plugin: 'runs/{NAME}' was begun with mine.py, not other.py; leave out the option" in last_line(stderr)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"cpu": "another"}, "(it differs in: cpu: another, now "),
        ({"torch_threads": 77}, "(it differs in: torch_threads: 77, now "),
        ({"packages": {"torch": "0.1"}}, "(it differs in: packages torch); start a new run"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_machine_is_refused(resume, begun, changed, said):
    file = begun.path / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    _, code, _, stderr = resume("speed", "--resume")
    assert code == 2
    assert f"was measured elsewhere or with other code {said}" in last_line(stderr)


def test_what_was_not_begun_cannot_be_gone_on_with(resume, command, tmp_path):
    assert "'nowhere' is not a run folder" in resume("speed", "--resume", "--out", "nowhere")[3]
    assert "--resume: there is no run of chunk-sweep under runs/" in resume("chunk-sweep", "--resume")[3]
    for arguments in (["compare", "--rev", "WORKTREE"], ["check", "--rev", "HEAD"]):
        for out in ([], ["--out", "nowhere"]):
            _, code, _, stderr = resume(*arguments, "--device", "cpu", "--resume", *out)
            assert (code, "--resume: name the folder of the rounds to continue: --out FOLDER" in stderr) == (2, True)
    assert not (tmp_path / "nowhere").exists()


def test_the_python_api_goes_on_as_it_was_begun(begun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workers, heard = Workers(), []
    monkeypatch.setattr("glabench.scheduling.plan.probe", collect)
    monkeypatch.setattr("glabench.scheduling.runs.ProcessWorker", workers)
    assert not glabench.load(begun.path).complete
    run = glabench.resume(begun.path, on_record=heard.append)
    assert (len(heard), len(run.records), run.complete) == (16, 20, True)
    assert glabench.resume(begun.path, retry_failed=True, on_record=heard.append).table().status.eq("ok").all()
    assert len(heard) == 17


def test_an_interrupted_run_can_be_reported_and_says_how_much_of_it_there_is(begun, command):
    code, stdout, _ = command("report", begun.path)
    assert code == 0
    page = (begun.path / "report.md").read_text()
    assert "4 of 20 cells" in stdout
    assert "4 of 20 cells" in page
    assert len((begun.path / "records.csv").read_text().splitlines()) == 5


def test_a_dry_run_lists_what_each_cell_may_take_and_ends_with_totals(command, tmp_path):
    code, stdout, _ = command(*BEGUN, "--backend", "fake-good,fake-picky", "--plugin", FAKES, "--dry-run")
    _, head, *cells, totals = stdout.splitlines()
    assert (code, head.split(), len(cells)) == (0, ["memory", "time", "cell"], 20)
    assert "4 s  fake-good fwd B=1 T=16" in cells[0]
    assert cells[11].endswith("unsupported: 32 tokens are too many")
    assert totals == "20 cells, 1 skipped as unsupported; up to about 1 MiB at a time, up to about 78 s"
    assert not (tmp_path / "runs").exists()
