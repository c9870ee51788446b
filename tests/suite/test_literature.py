"""Published values beside runs of the same sizes: times as ratios to a rival's, perplexities as they are."""

import pytest
from reports import PEAK, drawn, made_up, markdown, stored

from glabench.records.literature import published_quality, published_series, published_versus
from glabench.records.metrics import TIME
from glabench.report.literature import overlays_of
from glabench.report.quality import draw_quality, trained_in
from glabench.report.series import make_view
from glabench.report.versus import ratios_of
from glabench.report.write import write_report

# Version 3, Fig. 2 left: GLA over FlashAttention-2.
RATIOS = {1024: 51.2 / 27.1, 2048: 108.7 / 82.9, 4096: 210.3 / 281.7, 8192: 415.8 / 1037.1}


def overlays(changes=None, outcome=lambda cell: "ok", pass_="fwd+bwd"):
    view = make_view([made_up("paper-v3-width", changes, outcome)])
    return overlays_of(next(panel for panel in view.panels if panel.pass_ == pass_))


def test_published_ratios_stand_beside_those_of_the_same_sizes():
    (found,) = overlays()
    assert found.base == "flash-attn"
    assert found.published.ratios == pytest.approx(RATIOS)
    assert set(found.here) == {"gla-triton (states kept)", "gla-triton (checkpoints kept)"}
    assert found.here["gla-triton (states kept)"] == pytest.approx(dict.fromkeys(RATIOS, 1.0))
    assert found.ms == pytest.approx({x: ratio * found.base_ms[x] for x, ratio in RATIOS.items()})


def test_without_the_package_torchs_kernel_is_the_rival():
    (found,) = overlays(outcome=lambda cell: "unsupported" if cell.backend == "flash-attn" else "ok")
    assert found.base == "sdpa-flash"


@pytest.mark.parametrize(
    ("changes", "outcome", "pass_"),
    [
        ({}, lambda cell: "ok", "fwd"),
        ({"batch": "8"}, lambda cell: "ok", "fwd+bwd"),
        ({}, lambda cell: "error" if "flash" in cell.backend else "ok", "fwd+bwd"),
        ({}, lambda cell: "oom" if cell.op == "gla" else "ok", "fwd+bwd"),
    ],
    ids=["another pass", "another size", "no rival", "nothing to compare"],
)
def test_a_run_of_other_sizes_has_none(changes, outcome, pass_):
    assert overlays(changes, outcome, pass_) == []


def test_where_the_rival_failed_there_is_no_time():
    (found,) = overlays(outcome=lambda cell: "oom" if cell.op == "softmax" and cell.seqlen > 2048 else "ok")
    assert set(found.ms) == {1024, 2048}


def test_a_report_has_them_in_a_table_and_in_the_figure():
    run = made_up("paper-v3-width")
    text = markdown(run)
    assert "time as a multiple of flash-attn's; published: FlashAttention-2's, GLA paper, version 3" in text
    assert "| published: GLA | 1.89 | 1.31 | 0.747 | 0.401 |" in text
    lines = [line for axes in drawn(run, (TIME,)).axes for line in axes.lines if line.get_marker() == "+"]
    assert len(lines) == 1
    assert "published: GLA" not in markdown(made_up("head-dim"))


def test_every_published_value_has_its_rivals():
    for one in published_series():
        assert len(one.at) == len(one.values) == len(one.base_values)
        assert one.at == sorted(one.at)


# Version 3, Table 3: GLA against the kernel that stores all states

NARROW, WIDE = "published: GLA with both gates (H=16, D=64)", "published: GLA with both gates (H=8, D=128)"


def ratios(changes=None, outcome=lambda cell: "ok"):
    (panel,) = make_view([made_up("paper-v3-table3", changes, outcome)]).panels
    return {(each.name, each.field): each for each in ratios_of(panel)}


def test_published_speedups_and_memory_stand_beside_those_of_the_same_sizes_and_gates():
    found = ratios()
    assert list(found) == [(name, field) for field in ("time_ms", "peak_mib") for name in (NARROW, WIDE)]
    time, memory = found[NARROW, "time_ms"], found[NARROW, "peak_mib"]
    assert (time.given, memory.given) == ({1024: 3.8, 2048: 2.3}, {1024: 0.26, 2048: 0.26})
    both, keys = (len(f"gla-{gates}stored-states") / len(f"gla-{gates}triton") for gates in ("both-", ""))
    label = "gla-{}triton (H=16, D=64, states kept)"
    assert time.here[label.format("both-")] == pytest.approx(dict.fromkeys((1024, 2048), both))
    assert time.here[label.format("")] == pytest.approx(dict.fromkeys((1024, 2048), keys))
    assert set(memory.here[label.format("")].values()) == {1.0}
    assert next(iter(time.here)) == label.format("both-")


