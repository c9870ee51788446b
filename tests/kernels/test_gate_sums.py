"""Which kernel makes the sums of a gate per head: the first of a forward, and no other."""

import itertools

import pytest
import torch
from gla_kernels.hopper.narrow import launches as narrow
from gla_kernels.hopper.wide import pieces
from gla_kernels.launching.buffers import Inputs
from gla_kernels.launching.call import Call
from gla_kernels.launching.plans import hopper_plan, triton_plan
from gla_kernels.operators import passes

KEEPS = [passes.KEEP_STATES, passes.KEEP_CHECKPOINTS, passes.KEEP_NOTHING]


def make_call(B, T, H, K, V, *, packed=False, hopper=True, gated=True):
    plan = hopper_plan(K, V, torch.bfloat16) if hopper else triton_plan(K, V, torch.bfloat16, None, gated)
    sequences = 3 if packed else B
    return Call(B, T, H, K, V, sequences, packed, False, 1.0, torch.bfloat16, plan, head_gated=gated)


def launches_of(call, keep, monkeypatch):
    """The kernels of a forward and of a backward, and how many chunks' sums each makes at once."""
    launched = []
    monkeypatch.setattr(
        Call, "launch", lambda _, kernel, *rest, **__: launched.append((kernel.__name__, rest[3].get("SUMS", 0)))
    )
    make = lambda *sizes: torch.empty(*sizes, dtype=torch.bfloat16, device="meta")  # noqa: E731
    q, k, v = (make(call.B, call.T, call.H, size) for size in (call.K, call.K, call.V))
    marks = torch.empty(4, dtype=torch.int32, device="meta") if call.varlen else None
    inputs = Inputs(q, k, v, None, marks, make(call.B, call.T, call.H))
    o, _, kept, buffer = passes.launch_forward(call, inputs, None, False, keep)
    forward = launched.copy()
    launched.clear()
    if kept is not None:
        passes.launch_backward(call, inputs, torch.empty_like(o), None, kept, buffer, False, True, keep)
    return forward, launched


@pytest.mark.parametrize(("K", "V"), [(32, 64), (64, 64), (128, 64), (128, 256), (128, 512), (256, 256)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("hopper", [True, False])
def test_the_first_kernel_of_a_forward_makes_them_and_no_other(K, V, packed, hopper, monkeypatch):
    for B, T, H, keep in itertools.product((1, 17, 20, 34), (64, 700, 2048, 2100, 20000), (4, 8, 16), KEEPS):
        call = make_call(1 if packed else B, T, H, K, V, packed=packed, hopper=hopper)
        forward, backward = launches_of(call, keep, monkeypatch)
        makers = [name == "head_gate_sums" or sums > 0 for name, sums in forward]
        assert makers == [True, *[False] * (len(makers) - 1)], (B, T, H, keep)
        assert not any(name == "head_gate_sums" or sums > 0 for name, sums in backward)


@pytest.mark.parametrize(
    ("B", "T", "H", "made"),
    [
        (8, 1024, 16, 32),
        (8, 2048, 16, 32),
        (8, 2049, 16, 0),
        (9, 1024, 16, 0),  # programs share multiprocessors
        (1, 4096, 16, 8),
        (1, 32768, 4, 8),
        (1, 32768, 16, 0),
    ],
)
def test_narrow_programs_with_few_chunks_make_them(B, T, H, made):
    """Of whole sequences up to 32 chunks, of pieces up to 8."""
    assert narrow.sums_made(make_call(B, T, H, 64, 64), checkpoints=False) == made
    assert narrow.sums_made(make_call(B, T, H, 64, 64, gated=False), checkpoints=False) == 0


@pytest.mark.parametrize(
    ("B", "T", "H", "K", "V", "made"),
    [
        (20, 2048, 4, 128, 256, True),
        (10, 2048, 4, 128, 512, True),
        (20, 2112, 4, 128, 256, False),
        (34, 2048, 4, 128, 256, False),  # programs with 128 columns
        (64, 2048, 4, 128, 256, False),  # two rounds
        (17, 2048, 8, 128, 512, False),  # full rounds, and a rest that is cut
        (20, 2048, 4, 128, 128, False),  # another kernel
        (20, 2048, 4, 256, 256, False),
        (1, 2048, 4, 128, 256, False),  # cut
    ],
)
def test_wide_programs_with_256_columns_and_few_chunks_make_them(B, T, H, K, V, made):
    assert (pieces.sums_made(make_call(B, T, H, K, V)) > 0) == made
    assert pieces.sums_made(make_call(B, T, H, K, V, gated=False)) == 0
