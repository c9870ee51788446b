"""Sweeps: files, presets, expanding, changes from the command line."""

from dataclasses import replace

import pytest

from glabench.backends import load_registry
from glabench.errors import UsageError
from glabench.sweeps import Sweep, Traits, Variant, expand, load_sweep, preset_names, resolve
from glabench.sweeps.load import dump_sweep, parse_sweep

TRAITS = {
    "ours": Traits("gla", frozenset({"chunk", "materialize", "gate"})),
    "rival": Traits("softmax", frozenset()),
}
AXES = {"seqlen": "1k..2k", "batch": "1", "heads": "2", "head_dim": "64", "dtype": "bf16", "pass": "fwd"}
GOOD = """
title = "A title"
x = "seqlen"
[axes]
seqlen = "1k..2k"
batch = 1
heads = 2
head_dim = 64
dtype = "bf16"
pass = "fwd"
[[backends]]
name = "ours"
"""


def sweep(*variants, **axes):
    return Sweep("test", AXES | axes, variants or (Variant("ours"), Variant("rival")))


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_preset_expands_to_cells_of_known_backends(name, device):
    preset = load_sweep(name)
    cells = expand(resolve(preset, device, {}), load_registry().traits(), device)
    assert len(cells) == len(set(cells)) > 0
    assert preset.title
    assert preset.description
    assert preset.baseline in {v.backend for v in preset.variants}


def test_the_presets_that_the_readme_names_are_there():
    wanted = {"paper-fig2", "paper-v3-width", "chunk-sweep", "head-dim", "long-context", "cpu-smoke"}
    assert wanted <= set(preset_names())


def test_the_papers_figure_2_is_its_shape():
    cells = expand(resolve(load_sweep("paper-fig2"), "cuda", {}), load_registry().traits(), "cuda")
    assert {c.seqlen for c in cells} == {1024, 2048, 4096, 8192, 16384}
    assert {(c.batch, c.heads, c.key_dim, c.value_dim, c.dtype) for c in cells} == {(32, 16, 64, 64, "bf16")}
    ours = [c for c in cells if c.backend == "gla-triton"]
    assert {c.materialize for c in ours} == {True, False}
    assert {c.pass_ for c in ours} == {"fwd", "fwd+bwd"}


def test_version_3s_width_gives_every_backend_its_own_heads():
    cells = expand(resolve(load_sweep("paper-v3-width"), "cuda", {}), load_registry().traits(), "cuda")
    shapes = {c.backend: (c.heads, c.key_dim, c.value_dim) for c in cells}
    assert shapes["gla-triton"] == (4, 128, 256)
    assert shapes["sdpa-flash"] == (16, 64, 64)
    assert shapes["mamba1"] == (32, 16, 64)


def test_a_forward_without_gradients_has_no_states_to_keep_or_not():
    cells = expand(sweep(materialize="on,off", **{"pass": "infer,fwd"}), TRAITS, "cuda")
    kept = {(c.pass_, c.materialize) for c in cells if c.backend == "ours"}
    assert kept == {("infer", None), ("fwd", True), ("fwd", False)}


def test_axes_that_mean_nothing_to_a_backend_are_left_out_of_its_cells():
    cells = expand(sweep(chunk="16,32", materialize="on,off"), TRAITS, "cuda")
    rival = [c for c in cells if c.backend == "rival"]
    assert len(rival) == 2
    assert {(c.chunk, c.materialize, c.gate) for c in rival} == {(None, None, None)}
    assert len([c for c in cells if c.backend == "ours"]) == 2 * 2 * 2


def test_a_variants_own_axes_hold_for_it_alone():
    cells = expand(sweep(Variant("ours", {"key_dim": "128", "value_dim": "256"}), Variant("rival")), TRAITS, "cuda")
    assert {(c.backend, c.key_dim, c.value_dim) for c in cells} == {("ours", 128, 256), ("rival", 64, 64)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seqlen": "64"}, {("ours", 64, 128, 256), ("rival", 64, 64, 64)}),
        ({"seqlen": "64", "head_dim": "32"}, {("ours", 64, 32, 32), ("rival", 64, 32, 32)}),
        ({"seqlen": "64", "key_dim": "16"}, {("ours", 64, 16, 256), ("rival", 64, 16, 64)}),
        ({"seqlen": "64", "backend": "rival"}, {("rival", 64, 64, 64)}),
    ],
)
def test_changes_go_over_the_sweep_and_over_its_variants(changes, expected):
    original = sweep(Variant("ours", {"key_dim": "128", "value_dim": "256"}), Variant("rival"))
    cells = expand(resolve(original, "cuda", changes), TRAITS, "cuda")
    assert {(c.backend, c.seqlen, c.key_dim, c.value_dim) for c in cells} == expected


