"""Sweeps: files, presets, expanding, changes from the command line and from Python."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from glabench.backends import load_registry
from glabench.errors import RenamedWarning, UsageError
from glabench.records import RunFolder
from glabench.sweeps import Cell, Parameters, Sweep, Traits, Variant, expand, load_sweep, preset_names, resolve
from glabench.sweeps.expand import parameters_of
from glabench.sweeps.load import dump_sweep, parse_sweep
from glabench.sweeps.parameters import Parameter, choices, integers, switch

REGISTRY = load_registry()
TRAITS = REGISTRY.traits()
COMMON = {"seqlen": "64", "batch": "1", "dtype": "bf16", "pass": "fwd"}
GLA, LINEAR, SOFTMAX, MAMBA = "gla-triton", "linear-torch", "sdpa-math", "mamba1"
GOOD = """
title = "A title"
x = "seqlen"
[axes]
seqlen = "1k..2k"
batch = 1
heads = 2
dtype = "bf16"
pass = "fwd"
[[backends]]
name = "gla-triton"
"""


def sweep(*variants, **axes):
    """A sweep of backends (names or variants) with axes beside those that every cell needs."""
    return Sweep("test", COMMON | axes, tuple(Variant(v) if isinstance(v, str) else v for v in variants))


def cells(sweep, device="cuda", traits=TRAITS, **changes):
    """The sweep's cells after changes; `pass_` is the axis pass."""
    changes = {name.rstrip("_"): value for name, value in changes.items()}
    return expand(resolve(sweep, device, changes, traits), traits, device)


def values(found, *names):
    """The values of some parameters and fields in all cells, without repeats."""
    return {tuple(getattr(cell, name) if hasattr(cell, name) else cell.get(name) for name in names) for cell in found}


# Presets


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_preset_expands_to_cells_of_known_backends(name, device):
    preset = load_sweep(name)
    found = cells(preset, device)
    assert len(found) == len(set(found)) > 0
    assert all(
        isinstance(cell.get(size), int) for cell in found for size in REGISTRY.op_of(cell.backend).published(1024)
    )
    assert preset.title
    assert preset.description
    assert preset.against in {v.backend for v in preset.variants}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_sizes_for_a_cpu(name):
    assert max(cell.tokens for cell in cells(load_sweep(name), "cpu")) <= 4096


def test_the_presets_that_the_readme_names_are_there():
    wanted = {"paper-fig2", "paper-v3-width", "chunk-sweep", "head-dim", "long-context", "cpu-smoke", "guard"}
    assert wanted <= set(preset_names())


def test_the_papers_figure_2_is_its_shape():
    found = cells(load_sweep("paper-fig2"))
    assert {c.seqlen for c in found} == {1024, 2048, 4096, 8192, 16384}
    assert values(found, "batch", "dtype") == {(32, "bf16")}
    shapes = values(found, "op", "heads", "key_dim", "value_dim", "head_dim", "inner", "state_size")
    assert shapes == {
        ("gla", 16, 64, 64, None, None, None),
        ("linear", 16, 64, 64, None, None, None),
        ("softmax", 16, None, None, 64, None, None),
        ("mamba1", None, None, None, None, 2048, 16),
    }
    ours = [c for c in found if c.backend == GLA]
    assert values(ours, "materialize", "pass_") == set(product(("states", "checkpoints"), ("fwd", "fwd+bwd")))


def test_version_3s_width_gives_every_backend_its_own_sizes():
    shapes = {c.backend: dict(c.parameters) for c in cells(load_sweep("paper-v3-width"))}
    for backend, shape in shapes.items():
        assert shape.items() >= REGISTRY.op_of(backend).published(1024).items()
    assert shapes[MAMBA] == {"inner": 2048, "state_size": 16}


def test_a_preset_answers_to_its_old_name_with_a_notice():
    with pytest.warns(RenamedWarning, match="the preset 'gate' is now called 'guard'"):
        assert load_sweep("gate") == load_sweep("guard")


# What is in a cell


def test_a_forward_without_gradients_has_no_states_to_keep_or_not():
    found = cells(sweep(GLA, materialize="on,off", **{"pass": "infer,fwd"}))
    assert values(found, "pass_", "materialize") == {("infer", None), ("fwd", "states"), ("fwd", "checkpoints")}


