"""The device that a user chose: text as in `--device cuda:1`."""

import re
from dataclasses import dataclass
from typing import Literal

from glabench.errors import UsageError, did_you_mean

_NUMBERED = re.compile(r"cuda(?::(0|[1-9][0-9]{0,3}))?")


@dataclass(frozen=True)
class Device:
    """A CPU, or a GPU by its number among those that torch sees."""

    kind: Literal["cuda", "cpu"]
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def parse_device(text: str, gpus: int) -> Device:
    """The device that `text` names, if torch sees `gpus` GPUs; "auto" is the first GPU, or the CPU if there is none.

    Raises UsageError for other text and for a GPU that is not there.
    """
    if text == "cpu" or (text == "auto" and not gpus):
        return Device("cpu")
    numbered = _NUMBERED.fullmatch("cuda" if text == "auto" else text)
    here = [f"cuda:{index}" for index in range(gpus)]
    if numbered is None:
        # Without "cpu", which is the nearest in letters to "gpu" and not what is meant.
        hint = did_you_mean(text, ["auto", "cuda", *here])
        raise UsageError(f"--device: '{text}' is not a device (allowed: auto, cpu, cuda, cuda:N){hint}")
    index = int(numbered[1] or 0)
    if index >= gpus:
        count = f"{gpus or 'no'} GPU{'s' if gpus > 1 else ''}"
        allowed = ", ".join(["auto", "cpu", *(["cuda"] if gpus else []), *here])
        raise UsageError(f"--device: '{text}' is not there: torch sees {count} (allowed here: {allowed})")
    return Device("cuda", index)


def count_gpus() -> int:
    """How many GPUs torch sees. Imports torch."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def select_device(text: str) -> Device:
    """The device that `text` names, now torch's current one if it is a GPU. Raises UsageError; imports torch.

    After this call nothing needs the number any more: "cuda" alone is the current device.
    """
    import torch

    device = parse_device(text, count_gpus())
    if device.index is not None:
        torch.cuda.set_device(device.index)
    return device
