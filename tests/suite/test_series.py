"""Series of a report: what tells rows apart, what they share, and which axis is drawn against."""

from dataclasses import replace

import pytest
from reports import made_up, rows

from glabench.records.run import rows_of
from glabench.report.series import choose_x, describe_shape, find_base, make_panels, make_view
from glabench.sweeps import Parameters


def test_series_of_one_backend_are_told_apart_by_what_differs():
    (panel,) = make_panels(rows(made_up("paper-fig2", {"pass": "fwd"})), "seqlen")
    labels = [s.label for s in panel.series]
    assert labels[:3] == ["gla-triton (states kept)", "gla-triton (checkpoints kept)", "linear-triton (states kept)"]
    assert list(panel.x_values) == [1024, 2048, 4096, 8192, 16384]


def test_an_axis_that_only_some_passes_have_tells_no_series_apart():
    view = make_view([made_up("host", {"backend": "gla-triton", "batch": "8"})])
    assert view.labels == ["gla-triton (H=16, D=64)", "gla-triton (H=4, K=128, V=256)"]
    assert len(view.panels) == 3
    assert view.shape == "B=8, bf16, states kept"


def test_sizes_that_x_determines_tell_no_series_apart():
    """Heads and value dims of the preset follow from key dims, sequence lengths from batches."""
    panel = make_panels(rows(made_up("head-dim")), "key_dim")[0]
    assert [s.label for s in panel.series][2:] == [
        "linear-triton",
        "fla-gla",
        "gla-torch",
        "linear-torch",
        "sdpa-flash",
    ]
    assert {tuple(s.rows) for s in panel.series} == {(32, 64, 128, 256, 512), (64,)}
    view = make_view([made_up("occupancy", {"backend": "fla-gla"})])
    assert view.labels == ["fla-gla"]
    assert view.shape == "H=1, D=64, bf16"


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
        ("op-zoo", {}, "seqlen"),  # the chunk varies in one of its backends alone
        ("op-zoo", {"batch": "8,32"}, "batch"),
    ],
)
def test_the_axis_that_varies_is_drawn_against(preset, changes, x):
    assert choose_x(rows(made_up(preset, changes)), "seqlen") == x


def test_every_seed_has_a_row_of_its_own():
    found = rows(made_up("ablation", {"backend": "gla-text,linear-text", "seed": "1,2,3"}))
    kept = [row for row in found if row["backend"] == "gla-text" or row["seed"] == 1]
    x = choose_x(kept, "seqlen")
    (panel,) = make_panels(kept, x)
    assert (x, len(kept)) == ("seqlen", sum(len(series.rows) for series in panel.series))
    of_gla = [f"gla-text (seed={seed})" for seed in (1, 2, 3)]
    assert sorted(series.label for series in panel.series) == [*of_gla, "linear-text (seed=1)"]


@pytest.mark.parametrize(
    ("preset", "x", "words"),
    [
        ("paper-fig2", "seqlen", "B=32, bf16; gla, linear, softmax: H=16 D=64; mamba1: inner=2048 N=16"),
        ("head-dim", "key_dim", "B=32, T=2k, bf16; softmax: H=16"),
        ("paper-v3-width", "seqlen", "B=32, bf16; gla: H=4 K=128 V=256; softmax: H=16 D=64; mamba1: inner=2048 N=16"),
    ],
)
def test_what_series_share_and_what_differs_between_ops_is_named(preset, x, words):
    changes = {"materialize": "on,off"}  # otherwise linear-triton's is named, too
    assert describe_shape(rows(made_up(preset, changes)), x) == words


