"""The registry of ops and backends: built-in ones, and those of installed packages (entry points) and plugin files."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import metadata
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, get_args

from glabench import ops
from glabench.backends import builtin
from glabench.backends.base import Backend, Backends, Requirement, faults_of, sentence
from glabench.errors import UsageError, allowed_names, printable
from glabench.ops import Op
from glabench.plain import shown
from glabench.records.metrics import LIMITED, METRICS
from glabench.records.record import Measured
from glabench.sweeps.expand import Traits
from glabench.sweeps.parameters import COMMON, DTYPES, WIDTH, DeviceKind, Parameter, check_name, is_word

ENTRY_POINTS = "glabench.backends"
_PREFIX = "glabench_plugin_"
# The options of all commands, as the names that parameters with these options would have.
OPTIONS = {
    *"""
    against all any_device autotune baseline bisect cell_timeout check claims compare csv device dry_run energy
    fail_on figure help install_completion json junit least markdown memory memory_limit metric ncu no_energy no_split
    occasions out plugin precision processes quiet resume retry_failed rev roofline rounds runs same_within
    show_completion site split strict sweep time_limit timing trace verbose version
    """.split(),  # noqa: SIM905 - a list would have a line per word
    *(metric.option.removeprefix("--").replace("-", "_") for metric in LIMITED),
}
# Names that no parameter may have, because they are options, fields of records or columns of tables.
_TAKEN = {
    *OPTIONS,
    *(*COMMON, WIDTH.name, "backend", "op", "device", "seed", "parameters", "schema", "cell", "samples"),
    *(field.name for field in fields(Measured)),
    *(metric.field for metric in METRICS),
}


@dataclass(frozen=True)
class Plugin:
    """Code that adds backends or ops: its name, and where it comes from."""

    name: str
    origin: str


class Registry(Backends):
    """Backends by name, in order of registration, and the ops that they implement."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._ops: dict[str, Op] = {}

    @property
    def ops(self) -> Mapping[str, Op]:
        return self._ops

    def fused_layer(self, name: str) -> Callable[..., Any] | None:
        backend = self._backends[name]
        is_own = any(backend is each for each in builtin.BACKENDS)
        return backend.fused_layer() if is_own and self.unavailable(name, "cuda") is None else None

    def add_op(self, op: Op, origin: str) -> None:
        """Adds an op. Raises UsageError if it is incomplete or its name is taken."""
        _check_texts(op, ("name", "equation", "reference_name"), origin)
        _check_each(op, "independent", str, "names of dimensions", origin)
        if op.name in self._ops:
            raise UsageError(f"{origin}: an op named '{op.name}' exists already; give it another name")
        _check_aliases(op, _parameter_names(op, origin), origin)
        _published(op, origin, 1024)
        self._ops[op.name] = op

    def add(self, backend: Backend, origin: str) -> None:
        """Adds a backend. Raises UsageError if it is incomplete or its name is taken."""
        _check_texts(backend, ("name", "op", "title"), origin)
        _check_each(backend, "requires", Requirement, "Requirement objects", origin)
        _check_each(backend, "packages", str, "names of packages", origin)
        if not isinstance(backend.has_own_code, bool):  # a run's environment holds it
            raise UsageError(f"{origin}: {backend.name} needs `has_own_code` to be True or False")
        _check_each(backend, "devices", str, ", ".join(get_args(DeviceKind)), origin, get_args(DeviceKind))
        _check_each(backend, "dtypes", str, ", ".join(DTYPES), origin, DTYPES)
        if backend.op not in self._ops:
            allowed = allowed_names(self._ops, backend.op)
            raise UsageError(f"{origin}: {backend.name} has the unknown op '{backend.op}' ({allowed})")
        if backend.name in self._backends:
            raise UsageError(f"{origin}: a backend named '{backend.name}' exists already; give it another name")
        op = self._ops[backend.op]
        _parameter_names(backend, origin, {each.name for each in op.parameters} | set(op.aliases))
        self._backends[backend.name] = backend
        backend.join(self)

    def __getitem__(self, name: str) -> Backend:
        return self._backends[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends)

    def __len__(self) -> int:
        return len(self._backends)

    def op_of(self, backend: str) -> Op:
        return self._ops[self._backends[backend].op]

    def unavailable(self, name: str, device: str) -> str | None:
        try:
            with faults_of("its method unavailable fails: "):
                return sentence(self._backends[name], "unavailable", device)
        except UsageError as problem:
            return str(problem)

    def traits(self) -> dict[str, Traits]:
        """What is needed of every backend to expand sweeps."""
        found = {}
        for name, backend in self._backends.items():
            op = self.op_of(name)
            parameters = {each.name: each for each in (*op.parameters, *backend.parameters)}
            found[name] = Traits(op.name, parameters, op.aliases, partial(_published, op, "--width"))
        return found


