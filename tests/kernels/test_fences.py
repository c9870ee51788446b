"""Fences and barriers between what threads write to shared memory and products read: kernels need those they have.

A missing one shows on a GPU in one call of several, if at all.
"""

import ast
import sys
from pathlib import Path

import gla_kernels
import pytest
import torch
from gla_cases import linear_or_per_head, make_case, run
from gla_kernels import chunk_gla
from hopper_on_cpu import leave_out, on_hopper, set_multiprocessors

HOPPER = Path(gla_kernels.__file__).parent / "hopper"

# Calls that reach what a module has: gates, K, V, multiprocessors, what is kept.
NARROW = ("per channel", 64, 64, 1, "states")
WIDE = ("per channel", 128, 48, 1, "states")
WALK = ("none", 256, 256, 1, "states")
STRONG = ("strong", 64, 64, 1, "states")
CALLS = {
    "levels": [STRONG],
    "strong": [STRONG],
    "narrow.forward": [NARROW],
    "narrow.states": [("per channel", 64, 64, 1, "nothing")],
    "narrow.backward": [NARROW],
    "narrow.head_backward": [("per head", 64, 64, 1, "states")],
    "narrow.recurrence": [("per channel", 64, 64, 132, "states")],
    "wide.tiles": [WIDE],
    "wide.frames": [WALK, ("per channel", 256, 256, 1, "states"), ("per head", 256, 256, 1, "states")],
    "wide.walk": [WALK],
    "wide.forward": [WIDE, ("per channel", 128, 256, 1, "states")],
    "wide.head_forward": [("none", 128, 48, 1, "states")],
    "wide.specialized": [("none", 128, 256, 1, "states"), ("none", 128, 256, 1, "nothing")],
    "wide.recurrence": [WIDE],
    "wide.readout": [("per channel", 512, 64, 1, "states"), ("per head", 512, 64, 1, "states")],
    "wide.gradients": [WIDE, ("none", 128, 48, 132, "states"), ("none", 128, 256, 1, "states")],
    "wide.backward": [("per channel", 128, 128, 1, "states")],
}
# Functions whose fences are for other than products of their own: behind the first, every caller has one, too; that of
# the second is for barriers, before warps go apart.
OTHERS = [("levels", "fill_sums"), ("wide.specialized", "specialized_forward")]


def module_of(path):
    return ".".join(path.relative_to(HOPPER).with_suffix("").parts)


def fences():
    """Modules and lines of all fences."""
    found = []
    for path in sorted(HOPPER.rglob("*.py")):
        module = module_of(path)
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef) and (module, function.name) not in OTHERS:
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                found += [
                    (module, call.lineno) for call in calls if getattr(call.func, "id", "") == "fence_async_shared"
                ]
    return found


def barriers():
    """Modules and lines of the barriers behind which, as their comments say, no product reads what is then written."""
    return [
        (module_of(path), number)
        for path in sorted(HOPPER.rglob("*.py"))
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if "thread_barrier()  #" in text and "no product reads" in text
    ]


def run_without(monkeypatch, module, line):
    """Runs the module's calls without the fence or barrier on a line."""
    with on_hopper(monkeypatch):
        leave_out(monkeypatch, sys.modules[f"gla_kernels.hopper.{module}"], line)
        for gates, K, V, multiprocessors, keep in CALLS[module]:
            set_multiprocessors(monkeypatch, multiprocessors)
            sizes = {"T": 130, "H": 1, "K": K, "V": V, "dtype": torch.bfloat16}
            if gates in ("none", "per head"):
                function, case = linear_or_per_head(None if gates == "none" else "logsigmoid", **sizes)
            else:
                function, case = chunk_gla, make_case("strong" if gates == "strong" else "logsigmoid", **sizes)
            run(function, case.inputs, case.grads, materialize=keep)


@pytest.mark.parametrize(("module", "line"), fences())
def test_no_fence_can_be_left_out(monkeypatch, module, line):
    with pytest.raises(AssertionError, match="a product reads what no fence is behind"):
        run_without(monkeypatch, module, line)


@pytest.mark.parametrize(("module", "line"), barriers())
def test_no_barrier_between_a_product_and_what_is_written_over_it_can_be_left_out(monkeypatch, module, line):
    """Though Triton may have other reasons for one there, and then adds it."""
    with pytest.raises(AssertionError, match="another warp's product may still read"):
        run_without(monkeypatch, module, line)
