"""Memory that a pass takes above its inputs, from torch's allocator."""

from collections.abc import Callable
from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """MiB above what was allocated before: the peaks of what torch allocated and of what it took from the device for
    that, and what forward leaves for backward."""

    peak_allocated_mib: float
    peak_reserved_mib: float
    saved_mib: float | None


def measure_memory(
    prepare: Callable[[], object] | None, call: Callable[[], object], forward: Callable[[], object] | None
) -> Memory:
    """Runs `prepare`, if there is one, then `call` once on an emptied cache, and reads the peaks; GPU only.

    `forward`, where the pass has a backward, is run once more by itself: what is still allocated when it has
    returned, output included, is what is held between forward and backward.
    """
    import torch

    kept = prepare() if prepare is not None else None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    allocated = (torch.cuda.max_memory_allocated() - base) / MIB
    reserved = (torch.cuda.max_memory_reserved() - base) / MIB
    del kept, result
    saved = None
    if forward is not None:
        base = torch.cuda.memory_allocated()
        result = forward()
        torch.cuda.synchronize()
        saved = (torch.cuda.memory_allocated() - base) / MIB
        del result
    return Memory(allocated, reserved, saved)
