"""Reports from records: tables of runs with every kind of outcome."""

import csv
import io
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from product import product
from reports import H200, OUTCOMES, STORED, USUAL, drawn, made_up, markdown, shown, stored

from glabench.errors import UsageError
from glabench.records.metrics import BY_NAME, METRICS, TIME, choose_metrics, known, parse_metrics, significant
from glabench.report.describe import describe_environment, describe_settings, title_of
from glabench.report.series import make_view, rows_of_runs
from glabench.report.write import choose_drawn, make_page, to_csv, to_frame, write_report
from glabench.sweeps import Cell
from glabench.sweeps.words import show_x


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.05123, "0.0512"),
        (1.784, "1.78"),
        (14.52, "14.5"),
        (1040.3, "1040"),
        (1234567.0, "1230000"),
        (1.23e-05, "0.0000123"),
    ],
)
def test_numbers_are_shown_without_exponents(value, text):
    assert significant(value) == text


# Tables


def test_the_markdown_holds_times_ratios_memory_and_reasons():
    fails = lambda c: "oom" if c.seqlen == 16384 and c.backend == "sdpa-flash" else "ok"  # noqa: E731
    text = markdown(made_up("paper-fig2", {"pass": "fwd"}, fails), against="sdpa-flash")
    assert "in brackets: times as fast as sdpa-flash" in text
    # gla-torch has a shorter name than sdpa-flash by one letter: 10 / 9 of its speed.
    assert "| gla-torch | 27.6 (×1.1)" in text
    assert "- oom: sdpa-flash at 16k (fwd): a reason" in text
    assert "peak memory above the inputs, MiB" in text


def test_ratios_refer_to_the_same_batch_and_length():
    text = markdown(made_up("guard", {"pass": "fwd"}), against="sdpa-flash")
    batch_1 = next(line for line in text.splitlines() if line.startswith("| gla-triton (B=1,"))
    assert batch_1.count("×") == 1  # at 32k, against attention with a batch of 1
    assert "(×1)" in batch_1


def test_a_doubt_is_a_tag_in_a_column_and_explained_once():
    run = made_up("paper-fig2", {"pass": "fwd", "seqlen": "1k,2k"}, stop_reason="time limit")
    doubtful = replace(
        run, records=[replace(r, stop_reason="precision") if r.cell.seqlen == 1024 else r for r in run.records]
    )
    for text in (shown([doubtful]), markdown(doubtful)):
        assert text.count("unsettled 2k") == len(make_view([doubtful]).labels)
        assert text.count("unsettled: ") == 1
        assert "sampling stopped at the time limit, after 3 samples" in re.sub(r"\s+", " ", text)
    assert shown([doubtful], width=60).count("unsettled\n") == len(make_view([doubtful]).labels)
    assert "doubts" not in shown([made_up("paper-fig2", {"seqlen": "1k"})])


def test_square_brackets_in_a_label_are_not_markup_and_bars_end_no_cell():
    run = made_up("paper-fig2", {"seqlen": "1k", "backend": "gla-torch"})
    cells = [replace(r.cell, backend="[bold]a|b") for r in run.records]
    odd = replace(run, records=[replace(r, cell=cell) for r, cell in zip(run.records, cells, strict=True)])
    assert "[bold]a|b" in shown([odd])
    assert "| \\[bold]a\\|b |" in markdown(odd)


def test_the_frame_has_a_column_for_every_tensors_error_and_counts_samples():
    run = made_up("paper-fig2", {"seqlen": "1k"})
    frame = to_frame([run])
    assert {"rel_error_o", "samples", "time_ms", "pass"} <= set(frame.columns)
    assert "samples_ms" not in frame.columns
    assert set(frame["samples"]) == {3}
    assert list(to_frame([run, replace(run, path=Path("b-run"))])["run"].unique()) == ["a-run", "b-run"]


def test_metrics_are_shown_if_known_and_only_then():
    plain = made_up("paper-fig2", {"backend": "gla-triton", "seqlen": "1k,2k"})
    fast = made_up("paper-fig2", {"backend": "gla-triton", "seqlen": "1k,2k"}, gbps=1070.0, copy_gbps=4280.0)
    asked = parse_metrics("time,floor")
    for run, is_known in ((plain, False), (fast, True)):
        assert all(
            ("share of the memory's floor" in text) == is_known for text in (markdown(run, asked), shown([run], asked))
        )
    assert "| gla-triton (states kept) | 25 | 25 |" in markdown(fast, asked)
    assert "floor" not in markdown(fast)  # only on request, because attention is not memory-bound


