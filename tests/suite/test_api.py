"""The Python API, as a notebook uses it: `import glabench`."""

import math
import subprocess

import in_process
import pandas as pd
import pytest
from importing import fastest_import
from in_process import PLUGIN

import glabench
from glabench.errors import GlabenchError, InterruptedRunError, UsageError
from glabench.records.environment import device_name
from glabench.scheduling.process import ProcessWorker
from glabench.sweeps import Variant
from glabench.verdicts import FAILING
from glabench.verdicts.occasions import Occasion, Occasions

TINY = {"batch": 1, "heads": 1, "head_dim": 16, "pass_": "fwd"}
QUICK = {"settings": {"time_limit_s": 0.02}}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run with real workers, and the records that `on_record` got."""
    told = []
    out = tmp_path_factory.mktemp("api") / "run"
    axes = {"seqlen": [16, 32], "backend": "linear-torch", **TINY}
    with in_process.made_up_workers(ProcessWorker, renders=True):
        return glabench.run("cpu-smoke", out=out, on_record=told.append, device="cpu", **axes, **QUICK), told


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a plugin, in which made-up workers measure."""
    (tmp_path / "steady.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    with in_process.made_up_workers():
        yield tmp_path


def test_importing_is_quick_and_loads_nothing_heavy(tmp_path):
    statements = "import glabench\nassert glabench.run and glabench.check and glabench.Sweep"
    seconds, loaded = fastest_import(statements, ("torch", "pandas", "matplotlib", "rich"), tmp_path)
    assert loaded == set()
    assert seconds < 0.75  # of CPU time, also on a slow core; torch alone takes seconds


def test_everything_that_is_promised_is_there_and_documented():
    functions = {"run", "resume", "load", "make_report", "compare", "compare_versions", "check"}
    assert functions | {"Run", "Sweep"} <= set(glabench.__all__)
    assert {*glabench.__all__, "__version__"} == set(dir(glabench))
    assert all(getattr(glabench, name).__doc__ for name in glabench.__all__)
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = glabench.rum


def test_a_run_is_measured_and_every_record_told_of(measured):
    run, told = measured
    assert run.complete
    assert (run.cells, run.name, run.sweep.name) == (2, "run", "run")
    assert told == list(run.records)
    assert [record.status for record in told] == ["ok", "ok"]
    assert run.environment["device"] == "cpu"
    assert run.environment["settings"]["time_limit_s"] == 0.02
    assert run.environment["packages"]["torch"]


def test_a_table_has_one_row_per_record_and_numbers_in_its_columns(measured):
    table = measured[0].table()
    assert list(table["seqlen"]) == [16, 32]
    assert list(table["key_dim"]) == [16, 16]
    assert (table["time_ms"] > 0).all()
    assert (table["error"] < 1e-5).all()
    assert (table.groupby("seqlen")["peak_mib"].max() > 0).all()
    assert pd.api.types.is_numeric_dtype(table["seqlen"])
    assert table.loc[0, "cell"] == "linear-torch fwd B=1 T=16 H=1 K=16 V=16 fp32"


def test_a_run_is_loaded_as_it_was_returned_and_compares_with_itself(measured):
    run, _ = measured
    assert glabench.load(run.path) == run
    assert glabench.load(str(run.path)) == run
    found = glabench.compare(run, run.path)
    assert list(found.table()["ratio"]) == [1, 1]
    assert not {"slower", "faster"} & set(found.table()["verdict"])


def test_two_runs_of_a_plugin_are_compared(here):
    one = glabench.run("cpu-smoke", seqlen="16..64", backend="steady", plugins="steady.py", out="one", **TINY)
    (here / "steady.py").write_text(PLUGIN.replace("4.0", "6.0"))
    two = glabench.run("cpu-smoke", seqlen=[16, 64], backend=["steady"], plugins=["steady.py"], out="two", **TINY)
    assert [len(one.records), len(two.records)] == [3, 2]
    found = glabench.compare(one, two, same_within=0.1)
    assert found.table().set_index("seqlen")["verdict"].to_dict() == {16: "slower", 32: "not compared", 64: "slower"}
    assert found.table()["ratio"].median() == pytest.approx(1.5, rel=0.02)
    assert found.exit_code({"slower"}) == 1
    assert found.exit_code(()) == 0


def test_a_report_is_made_from_a_run_and_from_several_folders(here):
    one = glabench.run("cpu-smoke", seqlen=[16, 32], backend="steady", plugins="steady.py", out="one", **TINY)
    paths = glabench.make_report(one, figure="speed.pdf")
    assert [str(path) for path in paths] == [
        *(f"one/{name}" for name in ("records.csv", "report.md", "figure.png", "figure.svg")),
        "speed.pdf",
    ]
    assert all(path.stat().st_size for path in paths)
    two = glabench.run("cpu-smoke", seqlen=[16, 32], backend="steady", plugins="steady.py", out="two", **TINY)
    csv, page, *_ = glabench.make_report(["one", two], metrics=["time", "tokens"], against="steady", out="both/here")
    assert list(pd.read_csv(csv)["run"]) == ["one", "one", "two", "two"]
    assert "tokens per second" in page.read_text()
    assert "peak memory" not in page.read_text()
    assert glabench.make_report([one, two], metrics="time")[0].parent.parent == here.relative_to(here) / "runs"


def test_a_sweep_may_name_the_metrics_of_its_reports(here):
    text = 'metrics = "METRIC"\n[axes]\nseqlen = [16, 32]\ndtype = "fp32"\n[[backends]]\nname = "steady"\n'
    (here / "mine.toml").write_text(text.replace("METRIC", "error"))
    run = glabench.run("mine.toml", plugins="steady.py", out="one", **TINY)
    assert "metrics" in (run.path / "sweep.toml").read_text()
    for page in (run.path / "report.md", glabench.make_report(run, out="again")[1]):
        glabench.make_report(run)
        assert "largest relative error" in page.read_text()
        assert "median time" not in page.read_text()
    assert "median time" in glabench.make_report(run, metrics="time", out="other")[1].read_text()
    assert "largest relative error" in in_process.glabench(here, "report", "one")[1]
    (here / "mine.toml").write_text(text.replace("METRIC", "eror"))
    with pytest.raises(UsageError, match=r"^mine: metrics: 'eror' is not a metric \(.*did you mean 'error'\?\)$"):
        glabench.run("mine.toml", plugins="steady.py", out="two", **TINY)
    assert not (here / "two").exists()


def test_a_report_is_that_of_the_command(here):
    glabench.run("cpu-smoke", seqlen=[16, 32], backend="steady", plugins="steady.py", out="one", **TINY)
    made = [path.read_bytes() for path in glabench.make_report("one", out="api")]
    assert in_process.glabench(here, "report", "one", "--out", "command")[0] == 0
    assert [(here / "command" / path.name).read_bytes() for path in glabench.make_report("one", out="again")] == made


def test_a_report_does_not_replace_that_of_another_run(here):
    one, two = (
        glabench.run("cpu-smoke", seqlen=n, backend="steady", plugins="steady.py", out=f"{n}", **TINY) for n in (16, 32)
    )
    (page,) = (path for path in glabench.make_report(two) if path.name == "report.md")
    kept = page.read_bytes()
    for runs in (one, [one, two]):
        with pytest.raises(UsageError, match=r"^--out: '32' holds another run, .*; name another folder$"):
            glabench.make_report(runs, out="32")
    assert page.read_bytes() == kept
    glabench.make_report(two, out="32")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ["tme"]}, "--metric: 'tme' is not a metric"),
        ({"metrics": "energy"}, "--metric: no record has these metrics: energy"),
        ({"against": "stedy"}, "--against: 'stedy' is not in the run .* did you mean 'steady'"),
        ({"figure": "a.jpg"}, "--figure: 'a.jpg' must end in"),
        ({"figure": "nowhere/a.pdf"}, "--figure: cannot write 'nowhere/a.pdf'; give a file in an existing folder$"),
    ],
)
def test_a_wrong_report_is_refused_before_anything_is_written(here, options, words):
    one = glabench.run("cpu-smoke", seqlen=16, backend="steady", plugins="steady.py", out="one", **TINY)
    with pytest.raises(UsageError, match=words):
        glabench.make_report(one, out="new", **options)
    assert not (here / "new").exists()