def test_parameters_that_mean_nothing_to_a_backend_are_left_out_of_its_cells():
    found = cells(sweep(GLA, SOFTMAX, chunk="16,32", materialize="on,off", gate="slow,strong"))
    theirs = [c for c in found if c.backend == SOFTMAX]
    assert [dict(c.parameters) for c in theirs] == [{"heads": 16, "head_dim": 64}]
    assert len(found) == 1 + 2 * 2 * 2


def test_a_cell_has_its_owners_defaults_and_nothing_for_what_is_left_open():
    (found,) = cells(sweep(GLA))
    sizes = {"heads": 4, "key_dim": 128, "value_dim": 256}
    assert dict(found.parameters) == sizes | {"gate": "logsigmoid/16", "materialize": "states"}
    assert found.get("chunk") is None
    assert (found.backend, found.op, found.pass_, found.batch, found.seqlen, found.dtype, found.device, found.seed) == (
        *(GLA, "gla", "fwd", 1, 64, "bf16", "cuda", 0),
    )


def test_a_cell_says_in_a_line_what_it_is():
    (found,) = cells(sweep(GLA, chunk="16", gate="slow"))
    assert str(found) == "gla-triton fwd B=1 T=64 H=4 K=128 V=256 bf16 C=16 gate=slow materialize=states"
    (found,) = cells(sweep(MAMBA))
    assert str(found) == "mamba1 fwd B=1 T=64 N=16 bf16 inner=2048"


def test_a_variants_own_axes_hold_for_it_alone():
    found = cells(sweep(Variant(GLA, {"key_dim": "16", "heads": "8"}), LINEAR, key_dim="32", heads="2"))
    assert values(found, "backend", "heads", "key_dim") == {(GLA, 8, 16), (LINEAR, 2, 32)}


# Axes that set several parameters


def test_head_dim_is_softmaxs_own_and_both_dims_of_gla():
    found = cells(sweep(GLA, SOFTMAX, LINEAR, head_dim="32,64"))
    assert values(found, "op", "key_dim", "value_dim", "head_dim") == {
        *{("gla", 32, 32, None), ("gla", 64, 64, None), ("linear", 32, 32, None), ("linear", 64, 64, None)},
        *{("softmax", None, None, 32), ("softmax", None, None, 64)},
    }


@pytest.mark.parametrize(
    ("backend", "width", "near"),
    [(SOFTMAX, 1000, "64; use 960 or 1024"), (GLA, 1001, "8; use 1000 or 1008"), (GLA, 1, "8; use 8")],
)
def test_a_width_of_no_whole_heads_is_refused_with_the_next_valid_ones(backend, width, near):
    with pytest.raises(UsageError, match=f"^--width: .* for the width {width}: whole heads need a multiple of {near}$"):
        cells(sweep(backend, width=str(width)))


def test_width_is_what_every_op_publishes():
    found = cells(sweep(GLA, SOFTMAX, MAMBA, width="1k,2k"))
    for cell in found:
        published = [REGISTRY.op_of(cell.backend).published(width) for width in (1024, 2048)]
        assert any(cell.parameters.items() >= each.items() for each in published)
    assert len(found) == 6


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({"width": "2k"}, (4, 256, 512)),
        ({"width": "2k", "heads": "3"}, (3, 256, 512)),
        ({"width": "2k", "head_dim": "64"}, (4, 64, 64)),
        ({"head_dim": "64", "value_dim": "16"}, (4, 64, 16)),
        ({"value_dim": "16", "head_dim": "64", "width": "2k"}, (4, 64, 16)),
        ({"width": "2k", "key_dim": "8", "head_dim": "64", "heads": "1"}, (1, 8, 64)),
    ],
)
def test_what_is_said_of_a_parameter_counts_over_head_dim_and_that_over_width(axes, sizes):
    for named in (axes, dict(reversed(axes.items()))):
        assert values(cells(sweep(LINEAR, **named)), "heads", "key_dim", "value_dim") == {sizes}