def test_ratios_refer_to_the_sweeps_backend_and_are_shown_at_any_width():
    run = made_up("paper-fig2", {"pass": "fwd", "seqlen": "1k..4k"})
    assert run.sweep.against == "sdpa-flash"
    assert markdown(run) == markdown(run, against="sdpa-flash")
    for width in (60, 80, 120, 200):
        text = shown([run], width=width)
        assert "in brackets: times as fast as sdpa-flash" in text
        assert text.count("(×") == markdown(run).count("(×")


def test_a_spread_above_the_time_itself_is_not_counted():
    run = made_up("gla-340m", {}, time_ms=1.0, time_ms_p20=0.9, time_ms_p80=11.5)
    assert "1 ±>100%" in shown([run])


def test_crashes_with_different_exit_codes_take_a_line_each():
    run = made_up("paper-fig2", {"pass": "fwd", "backend": "gla-torch", "seqlen": "1k,2k"}, lambda c: "crashed")
    codes = [replace(r, reason=f"exit code {i}") for i, r in enumerate(run.records)]
    assert markdown(replace(run, records=codes)).splitlines()[-2:] == [
        "- crashed: gla-torch at 1k (fwd): exit code 0",
        "- crashed: gla-torch at 2k (fwd): exit code 1",
    ]


def test_metrics_that_no_record_has_are_refused_before_anything_is_written(tmp_path):
    run = made_up("gla-340m")
    words = (
        r"^--metric: no record has these metrics: energy, power \(there are: time, peak, tokens, tokens_gpu, error\)$"
    )
    for make in (lambda asked: shown([run], asked), lambda asked: write_report([run], tmp_path, asked, None)):
        with pytest.raises(UsageError, match=words):
            make(parse_metrics("energy,power"))
    assert not list(tmp_path.iterdir())
    failed = made_up("gla-340m", {}, OUTCOMES["everything fails"])
    assert "error" in shown([failed], parse_metrics("energy"))


def test_equal_reasons_of_many_cells_take_one_line():
    run = made_up(
        "paper-fig2",
        {"pass": "fwd,fwd+bwd"},
        lambda c: "unsupported" if c.backend == "mamba1" else "oom" if c.seqlen > 4096 else "ok",
    )
    records = [
        replace(r, reason=f"tried to allocate {i} GiB") if r.status == "oom" else r for i, r in enumerate(run.records)
    ]
    lines = shown([replace(run, records=records)], width=1000).splitlines()
    (absent,) = (line for line in lines if line.startswith("unsupported:"))
    (failed,) = (line for line in lines if line.startswith("oom:"))
    assert absent == "unsupported: mamba1: a reason"
    assert "gla-torch at 8k 16k (fwd, fwd+bwd)" in failed
    assert sum("mamba1" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("name", "value", "axis", "table"),
    [
        ("peak", 8191.0, "8191 MiB", "8191 MiB"), ("peak", 16384.0, "16 GiB", "16384 MiB"),
        ("state", 98304.0, "96 MiB", "98304 KiB"), ("state", 2.0**25, "32 GiB", "33554432 KiB"),
        ("tokens", 45_800.0, "45.8 thousand/s", "45.8 thousand/s"), ("tokens", 7e6, "7 million/s", "7 million/s"),
        ("time", 1e5, "100000 ms", "100000 ms"),
    ],
)  # fmt: skip
def test_axes_take_the_unit_that_fits_and_tables_keep_every_digit(name, value, axis, table):
    metric = BY_NAME[name]
    for words, only_finer in ((axis, False), (table, True)):
        fitted = metric.fitted([{metric.field: value}, {metric.field: None}], only_finer)
        assert f"{fitted.show(value)} {fitted.unit}" == words
    assert metric.fitted([]) is metric.fitted([{metric.field: math.nan}]) is metric.fitted([{metric.field: math.inf}])


def test_short_heads_of_columns_are_explained_in_whatever_unit_they_are():
    run = made_up("gla-340m")
    slow = replace(run, records=[replace(r, time_ms=r.time_ms and 1e6 * r.time_ms) for r in run.records])
    for each, unit in ((run, "million/s"), (slow, "thousand/s")):
        text = shown([each], parse_metrics("time,tokens"), width=200)
        assert f"tokens, {unit}" in text
        assert "tokens: tokens per second" in text


def expected_words(runs, metrics):
    """Every value that a report has to show, as often as it has to appear, and every name."""
    view = make_view(runs)
    values = Counter()
    for panel in view.panels:
        in_panel = [row for series in panel.series for row in series.rows.values()]
        own = [metric for metric in metrics if metric.of_pass or panel is view.panels[0]]
        for metric in known(own, in_panel):
            for row in in_panel:
                value = row.get(metric.field)
                absent = [] if row["status"] == "ok" else [row["status"]]
                values += Counter(absent if value is None else [metric.fitted(in_panel, True).show(value)])
    return values, {*view.labels, *(show_x(x) for panel in view.panels for x in panel.x_values if view.has_x)}


