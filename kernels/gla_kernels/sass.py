"""Reads machine code for a fault of the assembler, without a GPU.

ptxas 12.8 (Triton 3.6) once made the high word of a `wgmma` descriptor, constant but for a carry, of its low word:

    UIADD3 UR5, UP0, UR15, 0x2, URZ                     low word + 2
    UMOV UR4, URZ
    UIADD3.X UR15, UR15, 0x40000040, URZ, UP0, !UPT     should read UR4

The product then steps through shared memory with a wrong stride. The same source in another order compiles right, so
no rule for writing kernels keeps clear of it; this looks for it in what came out.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(U\w[\w.]*|R2UR[\w.]*)\s+(.*?);")
_REGISTER = re.compile(r"UR\d+")
# High words of descriptors: the kind of swizzle in the topmost bits, the stride in the lowest.
_HIGH_WORD = re.compile(r"0x[48c]0[0-9a-f]{6}")


def disassemble(compiled: Any) -> str:
    """The machine code of a compiled kernel as text, by the `nvdisasm` that Triton ships."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run([tool, "-c", cubin.name], check=True, capture_output=True, text=True).stdout


def faulty_descriptors(sass: str) -> list[str]:
    """The instructions that add a descriptor's high word to a register that does not hold 0."""
    zeros: set[str] = set()
    faults = []
    for line in sass.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        operation, operands = found[1], [operand.strip() for operand in found[2].split(",")]
        if operation == "UIADD3.X" and any(_HIGH_WORD.fullmatch(operand) for operand in operands):
            sources = [operand for operand in operands[1:] if _REGISTER.fullmatch(operand)]
            if any(source not in zeros for source in sources):
                faults.append(found[0].strip())
        written = operands[0]
        if _REGISTER.fullmatch(written):
            if operation == "UMOV" and operands[1] == "URZ":
                zeros.add(written)
            else:
                zeros.discard(written)
            if "64" in operation:
                zeros.discard(f"UR{int(written[2:]) + 1}")
    return faults
