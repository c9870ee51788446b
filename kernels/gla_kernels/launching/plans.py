"""Launch plans: a table by head dims, dtype and gates, with the measurements behind its choices."""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from gla_kernels.launching.device import gpu_of, hopper_device
from gla_kernels.limits import (
    LARGE_SHARED_BYTES,
    NARROW_HEAD_DIMS,
    SHARED_BYTES,
    SMALL_SHARED_BYTES,
    WALKED_KEYS,
    WIDE_KEY_BLOCK,
    WIDE_MULTIPLE,
    padded,
)


@dataclass(frozen=True)
class Tile:
    """Size of the programs of one pass: key and value columns per program, warps, stages of the loads' pipeline.

    Of a scan, the stages are how many pieces it loads together.

    `registers`: the most that a thread may use on NVIDIA's GPUs; None leaves it to the compiler.
    """

    block_k: int
    block_v: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """The tile's options for Triton's compiler, on the GPUs that this torch is made for."""
        return self.options_on(amd=torch.version.hip is not None)

    def options_on(self, amd: bool) -> dict[str, int]:
        """The same for AMD's GPUs, whose compiler takes no limit on registers, or for NVIDIA's."""
        options = {"num_warps": self.warps}
        return options if self.registers is None or amd else options | {"maxnreg": self.registers}


@dataclass(frozen=True)
class LaunchPlan:
    """What a call runs with: the family of kernels for the plain form, tokens per chunk, and the tiles of both passes.

    Forward and backward use the same chunk size, because the backward reads the states that the forward stored.
    """

    family: Literal["triton", "hopper", "wide"]
    chunk_size: int
    forward: Tile
    backward: Tile


def plan_text(plan: LaunchPlan) -> str:
    """The plan as one line of text, as operators take it and records show it."""
    return f"{plan.family} C={plan.chunk_size}: {_tile_text(plan.forward)} / {_tile_text(plan.backward)}"


def _tile_text(tile: Tile) -> str:
    text = f"{tile.block_k}x{tile.block_v} {tile.warps} warps {tile.stages} stages"
    return text if tile.registers is None else f"{text} {tile.registers} registers"


