"""The registry: our own ops and backends, and those of plugin files and packages."""

import os
import py_compile
import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType

import pytest
from simulated import CELL

from glabench.backends import Backend, Requirement, builtin, load_registry
from glabench.backends.base import refusal
from glabench.backends.registry import ENTRY_POINTS, Registry, list_plugins
from glabench.cli.plugin import new
from glabench.errors import UsageError
from glabench.ops import BUILTIN
from glabench.records import Record
from glabench.sweeps import Parameters, Sweep, Variant, expand, resolve

BACKEND = """
from glabench.backends import Backend
from glabench.sweeps.parameters import Parameter, choices, integers, switch

class Mine(Backend):
    name, op, title = "mine", "linear", "a title"

    def bind(self, inputs, cell):
        return lambda: inputs["v"]
"""
OP = """
from glabench.backends import Backend
from glabench.ops import Op, Spec
from glabench.sweeps.parameters import choices, integers, switch

class Decay(Op):
    name, equation, reference_name = "decay", "y_t = a y_{t-1} + x_t", "a loop"
    parameters = (integers("channels", "Channels.", 8), choices("kind", "Kind.", ("slow", "fast"), "slow"))
    aliases = {"size": ("channels",)}
    independent = ("batch", "channels")

    def published(self, width):
        return {"channels": width}

    def inputs(self, cell):
        (D,) = cell.sizes("channels")
        return {"x": Spec(("batch", "seqlen", "channels"), (cell.batch, cell.seqlen, D))}

    def output(self, cell):
        return self.inputs(cell)["x"]

    def reference(self, inputs):
        return inputs["x"].cumsum(1)

    def forward_flops(self, cell):
        return cell.tokens * cell.get("channels")

class Fast(Backend):
    name, op, title = "decay-fast", "decay", "a title"
    parameters = (integers("sub_chunk", "Sub-chunk.", auto=True), switch("fuse", "Fused.", True))

    def bind(self, inputs, cell):
        return lambda: inputs["x"].cumsum(1)

OPS = [Decay]
BACKENDS = [Fast]
"""


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("glabench_plugin_") or "neighbour" in name:
            del sys.modules[name]


