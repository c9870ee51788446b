"""What a compiled kernel's machine code says: its size, its products on tensor cores, and how many programs fit."""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass

# The opcodes of products on tensor cores, with their shapes and types: NVIDIA's machine code, AMD's assembly.
_PRODUCTS = re.compile(r"\b((?:HGMMA|QGMMA|IGMMA|HMMA|IMMA|DMMA|OMMA|UTC\w*MMA)[\w.]*|v_mfma_\w+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", re.MULTILINE)
_INSTRUCTION_BYTES = 16
# Registers are given to warps in units of so many per thread, and some shared memory of a program is the system's.
_REGISTER_UNIT, _SYSTEM_BYTES = 8, 1024


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor holds: warps, programs, bytes of shared memory, registers of 32 bits."""

    warps: int
    programs: int
    shared_bytes: int
    registers: int = 65536


# CUDA programming guide, technical specifications per compute capability.
MULTIPROCESSORS = {
    "80": Multiprocessor(64, 32, 164 * 1024),
    "86": Multiprocessor(48, 16, 100 * 1024),
    "89": Multiprocessor(48, 24, 100 * 1024),
    "90": Multiprocessor(64, 32, 228 * 1024),
    "100": Multiprocessor(64, 32, 228 * 1024),
    "120": Multiprocessor(48, 24, 100 * 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """Programs that a multiprocessor holds at once, their share of its warps, and what allows no more."""

    programs: int
    share: float
    limit: str


def occupancy(arch: str, warps: int, registers: int, shared_bytes: int) -> Occupancy | None:
    """The occupancy of programs of so many warps, registers per thread and bytes; None for an unknown architecture."""
    own = MULTIPROCESSORS.get(arch)
    if own is None:
        return None
    per_thread = -(-max(registers, 1) // _REGISTER_UNIT) * _REGISTER_UNIT
    fits = {
        "registers": own.registers // (per_thread * 32 * warps),
        "shared memory": own.shared_bytes // (shared_bytes + _SYSTEM_BYTES),
        "warps": own.warps // warps,
        "programs": own.programs,
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit], fits[limit] * warps / own.warps, limit)


def products(code: str) -> dict[str, int]:
    """How many instructions of each kind multiply on tensor cores, from machine code as text."""
    return dict(sorted(Counter(_PRODUCTS.findall(code)).items()))


def code_bytes(sass: str) -> int:
    """Bytes of NVIDIA's machine code as text."""
    return len(_INSTRUCTION.findall(sass)) * _INSTRUCTION_BYTES


def code_hash(code: str) -> str:
    """A hash of machine code as text: two kernels with the same have the same instructions."""
    lines = (" ".join(line.split()) for line in code.splitlines())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