def test_the_spread_between_occasions_may_come_from_a_file_of_ones_own(here):
    """Here it is so large that even equal times are unclear."""
    one, two = (glabench.run("cpu-smoke", backend="steady", plugins="steady.py", out=n, **TINY) for n in ("one", "two"))
    device = device_name(one.environment)
    each = [Occasion(f"2026-01-0{n}T00:00:00", "gpu", None, {"a": "c"}, 1, {"a 1": n, "a 2": n}) for n in (1, 2, 3)]
    Occasions(device, each).save(here / "mine.json")
    found, assumed = glabench.compare(one, two, occasions="mine.json"), glabench.compare(one, two)
    assert any(note.startswith("spread between occasions: ") and "3 occasions" in note for note in found.notes)
    assert any(note.startswith("spread between occasions assumed") for note in assumed.notes)
    assert set(found.table()["verdict"]) == {"unclear"}
    with pytest.raises(UsageError, match=r"^--occasions: sides that are measured in turns"):
        glabench.check(rev="main", occasions="mine.json")


def test_a_run_goes_on_with_its_own_sweep_plugins_and_settings(here, monkeypatch):
    told = []

    def stop_at_the_second(record):
        told.append(record)
        if len(told) == 2:
            raise KeyboardInterrupt

    options = {"plugins": "steady.py", "out": "run", "seqlen": "16..64", "backend": "steady", **TINY, **QUICK}
    with pytest.raises(
        InterruptedRunError, match="what was measured is kept, continue with: glabench run --resume run"
    ):
        glabench.run("cpu-smoke", on_record=stop_at_the_second, **options)
    partial = glabench.load("run")
    assert (len(partial.records), partial.cells, partial.complete) == (2, 3, False)
    assert glabench.resume("run", on_record=told.append).complete
    assert [record.cell.seqlen for record in told] == [16, 32, 64]


