"""Files of unknown origin: whatever they hold, the user gets an answer or one line, and no code of theirs is run."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from glabench.backends import load_registry
from glabench.errors import UsageError
from glabench.measure.settings import Settings
from glabench.records import Ceilings, Record, RunFolder
from glabench.records.baseline import Baseline
from glabench.records.comparison import clocks, compare_runs, differences
from glabench.report import comparison
from glabench.report.comparison import Comparison
from glabench.report.series import choose_x
from glabench.report.tables import markdown, rich_tables, to_frame
from glabench.report.write import write_report
from glabench.sweeps import Cell, load_sweep
from glabench.sweeps.load import dump_sweep

ROOT = Path(__file__).parents[2]
TRAITS = load_registry().traits()
# The same examples every time; the folder of one test serves all of its examples.
FIXED = settings(
    derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# What a terminal, a table, a figure or an encoding may take for more than text.
TRAPS = ["[red]", "[/nope]", "\x1b]0;title\x07", "$\\frac{$", "a|b\n# c", "\ud800", "\u202egnirts", "%s{}", "=1+1", ""]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, 0.0, -1, 10**400, 5e-324, 1e308, 2**62, "ok", "nan", [[[]]], {"a": {"b": []}}]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(TRAPS),
    st.lists(st.one_of(st.floats(), st.text(max_size=3)), max_size=4),
    st.dictionaries(st.sampled_from(["o", "dq", *TRAPS]), st.one_of(st.none(), st.floats(), st.text(max_size=3))),
)


def record_at(seqlen):
    cell = Cell("gla-triton", "gla", "fwd+bwd", 32, seqlen, 16, 64, 64, 16, True, "bf16", "slow", "cuda")
    times = {"time_ms": 1.5, "time_ms_p20": 1.4, "time_ms_p80": 1.6, "samples_ms": (1.4, 1.5, 1.6)}
    speeds = {"gbps": 900.0, "copy_gbps": 4000.0, "peak_allocated_mib": 12.0, "stop_reason": "time limit"}
    return Record("run", cell, "ok", rel_error={"o": 3e-3}, launch="C=16", **times, **speeds).to_json()


@st.composite
def mutated_records(draw):
    """A few records, each with some fields replaced by odd values or left out."""
    rows = [record_at(1024 * 2**i) for i in range(draw(st.integers(1, 3)))]
    for row in rows:
        for key in draw(st.lists(st.sampled_from(sorted(row)), max_size=3, unique=True)):
            if draw(st.integers(0, 5)):
                row[key] = draw(ODD)
            else:
                del row[key]
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return RunFolder.create(tmp_path_factory.mktemp("runs") / "run", load_sweep("cpu-smoke"), {"cpu": "a CPU"})


def keep(folder, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder.path / "records.jsonl").write_text(text, encoding="utf-8")


def show(folder):
    """Everything that a report shows, as text."""
    records, sweep = folder.records(), folder.sweep()
    if not records:
        return ""
    console = Console(width=160, no_color=True)
    x = choose_x(records, sweep.x)
    with console.capture() as captured:
        for table in rich_tables(records, x):
            console.print(table)
    return captured.get() + markdown(records, x, sweep.baseline) + to_frame(records).to_csv(index=False)


def check_shown(folder):
    """Shows the folder or refuses it; either way without what a terminal would obey."""
    try:
        text = show(folder)
    except UsageError as problem:
        text = str(problem)
        assert "records.jsonl: line" in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    text.encode()


# Records


@FIXED
@given(rows=mutated_records())
def test_records_with_odd_values_are_shown_or_refused_by_name(folder, rows):
    keep(folder, rows)
    check_shown(folder)


@FIXED
@given(at=st.integers(0, 700), cut=st.integers(0, 5), put=st.binary(max_size=5))
def test_records_with_odd_bytes_are_shown_or_refused_by_line(folder, at, cut, put):
    line = json.dumps(record_at(1024)).encode()
    (folder.path / "records.jsonl").write_bytes(line[:at] + put + line[at + cut :] + b"\n")
    check_shown(folder)


@settings(FIXED, max_examples=40)
@given(ours=mutated_records(), theirs=mutated_records())
def test_records_with_odd_values_are_compared_or_refused(folder, ours, theirs):
    sides = []
    for rows in (ours, theirs):
        keep(folder, rows)
        try:
            sides.append([folder.records()])
        except UsageError:
            return
    found = Comparison("A", "B", compare_runs(*sides), (), (clocks(sides[0]), clocks(sides[1])))
    console = Console(width=160, no_color=True)
    with console.capture():
        console.print(comparison.rich_table(found))
    comparison.markdown(found).encode()
    json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("label", "number", "count"), [("$\\frac{$", 1e-18, 2**62), ("[/nope]", 9e18, 1), ("\x1b]0;\x00\ud800", 1.0, 2**62)]
)
def test_a_whole_report_of_odd_but_valid_records_is_written(folder, label, number, count):
    rows = [record_at(1024), record_at(count) | {"backend": label, "gate": label, "time_ms": number}]
    rows[1] |= {"time_ms_p20": number, "peak_allocated_mib": -number, "heads": count, "status": "ok", "reason": label}
    rows.append(record_at(4096) | {"status": "oom", "time_ms": None, "reason": label})
    keep(folder, rows)
    records = folder.records()
    for path in write_report(folder, replace(folder.sweep(), title=label, description=label), records, label):
        assert path.stat().st_size > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time_ms": "fast"}, "time_ms needs a number above 0 or null, got 'fast'"),
        ({"time_ms": 0}, "time_ms needs a number above 0 or null, got 0"),
        ({"gbps": float("nan")}, "gbps needs a number above 0 or null, got nan"),
        ({"samples_ms": [1, None]}, "samples_ms needs a list (each a number above 0) or null, got [1, None]"),
        ({"rel_error": [1]}, "rel_error needs a table (each a number or null) or null, got [1]"),
        ({"batch": 2.5}, "batch needs a whole number above 0, got 2.5"),
        ({"heads": True}, "heads needs a whole number above 0, got True"),
        ({"pass": "sideways"}, "pass needs one of infer, fwd, bwd, fwd+bwd, got 'sideways'"),
        ({"status": ["ok"]}, "status needs one of ok, oom, "),
        ({"materialize": "on"}, "materialize needs true or false or null, got 'on'"),
        ({"reason": {"a": 1}}, "reason needs a text or null"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(folder, changes, words):
    keep(folder, [record_at(1024), record_at(2048) | changes])
    with pytest.raises(UsageError, match=re.escape(f"records.jsonl: line 2 is not a record: {words}")):
        folder.records()


@pytest.mark.parametrize("key", ["backend", "pass", "chunk", "status", "run_id"])
def test_a_field_that_no_record_can_be_without_is_named(folder, key):
    row = record_at(1024)
    del row[key]
    keep(folder, [row])
    with pytest.raises(UsageError, match=f"line 1 is not a record: {key} is missing"):
        folder.records()


@pytest.mark.parametrize("line", ["[1, 2]", "3", "null", '"text"', "[" * 100_000, '{"a":' * 100_000, "9" * 5000, ""])
def test_json_that_is_no_record_is_refused(folder, line):
    (folder.path / "records.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match="line 1 is not a record"):
        folder.records()


def test_a_line_without_end_is_refused_before_it_fills_the_memory(folder):
    with (folder.path / "records.jsonl").open("wb") as file:
        file.write(b'{"a": "')
        file.truncate(2**33)  # 8 GiB of zeros that take no room on the disk
    try:
        with pytest.raises(UsageError, match="line 1 is not a record"):
            folder.records()
    finally:
        (folder.path / "records.jsonl").write_bytes(b"")


RESULTS = sorted(ROOT.glob("results/*/records.jsonl"))


@pytest.mark.parametrize("path", [p.parent for p in RESULTS], ids=lambda path: path.name)
def test_every_run_that_we_stand_behind_can_be_read(path):
    run = RunFolder.open(path)
    assert len(run.records()) > 3
    assert run.sweep().variants
    assert run.environment()["packages"]["torch"]


# The rest of a run folder


ENVIRONMENTS = st.one_of(
    ODD,
    st.dictionaries(st.sampled_from(["gpu", "cpu", "device", "packages", "ceilings"]), ODD),
    st.fixed_dictionaries({"gpu": st.dictionaries(st.sampled_from(["name", "driver"]), ODD)}),
)


@FIXED
@given(environment=ENVIRONMENTS)
def test_an_odd_environment_is_described_or_refused(folder, environment):
    from glabench.report.write import describe_environment

    (folder.path / "environment.json").write_text(json.dumps(environment))
    try:
        found = folder.environment()
        assert isinstance(describe_environment(found), str)
        assert not re.search("[\x00-\x1f\ud800-\udfff]", str(differences(found, {})))
        Ceilings(**found.get("ceilings") or {})
    except UsageError as problem:
        words = str(problem)
        assert "environment.json: not an environment" in words
    finally:
        (folder.path / "environment.json").unlink()


@settings(FIXED, max_examples=60)
@given(
    rows=mutated_records(),
    changes=st.dictionaries(st.sampled_from(["environment", "sweep", "rounds", "revision", "format"]), ODD, max_size=2),
)
def test_an_odd_baseline_is_read_or_refused_by_name(folder, rows, changes):
    sweep = {"name": "gate", "toml": dump_sweep(load_sweep("gate"))}
    data = {"format": 1, "environment": {}, "sweep": sweep, "revision": None, "rounds": [rows]}
    path = folder.path / "baseline.json"
    path.write_text(json.dumps(data | changes))
    try:
        Baseline.load(path)
    except UsageError as problem:
        words = str(problem)
        assert words.startswith("--baseline: ")


@pytest.mark.parametrize("revision", ["main", "--upload-pack=x", "WORKTREE", "HEAD~1", 3])
def test_a_baseline_names_the_code_that_it_came_from_by_its_hash_alone(folder, revision):
    path = folder.path / "baseline.json"
    Baseline(load_sweep("gate"), {}, "0123456789abcdef", [[Record.from_json(record_at(1024))]]).save(path)
    assert Baseline.load(path).revision == "0123456789abcdef"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": revision}))
    with pytest.raises(UsageError, match="revision needs the hash of a commit"):
        Baseline.load(path)


@FIXED
@given(data=st.dictionaries(st.sampled_from(sorted(Settings().to_json())), ODD))
def test_odd_settings_are_refused_by_name(data):
    try:
        Settings.from_json(data)
    except ValueError as problem:
        words = str(problem)
        assert any(words.startswith(name) for name in data)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"[" * 100_000, b" " * 2**21, b"", b"{", b"9" * 5000])
@pytest.mark.parametrize("name", ["environment.json", "sweep.toml"])
def test_files_of_a_run_that_are_garbage_are_refused_by_name(folder, name, data):
    before = (folder.path / "sweep.toml").read_bytes()
    (folder.path / name).write_bytes(data)
    try:
        with pytest.raises(UsageError, match=re.escape(name)):
            folder.environment() if name == "environment.json" else folder.sweep()
    finally:
        (folder.path / "environment.json").unlink(missing_ok=True)
        (folder.path / "sweep.toml").write_bytes(before)


def test_a_report_does_not_write_through_links_that_came_with_a_run(folder, tmp_path):
    keep(folder, [record_at(1024)])
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("report.md", "records.csv", "figure.png", "figure.svg"):
        (folder.path / name).unlink(missing_ok=True)
        (folder.path / name).symlink_to(victim)
    paths = write_report(folder, folder.sweep(), folder.records(), None)
    assert victim.read_text() == "mine"
    assert not any(path.is_symlink() for path in paths)


# Code


BUILTINS = {"eval", "exec", "compile", "__import__"}  # as methods they are others': `re.compile` runs nothing
RUNS_CODE = {"exec_module", "import_module", "run_path", "load_module"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "runpy"}
UNSAFE_CALLS = {"read_pickle", "to_pickle", "allow_pickle", "torch.load", "np.load", "os.system", "os.popen", "shell"}


def names_in(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.keyword):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield from {node.attr, ast.unparse(node)} - BUILTINS


def test_the_registry_of_backends_alone_loads_code():
    found = {}
    for path in (ROOT / "glabench").rglob("*.py"):
        unsafe = set(names_in(path)) & (BUILTINS | RUNS_CODE | UNSAFE_MODULES | UNSAFE_CALLS)
        if unsafe:
            found[path.relative_to(ROOT).as_posix()] = unsafe
    assert found == {"glabench/backends/registry.py": {"exec_module"}}