@pytest.mark.parametrize(
    ("axes", "changes", "sizes"),
    [
        ({"head_dim": "64"}, {"width": "2k"}, (4, 256, 512)),
        ({"key_dim": "64", "heads": "2"}, {"width": "2k"}, (4, 256, 512)),
        ({"key_dim": "64"}, {"head_dim": "32"}, (4, 32, 32)),
        ({"head_dim": "64"}, {"key_dim": "32"}, (4, 32, 64)),
        ({"width": "2k"}, {"key_dim": "32"}, (4, 32, 512)),
        ({"width": "2k"}, {"head_dim": "32"}, (4, 32, 32)),
        ({"width": "2k"}, {"width": "1k"}, (4, 128, 256)),
        ({"head_dim": "64", "heads": "2"}, {"width": "1k", "heads": "3"}, (3, 128, 256)),
    ],
)
def test_a_change_is_never_hidden_by_what_it_changes(axes, changes, sizes):
    names = ("heads", "key_dim", "value_dim")
    assert values(cells(sweep(LINEAR, **axes), **changes), *names) == {sizes}
    assert values(cells(sweep(Variant(LINEAR, axes)), **changes), *names) == {sizes}
    assert values(cells(replace(sweep(LINEAR, **axes), on_cpu=changes), "cpu"), *names) == {sizes}


def test_a_variants_width_counts_over_the_sweeps_head_dim():
    found = cells(sweep(Variant(LINEAR, {"width": "2k"}), GLA, head_dim="32"))
    assert values(found, "backend", "key_dim", "value_dim") == {(LINEAR, 256, 512), (GLA, 32, 32)}


def test_a_parameter_of_a_plugins_op_counts_over_its_alias_and_its_width_however_few_they_set():
    window = integers("window", "Tokens.", 8)
    traits = {"mine": Traits("mine", {"window": window}, {"reach": ("window",)}, lambda width: {"window": width})}
    axes = {"window": "1", "reach": "2", "width": "3"}
    for named in (axes, dict(reversed(axes.items()))):
        assert values(cells(sweep("mine", **named), traits=traits), "window") == {(1,)}
    del axes["window"]
    assert values(cells(sweep("mine", **axes), traits=traits), "window") == {(2,)}
    assert values(cells(sweep("mine", **axes), traits=traits, width="5"), "window") == {(5,)}


# Changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seqlen": "32"}, {(GLA, 32, 128, 256, None), (SOFTMAX, 32, None, None, 64)}),
        ({"head_dim": "32"}, {(GLA, 64, 32, 32, None), (SOFTMAX, 64, None, None, 32)}),
        ({"key_dim": "16"}, {(GLA, 64, 16, 256, None), (SOFTMAX, 64, None, None, 64)}),
        ({"backend": SOFTMAX}, {(SOFTMAX, 64, None, None, 64)}),
        ({"backend": f"{LINEAR},{GLA}"}, {(LINEAR, 64, 64, 64, None), (GLA, 64, 128, 256, None)}),
    ],
)
def test_changes_go_over_the_sweep_and_over_its_variants(changes, expected):
    original = sweep(Variant(GLA, {"key_dim": "128", "value_dim": "256"}), SOFTMAX, head_dim="64")
    found = cells(original, **changes)
    assert values(found, "backend", "seqlen", "key_dim", "value_dim", "head_dim") == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seqlen": [32, 64]}, {(32, "states", None), (64, "states", None)}),
        ({"seqlen": 32}, {(32, "states", None)}),
        ({"materialize": [True, False]}, {(64, "states", None), (64, "checkpoints", None)}),
        ({"materialize": "nothing"}, {(64, "nothing", None)}),
        ({"chunk": [16, None]}, {(64, "states", 16), (64, "states", None)}),
        ({"chunk": None}, {(64, "states", None)}),
        ({"backend": (GLA,)}, {(64, "states", None)}),
    ],
)
def test_changes_may_be_pythons_own_values(change, expected):
    found = cells(sweep(GLA), **change)
    assert values(found, "seqlen", "materialize", "chunk") == expected


