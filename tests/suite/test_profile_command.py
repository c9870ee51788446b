"""The process that makes a profile, and the command `glabench profile`: what fails, compares, is kept and shown."""

import json
from pathlib import Path
from unittest import mock

import pytest
from conftest import last_line
from in_process import MadeUpWorker, glabench, profile_here
from repositories import git
from traces import KERNELS, SMALL, trace_of

from glabench import load
from glabench.backends import Counts
from glabench.errors import GlabenchError
from glabench.profiling import worker
from glabench.profiling.profile import CALL, profile_of
from glabench.profiling.request import Answer, Request, profile_cell
from glabench.profiling.trace import load_trace
from glabench.records.environment import device_name
from glabench.records.profile import Profile
from glabench.report.profiled import CUT_OFF
from glabench.report.profiles import draw_profiles, profiles_markdown
from glabench.sweeps import Cell, Parameters

RESULTS = Path(__file__).parents[2] / "results"
FAULTY = """
from glabench.backends import Backend

class Faulty(Backend):
    name, op, title = "faulty", "linear", "fails"
    def bind(self, inputs, cell):
        print("printed")
        raise SystemExit(7) if cell.seqlen == 7 else RuntimeError("broken")

BACKENDS = [Faulty()]
"""


@pytest.mark.parametrize(
    ("seqlen", "message"),
    [(8, "faulty fwd B=1 T=8 .*: the profiling process ended with code 1: RuntimeError: broken"), (7, "with code 7")],
)
def test_a_backend_that_fails_is_an_error_of_the_cell(seqlen, message, tmp_path):
    plugin = tmp_path / "faulty.py"
    plugin.write_text(FAULTY)
    cell = Cell("faulty", "linear", "fwd", 1, seqlen, "fp32", Parameters(SMALL), "cpu")
    with pytest.raises(GlabenchError, match=message):
        profile_cell(Request(cell, "cpu", (str(plugin),)), {}, 60)


PARTED = """
from glabench.backends import Backend, Counts, Part

class Parted(Backend):
    name, op, title, has_parts = "parted", "linear", "has parts", True
    def bind(self, inputs, cell):
        return lambda: inputs["v"] * 1
    def kernel_counts(self, inputs, cell):
        return {"forward": Counts(3, -2 if cell.seqlen == 9 else 2)}
    def parts(self, inputs, cell):
        good = Part(lambda: None, Counts(1, 1))
        match cell.seqlen:
            case 1: return {"good": good}
            case 2: return {"good": good, "large": Part(lambda: None, Counts(2**70, 1))}
            case 3: return {"good": good, "none": 3}
            case 6: return {"good": good, "fast": Part(lambda: None, Counts(10**15, 1))}
            case 4: raise RuntimeError("broken")
            case _: raise SystemExit(7)

BACKENDS = [Parted()]
"""


def parted_cell(seqlen, tmp_path):
    (tmp_path / "parted.py").write_text(PARTED)
    cell = Cell("parted", "linear", "infer", 1, seqlen, "fp32", Parameters(SMALL), "cpu")
    return Request(cell, "cpu", (str(tmp_path / "parted.py"),))


@pytest.mark.parametrize(
    ("seqlen", "parts", "said"),
    [
        (1, ["good"], None),
        (2, [], "ValueError: flops: expected int <= 9223372036854775807"),
        (3, [], "AttributeError: 'int' object has no attribute 'call'"),
        (4, [], "RuntimeError: broken"),
        (5, [], "SystemExit: 7"),
        (6, [], "ValueError: flops: 1000000000000000 in 0.11 ms is beyond any device (allowed: 1e+17 FLOP/s)"),
    ],
)
def test_parts_that_fail_leave_the_profile_of_the_kernels(seqlen, parts, said, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "profile_steps", lambda *_: profile_of(trace_of(KERNELS)))
    answer = worker._answer(parted_cell(seqlen, tmp_path))
    assert [part["name"] for part in answer["profile"]["parts"]] == parts
    assert answer["profile"]["kernels"][0]["flops"] == 3
    assert answer["failure"] == said


