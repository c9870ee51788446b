"""Sweep files as they are written and read, and mistakes in sweeps and their changes."""

from dataclasses import replace

import pytest
from made_sweeps import COMMON, GLA, GOOD, LINEAR, MAMBA, TRAITS, cells, sweep, values

from glabench.errors import RenamedWarning, UsageError
from glabench.sweeps import Sweep, Traits, Variant, expand, load_sweep, preset_names, resolve
from glabench.sweeps.load import dump_sweep, parse_sweep
from glabench.sweeps.parameters import Parameter

# Mistakes


def test_a_backend_of_a_sweep_that_is_not_there_is_a_mistake():
    with pytest.raises(UsageError, match=r"sweep test: 'gone' is not a backend \(allowed: fixed-gate-text, "):
        resolve(sweep("gone"), "cuda", {}, TRAITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backend": "nope"},
            r"--backend: 'nope' is not a backend \(allowed: fixed-gate-text, .*\); a plugin's",
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
        ({"key_dim": "0"}, r"key_dim: '0' is not a positive whole number \(allowed: a number"),
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
            r"sweep a\{b\}: 'inner': no backend of this sweep has this parameter \(only .* hyena, mamba1, rwkv4",
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


# Files


@pytest.mark.parametrize("name", preset_names())
def test_a_sweep_survives_being_written_and_read(name):
    preset = load_sweep(name)
    assert parse_sweep(name, dump_sweep(preset), "test") == preset
    resolved = resolve(preset, "cpu", {}, TRAITS)
    assert parse_sweep(name, dump_sweep(resolved), "test") == resolved


def test_panels_keep_the_backends_that_a_sweep_is_left_with():
    one = replace(sweep(GLA, LINEAR), panels={"A": (GLA, LINEAR), "B": (LINEAR,)})
    assert resolve(one, "cuda", {}, TRAITS).panels == one.panels
    assert resolve(one, "cuda", {"backend": LINEAR}, TRAITS).panels == {"A": (LINEAR,), "B": (LINEAR,)}
    assert resolve(one, "cuda", {"backend": GLA}, TRAITS).panels == {}  # all in one panel
    assert resolve(one, "cuda", {"backend": f"{GLA},{MAMBA}"}, TRAITS).panels == {}  # one would be in none


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


@pytest.mark.parametrize(("text", "mib"), [("1.5GiB", 1536), ("500 MiB", 500), ("999999GiB", 999999 * 1024)])
def test_a_sweeps_limit_of_memory_is_written_as_it_is_read(text, mib):
    one = parse_sweep("test", f'memory_limit = "{text}"\n{GOOD}', "file.toml")
    assert one.memory_limit_mib == mib
    assert parse_sweep("test", dump_sweep(one), "again") == one


@pytest.mark.parametrize(
    ("text", "found"), [("time_limit = 1\nenergy = true", (1, True)), ("energy = false", (None, False))]
)
def test_a_sweeps_settings_are_written_as_they_are_read(text, found):
    one = parse_sweep("test", f"{text}\n{GOOD}", "file.toml")
    assert (one.time_limit_s, one.energy) == found
    assert parse_sweep("test", dump_sweep(one), "again") == one


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
        (
            "[axes]",
            '[panels]\nA = ["gla-trion"]\n[axes]',
            r"\[panels\] 'gla-trion' is not one of its backends .*'gla-triton'",
        ),
        ("[axes]", "[panels]\nA = []\n[axes]", r"\[panels\] 'gla-triton' is in none of them"),
        ("[axes]", "[panels]\nA = 3\n[axes]", "panels"),
        ("[axes]", "time_limit = nan\n[axes]", r"time_limit: "),
        ("[axes]", "time_limit = -1\n[axes]", r"time_limit: "),
        ("[axes]", 'energy = "no"\n[axes]', r"energy: "),
        ("[axes]", 'memory_limit = "40"\n[axes]', r"memory_limit '40' is no amount of memory, such as 40GiB or 500MiB"),
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
        ({"key_dim": "1..1g"}, "sweep test: key_dim: '1g' is not a positive whole number"),
        ({"seqlen": "on"}, r"sweep test: seqlen: 'on' \(true\) is not a positive whole number"),
    ],
)
def test_a_mistake_in_an_axis_names_the_sweep_and_what_was_written(axes, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        cells(sweep(GLA, **axes))


def test_an_unknown_preset_lists_the_presets_and_the_nearest(tmp_path):
    with pytest.raises(UsageError, match=r"'nope' is neither a preset \(ablation, .*\) nor the path of a .toml file$"):
        load_sweep("nope")
    with pytest.raises(UsageError, match=r"did you mean 'cpu-smoke'\?"):
        load_sweep("cpu-smok")
    with pytest.raises(UsageError, match="there is no file"):
        load_sweep(str(tmp_path / "nope.toml"))


def test_a_users_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_sweep(str(path)).name == "mine"
