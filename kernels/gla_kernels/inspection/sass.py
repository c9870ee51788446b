"""Searches machine code for a fault of the assembler; needs no GPU.

The high word of a `wgmma` descriptor is constant except for a carry. ptxas 12.8 (Triton 3.6) once added it to the
descriptor's low word instead of 0:

    UIADD3 UR5, UP0, UR15, 0x2, URZ                     low word + 2
    UMOV UR4, URZ
    UIADD3.X UR15, UR15, 0x40000040, URZ, UP0, !UPT     should read UR4

The product then reads shared memory with a wrong stride. The same source in another order compiles correctly, so no
rule for writing kernels avoids the fault; the search is in the compiled code. It reads from top to bottom, as if no
branch were taken.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*[\w.]*)\s+(.*?);")
_REGISTER = re.compile(r"(U?R)(\d+)")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_WRITES_NO_REGISTER = ("ST", "RED.", "ISETP", "FSETP", "UISETP", "PLOP", "UPLOP", "BAR", "BRA", "R2P")
_WAYS_TO_WRITE_0 = {
    "UMOV": ["URZ"],
    "MOV": ["RZ"],
    "IMAD.MOV.U32": ["RZ", "RZ", "RZ"],
    "CS2R": ["SRZ"],
    "CS2R.32": ["SRZ"],
}


def disassemble(compiled: Any) -> str:
    """The machine code of a compiled kernel as text, by the `nvdisasm` that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return subprocess.run([tool, "-c", cubin.name], check=True, capture_output=True, text=True).stdout


def _is_high_word(operand: str) -> bool:
    """Whether an operand is a descriptor's high word: a swizzle mode in the top bits, a stride in the lowest."""
    if not _NUMBER.fullmatch(operand):
        return False
    word = int(operand, 16) & 0xFFFFFFFF
    return word >> 30 != 0 and word & 0x3FFF0000 == 0 and word & 0xFFFF != 0


def _written(operation: str, operands: list[str]) -> list[str]:
    """The registers that an instruction writes."""
    if operation.startswith(_WRITES_NO_REGISTER):
        return []
    # The first operand may be a predicate.
    first = next((found for found in map(_REGISTER.fullmatch, operands[:2]) if found), None)
    if first is None:
        return []
    if operation.startswith("HGMMA"):
        count = int(operation.split("x")[1]) // 2
    elif "128" in operation or operation.endswith(".4"):
        count = 4
    else:
        count = 2 if "64" in operation or "WIDE" in operation or operation == "CS2R" else 1
    return [f"{first[1]}{int(first[2]) + i}" for i in range(count)]


def faulty_descriptors(sass: str) -> list[str]:
    """The instructions that add a descriptor's high word to a register that does not hold 0."""
    zeros: set[str] = set()
    faults = []
    for line in sass.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        predicate, operation = found[1], found[2]
        operands = [operand.strip().removesuffix(".reuse") for operand in found[3].split(",")]
        if operation in ("UIADD3.X", "IADD3.X") and any(_is_high_word(operand) for operand in operands):
            sources = [operand for operand in operands[1:] if _REGISTER.fullmatch(operand)]
            if any(source not in zeros for source in sources):
                faults.append(found[0].strip())
        written = _written(operation, operands)
        if operands[1:] == _WAYS_TO_WRITE_0.get(operation) and not predicate:
            zeros.update(written)
        else:
            zeros.difference_update(written)
    return faults
