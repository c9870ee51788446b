"""Parts of timed results that are kept until sampling is over, and compared then.

Every sample's parts are copied, and chance decides which copies stay. So nobody can know during a call whether its
result will be compared, nor make it unlikely by being slow to be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from glabench.measure.at_size import Parts, Region

if TYPE_CHECKING:
    from torch import Tensor

# How many samples stay: so many at most, fewer if they take more bytes, but one in any case.
_MOST, _MOST_BYTES = 5, 2**30


@dataclass(frozen=True)
class Kept:
    """Parts of one sample's results, and the seed of the inputs that it had."""

    seed: int
    regions: Sequence[Region]
    parts: Sequence[Parts]
    # Whole gradients that parts share, by the names of their errors.
    shared: Mapping[str, Tensor]

    @property
    def bytes(self) -> int:
        """What it holds."""
        tensors = [x for part in (*self.parts, self.shared) for x in part.values()]
        return sum(x.numel() * x.element_size() for x in tensors)


@dataclass
class Reservoir:
    """Some of all that was offered, each with the same chance (Vitter's algorithm R)."""

    draw: Random
    kept: list[Kept] = field(default_factory=list)
    offered: int = 0

    def offer(self, one: Kept) -> None:
        """Keeps it, perhaps in place of another."""
        self.offered += 1
        most = max(1, min(_MOST, _MOST_BYTES // max(1, one.bytes)))  # the same for all samples of a cell
        if len(self.kept) < most:
            self.kept.append(one)
        elif (place := self.draw.randrange(self.offered)) < most:
            self.kept[place] = one
