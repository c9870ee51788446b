"""The registry of backends: our own, those of installed packages (entry points), those of `--plugin file.py`."""

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from glabench.backends import builtin
from glabench.backends.base import Backend
from glabench.backends.ops import OPS
from glabench.errors import UsageError
from glabench.sweeps.expand import Traits

ENTRY_POINTS = "glabench.backends"
_PREFIX = "glabench_plugin_"


@dataclass(frozen=True)
class Plugin:
    """Code that brings backends: its name, and where it comes from."""

    name: str
    origin: str


class Registry(Mapping[str, Backend]):
    """Backends by name, in the order of their registration."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    def add(self, backend: Backend, origin: str) -> None:
        """Adds a backend. Raises UsageError if it is incomplete or its name is taken."""
        for attribute in ("name", "op", "title"):
            if not isinstance(getattr(backend, attribute, None), str):
                raise UsageError(f"{origin}: {type(backend).__name__} needs a text `{attribute}`")
        if backend.op not in OPS:
            raise UsageError(f"{origin}: {backend.name} has the unknown op '{backend.op}' (allowed: {', '.join(OPS)})")
        if backend.name in self._backends:
            raise UsageError(f"{origin}: a backend named '{backend.name}' exists already; give it another name")
        self._backends[backend.name] = backend

    def __getitem__(self, name: str) -> Backend:
        return self._backends[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._backends)

    def __len__(self) -> int:
        return len(self._backends)

    def traits(self) -> dict[str, Traits]:
        """What expanding sweeps needs to know of every backend."""
        return {name: backend.traits() for name, backend in self._backends.items()}


def list_plugins(files: Iterable[str] = ()) -> list[Plugin]:
    """All code besides glabench's own that `load_registry` would load; none of it is loaded here.

    Raises UsageError for a file that is not there.
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
    try:
        with redirect_stdout(sys.stderr):  # stdout is for data
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise UsageError(f"--plugin: '{path}' cannot be loaded: {type(problem).__name__}: {problem}") from problem
    return module


def _load_entry(entry: metadata.EntryPoint) -> ModuleType:
    try:
        with redirect_stdout(sys.stderr):
            module: ModuleType = entry.load()
    except (Exception, SystemExit) as problem:
        reason = f"{type(problem).__name__}: {problem}"
        raise UsageError(f"package {entry.name} cannot be loaded; mend or uninstall it: {reason}") from problem
    return module


def _backends_of(module: ModuleType, origin: str) -> Iterable[Backend]:
    found = getattr(module, "BACKENDS", None)
    if not isinstance(found, list | tuple) or not all(isinstance(b, Backend) for b in found):
        raise UsageError(f"{origin}: needs a list BACKENDS of Backend objects")
    return found


def load_registry(plugins: Iterable[str] = ()) -> Registry:
    """All backends: built in, from the entry-point group `glabench.backends`, and from the plugin files.

    A plugin is a Python file (or an installed module) with a list `BACKENDS`. Raises UsageError.
    """
    registry = Registry()
    for backend in builtin.BACKENDS:
        registry.add(backend, "glabench")
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        for backend in _backends_of(_load_entry(entry), f"package {entry.name}"):
            registry.add(backend, f"package {entry.name}")
    for path in plugins:
        for backend in _backends_of(_load_file(path), f"--plugin {path}"):
            registry.add(backend, f"--plugin {path}")
    return registry
