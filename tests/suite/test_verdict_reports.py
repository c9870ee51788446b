"""Comparisons as text, JUnit, annotations and figures."""

from dataclasses import replace
from io import BytesIO
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from rich.console import Console
from simulated import CELL, STEADY, failed, record

from glabench.records.metrics import parse_compared
from glabench.report.ci import github_annotations, junit
from glabench.report.ratios import draw_ratios
from glabench.report.verdicts import markdown, terminal_report
from glabench.verdicts import FAILING, Comparison, Finding, Limits, Side, Verdict, compare_sides
from glabench.verdicts.statistics import Ratio

NASTY = "a & b <c> | d\n\x00 100% ::error::"


@pytest.fixture(scope="module")
def comparison():
    cells = [replace(CELL, seqlen=2**n) for n in range(6, 12)]
    factors = (0.5, 0.9, 1, 1.02, 1.2, 3)
    generator = np.random.default_rng(0)
    base, new = (
        [record(STEADY.round(generator, factor), cell, first_call_s=1.0) for cell, factor in zip(cells, f, strict=True)]
        for f in ((1,) * 6, factors)
    )
    new[3] = failed("error", "RuntimeError: a | b", cells[3])
    new += [record([1.0], replace(CELL, batch=2**n)) for n in range(2, 7)]
    code = {"kernels": "4f8a", "plugins": {}}
    environments = [{"packages": {"torch": torch}, "code": code} for torch in ("2.11", "2.13")]
    sides = Side("main", [base], environments[0]), Side("HEAD", [new], environments[1])
    found = compare_sides(*sides, Limits.of())
    return replace(found, clocks_mhz=(1980.0, 1700.0))


def judged(*verdicts):
    return Comparison(
        "main", "HEAD", Limits.of(), tuple(Finding(NASTY, {"time": v}, CELL, remarks=(NASTY,)) for v in verdicts)
    )


def shown(comparison, width, metrics=None):
    console = Console(width=width, file=None)
    with console.capture() as captured:
        console.print(terminal_report(comparison, width, metrics))
    return captured.get()


def test_markdown_shows_every_cell_what_differs_and_the_clocks(comparison):
    page = markdown(comparison, "glabench compare")
    assert page.count("\n| gla-triton fwd B=2 T=") == 6
    assert "all cells: H=4 K=64 V=64 bf16 materialize=states" in page
    assert "- packages torch: 2.11 -> 2.13" in page
    assert "- the measured code (kernels and plugins) is identical on both sides" in page
    assert "1980 -> 1700 MHz" in page
    assert "- first calls of gla-triton: not slower: 5.0 s -> 5.0 s" in page
    assert "not compared, not in base: gla-triton fwd B=4 T=1024; gla-triton fwd B=8 T=1024; " in page
    assert "; and 2 more" in page
    assert f"**{comparison.summary()}**" in page
    assert page.index("| failed |") < page.index("| slower |") < page.index("| same |") < page.index("| faster |")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_digit_and_no_name_is_lost_at_any_width(comparison, width):
    text = shown(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    flat = "".join(text.split())
    for finding in comparison.cells[:3]:
        low, high = f"{finding.ratio.low:.3f}", f"{finding.ratio.high:.3f}"
        assert f"{finding.ratio.ratio:.3f}" in flat
        assert f"{low}to{high}" in flat
        assert f"T={finding.cell.seqlen}" in flat
    assert "…" not in text
    assert "main" in text
    assert "".join(comparison.summary().split()) in flat


def test_an_interval_without_a_bound_has_no_endless_digits(comparison):
    finding = replace(comparison.cells[0], ratio=Ratio(1.5, 1e-9, 3.8e18))
    for text in (shown(replace(comparison, findings=(finding,)), width) for width in (60, 200)):
        assert "<0.001 to >1000" in text
    assert "time ×1.500 (<0.001 to >1000)" in finding.reason


def test_columns_that_no_cell_has_are_left_out(comparison):
    assert "error ×" in shown(comparison, 160)
    bare = [replace(f, values={"time": f.values.get("time", (None, None))}) for f in comparison.findings]
    assert "error ×" not in shown(replace(comparison, findings=tuple(bare)), 160)


@pytest.mark.parametrize(
    ("names", "there", "missing"),
    [
        ("error,peak", ["peak ×", "error ×"], None),
        ("time", ["base, ms", "new / base"], None),
        ("first_call,energy", ["first call ×"], "energy"),
    ],
)
def test_a_table_shows_the_metrics_that_were_asked_for(comparison, names, there, missing):
    metrics = parse_compared(names)
    heads = ["base, ms", "new / base", "peak ×", "error ×", "first call ×", "energy ×"]
    wide, narrow = (shown(comparison, width, metrics) for width in (160, 40))
    page = markdown(comparison, "", metrics)
    assert [head for head in heads if head in wide] == there
    assert [head for head in heads if f"| {head} |" in page] == there
    assert (" ms, ×" in narrow, "first call ×1.00" in narrow) == (names == "time", "first_call" in names)
    for text in (wide, narrow, page):
        assert (f"no cell has these metrics: {missing}" in text) == (missing is not None)
        assert "1 failed, " in text


def test_names_are_text_and_no_markup():
    text = shown(replace(judged(Verdict.SLOWER), base="[red]x[/nope]"), 80)
    assert "[red]x[/nope]" in text


def test_junit_has_a_case_per_finding_and_unclear_ones_fail_only_if_asked():
    found = judged(*Verdict)
    for fail_on, failures, skipped in ((FAILING, 4, 2), ({*FAILING, Verdict.UNCLEAR}, 5, 1), ((), 0, 2)):
        suite = ElementTree.fromstring(junit(found, fail_on))
        assert len(suite.findall("testcase")) == int(suite.get("tests")) == 9
        assert len(suite.findall("testcase/failure")) == int(suite.get("failures")) == failures
        assert len(suite.findall("testcase/skipped")) == int(suite.get("skipped")) == skipped


def test_annotations_are_one_line_each_and_escape_what_would_be_a_command():
    lines = github_annotations(judged(*Verdict))
    assert [line.split()[0] for line in lines] == ["::error"] * 4 + ["::warning"]
    assert all("\n" not in line and "100%25" in line for line in lines)


def drawn(comparison):
    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "glabench"}):
        draw_ratios(comparison).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def test_the_figure_is_sorted_on_a_log_axis_and_always_the_same(comparison):
    axes = draw_ratios(comparison).axes[0]
    assert axes.get_xscale() == "log"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label.split("T=")[1] for label in labels] == ["64", "128", "256", "1024", "2048"]
    assert drawn(comparison) == drawn(comparison)


def test_a_figure_of_nothing_and_one_of_odd_names_are_drawn_all_the_same(comparison):
    assert drawn(replace(comparison, findings=()))
    odd = tuple(replace(f, name="$\\frac{$ " + f.name) for f in comparison.findings)
    assert drawn(replace(comparison, findings=odd))
