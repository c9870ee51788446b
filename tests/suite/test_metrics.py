"""The table of metrics."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from glabench.errors import UsageError
from glabench.records import Measured, Record
from glabench.records.metrics import (
    BY_NAME,
    LIMITED,
    METRICS,
    USUAL,
    choose_metrics,
    derived,
    known,
    parse_compared,
    parse_metrics,
    significant,
)
from glabench.records.run import rows_of
from glabench.sweeps import Cell, Parameters
from glabench.verdicts import Limits


def row(**measured):
    cell = Cell("b", "linear", "fwd", 2, 512, "bf16", Parameters({"heads": 4}))
    return rows_of([Record(cell=cell, run_id="run", status="ok", **measured)])[0]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_a_column_of_every_row(metric):
    assert metric.field in row()
    assert metric.field in {field.name for field in fields(Measured)} | derived(row() | {"rel_error": None}).keys()
    assert metric.title
    assert metric.better in ("lower", "higher", None)


def test_names_and_fields_of_metrics_are_theirs_alone():
    assert len(BY_NAME) == len({metric.field for metric in METRICS}) == len(METRICS)


def test_a_metric_with_a_limit_has_a_better_direction():
    assert all(metric.better == "lower" for metric in METRICS if metric.limit is not None)
    assert [m.name for m in METRICS if m.limit is not None] == ["time", "peak", "first_call", "error"]


def test_the_options_of_a_check_are_those_of_the_table():
    options = {metric.name: metric.option for metric in LIMITED}
    assert options == {
        "time": "--max-slowdown",
        "peak": "--max-memory",
        "first_call": "--max-first-call",
        "error": "--max-error",
    }
    assert all(metric.help for metric in LIMITED)


def test_a_comparison_judges_no_sums():
    assert dict(Limits.of_comparison(0.03).by_metric) == {"time": 0.03, "peak": 0.02, "error": 0.5}


def test_metrics_are_chosen_by_name_in_the_order_given_and_once():
    assert [metric.field for metric in parse_metrics("peak, time,peak")] == ["peak_mib", "time_ms"]
    assert tuple(metric.name for metric in parse_metrics(None)) == USUAL


@pytest.mark.parametrize(
    ("text", "hint"), [("tme", r"; did you mean 'time'\?"), ("zzz", ""), ("", ""), ("time,,peak", ""), ("TIME", "")]
)
def test_a_metric_that_is_none_is_refused_with_those_that_are(text, hint):
    with pytest.raises(
        UsageError, match=rf"^--metric: '.*' is not a metric \(allowed: time, host, peak, .*error{hint}\)$"
    ):
        parse_metrics(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (0.0512, "0.0512"), (1.78, "1.78"), (14.5, "14.5"), (1040, "1040"), (123456, "123000")),
        *((1e-18, "0.000000000000000001"), (1.234e-11, "0.0000000000123"), (0.00001, "0.00001"), (-2.5, "-2.5")),
        *((9e18, "9000000000000000000"), (0.99999, "1"), (999.9, "1000"), (True, "1")),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert significant(value) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("time", 0.12345, "0.123"), ("peak", 1234.5, "1234"), ("peak", 12.34, "12.3"), ("error", 0.00312, "3.1e-03")],
)
def test_a_metric_is_shown_in_its_own_way(name, value, text):
    assert BY_NAME[name].format(value) == text


def test_the_peak_on_a_cpu_is_that_of_the_process():
    assert row(peak_resident_mib=7.0)["peak_mib"] == 7.0
    assert row(peak_resident_mib=7.0, peak_allocated_mib=0.0)["peak_mib"] == 0.0
    assert row()["peak_mib"] is None


def test_what_cannot_be_derived_is_none():
    for measured in ({}, {"gbps": 5.0}, {"copy_gbps": 5.0}, {"rel_error": {}}, {"rel_error": {"o": None}}):
        found = row(**measured)
        assert [found[name] for name in ("floor_pct", "tokens_per_s", "error")] == [None] * 3


def test_tokens_per_second_are_kept_as_such_and_shown_in_millions():
    assert row(time_ms=2.0)["tokens_per_s"] == pytest.approx(2 * 512 / 2e-3)
    assert BY_NAME["tokens"].show(2 * 512 / 2e-3) == "0.512"


def test_metrics_that_no_row_has_are_not_shown():
    rows = [row(time_ms=1.0), row(peak_allocated_mib=0.0)]
    assert [metric.name for metric in known(METRICS, rows)] == ["time", "peak", "tokens", "tokens_gpu"]
    assert known(METRICS, []) == []


A_ROW = 'Metric("host", "host_ms", "host\'s time per call", "ms", "lower"'
WITH_A_LIMIT = A_ROW + ', limit=0.1, option="--max-host", help="How much it may grow.", worse="slower")'
# Replaces a row of the table, then runs a check of made-up records whose host's time grew by half.
CHECK = f"""
import importlib.util, json, pathlib, sys
import numpy as np
import glabench.records
name = "glabench.records.metrics"
path = pathlib.Path(sys.modules[name].__file__)
text = path.read_text().replace({A_ROW + ")"!r}, {WITH_A_LIMIT!r})
module = sys.modules[name] = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
exec(text, module.__dict__)