@pytest.fixture
def plugin(tmp_path):
    """Writes a plugin file and gives its path."""

    def write(text, name="my_plugin.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


# Without plugins


def test_our_own_backends_are_there_and_implement_our_ops():
    registry = load_registry()
    assert list(registry) == [backend.name for backend in builtin.BACKENDS]
    assert list(registry.ops) == [op.name for op in BUILTIN]
    assert {"gla", "linear", "softmax", "mamba1", "mamba2", "simple-gla", "retention", "kda"} < set(registry.ops)
    assert all(registry.op_of(name) is registry.ops[registry[name].op] for name in registry)
    assert len(registry) == len(builtin.BACKENDS)


def test_traits_are_the_parameters_of_op_and_backend():
    traits = load_registry().traits()
    assert list(traits["gla-triton"].parameters) == [
        *("heads", "key_dim", "value_dim", "gate", "inputs", "packed", "state", "prefix", "chunk", "materialize")
    ]
    assert list(traits["fla-linear"].parameters) == [
        "heads",
        "key_dim",
        "value_dim",
        "inputs",
        "packed",
        "state",
        "prefix",
    ]
    assert list(traits["mamba1"].parameters) == ["inner", "state_size", "state", "prefix"]
    assert traits["gla-torch"].targets("head_dim") == ("key_dim", "value_dim")
    assert traits["sdpa-math"].targets("head_dim") == ("head_dim",)


def test_a_requirement_is_looked_for_and_not_imported():
    assert Requirement("json", "").present
    assert not Requirement("no_such_package", "").present
    assert not Requirement("no_such_package.part", "").present


# With plugins


@pytest.mark.parametrize("listed", ["[Mine]", "[Mine()]", "(Mine,)"])
def test_a_plugin_lists_classes_or_objects(plugin, listed):
    registry = load_registry([plugin(BACKEND + f"BACKENDS = {listed}")])
    assert isinstance(registry["mine"], Backend)
    assert list(registry)[-1] == "mine"


def test_the_plugin_to_start_from_is_one(tmp_path):
    file = tmp_path / "mine.py"
    new(file)
    assert "my-linear" in load_registry([str(file)])


def test_a_plugins_op_and_parameters_work_as_axes(plugin):
    traits = load_registry([plugin(OP)]).traits()
    axes = {"seqlen": "64", "batch": "1", "dtype": "fp32", "pass": "infer,fwd"}
    sweep = Sweep(
        "s", axes | {"kind": "slow,fast"}, (Variant("decay-fast", {"fuse": "on,off"}), Variant("linear-torch"))
    )
    changes = {"sub_chunk": [16, None], "size": 32}
    cells = expand(resolve(sweep, "cpu", changes, traits), traits, "cpu")
    mine = [cell for cell in cells if cell.op == "decay"]
    assert len(mine) == 2 * 2 * 2 * 2
    assert {cell.get("channels") for cell in mine} == {32}
    assert {(cell.get("kind"), cell.get("fuse"), cell.get("sub_chunk")) for cell in mine} == {
        (kind, fuse, chunk) for kind in ("slow", "fast") for fuse in (True, False) for chunk in (16, None)
    }
    assert not {"kind", "fuse", "sub_chunk", "channels"} & {
        name for c in cells if c not in mine for name in c.parameters
    }
    for cell in mine:
        record = Record(cell=cell, run_id="run", status="ok", time_ms=1.0)
        assert Record.from_line(record.to_line()) == record
    published = expand(resolve(sweep, "cpu", {"width": 96}, traits), traits, "cpu")
    assert {cell.get("channels") for cell in published if cell.op == "decay"} == {96}


def test_a_plugins_op_can_be_counted_and_fed(plugin):
    registry = load_registry([plugin(OP)])
    traits = registry.traits()
    sweep = Sweep("s", {"seqlen": "4", "batch": "2", "dtype": "fp32", "pass": "fwd"}, (Variant("decay-fast"),))
    (cell,) = expand(resolve(sweep, "cpu", {}, traits), traits, "cpu")
    op = registry.op_of("decay-fast")
    inputs = op.make_inputs(cell)
    assert (op.flops(cell), op.moved_bytes(cell)) == (64, 2 * 2 * 4 * 8 * 4)
    assert registry["decay-fast"].bind(inputs, cell)().shape == op.reference(inputs).shape == (2, 4, 8)


def test_models_know_the_kernels_of_a_plugin_that_loads_a_registry_itself(plugin):
    text = BACKEND + "from glabench.backends import load_registry\nload_registry()\nBACKENDS = [Mine]\n"
    registry = load_registry([plugin(text)])
    sizes = {"model_width": 128, "layers": 1, "vocabulary": 64, "kernel": "mine"}
    cell = replace(CELL, backend="linear-model", op="training", pass_="fwd+bwd", parameters=Parameters(sizes))
    assert registry["linear-model"].limits(cell) is None


def test_a_plugin_for_a_plugins_op_comes_in_another_file(plugin):
    second = BACKEND.replace('"linear"', '"decay"') + "BACKENDS = [Mine]"
    registry = load_registry([plugin(OP, "first.py"), plugin(second, "second.py")])
    assert registry.op_of("mine") is registry.op_of("decay-fast")


def test_a_plugin_may_import_its_neighbours_which_take_nobodys_name(plugin):
    plugin("NAME = 'mine-too'", "neighbour.py")
    plugin("raise AssertionError('this is not the json that anybody means')", "json.py")
    text = "import json, neighbour\n" + BACKEND + "json.dumps(1)\nMine.name = neighbour.NAME\nBACKENDS = [Mine]"
    assert "mine-too" in load_registry([plugin(text)])


def test_a_plugin_may_have_dataclasses_with_annotations_as_text(plugin):
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle\n" + BACKEND
    text += "@dataclass\nclass Tile:\n    rows: int = 1\n\npickle.dumps(Tile())\nBACKENDS = [Mine]"
    assert "mine" in load_registry([plugin(text)])


def test_a_plugin_runs_once_until_its_text_changes(plugin, capsys, tmp_path, monkeypatch):
    path = plugin(BACKEND + "print('one')\nBACKENDS = [Mine]")
    first, second = load_registry([path]), load_registry([path])
    assert type(first["mine"]) is type(second["mine"])
    monkeypatch.chdir(tmp_path)
    load_registry(["my_plugin.py"])
    assert capsys.readouterr().err == "one\n"
    plugin(BACKEND + "print('two')\nMine.name = 'other'\nBACKENDS = [Mine]")
    assert "other" in load_registry([path])
    assert capsys.readouterr().err == "two\n"


def test_a_plugin_runs_as_it_is_beside_bytecode_of_an_older_one(tmp_path):
    """Python takes bytecode as current if the file's size and time of change, in seconds, are those of its source."""
    path = tmp_path / "mine.py"
    for title in ("old", "new"):
        path.write_text(BACKEND.replace("a title", title) + "BACKENDS = [Mine]\n")
        os.utime(path, (1e9, 1e9))
        if title == "old":
            py_compile.compile(str(path))
    assert load_registry([str(path)])["mine"].title == "new"


def test_what_a_plugin_prints_is_no_data(plugin, capsys):
    load_registry([plugin(BACKEND + "print('hello')\nBACKENDS = [Mine]")])
    assert capsys.readouterr() == ("", "hello\n")


# Mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"needs a list BACKENDS \(or OPS\); `glabench plugin new FILE` writes an example"),
        ("BACKENDS = []", "needs a list BACKENDS"),
        ("BACKENDS = 3", "BACKENDS needs to be a list of Backend classes or objects"),
        ("BACKENDS = [3]", "BACKENDS lists 3, which is not an instance or subclass of Backend"),
        ("OPS = [int]", "OPS lists <class 'int'>, which is not an instance or subclass of Op"),
        ("x = = 3", "cannot be loaded: SyntaxError"),
        ("import no_such_package", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys; sys.exit(3)", "cannot be loaded: SystemExit: 3"),
        ("raise RuntimeError('one\\ntwo')", "cannot be loaded: RuntimeError: one two"),
        ("class E(BaseException): ...\nraise E('\\x1b[31mred')", r"cannot be loaded: E:  \[31mred"),
        ("raise GeneratorExit", "cannot be loaded: GeneratorExit"),
        ("class E(Exception): __str__ = None\nraise E", "cannot be loaded: E"),
        ("class B:\n  def __repr__(self): return 1 / 0\nBACKENDS = [B()]", "BACKENDS lists a B, which is not an inst"),
        (BACKEND.replace("def bind", "def bound") + "BACKENDS = [Mine]", "Mine needs the method bind"),
        (BACKEND + "class Other(Backend):\n  name = 'o'\nBACKENDS = [Other]", "Other needs the method bind"),
        (BACKEND + "del Mine.title\nBACKENDS = [Mine]", "Mine needs a text `title`"),
        (BACKEND + "Mine.name = 3\nBACKENDS = [Mine]", "Mine needs a text `name`"),
        (
            BACKEND + "Mine.op = 'lineer'\nBACKENDS = [Mine]",
            r"unknown op 'lineer' \(allowed: .*did you mean 'linear'\?",
        ),
        (BACKEND + "Mine.name = 'gla-torch'\nBACKENDS = [Mine]", "a backend named 'gla-torch' exists already"),
        (BACKEND + "Mine.__init__ = lambda self, x: None\nBACKENDS = [Mine]", r"Mine\(\) without arguments fails"),
        (
            BACKEND + "def end(self): raise SystemExit(0)\nMine.__init__ = end\nBACKENDS = [Mine]",
            r"Mine\(\) without arguments fails: SystemExit: 0",
        ),
        (BACKEND + "Mine.name = property(lambda self: 1 / 0)\nBACKENDS = [Mine]", "cannot be used: ZeroDivisionError"),
        (BACKEND + "Mine.name = 'a,b'\nBACKENDS = [Mine]", "'a,b' is no name .allowed: printable text without ','"),
        (
            BACKEND + "Mine.requires = 'torch'\nBACKENDS = [Mine]",
            "`requires` to be a tuple of Requirement objects",
        ),
        (BACKEND + "Mine.requires = ('torch',)\nBACKENDS = [Mine]", "`requires` to be a tuple of Requirement objects"),
        (BACKEND + "Mine.devices = 'cuda'\nBACKENDS = [Mine]", "`devices` to be a tuple of cuda, cpu, not 'cuda'"),
        (BACKEND + "Mine.packages = 'torch'\nBACKENDS = [Mine]", "`packages` to be a tuple of names of packages"),
        (BACKEND + "Mine.has_own_code = 'no'\nBACKENDS = [Mine]", "needs `has_own_code` to be True or False"),
        (BACKEND + "Mine.dtypes = {'int8'}\nBACKENDS = [Mine]", "`dtypes` to be a tuple of bf16, .*, not {'int8'}"),
        (
            BACKEND + "Mine.parameters = 'chunk'\nBACKENDS = [Mine]",
            "needs `parameters` to be a tuple of Parameter objects",
        ),
        (BACKEND + "Mine.parameters = ('chunk',)\nBACKENDS = [Mine]", "needs `parameters` to be a tuple of Parameter"),
        (OP + "Decay.name = 'softmax'", "an op named 'softmax' exists already"),
        (OP + "del Decay.equation", "Decay needs a text `equation`"),
        (OP.replace("def published", "def publish"), "Decay needs the method published"),
        (
            OP + "Decay.published = lambda self, width: {'channel': 3}",
            "decay sets 'channel', which is not one of its parameters",
        ),
        (OP + "Decay.published = lambda self, width: 1 / 0", "decay has no parameters for .*: ZeroDivisionError"),
        (OP + "Decay.aliases = {'size': ('a', 'b')}", "decay sets '[ab]', which is not one of its parameters"),
        (OP + "Decay.parameters = None", "needs `parameters` to be a tuple"),
        (OP + "Decay.independent = 'batch'", "decay needs `independent` to be a tuple of names of dimensions"),
        (OP + "Decay.aliases = 5", "decay needs `aliases` to map names to tuples of parameters"),
        (OP + "Decay.aliases = {'size': ()}", "a tuple of the parameters that its alias 'size' sets"),
        (OP + "Decay.aliases = {'size': 'channels'}", "a tuple of the parameters that its alias 'size' sets"),
        (OP + "Decay.aliases = {'my size': ('channels',)}", "'my size' is no name of a parameter"),
        (OP + "Decay.aliases = {'quiet': ('channels',)}", "decay has an alias called 'quiet', which is taken"),
    ],
)
def test_a_plugin_that_is_wrong_is_named_in_one_line(plugin, text, message):
    path = plugin(text)
    with pytest.raises(UsageError, match=rf"^--plugin: '.*{message}|^--plugin {path}: .*{message}") as caught:
        load_registry([path])
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name",
    ["seqlen", "pass", "width", "op", "parameters", "time_ms", "status", "code", "peak_mib", "quiet", "time_limit"],
)
@pytest.mark.parametrize("owner", ["Mine", "Decay"])
def test_a_parameter_is_not_called_like_a_field_of_every_record(plugin, name, owner):
    text = BACKEND + "BACKENDS = [Mine]\n" if owner == "Mine" else OP
    path = plugin(text + f"{owner}.parameters = (*{owner}.parameters, integers({name!r}, 'help'))")
    with pytest.raises(UsageError, match=f"{owner.lower()} has a parameter called '{name}', which is taken$"):
        load_registry([path])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        *((f"integers({name!r}, '')", "is no name of a parameter") for name in ("a b", "--w", 5, "\x1b[1m", "", "W")),
        ("integers('w', 5)", "parameter 'w': its help and what it allows need to be printable text"),
        ("integers('w', '\x1b[31m')", "parameter 'w': its help"),
        ("integers('w', '', -3)", "parameter 'w': its parser gives no tuple with the default -3 .allowed: a number"),
        ("integers('w', '', float('nan'))", "the default nan"),
        ("integers('w', '', True)", "the default True"),
        ("Parameter('w', '', int, 'a number', 5)", "its parser gives no tuple with the default 5"),
        ("choices('w', '', ('a', 'b'), 'zz')", "the default 'zz' .allowed: a, b; None if the implementation chooses"),
        ("choices('w', '', ('a,b', 'c'))", "parameter 'w': 'a,b' is no choice"),
        ("choices('w', '', ('', 'c'))", "parameter 'w': '' is no choice"),
    ],
)
def test_a_parameter_that_no_option_could_be_is_refused(plugin, code, message):
    path = plugin(BACKEND + f"Mine.parameters = ({code},)\nBACKENDS = [Mine]")
    with pytest.raises(UsageError, match=f"cannot be loaded: ValueError: .*{message}"):
        load_registry([path])


