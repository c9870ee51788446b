"""Searches PTX for a fault of LLVM, and for global accesses before a kernel's wait; needs no GPU.

LLVM in Triton 3.6 joins pairs of 32-bit numbers into one of 64 bits. From the thread's number, t, it once made the pair
(t << 28, (t & 3) << 1). The first number is unused padding, so LLVM lets it overflow, but the overflow changes the
second:

    mul.wide.u32    %rd36, %r4, 268435456;      t << 28, up to 38 bits
    shl.b64         %rd38, %rd37, 33;           (t & 3) << 1 in the upper half
    or.b64          %rd39, %rd36, %rd38;
    mov.b64         {_, %r18}, %rd39;           (t & 3) << 1, or t >> 4

This number was a column, so a mask of the diagonal had holes. The same source in another order compiles correctly, so
the search is for the form above in the compiled code. It reads from top to bottom, as if no branch were taken.
"""

import re

_GLOBAL_ACCESS = re.compile(r"\b(?:ld\.global|st\.global|red\.global|atom\.global|cp\.async\.c[ag])")
_INSTRUCTION = re.compile(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+(%\w+), (.*);")
_NUMBER = re.compile(r"\d+")
_HALF = 32
# A program has at most 1024 threads.
_THREAD_BITS = 10


def _bits(operation: str, sources: list[str], known: dict[str, int]) -> int:
    """The most bits that an instruction's result needs, which may exceed its register; 32 or 64 if not known."""
    first, last = sources[0], sources[-1]
    bits = known.get(first, 64 if first.startswith("%rd") else _HALF)
    if operation.startswith("mov.") and first == "%tid.x":
        return _THREAD_BITS
    if operation == "cvt.u64.u32":
        return bits
    if operation == "bfe.u32" and _NUMBER.fullmatch(last):
        return int(last)
    if _NUMBER.fullmatch(last) and len(sources) == 2:
        number = int(last)
        if operation == "mul.wide.u32":
            return bits + max(number - 1, 0).bit_length()
        if operation.startswith("and."):
            return min(bits, number.bit_length())
        if operation.startswith("shl."):
            return bits + number if operation == "shl.b64" else min(bits + number, _HALF)
        if operation in ("shr.u32", "shr.u64"):
            return max(bits - number, 0)
    return 64 if operation.endswith("64") else _HALF


def overflowing_pairs(ptx: str) -> list[str]:
    """The instructions that join two 32-bit numbers if the lower one, shifted, may overflow into the upper one."""
    bits: dict[str, int] = {}
    shifted: set[str] = set()
    upper: set[str] = set()
    faults = []
    for line in ptx.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        operation, target = found[1], found[2]
        sources = [source.strip() for source in found[3].split(",")]
        if operation in ("or.b64", "add.s64") and len(upper.intersection(sources)) == 1:
            (other,) = set(sources) - upper or {""}
            if other in shifted and bits[other] > _HALF:
                faults.append(line.strip())
        bits[target] = _bits(operation, sources, bits)
        shifted.discard(target)
        upper.discard(target)
        if operation in ("mul.wide.u32", "shl.b64") and _NUMBER.fullmatch(sources[-1]):
            is_upper = operation == "shl.b64" and int(sources[-1]) >= _HALF
            (upper if is_upper else shifted).add(target)
    return faults


def waits_first(ptx: str, *allowed: str) -> bool:
    """Whether a kernel waits for the previous one (`griddepcontrol.wait`) before its first access to global memory.

    `allowed`: instructions that may come before, by their beginning.
    """
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    return bool(wait) and all(found[0].startswith(allowed) for found in _GLOBAL_ACCESS.finditer(before))
