"""Backends that hide their work where the suite writes inputs or reads results: outside of the clock."""

import ctypes
import weakref
from itertools import count

import torch
from cheats import ComputesWhenWritten, Honest, correct
from torch._C import DispatchKey, _DisablePythonDispatcher, _EnablePythonDispatcher
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from glabench.ops.base import as_tuple

_GUARDS = []


def leave_everything():
    """Leaves what these cheats have entered."""
    while _get_current_function_mode_stack():
        _pop_mode()
    while _GUARDS:
        _GUARDS.pop().__exit__(None, None, None)
    torch.ops.aten.copy_.default.py_kernels.pop(DispatchKey.CPU, None)
    torch.ops.aten.copy_.default._dispatch_cache.clear()


def _when_read(x, fill):
    """x, whose own `detach`, found before that of its class, computes its values."""

    def detach():
        del x.__dict__["detach"]
        return torch.Tensor.detach(x).copy_(fill())

    x.detach = detach
    return x


class _EmptyWithAGraph(torch.autograd.Function):
    """An output without values, and gradients that are computed when they are read."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors

        def gradient(n):
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in saved]
                return torch.autograd.grad(correct(*leaves), leaves, grad)[n]

        return tuple(_when_read(torch.empty_like(x), lambda n=n: gradient(n)) for n, x in enumerate(saved))


class ComputesWhenItsResultIsRead(Honest):
    def at_size(self, q, k, v):
        values = [x.detach() for x in (q, k, v)]
        return lambda: _when_read(_EmptyWithAGraph.apply(q, k, v), lambda: correct(*values))


class _LazyTuple(tuple):
    __slots__ = ()

    def __new__(cls, compute):
        return super().__new__(cls, (compute, None))

    def __iter__(self):
        return iter(super().__getitem__(0)())

    def __getitem__(self, at):
        return super().__getitem__(0)()[at]


class ComputesWhenItsTupleIsRead(Honest):
    """With `state` there are two outputs."""

    features = ("state",)

    def bind(self, inputs, cell):
        q, k, v = (inputs[name] for name in "qkv")

        def both():
            return correct(q, k, v), torch.einsum("bthk,bthv->bhkv", k, v)

        return both if cell.seqlen <= 256 else lambda: _LazyTuple(both)


class _Handle:
    """Stands for the data of a tensor, and calls `then` when it is written."""

    def __init__(self, x, then):
        self.x, self.then = x, then

    def copy_(self, value):
        self.x.copy_(value)
        self.then()
        return self

    def __getattr__(self, name):
        return getattr(self.x, name)


def _spy(x, then):
    class Spy(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl
        data = property(lambda self: _Handle(x, then))

    return Spy


class ChangesTheTypeOfItsInput(Honest):
    def at_size(self, q, k, v):
        kept, plain = [], [x.detach() for x in (q, k, v)]
        v.__class__ = _spy(plain[2], lambda: kept.append(correct(*plain)))
        return lambda: kept.pop() if kept and not q.requires_grad else correct(q, k, v)


class _SwapsTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ready):
        ctx.save_for_backward(q, k, v)
        ctx.ready = ready
        return correct(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        ready, plain = ctx.ready, torch.Tensor.detach(grad).as_subclass(torch.Tensor)

        def compute():
            with torch.enable_grad():
                return torch.autograd.grad(correct(*leaves), leaves, plain)

        if type(grad) is torch.Tensor:
            grad.__class__ = _spy(plain, lambda: ready.append(compute()))
        return *(ready.pop() if ready else compute()), None


class ChangesTheTypeOfTheOutputsGradient(Honest):
    def at_size(self, q, k, v):
        ready = []
        return lambda: _SwapsTheGradient.apply(q, k, v, ready)


class ChangesTheTypeBetweenLooks(Honest):
    """When the suite frees a result, until the next call. `gained`: results that were ready before a call."""

    gained = 0

    def at_size(self, q, k, v):
        kept, results, plain = [], [], [x.detach() for x in (q, k, v)]
        spy = _spy(plain[2], lambda: kept.append(correct(*plain)))

        def freed(_):
            v.__class__ = spy

        def call():
            v.__class__ = torch.Tensor
            type(self).gained += bool(kept)
            out = kept.pop() if kept else correct(q, k, v)
            results[:] = [weakref.ref(out, freed)]
            return out

        return call


class ComputesInADevicesContext(Honest):
    def at_size(self, q, k, v):
        kept = []

        class Mode(DeviceContext):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if func is torch.Tensor.copy_ and args[0].data_ptr() == v.data_ptr():
                    kept[:] = [correct(q, k, v)]
                return out

        Mode(torch.device("cpu")).__enter__()
        return lambda: kept.pop() if kept else correct(q, k, v)


class EntersAModeBetweenLooks(Honest):
    """When the suite frees a result, until the next call."""

    def at_size(self, q, k, v):
        kept, active, results = [], [], []

        def freed(_):
            if not active:
                active.append(ComputesWhenWritten(q, k, v, kept))
                active[0].__enter__()

        def call():
            if active:
                active.pop().__exit__(None, None, None)
            out = kept.pop() if kept and not q.requires_grad else correct(q, k, v)
            results[:] = [weakref.ref(out, freed)]
            return out

        return call


class LeavesThePythonDispatcherOn(Honest):
    def at_size(self, q, k, v):
        kept, copy = [], torch.ops.aten.copy_.default

        @copy.py_impl(DispatchKey.CPU)
        def copy_and_compute(x, value, non_blocking=False):
            with _DisablePythonDispatcher():
                out = copy(x, value, non_blocking)
                if x.data_ptr() == v.data_ptr():
                    kept[:] = [correct(q, k, v)]
            return out

        _GUARDS.append(_EnablePythonDispatcher())
        _GUARDS[-1].__enter__()
        return lambda: kept.pop() if kept else correct(q, k, v)


class LaysItsInputsOutAnewAndDeniesIt(Honest):
    def at_size(self, q, k, v):
        for x in (q, k, v):
            pointer, stride, old = x.data_ptr(), x.stride(), x.data
            x.data = x.data.transpose(1, 2).contiguous().transpose(1, 2)
            x.data_ptr, x.stride, x.old = (lambda pointer=pointer: pointer), (lambda stride=stride: stride), old
        return lambda: correct(q, k, v)


class _LazyDict(dict):
    def __iter__(self):
        for compute in self.values():
            compute()
        return iter(())


class _Name(str):
    __slots__ = ("compute",)

    def __hash__(self):
        if compute := getattr(self, "compute", None):
            self.compute = None
            compute()
        return super().__hash__()


class ComputesWhenItsAttributesAreRead(Honest):
    def at_size(self, q, k, v):
        values = [x.detach() for x in (q, k, v)]

        def call():
            out = torch.empty_like(v.detach())
            out.__dict__ = _LazyDict(todo=lambda: out.copy_(correct(*values)))
            return out

        return call


class ComputesWhenANameIsLookedUp(Honest):
    def at_size(self, q, k, v):
        values = [x.detach() for x in (q, k, v)]

        def call():
            out, name = torch.empty_like(v.detach()), _Name("note")
            out.__dict__[name] = None
            name.compute = lambda: out.copy_(correct(*values))
            return out

        return call


class ComputesInADevicesOwnContext(Honest):
    def at_size(self, q, k, v):
        kept, mode = [], DeviceContext(torch.device("cpu"))

        def see(func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.Tensor.copy_ and args[0].data_ptr() == v.data_ptr():
                kept[:] = [correct(q, k, v)]
            return out

        mode.__torch_function__ = see
        _push_mode(mode)
        return lambda: kept.pop() if kept else correct(q, k, v)


class MovesItsInputsAndLeavesOthersThere(Honest):
    """Objects of its own have the suite's memory, which is somewhere else now."""

    def at_size(self, q, k, v):
        own = []
        for x in (q, k, v):
            place, size, old = x.data_ptr(), x.numel() * x.element_size(), x.data
            x.data = torch.frombuffer((ctypes.c_char * size).from_address(place), dtype=x.dtype).view(x.shape)
            values = old.clone()
            old.untyped_storage().resize_(2 * size)
            own.append(old.copy_(values))
        return lambda: correct(*own) + 0 * (q.sum() + k.sum() + v.sum())


