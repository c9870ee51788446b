"""Published times: laid over runs of the same sizes, as ratios to a rival's time."""

import pytest
from reports import drawn, made_up, markdown

from glabench.records.literature import published_series
from glabench.records.metrics import TIME
from glabench.report.literature import overlays_of
from glabench.report.series import make_view

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
