"""Figures of runs with every kind of outcome."""

import math
import re
from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from product import product
from reports import OUTCOMES, PEAK, TRAITS, USUAL, drawn, made_up

from glabench.records.metrics import BY_NAME, TIME, parse_metrics, significant
from glabench.report.figures import FORMATS, draw, explain_figure, save_figure
from glabench.report.series import make_view
from glabench.report.styles import choose_styles
from glabench.report.write import choose_drawn

CHANGES = {
    "as it is": {},
    "one length": {"seqlen": "1k"},
    "many lengths": {"seqlen": "1k..16k:+1k", "dtype": "bf16,fp16", "backend": "gla-triton,sdpa-flash"},
}


def saved(figure, path):
    figure.set_dpi(30)
    save_figure(figure, path)
    return path


def with_one_change(outcome, change):
    """Each outcome with one change, and each change with two outcomes at least."""
    return list(OUTCOMES).index(outcome) % len(CHANGES) == list(CHANGES).index(change)


@product(with_one_change, outcome=list(OUTCOMES), changes=CHANGES)
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
    assert {"gla-triton (states kept)", "inaccurate", "band: p20 to p80 of the samples"} <= set(legend(figure))


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
    without_chunk = [label for label in legend(figure) if "auto" in label or label == "fla-gla"]
    assert [handle.get_label() for handle in flat] == without_chunk


def test_no_line_joins_chunk_sizes_with_kernels_of_different_families():
    run = made_up("chunk-sweep", {"backend": "gla-triton", "chunk": "16,32,64,128", "materialize": "states"})

    def measured_with(family):
        records = [
            replace(record, launch=f"{family if record.cell.get('chunk') == 64 else 'triton'} C=x: 64x64 4 warps")
            for record in run.records
        ]
        view = make_view([replace(run, records=records)])
        axes = draw(view, [TIME]).axes[0]
        return [list(line.get_xdata()) for line in axes.lines], explain_figure(view, [TIME])

    joined, caption = measured_with("triton")
    assert joined == [[16, 32, 64, 128]]
    assert "broken" not in caption
    apart, caption = measured_with("hopper")
    assert apart == [[16, 32], [64], [128]]
    assert "A line is broken between chunk sizes" in caption


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


@pytest.mark.parametrize(("lines", "bars"), [(1, 7), (2, 0)])
def test_a_few_lines_among_many_single_points_are_taken_apart_into_bars(lines, bars):
    """Of five series of the same backend, one or two have three lengths."""
    run = made_up("paper-fig2", {"backend": "linear-triton", "materialize": "states", "seqlen": "1k,2k,4k"})
    every = [replace(r, cell=replace(r.cell, batch=2**n)) for r in run.records for n in range(5)]
    kept = [r for r in every if r.cell.seqlen == 1024 or r.cell.batch < 2**lines]
    axes = drawn(replace(run, records=kept), (TIME,)).axes[0]
    assert len(axes.patches) == bars
    assert bool(axes.lines) != bool(bars)


def test_with_one_value_of_the_axis_bars_say_their_times_and_what_failed():
    run = made_up("gla-340m", {}, lambda c: "oom" if c.backend == "fla-gla" else "ok")
    forward = drawn(run).axes[0]
    times = [r.time_ms for r in run.records if r.cell.pass_ == "fwd"]
    assert [bar.get_width() for bar in forward.patches] == [time or 0.0 for time in times]
    assert [text.get_text() for text in forward.texts] == [significant(t) if t else "out of memory" for t in times]
    assert "gla-triton (states kept)" in [label.get_text() for label in forward.get_yticklabels()]


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
    two = {"pass": "fwd", "backend": "gla-triton,sdpa-flash"}
    for suffix in FORMATS:
        first, again = (
            saved(drawn(made_up("paper-fig2", two), (TIME,)), tmp_path / f"{name}{suffix}") for name in "ab"
        )
        assert first.read_bytes() == again.read_bytes()


# Files


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


@pytest.mark.parametrize(("preset", "changes", "metrics"), [
    ("paper-fig2", {"pass": "fwd", "backend": "gla-triton"}, "time,host,first_call"),
    ("op-zoo", {"pass": "infer,fwd,fwd+bwd"}, "time"),
])  # fmt: skip
def test_a_png_is_not_wider_or_higher_than_a_page_shows(tmp_path, preset, changes, metrics):
    figure = drawn(made_up(preset, changes, host_ms=1.0, first_call_s=1.0), parse_metrics(metrics))
    assert figure.get_figwidth() * 160 > 1728 or figure.get_figheight() * 160 > 3700
    save_figure(figure, tmp_path / "x.png")
    header = (tmp_path / "x.png").read_bytes()
    assert int.from_bytes(header[16:20], "big") <= 1728
    assert int.from_bytes(header[20:24], "big") <= 3700
