"""The origin of measured numbers: commit, code hashes, variables, command. No path, host name or user name."""

import hashlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

from glabench.apart import ask_git
from glabench.devices.syntax import code_of, imported_names
from glabench.errors import GlabenchError, printable

_SUITE = Path(__file__).parent.parent
_HASH_DIGITS = 16
_CODE = (".py", ".c")
# How hashes of syntax trees begin; those of bytes have no prefix.
TREE = "tree:"
_GIT_TIMEOUT_S = 10
# What a plugin imports from elsewhere, even if its folder has something of that name.
_ELSEWHERE = sys.stdlib_module_names | {"glabench", "gla_kernels"}
# Prefixes of environment variables that change what is measured.
_RELEVANT = (
    *("TRITON_", "CUDA_", "TORCH", "PYTORCH_", "GLA_", "CUBLAS", "CUDNN", "FLA_", "MAMBA_"),
    *("NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
)
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]*")
_LONGEST_VALUE = 100


def describe_code(plugins: Sequence[str] = (), kernels: Path | None = None) -> dict[str, Any]:
    """The commit of the code, and hashes of the code of the suite, the kernels and each plugin.

    The suite's is of its bytes, the others are of syntax trees (see `hash_code`). `kernels` is the folder of the
    package gla_kernels; by default the one that would be imported. A plugin's is of its file and of those in its folder
    that it imports, and these import.
    """
    commit, is_changed = _read_checkout(_SUITE)
    kernels = kernels or _find_kernels()
    files = [(Path(plugin).name, file) for plugin in plugins for file in _files_of(Path(plugin))]
    return {
        "commit": commit,
        "changed": is_changed,
        "suite": hash_package(_SUITE),
        "kernels": hash_code(kernels) if kernels is not None else None,
        "plugins": {name: _hash_trees(file for of, file in files if of == name) for name in sorted(dict(files))},
    }


def hash_package(folder: Path) -> str:
    """A hash of the code in a folder: of the bytes of .py and .c files, and of their paths relative to the folder."""
    return _hash(_modules(folder))


def hash_code(folder: Path) -> str:
    """A hash of the code in a folder: syntax trees of .py files, without docstrings; bytes of .c files; their paths.

    It begins with `tree:`. Records of version 0.2 before this have the hash of the bytes instead, without a prefix, so
    that neither is taken for the other. Triton compiles from the tree, so two equal hashes are the same kernels. A file
    that does not parse counts with its bytes.
    """
    return _hash_trees(_modules(folder))


def relevant_variables() -> dict[str, str]:
    """Environment variables that change what is measured. Paths and UUIDs of GPUs in their values are hidden."""
    return {name: _public(value) for name, value in sorted(os.environ.items()) if name.startswith(_RELEVANT)}


def command_line(arguments: Sequence[str]) -> str:
    """The command as a user would type it, from the arguments after the program's name.

    An absolute path, also in `--option=/path`, is reduced to its last component.
    """
    return printable(shlex.join(["glabench", *map(_without_folder, arguments)]))


def _modules(folder: Path) -> list[tuple[str, Path]]:
    return sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.suffix in _CODE)


def _files_of(plugin: Path) -> list[tuple[str, Path]]:
    """The plugin's file, then what it imports from its folder, with paths relative to that. Packages count whole."""
    folder, found, waiting = plugin.parent, [(plugin.name, plugin)], [plugin]
    seen = {plugin.stem, *_ELSEWHERE}
    while waiting:
        for name in sorted(imported_names(waiting.pop().read_bytes()) - seen):
            seen.add(name)
            package = folder / name
            files = _modules(package) if package.is_dir() else [("", package.with_suffix(".py"))]
            here = [((PurePath(name) / path) if path else PurePath(f"{name}.py"), file) for path, file in files]
            found += [(path.as_posix(), file) for path, file in here if file.is_file()]
            waiting += [file for _, file in here if file.is_file()]
    return found


def _hash_trees(files: Iterable[tuple[str, Path]]) -> str:
    return TREE + _hash(files, code_of)


def _hash(files: Iterable[tuple[str, Path]], content: Callable[[bytes], bytes] = bytes) -> str:
    whole = hashlib.sha256()
    for name, path in files:
        # Contents enter as digests, so that none can look like the name of the next file.
        whole.update(os.fsencode(f"{name}\0{hashlib.sha256(content(path.read_bytes())).hexdigest()}\n"))
    return whole.hexdigest()[:_HASH_DIGITS]


def _find_kernels() -> Path | None:
    spec = find_spec("gla_kernels")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _read_checkout(package: Path) -> tuple[str | None, bool | None]:
    """The commit of the repository that holds the package, and whether tracked files differ from it."""
    # A package installed into a virtual environment inside a repository does not belong to that repository.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _git(package, "rev-parse", "--verify", "HEAD")
    changes = _git(package, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else changes != ""


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails or is missing."""
    try:
        return ask_git(folder, *arguments, timeout_s=_GIT_TIMEOUT_S)
    except GlabenchError:
        return None


def _public(value: str) -> str:
    if "/" in value or "\\" in value:
        return "(a path)"
    return printable(_UUID.sub(r"\1-(a UUID)", value))[:_LONGEST_VALUE]


def _without_folder(argument: str) -> str:
    """An argument whose absolute paths, which may be several at its end or behind an `=`, are names alone."""
    for at in (0, *(place + 1 for place, letter in enumerate(argument) if letter == "=")):
        parts = argument[at:].split(os.pathsep)
        if PurePath(parts[0]).is_absolute():
            names = [PurePath(part).name or part if PurePath(part).is_absolute() else part for part in parts]
            return argument[:at] + os.pathsep.join(names)
    return argument
