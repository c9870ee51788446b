"""Sweeps: presets, expanding, changes from the command line and from Python."""

from dataclasses import replace
from pathlib import Path

import pytest
from made_sweeps import GLA, LINEAR, MAMBA, REGISTRY, SOFTMAX, TRAITS, cells, sweep, values

from glabench.errors import RenamedWarning, UsageError
from glabench.records import RunFolder
from glabench.sweeps import Cell, Parameters, Traits, Variant, load_sweep, preset_names, resolve
from glabench.sweeps.expand import parameters_of
from glabench.sweeps.parameters import choices, integers, switch

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


def test_every_backend_of_an_op_is_in_a_preset_with_a_pass_that_it_has():
    found = {
        c.backend for name in preset_names() for c in cells(load_sweep(name)) if REGISTRY[c.backend].supports(c) is None
    }
    assert {name for name, backend in REGISTRY.items() if backend.work == "op"} <= found


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
    assert values(ours, "materialize", "pass_") == {("states", "fwd+bwd"), ("checkpoints", "fwd+bwd")}


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


def test_a_cell_of_a_width_keeps_it_and_equals_the_cell_of_the_same_sizes():
    (found,) = cells(sweep(SOFTMAX, width="1k"))
    assert found.width == 1024
    (plain,) = cells(sweep(SOFTMAX, heads="16", head_dim="64"))
    assert plain.width is None
    assert found == plain
    assert [Cell.from_json(cell.to_json()).width for cell in (found, plain)] == [1024, None]


@pytest.mark.parametrize(("changes", "width"), [({}, 1024), ({"gate": "strong"}, 1024), ({"heads": "2"}, None)])
def test_a_width_that_not_all_sizes_follow_is_not_the_cells(changes, width):
    (found,) = cells(sweep(GLA, width="1k", **changes))
    assert found.width == width


@pytest.mark.parametrize("width", [0, -1, 1.5, "1024", [1, 2], {"a": 1}, True, 10**30])
def test_a_width_that_is_no_number_of_channels_is_refused(width):
    (found,) = cells(sweep(SOFTMAX, width="1k"))
    with pytest.raises(ValueError, match="width"):
        Cell.from_json({**found.to_json(), "width": width})


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


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"seqlen": "1k..wrong"}, "seqlen: 'wrong' is not a positive whole number"),
        ({"dtype": "bf61"}, "'bf61'"),
        ({"pass": "sideways"}, "'sideways'"),
    ],
)
def test_a_mistake_in_what_a_cpu_replaces_is_found_on_a_cpu_too(own, said):
    original = replace(sweep(Variant(LINEAR), **own), on_cpu={"seqlen": "16", "dtype": "fp32", "pass": "fwd"})
    with pytest.raises(UsageError) as on_cpu:
        resolve(original, "cpu", {}, TRAITS)
    with pytest.raises(UsageError) as on_gpu:
        cells(original)
    assert str(on_cpu.value) == str(on_gpu.value)
    assert said in str(on_cpu.value)


@pytest.mark.parametrize("changes", [{}, {"batch": 1}])
def test_what_a_cpu_or_an_option_adds_or_makes_small_is_no_mistake(changes):
    given = {} if changes else {"batch": "2"}
    lacks = replace(sweep(Variant(LINEAR)), on_cpu={"seqlen": "16", **given})
    lacks = replace(lacks, axes={name: text for name, text in lacks.axes.items() if name != "batch"})
    assert values(cells(lacks, "cpu", **changes), "seqlen", "batch") == {(16, changes.get("batch", 2))}
    large = replace(sweep(Variant(LINEAR), batch="1..400:+1", heads="1..400:+1"), on_cpu={"seqlen": "16"})
    assert len(cells(large, "cpu", batch=1)) == len(cells(large, batch=1)) == 400


def test_the_backend_of_the_ratios_is_dropped_if_it_is_not_measured():
    preset = load_sweep("paper-fig2")
    assert resolve(preset, "cuda", {"backend": GLA}, TRAITS).against is None
    assert resolve(preset, "cuda", {"seqlen": "1k"}, TRAITS).against == "sdpa-flash"


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
