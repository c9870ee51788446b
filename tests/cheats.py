"""Backends that cheat, or err in a way that is hard to see. Each is right at the sizes of the small check."""

import threading

import torch
from torch._C import _autograd, _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode

from glabench.backends import Backend

_SMALL = 256  # tokens of the small check


def correct(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q * q.shape[-1] ** -0.5 @ k.mT).tril() @ v).transpose(1, 2)


class Honest(Backend):
    name, op, title = "honest", "linear", "right"

    def bind(self, inputs, cell):
        q, k, v = (inputs[name] for name in "qkv")
        if cell.seqlen <= _SMALL:
            return lambda: correct(q, k, v)
        return self.at_size(q, k, v)

    def at_size(self, q, k, v):
        return lambda: correct(q, k, v)


class WrongWhileMemoryIsMeasured(Honest):
    """In its second call at a cell's own size."""

    def at_size(self, q, k, v):
        calls = []

        def call():
            calls.append(1)
            return correct(q, k, v) if len(calls) != 2 else 0 * (q.sum() + k.sum()) + 0 * v

        return call


class TiresOfItsInputs(Honest):
    """Does nothing once it has seen the same inputs more often than in any sample, as they are while energy counts."""

    def at_size(self, q, k, v):
        last = {"key": 0.0, "seen": 0}

        def call():
            key = float(q.detach().flatten()[0])
            last.update(key=key, seen=last["seen"] + 1 if key == last["key"] else 1)
            return correct(q, k, v) if last["seen"] < 20 else 0 * (q.sum() + k.sum()) + 0 * v

        return call


class EmptyAfterTheFirstCall(Honest):
    def at_size(self, q, k, v):
        calls = []

        def call():
            calls.append(1)
            return correct(q, k, v) if len(calls) == 1 else torch.empty_like(v) + 0 * (q.sum() + k.sum() + v.sum())

        return call


class FewTokens(Honest):
    def at_size(self, q, k, v):
        return lambda: torch.nn.functional.pad(
            correct(q[:, :_SMALL], k[:, :_SMALL], v[:, :_SMALL]), (0, 0, 0, 0, 0, q.shape[1] - _SMALL)
        )


class LosesItsState(Honest):
    """An honest bug: the state starts anew at token 512."""

    def at_size(self, q, k, v):
        return lambda: torch.cat(
            [correct(x, y, z) for x, y, z in zip(*(t.split(512, 1) for t in (q, k, v)), strict=True)], 1
        )


class OneWrongHead(Honest):
    def at_size(self, q, k, v):
        scale = q.new_ones(q.shape[0], 1, q.shape[2], 1)
        scale[0, 0, 1] = 1.3
        return lambda: correct(q, k, v) * scale


class OneWrongToken(Honest):
    def at_size(self, q, k, v):
        scale = q.new_ones(1, q.shape[1], 1, 1)
        scale[0, 300] = 0.0
        return lambda: correct(q, k, v) * scale


class ChangesItsInput(Honest):
    def at_size(self, q, k, v):
        def call():
            out = correct(q, k, v)
            v.data.mul_(0)
            return out

        return call


class OnAThread(Honest):
    """Returns before its work is done."""

    def at_size(self, q, k, v):
        def call():
            out = torch.zeros_like(v)

            def work():
                threading.Event().wait(0.02)
                out.copy_(correct(q.detach(), k.detach(), v.detach()))

            threading.Thread(target=work).start()
            return out + 0 * (q.sum() + k.sum() + v.sum()) if q.requires_grad else out

        return call


class LaysItsInputsOutAnew(Honest):
    """The products then need no copies, which others make in every call."""

    def at_size(self, q, k, v):
        for x in (q, k, v):
            x.data = x.data.transpose(1, 2).contiguous().transpose(1, 2)
        return lambda: correct(q, k, v)


class LaysItsInputsOutLate(Honest):
    def at_size(self, q, k, v):
        calls = []

        def call():
            calls.append(1)
            if len(calls) == 3:
                v.data = v.data.transpose(1, 2).contiguous().transpose(1, 2)
            return correct(q, k, v)

        return call


