"""The registry of ops and backends: built-in ones, and those of installed packages (entry points) and plugin files."""

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from glabench import ops
from glabench.backends import builtin
from glabench.backends.base import Backend
from glabench.errors import UsageError, did_you_mean, printable
from glabench.ops import Op
from glabench.records.metrics import METRICS
from glabench.records.record import Measured
from glabench.sweeps.expand import Traits
from glabench.sweeps.parameters import COMMON, WIDTH, Parameter

ENTRY_POINTS = "glabench.backends"
_PREFIX = "glabench_plugin_"
# Names that no parameter may have, because they are fields of records or columns of tables.
_TAKEN = {
    *(*COMMON, WIDTH.name, "backend", "op", "device", "seed", "parameters", "schema", "cell", "samples"),
    *(field.name for field in fields(Measured)),
    *(metric.field for metric in METRICS),
}


@dataclass(frozen=True)
class Plugin:
    """Code that adds backends or ops: its name, and where it comes from."""

    name: str
    origin: str


class Registry(Mapping[str, Backend]):
    """Backends by name, in order of registration, and the ops that they implement."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._ops: dict[str, Op] = {}

    @property
    def ops(self) -> Mapping[str, Op]:
        """The ops by name."""
        return self._ops

    def add_op(self, op: Op, origin: str) -> None:
        """Adds an op. Raises UsageError if it is incomplete or its name is taken."""
        for attribute in ("name", "equation", "parameters", "independent", "reference_name"):
            if not hasattr(op, attribute):
                raise UsageError(f"{origin}: {type(op).__name__} needs a `{attribute}`")
        if op.name in self._ops:
            raise UsageError(f"{origin}: an op named '{op.name}' exists already; give it another name")
        names = _parameter_names(op, f"{origin}: {op.name}")
        for target in {target for targets in op.aliases.values() for target in targets} | _published(op, origin):
            if target not in names:
                raise UsageError(f"{origin}: {op.name} sets '{target}', which is not one of its parameters")
        self._ops[op.name] = op

    def add(self, backend: Backend, origin: str) -> None:
        """Adds a backend. Raises UsageError if it is incomplete or its name is taken."""
        for attribute in ("name", "op", "title"):
            if not isinstance(getattr(backend, attribute, None), str):
                raise UsageError(f"{origin}: {type(backend).__name__} needs a text `{attribute}`")
        if backend.op not in self._ops:
            allowed = f"allowed: {', '.join(self._ops)}{did_you_mean(backend.op, self._ops)}"
            raise UsageError(f"{origin}: {backend.name} has the unknown op '{backend.op}' ({allowed})")
        if backend.name in self._backends:
            raise UsageError(f"{origin}: a backend named '{backend.name}' exists already; give it another name")
        op = self._ops[backend.op]
        _parameter_names(backend, f"{origin}: {backend.name}", {each.name for each in op.parameters} | set(op.aliases))
        self._backends[backend.name] = backend

    def __getitem__(self, name: str) -> Backend:
        return self._backends[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends)

    def __len__(self) -> int:
        return len(self._backends)

    def op_of(self, backend: str) -> Op:
        """The op that a backend implements."""
        return self._ops[self._backends[backend].op]

    def traits(self) -> dict[str, Traits]:
        """What is needed of every backend to expand sweeps."""
        found = {}
        for name, backend in self._backends.items():
            op = self.op_of(name)
            parameters = {each.name: each for each in (*op.parameters, *backend.parameters)}
            found[name] = Traits(op.name, parameters, op.aliases, op.published)
        return found


def _parameter_names(owner: Op | Backend, origin: str, of_op: Iterable[str] = ()) -> set[str]:
    """The names of an op's or a backend's parameters. Raises UsageError for a name that is taken."""
    listed = owner.parameters
    if not isinstance(listed, list | tuple) or not all(isinstance(each, Parameter) for each in listed):
        raise UsageError(f"{origin} needs `parameters` to be a tuple of Parameter objects")
    taken = {*_TAKEN, *of_op, *getattr(owner, "aliases", ())}
    names: set[str] = set()
    for parameter in listed:
        if parameter.name in taken | names:
            raise UsageError(f"{origin} has a parameter called '{parameter.name}', which is taken")
        names.add(parameter.name)
    return names


def _published(op: Op, origin: str) -> set[str]:
    try:
        return set(op.published(1024))
    except Exception as problem:
        raise UsageError(f"{origin}: {op.name} has no parameters for the width 1024: {_said(problem)}") from problem


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
    spec = _module_spec(path)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that other files of the folder can be imported but hide no module
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    try:
        with redirect_stdout(sys.stderr):  # stdout is for data
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise UsageError(f"--plugin: '{path}' cannot be loaded: {_said(problem)}") from problem
    return module


def _said(problem: BaseException) -> str:
    return printable(f"{type(problem).__name__}: {problem}")


def _load_entry(entry: metadata.EntryPoint) -> ModuleType:
    try:
        with redirect_stdout(sys.stderr):
            module: ModuleType = entry.load()
    except (Exception, SystemExit) as problem:
        raise UsageError(f"package {entry.name} cannot be loaded; fix or uninstall it: {_said(problem)}") from problem
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
                f"{origin}: {name} lists {entry!r}, which is not an instance or subclass of {kind.__name__}"
            )
    return found


def _make(kind: type, origin: str) -> Any:
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise UsageError(f"{origin}: {kind.__name__} needs the method {', '.join(missing)}")
    try:
        return kind()
    except Exception as problem:
        raise UsageError(f"{origin}: {kind.__name__}() without arguments fails: {_said(problem)}") from problem


def _add_module(registry: Registry, module: ModuleType, origin: str) -> None:
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
    return registry