@cache
def parse_plan(text: str) -> LaunchPlan:
    """The inverse of `plan_text`. Raises ValueError."""
    tile = r"(\d+)x(\d+) (\d+) warps (\d+) stages(?: (\d+) registers)?"
    found = re.fullmatch(rf"(triton|hopper|wide) C=(\d+): {tile} / {tile}", text)
    if found is None:
        raise ValueError(f"plan: got {text!r}; it needs the form of {plan_text(HOPPER)!r}")
    family, chunk_size, *numbers = found.groups()
    sizes = [number and int(number) for number in numbers]
    return LaunchPlan(family, int(chunk_size), Tile(*sizes[:5]), Tile(*sizes[5:]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Operands:
    """Dtype of the products' operands, and how float32 operands are multiplied (`input_precision` of `tl.dot`)."""

    dtype: torch.dtype
    precision: str


# Tokens per subchunk in the exact kernels, which divide every chunk further: the least that a product takes.
EXACT_ROWS = 16

# The Gluon kernels for narrow heads: programs of 4 warps, two per multiprocessor. What was tried and measured on the
# way to them is in kernels/NOTES.md.
HOPPER = LaunchPlan("hopper", 64, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
# The fewest pieces that a sequence of narrow heads is cut into, on average. With two, the states at the borders cost
# what more programs save; with three, 88 heads of 8192 tokens took 0.71 ms in place of 0.95 forward + backward.
LEAST_NARROW_PIECES = 3


def pieces_gain(chunks: int, heads: int, multiprocessors: int, gates: bool) -> bool:
    """Whether the forward of so many heads of all sequences gains if sequences of so many chunks are cut.

    Without gates, with one per head and with one per channel, forwards of whole sequences take 4, 6 and 8 us, and 0.95,
    1.3 and 2.0 per chunk; cut ones 10, 12 and 15 us, and 0.014, 0.016 and 0.027 per chunk of all heads (H200, 16 to 64
    heads of 4 to 16 chunks). So cutting gains from 6, 5 and 3.5 chunks on, divided by 1 - heads / (67, 79 and 75); the
    numbers below are near these. A backward gains nearly always: it takes twice as long per chunk.
    """
    least, share = (4.5, 0.57) if gates else (6.5, 0.51)
    return chunks * (1 - heads / (share * multiprocessors)) > least


# The Gluon kernels for wide heads: 8 warps and one program per multiprocessor. Two warpgroups share the rows of a state
# of 128 x 128. The second tile is for kernels that read a chunk's stored states; they hold the state and its gradient,
# so it has half of the columns. A state of 256 columns reads q, k and g once, not twice: at B, T, H, K, V =
# 32, 2k, 4, 128, 256 the recurrence takes 160 us instead of 189, the forward 193 instead of 250, or 285 instead of 291
# if it keeps states (H200, Triton 3.6).
_WIDE_STATE = Tile(WIDE_KEY_BLOCK, 128, 8, 2)
_WIDE_CHUNK = Tile(WIDE_KEY_BLOCK, 64, 8, 2)


# The kernel that computes all gradients at once: at B, T, H, K, V = 4, 4k, 64, 128, 128 1.36 ms instead of 1.75 for
# recurrence and gradients in two kernels. With 100 programs, forward + backward gains a twentieth; with 70, it loses an
# eighth (timed by hand).
WIDE_BACKWARD = Tile(WIDE_KEY_BLOCK, 128, 8, 2)


@cache
def wide_frames_tile(gated: bool) -> Tile:
    """The tile of `wide_frames`.

    With gates and no limit on registers the compiler uses 142, and a multiprocessor holds one program instead of two.
    Without gates it uses 66 if unlimited, but 88 if limited.
    """
    return Tile(WIDE_KEY_BLOCK, 64, 8, 1, registers=128 if gated else None)


@cache
def wide_recurrence_tile(V: int) -> Tile:
    """The tile of `wide_recurrence` for values of V columns."""
    return replace(_WIDE_STATE, block_v=256 if V % 256 == 0 else 128 if V > 64 else 64)


@cache
def recurrence_stages(block_v: int, gated: bool, alone: bool) -> int:
    """Chunks that a program of `wide_recurrence` has in shared memory at once, one of them in use.

    `alone`: there are multiprocessors enough for all programs. Then, if it stores states, it takes so much memory that
    no second program fits beside it: programs start while the kernel before ends, and would come to lie in twos beside
    multiprocessors without any. With gates per channel it does anyway, and arithmetic takes longer than copies.
    """
    if gated:
        return 2
    if block_v <= 64:
        return 6 if alone else 4
    return 3 if alone or block_v > 128 else 2


@cache
def narrower_state_tile(state: Tile) -> Tile:
    """`state`, the tile of a kernel that walks the state, or the one of 128 columns per program if that has more."""
    return replace(state, block_v=min(state.block_v, 128))


@cache
def wide_readout_tile(K: int) -> Tile:
    """The tile of `wide_readout`, which keeps all key columns of a chunk in shared memory: 224 KiB at K = 384."""
    return _WIDE_CHUNK if K <= 384 else replace(_WIDE_CHUNK, block_v=32)


@cache
def wide_gradients_tile(V: int, gated: bool, chunk: Tile) -> Tile:
    """The tile of `wide_gradients`: `chunk`, the plan's, with fewer registers if two programs fit a multiprocessor.

    With one block of values they take 88 KiB, 105 with a gate per head, but 120 with one per channel (`gated`).
    """
    return replace(chunk, registers=128) if chunk.block_v >= V and not gated else chunk


def operands(dtype: torch.dtype, amd: bool = torch.version.hip is not None) -> Operands:
    """Operands for inputs of `dtype`. The range of float16 is too small for scaled operands: it goes through tf32.

    `amd`: for AMD's GPUs, which multiply float32 as it is.
    """
    if dtype == torch.bfloat16:
        return Operands(torch.bfloat16, "ieee" if amd else "tf32")
    if amd:
        return Operands(torch.float32, "ieee")
    return Operands(torch.float32, "tf32" if dtype == torch.float16 else "tf32x3")


@cache
def exact_tile(K: int, V: int, plan: LaunchPlan) -> Tile:
    """The exact kernels' tile, without a pipeline (spills less).

    In the portable family it has the plan's blocks of key columns, and little shared memory. With 4 warps ptxas 12.8
    gives the backward of float32 heads of 64 only 32 registers a thread on sm_80, and 3.6 KB of stack; with 8 it takes
    0.3 KB. The Gluon kernels' o and dv are in one part, so there a program has all key columns: above 128, 8 warps
    cannot hold two states of 64 value columns beside the rest.
    """
    if plan.family == "triton":
        block_k = plan.backward.block_k
        return Tile(block_k, min(padded(V), 64 if block_k <= 64 else 16), 8, 1)
    wide = padded(K)
    return Tile(wide, min(padded(V), 64), 8, 1) if wide <= 128 else Tile(wide, min(padded(V), 32), 16, 1)


# The tile of the kernel that sets rows to 0: elements at a time are its value columns.
TAIL = Tile(1, 1024, 4, 1)
# The kernel that sums a gate per head; block_v is heads.
SUMS = Tile(1, 16, 4, 1)
# The tile of the scan over pieces: elements of a state are its value columns.
SCAN = Tile(1, 1024, 8, 8)
# The same for sequences of many pieces, so of few heads: more and smaller programs. At 1, 32k, 4, 64, 64, 66 pieces,
# forward + backward takes 0.094 ms in place of 0.100 without gates, 0.106 in place of 0.114 with a gate per head. If
# 32 pieces are loaded together, calls with gates take longer. This tile is slower at 8, 8k, 4, 128, 128, with 4 pieces.
SCAN_OF_MANY = Tile(1, 256, 2, 16)


def scan_tile(pieces: int) -> Tile:
    """The tile of the scan over so many pieces per sequence."""
    return SCAN_OF_MANY if pieces > SCAN.stages else SCAN


# Elements of a state per warp of the kernel that goes token by token: 64 registers of each thread.
_ELEMENTS_PER_WARP = 2048


@cache
def recurrent_tile(K: int, V: int) -> Tile:
    """The tile of the kernel that goes token by token: all key columns, and value columns for whole lines of memory.

    Loads go two tokens ahead, because a token's products take less time than its loads.
    """
    block_k, block_v = padded(K), min(padded(V), 32)
    return Tile(block_k, block_v, max(1, block_k * block_v // _ELEMENTS_PER_WARP), 3)


# The tiles of these kernels in the Gluon families, forward and backward.
_STRONG_HOPPER = Tile(64, 64, 4, 1), Tile(32, 64, 4, 1)


@cache
def strong_tile(K: int, V: int, plan: LaunchPlan, backward: bool) -> Tile:
    """The tile of the kernels for chunks with strong gates, which go through the columns of a chunk block by block.

    With four warps, a product of 64 rows of the portable kernels would be `wgmma`, and ptxas 12.8 gives those of so
    large a kernel wrong descriptors: they read shared memory that is not there (kernels/NOTES.md, "Faults of the
    compiler").
    """
    if plan.family != "triton":
        return _STRONG_HOPPER[backward]
    return Tile(min(padded(K), 32), min(padded(V), 64), 2 if plan.chunk_size >= 64 else 4, 1)


@cache
def strong_shares(K: int) -> int:
    """How many programs of the Gluon forward may share a chunk: its steps are half of the levels for 64 key columns."""
    keys = _STRONG_HOPPER[False].block_k
    return 4 if keys < K else 2


def plan(
    K: int,
    V: int,
    dtype: torch.dtype,
    chunk_size: int | None = None,
    device: torch.device | None = None,
    gated: bool = True,
) -> LaunchPlan:
    """The launch plan for K of at most 512, V of at most 1024 and inputs of `dtype`, or with the given chunk size."""
    on_hopper = device is not None and device.type == "cuda" and hopper_device(device.index)
    special = hopper_plan(K, V, dtype, chunk_size) if on_hopper else None
    return special or triton_plan(K, V, dtype, chunk_size, gated, gpu_of(device).shared_bytes)


@cache
def hopper_plan(K: int, V: int, dtype: torch.dtype, chunk_size: int | None = None) -> LaunchPlan | None:
    """The plan of the Gluon kernels, or None if they do not support such a call."""
    if dtype != torch.bfloat16 or chunk_size not in (None, HOPPER.chunk_size):
        return None
    if K in NARROW_HEAD_DIMS and V in NARROW_HEAD_DIMS:
        return HOPPER
    if K % WIDE_MULTIPLE or V % WIDE_MULTIPLE:
        return None
    forward = wide_recurrence_tile(V)
    if WIDE_KEY_BLOCK < K <= WALKED_KEYS:
        forward = replace(narrower_state_tile(forward), block_k=WALKED_KEYS)
    return LaunchPlan("wide", HOPPER.chunk_size, forward, _WIDE_CHUNK)


@cache
def triton_plan(
    K: int, V: int, dtype: torch.dtype, chunk_size: int | None, gated: bool = True, shared_bytes: int = SHARED_BYTES
) -> LaunchPlan:
    """The plan of the portable Triton kernels, on a GPU whose programs may have `shared_bytes` of shared memory.

    A program handles a block of key columns, because a tile of more columns spills: with float32 operands on GPUs
    without Hopper's `wgmma` even 64 columns spill 1.5 KB a thread in the backward, 128 spill 10, and 32 less than 0.8.

    With bfloat16 the table was chosen by the time of forward + backward with states kept (H200, Triton 3.6). In ms, for
    K = V = 64, H = 16, T = 4096, with 8 warps in the backward or 4 (B = 32, with gates: an earlier
    results/h200-chunk-sweep and h200-chunk-sweep-4-warps; without gates: a run of the same age as the second, and the
    second; the rest by hand):

                 B = 32, gates    no gates       B = 8, gates
        C = 16   4.43 or 3.84     1.85 or 1.44   1.24 or 1.58
        C = 32   4.03 or 4.67     1.57 or 1.26   1.10 or 1.53

    With few programs 8 warps are faster; a multiprocessor holds one program of 8 warps or two of 4. K = V = 128, C = 16
    at B * H of 64 and 128 takes 3.13, or 3.36 with a stage less in the backward. The plans of the chunk sizes chosen
    here fit every GPU (64 KiB on AMD's, 99 KiB on the smaller ones of NVIDIA's); longer chunks have
    fewer stages, and may use all registers, if shared memory is smaller.
    """
    half = dtype == torch.bfloat16
    block_k, block_v = min(padded(K), 128 if half else 32), min(padded(V), 64)
    usual = 32 if half and block_k <= 64 else 16
    chunk = chunk_size or usual
    if half and block_k <= 64:
        short = chunk <= 32
        forward = Tile(block_k, block_v, 4, 3)
        backward = Tile(block_k, block_v, 4 if short and not gated else 8, 3 if short else 2)
    elif half:
        forward, backward = Tile(block_k, block_v, 4, 3), Tile(block_k, block_v, 8, 3 if chunk <= 16 else 2)
    else:
        forward = Tile(block_k, block_v, 4, 3 if chunk <= 16 else 2)
        backward = Tile(block_k, block_v, 4, 2 if chunk <= 16 else 1)
    if shared_bytes < SHARED_BYTES:
        # With three stages, ptxas gives the backward of C = 32 only 32 registers a thread on sm_80.
        most = 1 if chunk > usual and shared_bytes < LARGE_SHARED_BYTES else 2
        forward, backward = (replace(tile, stages=min(tile.stages, most)) for tile in (forward, backward))
    if shared_bytes <= SMALL_SHARED_BYTES:
        # As on AMD's CDNA 3, whose warps have 64 threads: four have as many as eight of NVIDIA's, and with eight a
        # thread has half the registers, and spills more.
        backward = replace(backward, warps=4)
    elif chunk > usual and shared_bytes < SHARED_BYTES:
        # ptxas 12.8 gives some of these only 32 registers per thread, unless it may take all. On Hopper only float32 in
        # chunks of 32 needs it, and some take longer with it (kernels/NOTES.md, "Long chunks").
        forward, backward = (replace(tile, registers=255) for tile in (forward, backward))
    return LaunchPlan("triton", chunk, forward, backward)