def test_narrowing_to_backends_keeps_the_sweeps_own_variants_in_the_order_asked_for():
    original = sweep(Variant(GLA, {"chunk": "16"}), SOFTMAX, Variant(GLA, {"chunk": "32"}))
    narrowed = resolve(original, "cuda", {"backend": f"{LINEAR},{GLA}"}, TRAITS)
    assert [(v.backend, v.axes.get("chunk")) for v in narrowed.variants] == [(LINEAR, None), (GLA, "16"), (GLA, "32")]


def test_narrowing_to_backends_drops_the_axes_that_none_of_them_has():
    original = sweep(GLA, SOFTMAX, chunk="16,32")
    narrowed = resolve(original, "cuda", {"backend": SOFTMAX}, TRAITS)
    assert "chunk" not in narrowed.axes
    assert resolve(narrowed, "cuda", {}, TRAITS) == narrowed  # --resume resolves a stored sweep once more


def test_cpu_values_count_on_a_cpu_only_and_below_changes():
    original = replace(sweep(Variant(LINEAR, {"batch": "2"}), seqlen="1k..2k"), on_cpu={"seqlen": "16", "batch": "3"})
    assert values(cells(original, "cpu", batch=5), "seqlen", "batch") == {(16, 5)}
    assert values(cells(original, "cpu"), "seqlen", "batch") == {(16, 3)}
    assert values(cells(original), "seqlen", "batch") == {(1024, 2), (2048, 2)}


@pytest.mark.parametrize(
    ("device", "changes", "says"),
    [("cpu", {}, True), ("cpu", {"seqlen": "1k"}, True), ("cpu", {"batch": 8}, False), ("cuda", {}, False)],
)
def test_a_sweep_with_its_sizes_for_a_cpu_says_so_once(device, changes, says):
    original = replace(sweep(Variant(LINEAR)), title="A sweep", description="It is.", on_cpu={"batch": "2"})
    found = resolve(original, device, changes, TRAITS)
    assert found.title == ("A sweep (CPU sizes)" if says else "A sweep")
    assert found.description == ("It is. This run has the sweep's smaller sizes for a CPU." if says else "It is.")
    assert resolve(found, device, {}, TRAITS) == found


def test_other_backends_may_take_the_place_of_a_sweeps_on_a_cpu():
    original = replace(sweep(Variant(LINEAR, {"batch": "2"})), on_cpu={"backend": f"{GLA},{LINEAR}", "heads": "3"})
    assert values(cells(original, "cpu"), "backend", "batch", "heads") == {(GLA, 1, 3), (LINEAR, 2, 3)}
    assert values(cells(original), "backend") == {(LINEAR,)}
    assert values(cells(original, "cpu", backend=LINEAR), "backend", "heads") == {(LINEAR, 3)}
    assert resolve(original, "cpu", {}, TRAITS).title.endswith("(CPU sizes)")
    with pytest.raises(UsageError, match=r"sweep .*\[cpu\] backend: 'nothing' is not a backend"):
        resolve(replace(original, on_cpu={"backend": "nothing"}), "cpu", {}, TRAITS)


def test_the_backend_of_the_ratios_is_dropped_if_it_is_not_measured():
    preset = load_sweep("paper-fig2")
    assert resolve(preset, "cuda", {"backend": GLA}, TRAITS).against is None
    assert resolve(preset, "cuda", {"seqlen": "1k"}, TRAITS).against == "sdpa-flash"


# Mistakes