def test_published_speedups_make_times_and_sizes_of_the_rivals_here():
    found = ratios()
    base = {x: found[NARROW, "time_ms"].base[x]["time_ms"] for x in (1024, 2048)}
    assert found[NARROW, "time_ms"].values == pytest.approx({1024: base[1024] / 3.8, 2048: base[2048] / 2.3})
    assert found[WIDE, "peak_mib"].values == pytest.approx({1024: 0.13 * 102.4})


def test_ratios_to_a_rival_without_a_time_say_why():
    found = ratios(outcome=lambda cell: "oom" if "stored" in cell.backend and cell.seqlen > 1024 else "ok")
    own = found[WIDE, "time_ms"].here["gla-both-triton (H=8, D=128, states kept)"]
    assert (type(own[1024]), own[2048]) == (float, "rival oom")
    found = ratios(outcome=lambda cell: "oom" if cell.backend == "gla-both-triton" and cell.seqlen > 1024 else "ok")
    assert found[WIDE, "time_ms"].here["gla-both-triton (H=8, D=128, states kept)"][2048] == "oom"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [({"batch": "8"}, lambda cell: "ok"), ({}, lambda cell: "error" if "stored" in cell.backend else "ok")],
    ids=["another size", "no rival"],
)
def test_without_the_sizes_or_the_rival_there_are_no_ratios(changes, outcome):
    assert ratios(changes, outcome) == {}


def test_the_stored_run_of_table_3_has_the_published_ratios_in_its_report_and_figure():
    run = stored("h100-paper-v3-table3")
    text = markdown(run)
    assert f"| {NARROW} | 3.8 | 2.3 |\n" in text
    assert f"| {WIDE} | 2.8 | - |\n" in text
    assert f"| {NARROW} | 0.26 | 0.26 |\n" in text
    assert f"| {WIDE} | 0.13 | OOM |\n" in text
    for axes in drawn(run, (TIME, PEAK)).axes:
        assert {line.get_marker() for line in axes.lines if line.get_color() == "black"} == {"+", "D"}


def test_every_published_ratio_has_its_place():
    for one in published_versus():
        assert len(one.at) == len(one.speedups) == len(one.memory)


# Perplexities of both versions' Table 2


def test_perplexities_stand_beside_the_times_of_the_gate_family():
    text = markdown(stored("h100-gate-family"))
    rows = [line for line in text.splitlines() if line.startswith(("| none |", "| fixed", "| per head", "| keys |"))]
    assert [line.split(" | ")[-2:] for line in rows] == [
        ["23.21", "23.21 |"],
        ["16.55", " |"],
        ["15.56", " |"],
        ["15.29", " |"],
        ["14.77", "14.73 |"],
        ["14.61", " |"],
    ]
    assert text.count("published mean perplexity") == 1  # with the passes that training takes


def test_perplexities_are_drawn_against_the_times_of_the_gate_family(tmp_path):
    run = stored("h100-gate-family")
    (left, right) = draw_quality(make_view([run])).axes
    assert {axes.get_title() for axes in (left, right)} == {
        "final paper, Table 2; forward + backward",
        "version 3, Table 2; forward + backward",
    }
    times = {
        r.cell.backend: r.time_ms for r in run.records if r.cell.pass_ == "fwd+bwd" and r.cell.get("key_dim") == 128
    }
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in left.lines}
    assert len(dots) == 6
    assert {(times["linear-triton"], 23.21), (times["gla-triton"], 14.77)} <= dots
    assert len(right.lines) == 4
    names = [path.name for path in write_report([run], tmp_path, [TIME], None)]
    assert "quality.png" in names
    assert "](quality.png)" in (tmp_path / "report.md").read_text()


def test_dots_of_perplexities_say_what_differs_between_their_cells():
    runs = [stored("h100-gate-family"), stored("h200-gate-family")]
    labels = [line.get_label() for line in draw_quality(make_view(runs)).axes[0].lines]
    assert len(labels) == len(set(labels)) == 12
    assert "none: h100-gate-family: linear-triton, H=4 K=128 V=256" in labels
    (panel,) = (
        one for one in make_view([made_up("gate-family", {"seqlen": "1k,2k"})]).panels if one.pass_ == "fwd+bwd"
    )
    assert {each.sizes.split()[0] for each in trained_in(panel)} == {"T=1k", "T=2k"}


def test_a_run_without_all_gates_has_no_perplexities():
    assert "perplexity" not in markdown(made_up("paper-v3-width"))
    fails = made_up("gate-family", outcome=lambda cell: "oom" if cell.op in ("retention", "gla-both") else "ok")
    assert "published mean perplexity" not in markdown(fails)


def test_a_cell_has_one_gate_in_all_tables_of_perplexities():
    models = [model for one in published_quality() for model in one.models]
    gates = {(tuple(model.cell.items()), model.gate) for model in models}
    assert len(gates) == len({cell for cell, _ in gates})
