"""Shared memory between threads and products on a CPU: what only a fence or a barrier makes safe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from partitions import Partition


@dataclass
class _Write:
    """What a group of warps has written to shared memory, and whose fences are behind it."""

    begin: int  # addresses
    end: int
    writer: Partition
    fenced_by: list[Partition] = field(default_factory=list)

    def is_seen_by(self, reader: Partition) -> bool:
        return any(each is self.writer or each is reader for each in self.fenced_by)


@dataclass
class Hazards:
    """Fences and barriers that a program's shared memory needs between threads and products.

    Products see what threads have written behind a fence alone. And behind a wait for a product, other warps may not be
    through with theirs: only a barrier tells, before the tile is written again. Triton may add one, but is content with
    one from before the wait.
    """

    writes: dict[Any, _Write] = field(default_factory=dict)  # the last one of every tile
    reads: list[tuple[int, int, Partition]] = field(default_factory=list)  # by products, up to the next barrier

    def check_write(self, tile: torch.Tensor) -> None:
        begin, end = _addresses(tile)
        free = all(end <= of_begin or of_end <= begin for of_begin, of_end, _ in self.reads)
        assert free, "another warp's product may still read what is written"

    def note_write(self, tile: torch.Tensor, writer: Partition) -> None:
        begin, end = _addresses(tile)
        self.writes[begin, tile.shape, tile.stride()] = _Write(begin, end, writer)

    def check_read(self, tile: torch.Tensor, reader: Partition) -> None:
        begin, end = _addresses(tile)
        for write in self.writes.values():
            if write.begin < end and begin < write.end:
                assert write.is_seen_by(reader), "a product reads what no fence is behind"

    def note_read(self, tile: torch.Tensor, reader: Partition) -> None:
        self.reads.append((*_addresses(tile), reader))

    def fence(self, by: Partition) -> None:
        for write in self.writes.values():
            write.fenced_by.append(by)

    def barrier(self, of: Partition) -> None:
        self.reads = [read for read in self.reads if read[2] is not of]


def _addresses(tile: torch.Tensor) -> tuple[int, int]:
    """From a tile's first byte to behind its last."""
    begin = tile.data_ptr()
    if tile.is_contiguous():
        return begin, begin + tile.nbytes
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tile.shape, tile.stride(), strict=True))
    return begin, begin + elements * tile.element_size()