def test_a_backend_of_a_sweep_that_is_not_there_is_a_mistake():
    with pytest.raises(UsageError, match=r"sweep test: 'gone' is not a backend \(allowed: fla-both-recurrent, "):
        resolve(sweep("gone"), "cuda", {}, TRAITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backend": "nope"},
            r"--backend: 'nope' is not a backend \(allowed: fla-both-recurrent, .*\); a plugin's",
        ),
        ({"backend": "gla-tritn"}, r"did you mean 'gla-triton'\?\); a plugin's needs --plugin FILE$"),
        ({"backend": "gla-triton,,"}, "--backend: 'gla-triton,,' has an empty name"),
        ({"backend": 3}, "--backend: '3' is not a backend"),
        ({"chnk": "16"}, r"--chnk: there is no such axis \(allowed: seqlen, .*did you mean 'chunk'\?\)"),
        (
            {"state_size": 16},
            r"--state-size: no backend of this sweep has this parameter \(only backends of mamba1, mamba2 do\)",
        ),
        (
            {"head_dim": 16, "backend": MAMBA},
            r"--head-dim: no .* \(only backends of .*gla, .*mamba2, .*softmax do\)",
        ),
        ({"chunk": 2.5}, "--chunk: an axis takes text such as"),
        ({"key_dim": []}, "--key-dim: an axis takes"),
        ({"key_dim": "0"}, r"key_dim: '0' is not a positive number \(allowed: a number"),
        ({"materialize": "maybe"}, r"materialize: 'maybe' is not allowed .allowed: states, checkpoints, nothing\)"),
        ({"gate": "slwo"}, r"gate: 'slwo' is not .* did you mean 'slow'\?"),
        ({"pass": None}, "pass: 'auto' is not allowed .allowed: infer, fwd, bwd, fwd\\+bwd"),
        ({"a{b}": "1"}, r"--a\{b\}: there is no such axis"),
    ],
)
def test_a_wrong_change_is_named_with_what_is_allowed(changes, message):
    with pytest.raises(UsageError, match=message):
        expand(resolve(sweep(GLA, LINEAR), "cuda", changes, TRAITS), TRAITS, "cuda")


def test_a_list_within_itself_is_a_mistake_too():
    endless = []
    endless.append(endless)
    with pytest.raises(UsageError, match="--chunk: "):
        resolve(sweep(GLA), "cuda", {"chunk": endless}, TRAITS)


@pytest.mark.parametrize("table", ["axes", "on_cpu"])
@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"haeds": "2"}, r"sweep a\{b\}: 'haeds': there is no such axis \(allowed: .*did you mean 'heads'\?\)"),
        (
            {"inner": "64"},
            r"sweep a\{b\}: 'inner': no backend of this sweep has this parameter \(only backends of mamba1",
        ),
    ],
)
def test_an_axis_of_a_sweep_that_no_backend_of_it_has_is_a_mistake(axes, message, table):
    wrong = replace(sweep(GLA), name="a{b}", **{table: COMMON | axes})
    with pytest.raises(UsageError, match=message):
        resolve(wrong, "cuda", {}, TRAITS)


def test_backends_are_no_axis_of_a_sweep():
    with pytest.raises(UsageError, match="'backend': there is no such axis"):
        resolve(sweep(GLA, backend="gla-triton"), "cuda", {}, TRAITS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("heads", r"sweep test: backend mamba1 has no parameter 'heads' \(allowed: seqlen, .*inner, state_size"),
        ("iner", r"did you mean 'inner'\?"),
        ("widht", r"did you mean 'width'\?"),
    ],
)
def test_an_axis_of_a_variant_that_its_backend_lacks_is_a_mistake(name, message):
    with pytest.raises(UsageError, match=message):
        cells(sweep(Variant(MAMBA, {name: "32"}), GLA))


@pytest.mark.parametrize("name", list(COMMON))
def test_a_missing_axis_is_named(name):
    axes = {k: v for k, v in COMMON.items() if k != name}
    with pytest.raises(UsageError, match=f"the axis {name} is missing; every sweep needs seqlen, batch, dtype, pass"):
        cells(Sweep("test", axes, (Variant(GLA),)))


@pytest.mark.parametrize(("x", "hint"), [("sqlen", r"; did you mean 'seqlen'\?"), ("zzz", "")])
def test_an_x_that_is_no_axis_is_a_mistake(x, hint):
    with pytest.raises(UsageError, match=rf"sweep test: x is '{x}', which is not an axis \(allowed: .*{hint}\)$"):
        cells(replace(sweep(GLA), x=x))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2**63, b"x", (1,), object()])
def test_a_plugins_parameter_with_a_value_that_no_record_holds_is_a_mistake(value):
    odd = Parameter("odd", "", lambda text: (value,), "anything")
    traits = {"mine": Traits("mine", {"odd": odd}, {}, lambda width: {})}
    with pytest.raises(UsageError, match=r"^odd: .*; a record cannot hold this value"):
        cells(sweep("mine", odd="1"), traits=traits)
    traits = {"mine": Traits("mine", {"odd": replace(odd, default=value)}, {}, lambda width: {})}
    with pytest.raises(UsageError, match=r"^odd: "):
        cells(sweep("mine"), traits=traits)