def test_cpu_values_count_on_a_cpu_only_and_below_changes():
    original = Sweep("test", AXES, (Variant("rival"),), on_cpu={"seqlen": "16", "batch": "3"})
    changed = resolve(original, "cpu", {"batch": "5"})
    assert [(c.seqlen, c.batch) for c in expand(changed, TRAITS, "cpu")] == [(16, 5)]
    assert {c.seqlen for c in expand(resolve(original, "cuda", {}), TRAITS, "cuda")} == {1024, 2048}


def test_an_unknown_backend_is_a_usage_error_that_lists_the_known():
    with pytest.raises(UsageError, match=r"sweep test: 'nope' is not a backend \(allowed: ours, rival"):
        expand(resolve(sweep(), "cuda", {"backend": "nope"}), TRAITS, "cuda")


def test_odd_characters_in_a_title_survive():
    odd = replace(sweep(), title='a "b" \\ \x07 \x7f \n é 🚀', x="seqlen")
    assert parse_sweep("test", dump_sweep(odd), "test").title == odd.title


def test_a_baseline_that_is_not_measured_is_dropped():
    preset = load_sweep("paper-fig2")
    assert resolve(preset, "cuda", {"backend": "gla-triton"}).baseline is None
    assert resolve(preset, "cuda", {"seqlen": "1k"}).baseline == "sdpa-flash"


def test_a_sweep_file_survives_being_written_and_read():
    for name in preset_names():
        preset = load_sweep(name)
        assert parse_sweep(name, dump_sweep(preset), "test") == preset


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "A title"', 'titel = "A title"', "the key 'titel' is not known"),
        ("heads = 2", "haeds = 2", r"\[axes\]: the key 'haeds' is not known"),
        ('name = "ours"', 'name = "ours"\nchnk = 3', "backend ours: the key 'chnk' is not known"),
        ("heads = 2", 'heads = "two"', r"\[axes\] heads: 'two' is not a positive number"),
        ("heads = 2", "heads = 2.5", "heads needs a number or a text"),
        ('x = "seqlen"', 'x = "time"', "x is 'time', which is not an axis"),
        ('x = "seqlen"', "x = 3", "x needs a text"),
        ('x = "seqlen"', 'x = "pass"', "x cannot be 'pass'"),
        ('x = "seqlen"', 'baseline = "them"', "baseline 'them' is not one of its backends"),
        ("[axes]", "cpu = 3\n[axes]", r"\[cpu\] needs a table"),
        ('name = "ours"', 'nam = "ours"', r"needs one \[\[backends\]\] table"),
        ("heads = 2", "heads = = 2", "not a TOML file"),
    ],
)
def test_a_mistake_in_a_sweep_file_is_named(old, new, message):
    with pytest.raises(UsageError, match=message):
        parse_sweep("test", GOOD.replace(old, new), "file.toml")


@pytest.mark.parametrize(
    ("drop", "message"),
    [("heads", "the axis heads is missing"), ("head_dim", "head dims are missing")],
)
def test_a_missing_axis_is_named(drop, message):
    axes = {k: v for k, v in AXES.items() if k != drop}
    with pytest.raises(UsageError, match=message):
        expand(Sweep("test", axes, (Variant("ours"),)), TRAITS, "cuda")


def test_head_dim_beside_key_dim_is_refused_in_one_table():
    with pytest.raises(UsageError, match="head_dim sets both"):
        expand(sweep(key_dim="32"), TRAITS, "cuda")


def test_an_unknown_preset_lists_the_presets(tmp_path):
    with pytest.raises(UsageError, match="'nope' is neither a preset"):
        load_sweep("nope")
    with pytest.raises(UsageError, match="there is no file"):
        load_sweep(str(tmp_path / "nope.toml"))


def test_a_users_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_sweep(str(path)).name == "mine"