TWO = ["h200-gla-340m", "h200-gla-1.3b"]
# Every other run is shown with all metrics, and the others with the usual ones, unless all cases are run.
WITH_ALL = {path.name for path in STORED[::2]}


@product(
    lambda names, metrics, width: (
        (metrics, width) == (("all", 60) if names in WITH_ALL else ("usual", 80)) or names == ",".join(TWO)
    ),
    names={",".join(names): names for names in [*([path.name] for path in STORED), TWO]},
    metrics={"usual": USUAL, "all": METRICS},
    width=[60, 80, 120, 200],
)
def test_no_digit_column_or_name_is_lost_at_any_width(names, metrics, width):
    runs = [stored(name) for name in names]
    text = shown(runs, metrics, width)
    values, labels = expected_words(runs, metrics)
    assert max(map(len, text.splitlines())) <= width
    assert not values - Counter(text.split())
    assert all(label in re.sub(r"\s*\n", " ", text) for label in labels)
    assert "…" not in text.partition("\noom:")[0]


@pytest.mark.parametrize("axes", [{"state": "none,both"}, {"prefix": "none,1k"}, {"chunk": "auto,16"}], ids=str)
def test_cells_without_a_value_have_a_series_of_their_own(axes):
    run = made_up("paper-fig2", {"backend": "gla-triton", "pass": "fwd", "materialize": "states", **axes})
    view = make_view([run])
    shown_cells = sum(len(series.rows) for panel in view.panels for series in panel.series)
    assert shown_cells == len(run.records)
    assert len(view.labels) == 2


def test_a_run_of_one_length_has_one_table_per_pass():
    run = stored("h200-gla-340m")
    text = shown([run], width=80, against="fla-gla")
    assert text.count("gla-triton (states kept)") == 2
    assert "time, ms" in text
    first = {record.cell.backend: record.time_ms for record in run.records[::-1]}
    ours, theirs = first["gla-triton"], first["fla-gla"]
    assert re.search(rf"{TIME.show(ours)} ±\d% \(×{theirs / ours:.2g}\)", text)


# Several runs


def test_state_and_parameters_of_a_layer_stand_below_the_times_of_several_ops():
    text = markdown(stored("h200-paper-fig2"))
    assert "| backend | state of a sequence, KiB | parameters of a layer, million |" in text
    assert "| gla-triton | 256 | 5.28 |\n" in text
    assert "| sdpa-flash | 4096 to 65536 | 4.19 |\n" in text  # keys and values of all tokens
    assert text.count("parameters of a layer") == 1
    one_op = stored("h200-paper-fig2")
    one_op = replace(one_op, records=[each for each in one_op.records if each.cell.op == "gla"])
    assert "parameters of a layer" not in markdown(one_op)
    both = markdown(stored("h200-gate-family"), metrics=parse_metrics("time,state,parameters"))
    assert "**a layer**" not in both


def test_runs_of_the_same_cells_are_told_apart_by_name_and_by_nothing_else():
    first = made_up("paper-fig2", {"backend": "gla-torch", "pass": "fwd"}, name="first", environment=H200)
    again = made_up("paper-fig2", {"backend": "gla-torch", "pass": "fwd"}, name="again", environment=H200)
    longer = made_up("paper-fig2", {"backend": "gla-torch", "seqlen": "32k", "pass": "fwd"}, environment=H200)
    assert make_view([first, again]).labels == ["first: gla-torch", "again: gla-torch"]
    assert make_view([first, longer]).labels == ["gla-torch"]
    assert "first, again: NVIDIA H200, torch 2\n" in shown([first, again])


def test_runs_of_different_gpus_name_each():
    first = made_up("paper-fig2", {"backend": "gla-torch"}, name="first", environment=H200)
    other = made_up(
        "paper-fig2", {"backend": "sdpa-flash"}, name="other", environment=H200 | {"gpu": {"name": "NVIDIA A100"}}
    )
    assert make_view([first, other]).labels == ["first: gla-torch", "other: sdpa-flash"]
    assert "first: NVIDIA H200, torch 2\nother: NVIDIA A100, torch 2\n" in shown([first, other])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("x/process-1", "y/process-1"), ("x/process-1", "y/process-1")),
        (("a/b/x/process-1", "a/b/y/process-1", "a/b/z"), ("x/process-1", "y/process-1", "z")),
        (("/run", "/a/run"), ("/run", "a/run")),
    ],
)
def test_folders_of_the_same_name_are_told_apart_by_the_shortest_ends_of_their_paths(paths, names):
    run = made_up("paper-fig2", {"backend": "gla-torch"})
    labels = make_view([replace(run, path=Path(path)) for path in paths]).labels
    assert labels == [f"{name}: gla-torch" for name in names]