# Parameters


def test_parameters_are_the_same_in_any_order_and_without_those_that_are_none():
    one, other = Parameters({"b": 1, "a": "x", "c": None}), Parameters({"a": "x", "b": 1})
    assert one == other
    assert hash(one) == hash(other)
    assert list(one.items()) == [("a", "x"), ("b", 1)]
    assert one != Parameters({"a": "x", "b": 2})
    assert Parameters() == Parameters(None) == Parameters({"a": None}) == {}


def test_a_cell_is_the_same_without_a_parameter_that_came_later():
    old, new = Parameters({"heads": 4}), Parameters({"heads": 4, "later": None})
    assert len({Cell("b", "o", "fwd", 1, 2, "bf16", own) for own in (old, new)}) == 1


def test_sizes_are_those_that_the_cell_has():
    cell = Cell("b", "o", "fwd", 1, 2, "bf16", Parameters({"heads": 4}))
    assert cell.sizes("heads") == (4,)
    with pytest.raises(KeyError, match="key_dim"):
        cell.sizes("heads", "key_dim")


@pytest.mark.parametrize(
    ("parameter", "text", "values", "option"),
    [
        (integers("sub_chunk", "help"), "16,32", (16, 32), "--sub-chunk"),
        (integers("sub_chunk", "help", auto=True), "auto,16", (None, 16), "--sub-chunk"),
        (choices("mode", "help", ("a", "b")), "b,a", ("b", "a"), "--mode"),
        (switch("compile", "help", default=False), "on,off", (True, False), "--compile"),
    ],
)
def test_a_parameter_reads_the_axis_grammar_and_has_an_option(parameter, text, values, option):
    assert parameter.parse(text) == values
    assert parameter.option == option


def test_an_axis_that_is_somebodys_own_is_described_in_its_owners_words():
    axes = parameters_of(TRAITS.values())
    assert axes["head_dim"].help == "Head dim: K and V together."
    assert list(axes)[:6] == ["seqlen", "batch", "dtype", "pass", "seed", "width"]
    assert axes["gate"].choices[0] == "logsigmoid/16"


# Files


@pytest.mark.parametrize("name", preset_names())
def test_a_sweep_survives_being_written_and_read(name):
    preset = load_sweep(name)
    assert parse_sweep(name, dump_sweep(preset), "test") == preset
    resolved = resolve(preset, "cpu", {}, TRAITS)
    assert parse_sweep(name, dump_sweep(resolved), "test") == resolved


def test_odd_characters_survive_being_written_and_read():
    odd = 'a "b" \\ \x07 \x7f \n é 🚀 """ \''
    original = replace(sweep(Variant(odd, {odd.replace("\x07", ""): odd})), title=odd, description=odd)
    again = parse_sweep("test", dump_sweep(original), "test")
    assert (again.title, again.description, again.variants[0].backend) == (odd, odd, odd)
    assert list(again.variants[0].axes.values()) == [odd]


def test_values_in_files_may_be_numbers_switches_and_lists():
    text = GOOD.replace('"1k..2k"', '[1024, "2k"]').replace("heads = 2", "heads = [2, 4]")
    found = cells(parse_sweep("test", text + "materialize = [true, false]\nchunk = 16\n", "test"))
    assert values(found, "seqlen", "heads", "materialize", "chunk") == {
        (T, H, kept, 16) for T in (1024, 2048) for H in (2, 4) for kept in ("states", "checkpoints")
    }


