"""Every kernel compiles for every architecture we name, without a GPU, and fits its shared memory."""

import json
import os
import subprocess
import sys

import pytest

# Bytes of shared memory that a program may have: CUDA programming guide, technical specifications.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
# The ops' kernels: forward and backward, plain and exact with a gate, plain without.
KERNELS = 6


def compile_all(*arguments):
    """In a process of its own: this one has Triton's interpreter on."""
    command = [sys.executable, "-m", "gla_kernels.ahead", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert not any(kernel["overflowing_pairs"] for kernel in found)
    assert all(kernel["waits_first"] for kernel in found if "waits_first" in kernel)
    return found


def test_the_default_shape_compiles_for_every_architecture():
    found = compile_all("--arch", *map(str, SHARED))
    assert len(found) == KERNELS * len(SHARED)
    assert all(kernel["shared_bytes"] <= SHARED[kernel["arch"]] for kernel in found)


@pytest.mark.parametrize(("family", "bound"), [("triton", 256), ("hopper", 128)])
def test_the_plain_kernels_of_the_default_shape_do_not_spill_much_on_hopper(family, bound):
    found = compile_all("--arch", "90", "--family", family)
    assert max(kernel["stack_bytes"] for kernel in found if not kernel["exact"]) <= bound


def test_two_programs_of_the_hopper_kernels_fit_a_multiprocessor():
    """228 KiB of shared memory, of which every program takes 1 KiB more than it asks for, and 65,536 registers."""
    for kernel in compile_all("--arch", "90", "--family", "hopper"):
        assert kernel["waits_first"]
        if not kernel["exact"]:
            assert kernel["faulty_descriptors"] == 0
            assert kernel["shared_bytes"] + 1024 <= 228 * 1024 // 2
            assert kernel["registers"] * 128 <= 65536 // 2


@pytest.mark.parametrize(("K", "V"), [(128, 256), (128, 192), (256, 512), (80, 112), (512, 320)])
def test_the_kernels_for_wide_heads_fit_a_hopper_gpu_and_do_not_spill_much(K, V):
    found = compile_all("--arch", "90", "--family", "hopper", "--key-dim", str(K), "--value-dim", str(V))
    assert all(kernel["shared_bytes"] <= SHARED[90] for kernel in found)
    for kernel in found:
        if not kernel["exact"]:
            # All gradients at once, and all that they are made of.
            assert kernel["stack_bytes"] <= (128 if kernel["kernel"] == "backward" else 64)
            assert kernel["faulty_descriptors"] == 0
        else:
            assert kernel["stack_bytes"] <= 2048


@pytest.mark.parametrize(
    ("K", "V", "dtype", "chunk"),
    [
        (64, 64, "bf16", 64),
        (128, 256, "bf16", 64),
        (256, 256, "bf16", 32),
        (128, 128, "fp32", 32),
        (60, 100, "fp16", 16),
    ],
)
def test_the_largest_chunks_fit_a_hopper_gpu(K, V, dtype, chunk):
    shape = ["--key-dim", str(K), "--value-dim", str(V), "--dtype", dtype, "--chunk", str(chunk)]
    found = compile_all("--arch", "90", *shape)
    assert len(found) == KERNELS
    assert all(kernel["shared_bytes"] <= SHARED[90] for kernel in found)


STRIDES_OF_64_BITS = """
import re, torch
from gla_kernels import ahead
from gla_kernels.launch import hopper_plan
kind = ahead._type
ahead._type = lambda call, name, constants: "i64" if name.endswith("_b") else kind(call, name, constants)
call = ahead.call_of(128, 128, True, torch.bfloat16, hopper_plan(128, 128, torch.bfloat16))
forward = next(variant for variant in ahead.variants(call) if variant.name == "forward")
code = ahead.compile_kernel(call, forward, 90).asm["llir"]
print(*set(re.findall(r"mul[.]wide[^(]*[(]i32 [^,]+, (i[0-9]+)", code)))
"""


def test_a_stride_of_64_bits_is_not_cut_to_32():
    """Rows of a batch of 2^31 numbers or more are that far apart, and Triton hands such a stride on in 64 bits."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", STRIDES_OF_64_BITS], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["i32"], done.stderr[-2000:]
