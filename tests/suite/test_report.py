"""Reports from records: tables and figures of runs with every kind of outcome."""

import csv
import io
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from glabench.backends import load_registry
from glabench.errors import UsageError
from glabench.records import Record, Run, RunFolder
from glabench.records.metrics import BY_NAME, METRICS, TIME, choose_metrics, known, parse_metrics, significant
from glabench.records.run import rows_of
from glabench.report.describe import describe_environment, describe_settings
from glabench.report.figures import FORMATS, draw, explain_figure, save_figure
from glabench.report.series import choose_x, describe_shape, make_panels, make_view, rows_of_runs
from glabench.report.styles import choose_styles
from glabench.report.tables import make_markdown, render_tables
from glabench.report.write import choose_drawn, make_page, to_csv, to_frame, write_report
from glabench.sweeps import Cell, Parameters, expand, load_sweep, resolve
from glabench.sweeps.words import show_x

TRAITS = load_registry().traits()
PEAK = BY_NAME["peak"]
USUAL = parse_metrics("time,peak,roof")
H200 = {"device": "cuda", "gpu": {"name": "NVIDIA H200"}, "packages": {"torch": "2"}}


def made_up(preset, changes=None, outcome=lambda cell: "ok", name="a-run", environment=None, **fields):
    """A run with a record for every cell of a preset; times grow with the work."""
    sweep = resolve(load_sweep(preset), "cuda", changes or {}, TRAITS)
    records = []
    for cell in expand(sweep, TRAITS, "cuda"):
        status = outcome(cell)
        time = cell.seqlen / 1000 * len(cell.backend) * len(cell.pass_)
        measured = {
            "time_ms": time,
            "time_ms_p20": 0.98 * time,
            "time_ms_p80": 1.03 * time,
            "samples_ms": (time,) * 3,
            "peak_allocated_mib": cell.seqlen / 10,
            "rel_error": {"o": 3e-3},
            "stop_reason": "precision",
            **fields,
        }
        measured = measured if status == "ok" else {"reason": "a reason"}
        records.append(Record(run_id=name, cell=cell, status=status, **measured))
    return Run(Path(name), sweep, environment or {}, records)


def rows(run):
    return rows_of(run.records)


