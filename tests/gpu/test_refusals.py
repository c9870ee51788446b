"""Cheats that need a GPU, and those of the CPU, are refused on a GPU in every pass; honest kernels are not.

In one process at a time: beside others that use the GPU, an honest backend can be taken for one that idles.
"""

from dataclasses import replace
from itertools import product

import cheats
import hidden_cheats
import kept_cheats
import pytest
import torch
from cheats import Honest, correct
from gla_kernels import chunk_linear_attn

from glabench.backends import load_registry
from glabench.measure.cell import CellMeter
from glabench.measure.job import Job
from glabench.measure.outcome import failure_of
from glabench.measure.settings import Settings
from glabench.measure.timer import timer_for
from glabench.measure.work import OpWork
from glabench.sweeps import Cell, Parameters

LINEAR = load_registry().ops["linear"]
SETTINGS = Settings(max_samples=20, least_time_s=0, warm_up_s=0, precision=1e-9, energy=False, cell_timeout_s=60)
JOB = Job("honest", "run", "cuda:0", SETTINGS)
PASSES = ("infer", "fwd", "bwd", "fwd+bwd")
# One reads a CPU's memory by its address.
HIDDEN = [one for one in hidden_cheats.IN_ALL_PASSES if one is not hidden_cheats.MovesItsInputsAndLeavesOthersThere]


def measure(backend, pass_, timing="cold", batch=2, seqlen=1024, heads=16, dtype="fp32", dim=64):
    sizes = Parameters({"heads": heads, "key_dim": dim, "value_dim": dim})
    cell = Cell("honest", "linear", pass_, batch, seqlen, dtype, sizes, "cuda")
    job = replace(JOB, settings=replace(JOB.settings, timing=timing))
    try:
        return CellMeter(OpWork(LINEAR, backend), job, timer_for("cuda", timing)).measure(cell)
    except Exception as problem:
        return failure_of(job, cell, problem)
    finally:
        cheats.leave_contexts()
        hidden_cheats.leave_everything()
        torch.cuda.set_stream(torch.cuda.default_stream())


class _OnAStream(Honest):
    """Works on a stream of its own."""

    waits_before, waits_after = True, True

    def at_size(self, q, k, v):
        side = torch.cuda.Stream()

        def call():
            current = torch.cuda.current_stream()
            if self.waits_before:
                side.wait_stream(current)
            with torch.cuda.stream(side):
                out = correct(q, k, v)
            if self.waits_after:
                current.wait_stream(side)
            out.record_stream(current)
            return out

        return call


class OnAStreamThatWaits(_OnAStream):
    pass


class OnAStreamThatBeginsEarly(_OnAStream):
    """Its work is done while the device waits for the host."""

    waits_before = False


class OnAStreamThatIsNotWaitedFor(_OnAStream):
    waits_after = False


