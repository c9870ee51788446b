"""Which calls are of one kind, and so need no checks again."""

import pytest
import torch
from fake_cuda import inputs_of
from gla_kernels import chunk_gla
from gla_kernels.operators import kinds
from torch.overrides import TorchFunctionMode


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(kinds, "_passes_by_kind", {})


def plain_inputs(**changes):
    tensors, _, _ = inputs_of(1, 20, 1, 16, 16, True, True, None)
    names = ("q", "k", "v", "g", "initial_state", "cu_seqlens")
    options = {"scale": None, "output_final_state": True, "materialize": True}
    return dict(zip(names, tensors, strict=True)) | options | changes


def test_under_autocast_calls_have_no_kind():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kinds.kind_of(**plain_inputs()) is None


def test_calls_that_checks_and_decisions_cannot_tell_apart_are_of_one_kind():
    assert kinds.kind_of(**plain_inputs()) == kinds.kind_of(**plain_inputs(q=torch.zeros(1, 20, 1, 16).bfloat16()))


@pytest.mark.parametrize(
    "changes",
    [
        {"q": torch.zeros(1, 21, 1, 16, dtype=torch.bfloat16)},
        {"k": torch.zeros(1, 20, 1, 32, dtype=torch.bfloat16)[..., :16]},
        {"v": torch.zeros(1, 20, 1, 16)},
        {"g": torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16)},
        {"g": None},
        {"initial_state": None},
        {"initial_state": torch.zeros(2, 1, 16, 16)},
        {"cu_seqlens": torch.tensor([0, 20])},
        {"scale": 0.5},
        {"output_final_state": False},
        {"q": torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16, requires_grad=True)},
        {"k": torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16, device="cpu").requires_grad_(), "materialize": False},
    ],
    ids=str,
)
def test_whatever_is_checked_or_decides_makes_another_kind(changes):
    assert kinds.kind_of(**plain_inputs(**changes)) not in (None, kinds.kind_of(**plain_inputs()))


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 1},
        {"scale": torch.tensor(1.0)},
        {"q": "not a tensor"},
        {"q": torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16, device="meta")},
        {"q": torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16).as_subclass(Subclass)},
        {"g": torch._neg_view(torch.ones(1, 20, 1, 16))},
        {"g": torch.zeros(1, 1, 20, 1, 16)},
    ],
    ids=str,
)
def test_calls_on_anything_but_plain_tensors_have_no_kind(changes):
    assert kinds.kind_of(**plain_inputs(**changes)) is None


def test_tensors_of_a_batch_and_inside_transforms_have_no_kind():
    found = []

    def look(q):
        found.append(kinds.kind_of(**plain_inputs(q=q)))
        return q.sum()

    batch = torch.zeros(2, 1, 20, 1, 16)
    torch.vmap(look)(batch)
    torch.func.grad(look)(batch[0])
    assert found == [None, None]


def test_a_mode_does_not_see_how_tensors_are_described():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    inputs = plain_inputs()
    with Mode():
        assert kinds.kind_of(**inputs) is None
    assert seen == []


@pytest.mark.parametrize(
    "changes",
    [
        {"g": torch.zeros(1, 20, 1, 16, dtype=torch.float16)},
        {"initial_state": torch.zeros(1, 1, 16, 32)[..., :16]},
        {"initial_state": torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)},
        {"cu_seqlens": torch.tensor([0, 1, 20, 1])[::2]},
        {"q": torch.zeros(1, 20, 1, 16, dtype=torch.float16)},
    ],
    ids=str,
)
def test_calls_that_change_their_inputs_first_are_not_repeated(changes):
    inputs = plain_inputs(**changes)
    assert not kinds.launches_on_its_inputs(*(inputs[name] for name in ("q", "g", "initial_state", "cu_seqlens")))


def test_kinds_are_known_once_a_call_has_succeeded_and_bounded(monkeypatch):
    monkeypatch.setattr(kinds, "_KINDS", 2)
    for name in ("a", "b", "c"):
        assert kinds.passes_of((name,)) is None
        kinds.remember((name,))
        assert kinds.passes_of((name,)) is kinds.passes_of((name,)) is not None
    assert len(kinds._passes_by_kind) == 1


def test_a_refused_call_is_refused_again():
    wrong = dict.fromkeys(("q", "k", "v", "g"), torch.zeros(1, 20, 1, 16, dtype=torch.bfloat16))
    wrong["k"] = torch.zeros(1, 20, 2, 16, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^k: "):
            chunk_gla(**wrong)