def _check_texts(owner: Op | Backend, attributes: Iterable[str], origin: str) -> None:
    """Raises UsageError for an attribute that is no text, and for a name that --backend could not give."""
    for attribute in attributes:
        if not isinstance(getattr(owner, attribute, None), str):
            raise UsageError(f"{origin}: {type(owner).__name__} needs a text `{attribute}`")
    if not is_word(owner.name):
        raise UsageError(f"{origin}: {shown(owner.name)} is no name (allowed: printable text without ',')")


def _check_each(
    owner: Op | Backend, attribute: str, kind: type, what: str, origin: str, allowed: tuple[str, ...] = ()
) -> None:
    """Raises UsageError unless an attribute is a collection of objects of a kind, or of the allowed words."""
    listed: Any = getattr(owner, attribute, None)
    fits = isinstance(listed, list | tuple | set | frozenset) and all(isinstance(each, kind) for each in listed)
    if not fits or (allowed and not set(listed) <= set(allowed)):
        raise UsageError(f"{origin}: {owner.name} needs `{attribute}` to be a tuple of {what}, not {shown(listed)}")


def _parameter_names(owner: Op | Backend, origin: str, of_op: Iterable[str] = ()) -> set[str]:
    """The names of an op's or a backend's parameters. Raises UsageError for a name that is taken."""
    _check_each(owner, "parameters", Parameter, "Parameter objects", origin)
    names: set[str] = set()
    for parameter in owner.parameters:
        if parameter.name in {*_TAKEN, *of_op} | names:
            raise UsageError(f"{origin}: {owner.name} has a parameter called '{parameter.name}', which is taken")
        names.add(parameter.name)
    return names


def _check_aliases(op: Op, names: set[str], origin: str) -> None:
    """Raises UsageError for aliases that are taken, or that set anything but parameters of the op."""
    if not isinstance(op.aliases, Mapping):
        raise UsageError(f"{origin}: {op.name} needs `aliases` to map names to tuples of parameters")
    for alias, targets in op.aliases.items():
        if not isinstance(targets, list | tuple) or not targets:
            raise UsageError(f"{origin}: {op.name} needs a tuple of the parameters that its alias {shown(alias)} sets")
        _check_targets(op, targets, names, origin)
        try:
            check_name(alias)
        except ValueError as problem:
            raise UsageError(f"{origin}: {op.name} has an alias that is wrong: {problem}") from None
        if alias in _TAKEN | names:
            raise UsageError(f"{origin}: {op.name} has an alias called '{alias}', which is taken")


def _check_targets(op: Op, targets: Iterable[Any], names: Iterable[str], origin: str) -> None:
    for target in targets:
        if target not in names:
            raise UsageError(f"{origin}: {op.name} sets {shown(target)}, which is not one of its parameters")


def _published(op: Op, origin: str, width: int) -> dict[str, Any]:
    """The parameters that an op publishes for a width. Raises UsageError if it has none."""
    what = f"{origin}: {op.name} has no parameters for the width {width}: "
    with faults_of(what):
        try:
            values = dict(op.published(width))
        except ValueError as problem:
            raise UsageError(what + printable(str(problem))) from problem
    _check_targets(op, values, {each.name for each in op.parameters}, origin)
    return values