# Hardware, versions and settings


def test_a_cpu_run_on_a_machine_with_a_gpu_names_the_cpu():
    environment = {"device": "cpu", "cpu": "A CPU", "gpu": {"name": "A GPU"}, "packages": {"torch": "2"}}
    assert describe_environment(environment) == "A CPU, torch 2"
    assert describe_environment(environment | {"device": "cuda"}) == "A GPU, torch 2"


def test_the_version_that_a_backend_has_from_its_site_is_said():
    own = {"own_code": False, "packages": {"fla-core": "0.6", "triton": "3.7.1"}}
    environment = {"device": "cpu", "cpu": "A CPU", "packages": {"torch": "2", "triton": "3.6"}}
    environment["implementations"] = {"fla-gla": own, "sdpa": {"own_code": False, "packages": {"torch": "2"}}}
    assert describe_environment(environment) == "A CPU, torch 2, triton 3.6 (3.7.1 for fla-gla)"


def test_the_settings_are_said_as_far_as_they_are_known():
    settings = {"precision": 0.005, "time_limit_s": 3.0, "max_samples": "many"}
    run = made_up(
        "cpu-smoke", environment={"settings": settings, "code": {"commit": "0123456789abcdef"}}, timing="hot, x"
    )
    assert describe_settings(run) == (
        "timing: hot, x, sampled until the median was known to 0.5 %, or for 3 s, commit 0123456789ab"
    )
    assert describe_settings(replace(run, environment={"code": 3}, records=[])) == ""


@pytest.mark.parametrize(
    ("titles", "whole"),
    [
        (("Recall", "Recall: other seeds"), "Recall"),
        (("Recall: other seeds", "Recall"), "Recall"),
        (("Recall", "Recalled: twice"), "Recall; Recalled: twice"),
        (("Recall", "Recall"), "Recall"),
    ],
)
def test_the_title_of_two_runs_leaves_out_one_that_goes_on_with_the_others(titles, whole):
    run = made_up("cpu-smoke")
    assert title_of([replace(run, sweep=replace(run.sweep, title=title)) for title in titles]) == whole


def test_an_interrupted_run_says_how_much_of_it_is_there():
    run = made_up("paper-fig2", environment=H200 | {"cells": 20})
    part = replace(run, records=run.records[:4])
    words = "NVIDIA H200, torch 2, 4 of 20 cells"
    assert words in shown([part])
    assert words in make_page(make_view([part]), USUAL, [TIME], None)
    assert any(words in text.get_text() for text in drawn(part).texts)


# Files


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_a_stored_run_reports_again(path):
    # The committed report is what the records give today.
    run = stored(path.name)
    metrics = choose_metrics(run.sweep.metrics, rows_of_runs([run]))
    page = make_page(make_view([run]), metrics, choose_drawn(metrics), run.sweep.against)
    assert page == (path / "report.md").read_text()
    assert to_frame([run]).to_csv(index=False) == (path / "records.csv").read_text()


def test_a_report_of_two_runs_is_written_into_a_folder(tmp_path):
    runs = [stored("h200-gla-340m-infer"), stored("h200-gla-1.3b-infer")]
    paths = write_report(runs, tmp_path, USUAL, None)
    assert [path.name for path in paths] == ["records.csv", "report.md", "figure.png", "figure.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)
    times = {record.cell.backend: record.time_ms for record in runs[1].records}
    ours, theirs = times["gla-triton"], times["fla-gla"]
    row = f"| gla-triton (B=8, K=256, V=512) | {significant(ours)} (×{theirs / ours:.2g}) |"
    assert row in (tmp_path / "report.md").read_text()


def test_there_is_a_stored_run():
    assert STORED


def test_a_cell_without_parameters_is_shown():
    cell = Cell("mine", "identity", "fwd", 1, 16, "fp32")
    run = made_up("cpu-smoke", {"backend": "gla-torch"})
    assert "mine" in shown([replace(run, records=[replace(run.records[0], cell=cell)])])


def test_no_text_of_a_csv_is_a_formula_and_numbers_stay_numbers():
    texts = ["=1+1", "+cmd", "-x", "@SUM(1)", "a=1", "", "-3.5", None]
    frame = pd.DataFrame({"text": texts, "number": [-1.5, 2.0, None, 0.0, 1e-300, -7.0, 1.0, 1.0], "count": -1})
    rows = list(csv.DictReader(io.StringIO(to_csv(frame), newline="")))
    quoted = ["'=1+1", "'+cmd", "'-x", "'@SUM(1)"]
    assert [row["text"] for row in rows] == [*quoted, "a=1", "", "-3.5", ""]
    assert [row["number"] for row in rows[:4]] == ["-1.5", "2.0", "", "0.0"]
    assert {row["count"] for row in rows} == {"-1"}
