"""Contexts of torch that change what later operations of a thread compute, those of the suite's references included."""

from __future__ import annotations

import sys
from collections.abc import Callable

_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"


def shadowed(x: object) -> list[str]:
    """The attributes of this object alone that hide those of its class: `x.detach` may then be another function.

    To look at them must run no code of theirs, so the attributes are a plain dict of plain names, or all are hidden.
    """
    own = x.__dict__
    if type(own) is not dict or any(type(name) is not str for name in own):
        return ["__dict__"]
    return [name for name in own if hasattr(type(x), name)]


def signs_of_contexts() -> tuple[Callable[[], object], ...]:
    """Functions of C that say nothing true if no mode is active and no callback for frames is set."""
    from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return _len_torch_function_stack, _len_torch_dispatch_stack, get_eval_frame_callback


def active_contexts() -> list[str]:
    """The names of the contexts that are active. The suite itself runs in none."""
    import torch
    from torch._C import (
        DispatchKey,
        _autograd,
        _dispatch_tls_is_dispatch_key_included,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    found = {
        # A default device is such a mode, too; its class could be changed during a call.
        "a function mode": _len_torch_function_stack() > 0,
        "a dispatch mode": _len_torch_dispatch_stack() > 0,
        "the Python dispatcher": _dispatch_tls_is_dispatch_key_included(DispatchKey.PythonDispatcher),
        "hooks for saved tensors": _autograd._top_saved_tensors_default_hooks(True) is not None,
        "compiled autograd": getattr(sys.modules.get(_COMPILED_AUTOGRAD), "compiled_autograd_enabled", False),
        "a callback for frames": get_eval_frame_callback() is not None,
        "anomaly detection": torch.is_anomaly_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
    }
    return [name for name, is_active in found.items() if is_active]
