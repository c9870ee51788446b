"""Compiles the kernels for a GPU that need not be there, and reads registers, spills and shared memory.

    python -m gla_kernels.ahead --arch 80 90 100 --key-dim 64 --value-dim 64 --dtype bf16
    python -m gla_kernels.ahead --family hopper

prints one line of JSON a kernel.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gla_kernels.call import Call, backward_kernel, forward_kernel, named
from gla_kernels.exact import gla_backward_exact, gla_forward_exact
from gla_kernels.launch import HOPPER, LaunchPlan, Tile, exact_tile, plan
from gla_kernels.limits import CHUNK_SIZES

_POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_SCALARS = ("T", "H", "first", "count", "every")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: registers a thread, bytes of stack (spills) a thread, bytes of shared memory."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_kernel(
    call: Call, which: Literal["forward", "backward"], exact: bool, arch: int, tile: Tile | None = None
) -> Any:
    """Compiles one kernel of `call` on CUDA architecture `arch` (90 = sm_90); no GPU needed.

    Every optional input and output is on, so that all of the kernel's code is compiled, except that a forward keeps
    states and no checkpoints. `tile` overrides the plan's. Returns Triton's compiled kernel, whose `asm` holds the
    stages down to the cubin.
    """
    forward = which == "forward"
    if exact:
        kernel: Any = gla_forward_exact if forward else gla_backward_exact
        tile = tile or exact_tile(call.K, call.V, call.dtype)
    else:
        kernel = forward_kernel(call) if forward else backward_kernel(call)
        tile = tile or (call.plan.forward if forward else call.plan.backward)
    switches = dict.fromkeys(("FROM_CHECKPOINT", "STORE_CHECKPOINTS"), False)
    switches |= dict.fromkeys(("HAS_INITIAL", "STORE_O", "STORE_FINAL", "STORE_STATES"), True)
    switches |= dict.fromkeys(("HAS_DFINAL", "STORE_DINITIAL"), True)
    absent = dict.fromkeys(("cu",) if call.gated else ("cu", "g", "dg"))
    constants = named(kernel, call.constants(tile) | switches | absent)
    signature = {name: _type(call, name, constants, tile) for name in kernel.arg_names}
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    whole = [
        name for name, kind in signature.items() if kind.startswith("*") or re.fullmatch(r"(q|k|v|g|do)_[bth]", name)
    ]
    aligned = {places[name]: [["tt.divisibility", 16]] for name in whole}
    values = {places[name]: value for name, value in constants.items()}
    source = _source(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": tile.warps})


def _type(call: Call, name: str, constants: dict[str, Any], tile: Tile) -> str:
    """An argument's type as Triton writes it."""
    if name in constants:
        return "constexpr"
    if name in _SCALARS or name.endswith(("_b", "_t", "_h")):
        return "i32"
    if name in ("flags", "failed"):
        return "*i32"
    if name in ("q", "k", "v", "o", "do", "dv") or (name in ("dq", "dk") and call.parts(tile) == 1):
        return _POINTER[call.dtype]
    if name == "states":
        return _POINTER[call.operands.dtype]
    return "fp32" if name == "scale" else "*fp32"


def _source(kernel: Any, signature: dict[str, str], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    if getattr(kernel, "is_gluon", lambda: False)():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, constants, attributes)
    return ASTSource(kernel, signature, constants, attributes)


def resources(compiled: Any) -> Resources:
    """Reads a compiled kernel's resources with the `cuobjdump` that Triton ships."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        text = subprocess.run([tool, "-res-usage", cubin.name], check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return Resources(found["REG"], found["STACK"], compiled.metadata.shared)


def all_kernels(gated: bool) -> Iterator[tuple[Literal["forward", "backward"], bool]]:
    """Every kernel of a call as (pass, exact); without a gate the plain form is always right."""
    passes: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    for which in passes:
        for exact in (False, True) if gated else (False,):
            yield which, exact


def call_of(K: int, V: int, gated: bool, dtype: torch.dtype, choice: LaunchPlan) -> Call:
    """A call of some shape with head dims K and V, for compiling."""
    return Call(2, 4096, 4, K, V, 2, False, gated, K**-0.5, dtype, choice)


def main() -> None:
    """The command line: compiles every kernel of one shape for the architectures, with and without a gate."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    parser = argparse.ArgumentParser(description="Compile the GLA kernels without a GPU and print their resources.")
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="CUDA architectures, 90 for sm_90")
    parser.add_argument("--key-dim", type=int, default=64)
    parser.add_argument("--value-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=dtypes, default="bf16")
    parser.add_argument("--chunk", type=int, choices=CHUNK_SIZES)
    parser.add_argument("--family", choices=("triton", "hopper"), default="triton")
    options = parser.parse_args()
    K, V, dtype = options.key_dim, options.value_dim, dtypes[options.dtype]
    choice = HOPPER if options.family == "hopper" else plan(K, V, dtype, options.chunk)
    for gated in (True, False):
        call = call_of(K, V, gated, dtype, choice)
        for which, exact in all_kernels(gated):
            for arch in options.arch:
                found = asdict(resources(compile_kernel(call, which, exact, arch)))
                print(json.dumps({"arch": arch, "kernel": which, "gated": gated, "exact": exact, **found}), flush=True)


if __name__ == "__main__":
    main()