class _BackwardOnAStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, side):
        ctx.save_for_backward(q, k, v)
        ctx.side = side
        return correct(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        ctx.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(ctx.side), torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return *torch.autograd.grad(correct(*leaves), leaves, grad), None


class OnAStreamWhoseBackwardIsNotWaitedFor(Honest):
    def at_size(self, q, k, v):
        side = torch.cuda.Stream()
        return lambda: _BackwardOnAStream.apply(q, k, v, side)


class ReplaysAGraphOfOldInputs(Honest):
    def at_size(self, q, k, v):
        kept = [x.detach().clone() for x in (q, k, v)]
        correct(*kept)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = correct(*kept)

        def call(kept=kept):  # the graph reads this memory, so the call has to keep it
            graph.replay()
            return out + 0 * (q.sum() + k.sum() + v.sum()) if q.requires_grad else out.clone()

        return call


class Races(Honest):
    """Now and then, a head is read before it was written."""

    def at_size(self, q, k, v):
        scale = torch.ones(q.shape[2], device=q.device)

        def call():
            hit = (torch.rand_like(scale) < 0.3).float()
            return correct(q, k, v) * (1 - 0.5 * hit[:, None])

        return call


class OneOfManyHeads(Honest):
    def at_size(self, q, k, v):
        scale = torch.ones(q.shape[0], 1, q.shape[2], 1, device=q.device, dtype=q.dtype)
        scale[3, 0, 7] = 1.3
        return lambda: chunk_linear_attn(q, k, v)[0] * scale


class WrongBeyond2GiB(Honest):
    """As if byte offsets had 32 bits."""

    def at_size(self, q, k, v):
        def call():
            out = chunk_linear_attn(q, k, v)[0]
            out[2**31 // (out[0].numel() * out.element_size()) :] = 0
            return out

        return call


class OurKernel(Honest):
    def at_size(self, q, k, v):
        return lambda: chunk_linear_attn(q, k, v)[0]


@pytest.mark.parametrize("timing", ["cold", "hot", "graph", "eager"])
@pytest.mark.parametrize("backend", [Honest, OurKernel, OnAStreamThatWaits])
@pytest.mark.parametrize("pass_", PASSES)
def test_an_honest_backend_passes(backend, pass_, timing):
    if (timing, pass_) == ("eager", "bwd"):
        pytest.skip("a backward alone cannot be repeated back to back")
    record = measure(backend(), pass_, timing)
    assert (record.status, record.reason) == ("ok", None)
    assert record.host_ms is not None


@pytest.mark.parametrize(
    ("backend", "pass_"),
    [
        *product(cheats.IN_ALL_PASSES, PASSES),
        *product(kept_cheats.IN_FORWARDS, PASSES),
        *product(cheats.IN_BACKWARDS, ("bwd", "fwd+bwd")),
        *product([OnAStreamThatBeginsEarly, OnAStreamThatIsNotWaitedFor], ("infer", "fwd")),
        *product([OnAStreamWhoseBackwardIsNotWaitedFor], ("bwd", "fwd+bwd")),
        *product([ReplaysAGraphOfOldInputs, Races], PASSES),
        *cheats.LATE,
        *product(HIDDEN, PASSES),
        *product(hidden_cheats.IN_BACKWARDS, ("bwd", "fwd+bwd")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_cheat_is_refused(backend, pass_):
    record = measure(backend(), pass_)
    assert record.status in ("inaccurate", "error", "suspicious")
    assert record.time_ms is None
    print(backend.__name__, pass_, record.status, record.reason)


@pytest.mark.parametrize("pass_", ["infer", "fwd", "fwd+bwd"])
def test_what_a_backend_does_to_its_inputs_between_looks_sees_nothing_written(pass_):
    backend = hidden_cheats.ChangesTheTypeBetweenLooks
    backend.gained = 0
    measure(backend(), pass_)
    assert backend.gained == 0


@pytest.mark.parametrize("pass_", PASSES)
def test_one_wrong_head_of_512_is_refused(pass_):
    record = measure(OneOfManyHeads(), pass_, batch=32, seqlen=2048, dtype="bf16")
    assert record.status == "inaccurate", record.reason
    assert "batch" in record.reason
    assert "heads" in record.reason


@pytest.mark.parametrize(("backend", "status"), [(OurKernel, "ok"), (WrongBeyond2GiB, "inaccurate")])
def test_results_beyond_2_gib_are_looked_at(backend, status):
    record = measure(backend(), "infer", batch=68, seqlen=16384, heads=16, dtype="bf16")
    assert record.status == status, record.reason


@pytest.mark.parametrize("timing", ["hot", "graph", "eager"])
@pytest.mark.parametrize(
    "backend", [kept_cheats.KeptAsACopy, kept_cheats.KeptWhileItsInputsStay, OnAStreamThatBeginsEarly]
)
def test_other_timings_refuse_cheats_too(backend, timing):
    record = measure(backend(), "infer", timing, seqlen=4096)
    if (backend, timing) == (kept_cheats.KeptWhileItsInputsStay, "hot"):
        assert record.status == "ok"  # it computes once for each sample
    else:
        assert record.status in ("inaccurate", "error", "suspicious")