@pytest.mark.parametrize(("duration", "known"), [(1e3, True), (1e-6, False)])
def test_a_kernel_that_cannot_have_done_the_ops_work_has_none(duration, known):
    found = profile_of(trace_of([("all", 0.0, duration, 1)]))
    (kernel,) = worker._with_op_work(found, Counts(10**9, 10**6)).kernels
    assert (kernel.flops, kernel.bytes) == ((10**9, 10**6) if known else (None, None))


def test_a_process_tells_the_profile_and_why_it_lacks_its_parts(tmp_path):
    answer = profile_cell(parted_cell(4, tmp_path), {}, 60)
    assert "aten::mul" in [kernel.name for kernel in answer.profile.kernels]
    assert answer.failure == "parted infer B=1 T=4 H=2 K=16 V=16 fp32: its parts failed: RuntimeError: broken"


CPU = ("--device", "cpu", "--seqlen", "64", "--heads", "2", "--head-dim", "16", "--time-limit", "0.1")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The folder of a run with profiles of two cells on a CPU, and what the command printed."""
    folder = tmp_path_factory.mktemp("profiled")
    with mock.patch("glabench.cli.profile.profile_cell", profile_here):
        code, out, err = glabench(folder, "profile", "linear-torch,gla-torch", *CPU, "--out", "run", renders=True)
    assert code == 0, err
    return folder, out


def test_calls_on_a_cpu_are_shown_by_torchs_operators(profiled):
    folder, out = profiled
    assert "aten::bmm" in out
    run = load(folder / "run")
    assert [cell.backend for cell in run.profiles] == ["linear-torch", "gla-torch"]
    for found in run.profiles.values():
        assert found.on_device is False
        assert 0 < found.busy_ms <= found.span_ms * 1.01


def test_a_report_of_a_run_with_profiles_shows_them(profiled):
    folder, _ = profiled
    run = load(folder / "run")
    page = (folder / "run" / "report.md").read_text()
    assert profiles_markdown(run) in page
    assert page.count("| aten::bmm |") == 2
    assert (folder / "run" / "profile.png").stat().st_size > 1000
    labels = [text.get_text() for text in draw_profiles(run).axes[0].get_yticklabels()]
    assert [label.partition("\n")[0] for label in labels] == ["linear-torch", "gla-torch"]


@pytest.fixture
def profiler(monkeypatch):
    """Stands in for the process that profiles a cell: gives a profile, or an answer by what is in `answers`."""
    answers = {}

    def profile(request, variables, timeout_s):
        answer = answers.get(request.cell.backend, Answer(profile_of(trace_of(KERNELS))))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr("glabench.cli.profile.profile_cell", profile)
    return answers


@pytest.mark.parametrize(
    ("before", "now", "compared", "note"),
    [
        ("gla-torch", "gla-torch", True, None),
        ("gla-torch,linear-torch", "gla-torch", True, None),
        ("linear-torch", "gla-torch", True, "earlier has one profile, of another cell: linear-torch fwd+bwd B=1 T=64"),
        ("gla-torch,linear-torch", "gla-parallel-torch", False, "earlier has 2 profiles, none of this cell."),
    ],
)
@pytest.mark.usefixtures("profiler")
def test_profiles_are_compared_with_those_of_a_run(before, now, compared, note, tmp_path, monkeypatch):
    monkeypatch.setattr("glabench.cli.profile.write_report", lambda *_: [])
    assert glabench(tmp_path, "profile", before, *CPU, "--out", "earlier")[0] == 0
    code, out, err = glabench(tmp_path, "profile", now, *CPU, "--out", "again", "--compare", "earlier")
    assert code == 0, err
    assert ("adds, ms, earlier ┃ adds, ms, now ┃ ratio" in out) == compared
    assert note in out if note else "earlier has" not in out


@pytest.mark.usefixtures("profiler")
def test_a_comparison_with_another_device_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("glabench.cli.profile.write_report", lambda *_: [])
    earlier = RESULTS / "h200-profile-counters"
    code, out, err = glabench(tmp_path, "profile", "gla-torch", *CPU, "--out", "run", "--compare", earlier)
    assert code == 0, err
    here = device_name(load(tmp_path / "run").environment)
    assert "h200-profile-counters has one profile, of another cell" in out
    assert f"h200-profile-counters is of another device: NVIDIA H200; this one is {here}\n" in out
    code, out, err = glabench(tmp_path, "profile", "gla-torch", *CPU, "--out", "again", "--compare", "run")
    assert (code, "another device" in out) == (0, False), err


@pytest.mark.usefixtures("profiler")
def test_a_comparison_with_profiles_that_were_cut_off_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("glabench.cli.profile.write_report", lambda *_: [])
    assert glabench(tmp_path, "profile", "gla-torch,linear-torch", *CPU, "--out", "earlier")[0] == 0
    file = tmp_path / "earlier" / "profiles.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    code, _, err = glabench(tmp_path, "profile", "gla-torch", *CPU, "--out", "run", "--compare", "earlier")
    assert (code, f"earlier: {CUT_OFF}" in err) == (0, True)
    file.write_bytes(file.read_bytes()[:99])
    code, _, err = glabench(tmp_path, "profile", "gla-torch", *CPU, "--out", "none", "--compare", "earlier")
    assert (code, f"--compare: 'earlier' has no profiles ({CUT_OFF})" in err) == (2, True)


def test_an_interrupted_profile_says_what_is_kept(tmp_path, profiler):
    class Interrupted(MadeUpWorker):
        def measure(self, cell):
            if cell.backend == "gla-torch":
                raise KeyboardInterrupt
            return super().measure(cell)

    arguments = ("profile", "linear-torch,gla-torch", *CPU, "--out")
    code, _, err = glabench(tmp_path, *arguments, "measuring", workers=Interrupted)
    again = "for profiles run glabench profile again, which measures anew"
    assert code == 130
    assert last_line(err) == f"glabench: interrupted; what was measured is kept, {again}"
    assert len(load(tmp_path / "measuring").records) == 1
    profiler["gla-torch"] = KeyboardInterrupt()
    code, _, err = glabench(tmp_path, *arguments, "profiling")
    kept = "what was measured and profiled is kept, glabench report profiling shows it"
    assert (code, last_line(err)) == (130, f"glabench: interrupted; {kept}; {again}")
    assert [cell.backend for cell in load(tmp_path / "profiling").profiles] == ["linear-torch"]


@pytest.fixture
def repository(tmp_path):
    """A repository with a commit."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "first")
    return tmp_path


