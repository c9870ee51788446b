"""Reports from records alone: tables and figures of runs with every kind of outcome."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from glabench.backends import load_registry
from glabench.records import Record, RunFolder
from glabench.report.figures import draw, save
from glabench.report.series import choose_x, make_panels
from glabench.report.tables import markdown, rich_tables, significant, to_frame
from glabench.report.write import describe_environment, describe_shape, write_report
from glabench.sweeps import expand, load_sweep, resolve

TRAITS = load_registry().traits()


def made_up(preset, changes=None, outcome=lambda cell: "ok"):
    """A record for every cell of a preset, with times that grow with the work."""
    records = []
    for cell in expand(resolve(load_sweep(preset), "cuda", changes or {}), TRAITS, "cuda"):
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
        }
        records.append(Record("run", cell, status, **measured if status == "ok" else {"reason": "a reason"}))
    return records


def text_of(tables):
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get()


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


def test_series_of_one_backend_are_told_apart_by_what_differs():
    (panel,) = make_panels(made_up("paper-fig2", {"pass": "fwd"}), "seqlen")
    labels = [s.label for s in panel.series]
    assert labels[:3] == ["gla-triton (materialized)", "gla-triton (not materialized)", "linear-triton"]
    assert list(panel.x_values) == [1024, 2048, 4096, 8192, 16384]


def test_head_dim_as_x_does_not_tell_series_apart():
    panels = make_panels(made_up("head-dim"), "head_dim")
    assert [s.label for s in panels[0].series][2:4] == ["linear-triton", "gla-torch"]


def test_the_chunk_that_a_backend_chose_has_a_series_of_its_own():
    (panel,) = make_panels(
        made_up("chunk-sweep", {"chunk": "auto,16..64", "pass": "fwd", "backend": "gla-torch"}), "chunk"
    )
    assert {s.label: list(s.records) for s in panel.series} == {
        "gla-torch (auto)": [None],
        "gla-torch": [16, 32, 64],
    }
    (panel,) = make_panels(made_up("chunk-sweep", {"chunk": "auto", "pass": "fwd"}), "chunk")
    assert list(panel.x_values) == [None]


@pytest.mark.parametrize(
    ("changes", "x"),
    [
        ({}, "seqlen"),
        ({"seqlen": "1k", "batch": "1..8"}, "batch"),
        ({"seqlen": "1k", "head_dim": "32..128"}, "head_dim"),
        ({"seqlen": "1k"}, "seqlen"),
        ({"seqlen": "1k", "batch": "1,2", "heads": "1,2"}, "seqlen"),
    ],
)
def test_the_axis_that_varies_is_drawn_against(changes, x):
    assert choose_x(made_up("paper-fig2", changes), "seqlen") == x


def test_the_markdown_holds_times_ratios_memory_and_reasons():
    records = made_up(
        "paper-fig2", {"pass": "fwd"}, lambda c: "oom" if c.seqlen == 16384 and c.op == "softmax" else "ok"
    )
    text = markdown(records, "seqlen", "sdpa-flash")
    assert "in brackets: times as fast as sdpa-flash" in text
    # gla-torch has a shorter name than sdpa-flash by one letter: 10 / 9 of its speed.
    assert "| gla-torch | 27.6 (×1.1)" in text
    assert "oom" in text
    assert "- sdpa-flash fwd B=32 T=16384 H=16 K=64 V=64 bf16: oom, a reason" in text
    assert "peak memory above the inputs, MiB" in text


def test_a_median_that_did_not_settle_is_marked():
    records = [replace(r, stop_reason="time limit") for r in made_up("paper-fig2", {"seqlen": "1k"})]
    assert "~" in text_of(rich_tables(records, "seqlen"))
    assert "~ sampling stopped at the time limit" in markdown(records, "seqlen", None)


def test_square_brackets_in_a_label_are_not_markup():
    records = [replace(r, cell=replace(r.cell, dtype="[bold]")) for r in made_up("paper-fig2", {"seqlen": "1k"})]
    records += made_up("paper-fig2", {"seqlen": "1k"})
    assert "[bold]" in text_of(rich_tables(records, "seqlen"))


def test_the_frame_has_a_column_for_every_tensors_error_and_counts_samples():
    frame = to_frame(made_up("paper-fig2", {"seqlen": "1k"}))
    assert {"rel_error_o", "samples", "time_ms", "pass"} <= set(frame.columns)
    assert "samples_ms" not in frame.columns
    assert set(frame["samples"]) == {3}


OUTCOMES = {
    "all fine": lambda cell: "ok",
    "long sequences fail": lambda cell: "oom" if cell.seqlen > 4096 else "ok",
    "short sequences fail": lambda cell: "timeout" if cell.seqlen < 2048 else "ok",
    "one in the middle fails": lambda cell: "crashed" if cell.seqlen == 4096 else "ok",
    "all of one backend fails": lambda cell: "inaccurate" if cell.backend == "gla-triton" else "ok",
    "everything fails": lambda cell: "error",
    "nothing is supported": lambda cell: "unsupported",
}


@pytest.mark.parametrize("outcome", list(OUTCOMES))
@pytest.mark.parametrize("changes", [{}, {"seqlen": "1k"}, {"seqlen": "1k..16k:+1k", "dtype": "bf16,fp16"}], ids=str)
def test_a_figure_is_drawn_whatever_happened(tmp_path, outcome, changes):
    records = made_up("paper-fig2", changes, OUTCOMES[outcome])
    paths = save(draw(records, "seqlen", "A title", "a subtitle"), tmp_path, "figure")
    assert [p.name for p in paths] == ["figure.png", "figure.svg"]
    assert all(p.stat().st_size > 5000 for p in paths)


@pytest.mark.parametrize(
    "preset", ["chunk-sweep", "head-dim", "gla-340m", "long-context", "paper-v3-width", "cpu-smoke"]
)
def test_every_preset_has_a_figure(tmp_path, preset):
    save(draw(made_up(preset), load_sweep(preset).x, "A title", "a subtitle"), tmp_path, "figure")


def _legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_out_of_memory_ends_a_line_with_a_cross():
    figure = draw(made_up("paper-fig2", {}, OUTCOMES["long sequences fail"]), "seqlen", "A title", "")
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert {tuple(line.get_xdata()) for line in crosses} == {(8192,)}  # the first failure, and not 16k again
    assert "out of memory" in _legend(figure)


def test_a_backend_that_failed_everywhere_is_in_the_legend():
    figure = draw(made_up("paper-fig2", {}, OUTCOMES["all of one backend fails"]), "seqlen", "A title", "")
    assert {"gla-triton (materialized)", "inaccurate"} <= set(_legend(figure))


def test_with_one_value_of_the_axis_bars_say_their_times_and_what_failed():
    records = made_up("gla-340m", {}, lambda c: "oom" if c.backend == "fla-gla" else "ok")
    figure = draw(records, "seqlen", "A title", "a subtitle")
    forward = figure.axes[0]
    times = [r.time_ms for r in records if r.cell.pass_ == "fwd"]
    assert [bar.get_width() for bar in forward.patches] == [time or 0.0 for time in times]
    assert [text.get_text() for text in forward.texts] == [significant(t) if t else "out of memory" for t in times]
    assert "gla-triton (materialized)" in [label.get_text() for label in forward.get_yticklabels()]


def test_a_backend_that_was_not_there_is_left_out_of_the_figure():
    figure = draw(made_up("paper-fig2", {}, lambda c: "unsupported" if c.op == "softmax" else "ok"), "seqlen", "A", "")
    assert not any("sdpa" in label for label in _legend(figure))


def test_the_same_records_give_the_same_figures(tmp_path):
    first, again = (tmp_path / name for name in ("first", "again"))
    for folder in (first, again):
        folder.mkdir()
        save(draw(made_up("paper-fig2"), "seqlen", "A title", "a subtitle"), folder, "figure")
    for name in ("figure.png", "figure.svg"):
        assert (first / name).read_bytes() == (again / name).read_bytes()


def test_a_cpu_run_on_a_machine_with_a_gpu_names_the_cpu():
    environment = {"device": "cpu", "cpu": "A CPU", "gpu": {"name": "A GPU"}, "packages": {"torch": "2"}}
    assert describe_environment(environment) == "A CPU, torch 2"
    assert describe_environment(environment | {"device": "cuda"}) == "A GPU, torch 2"


def test_the_shape_that_a_run_shares_is_named():
    assert describe_shape(made_up("paper-fig2"), "seqlen") == "B=32, H=16, K=V=64, bf16"
    assert describe_shape(made_up("head-dim"), "head_dim") == "B=8, H=8, T=4k, bf16"


STORED = sorted(path.parent for path in (Path(__file__).parents[2] / "results").glob("*/records.jsonl"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_a_stored_run_reports_again(tmp_path, path):
    for name in ("records.jsonl", "sweep.toml", "environment.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    folder = RunFolder.open(tmp_path)
    write_report(folder, folder.sweep(), folder.records(), None)
    # What its owner committed is what its records give.
    assert (tmp_path / "records.csv").read_text() == (path / "records.csv").read_text()
    assert (tmp_path / "report.md").read_text() == (path / "report.md").read_text()


def test_there_is_a_stored_run():
    assert STORED


def test_the_floors_share_is_shown_where_a_copy_was_measured_and_only_there():
    plain = made_up("paper-fig2", {"backend": "gla-triton", "seqlen": "1k"})
    known = [replace(r, gbps=1070.0, copy_gbps=4280.0) for r in plain]
    for records, shown in ((plain, False), (known, True)):
        texts = markdown(records, "seqlen", None), text_of(rich_tables(records, "seqlen"))
        assert all(("share of the memory's floor" in text) == shown for text in texts)
    assert "| gla-triton (materialized) | 25 |" in markdown(known, "seqlen", None)