def test_an_interruption_while_a_plugin_is_loaded_stays_one(plugin):
    with pytest.raises(KeyboardInterrupt):
        load_registry([plugin("raise KeyboardInterrupt")])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("1 / 0", "its method unavailable fails: ZeroDivisionError: division by zero"),
        ("exec('raise SystemExit(0)')", "its method unavailable fails: SystemExit: 0"),
        ("3", "its method unavailable fails: TypeError: mine: unavailable returned 3; it must be a sentence, or None"),
        ("''", None),
        ("print('no data')", None),
    ],
)
def test_a_backend_that_fails_at_telling_whether_it_is_available_is_not(plugin, capsys, answer, reason):
    path = plugin(BACKEND + f"Mine.unavailable = lambda self, device: {answer}\nBACKENDS = [Mine]")
    assert load_registry([path]).unavailable("mine", "cpu") == reason
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("method", ["unavailable", "supports", "limits"])
def test_a_method_that_returns_no_sentence_is_named(plugin, method):
    text = BACKEND + f"Mine.{method} = lambda self, about: ['no']\nBACKENDS = [Mine]"
    registry = load_registry([plugin(text)])
    with pytest.raises(TypeError, match=rf"^mine: {method} returned \['no'\]; it must be a sentence, or None"):
        refusal(registry["mine"], registry.op_of("mine"), CELL)


