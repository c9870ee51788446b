"""Rooflines: where cells are, which roof is nearer, what the figure shows, and what cannot be drawn."""

from dataclasses import replace
from pathlib import Path

import pytest
from in_process import glabench
from simulated import record

from glabench.errors import UsageError
from glabench.records.run import Run
from glabench.report.figures import save_figure
from glabench.report.roofline import Dot, Roof, describe_roofline, dot_of, draw_roofline, roof_of
from glabench.report.series import make_view
from glabench.sweeps import load_sweep

RUN = Path(__file__).parents[2] / "results" / "h100-segments"


def view_of(cells, copy_gbps=2000.0, product_tflops=500.0):
    """A view of cells, (backend, seqlen, TFLOP/s, GB/s)."""
    records = []
    for backend, seqlen, tflops, gbps in cells:
        one = record([1.0])
        cell = replace(one.cell, backend=backend, seqlen=seqlen)
        rates = {"tflops": tflops, "gbps": gbps, "copy_gbps": copy_gbps, "product_tflops": product_tflops}
        records.append(replace(one, cell=cell, **rates))
    return make_view([Run(Path("a-run"), load_sweep("cpu-smoke"), {}, records)])


def test_memory_bounds_up_to_the_ridge_and_products_beyond():
    roof = Roof(2000.0, 500.0)
    assert roof.ridge == 250.0
    assert [roof.at(x) for x in (25.0, 250.0, 2500.0)] == [50.0, 500.0, 500.0]


def test_a_cell_is_where_its_rates_say():
    row = {"tflops": 40.0, "gbps": 1600.0, "copy_gbps": 2000.0, "product_tflops": 500.0}
    assert dot_of(row) == Dot(25.0, 40.0)
    assert dot_of(row | {"gbps": None}) is None


def run_of(cells, ceilings=None, **rates):
    view = view_of(cells, **rates)
    return replace(view.runs[0], environment={"ceilings": ceilings or {}})


def test_the_roof_is_the_highest_that_runs_have_measured():
    cells = [("gla-torch", 64, 40.0, 1600.0)]
    runs = [run_of(cells), run_of(cells, {"l2_copy_gbps": 6000.0, "fp32_product_tflops": 50.0}, copy_gbps=2100.0)]
    assert roof_of(runs) == Roof(2100.0, 500.0, 6000.0, 50.0)
    assert roof_of(runs[:1]) == Roof(2000.0, 500.0)
    assert roof_of([run_of(cells, product_tflops=None)]) is None


def test_the_roofs_of_the_cache_and_without_tensor_cores_are_drawn_if_known(tmp_path):
    run = run_of([("gla-torch", 64, 20.0, 800.0)], {"l2_copy_gbps": 6000.0, "fp32_product_tflops": 50.0})
    figure = draw_roofline(make_view([run]))
    roof, cache, plain, _ = figure.axes[0].get_lines()
    assert max(roof.get_ydata()) == max(cache.get_ydata()) == 500.0
    assert cache.get_ydata()[0] == pytest.approx(3 * roof.get_ydata()[0])
    assert max(plain.get_ydata()) == 50.0
    save_figure(figure, tmp_path / "roof.svg")
    assert "a copy within the L2 cache, 6000 GB/s" in (tmp_path / "roof.svg").read_text()


def test_words_say_which_roof_is_nearer_and_how_close_cells_come():
    view = view_of([("gla-torch", 64, 20.0, 800.0), ("gla-torch", 128, 40.0, 1600.0), ("sdpa-math", 64, 250.0, 100.0)])
    assert describe_roofline(view) == [
        "forward, gla-torch: the nearer roof is memory's; 40% at 64 to 80% at 128 of it.",
        "forward, sdpa-math: the nearer roof is the products'; 50% at 64 of it.",
    ]


def test_the_figure_has_a_dot_per_cell_below_the_roof(tmp_path):
    figure = draw_roofline(view_of([("gla-torch", 64, 20.0, 800.0), ("gla-torch", 128, 40.0, 1600.0)]))
    roof, dots = figure.axes[0].get_lines()
    assert list(dots.get_xdata()) == [25.0, 25.0]
    assert list(dots.get_ydata()) == [20.0, 40.0]
    assert max(roof.get_ydata()) == 500.0
    save_figure(figure, tmp_path / "roof.svg")
    text = (tmp_path / "roof.svg").read_text()
    assert "a copy, 2000 GB/s; products, 500 TFLOP/s" in text
    assert "operations per byte" in text


@pytest.mark.parametrize("cells", [[("gla-torch", 64, None, None)]])
def test_without_rates_there_is_no_roofline(cells):
    with pytest.raises(UsageError, match="--roofline: the run has no rates"):
        draw_roofline(view_of(cells))


def test_a_published_run_has_one(tmp_path):
    path = tmp_path / "roof.png"
    code, out, err = glabench(tmp_path, "report", RUN, "--out", tmp_path / "out", "--roofline", path)
    assert code == 0, err
    assert path.stat().st_size > 10_000
    assert "forward + backward, gla-triton: the nearer roof is memory's;" in out
    assert glabench(tmp_path, "report", RUN, "--out", tmp_path / "out", "--roofline", "x.txt")[0] == 2
