"""Launch choices: one table, keyed by what decides registers and shared memory, with what is behind each row."""

from dataclasses import dataclass

import torch
import triton

CHUNK_SIZES = (16, 32, 64, 128)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Tile:
    """How the kernels of one pass are cut: value columns a program, warps, and stages of the loads' pipeline."""

    block_v: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LaunchPlan:
    """What a call uses: rows of a chunk, and the tiles of both passes.

    Chunks are shared by forward and backward, because the backward reads the states that the forward stored.
    """

    chunk_size: int
    forward: Tile
    backward: Tile


@dataclass(frozen=True)
class Operands:
    """Type of the products' operands and how float32 ones are multiplied (`input_precision` of `tl.dot`)."""

    dtype: torch.dtype
    precision: str


def operands(dtype: torch.dtype) -> Operands:
    """Operands for inputs of `dtype`. float16 has too small a range for the scaled operands and goes through tf32."""
    if dtype == torch.bfloat16:
        return Operands(torch.bfloat16, "tf32")
    return Operands(torch.float32, "tf32" if dtype == torch.float16 else "tf32x3")


def padded(size: int) -> int:
    """The tile width for `size` columns: the next power of two, at least the 16 that a product needs."""
    return max(16, triton.next_power_of_2(size))


def exact_tile(tile: Tile) -> Tile:
    """The exact kernel's tile beside the plain one's: the same columns, without a pipeline (it spills less)."""
    return Tile(tile.block_v, 8, 1)


def plan(K: int, V: int, dtype: torch.dtype, chunk_size: int | None = None) -> LaunchPlan:
    """The launch plan for head dims K and V (at most 256) and inputs of `dtype`; `chunk_size` overrides the table's.

    K <= 64, measured on an H200 (bfloat16, B=32 T=4096 H=16 K=V=64, ms forward / backward with states kept):
    C=16 4 warps 3 stages 1.15 / 1.74, C=32 4 warps 3 stages 0.78 / 2.68, C=64 4 warps 3 stages 0.60 and 8 warps
    2 stages 5.12. C=16 has the best sum, and the widest range of gates in the plain form. The other rows are chosen
    to fit registers and shared memory, not yet by time.
    """
    wide, narrow_v = padded(K), min(padded(V), 64)
    single = dtype == torch.bfloat16
    if wide <= 64:
        chunk = chunk_size or 16
        backward_warps, backward_stages = (4, 3) if chunk <= 32 else (8, 2)
        if not single:
            backward_stages = 1
        return LaunchPlan(chunk, Tile(narrow_v, 4, 3 if single else 2), Tile(narrow_v, backward_warps, backward_stages))
    if wide <= 128:
        return LaunchPlan(chunk_size or 32, Tile(narrow_v, 4 if single else 8, 2), Tile(narrow_v, 8, 1))
    tile = Tile(min(narrow_v, 64 if single else 32), 8, 1)
    return LaunchPlan(chunk_size or (32 if single else 16), tile, tile)
