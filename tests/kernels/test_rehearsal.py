"""What a first call compiles before it launches, without a GPU: kernels here only note what is asked of them."""

import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gla_kernels.launching.call import Call
from gla_kernels.launching.plans import HOPPER, hopper_plan, triton_plan
from gla_kernels.operators import rehearsal
from gla_kernels.operators.rehearsal import rehearsing, unrehearsed
from triton.runtime._async_compile import active_mode


class Kernel:
    arg_names = ("x", "K", "BV")
    metadata = "metadata"

    def __init__(self):
        self.asked = []
        self.src = self

    def warmup(self, *arguments, **options):
        self.asked.append((arguments, options))
        return self

    @property
    def run(self):
        self.asked.append(("loaded", threading.current_thread()))


def make_call(K=64):
    return Call(1, 64, 1, K, 64, 1, False, True, 1.0, torch.bfloat16, HOPPER)


@pytest.fixture(autouse=True)
def compiling(monkeypatch):
    monkeypatch.setattr(rehearsal, "_rehearsed", set())
    monkeypatch.setattr(rehearsal, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def launcher_cls(source, metadata):
        source.asked.append(("launcher built", metadata))

    monkeypatch.setattr(rehearsal, "driver", SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher_cls)))


def test_launches_compile_and_load_a_kernel_once_and_do_not_run_it():
    kernel = Kernel()
    with rehearsing(make_call(), torch.device("cuda", 0)) as call:
        call.launch(kernel, HOPPER.forward, (3,), ("x",), {})
        call.launch(kernel, HOPPER.forward, (3,), ("x",), {})
    options = {"grid": (3,), "K": 64, "BV": 64, "num_warps": 4, "launch_pdl": True}
    assert kernel.asked[:3] == [(("x",), options)] * 2 + [("launcher built", "metadata")]
    assert [asked[0] for asked in kernel.asked[3:]] == ["loaded"]


def test_launchers_are_loaded_by_one_thread():
    """In several threads, Python gives a kernel another one's launcher now and then: they share a module's name."""
    kernels = [Kernel() for _ in range(4)]
    with rehearsing(make_call(), torch.device("cuda", 0)) as call:
        for kernel in kernels:
            call.launch(kernel, HOPPER.forward, (3,), ("x",), {})
    assert [kernel.asked[-1] for kernel in kernels] == [("loaded", threading.current_thread())] * 4


@pytest.mark.parametrize("early", [True, False])
def test_a_kernel_is_compiled_for_the_way_it_is_launched(early):
    kernel = Kernel()
    with rehearsing(make_call(), torch.device("cuda", 0)) as call:
        call.launch(kernel, HOPPER.forward, (3,), ("x",), {}, early=early)
    assert call.options(HOPPER.forward, early).items() <= kernel.asked[0][1].items()
    assert ("launch_pdl" in kernel.asked[0][1]) == early


def test_plain_triton_kernels_do_not_begin_early():
    """GPUs before Hopper cannot."""
    call = replace(make_call(), plan=triton_plan(64, 64, torch.bfloat16, None))
    assert "launch_pdl" not in call.options(HOPPER.forward, early=True)


def test_an_error_leaves_the_compiler_as_it_was():
    outer = object()
    active_mode.set(outer)
    with pytest.raises(KeyError), rehearsing(make_call(), torch.device("cuda", 0)):
        raise KeyError
    assert active_mode.get() is outer
    active_mode.set(None)


def test_a_kind_of_pass_is_rehearsed_once():
    assert unrehearsed(make_call(), "forward", True)
    assert not unrehearsed(make_call(), "forward", True)
    assert unrehearsed(make_call(), "forward", False)
    assert unrehearsed(make_call(K=32), "forward", True)


@pytest.mark.parametrize(("B", "H", "K", "V"), [(8, 16, 64, 64), (20, 4, 128, 256)])
def test_lengths_for_which_another_kernel_makes_the_sums_of_gates_are_rehearsed_apart(B, H, K, V):
    plan = hopper_plan(K, V, torch.bfloat16)
    of_32_chunks, of_33 = (
        Call(B, T, H, K, V, B, False, False, 1.0, torch.bfloat16, plan, head_gated=True) for T in (2048, 2112)
    )
    assert unrehearsed(of_32_chunks, "forward", True)
    assert unrehearsed(of_33, "forward", True)


def test_nothing_is_rehearsed_for_the_interpreter(monkeypatch):
    monkeypatch.setattr(rehearsal, "interpreting", lambda: True)
    assert not unrehearsed(make_call())
