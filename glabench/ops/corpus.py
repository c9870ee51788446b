"""A text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import platform
import sysconfig
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

# Folders whose files differ between installations, or that distributions leave out, and tables of character sets, which
# repeat each other, so that a model would know much of those that are held out.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "__pycache__"}
)
# What a build writes begins so.
_BUILT = ("config-", "_sysconfigdata")
# One file of so many is not learned from.
_HELD_OUT = 10


@dataclass(frozen=True)
class Corpus:
    """Bytes to learn from, and bytes of other files; `name` says what they are, with their hash."""

    learned: bytes
    held_out: bytes
    name: str


@cache
def python_source() -> Corpus:
    """The .py files of the standard library without its tests, in the order of their paths; every tenth is held out.

    Another version of Python has another text, so its name has the version and the beginning of the text's SHA-256.
    Raises OSError if a file cannot be read, and ValueError if there are too few.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if _is_source(path.relative_to(root).parts))
    if len(paths) < 2 * _HELD_OUT:
        raise ValueError("this Python has no source of its standard library; install it")
    texts = [path.read_bytes() for path in paths]
    held_out = b"".join(texts[::_HELD_OUT])
    learned = b"".join(text for number, text in enumerate(texts) if number % _HELD_OUT)
    digest = sha256(learned + held_out).hexdigest()[:12]
    size = (len(learned) + len(held_out)) / 1e6
    name = f"standard library of Python {platform.python_version()}, {size:.1f} MB, sha256 {digest}"
    return Corpus(learned, held_out, name)


def _is_source(parts: tuple[str, ...]) -> bool:
    return not _LEFT_OUT.intersection(parts) and not any(part.startswith(_BUILT) for part in parts)
