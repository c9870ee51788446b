"""Files from unknown sources: the user gets a result or one line, and no code in them is run."""

import ast
import json
import re
from pathlib import Path

import pytest
from hostile import FIXED, ODD, TRAPS, first_schema, keep, mutated_records, record_at
from hypothesis import given, settings
from hypothesis import strategies as st

from glabench.errors import UsageError
from glabench.measure.settings import Settings
from glabench.records import Record, RunFolder
from glabench.records.diagnosis import diagnose
from glabench.records.environment import device_name
from glabench.records.metrics import METRICS
from glabench.records.run import rows_of
from glabench.report.describe import describe_progress
from glabench.sweeps import load_sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return RunFolder.create(tmp_path_factory.mktemp("runs") / "run", load_sweep("cpu-smoke"), {"cpu": "a CPU"})


def show(folder):
    """The texts of a report."""
    run = folder.load()
    words = [run.table().to_csv(index=False), device_name(run.environment)]
    for record in run.records:
        assert Record.from_line(record.to_line()) == record
        words += [str(record.cell), *map(str, diagnose(record))]
    for row in rows_of(run.records):
        words += [metric.format(row[metric.field]) for metric in METRICS if row[metric.field] is not None]
    return "\n".join(words)


def check_shown(folder):
    """Shows the folder or refuses it, in both cases without control characters."""
    try:
        text = show(folder)
    except UsageError as problem:
        text = str(problem)
        assert "records.jsonl: line" in text
        assert "\n" not in text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    text.encode()


# Records


@settings(FIXED, max_examples=400)
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


@pytest.mark.parametrize(
    ("label", "number", "count"), [("$\\frac{$", 1e-18, 2**62), ("[/nope]", 9e18, 1), ("\x1b]0;\x00\u202e", 1.0, 2**62)]
)
@pytest.mark.parametrize("schema", [1, 2])
def test_odd_but_valid_records_are_shown(folder, label, number, count, schema):
    rows = [record_at(1024), record_at(count) | {"backend": label, "gate": label, "time_ms": number}]
    rows[1] |= {"time_ms_p20": number, "peak_allocated_mib": -number, "heads": count, "status": "ok", "reason": label}
    rows.append(record_at(4096) | {"status": "oom", "time_ms": None, "reason": label})
    keep(folder, rows if schema == 2 else map(first_schema, rows))
    check_shown(folder)
    assert len(folder.records()) == 3


WRONG = [
    ({"time_ms": "fast"}, "time_ms: expected float | null, got str"),
    ({"time_ms": 0}, "time_ms: expected float >= 1e-18"),
    ({"time_ms": True}, "time_ms: expected float | null, got bool"),
    ({"gbps": 1e300}, "gbps: expected float <= 9.2"),
    ({"gbps": float("nan")}, "JSON is malformed"),
    ({"samples_ms": [1, None]}, "samples_ms[1]: expected float, got null"),
    ({"exposed_samples": 2**63}, "exposed_samples: expected int <= 9223372036854775807"),
    ({"rel_error": [1]}, "rel_error: expected object | null, got array"),
    ({"rel_error": {"o": "x"}}, "rel_error[...]: expected float | null, got str"),
    ({"batch": 2.5}, "batch: expected int, got float"),
    ({"seqlen": 0}, "seqlen: expected int >= 1"),
    ({"pass": "sideways"}, "pass: invalid enum value 'sideways'"),
    ({"dtype": "fp8"}, "dtype: invalid enum value 'fp8'"),
    ({"device": None}, "device: expected str, got null"),
    ({"status": ["ok"]}, "status: expected str, got array"),
    ({"reason": {"a": 1}}, "reason: expected str | null, got object"),
    ({"backend": "b" * 301}, "backend: expected str of length <= 300"),
    ({"launch": "x" * 10_001}, "it holds text of more than 10000 characters"),
    ({"reason": [[[[[[[[[[]]]]]]]]]]}, "tables or lists are nested more than 8 deep"),
]
WRONG_FIRST = [
    ({"heads": True}, "heads: expected int, got bool"),
    ({"heads": None}, "heads: expected int, got null"),
    ({"key_dim": 0}, "key_dim: expected int >= 1"),
    ({"materialize": "on"}, "materialize: expected bool | null, got str"),
    ({"chunk": "auto"}, "chunk: expected int | null, got str"),
    ({"op": "mamba1", "heads": 2**62}, "inner: expected int <= 9223372036854775807"),
]
WRONG_SECOND = [
    ({"parameters": "heads"}, "parameters: expected array | null, got str"),
    ({"parameters": ["a"] * 101}, "parameters: expected array of length <= 100"),
    ({"parameters": [1]}, "parameters[0]: expected str, got int"),
    ({"heads": [16]}, "heads: expected bool | int | float | str | null, got array"),
    ({"heads": 2**63}, "heads: expected int <= 9223372036854775807"),
]


@pytest.mark.parametrize(
    ("schema", "changes", "words"),
    [
        *((schema, changes, words) for changes, words in WRONG for schema in (1, 2)),
        *((1, changes, words) for changes, words in WRONG_FIRST),
        *((2, changes, words) for changes, words in WRONG_SECOND),
    ],
)
def test_a_field_of_the_wrong_type_is_named(folder, schema, changes, words):
    rows = [record_at(1024), record_at(2048) | changes]
    keep(folder, rows if schema == 2 else map(first_schema, rows))
    with pytest.raises(UsageError, match=re.escape(f"records.jsonl: line 2 is not a record: {words}")):
        folder.records()


