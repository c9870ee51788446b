"""Contexts of torch that change what later operations of a thread compute, those of the suite's references included."""

from __future__ import annotations


def active_contexts() -> list[str]:
    """The names of the contexts that are active. The suite itself runs in none."""
    import torch
    from torch._C import DispatchKey, _autograd, _dispatch_tls_is_dispatch_key_included, _len_torch_dispatch_stack
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    found = {
        # A default device is such a mode, too, and harmless; a subclass need not be.
        "a function mode": any(type(mode) is not DeviceContext for mode in modes),
        "a dispatch mode": _len_torch_dispatch_stack() > 0,
        "the Python dispatcher": _dispatch_tls_is_dispatch_key_included(DispatchKey.PythonDispatcher),
        "hooks for saved tensors": _autograd._top_saved_tensors_default_hooks(True) is not None,
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
    }
    return [name for name, is_active in found.items() if is_active]
