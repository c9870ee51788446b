"""Compiles the kernels for a GPU that need not be there, and reads registers, spills and shared memory."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gla_kernels.backward import gla_backward_kernel
from gla_kernels.chunk import Call
from gla_kernels.forward import gla_forward_kernel
from gla_kernels.launch import Tile, exact_tile

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
