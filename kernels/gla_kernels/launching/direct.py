"""Launches of a kernel: the first through Triton's JIT, which compiles it, equal ones straight to the compiled kernel.

Triton works out before every launch which variant of a kernel the arguments need. Here the answer is remembered, under
a key that holds at least what Triton asks for: the constants and options (there is a `Launcher` for each set), the
device, each tensor's dtype or absence, the addresses modulo 16, the values of all numbers, and Triton's knobs for
debugging and instrumentation. So a direct launch can only repeat what the JIT has once done for equal arguments.

What a direct launch leaves out: Triton's check that captured globals are as they were, and the driver's that each
pointer belongs to the device, which callers have to know (`checks.py`). It passes addresses in place of tensors.

Everything unusual goes through the JIT: hooks on launches, kernels or compiler stages, Triton's interpreter, backends
other than Nvidia's, and versions of Triton whose launcher has not been compared with this module.
"""

from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

# Versions whose compiled kernels take (grid, stream, function, metadata, three values for hooks, all parameters), of
# which constants are skipped and addresses are taken as they are.
_KNOWN = ("3.6.", "3.7.")
_LAUNCHER_MODULE = "triton.backends.nvidia.driver"
# Remembered launches of a launcher, and launchers.
_LAUNCHES, _LAUNCHERS = 256, 1024


def is_watched() -> bool:
    """Whether Triton reports launches, or the stages of its compiler, to somebody."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A hook that does nothing is none, or a chain without functions.
    return (
        not (enter is None or (type(enter) is knobs.HookChain and not enter.calls))
        or not (leave is None or (type(leave) is knobs.HookChain and not leave.calls))
        or runtime.add_stages_inspection_hook is not None
    )


def switches() -> tuple[Any, ...]:
    """Triton's knobs that change what a kernel is compiled to."""
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode


class Launcher:
    """Launches one kernel with one set of constants and options."""

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self.kernel = kernel
        self._keywords = constants | options
        names = list(kernel.arg_names)
        # The constants as the last parameters, in their order.
        self.constants = [constants[name] for name in names if name in constants]
        self._arguments = len(names) - len(self.constants)
        self.tensor_count = 0  # of the first arguments, which are tensors or None
        self._remembered: dict[tuple[Any, ...], Any] = {}
        self._direct = (
            triton.__version__.startswith(_KNOWN)
            and getattr(type(kernel), "run", None) is JITFunction.run
            and not any(name in constants for name in names[: self._arguments])
        )

    def __call__(self, programs: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Launches so many programs. `arguments`: tensors or None first, then numbers."""
        if not self._direct or is_watched() or self.kernel.pre_run_hooks:
            self.kernel[programs](*arguments, **self._keywords)
            return
        if not self._remembered and not self._understand(arguments):
            self._direct = False
            self.kernel[programs](*arguments, **self._keywords)
            return
        tensors, numbers = arguments[: self.tensor_count], arguments[self.tensor_count :]
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        low = reduce(or_, addresses, 0) & 15 > 0 and tuple([address & 15 for address in addresses])
        active = driver.active
        device = active.get_current_device()
        key = (device, _dtypes(tensors), low, numbers, switches())
        found = self._remembered.get(key)
        if found is None:
            self._remember(key, self.kernel[programs](*arguments, **self._keywords))
            return
        x, y, z = (*programs, 1, 1)[:3]
        stream = active.get_current_stream(device)
        metadata = found.packed_metadata
        found.run(x, y, z, stream, found.function, metadata, None, None, None, *addresses, *numbers, *self.constants)

    def remembered(self, device: int, arguments: tuple[Any, ...], low: list[int]) -> Any:
        """The compiled kernel that has run on the device with such arguments, or None. `low`: of addresses, modulo 16.

        Addresses that are not given are multiples of 16.
        """
        tensors, numbers = arguments[: self.tensor_count], arguments[self.tensor_count :]
        return self._remembered.get((device, _dtypes(tensors), any(low) and tuple(low), numbers, switches()))

    def _understand(self, arguments: tuple[Any, ...]) -> bool:
        """Finds how many of the arguments are tensors or None. Whether only numbers follow, and none is missing."""
        kinds = [type(x) for x in arguments]
        self.tensor_count = next((i for i, kind in enumerate(kinds) if kind in (int, float)), len(kinds))
        first, others = arguments[: self.tensor_count], kinds[self.tensor_count :]
        tensors = all(x is None or isinstance(x, torch.Tensor) for x in first)
        return tensors and all(kind in (int, float) for kind in others) and len(kinds) == self._arguments

    def _remember(self, key: tuple[Any, ...], compiled: Any) -> None:
        if not isinstance(compiled, CompiledKernel):
            return
        if type(compiled.run).__module__ != _LAUNCHER_MODULE:
            self._direct = False
            return
        if len(self._remembered) >= _LAUNCHES:
            self._remembered.clear()
        self._remembered[key] = compiled


def _dtypes(tensors: tuple[torch.Tensor | None, ...]) -> tuple[torch.dtype | None, ...]:
    return tuple([None if x is None else x.dtype for x in tensors])


@lru_cache(_LAUNCHERS)
def launcher(kernel: Any, constants: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]) -> Launcher:
    """The launcher of a kernel with these constants and options, by name."""
    return Launcher(kernel, dict(constants), dict(options))