def test_a_file_may_call_the_backend_of_the_ratios_baseline_and_hears_the_new_word():
    text = GOOD.replace('x = "seqlen"', 'baseline = "gla-triton"')
    with pytest.warns(RenamedWarning, match=r"file\.toml: the key 'baseline' is now called 'against'"):
        assert parse_sweep("test", text, "file.toml").against == GLA
    assert parse_sweep("test", text, "file.toml", stored=True).against == GLA  # without a notice, or the test fails


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('title = "A title"', 'titel = "A title"', r"unknown key 'titel' \(allowed: .*did you mean 'title'\?"),
        ('title = "A title"', "title = 3", "title: expected str, got int"),
        ("heads = 2", "heads = 2.5", r"\[axes\]: 'heads': an axis takes text such as .*, got 2.5"),
        ("heads = 2", "heads = 0", r"\[axes\]: 'heads': an axis takes .*, got 0"),
        ("heads = 2", "heads = [2, [2.5]]", r"\[axes\]: 'heads': an axis takes .*, got \[2, \[2.5\]\]"),
        ("heads = 2", "heads = []", r"\[axes\]: 'heads': an axis takes .*, got \[\]"),
        ("heads = 2", "heads = {a = 1}", r"\[axes\]: 'heads': an axis takes .*, got \{'a': 1\}"),
        ('name = "gla-triton"', 'name = "gla-triton"\nchunk = 1979-05-27', "'gla-triton': 'chunk': an axis takes"),
        ('x = "seqlen"', "x = 3", "x: expected str, got int"),
        ('x = "seqlen"', 'x = "pass"', "x cannot be 'pass'"),
        ('x = "seqlen"', 'against = "gla-trion"', r"against 'gla-trion' is not one of its backends .*'gla-triton'\?"),
        ('x = "seqlen"', 'against = "gla-triton"\nbaseline = "gla-triton"', "unknown key 'baseline'"),
        ("[axes]", "cpu = 3\n[axes]", "cpu: expected object, got int"),
        ("[[backends]]", "[backends]", r"needs one \[\[backends\]\] table .*; got backends = {'name': 'gla"),
        ('[[backends]]\nname = "gla-triton"', "", r"needs one \[\[backends\]\] table"),
        (
            'name = "gla-triton"',
            'nam = "gla-triton"',
            r"needs one \[\[backends\]\] table per backend, each with a name",
        ),
        ('name = "gla-triton"', 'name = ""', r"needs one \[\[backends\]\] table"),
        ("heads = 2", "heads = = 2", "not a TOML file"),
    ],
)
def test_a_mistake_in_a_sweep_file_is_named(old, new, message):
    assert old in GOOD
    with pytest.raises(UsageError, match=rf"^file\.toml: .*{message}"):
        parse_sweep("test", GOOD.replace(old, new), "file.toml")


def test_backends_that_are_names_alone_are_refused_with_what_is_needed():
    with pytest.raises(UsageError, match=r"^f: needs one \[\[backends\]\] table .*, each with a name; got .*\['a'\]$"):
        parse_sweep("test", 'backends = ["a"]', "f")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"seqlen": "1k..1m:*1"}, r"sweep test: seqlen: '\*1' never advances"),
        ({"key_dim": "1..1g"}, "sweep test: key_dim: '1g' is not a positive number"),
        ({"seqlen": "on"}, r"sweep test: seqlen: 'on' \(true\) is not a positive number"),
    ],
)
def test_a_mistake_in_an_axis_names_the_sweep_and_what_was_written(axes, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        cells(sweep(GLA, **axes))


def test_an_unknown_preset_lists_the_presets_and_the_nearest(tmp_path):
    with pytest.raises(UsageError, match=r"'nope' is neither a preset \(batch-1, .*\) nor the path of a .toml file$"):
        load_sweep("nope")
    with pytest.raises(UsageError, match=r"did you mean 'cpu-smoke'\?"):
        load_sweep("cpu-smok")
    with pytest.raises(UsageError, match="there is no file"):
        load_sweep(str(tmp_path / "nope.toml"))


def test_a_users_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_sweep(str(path)).name == "mine"


# Stored runs


STORED = sorted((Path(__file__).parents[2] / "results").glob("*/sweep.toml"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parent.name)
def test_the_cells_of_a_stored_run_are_those_of_its_sweep(path):
    run = RunFolder.open(path.parent).load()
    measured, wanted = {record.cell for record in run.records}, set(cells(run.sweep))
    assert measured == wanted if run.complete else measured < wanted


def test_a_seed_is_an_axis_that_no_sweep_needs():
    assert [cell.seed for cell in cells(sweep(GLA, seed="1..4"))] == [1, 2, 4]
    assert [cell.seed for cell in cells(sweep(GLA))] == [0]
    assert str(cells(sweep(GLA, seed="3"))[0]).endswith(" seed=3")
