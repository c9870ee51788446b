"""Memory that a pass needs besides its inputs: from torch's allocator on a GPU, from resident memory on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glabench.devices.resident import peak_resident_mib
from glabench.measure.timer import UNTOUCHED, Between, nothing
from glabench.measure.workload import Steps

MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """MiB above what was held before the pass; None if unknown."""

    # MiB, peaks of what torch allocated on a GPU, and of what it reserved from the device for that.
    peak_allocated_mib: float | None = None
    peak_reserved_mib: float | None = None
    # MiB, peak of the process's resident memory on a CPU.
    peak_resident_mib: float | None = None
    # MiB that the forward keeps for the backward, output included.
    saved_mib: float | None = None
    # MiB that the whole process holds on a GPU, as the driver counts it.
    process_memory_mib: float | None = None


def give_back_unused(device: Literal["cuda", "cpu"]) -> None:
    """Has torch give back what it keeps of freed tensors on a GPU.

    Before a cell has tensors that stay: they would lie in the large pieces that earlier ones left, which torch could
    then not give back when the cell needs more.
    """
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def take_workspaces(device: str) -> None:
    """Has torch take the memory on a GPU that cuBLAS works in, which torch keeps until the process ends.

    Before the first cell: it would lie in a large piece that a cell's check or call has left, which torch could then
    not give back. Forward and backward passes run in threads that have one each.
    """
    if device == "cuda":
        import torch

        x = torch.ones(16, 16, device=device, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)


@contextmanager
def limited(mib: int | None) -> Iterator[None]:
    """Has torch hold no more than this on the GPU, inputs included, as if it had less memory; None: no limit."""
    if mib is None:
        yield
        return
    import torch

    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, mib * MIB / torch.cuda.mem_get_info()[1]))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def measure_memory(
    steps: Steps,
    device: Literal["cuda", "cpu"],
    between: Between = UNTOUCHED,
    of_process: Callable[[], float | None] = lambda: None,
    limit_mib: int | None = None,
) -> Memory:
    """Measures the memory of one pass and, if it has a backward, of what one more forward keeps.

    `between` gives the pass its inputs and looks at its result. `of_process` reads the MiB of the whole process. The
    pass runs within `limit_mib`.
    """
    between.renew(nothing)
    if steps.prepare is not None:
        steps.prepare()
    between.renew_gradients()
    if device == "cpu":
        results: list[object] = []
        peak = peak_resident_mib(lambda: results.append(steps.call()))
        for each in results:
            _look(between, each)
        return Memory(peak_resident_mib=peak)
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base, base_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    with limited(limit_mib):
        result = steps.call()
        torch.cuda.synchronize()
    allocated = (torch.cuda.max_memory_allocated() - base) / MIB
    reserved = (torch.cuda.max_memory_reserved() - base_reserved) / MIB
    process = of_process()  # before the result is looked at, which takes memory, too
    _look(between, result)
    del result
    saved = None
    if steps.forward is not None:
        base = torch.cuda.memory_allocated()
        result = steps.forward()
        torch.cuda.synchronize()
        saved = (torch.cuda.memory_allocated() - base) / MIB
        del result
    return Memory(allocated, reserved, saved_mib=saved, process_memory_mib=process)


def _look(between: Between, result: object) -> None:
    between.keep(result)
    between.look(result)


def free_memory_bytes(device: str) -> int | None:
    """Bytes that are free on a device ("cuda" or "cpu"); None if unknown."""
    if device == "cuda":
        import torch

        # What torch keeps from earlier tensors is free for the next ones.
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:  # noqa: PTH123
            found = next((line.split()[1] for line in file if line.startswith("MemAvailable:")), None)
    except OSError:
        return None
    free = int(found) * 1024 if found else None
    return min(filter(None, (free, left_in_container(Path("/sys/fs/cgroup")))), default=None)


def left_in_container(root: Path) -> int | None:
    """Bytes that a container may still take, from what Linux says of control groups below `root`; None if unlimited.

    Files that were read and can be dropped count as used, but for those that nothing has used again.
    """
    for limit, used, folder in (
        ("memory.max", "memory.current", root),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", root / "memory"),
    ):
        try:
            most, taken = (int((folder / name).read_text()) for name in (limit, used))
            parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # not this version of control groups, or no limit: "max"
            continue
        return max(1, most - taken + int(parts.get("inactive_file", 0)))
    return None
