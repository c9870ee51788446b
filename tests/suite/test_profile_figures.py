"""Profiles in a report: the figure of kernels, and the roofline of kernels and calls."""

from dataclasses import replace

import pytest
from reports import made_up
from traces import KERNELS, SMALL, trace_of

from glabench.profiling.profile import profile_of
from glabench.records.metrics import TIME
from glabench.records.profile import Work
from glabench.report.kernel_roof import call_dots, draw_kernel_roof, kernel_dots, kernel_roof, kernel_roof_markdown
from glabench.report.profiles import draw_profiles, profile_table, profiles_markdown
from glabench.report.write import write_report
from glabench.sweeps import Parameters


@pytest.fixture
def measured():
    """A run with ceilings and a profile, of which a kernel's work is known."""
    run = made_up("gla-340m", {"backend": "gla-triton", "seqlen": "2k"}, copy_gbps=4000.0, product_tflops=800.0)
    found = profile_of(trace_of(KERNELS)).with_work({"forward": Work(60 * 10**6, 3 * 10**9)})
    return replace(run, profiles={run.records[0].cell: found})


def test_kernels_whose_work_is_known_are_dots_below_the_roof(measured, tmp_path):
    """In 0.03 ms 60 MB and 3 GFLOP: 2 TB/s, half of a copy's."""
    ((name, dot),) = kernel_dots(measured).items()
    assert name == "gla-triton: forward"
    assert (dot.intensity, dot.tflops) == (50.0, pytest.approx(100.0))
    assert "50 operations per byte, so the roof of memory is nearer; 50% of it" in kernel_roof_markdown(measured)
    axes = draw_kernel_roof(measured).axes[0]
    assert [line.get_label() for line in axes.lines[1:]] == ["gla-triton: forward"]
    assert "of the roof |\n" in profiles_markdown(measured)
    assert "| 2000 | 100 | 50% |" in profiles_markdown(measured)
    assert "roof.png" in {path.name for path in write_report([measured], tmp_path, [TIME], None)}


def test_whole_calls_are_dots_by_the_ops_own_work(measured):
    run = replace(measured, records=[replace(record, gbps=500.0, tflops=80.0) for record in measured.records])
    ((name, dot),) = call_dots(run).items()
    assert name == "gla-triton: whole call"
    assert (dot.intensity, dot.tflops) == (160.0, 80.0)
    axes = draw_kernel_roof(run).axes[0]
    assert [line.get_label() for line in axes.lines[1:]] == ["gla-triton: forward", name]
    assert [line.get_markerfacecolor() == "none" for line in axes.lines[1:]] == [False, True]
    assert f"- {name}: 160 operations per byte, so the roof of memory is nearer; 12% of it" in kernel_roof_markdown(run)
    unknown = {cell: found.with_work({}) for cell, found in run.profiles.items()}
    assert kernel_roof(replace(run, profiles=unknown)) is not None


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", r"a\|b"),
        ("`a`", r"\`a\`"),
        ("<b>a</b>", r"\<b>a\</b>"),
        ("[a](b)", r"\[a](b)"),
        ("*a* ~b~ $c$ &d;", r"\*a\* \~b\~ \$c\$ \&d;"),
        ("a\\|b", r"a\\\|b"),
        ("__a_b__", r"\__a_b\_\_"),
        ("_outputs", "_outputs"),
    ],
)
def test_names_are_no_markup_in_a_report(name, shown, measured):
    ((cell, found),) = measured.profiles.items()
    renamed = replace(found, kernels=(replace(found.kernels[0], name=name), *found.kernels[1:]))
    cell = replace(cell, backend=name)
    run = replace(measured, profiles={cell: renamed})
    page = profiles_markdown(run)
    assert f"**{shown} fwd" in page
    assert f"\n| {shown} | 1 |" in page
    assert f"- {shown}: {shown}: 50 operations" in kernel_roof_markdown(run)


def legend_of(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_long_names_are_short_in_figures_and_whole_in_tables(measured):
    ((cell, found),) = measured.profiles.items()
    names = ["a" * 300, "a" * 150 + "b" * 150, "c" * 52]
    kernels = tuple(replace(found.kernels[0], name=name) for name in names)
    cell = replace(cell, backend="d" * 300, parameters=Parameters({**SMALL, "gate": "e" * 300}))
    run = replace(measured, profiles={cell: replace(found, kernels=kernels)})
    figure = draw_profiles(run)
    assert legend_of(figure)[:3] == ["a" * 26 + "…" + "a" * 25, "a" * 26 + "…" + "b" * 25, "c" * 52]
    (label,) = figure.axes[0].get_yticklabels()
    assert [len(line) for line in label.get_text().split("\n")] == [52, 80]
    assert [len(name) for name in legend_of(draw_kernel_roof(run))] == [52, 52, 52]
    assert all(f"| {name} |" in profiles_markdown(run) for name in names)


def test_figures_show_the_kernels_that_add_the_most(measured):
    ((cell, found),) = measured.profiles.items()
    order = [number * 7 % 5000 for number in range(5000)]
    kernels = tuple(replace(found.kernels[0], name=f"k{number}", added_ms=1.0 + number) for number in order)
    run = replace(measured, profiles={cell: replace(found, kernels=kernels)})
    largest = [f"k{number}" for number in order if number >= 4988]
    figure = draw_profiles(run)
    assert legend_of(figure) == [*largest, "others", "idle"]
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == pytest.approx(
        sum(kernel.added_ms for kernel in kernels) + found.span_ms - found.busy_ms
    )
    assert legend_of(draw_kernel_roof(run)) == [f"gla-triton: k{number}" for number in range(4999, 4987, -1)]
    assert len(profile_table(found)[1]) == len(found.kernels)


def test_without_ceilings_or_known_work_there_is_no_roof(measured, tmp_path):
    unknown = {cell: found.with_work({"forward": Work(10**6)}) for cell, found in measured.profiles.items()}
    bare = [replace(record, copy_gbps=None) for record in measured.records]
    for run in (replace(measured, profiles=unknown), replace(measured, records=bare)):
        assert kernel_roof(run) is None
        assert kernel_roof_markdown(run) == ""
        assert "roof.png" not in {path.name for path in write_report([run], tmp_path, [TIME], None)}
