"""The README says what is so."""

import re
from pathlib import Path

import pytest

from glabench.backends import load_registry
from glabench.cli.options import SweepOptions
from glabench.errors import ExitCode
from glabench.sweeps import AXES
from glabench.sweeps.load import parse_sweep

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_number_in_its_table_is_in_the_report_of_the_run():
    rows = re.search(r"<!-- rows of (\S+) -->\n((?:\|.*\n)+)", README)
    report = (ROOT / rows[1]).read_text(encoding="utf-8").split("**forward + backward**, median ms")[1]
    assert rows[2].count("\n") == 11
    assert rows[2] in report


def rows_of_runs():
    """Every row that names a run's report: the report, the pass, the columns' labels and the row's cells."""
    labels = []
    for line in README.splitlines():
        if line.startswith("| run | pass | "):
            labels = line.strip("| ").split(" | ")[2:]
        elif row := re.fullmatch(r"\| \[.*\]\((results/\S+)\) \| ([^|]+) \| (.*) \|", line):
            yield row[1], row[2], labels, [cell.strip() for cell in row[3].split(" | ")]


@pytest.mark.parametrize(("report", "pass_", "labels", "cells"), list(rows_of_runs()))
def test_every_time_at_the_sizes_of_models_is_in_the_report_of_its_run(report, pass_, labels, cells):
    text = (ROOT / report).read_text(encoding="utf-8")
    times = re.search(rf"\*\*{re.escape(pass_)}\*\*, median ms.*?\n\n((?:\|.*\n)+)", text)[1]
    known = dict(re.findall(r"\| ([^|]+) \| ([^|]+) \|", times))
    assert cells == [known[label].removesuffix(" (×1)") if label == "fla-gla" else known[label] for label in labels]


def test_both_tables_of_runs_are_found():
    assert [len(labels) for _, _, labels, _ in rows_of_runs()] == 8 * [5] + 2 * [4]


METHOD = (ROOT / "docs/method.md").read_text(encoding="utf-8")


def test_every_number_in_the_methods_tables_is_in_the_validation():
    tables = re.findall(r"<!-- rows of (\S+) -->\n((?:\|.*\n)+)", METHOD)
    assert len(tables) == 2
    assert all(rows in (ROOT / report).read_text(encoding="utf-8") for report, rows in tables)


@pytest.mark.parametrize(("trial", "outcomes"), [("unchanged", [27, 0, 0]), ("slowed", [24, 3, 0])])
def test_the_methods_trial_of_the_gate_is_what_was_found(trial, outcomes):
    import json

    found = json.loads((ROOT / f"results/h200-gate-trial/{trial}/check.json").read_text())
    assert [sum(f["outcome"] == name for f in found) for name in ("fine", "regression", "unclear")] == outcomes
    row = next(line for line in METHOD.splitlines() if f"{trial}/check.md" in line)
    assert [int(cell) for cell in row.strip("| ").split(" | ")[2:]] == outcomes


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(((?!http)[^)]+)\)", METHOD))))
def test_every_link_of_the_method_leads_to_a_file(target):
    assert (ROOT / "docs" / target).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(((?!http)[^)]+)\)", README))))
def test_every_link_leads_to_a_file(target):
    assert (ROOT / target).exists()


def test_its_sweep_file_is_right():
    sweep = parse_sweep("readme", re.search(r"```toml\n(.*?)```", README, re.DOTALL)[1], "README")
    assert {v.backend for v in sweep.variants} <= set(load_registry())


def test_it_names_every_axis_every_option_and_every_exit_code():
    assert all(axis.option in README for axis in AXES.values())
    shared = {name for name in SweepOptions.__dataclass_fields__ if name not in AXES} - {"pass_", "json_to", "csv_to"}
    assert all(f"--{name.replace('_', '-')}" in README for name in shared - {"quiet", "verbose"})
    assert all(f"| {int(code)} |" in README for code in ExitCode)


def test_the_run_that_it_shows_holds_what_the_figure_claims():
    """The paper's sweep, every cell ok but for the one backend whose memory the README explains."""
    import json

    lines = (ROOT / "results/h200-paper-fig2/records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert {r["backend"] for r in records if r["status"] != "ok"} == {"gla-torch"}
    at_4k = {
        (r["backend"], r["materialize"]): r["time_ms"]
        for r in records
        if r["seqlen"] == 4096 and r["pass"] == "fwd+bwd"
    }
    assert at_4k["gla-triton", True] < at_4k["gla-triton", False] < at_4k["sdpa-flash", None]
