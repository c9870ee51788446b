"""The choice of a device, from text such as `cuda:1`."""

import re
from dataclasses import dataclass
from typing import Literal

from glabench.errors import UsageError, did_you_mean

_NUMBERED = re.compile(r"cuda(?::(0|[1-9][0-9]{0,3}))?")


@dataclass(frozen=True)
class Device:
    """The CPU, or a GPU by its number in torch."""

    kind: Literal["cuda", "cpu"]
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def parse_device(text: str, gpus: int) -> Device:
    """The device that `text` names on a machine with `gpus` GPUs; "auto" is the first GPU, or the CPU without one.

    Raises UsageError for other text and for a missing GPU.
    """
    if text == "cpu" or (text == "auto" and not gpus):
        return Device("cpu")
    numbered = _NUMBERED.fullmatch("cuda" if text == "auto" else text)
    here = [f"cuda:{index}" for index in range(gpus)]
    if numbered is None:
        # Without "cpu", which is spelled most like "gpu" but is not what the user meant.
        hint = did_you_mean(text, ["auto", "cuda", *here])
        raise UsageError(f"--device: '{text}' is not a device (allowed: auto, cpu, cuda, cuda:N){hint}")
    index = int(numbered[1] or 0)
    if index >= gpus:
        count = f"{gpus or 'no'} GPU{'s' if gpus > 1 else ''}"
        allowed = ", ".join(["auto", "cpu", *(["cuda"] if gpus else []), *here])
        raise UsageError(f"--device: '{text}' does not exist: torch sees {count} (allowed here: {allowed})")
    return Device("cuda", index)


def count_gpus() -> int:
    """The number of GPUs that torch sees. Imports torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def select_device(text: str) -> Device:
    """The device that `text` names. If it is a GPU, makes it torch's current device, so that "cuda" means this one.

    Imports torch. Raises UsageError as `parse_device` does.
    """
    import torch

    device = parse_device(text, count_gpus())
    if device.index is not None:
        torch.cuda.set_device(device.index)
    return device
