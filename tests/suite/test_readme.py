"""The README and the documents agree with the code and the results."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from in_process import WorkerHere

from glabench.backends import load_registry
from glabench.cli.app import make_app
from glabench.cli.options import find_axes
from glabench.errors import ExitCode
from glabench.records import Measured
from glabench.records.metrics import METRICS
from glabench.sweeps import load_sweep
from glabench.verdicts import Baseline

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
README, METHOD, RECORDS = TEXTS["README.md"], TEXTS["docs/method.md"], TEXTS["docs/records.md"]


def test_it_is_short():
    assert len(README.split()) <= 900


def tables_of_runs():
    for page, text in TEXTS.items():
        for found in re.finditer(r"<!-- rows of (\S+) -->\n((?:\|.*\n)+)", text):
            yield pytest.param(found[1], found[2].splitlines(), id=f"{page}-{found[1]}")


@pytest.mark.parametrize(("report", "rows"), list(tables_of_runs()))
def test_every_row_of_a_table_is_in_the_report_that_it_names(report, rows):
    known = (ROOT / report).read_text(encoding="utf-8").splitlines()
    assert len(rows) > 4
    assert [row for row in rows if row not in known and set(row) - set("|-: ")] == []


def test_the_tables_are_found():
    assert len(list(tables_of_runs())) == 5


def test_the_readmes_times_are_of_forward_and_backward():
    report = (ROOT / "results/h200-paper-fig2/report.md").read_text(encoding="utf-8")
    both = "".join(re.findall(r"^\*\*forward \+ backward: [^*]+\*\*, median time.+?(?=^\*\*)", report, re.M | re.S))
    rows = re.findall(r"^\| (?:gla|linear|fla|sdpa|flash|mamba).*$", README, re.MULTILINE)
    assert len(rows) == 9
    assert all(row in both for row in rows)


def test_the_page_of_backends_has_every_one_with_its_op():
    found = {}
    for names, ops in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", TEXTS["docs/backends.md"], re.MULTILINE):
        backends, listed = re.findall(r"`([^`]+)`", names), ops.split(", ")
        found |= dict(zip(backends, listed * len(backends) if len(listed) == 1 else listed, strict=False))
    assert found == {name: backend.op for name, backend in load_registry().items()}


def targets():
    for page, text in TEXTS.items():
        for target in sorted(set(re.findall(r"\]\(((?!http)[^)#]+)\)", text))):
            yield pytest.param(PAGES[page].parent / target, id=f"{page}-{target}")


@pytest.mark.parametrize("path", list(targets()))
def test_every_link_leads_to_a_file(path):
    assert path.exists()


def commands():
    """Every command `glabench ...` in the pages, once."""
    found = {}
    for text in TEXTS.values():
        code = [*re.findall(r"`(glabench [^`\n]+)`", text), *re.findall(r"^(glabench .+)$", text, re.MULTILINE)]
        found |= {line.split("  #")[0].split(" > ")[0].strip(): None for line in code}
    return list(found)


@pytest.fixture(scope="module")
def app():
    import typer.main

    return typer.main.get_command(make_app(find_axes([])))


@pytest.mark.parametrize("line", commands())
def test_every_command_that_a_page_shows_exists_with_its_options(app, line):
    words = shlex.split(line)[1:]
    command = app
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert command is not app or words[:1] == ["--help"]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.split("=")[0] for word in words if word.startswith("-")} <= known | {"--help"}


def test_many_commands_are_shown():
    assert len(commands()) > 20


def test_metrics_that_the_readme_names_exist():
    named = re.search(r"--metric ([a-z_,]+)", README)[1].split(",")
    assert set(named) <= {metric.name for metric in METRICS}


def test_the_readmes_plugin_is_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(re.search(r"```python\n(from glabench.backends.*?)```", README, re.DOTALL)[1])
    assert load_registry([str(file)])["mine"].op == "softmax"


def test_the_page_of_backends_example_runs_by_its_command_on_a_cpu(command, tmp_path):
    page = TEXTS["docs/backends.md"]
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    mine = "from glabench.ops.recurrence import gated_recurrence\nmy_gla = lambda *rows: gated_recurrence(*rows)[0]\n"
    (tmp_path / "my_package.py").write_text(mine)
    shown = shlex.split(re.search(r"`glabench (run [^`]+ --plugin mine.py)`", page)[1])
    words = ["mine" if word == "mine,gla-triton" else word for word in shown]  # gla-triton needs a GPU
    small = ["--device", "cpu", "--seqlen", "32", "--heads", "1", "--head-dim", "16", "--time-limit", "0.02"]
    done = command(*words, *small, "--json", "-", workers=WorkerHere)
    found = [(record["backend"], record["pass"], record["status"]) for record in json.loads(done[1])]
    assert found == [("mine", "fwd", "ok"), ("mine", "fwd+bwd", "ok")], done


def test_the_plugin_pages_parameter_is_an_axis_and_a_short_window_is_found_out(command, tmp_path):
    (tmp_path / "windowed.py").write_text(re.search(r"```python\n(.*?)```", TEXTS["docs/plugins.md"], re.DOTALL)[1])
    chosen = ["--plugin", "windowed.py", "--backend", "windowed", "--device", "cpu", "--seqlen", "64", "--pass", "fwd"]
    done = command(
        "run", "cpu-smoke", *chosen, "--window", "16,64", "--time-limit", "0.02", "--json", "-", workers=WorkerHere
    )
    found = {record["window"]: record["status"] for record in json.loads(done[1])}
    assert found == {16: "inaccurate", 64: "ok"}, done


def test_the_plugin_pages_op_runs_as_printed(command, tmp_path):
    code = re.findall(r"```python\n(.*?)```", TEXTS["docs/plugins.md"], re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line]) <= 25
    (tmp_path / "mean.py").write_text(code)
    chosen = ["--plugin", "mean.py", "--backend", "mean-torch", "--device", "cpu", "--seqlen", "64"]
    done = command("run", "cpu-smoke", *chosen, "--time-limit", "0.02", "--json", "-", workers=WorkerHere)
    assert [record["status"] for record in json.loads(done[1])] == ["ok", "ok"], done


def test_every_field_and_every_exit_code_is_explained():
    words = set(re.findall(r"`([^`]+)`", RECORDS))
    named = {word for text in words for word in text.split()}
    assert {field.name for field in fields(Measured)} <= named
    assert all(f"| {int(code)} |" in RECORDS for code in ExitCode)


def test_presets_that_pages_name_exist():
    for text in TEXTS.values():
        for name in re.findall(r"glabench run ([a-z][a-z0-9.-]+)(?:\s|`)", text):
            if not name.endswith(".toml"):
                load_sweep(name)


@pytest.mark.parametrize("trial", ["unchanged", "slowed", "baseline"])
def test_the_methods_trials_of_the_check_are_what_was_found(trial):
    found = json.loads((ROOT / f"results/h200-check-trial/{trial}/check.json").read_text())["verdicts"]
    row = next(line for line in METHOD.splitlines() if f"{trial}/check.md" in line)
    assert [int(cell) for cell in row.strip("| ").split(" | ")[2:]] == [
        found.get(word, 0) for word in ("same", "slower", "unclear")
    ]


def test_the_stored_baseline_is_still_one():
    held = Baseline.load(ROOT / "results/baselines/nvidia-h200.json")
    assert len({record.cell for record in held.rounds[0]}) == 24
    assert {record.cell.backend for record in held.rounds[0]} <= set(load_registry())


def test_the_run_that_the_readme_shows_holds_what_it_claims():
    """The paper's sweep, with every cell ok except for a backend that needs too much memory."""
    lines = (ROOT / "results/h200-paper-fig2/records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {r["backend"] for r in records if r["status"] != "ok"} == {"gla-torch"}
    at_4k = {
        (r["backend"], r["materialize"]): r["time_ms"]
        for r in records
        if r["seqlen"] == 4096 and r["pass"] == "fwd+bwd"
    }
    assert at_4k["gla-triton", "states"] < at_4k["gla-triton", "checkpoints"] < at_4k["sdpa-flash", None]
    assert {"flash-attn", "mamba1"} <= {r["backend"] for r in records}