def test_profiles_of_revisions_stand_side_by_side(repository, profiler):
    profiler["gla-torch"] = GlabenchError("gla-torch: lost")
    profiler["linear-torch"] = Answer(profile_of(trace_of(KERNELS)), "linear-torch: its parts failed")
    backends = "gla-torch,linear-torch,gla-parallel-torch"
    code, out, err = glabench(repository, "profile", backends, *CPU, "--rev", "HEAD..WORKTREE")
    assert code == 4
    assert [line for line in err.splitlines() if line.startswith("error")] == [
        "error: HEAD: gla-torch: lost",
        "error: HEAD: linear-torch: its parts failed",
        "error: WORKTREE: linear-torch: its parts failed",
    ]
    assert out.count("adds, ms, HEAD ┃ adds, ms, WORKTREE ┃ ratio") == 2
    assert ("\nlinear-torch fwd+bwd" in out, "\ngla-parallel-torch fwd+bwd" in out) == (True, True)


@pytest.mark.usefixtures("profiler")
def test_both_sides_of_revisions_are_in_json_also_with_equal_names(repository):
    code, out, err = glabench(repository, "profile", "gla-torch", *CPU, "--rev", "HEAD..HEAD", "--json", "-")
    assert code == 0, err
    (found,) = json.loads(out)
    assert [side.pop("revision") for side in found["sides"]] == ["HEAD", "HEAD"]
    assert [Profile.from_json(side) for side in found["sides"]] == 2 * [profile_of(trace_of(KERNELS))]