class ShrinksItsCell(Honest):
    """Changes what the suite counts with: half of the batch, until the record is written."""

    def at_size(self, q, k, v):
        from glabench.ops import LINEAR

        object.__setattr__(self.cell, "batch", 1)
        for x, made in zip((q, k, v), LINEAR.make_inputs(self.cell).values(), strict=True):
            x.data = made
        return lambda: correct(q, k, v)

    def bind(self, inputs, cell):
        self.cell = cell
        return super().bind(inputs, cell)

    def executes(self, cell):
        object.__setattr__(cell, "batch", 2)


class HidesWhatIsSaved(Honest):
    """With these hooks the gradients of the reference are zeros, too."""

    def at_size(self, q, k, v):
        torch.autograd.graph.saved_tensors_hooks(torch.zeros_like, lambda x: x).__enter__()
        return lambda: correct(q, k, v)


def leave_contexts():
    """Leaves what cheats have entered."""
    while _len_torch_dispatch_stack():
        _pop_mode()
    while _autograd._top_saved_tensors_default_hooks(True) is not None:
        _autograd._pop_saved_tensors_default_hooks()


class ComputesWhenWritten(TorchDispatchMode):
    """Puts the result for q, k and v into `kept` as soon as v is written."""

    def __init__(self, q, k, v, kept):
        super().__init__()
        self.values, self.kept = (q, k, v), kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() == self.values[2].data_ptr():
            self.kept[:] = [correct(*(x.detach() for x in self.values))]
        return out


class ComputesAsSoonAsItsInputsChange(Honest):
    """In a mode that sees the suite write them, before the clock starts."""

    def at_size(self, q, k, v):
        kept = []
        ComputesWhenWritten(q, k, v, kept).__enter__()
        return lambda: correct(q, k, v) if q.requires_grad or not kept else kept[0].clone().clone()


class EmptiesItsInputsFirst(Honest):
    """With inputs of zeros, there is nothing to compute."""

    def at_size(self, q, k, v):
        for x in (q, k, v):
            x.data.zero_()
        return lambda: v * 0 + q.sum() * 0 + k.sum() * 0


class MadeFromTheCellsSeed(Honest):
    """Computes all results in `bind`, from inputs that it makes itself."""

    def bind(self, inputs, cell):
        from glabench.ops import LINEAR

        q, k, v = (inputs[name] for name in "qkv")
        if cell.seqlen <= _SMALL:
            return lambda: correct(q, k, v)
        kept = {}
        for other in range(3):
            made = LINEAR.make_inputs(cell, other)
            kept[float(made["q"].flatten()[0])] = correct(*(made[name] for name in "qkv"))

        def call():
            found = kept.get(float(q.detach().flatten()[0]))
            return torch.zeros_like(v) + 0 * (q.sum() + k.sum() + v.sum()) if found is None else found * 1.0

        return call


class WithoutAGraph(Honest):
    """Keeps nothing for a backward."""

    def at_size(self, q, k, v):
        def call():
            with torch.no_grad():
                return correct(q, k, v)

        return call


class _ZeroesTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, *inputs):
        ctx.save_for_backward(*inputs)
        return out.clone()

    @staticmethod
    def backward(ctx, grad):
        grad.data.zero_()
        return (None, *(torch.zeros_like(x) for x in ctx.saved_tensors))


class ChangesTheOutputsGradient(Honest):
    """Then gradients of zeros are right."""

    def at_size(self, q, k, v):
        return lambda: _ZeroesTheGradient.apply(correct(q, k, v).detach(), q, k, v)


class _Late(Honest):
    """Right in the first calls, which are looked at anyway."""

    def change(self, out):
        raise NotImplementedError

    def at_size(self, q, k, v):
        calls = []

        def call():
            calls.append(1)
            out = correct(q, k, v)
            return out if len(calls) < 6 else self.change(out)

        return call


