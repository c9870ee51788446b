"""What `glabench inspect` asks its worker for, and the kernels that the worker tells of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from tempfile import TemporaryFile
from typing import Any

from glabench.errors import GlabenchError, UsageError, allowed_names

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
FAMILIES = ("auto", "hopper", "portable")
DTYPES = ("bf16", "fp16", "fp32")
GATES = ("fp32", "bf16")
# Head dims of the kernels for Hopper are multiples of this, and chunks have so many tokens.
_WIDE_MULTIPLE, _HOPPER_CHUNK = 16, "64"


@dataclass(frozen=True)
class Request:
    """Which kernels to compile: for which head dims and dtypes, of which family, with which names.

    `archs` are without `sm_`. `only` is a part of their names, `names` are whole ones; empty for all. `show`: the code
    to give back as text, ptx or sass. `packed`: as they are for packed sequences.
    """

    archs: tuple[str, ...]
    key_dim: int
    value_dim: int
    dtype: str
    chunk: int | None
    family: str
    only: str = ""
    show: str | None = None
    gates: str = "fp32"
    names: tuple[str, ...] = ()
    packed: bool = False

    def wants(self, name: str, function: str) -> bool:
        """Whether a kernel of this name is asked for, or of this function, by which profiles name it."""
        part = self.only.lower()
        return (part in name.lower() or part in function.lower()) and (not self.names or name in self.names)


def parse_request(text: str) -> Request:
    """The inverse of what `kernels_of` gives its worker."""
    fields = json.loads(text)
    return Request(**{**fields, "archs": tuple(fields["archs"]), "names": tuple(fields["names"])})


def parse_archs(text: str) -> tuple[str, ...]:
    """`sm_90,gfx942` or `90,gfx942` as the worker takes them. Raises UsageError."""
    names = {name: name.removeprefix("sm_") for name in ARCHS}
    known = {**names, **{short: short for short in names.values()}}
    found = []
    for item in (word.strip() for word in text.split(",")):
        if item not in known:
            raise UsageError(f"--arch: '{item}' is unknown ({allowed_names(ARCHS, item)})")
        found.append(known[item])
    return tuple(dict.fromkeys(found))


def kernels_of(requests: Sequence[Request], variables: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """The kernels of each request in turn, as the worker compiles them. Raises GlabenchError if it fails."""
    asked = [json.dumps(asdict(request)) for request in requests]
    command = [sys.executable, "-m", "glabench.inspecting.worker", *asked]
    # Kernels are compiled, not interpreted.
    environment = {**os.environ, "TRITON_INTERPRET": "0", **(variables or {})}
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        for line in process.stdout or ():
            yield json.loads(line)
        process.wait()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if process.returncode:
        raise GlabenchError(f"the kernels could not be compiled: {said[-1] if said else 'the worker ended'}")


def family_for(
    family: str, archs: tuple[str, ...], key_dim: int, value_dim: int, dtype: str, chunk: str = "auto"
) -> str:
    """The worker's word for a family of kernels. Raises UsageError for what there are no kernels for.

    By itself (`auto`) the one that a call would run: on sm_90 that for Hopper, if it has such head dims and dtype.
    """
    of_dims = key_dim % _WIDE_MULTIPLE == 0 and value_dim % _WIDE_MULTIPLE == 0
    fits = dtype == "bf16" and of_dims and chunk in ("auto", _HOPPER_CHUNK)
    if family == "hopper" and (archs != ("90",) or not fits):
        raise UsageError(
            f"--family: the kernels for Hopper are for sm_90, bf16, chunks of {_HOPPER_CHUNK} and head dims that are"
            f" multiples of {_WIDE_MULTIPLE}"
        )
    return "hopper" if fits and archs == ("90",) and family != "portable" else "triton"