def shown(runs, metrics=USUAL, width=200, against=None):
    """The text on a terminal of this width."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        for each in render_tables(runs, metrics, width, against):
            console.print(each)
    return captured.get()


def markdown(run, metrics=USUAL, against=None):
    return make_markdown(make_view([run]), metrics, against)


def drawn(run, metrics=(TIME, PEAK)):
    return draw(make_view([run]), metrics)


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


# Series


def test_series_of_one_backend_are_told_apart_by_what_differs():
    (panel,) = make_panels(rows(made_up("paper-fig2", {"pass": "fwd"})), "seqlen")
    labels = [s.label for s in panel.series]
    assert labels[:3] == ["gla-triton (materialized)", "gla-triton (not materialized)", "linear-triton"]
    assert list(panel.x_values) == [1024, 2048, 4096, 8192, 16384]


def test_an_axis_that_only_some_passes_have_tells_no_series_apart():
    view = make_view([made_up("host", {"backend": "gla-triton", "batch": "8"})])
    assert view.labels == ["gla-triton (H=16, D=64)", "gla-triton (H=4, K=128, V=256)"]
    assert len(view.panels) == 3
    assert view.shape == "B=8, bf16, materialized"


def test_head_dim_as_x_does_not_tell_series_apart():
    panel = make_panels(rows(made_up("head-dim")), "head_dim")[0]
    assert [s.label for s in panel.series][2:] == [
        "linear-triton",
        "gla-torch",
        "linear-torch",
        "sdpa-flash",
        "sdpa-cudnn",
    ]
    assert {tuple(s.rows) for s in panel.series} == {(32, 64, 128, 256)}


def test_a_head_dim_beside_another_axis_is_named_once():
    panel = make_panels(
        rows(made_up("paper-fig2", {"head_dim": "64,128", "backend": "sdpa-flash,linear-torch"})), "seqlen"
    )[0]
    assert [s.label for s in panel.series] == [
        "sdpa-flash (D=64)",
        "sdpa-flash (D=128)",
        "linear-torch (D=64)",
        "linear-torch (D=128)",
    ]


def test_parameters_of_plugins_are_named_with_their_values():
    run = made_up("paper-fig2", {"pass": "fwd", "backend": "gla-torch"})
    records = [
        replace(record, cell=replace(record.cell, parameters=Parameters({**record.cell.parameters, "fuse": fuse})))
        for record in run.records
        for fuse in (True, False)
    ]
    (panel,) = make_panels(rows_of(records), "seqlen")
    assert [s.label for s in panel.series] == ["gla-torch (fuse=on)", "gla-torch (fuse=off)"]


@pytest.mark.parametrize(
    ("axis", "values"),
    [("state", ["none", "in", "both"]), ("packed", ["off", "on"]), ("inputs", ["normal", "orthogonal"])],
)
def test_the_default_of_an_extra_is_a_value_as_others_are(axis, values):
    run = made_up("chunk-sweep", {axis: ",".join(values), "pass": "fwd", "backend": "gla-torch", "chunk": "16"})
    (panel,) = make_panels(rows(run), axis)
    assert {s.label: list(s.rows) for s in panel.series} == {"gla-torch": values}


def test_the_chunk_that_a_backend_chose_has_a_series_of_its_own():
    run = made_up("chunk-sweep", {"chunk": "auto,16..64", "pass": "fwd", "backend": "gla-torch"})
    (panel,) = make_panels(rows(run), "chunk")
    assert {s.label: list(s.rows) for s in panel.series} == {"gla-torch (auto)": [None], "gla-torch": [16, 32, 64]}
    (panel,) = make_panels(rows(made_up("chunk-sweep", {"chunk": "auto", "pass": "fwd"})), "chunk")
    assert list(panel.x_values) == [None]


@pytest.mark.parametrize(
    ("preset", "changes", "x"),
    [
        ("paper-fig2", {}, "seqlen"),
        ("paper-fig2", {"seqlen": "1k", "batch": "1..8"}, "batch"),
        ("paper-fig2", {"seqlen": "1k", "head_dim": "32..128"}, "head_dim"),
        ("paper-fig2", {"seqlen": "1k"}, "seqlen"),
        ("paper-fig2", {"seqlen": "1k", "batch": "1,2", "heads": "1,2"}, "seqlen"),
        ("paper-v3-width", {"seqlen": "1k", "state_size": "16,32"}, "state_size"),
    ],
)
def test_the_axis_that_varies_is_drawn_against(preset, changes, x):
    assert choose_x(rows(made_up(preset, changes)), "seqlen") == x


@pytest.mark.parametrize(
    ("preset", "x", "words"),
    [
        ("paper-fig2", "seqlen", "B=32, bf16; gla, linear, softmax: H=16 D=64; mamba1: inner=2048 N=16"),
        ("head-dim", "head_dim", "B=8, T=4k, H=8, bf16"),
        ("paper-v3-width", "seqlen", "B=32, bf16; gla: H=4 K=128 V=256; softmax: H=16 D=64; mamba1: inner=2048 N=16"),
    ],
)
def test_what_series_share_and_what_differs_between_ops_is_named(preset, x, words):
    changes = {"materialize": "on,off"}  # otherwise linear-triton's is named, too
    assert describe_shape(rows(made_up(preset, changes)), x) == words


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
    assert "| [bold]a\\|b |" in markdown(odd)


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
    assert "| gla-triton (materialized) | 25 | 25 |" in markdown(fast, asked)
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
    words = r"^--metric: no record has these metrics: energy, power \(there are: time, peak, tokens, error\)$"
    for make in (lambda asked: shown([run], asked), lambda asked: write_report([run], tmp_path, asked, None)):
        with pytest.raises(UsageError, match=words):
            make(parse_metrics("energy,power"))
    assert not list(tmp_path.iterdir())
    failed = made_up("gla-340m", {}, OUTCOMES["everything fails"])
    assert "error" in shown([failed], parse_metrics("energy"))


def test_equal_reasons_of_many_cells_take_one_line():
    run = made_up(
        "paper-fig2", {}, lambda c: "unsupported" if c.backend == "mamba1" else "oom" if c.seqlen > 4096 else "ok"
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


STORED = sorted(path.parent for path in (Path(__file__).parents[2] / "results").glob("*/records.jsonl"))


@cache
def stored(name):
    return RunFolder.open(STORED[0].parent / name).load()


def expected_words(runs, metrics):
    """Every value that a report has to show, as often as it has to appear, and every name."""
    view = make_view(runs)
    values = Counter()
    for panel in view.panels:
        in_panel = [row for series in panel.series for row in series.rows.values()]
        for metric in known(metrics, in_panel):
            for row in in_panel:
                value = row.get(metric.field)
                values += Counter(
                    [row["status"]] if row["status"] != "ok" else [] if value is None else [metric.show(value)]
                )
    return values, {*view.labels, *(show_x(x) for panel in view.panels for x in panel.x_values if view.has_x)}


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("metrics", [USUAL, METRICS], ids=["usual", "all"])
@pytest.mark.parametrize("names", [[path.name] for path in STORED] + [["h200-gla-340m", "h200-gla-1.3b"]], ids=",".join)
def test_no_digit_column_or_name_is_lost_at_any_width(names, metrics, width):
    runs = [stored(name) for name in names]
    text = shown(runs, metrics, width)
    values, labels = expected_words(runs, metrics)
    assert max(map(len, text.splitlines())) <= width
    assert not values - Counter(text.split())
    assert all(label in re.sub(r"\s*\n", " ", text) for label in labels)
    assert "…" not in text.partition("\noom:")[0]


def test_a_run_of_one_length_has_one_table_per_pass():
    run = stored("h200-gla-340m")
    text = shown([run], width=80, against="fla-gla")
    assert text.count("gla-triton (materialized)") == 2
    assert "time, ms" in text
    first = {record.cell.backend: record.time_ms for record in run.records[::-1]}
    ours, theirs = first["gla-triton"], first["fla-gla"]
    assert re.search(rf"{TIME.show(ours)} ±\d% \(×{theirs / ours:.2g}\)", text)


# Several runs


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


def test_folders_of_the_same_name_are_told_apart_by_their_paths():
    run = made_up("paper-fig2", {"backend": "gla-torch"})
    labels = make_view([replace(run, path=Path("x/process-1")), replace(run, path=Path("y/process-1"))]).labels
    assert labels == ["x/process-1: gla-torch", "y/process-1: gla-torch"]


# Figures


OUTCOMES = {
    "all fine": lambda cell: "ok",
    "long sequences fail": lambda cell: "oom" if cell.seqlen > 4096 else "ok",
    "short sequences fail": lambda cell: "timeout" if cell.seqlen < 2048 else "ok",
    "one in the middle fails": lambda cell: "crashed" if cell.seqlen == 4096 else "ok",
    "all of one backend fails": lambda cell: "inaccurate" if cell.backend == "gla-triton" else "ok",
    "everything fails": lambda cell: "error",
    "nothing is supported": lambda cell: "unsupported",
}
CHANGES = [{}, {"seqlen": "1k"}, {"seqlen": "1k..16k:+1k", "dtype": "bf16,fp16", "backend": "gla-triton,sdpa-flash"}]
# Every outcome with every second change, so that each change meets most outcomes.
CASES = [(o, c) for i, o in enumerate(OUTCOMES) for j, c in enumerate(CHANGES) if (i + j) % 2 == 0]


def saved(figure, path):
    figure.set_dpi(30)
    save_figure(figure, path)
    return path


@pytest.mark.parametrize(("outcome", "changes"), CASES, ids=str)
def test_a_figure_is_drawn_whatever_happened(tmp_path, outcome, changes):
    figure = drawn(made_up("paper-fig2", {"pass": "fwd"} | changes, OUTCOMES[outcome]))
    assert saved(figure, tmp_path / "figure.png").stat().st_size > 2000


@pytest.mark.parametrize(
    ("preset", "metrics"),
    [
        ("chunk-sweep", "time"),
        ("head-dim", "peak"),
        ("gla-340m", "time,error"),
        ("guard", "time"),
        ("cpu-smoke", "tokens,time,peak,error"),
    ],
)
def test_every_kind_of_preset_and_metric_has_a_figure(tmp_path, preset, metrics):
    figure = drawn(made_up(preset, {"pass": "fwd"}), parse_metrics(metrics))
    assert len([axes for axes in figure.axes if axes.axison]) == len(metrics.split(","))
    saved(figure, tmp_path / "figure.png")


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_failures_stand_in_a_strip_at_the_top_edge():
    figure = drawn(made_up("paper-fig2", {"pass": "fwd"}, OUTCOMES["long sequences fail"]))
    axes = figure.axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert {tuple(line.get_xdata()) for line in crosses} == {(8192,)}  # the first failure, and not 16k again
    lowest = min(line.get_ydata()[0] for line in crosses)  # of the axes' height
    highest = max(value for line in axes.lines if line not in crosses for value in line.get_ydata())
    assert axes.transData.transform((1, highest))[1] < axes.transAxes.transform((0, lowest))[1]
    assert "out of memory" in legend(figure)


@pytest.mark.parametrize(
    ("statuses", "marks"),
    [
        ("oom oom ok ok ok", {1: "x", 2: "x"}),
        ("oom oom ok oom oom", {1: "x", 2: "x", 8: "x"}),
        ("ok oom timeout timeout timeout", {2: "x", 4: "1"}),
        ("ok ok unsupported ok unsupported", {4: "+", 16: "+"}),
        ("unsupported unsupported unsupported unsupported oom", {16: "x"}),
    ],
)
def test_each_missing_point_is_marked_but_of_a_lines_end_only_the_first(statuses, marks):
    status = dict(zip((1024, 2048, 4096, 8192, 16384), statuses.split(), strict=True))
    of_one = lambda cell: status[cell.seqlen] if cell.backend == "gla-torch" else "ok"  # noqa: E731
    run = made_up("paper-fig2", {"pass": "fwd", "backend": "gla-torch,sdpa-flash"}, of_one)
    figure = drawn(run)
    lines = [line for line in figure.axes[0].lines if line.get_marker() in ("x", "1", "+")]
    assert {line.get_xdata()[0] // 1024: line.get_marker() for line in lines} == marks
    assert ("unsupported" in legend(figure)) == ("+" in marks.values())
    assert "What failed or is unsupported is marked" in explain_figure(make_view([run]), [TIME])


def test_many_marks_of_many_lengths_do_not_overlap():
    run = made_up("paper-fig2", {"pass": "fwd", "seqlen": "1k..16k:+1k"}, lambda c: "ok" if c.seqlen % 2048 else "oom")
    figure = drawn(run)
    figure.canvas.draw()
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    places = [line.get_transform().transform(line.get_xydata())[0] for line in crosses]
    assert min(math.dist(a, b) for a, b in combinations(places, 2)) > 7 * figure.dpi / 72  # points, a mark's size


def test_all_panels_have_the_same_x_even_if_one_of_them_lacks_points():
    run = made_up(
        "paper-fig2", {"pass": "fwd", "seqlen": "1k..4k"}, lambda cell: "oom" if cell.seqlen == 2048 else "ok"
    )
    no_peak = [replace(r, peak_allocated_mib=0.0) if r.cell.seqlen == 1024 else r for r in run.records]
    figure = drawn(replace(run, records=no_peak))
    limits = {axes.get_xlim() for axes in figure.axes}
    assert len(limits) == 1
    assert limits.pop()[0] < 1024
    figure.canvas.draw()  # a mark outside its axes would leave them no room


@pytest.mark.parametrize("preset", ["paper-fig2", "gla-340m", "gates"])
def test_three_columns_are_readable_on_paper_of_seven_inches(preset):
    figure = drawn(made_up(preset, host_ms=1.0), parse_metrics("time,host,peak"))
    assert len({axes.get_subplotspec().colspan.start for axes in figure.axes}) == 3
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    assert min(text.get_fontsize() for text in texts) * 7 / figure.get_figwidth() > 6


def test_a_pass_takes_no_room_for_quantities_that_only_others_have():
    run = made_up("paper-fig2", {"pass": "fwd,fwd+bwd"}, host_ms=1.0, first_call_s=1.0, saved_mib=1.0)
    records = [replace(r, host_ms=None, saved_mib=None) if r.cell.pass_ == "fwd" else r for r in run.records]
    figure = drawn(replace(run, records=records), parse_metrics("time,host,first_call,saved"))
    assert [axes.axison for axes in figure.axes] == 6 * [True]


def test_a_backend_that_failed_everywhere_is_in_the_legend_and_the_band_is_named():
    figure = drawn(made_up("paper-fig2", {"pass": "fwd"}, OUTCOMES["all of one backend fails"]))
    assert {"gla-triton (materialized)", "inaccurate", "band: p20 to p80 of the samples"} <= set(legend(figure))


def test_the_legend_shows_every_series_as_its_lines_and_points_look():
    auto = {"chunk": "auto,16..64", "pass": "fwd"}
    for run in (made_up("paper-fig2", {"pass": "fwd"}), made_up("chunk-sweep", auto)):
        figure = drawn(run)
        look = lambda line: line.properties()  # noqa: E731
        names = ("color", "linestyle", "linewidth", "marker", "markersize", "markerfacecolor", "fillstyle")
        looks = {tuple(str(look(line)[name]) for name in names) for line in figure.axes[0].lines}
        handles = [handle for handle in figure.legends[0].legend_handles if hasattr(handle, "get_marker")]
        assert {tuple(str(look(handle)[name]) for name in names) for handle in handles} == looks
        assert len(looks) == len(handles) == len(make_view([run]).labels)
    flat = [handle for handle in handles if handle.get_marker() == "none"]
    assert [handle.get_label() for handle in flat] == [label for label in legend(figure) if "auto" in label]


def test_a_band_is_named_only_if_it_can_be_seen():
    narrow = made_up("paper-fig2", {"pass": "fwd"}, time_ms=1.0, time_ms_p20=0.996, time_ms_p80=1.004)
    assert not any("band" in label for label in legend(drawn(narrow)))
    assert "Bands" not in explain_figure(make_view([narrow]), [TIME])
    assert "Bands" in explain_figure(make_view([made_up("paper-fig2")]), [TIME])


def test_names_along_x_are_all_shown_and_slanted_if_they_have_no_room():
    gates = drawn(made_up("gates", {"pass": "fwd"})).axes[0]
    names = [label.get_text() for label in gates.get_xticklabels()]
    assert {"logsigmoid/16", "dead-channel", "one-strong-chunk"} <= set(names)
    assert len(names) == 13
    assert {label.get_rotation() for label in gates.get_xticklabels()} == {40}
    assert {line.get_linestyle() for line in gates.lines} == {"None"}
    few = drawn(made_up("gates", {"pass": "fwd", "gate": "slow,strong"})).axes[0]
    assert {label.get_rotation() for label in few.get_xticklabels()} == {0}


def test_an_axis_without_any_value_has_no_ticks():
    axes = drawn(made_up("paper-fig2", {"pass": "fwd"}, OUTCOMES["everything fails"])).axes[0]
    assert not [*axes.get_yticks(), *axes.get_yticks(minor=True)]


def test_runs_without_two_points_on_any_line_have_bars_that_name_x():
    kept = {"pass": "fwd", "backend": "gla-torch,sdpa-flash"}
    short, long = (
        made_up("paper-fig2", kept | {"batch": batch, "seqlen": length}, name=length)
        for batch, length in (("1", "32k"), ("8", "2k"))
    )
    view = make_view([short, long])
    figure = draw(view, [TIME])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "gla-torch (B=8), T=2k",
        "sdpa-flash (B=8), T=2k",
        "gla-torch (B=1), T=32k",
        "sdpa-flash (B=1), T=32k",
    ]
    assert len(figure.axes[0].patches) == 4
    assert explain_figure(view, [TIME]).startswith("Bars")


def test_with_one_value_of_the_axis_bars_say_their_times_and_what_failed():
    run = made_up("gla-340m", {}, lambda c: "oom" if c.backend == "fla-gla" else "ok")
    forward = drawn(run).axes[0]
    times = [r.time_ms for r in run.records if r.cell.pass_ == "fwd"]
    assert [bar.get_width() for bar in forward.patches] == [time or 0.0 for time in times]
    assert [text.get_text() for text in forward.texts] == [significant(t) if t else "out of memory" for t in times]
    assert "gla-triton (materialized)" in [label.get_text() for label in forward.get_yticklabels()]


def test_bars_say_what_tables_say():
    memory = drawn(made_up("gla-340m", peak_allocated_mib=1536.0)).axes[1]
    assert {text.get_text() for text in memory.texts} == {"1536"}


def test_large_memory_is_in_gib():
    figures = [
        drawn(made_up("paper-fig2", {"pass": "fwd"}, peak_allocated_mib=mib), (PEAK,)) for mib in (100.0, 20480.0)
    ]
    assert [figure.axes[0].get_ylabel()[-3:] for figure in figures] == ["MiB", "GiB"]
    assert set(figures[1].axes[0].lines[0].get_ydata()) == {20.0}


def test_a_backend_that_was_not_there_is_left_out_of_the_figure():
    figure = drawn(made_up("paper-fig2", {"pass": "fwd"}, lambda c: "unsupported" if c.op == "softmax" else "ok"))
    assert not any("sdpa" in label for label in legend(figure))


def test_a_backend_has_the_same_colour_and_marker_in_every_figure():
    alone = choose_styles({"sdpa-flash": "sdpa-flash", "x": "mine"})
    among = choose_styles({"a": "gla-triton", "b": "gla-triton", "sdpa-flash": "sdpa-flash", "x": "mine"})
    assert alone["sdpa-flash"] == among["sdpa-flash"]
    assert alone["x"] == among["x"]
    assert among["a"].color == among["b"].color
    assert among["a"].line != among["b"].line
    assert among["a"].bar != among["b"].bar


def test_variants_of_a_backend_differ_in_their_points_and_in_their_lines():
    styles = choose_styles({str(i): "gla-triton" for i in range(40)})
    points = [{**style.line, "linestyle": None} for style in styles.values()]
    assert len({str(point) for point in points[:18]}) == 18
    assert len({str(style.line) for style in styles.values()}) == 40
    assert {style.marker for style in styles.values()} == {"o"}


def test_backends_of_others_have_colours_and_markers_of_their_own():
    styles = choose_styles({name: name for name in [*TRAITS, *"abcdefg"]})
    assert len({style.color for style in styles.values()}) == len(styles)
    styles = choose_styles({name: name for name in ["gla-triton", "fla-gla", "sdpa-flash", *"abcdefg"]})
    assert len({style.marker for style in styles.values()}) == len(styles)


def test_the_usual_figure_is_of_time_and_memory_and_another_of_what_was_asked_for():
    assert choose_drawn(USUAL) == [TIME, PEAK]
    assert choose_drawn(parse_metrics("roof,time")) == [BY_NAME["roof"], TIME]


def test_the_same_records_give_the_same_figures(tmp_path):
    for suffix in FORMATS:
        first, again = (
            saved(drawn(made_up("paper-fig2", {"pass": "fwd"}), (TIME,)), tmp_path / f"{name}{suffix}") for name in "ab"
        )
        assert first.read_bytes() == again.read_bytes()


# Hardware, versions and settings


def test_a_cpu_run_on_a_machine_with_a_gpu_names_the_cpu():
    environment = {"device": "cpu", "cpu": "A CPU", "gpu": {"name": "A GPU"}, "packages": {"torch": "2"}}
    assert describe_environment(environment) == "A CPU, torch 2"
    assert describe_environment(environment | {"device": "cuda"}) == "A GPU, torch 2"


def test_the_settings_are_said_as_far_as_they_are_known():
    settings = {"precision": 0.005, "time_limit_s": 3.0, "max_samples": "many"}
    run = made_up(
        "cpu-smoke", environment={"settings": settings, "code": {"commit": "0123456789abcdef"}}, timing="hot, x"
    )
    assert describe_settings(run) == (
        "timing: hot, x, sampled until the median was known to 0.5 %, or for 3 s, commit 0123456789ab"
    )
    assert describe_settings(replace(run, environment={"code": 3}, records=[])) == ""


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
    metrics = choose_metrics(None, rows_of_runs([run]))
    page = make_page(make_view([run]), metrics, choose_drawn(metrics), run.sweep.against)
    assert page == (path / "report.md").read_text()
    assert to_frame([run]).to_csv(index=False) == (path / "records.csv").read_text()


def test_a_report_of_two_runs_is_written_into_a_folder(tmp_path):
    runs = [stored("h200-gla-340m-infer"), stored("h200-gla-1.3b-infer")]
    paths = write_report(runs, tmp_path, USUAL, None)
    assert [path.name for path in paths] == ["records.csv", "report.md", "figure.png", "figure.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)
    ours = next(record for record in runs[1].records if record.cell.backend == "gla-triton")
    row = f"| gla-triton (B=8, K=256, V=512) | {significant(ours.time_ms)} (×"
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


def test_an_svg_keeps_its_text_and_shortens_coordinates(tmp_path):
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot([0, 1, 7], [0.123456, 3, 5])
    figure.text(0.1, 0.1, "driver 580.159.04, 0.12345 ms")
    save_figure(figure, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert "driver 580.159.04, 0.12345 ms" in text
    paths = re.findall(r'\sd="([^"]*)"', text)
    assert any("." in path for path in paths)
    assert not any(re.search(r"\.\d{3}", path) for path in paths)


def test_a_png_is_not_wider_than_a_page_shows(tmp_path):
    run = made_up("paper-fig2", host_ms=1.0, first_call_s=1.0)
    figure = drawn(run, parse_metrics("time,host,first_call"))
    save_figure(figure, tmp_path / "x.png")
    assert figure.get_figwidth() * 160 > 1728
    assert int.from_bytes((tmp_path / "x.png").read_bytes()[16:20], "big") <= 1728