from simulated import STEADY, measured
from contextlib import redirect_stdout
from io import StringIO
from glabench import cli
from glabench.cli import check
from glabench.verdicts import Side, compare_sides
base, new = (Side(side, measured(STEADY, 0, host_ms=ms)) for side, ms in (("main", 1.0), ("HEAD", 1.5)))
check.measure_and_check = lambda request, rev, baseline, rounds, limits, *rest: compare_sides(base, new, limits)
for options in sys.argv[1:]:
    sys.argv[1:], said = ["check", "--rev", "main", *options.split()], StringIO()
    try:
        with redirect_stdout(said):
            cli.main()
    except SystemExit as end:
        print(json.dumps((end.code, said.getvalue())))
"""
OPTIONS = ["", "--max-host 40%", "--max-host 60%", "--help"]


@pytest.fixture(scope="module")
def checked():
    """The exit code and stdout of a check with each of the options, all from one process."""
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "200"}
    command = [sys.executable, "-c", CHECK, *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(OPTIONS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("", 1, "host's time per call 1 -> 1.5, allowed 1.1 ms"),
        ("--max-host 40%", 1, "host's time per call 1 -> 1.5, allowed 1.4 ms"),
        ("--max-host 60%", 0, "allowed to become worse: time 5 %, host 60 %, peak 2 %"),
        ("--help", 0, "How much it may grow."),
    ],
)
def test_a_row_is_all_that_a_check_with_an_option_of_its_own_needs(checked, options, code, words):
    found, said = checked[options]
    assert (found, words in said) == (code, True), said


def test_a_metric_without_better_and_worse_is_not_compared():
    assert [metric.name for metric in parse_compared("energy,time")] == ["energy", "time"]
    assert parse_compared(None) is None
    with pytest.raises(UsageError, match=r"^--metric: 'power' has no better and worse to compare \(allowed: time, "):
        parse_compared("time,power")


@pytest.mark.parametrize(("hosts", "shown"), [((1.0, 3.0, 3.0), True), ((1.0, 1.0, 3.0), False), ((None,) * 3, False)])
def test_the_hosts_time_is_shown_if_most_calls_wait_for_it(hosts, shown):
    rows = [{"time_ms": 2.0, "host_ms": host} for host in hosts] + [{"time_ms": None, "host_ms": None}]
    names = [metric.name for metric in choose_metrics(None, rows)]
    assert names == (["time", "host", "peak", "roof"] if shown else list(USUAL))
    assert [metric.name for metric in choose_metrics("peak", rows)] == ["peak"]


@pytest.mark.parametrize(
    ("ops", "title"),
    [
        (("training", "text"), "peak memory"),
        (("training", "gla"), "peak memory above the inputs"),
        ((), "peak memory above the inputs"),
    ],
)
def test_the_peak_of_models_is_all_memory(ops, title):
    (peak,) = choose_metrics("peak", [{"op": op} for op in ops])
    assert peak.title == title
