"""Functions compiled by torch, whatever the number of shapes that a process meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Variants of a function. A process measures all cells of a backend, and torch's own limit of 8 is soon reached.
_MOST = 1024


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile`, but a variant too many raises, where torch would go on without compiling and not say so."""
    import torch
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = _MOST
    config.fail_on_recompile_limit_hit = True
    found: Callable[..., Any] = torch.compile(function, **options)
    return found