def test_an_op_that_has_no_parameters_for_a_width_says_so_when_it_is_asked(plugin):
    text = OP + "Decay.published = lambda self, width: {'channels': 1024 // (width - 7)}"
    published = load_registry([plugin(text)]).traits()["decay-fast"].published
    with pytest.raises(UsageError, match=r"^--width: decay has no parameters for the width 7: ZeroDivisionError"):
        published(7)


@pytest.mark.parametrize("name", ["heads", "head_dim"])
def test_a_backends_parameter_is_not_one_of_its_op(plugin, name):
    path = plugin(BACKEND + f"Mine.parameters = (integers({name!r}, 'help'),)\nBACKENDS = [Mine]")
    with pytest.raises(UsageError, match=f"mine has a parameter called '{name}', which is taken"):
        load_registry([path])


def test_two_parameters_do_not_share_a_name(plugin):
    path = plugin(BACKEND + "Mine.parameters = (integers('a', ''), switch('a', '', True))\nBACKENDS = [Mine]")
    with pytest.raises(UsageError, match="mine has a parameter called 'a', which is taken"):
        load_registry([path])


@pytest.mark.parametrize("name", ["gone.py", "folder.py", "text.txt"])
def test_a_plugin_that_is_no_python_file_is_named(tmp_path, name):
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "text.txt").write_text("BACKENDS = []")
    for look in (load_registry, list_plugins):
        with pytest.raises(UsageError, match=f"^--plugin: there is no Python file '.*{name}'$"):
            look([str(tmp_path / name)])


