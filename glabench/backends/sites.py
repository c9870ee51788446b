"""Sites: folders of installed packages that the workers of one backend alone see, because some packages clash."""

from __future__ import annotations

import importlib.util
import os
import site as installed
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

from glabench.errors import UsageError, allowed_names

# Names the folders of a worker's site, with the system's separator between them.
_VARIABLE = "GLABENCH_SITE"


def parse_sites(given: Sequence[str], backends: Collection[str]) -> dict[str, str]:
    """Sites by backend, from `NAME=PATH`; PATH may be several folders with the system's separator between them.

    Raises UsageError for an unknown backend, one that is given twice, and for what is no folder.
    """
    found: dict[str, str] = {}
    for text in given:
        name, has_path, paths = text.partition("=")
        if not has_path:
            raise UsageError(f"--site: '{text}' is no site (allowed: NAME=PATH, such as flash-attn-4=sites/fa4)")
        if name not in backends:
            raise UsageError(f"--site: '{name}' is not a backend ({allowed_names(backends, name)})")
        if name in found:
            raise UsageError(
                f"--site: '{name}' has two sites; give all folders in one, with '{os.pathsep}' between them"
            )
        folders = [Path(path).absolute() for path in paths.split(os.pathsep)]
        if missing := [str(path) for path in folders if not path.is_dir()]:
            raise UsageError(f"--site: '{missing[0]}' is no folder; pip install --target FOLDER makes one")
        found[name] = os.pathsep.join(map(str, folders))
    return found


@contextmanager
def on_path(site: str | None) -> Iterator[None]:
    """Has a site's folders on the path of modules, before all others."""
    before = list(sys.path)
    sys.path[:0] = site.split(os.pathsep) if site else []
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def variables_with(site: str | None, variables: Mapping[str, str]) -> Mapping[str, str]:
    """The environment variables of workers that see a site before all else; `variables` are theirs without it."""
    if not site:
        return variables
    others = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, (site, others))), _VARIABLE: site}


def open_site() -> None:
    """In a worker: does what the `.pth` files of its site ask for, which Python does not do for PYTHONPATH.

    Some packages find a part of themselves in no other way (nvidia-cutlass-dsl, which flash-attn-4 needs). And folders
    of the site that are packages without an `__init__.py` (flash-attn-4's `flash_attn`) come before packages of the
    same name elsewhere that have one, where Python takes the latter.
    """
    for folder in filter(None, os.environ.get(_VARIABLE, "").split(os.pathsep)):
        installed.addsitedir(folder)
        for each in Path(folder).iterdir():
            if each.is_dir() and each.name.isidentifier() and _is_shadowed(each):
                spec = ModuleSpec(each.name, None, is_package=True)
                spec.submodule_search_locations = [str(each)]
                sys.modules[each.name] = importlib.util.module_from_spec(spec)


def _is_shadowed(folder: Path) -> bool:
    """Whether a folder without an `__init__.py` gives its name to a package that has one."""
    if (folder / "__init__.py").exists() or (found := importlib.util.find_spec(folder.name)) is None:
        return False
    return str(folder) not in (found.submodule_search_locations or [])
