"""Compiles the kernels for a GPU that need not be there, and reads registers, spills and shared memory.

    python -m gla_kernels.ahead --arch 80 90 100 --key-dim 64 --value-dim 64 --dtype bf16

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

from gla_kernels.backward import gla_backward_kernel
from gla_kernels.chunk import Call
from gla_kernels.forward import gla_forward_kernel
from gla_kernels.launch import Tile, exact_tile, operands, plan
from gla_kernels.limits import CHUNK_SIZES

_POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_SCALARS = ("t_begin", "t_end", "T", "H", "heads", "chunks", "every")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes: registers a thread, bytes of stack (spills) a thread, bytes of shared memory."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_kernel(
    call: Call,
    dtype: torch.dtype,
    which: Literal["forward", "backward"],
    exact: bool,
    arch: int,
    tile: Tile | None = None,
) -> Any:
    """Compiles one kernel of `call` for inputs of `dtype` on CUDA architecture `arch` (90 = sm_90); no GPU needed.

    Every optional input and output is on, so that all of the kernel's code is compiled. `tile` overrides the plan's.
    Returns Triton's compiled kernel, whose `asm` holds the stages down to the cubin.
    """
    forward = which == "forward"
    kernel = gla_forward_kernel if forward else gla_backward_kernel
    if tile is None:
        plain = call.plan.forward if forward else call.plan.backward
        tile = exact_tile(plain) if exact else plain
    constants = call.constants(tile, exact)
    options = {"num_warps": constants.pop("num_warps")}
    switches = ("HAS_INITIAL", "STORE_O", "STORE_FINAL", "STORE_STATES", "STORE_CHECKPOINTS")
    constants |= dict.fromkeys(switches if forward else ("HAS_DFINAL", "STORE_DINITIAL"), True)
    parts = triton.cdiv(call.V, tile.block_v)
    pointers = dict.fromkeys(("q", "k", "v", "o", "do", "dv"), _POINTER[dtype])
    pointers |= dict.fromkeys(("dq", "dk"), _POINTER[dtype] if parts == 1 else "*fp32")
    pointers |= {"states": _POINTER[call.operands.dtype], "flags": "*i32"}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in _SCALARS:
            signature[name] = "i32"
        else:
            signature[name] = "fp32" if name == "scale" else pointers.get(name, "*fp32")
    absent = () if call.gated else ("g", "dg")
    for name in absent:
        if name in signature:
            signature[name], constants[name] = "constexpr", None
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {places[n]: [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, signature, {places[n]: value for n, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


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


def main() -> None:
    """The command line: compiles every kernel of one shape for the architectures, with and without a gate."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    parser = argparse.ArgumentParser(description="Compile the GLA kernels without a GPU and print their resources.")
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="CUDA architectures, 90 for sm_90")
    parser.add_argument("--key-dim", type=int, default=64)
    parser.add_argument("--value-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=dtypes, default="bf16")
    parser.add_argument("--chunk", type=int, choices=CHUNK_SIZES)
    options = parser.parse_args()
    K, V, dtype = options.key_dim, options.value_dim, dtypes[options.dtype]
    for gated in (True, False):
        call = Call(2, 4096, 4, K, V, gated, K**-0.5, plan(K, V, dtype, options.chunk), operands(dtype))
        for which, exact in all_kernels(gated):
            for arch in options.arch:
                found = asdict(resources(compile_kernel(call, dtype, which, exact, arch)))
                print(json.dumps({"arch": arch, "kernel": which, "gated": gated, "exact": exact, **found}), flush=True)


if __name__ == "__main__":
    main()