@pytest.mark.usefixtures("profiler")
def test_an_unknown_revision_is_a_mistake(repository):
    code, _, err = glabench(repository, "profile", "gla-torch", *CPU, "--rev", "HEAD..nope")
    assert code == 2
    assert "--rev: 'nope' is neither a revision" in err


def test_a_trace_and_json_of_one_cell(tmp_path):
    trace = tmp_path / "trace.json"
    code, out, err = glabench(tmp_path, "profile", "linear-torch", *CPU, "--trace", str(trace), "--json", "-")
    assert code == 0, err
    (found,) = json.loads(out)
    assert found["cell"]["backend"] == "linear-torch"
    assert "aten::bmm" in [kernel["name"] for kernel in found["kernels"]]
    assert any(event.name == CALL for event in load_trace(trace).marks)


def test_a_cell_without_a_profile_does_not_end_the_others(profiler, tmp_path):
    profiler["faulty"] = GlabenchError("no profile of this one")
    plugin = tmp_path / "faulty.py"
    plugin.write_text(FAULTY)
    arguments = ("faulty,linear-torch", *CPU, "--plugin", str(plugin), "--out", "run")
    code, _, err = glabench(tmp_path, "profile", *arguments)
    assert code == 4
    assert "error: no profile of this one" in err
    assert [cell.backend for cell in load(tmp_path / "run").profiles] == ["linear-torch"]


def test_a_profile_of_nothing_that_can_run_has_the_code_of_that(profiler, tmp_path):
    sizes = ("--seqlen", "64", "--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32")
    code, _, err = glabench(tmp_path, "profile", "gla-torch", "--device", "cpu", *sizes, "--chunk", "3")
    assert code == 3
    assert "unsupported: chunk sizes are multiples of 16; got 3" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "BACKEND: 'nope' is unknown"),
        (
            ("gla-torch", "--seqlen", "64,128", "--trace", "t.json"),
            "--trace: the axes name 2 cells; give one value each",
        ),
        (("gla-torch", "--backend", "gla-torch"), "--backend: BACKEND names it already"),
        (("gla-torch", "--memory", "m.pickle"), "--memory: torch keeps a history of allocations on a GPU alone"),
        (("gla-torch", "--trace", "no/such/folder/t.json"), "--trace: cannot write"),
        (("gla-torch", "--trace", "-"), "--trace: cannot write to stdout; give a file"),
        (("gla-torch", "--memory", "-"), "--memory: cannot write to stdout; give a file"),
        (("gla-torch", "--memory", "."), "--memory: cannot write '.'; give a file"),
        (("gla-torch", "--compare", "missing"), "--compare: 'missing' is not a run folder"),
        (("gla-torch", "--rev", "A..B", "--out", "run"), "--rev: makes no run; leave out --out"),
        (
            ("gla-torch", "--rev", "A..B", "--trace", "t.json"),
            "--trace: is of one profile, and --rev makes two; leave out",
        ),
        (("gla-torch", "--rev", "A..B", "--memory", "m.pickle"), "--memory: is of one profile, and --rev makes two"),
        (
            ("gla-torch", "--trace", "x.json", "--json", "./x.json"),
            "--json: --trace already writes to './x.json'; give another file",
        ),
        (("gla-torch", "--trace", "x", "--memory", "x"), "--memory: --trace already writes to 'x'; give another file"),
        (("gla-torch", "--memory", "x", "--json", "x"), "--json: --memory already writes to 'x'; give another file"),
    ],
)
def test_what_cannot_be_profiled_is_said(arguments, message, tmp_path):
    code, _, err = glabench(tmp_path, "profile", *arguments, "--device", "cpu")
    assert code == 2
    assert message in err
