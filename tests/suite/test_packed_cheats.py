"""Packed documents and states: what is right passes, and what loses one of them is refused."""

import cheats
import pytest
import torch
from cheated import BACKWARDS, FORWARDS, LINEAR, measure
from product import product as cases


class Packed(cheats.Honest):
    """Right for packed documents, with states."""

    def bind(self, inputs, cell):
        has_final = "final" in LINEAR.outputs(cell)
        return lambda: LINEAR.reference(inputs) if has_final else LINEAR.reference(inputs)[0]


class Unpacked(Packed):
    """Takes the row for one sequence."""

    def bind(self, inputs, cell):
        return super().bind({name: x for name, x in inputs.items() if name != "cu_seqlens"}, cell)


class LosesFinalStates(Packed):
    """Right at the small size."""

    def bind(self, inputs, cell):
        whole = super().bind(inputs, cell)
        return lambda: (whole()[0], whole()[1] * (1.0 if cell.seqlen <= 256 else 0.96))


class LosesOneFinalState(Packed):
    def bind(self, inputs, cell):
        whole = super().bind(inputs, cell)

        def call():
            out, final = whole()
            return out, torch.cat([final[:1] * (1.0 if cell.seqlen <= 256 else 0.8), final[1:]])

        return call


class WithoutFinalStates(Packed):
    def bind(self, inputs, cell):
        whole = super().bind(inputs, cell)
        return lambda: whole()[0]


@cases(
    lambda kind, pass_: kind == "packed, both" or pass_ in ("infer", "fwd+bwd"),
    kind={"packed": ("on", None), "both": (None, "both"), "packed, in": ("on", "in"), "packed, both": ("on", "both")},
    pass_=[*FORWARDS, *BACKWARDS],
)
def test_packed_documents_and_states_are_compared_too(kind, pass_):
    packed, state = kind
    record = measure(Packed(), pass_, packed=packed, state=state)
    assert (record.status, record.reason) == ("ok", None)
    states = {"final"} if state == "both" else set()
    if pass_ != "infer":
        states |= {"dinitial"} if state else set()
    assert {name for name in record.rel_error if name in ("final", "dinitial")} == states


@pytest.mark.parametrize(
    ("backend", "packed", "state", "reason"),
    [
        (Unpacked, "on", None, "relative error beyond"),
        (LosesFinalStates, None, "out", "final 4.0e-02"),
        (LosesFinalStates, "on", "both", "final 4.0e-02"),
        (LosesOneFinalState, "on", "out", "own size: final "),
        (WithoutFinalStates, None, "out", "the call must return a tuple of 2 tensors: o, final"),
    ],
)
def test_wrong_documents_and_states_are_refused(backend, packed, state, reason):
    record = measure(backend(), "infer", packed=packed, state=state)
    assert record.status in ("inaccurate", "error")
    assert reason in record.reason
