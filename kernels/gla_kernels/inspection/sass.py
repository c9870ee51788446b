"""Searches machine code for two faults of the assembler; needs no GPU.

`faulty_descriptors`: the high word of a `wgmma` descriptor is constant except for a carry. ptxas 12.8 (Triton 3.6) once
added it to the descriptor's low word instead of 0:

    UIADD3 UR5, UP0, UR15, 0x2, URZ                     low word + 2
    UMOV UR4, URZ
    UIADD3.X UR15, UR15, 0x40000040, URZ, UP0, !UPT     should read UR4

The product then reads shared memory with a wrong stride. The same source in another order compiles correctly, so no
rule for writing kernels avoids the fault; the search is in the compiled code. It reads from top to bottom, as if no
branch were taken.

`unwritten_registers`: of two branches whose products take the same descriptors, ptxas 12.8 has computed some in one
branch alone. The other then reads uniform registers that hold what was there before. The search follows branches.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

_LABEL = re.compile(r"(\.L_x_\d+):")
_PREDICATE = re.compile(r"U?P(\d|T)")
_UNIFORM = re.compile(r"UR(\d+)")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*[\w.]*)\s+(.*?);")
_REGISTER = re.compile(r"(U?R)(\d+)")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_WRITES_NO_REGISTER = ("ST", "RED.", "ISETP", "FSETP", "UISETP", "PLOP", "UPLOP", "BAR", "BRA", "R2P")
# An operation, behind "@" if it has a predicate, its operands, and the whole as text.
_Instruction = tuple[str, list[str], str]
# Instructions that write a uniform register, if it is their first operand, or the second behind a predicate.
_TO_UNIFORM_BEHIND_PREDICATE = ("R2UR", "ELECT")
_TO_UNIFORM = ("U", "S2UR", "VOTEU", "REDUX", "LDC", *_TO_UNIFORM_BEHIND_PREDICATE)
# Where a product has what is added to it, in 64 bits if it is "WIDE".
_ADDEND = 3
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


def unwritten_registers(sass: str) -> list[str]:
    """The instructions that read a uniform register that was not written on every way to them from a kernel's start.

    None of code without `wgmma`: other architectures have instructions that this does not know.
    """
    if "HGMMA" not in sass:
        return []
    labels, code = _parsed(sass)
    ways = [_followed_by(at, code, labels) for at in range(len(code))]
    effects = [_uniform_effects(operation, operands) for operation, operands, _ in code]
    written: list[frozenset[int] | None] = [None] * len(code)
    written[:1] = [frozenset()]
    waiting = [0] if code else []
    while waiting:
        at = waiting.pop()
        after = (written[at] or frozenset()) | effects[at][1]
        for following in ways[at]:
            before = written[following]
            merged = after if before is None else before & after
            if merged != before:
                written[following] = merged
                waiting.append(following)
    return [
        text for (_, _, text), (read, _), known in zip(code, effects, written, strict=True)
        if known is not None and not read <= known
    ]  # fmt: skip


def _parsed(sass: str) -> tuple[dict[str, int], list[_Instruction]]:
    """The number of the instruction behind each label, and the instructions."""
    labels: dict[str, int] = {}
    code: list[_Instruction] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        if found := _INSTRUCTION.match(line):
            operands = [operand.strip().removesuffix(".reuse") for operand in found[3].split(",")]
            code.append((("@" if found[1] else "") + found[2], operands, found[0].strip()))
    return labels, code


def _followed_by(at: int, code: list[_Instruction], labels: dict[str, int]) -> list[int]:
    """The numbers of the instructions that may come after one."""
    operation, operands, _ = code[at]
    # A branch may have its condition among its operands, before the label.
    ends = operation.startswith("EXIT") or (operation.startswith("BRA") and len(operands) == 1)
    following = [] if ends else [at + 1]
    if operation.removeprefix("@").startswith("BRA"):
        following += [place for label, place in labels.items() if f"({label})" in operands[-1]]
    return [place for place in following if place < len(code)]


def _uniform_effects(operation: str, operands: list[str]) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads, and those that it writes, also if under a predicate."""
    plain = operation.removeprefix("@")
    pair = plain.endswith(".64")
    read: set[int] = set()
    written: set[int] = set()
    # The first operand may be a predicate that is written as well.
    target = 1 if _PREDICATE.fullmatch(operands[0]) and plain.startswith(_TO_UNIFORM_BEHIND_PREDICATE) else 0
    for place, operand in enumerate(operands):
        for number in map(int, _UNIFORM.findall(operand)):
            if "gdesc" in operand:
                # A left operand in registers has no descriptor, which the first two registers would hold.
                in_registers = bool(_REGISTER.match(operands[1]))
                read |= set(range(number + 2 if in_registers else number, number + 4))
            elif place == target and plain.startswith(_TO_UNIFORM) and operand == f"UR{number}":
                written |= {number, number + 1} if pair or "WIDE" in plain else {number}
            else:
                added = "WIDE" in plain and place == _ADDEND
                two = added or f"desc[UR{number}]" in operand or (pair and plain.startswith("U"))
                read |= {number, number + 1} if two else {number}
    return read, written
