"""First calls compile what later calls of the same form launch, for wide heads."""

import itertools

import pytest
import torch
from gla_kernels.hopper.wide import passes as wide
from gla_kernels.hopper.wide import pieces as wide_pieces
from gla_kernels.launching.buffers import Flags, Gradients, Inputs, failure_flags, flag_buffer
from gla_kernels.launching.call import Call
from gla_kernels.launching.plans import hopper_plan


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 256), (256, 128), (256, 256), (384, 128), (128, 192)])
def test_calls_of_the_same_form_launch_the_same_kernels(K, V, materialize, monkeypatch):
    launched = set()
    monkeypatch.setattr(
        Call,
        "launch",
        lambda self, kernel, tile, programs, arguments, switches, early=True: launched.add(
            (kernel.__name__, tile, tuple(switches.items()))
        ),
    )
    seen = {}
    for B, T, H in itertools.product((1, 2, 33), (250, 256, 2047, 2048, 32768), (1, 6, 10, 15, 17, 24, 32, 40)):
        call = Call(B, T, H, K, V, B, False, True, 1.0, torch.bfloat16, hopper_plan(K, V, torch.bfloat16))
        q, k, v, do, g = (torch.empty(B, T, H, D, device="meta") for D in (K, K, V, V, K))
        inputs, flags = Inputs(q, k, v, g, None), Flags.of(call, flag_buffer(call, q))
        kept = torch.empty(call.kept_shape(materialize), device="meta")
        state = torch.empty(call.state_shape(B), device="meta")
        launched.clear()
        wide.run_forward(
            call, inputs, flags, o=torch.empty_like(v), initial=None, final=None,
            states=kept if materialize else None, checkpoints=None if materialize else kept,
        )  # fmt: skip
        gradients = Gradients.empty(call, inputs, needs_dg=True)
        wide.run_backward(
            call, inputs, do, kept, flags, failure_flags(call, flags, False), gradients,
            dfinal=None, dinitial=state, materialized=materialize,
        )  # fmt: skip
        assert seen.setdefault(wide_pieces.form(call), set(launched)) == launched, (B, T, H)
    assert len(seen) > 2


def test_gradients_of_states_that_have_room_are_computed_at_once_and_states_slice_by_slice(monkeypatch):
    call = Call(33, 2048, 4, 128, 256, 33, False, True, 1.0, torch.bfloat16, hopper_plan(128, 256, torch.bfloat16))
    assert wide_pieces.carries(call)
    assert wide_pieces.parks_dstates(call)
    walks = []
    monkeypatch.setattr(
        Call,
        "launch",
        lambda self, kernel, tile, programs, arguments, switches, early=True: walks.append(
            switches["REVERSE"] if kernel.__name__ == "wide_recurrence" else kernel.__name__
        ),
    )
    q, k, v, do, g = (torch.empty(33, 2048, 4, D, device="meta") for D in (128, 128, 256, 256, 128))
    inputs, flags = Inputs(q, k, v, g, None), Flags.of(call, flag_buffer(call, q))
    wide.run_backward(
        call, inputs, do, torch.empty(call.kept_shape(False), device="meta"), flags, failure_flags(call, flags, False),
        Gradients.empty(call, inputs, needs_dg=True), dfinal=None,
        dinitial=torch.empty(call.state_shape(33), device="meta"), materialized=False,
    )  # fmt: skip
    assert walks == [True, *[False, "wide_gradients"] * 4]