# Packages


class Entry:
    """An entry point of an installed package."""

    name, value = "pack", "pack.backends"
    dist = None

    def __init__(self, load):
        self.load = load


def install(monkeypatch, load):
    """Makes a package with this entry point appear to be installed."""
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Entry(load)] if group == ENTRY_POINTS else [])


def test_a_package_brings_backends_as_a_file_does(monkeypatch):
    def load():
        module = ModuleType("pack.backends")
        exec(BACKEND + "print('hello')\nBACKENDS = [Mine]", module.__dict__)
        return module

    install(monkeypatch, load)
    assert "mine" in load_registry()
    assert [(found.name, found.origin) for found in list_plugins()] == [("pack", "an unknown package: pack.backends")]


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch):
    install(monkeypatch, lambda: 1 / 0)
    with pytest.raises(UsageError, match=r"^package pack cannot be loaded; fix or uninstall it: ZeroDivisionError"):
        load_registry()


def test_plugins_are_listed_without_running_them(plugin):
    path = plugin("raise AssertionError")
    assert [(found.name, found.origin) for found in list_plugins([path])] == [("my_plugin", f"--plugin {path}")]


def test_a_registry_is_a_mapping_that_starts_empty():
    assert (len(Registry()), dict(Registry()), dict(Registry().ops)) == (0, {}, {})