class LateInAnotherType(_Late):
    def change(self, out):
        return out.double()


class LateSubclass(_Late):
    def change(self, out):
        return out.as_subclass(Subclass)


class LateWithoutAGraph(_Late):
    def change(self, out):
        return out.detach()


class LateLeaf(_Late):
    """Requires gradients, but has none for the inputs."""

    def change(self, out):
        return out.detach().requires_grad_()


class Subclass(torch.Tensor):
    pass


class Lazy(Honest):
    """A tensor subclass, which may compute later."""

    def at_size(self, q, k, v):
        return lambda: correct(q, k, v).as_subclass(Subclass)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        return correct(*inputs)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("nothing was saved")


class CannotGoBack(Honest):
    """A forward of training that keeps nothing for the backward."""

    function = _Raises

    def at_size(self, q, k, v):
        return lambda: self.function.apply(q, k, v)


class _RunsOut(_Raises):
    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory.")


class SaysThatItsBackwardDoesNotFit(CannotGoBack):
    function = _RunsOut


class _LaterGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return correct(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return tuple(x.as_subclass(Subclass) for x in torch.autograd.grad(correct(*leaves), leaves, grad))


class LazyGradient(Honest):
    def at_size(self, q, k, v):
        return lambda: _LaterGradient.apply(q, k, v)


class _BackwardInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kept, q, k, v):
        ctx.kept = kept
        if kept:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                out = correct(*leaves)
                ctx.gradients = torch.autograd.grad(out, leaves, kept[0])
                return out.detach()
        ctx.save_for_backward(q, k, v)
        return correct(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        if ctx.kept:
            return None, *ctx.gradients
        ctx.kept.append(grad)
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return None, *torch.autograd.grad(correct(*leaves), leaves, grad)


class BackwardInTheForward(Honest):
    """Remembers the output's gradient, whose memory stays the same, and computes everything in the forward."""

    def at_size(self, q, k, v):
        kept = []
        return lambda: _BackwardInForward.apply(kept, q, k, v)


class CannotGoBackLate(Honest):
    """As above, after the first calls."""

    function = _Raises

    def at_size(self, q, k, v):
        calls = []

        def call():
            calls.append(1)
            return correct(q, k, v) if len(calls) < 6 else self.function.apply(q, k, v)

        return call


class SaysSoLate(CannotGoBackLate):
    function = _RunsOut


class NoGradientsLate(Honest):
    """An honest bug: no gradients for the tokens after 256."""

    def at_size(self, q, k, v):
        def cut(x):
            return torch.cat([x[:, :_SMALL], x[:, _SMALL:].detach()], 1)

        return lambda: correct(cut(q), cut(k), cut(v))


class LowerPrecision(Honest):
    def at_size(self, q, k, v):
        return lambda: correct(*(x.bfloat16() for x in (q, k, v))).to(v.dtype)


IN_ALL_PASSES = [
    FewTokens, LosesItsState, OneWrongHead, OneWrongToken, ChangesItsInput, EmptyAfterTheFirstCall, Lazy, OnAThread,
    LowerPrecision, EmptiesItsInputsFirst, MadeFromTheCellsSeed, LaysItsInputsOutAnew, LaysItsInputsOutLate,
    ShrinksItsCell, HidesWhatIsSaved, ComputesAsSoonAsItsInputsChange,
]  # fmt: skip
IN_BACKWARDS = [NoGradientsLate, WithoutAGraph, ChangesTheOutputsGradient]
LATE = [
    (LateInAnotherType, "infer"),
    (LateInAnotherType, "fwd+bwd"),
    (LateSubclass, "infer"),
    (LateWithoutAGraph, "fwd"),
    (LateLeaf, "fwd"),
    (LateLeaf, "fwd+bwd"),
    (CannotGoBackLate, "fwd"),
    (CannotGoBack, "fwd"),
    (LazyGradient, "bwd"),
    (LazyGradient, "fwd+bwd"),
    (BackwardInTheForward, "bwd"),
]