def test_a_sweep_may_show_its_backends_in_panels():
    parts = {
        "linear attention": ("linear-triton", "sdpa-flash"),
        "GLA": ("gla-triton", "sdpa-flash"),
        "none": ("gone",),
    }
    axes = {"backend": "linear-triton,gla-triton,sdpa-flash", "pass": "fwd,fwd+bwd"}
    run = made_up("paper-fig2", axes, panels=parts)
    panels = make_view([run]).panels
    assert [panel.title for panel in panels] == [
        f"{pass_}: {part}" for pass_ in ("forward", "forward + backward") for part in ("linear attention", "GLA")
    ]
    for panel in panels:
        assert {series.backend for series in panel.series} == set(parts[panel.part])
    assert len({panel.key for panel in panels}) == 4
    other = made_up("paper-fig2", {"backend": "fla-gla", "pass": "fwd,fwd+bwd"}, name="b-run")
    assert [panel.part for panel in make_view([run, other]).panels] == ["", ""]


def bases_of(found):
    """The heads of the base of every cell, by backend and heads."""
    (panel,) = make_panels(found, "seqlen")
    cells = [(row, x) for series in panel.series for x, row in series.rows.items()]
    bases = {(row["backend"], row["heads"]): find_base(panel, row, x, "sdpa-flash") for row, x in cells}
    return {cell: base and base[1]["heads"] for cell, base in bases.items()}


def test_a_cell_is_compared_with_the_base_of_its_own_model_width():
    changes = {"pass": "fwd", "backend": "sdpa-flash,lightning-triton,fla-kda", "width": "1024,2048"}
    found = rows(made_up("width-zoo", changes))
    expected = {("sdpa-flash", 16): 16, ("sdpa-flash", 32): 32, ("lightning-triton", 8): 16}
    expected |= {("lightning-triton", 16): 32, ("fla-kda", 8): 16, ("fla-kda", 16): 32}
    assert bases_of(found) == expected


def test_without_a_width_a_cell_has_no_base_among_several_of_other_sizes():
    changes = {"pass": "fwd", "backend": "sdpa-flash,lightning-triton", "width": "1024,2048"}
    found = [{**row, "width": None} for row in rows(made_up("width-zoo", changes))]
    expected = {("sdpa-flash", 16): 16, ("sdpa-flash", 32): 32}
    assert bases_of(found) == expected | dict.fromkeys([("lightning-triton", 8), ("lightning-triton", 16)])


def test_widths_that_x_names_hide_the_sizes_that_follow_from_them():
    view = make_view([made_up("width-zoo", {"backend": "gla-triton,mamba1,sdpa-flash"})])
    assert view.labels == ["gla-triton", "mamba1", "sdpa-flash"]
    assert list(view.panels[0].x_values) == [1024, 2048]


def test_models_are_compared_with_the_base_of_their_own_width():
    changes = {"backend": "transformer-model,gla-model", "model_width": "512,1024", "layers": "2,4", "compile": "off"}
    (panel,) = make_panels(rows(made_up("train-340m", changes)), "seqlen")
    cells = [(row, x) for series in panel.series for x, row in series.rows.items()]
    for row, x in cells:
        _, base = find_base(panel, row, x, "transformer-model")
        assert [base[name] for name in ("model_width", "layers")] == [row[name] for name in ("model_width", "layers")]


def test_a_seed_is_compared_with_the_base_of_the_same_seed():
    changes = {"backend": "sdpa-flash,gla-triton", "seqlen": "1k", "seed": "1,2", "pass": "fwd"}
    panel = make_panels(rows(made_up("paper-fig2", changes)), "seqlen")[0]
    cells = [(row, x) for series in panel.series for x, row in series.rows.items()]
    assert all(find_base(panel, row, x, "sdpa-flash")[1]["seed"] == row["seed"] for row, x in cells)


def test_gates_and_chunks_that_differ_with_the_width_are_told():
    found = rows(made_up("width-zoo", {"backend": "gla-triton", "pass": "fwd"}))
    told = [{**row, "gate": gate, "chunk": chunk, "parameters": row["parameters"] + ",chunk"}
            for row, gate, chunk in zip(found, ("strong", "mild"), (16, 64), strict=True)]  # fmt: skip
    (panel,) = make_panels(told, "width")
    assert [series.label for series in panel.series] == [
        "gla-triton (C=16, gate=strong)",
        "gla-triton (C=64, gate=mild)",
    ]
