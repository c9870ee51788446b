"""Launch choices: one table, keyed by what decides registers and shared memory, with what is behind each row."""

from dataclasses import dataclass, replace

import torch

from gla_kernels.limits import padded


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


def exact_tile(tile: Tile) -> Tile:
    """The exact kernel's tile beside the plain one's: the same columns, without a pipeline (it spills less)."""
    return Tile(tile.block_v, 8, 1)


def plan(K: int, V: int, dtype: torch.dtype, chunk_size: int | None = None) -> LaunchPlan:
    """The launch plan for head dims K and V (at most 256) and inputs of `dtype`; `chunk_size` overrides the table's.

    Rows of K <= 64 are chosen by forward + backward, states kept, in results/h200-chunk-sweep (H200, bfloat16,
    Triton 3.6), in ms: C=16 2.86, C=32 3.41, C=64 5.50 (the backward spills); forward alone 1.18, 0.78, 0.61. Wider
    rows come from the same comparison by hand, of which no run is kept; C=16 with 8 warps in backward came out first.

    The short chunk has the widest range of gates in the plain form, too. float32 operands take twice the registers:
    their rows are chosen to fit, not by time.
    """
    chunk = chunk_size or 16
    wide, block_v = padded(K), min(padded(V), 64)
    half = dtype == torch.bfloat16
    if wide <= 64:
        backward = Tile(block_v, 4 if chunk <= 32 else 8, 3 if chunk <= 32 else 2)
        return LaunchPlan(chunk, Tile(block_v, 4, 3 if half else 2), backward if half else replace(backward, stages=1))
    if wide <= 128:
        if half:
            return LaunchPlan(chunk, Tile(block_v, 4, 3), Tile(block_v, 8, 2))
        return LaunchPlan(chunk, Tile(block_v, 8, 2), Tile(block_v, 8, 1))
    if half:
        return LaunchPlan(chunk, Tile(block_v, 8, 2), Tile(block_v, 8, 1))
    tile = Tile(min(block_v, 32), 8, 1)
    return LaunchPlan(chunk, tile, tile)
