"""Launch choices: one table, keyed by what decides registers and shared memory, with what is behind each row."""

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from gla_kernels.limits import NARROW_HEAD_DIMS, WALKED_KEYS, WIDE_KEY_BLOCK, WIDE_MULTIPLE, padded


@dataclass(frozen=True)
class Tile:
    """How the kernels of one pass are cut: key and value columns a program, warps, stages of the loads' pipeline.

    `registers`: as many a thread at most; None leaves it to the compiler.
    """

    block_k: int
    block_v: int
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What of it Triton's compiler is told."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})


@dataclass(frozen=True)
class LaunchPlan:
    """What a call uses: which kernels do the plain form, rows of a chunk, and the tiles of both passes.

    Chunks are shared by forward and backward, because the backward reads the states that the forward stored.
    """

    family: Literal["triton", "hopper", "wide"]
    chunk_size: int
    forward: Tile
    backward: Tile


def plan_text(plan: LaunchPlan) -> str:
    """The plan in a line, as operators take it and records show it."""
    tiles = (f"{t.block_k}x{t.block_v} {t.warps} warps {t.stages} stages" for t in (plan.forward, plan.backward))
    return f"{plan.family} C={plan.chunk_size}: " + " / ".join(tiles)


@cache
def parse_plan(text: str) -> LaunchPlan:
    """The way back of `plan_text`. Raises ValueError."""
    tile = r"(\d+)x(\d+) (\d+) warps (\d+) stages"
    found = re.fullmatch(rf"(triton|hopper|wide) C=(\d+): {tile} / {tile}", text)
    if found is None:
        raise ValueError(f"plan: got {text!r}; it needs the form of {plan_text(HOPPER)!r}")
    family, chunk_size, *numbers = found.groups()
    sizes = [int(number) for number in numbers]
    return LaunchPlan(family, int(chunk_size), Tile(*sizes[:4]), Tile(*sizes[4:]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Operands:
    """Type of the products' operands and how float32 ones are multiplied (`input_precision` of `tl.dot`)."""

    dtype: torch.dtype
    precision: str


# Rows of a subchunk in the exact kernels, which cut every chunk further: as few as a product takes.
EXACT_ROWS = 16

# Multiprocessors of an H100 or H200: how many programs of the wide kernels run at once.
MULTIPROCESSORS = 132
# Programs of the exact kernels, which fill a multiprocessor each and mostly have nothing to do. A prime number: what is
# flagged comes at regular distances (a head in every sequence), and every so-many-th is a program's.
EXACT_PROGRAMS = 131

# The Gluon kernels for narrow heads: programs of 4 warps, two a multiprocessor, loads one chunk ahead. What was tried
# and measured on the way to them is in kernels/NOTES.md.
HOPPER = LaunchPlan("hopper", 64, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
# How many programs of these kernels run at once.
HOPPER_PROGRAMS = 2 * MULTIPROCESSORS
# The Gluon kernels for wide heads: 8 warps and one program a multiprocessor. Two warpgroups share the rows of a state
# of 128 x 128; the kernels that go over a chunk's states (the second tile) hold both directions' and take half of it.
# With 256 columns q, k and g are read once, not twice: at B, T, H, K, V = 32, 2k, 4, 128, 256 the recurrence takes
# 160 us in place of 189, the forward 193 in place of 250, or 285 in place of 291 where it keeps states (H200, Triton
# 3.6).
_WIDE_STATE = Tile(WIDE_KEY_BLOCK, 128, 8, 2)
_WIDE_CHUNK = Tile(WIDE_KEY_BLOCK, 64, 8, 2)


# The one kernel of all gradients: at B, T, H, K, V = 4, 4k, 64, 128, 128 1.36 ms in place of the recurrence's and the
# gradients' 1.75. With 100 programs forward and backward gain a twentieth, with 70 they lose an eighth (by hand).
WIDE_BACKWARD = Tile(WIDE_KEY_BLOCK, 128, 8, 2)


@cache
def wide_frames_tile(gated: bool) -> Tile:
    """The tile of `wide_frames`.

    With gates and no bound on its registers the compiler takes 142, and one program fills a multiprocessor in place of
    two. Without gates it takes 66 unbound, 88 bound.
    """
    return Tile(WIDE_KEY_BLOCK, 64, 8, 1, registers=128 if gated else None)


@cache
def wide_recurrence_tile(V: int) -> Tile:
    """The tile of `wide_recurrence` for values of V columns."""
    return replace(_WIDE_STATE, block_v=256 if V % 256 == 0 else 128 if V > 64 else 64)


@cache
def narrower_state_tile(state: Tile) -> Tile:
    """The tile of a kernel that walks the state where programs with the wider `state` would leave the GPU idle."""
    return replace(state, block_v=min(state.block_v, 128))


@cache
def wide_readout_tile(K: int) -> Tile:
    """The tile of `wide_readout`, which holds all of a chunk's key columns in shared memory: 224 KiB at K = 384."""
    return _WIDE_CHUNK if K <= 384 else replace(_WIDE_CHUNK, block_v=32)


@cache
def hopper_device(index: int | None) -> bool:
    """Whether CUDA device `index` (None: the current one) runs the Gluon kernels: sm_90, and a Triton with Gluon."""
    if find_spec("triton.experimental.gluon.language.nvidia.hopper") is None:
        return False
    return torch.cuda.get_device_capability(index) == (9, 0)


def operands(dtype: torch.dtype) -> Operands:
    """Operands for inputs of `dtype`. float16 has too small a range for the scaled operands and goes through tf32."""
    if dtype == torch.bfloat16:
        return Operands(torch.bfloat16, "tf32")
    return Operands(torch.float32, "tf32" if dtype == torch.float16 else "tf32x3")


@cache
def exact_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """The exact kernels' tile: up to 128 keys the plain ones' columns, without a pipeline (it spills less).

    Above, two states of 64 columns are more than 8 warps can hold beside the rest.
    """
    tile = replace(triton_plan(K, V, dtype, None).backward, warps=8, stages=1)
    return tile if tile.block_k <= 128 else replace(tile, block_v=min(tile.block_v, 32), warps=16)


def plan(
    K: int,
    V: int,
    dtype: torch.dtype,
    chunk_size: int | None = None,
    device: torch.device | None = None,
    gated: bool = True,
) -> LaunchPlan:
    """The launch plan for head dims K and V (at most 512) and inputs of `dtype`; `chunk_size` overrides the table's."""
    on_hopper = device is not None and device.type == "cuda" and hopper_device(device.index)
    special = hopper_plan(K, V, dtype, chunk_size) if on_hopper else None
    return special or triton_plan(K, V, dtype, chunk_size, gated)


@cache
def hopper_plan(K: int, V: int, dtype: torch.dtype, chunk_size: int | None = None) -> LaunchPlan | None:
    """The row of the Gluon kernels, or None where they do not take such a call."""
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
def triton_plan(K: int, V: int, dtype: torch.dtype, chunk_size: int | None, gated: bool = True) -> LaunchPlan:
    """The plain-Triton kernels' row.

    Chosen by forward + backward with states kept (H200, Triton 3.6). bfloat16, K = V = 64, H = 16, T = 4096, with 8
    warps in the backward or 4, in ms (B = 32, with gates: results/h200-chunk-sweep and h200-chunk-sweep-4-warps;
    without: a run as old as the second, and that; the rest by hand):

                 B = 32, gates    no gates       B = 8, gates
        C = 16   4.43 or 3.84     1.85 or 1.44   1.24 or 1.58
        C = 32   4.03 or 4.67     1.57 or 1.26   1.10 or 1.53

    With few programs 8 warps win, and a multiprocessor holds one program of 8 or two of 4. At B = 32 with gates the
    kernel had changed in between, which was 7 % at C = 128, where the tiles are the same. The other rows were compared
    at B * H of 64 and 128: float16, K = V = 64, C=16 2.32, or 2.98 with a stage less in both passes (float32 has the
    same row, untimed); bfloat16, K = V = 128, C=16 3.13, or 3.36 with a stage less in the backward. float32 operands
    take twice the registers: longer chunks, and K > 256, are chosen to fit, not by time.
    """
    wide, block_v = padded(K), min(padded(V), 64)
    half = dtype == torch.bfloat16
    chunk = chunk_size or (32 if half and wide <= 64 else 16)
    deep = chunk <= 16
    if wide <= 64 and half:
        short = chunk <= 32
        backward = Tile(wide, block_v, 4 if short and not gated else 8, 3 if short else 2)
        return LaunchPlan("triton", chunk, Tile(wide, block_v, 4, 3), backward)
    if wide <= 64:
        backward = Tile(wide, block_v, 4 if chunk <= 32 else 8, 2 if deep else 1)
        return LaunchPlan("triton", chunk, Tile(wide, block_v, 4, 3 if deep else 2), backward)
    if wide <= 128 and half:
        return LaunchPlan("triton", chunk, Tile(wide, block_v, 4, 3), Tile(wide, block_v, 8, 3 if deep else 2))
    if wide <= 128:
        return LaunchPlan("triton", chunk, Tile(wide, block_v, 8, 2), Tile(wide, block_v, 8, 1))
    if wide <= 256 and half:
        return LaunchPlan("triton", chunk, Tile(wide, block_v, 8, 2), Tile(wide, block_v, 8, 1))
    tile = Tile(wide, min(block_v, 32), 8, 1)
    return LaunchPlan("triton", chunk, tile, tile)
