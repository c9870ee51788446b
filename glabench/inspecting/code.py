"""What a compiled kernel's machine code says: its size, its products on tensor cores, and how many programs fit."""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass

# The opcodes of products on tensor cores, with their shapes and types: NVIDIA's machine code, AMD's assembly.
_PRODUCTS = re.compile(r"\b((?:HGMMA|QGMMA|IGMMA|HMMA|IMMA|DMMA|OMMA|UTC\w*MMA)[\w.]*|v_mfma_\w+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", re.MULTILINE)
_INSTRUCTION_BYTES = 16
_AMD_BYTES = re.compile(r"^; codeLenInByte = (\d+)$", re.MULTILINE)
# Registers are given to warps in units of so many per thread.
_REGISTER_UNIT = 8
# Each of a multiprocessor's parts has schedulers and registers of its own; a warp stays in one.
_PARTS = 4


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor holds: warps, programs, bytes of shared memory, registers of 32 bits.

    A warp has so many threads; so many bytes of each program's shared memory are the system's.
    """

    warps: int
    programs: int
    shared_bytes: int
    registers: int = 65536
    threads: int = 32
    system_bytes: int = 1024
    # In which products add up on sm_100; Triton's programs allocate columns of it.
    tensor_columns: int = 512
    # AMD's compute units have barriers for so many programs, and programs of a single warp need none.
    barriers: int | None = None


# CUDA programming guide, technical specifications per compute capability; for AMD's compute units LLVM's
# AMDGPUBaseInfo.cpp (registers, waves and barriers per unit).
MULTIPROCESSORS = {
    "80": Multiprocessor(64, 32, 164 * 1024),
    "86": Multiprocessor(48, 16, 100 * 1024),
    "89": Multiprocessor(48, 24, 100 * 1024),
    "90": Multiprocessor(64, 32, 228 * 1024),
    "100": Multiprocessor(64, 32, 228 * 1024),
    "120": Multiprocessor(48, 24, 100 * 1024),
    "gfx942": Multiprocessor(32, 32, 64 * 1024, 131072, threads=64, system_bytes=0, barriers=16),
}


@dataclass(frozen=True)
class Occupancy:
    """Programs that a multiprocessor holds at once, their share of its warps, and what allows no more."""

    programs: int
    share: float
    limit: str


def occupancy(arch: str, warps: int, registers: int, shared_bytes: int, tensor_columns: int = 0) -> Occupancy | None:
    """The occupancy of programs of so many warps, registers per thread, bytes, and columns of tensor memory.

    None for an unknown architecture. Profiles do not tell these columns: on sm_100 fewer programs may fit.
    """
    own = MULTIPROCESSORS.get(arch)
    if own is None:
        return None
    per_warp = -(-max(registers, 1) // _REGISTER_UNIT) * _REGISTER_UNIT * own.threads
    fits = {
        "registers": own.registers // _PARTS // per_warp * _PARTS // warps,
        "shared memory": own.shared_bytes // max(1, shared_bytes + own.system_bytes),
        **({"tensor memory": own.tensor_columns // tensor_columns} if tensor_columns else {}),
        "warps": own.warps // warps,
        "programs": own.barriers if own.barriers and warps > 1 else own.programs,
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[limit], fits[limit] * warps / own.warps, limit)


def products(code: str) -> dict[str, int]:
    """How many instructions of each kind multiply on tensor cores, from machine code as text."""
    return dict(sorted(Counter(_PRODUCTS.findall(code)).items()))


def code_bytes(code: str) -> int:
    """Bytes of machine code, from NVIDIA's as text or AMD's assembly."""
    stated = _AMD_BYTES.search(code)
    return int(stated[1]) if stated else len(_INSTRUCTION.findall(code)) * _INSTRUCTION_BYTES


def amd_instructions(assembly: str) -> str:
    """AMD's assembly without comments, directives and data: those have paths and numbers of lines of the source."""
    kernel = assembly.partition(".Lfunc_begin0:")[2].partition(".amdhsa_kernel")[0]
    lines = (line.partition(";")[0].rstrip() for line in kernel.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\s+\.|\.Ltmp", line))


def code_hash(code: str) -> str:
    """A hash of machine code as text: two kernels with the same have the same instructions."""
    lines = (" ".join(line.split()) for line in code.splitlines())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