def list_plugins(files: Iterable[str] = ()) -> list[Plugin]:
    """The plugins that `load_registry` would load, packages first. Loads none of them.

    Raises UsageError if a file is missing.
    """
    packages = []
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
        packages.append(Plugin(entry.name, f"{package}: {entry.value}"))
    return [*packages, *(Plugin(_module_spec(path).name.removeprefix(_PREFIX), f"--plugin {path}") for path in files)]


def _module_spec(path: str) -> ModuleSpec:
    file = Path(path)
    spec = importlib.util.spec_from_file_location(f"{_PREFIX}{file.stem}", file) if file.is_file() else None
    if spec is None:
        raise UsageError(f"--plugin: there is no Python file '{path}'")
    return spec


def _load_file(path: str) -> ModuleType:
    name = _module_spec(path).name
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that other files of the folder can be imported but hide no module
    with faults_of(f"--plugin: '{path}' cannot be loaded: "):
        module = _execute(Path(path).absolute(), Path(path).read_bytes())
    sys.modules[name] = module  # also if another file of this name was loaded since
    return module


class _FromSource(SourceFileLoader):
    """Runs a file's `source`, not bytecode that Python has kept: that may be of an older one with the same time."""

    def __init__(self, name: str, path: Path, source: bytes) -> None:
        super().__init__(name, str(path))
        self._source = source

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return self.source_to_code(self._source, self.path)


@cache
def _execute(path: Path, source: bytes) -> ModuleType:
    """A file as a module. As long as its `source` stays, it runs once: a command needs its axes, then its backends."""
    spec = _module_spec(str(path))
    spec.loader = loader = _FromSource(spec.name, path, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    loader.exec_module(module)
    return module


def _load_entry(entry: metadata.EntryPoint) -> ModuleType:
    with faults_of(f"package {entry.name} cannot be loaded; fix or uninstall it: "):
        module: ModuleType = entry.load()
    return module


def _instances(module: ModuleType, name: str, kind: type, origin: str) -> list[Any]:
    """The objects in a module's list `name`; an entry that is a class is instantiated."""
    listed = getattr(module, name, ())
    if not isinstance(listed, list | tuple):
        raise UsageError(f"{origin}: {name} needs to be a list of {kind.__name__} classes or objects")
    found = []
    for entry in listed:
        if inspect.isclass(entry) and issubclass(entry, kind):
            found.append(_make(entry, origin))
        elif isinstance(entry, kind):
            found.append(entry)
        else:
            raise UsageError(
                f"{origin}: {name} lists {shown(entry)}, which is not an instance or subclass of {kind.__name__}"
            )
    return found


def _make(kind: type, origin: str) -> Any:
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise UsageError(f"{origin}: {kind.__name__} needs the method {', '.join(missing)}")
    with faults_of(f"{origin}: {kind.__name__}() without arguments fails: "):
        return kind()


def _add_module(registry: Registry, module: ModuleType, origin: str) -> None:
    with faults_of(f"{origin}: cannot be used: "):  # what is listed may be made to fail when it is looked at
        ops_found = _instances(module, "OPS", Op, origin)
        backends = _instances(module, "BACKENDS", Backend, origin)
        if not ops_found and not backends:
            raise UsageError(f"{origin}: needs a list BACKENDS (or OPS); `glabench plugin new FILE` writes an example")
        for op in ops_found:
            registry.add_op(op, origin)
        for backend in backends:
            registry.add(backend, origin)


def load_registry(plugins: Iterable[str] = ()) -> Registry:
    """All ops and backends: built in, from the entry-point group `glabench.backends`, and from plugin files.

    A plugin is a Python file or an installed module with a list `BACKENDS`, a list `OPS` or both, of classes or
    objects. Raises UsageError for a plugin that is missing, cannot be loaded or is incomplete.
    """
    registry = Registry()
    for op in ops.BUILTIN:
        registry.add_op(op, "glabench")
    for backend in builtin.BACKENDS:
        registry.add(backend, "glabench")
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        _add_module(registry, _load_entry(entry), f"package {entry.name}")
    for path in plugins:
        _add_module(registry, _load_file(path), f"--plugin {path}")
    for backend in registry.values():  # again: those built in may have joined a registry that a plugin has loaded
        backend.join(registry)
    return registry