@pytest.mark.parametrize(
    ("schema", "key"),
    [(schema, key) for key in ("backend", "op", "pass", "seqlen", "device", "status", "run_id") for schema in (1, 2)]
    + [(1, "heads"), (1, "chunk")],
)
def test_a_field_that_no_record_can_be_without_is_named(folder, key, schema):
    row = record_at(1024) if schema == 2 else first_schema(record_at(1024))
    del row[key]
    keep(folder, [row])
    with pytest.raises(UsageError, match=f"line 1 is not a record: it has no {key}"):
        folder.records()


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        "3",
        "null",
        '"text"',
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        "",
        "NaN",
        '{"a": "\\ud800"}',
        "{}{}",
    ],
)
def test_json_that_is_no_record_is_refused(folder, line):
    (folder.path / "records.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match="line 1 is not a record"):
        folder.records()


def test_a_line_without_end_is_refused_before_it_fills_the_memory(folder):
    with (folder.path / "records.jsonl").open("wb") as file:
        file.write(b'{"a": "')
        file.truncate(2**33)  # 8 GiB of zeros in a sparse file
    try:
        with pytest.raises(UsageError, match="line 1 is not a record"):
            folder.records()
    finally:
        (folder.path / "records.jsonl").write_bytes(b"")


RESULTS = sorted(ROOT.glob("results/*/records.jsonl"))


@pytest.mark.parametrize("path", [p.parent for p in RESULTS], ids=lambda path: path.name)
def test_every_run_that_we_stand_behind_can_be_read(path):
    run = RunFolder.open(path).load()
    lines = (path / "records.jsonl").read_text().splitlines()
    assert len(run.records) == len(lines) > 0
    assert run.sweep.variants
    assert run.environment["packages"]["torch"]
    page = (ROOT / "docs/results.md").read_text().splitlines()
    assert run.complete or any(f"[{path.name}]" in line and describe_progress(run) in line for line in page)


# The rest of a run folder


ENVIRONMENTS = st.one_of(
    ODD,
    st.dictionaries(
        st.sampled_from(["gpu", "cpu", "device", "packages", "ceilings", "settings", "plugins", "cells", *TRAPS]), ODD
    ),
    st.fixed_dictionaries({"gpu": st.dictionaries(st.sampled_from(["name", "driver"]), ODD)}),
)


@settings(FIXED, max_examples=300)
@given(environment=ENVIRONMENTS)
def test_an_odd_environment_is_described_or_refused(folder, environment):
    keep(folder, [record_at(1024)])
    (folder.path / "environment.json").write_text(json.dumps(environment))
    try:
        run = folder.load()
        assert not re.search("[\x00-\x1f\ud800-\udfff]", device_name(run.environment) + str(run.environment))
        assert isinstance(run.cells, int)
        assert isinstance(run.environment["packages"], dict)
    except UsageError as problem:
        words = str(problem)
        assert "environment.json: not an environment: " in words
    finally:
        (folder.path / "environment.json").unlink()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"gpu": {"driver": "1"}}, "gpu: it has no name"),
        ({"gpu": "H200"}, "gpu: expected object | null, got str"),
        ({"ceilings": {"copy_gbps": 0}}, "ceilings.copy_gbps: expected float >= 1e-18"),
        ({"packages": None}, "packages: expected object, got null"),
        ({"packages": {"torch": 2}}, "packages[...]: expected str | null, got int"),
        ({"plugins": ["a.py", 3]}, "plugins[1]: expected str, got int"),
        ([1], "expected object, got array"),
    ],
)
def test_a_wrong_key_of_an_environment_is_named(folder, environment, words):
    (folder.path / "environment.json").write_text(json.dumps(environment))
    try:
        with pytest.raises(UsageError, match=re.escape(f"environment.json: not an environment: {words}")):
            folder.environment()
    finally:
        (folder.path / "environment.json").unlink()


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


# Code


BUILTINS = {"eval", "exec", "compile", "__import__"}  # methods of these names are harmless: `re.compile` runs nothing
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


def test_the_registry_of_backends_alone_loads_code_of_others():
    found = {}
    for path in (ROOT / "glabench").rglob("*.py"):
        unsafe = set(names_in(path)) & (BUILTINS | RUNS_CODE | UNSAFE_MODULES | UNSAFE_CALLS)
        if unsafe:
            found[path.relative_to(ROOT).as_posix()] = unsafe
    # The package itself imports its own modules, by names that it lists, and workers what its own backends list.
    assert found == {
        "glabench/backends/registry.py": {"exec_module"},
        "glabench/__init__.py": {"import_module"},
        "glabench/measure/worker.py": {"import_module"},
    }


def test_a_plugin_that_came_with_a_run_folder_is_not_loaded_when_it_is_resumed(tmp_path):
    folder = RunFolder.create(tmp_path / "run", load_sweep("cpu-smoke"), {})
    (folder.path / "plugins.json").write_text(json.dumps([str(folder.path / "evil.py")]))
    with pytest.raises(UsageError, match="is in the run folder itself; if you trust it, give it with --plugin"):
        folder.plugins()


@pytest.mark.parametrize("text", ['["a\\u0000b"]', '["a\\u001b[31mb"]', '[""]', "[3]", "3", '["' + "a" * 2**20 + '"]'])
def test_a_list_of_plugins_that_holds_no_paths_is_refused_in_a_line(tmp_path, text):
    folder = RunFolder.create(tmp_path / "run", load_sweep("cpu-smoke"), {})
    (folder.path / "plugins.json").write_text(text)
    with pytest.raises(UsageError, match=r"^[^\n\x1b]*plugins.json: not a list of paths: [^\n\x1b]{1,100}$"):
        folder.plugins()
