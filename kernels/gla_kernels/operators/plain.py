"""Whether tensors are plain: nothing but autograd has to see what is done with them."""

import torch
from torch.autograd import forward_ad

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by `torch.autograd.grad(..., is_grads_batched=True)`
_traced = torch._C._get_tracing_state  # torch.jit.trace


def is_unwatched() -> bool:
    """Whether no compiler, mode, transform or trace has to see what is done with any tensor now."""
    # Compilers stop at the first condition. No public function tells the level of forward-mode derivatives.
    return not (
        _compiling()
        or _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or _traced() is not None
        or forward_ad._current_level >= 0
    )


def is_transformed() -> bool:
    """Whether a transform of functorch is active, outside of compilers, which trace through it."""
    return not _compiling() and _transform() is not None


def refuse_tangents(*tensors: torch.Tensor | None) -> None:
    """Raises NotImplementedError for a tensor with a forward-mode derivative, which our kernels would lose."""
    if _compiling() or forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("forward-mode derivatives (jvp, jacfwd, dual numbers) are not supported")


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing but autograd has to see what is done with these tensors, whose memory holds their values."""
    if not is_unwatched():
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _PLAIN or not (x.is_cuda or x.is_cpu) or _is_batched(x) or x.is_neg():
            return False
        # Some tensors have no memory: torch's zeros that are none in memory, and wrappers of functionalization.
        if x.layout != torch.strided or not x.data_ptr():
            return False
    return True