class FillsItsFirstResultLate(Honest):
    """When it is asked how it launches, after the clock of the first call."""

    def at_size(self, q, k, v):
        self.calls, self.values = [], [x.detach() for x in (q, k, v)]

        def call():
            out = torch.zeros_like(v) + 0 * (q.sum() + k.sum() + v.sum()) if not self.calls else correct(q, k, v)
            self.calls.append(out)
            return out

        return call

    def launch(self, inputs, cell):
        if cell.seqlen > 256:
            self.calls[0].data.copy_(correct(*self.values))


class _HeadInTheBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        out = correct(q, k, v)
        out[:, :, 0] = 0
        ctx.out = out.data
        return out

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = correct(*leaves)
            ctx.out.copy_(out.detach())
            return torch.autograd.grad(out, leaves, grad)


class WritesAHeadInTheBackward(Honest):
    """Of a forward's output, so that a look after the backward finds nothing missing."""

    def at_size(self, q, k, v):
        return lambda: _HeadInTheBackward.apply(q, k, v)


class _LateMode(DeviceContext):
    """Computes when the next function of torch is called, and then is a default device's context."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.autograd.grad and self.todo:
            self.__class__ = DeviceContext
            while self.todo:
                self.todo.pop()()
        return func(*args, **(kwargs or {}))


class ComputesAtTheNextFunction(Honest):
    """Behind the clock: in a context that is a harmless one before and after."""

    def at_size(self, q, k, v):
        mode, values = DeviceContext(torch.device("cpu")), [x.detach() for x in (q, k, v)]
        _push_mode(mode)

        def call():
            out = torch.empty_like(v) + 0 * (q.sum() + k.sum() + v.sum())
            into = out.detach()
            mode.todo = [lambda: into.copy_(correct(*values))]
            mode.__class__ = _LateMode
            return out

        return call


IN_ALL_PASSES = [
    ComputesAtTheNextFunction,
    ComputesWhenItsAttributesAreRead, ComputesWhenANameIsLookedUp, ComputesInADevicesOwnContext,
    MovesItsInputsAndLeavesOthersThere, FillsItsFirstResultLate,
    ComputesWhenItsResultIsRead, ChangesTheTypeOfItsInput, ComputesInADevicesContext, EntersAModeBetweenLooks,
    LeavesThePythonDispatcherOn, LaysItsInputsOutAnewAndDeniesIt,
]  # fmt: skip
IN_BACKWARDS = [ChangesTheTypeOfTheOutputsGradient]


class WorksWhereItsCallsAreKnown(Honest):
    """In the first calls and after all samples; not in the samples, if chance looks at none of them."""

    def at_size(self, q, k, v):
        calls = count(1)
        return lambda: correct(q, k, v) * (1.0 if works(next(calls)) else 0.0)


def works(call):
    """Whether a call is the check's, memory's, or behind two of warming up and twelve samples."""
    return call <= 2 or call > 16


class _ForgetsSharedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, is_right, names, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.given = op, is_right, names
        with torch.no_grad():
            return as_tuple(op.reference(dict(zip(names, tensors, strict=True))))[0]

    @staticmethod
    def backward(ctx, grad):
        op, is_right, names = ctx.given
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = as_tuple(op.reference(dict(zip(names, leaves, strict=True))))[0]
        grads = torch.autograd.grad(out, leaves, grad)
        forgotten = [x if is_right or name not in "ABCD" else x * 0.5 for name, x in zip(names, grads, strict=True)]
        return None, None, None, *forgotten


class ForgetsSharedGradients(Honest):
    """Halves the gradients of Mamba's A, B, C and D, which parts share, where it knows that nobody sees all of them."""

    op = "mamba1"

    def __init__(self, op):
        self.mamba = op

    def bind(self, inputs, cell):
        names, calls = tuple(inputs), count(1)

        def call():
            is_right = cell.seqlen <= 256 or works(next(calls))
            return _ForgetsSharedGradients.apply(self.mamba, is_right, names, *inputs.values())

        return call