def test_a_sweep_may_be_an_object(here):
    axes = {"seqlen": "16", "batch": "1", "heads": "1", "head_dim": "16", "dtype": "fp32", "pass": "fwd"}
    sweep = glabench.Sweep("mine", axes, (Variant("steady"),))
    run = glabench.run(sweep, plugins="steady.py")
    assert run.path.name.startswith("mine-")
    assert run.path.parent.name == "runs"
    assert len(run.records) == 1


def test_revisions_are_compared_and_checked(here):
    (here / ".gitignore").write_text("runs/\n__pycache__/\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        subprocess.run(["git", *who, *command], check=True)
    (here / "steady.py").write_text(PLUGIN.replace("4.0", "6.0"))
    options = {"sweep": "cpu-smoke", "seqlen": 16, "backend": "steady", "plugins": "steady.py", **TINY}
    told = []
    found = glabench.check(rev="main", rounds=1, out="there", on_record=told.append, **options)
    assert found.exit_code(FAILING) == 1
    assert len(told) == 2 + 12  # both once, then six pairs of the doubtful cells
    assert glabench.check(rev="main", limits={"time": 0.6}, **options).exit_code(FAILING) == 0
    again = glabench.check(rev="main", rounds=1, out="there", resume=True, **options)
    assert again.to_json() == found.to_json()
    assert glabench.compare_versions("WORKTREE", rounds=1, **options).summary().startswith("1 slower")
    with pytest.raises(UsageError, match="--resume: name the folder of the rounds to continue"):
        glabench.check(rev="main", resume=True, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: glabench.run("cpu-smok"), "did you mean 'cpu-smoke'"),
        (lambda: glabench.run("cpu-smoke", seqlne=16), "--seqlne: there is no such axis"),
        (lambda: glabench.run("cpu-smoke", seqlen=-16), "--seqlen: an axis takes text such as"),
        (lambda: glabench.run("cpu-smoke", seqlen="16k..1k"), "^sweep cpu-smoke: seqlen: '16k..1k' runs downwards"),
        (lambda: glabench.run("cpu-smoke", backend="linear-trch"), "did you mean 'linear-torch'"),
        (lambda: glabench.run("cpu-smoke", device="cuda:3"), "--device: 'cuda:3' does not exist"),
        (lambda: glabench.run("cpu-smoke", plugins="nowhere.py"), "there is no Python file 'nowhere.py'"),
        (lambda: glabench.run("cpu-smoke", settings={"time_limit": 1}), "time_limit'.; did you mean 'time_limit_s'"),
        (lambda: glabench.run("cpu-smoke", time_limit=1), 'no axis but a setting; give settings={"time_limit_s": 1}'),
        (lambda: glabench.run("cpu-smoke", settings={"time_limit_s": "1"}), "settings: time_limit_s: expected"),
        (lambda: glabench.run("cpu-smoke", settings={"timing": "cool"}), "settings: timing: "),
        (lambda: glabench.load("nowhere"), "'nowhere' is not a run folder"),
        (lambda: glabench.make_report("nowhere"), "'nowhere' is not a run folder"),
        (lambda: glabench.make_report([]), "RUN: name at least one run"),
        (lambda: glabench.resume("nowhere"), "'nowhere' is not a run folder"),
        (lambda: glabench.compare("nowhere", "nowhere"), "'nowhere' is not a run folder"),
        (lambda: glabench.check(), "give either a revision"),
        (lambda: glabench.check(rev="main", baseline="b.json"), "give either a revision"),
        (lambda: glabench.check(rev="main", limits={"tme": 1}), "limits: tme=1 is not a limit"),
        (lambda: glabench.check(rev="main", limits={"time": -0.1}), "limits: time=-0.1 is not a limit"),
        (lambda: glabench.check(rev="main", limits={"time": math.nan}), "limits: time=nan is not a limit"),
        (lambda: glabench.check(rev="main", rounds=0), "rounds: 0 is out of range"),
        (lambda: glabench.check(baseline="nowhere.json"), "there is no file 'nowhere.json'"),
    ],
)
def test_a_mistake_is_an_exception_that_says_how_to_mend_it(here, call, words):
    with pytest.raises(UsageError, match=words) as raised:
        call()
    assert isinstance(raised.value, GlabenchError)
    assert "\n" not in str(raised.value)
    assert not (here / "runs").exists()
