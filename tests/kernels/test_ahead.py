"""Every kernel compiles for every architecture that we name, without a GPU, and fits its shared memory."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
from gla_kernels.inspection.ahead import SHARED
from gla_kernels.limits import fitting_chunks

# The most bytes of stack per thread on any GPU: of the exact kernels, which hardly ever have work, and of the others.
STACK = {"plain": 1024, "strong": 1024, "exact": 3584}
# The kernels of the ops: forward and backward, plain, strong and exact with gates, plain without; an exact backward
# from checkpoints; with gates, backwards without dg too. In the portable family also the recurrence; for narrow heads
# on Hopper also both recurrences, plain forms for pieces and from checkpoints, and plain kernels with a gate per head.
KERNELS = {"triton": 15, "hopper": 40}

# The command line for several shapes in one process, each with only the named kernels.
SOME = """
import json, sys
from gla_kernels.inspection import ahead

every = ahead.variants
for arguments, names in json.loads(sys.argv[1]):
    def wanted(call):
        gated = "gated " * call.gated + "per-head " * call.head_gated
        return [x for x in every(call) if gated + (x.form + " ") * (x.form != "plain") + x.name in names]
    ahead.variants = wanted
    sys.argv[1:] = arguments
    ahead.main()
"""


def full_name(kernel):
    # The command line calls kernels with a gate per head so itself.
    return "gated " * kernel["gated"] + (kernel["form"] + " ") * (kernel["form"] != "plain") + kernel["kernel"]


def compiled(*command):
    """The output of a process that compiles, because Triton's interpreter is on in this process."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def checked(found):
    """With what holds for every kernel."""
    for kernel in found:
        assert kernel.get("overflowing_pairs", 0) == 0, kernel
        assert kernel.get("waits_first", True), kernel
        assert kernel.get("faulty_descriptors", 0) == 0, kernel
        assert kernel["shared_bytes"] <= SHARED[kernel["arch"]], kernel
    return found


@cache
def compile_all(*arguments):
    return checked(compiled("-m", "gla_kernels.inspection.ahead", *arguments))


def compile_some(shapes):
    """`shapes`: arguments of the command line, and names of kernels; all of the names have to be found."""
    found = compiled("-c", SOME, json.dumps([(arguments.split(), names) for arguments, names in shapes.items()]))
    asked = [shape for shape, names in shapes.items() for _ in names]
    found = [kernel | {"shape": shape} for kernel, shape in zip(found, asked, strict=True)]
    for shape, names in shapes.items():
        assert {full_name(kernel) for kernel in found if kernel["shape"] == shape} == set(names)
    return checked(found)


def default_shape():
    names = ("forward", "backward", "recurrence")
    return compile_some({"--arch 90": (*names, *(f"gated {name}" for name in names), "gated backward, no dg")})


@cache
def narrow_heads():
    kernels = ("forward", "backward", "forward, pieces", "backward, pieces", "recurrence", "reverse recurrence")
    names = (*(f"gated {name}" for name in kernels), *kernels, "gated strong forward", "gated strong backward")
    names += ("per-head forward", "per-head backward", "per-head backward from checkpoints, pieces")
    names += ("gated backward, no dg",)
    return compile_some({"--family hopper": names})


def assert_fits(found):
    for kernel in found:
        assert kernel["stack_bytes"] <= STACK[kernel["form"]], kernel


def test_kernels_that_need_the_most_fit_every_architecture():
    """Shared memory (wide heads of bfloat16, the exact backward of float16) and registers (float32)."""
    exact = "gated exact backward from checkpoints"
    shapes = {
        "--arch 80 --key-dim 128 --value-dim 128 --dtype fp16": (exact,),
        "--arch 80 --key-dim 64 --value-dim 64": ("gated backward",),
        "--arch 89 --key-dim 256 --value-dim 256": ("gated forward", exact),
        "--arch 100 --key-dim 128 --value-dim 128": ("gated backward",),
        "--arch 120 --key-dim 512 --value-dim 512 --dtype fp32": ("gated backward",),
        "--arch gfx942 --key-dim 128 --value-dim 128": ("gated recurrence", "gated forward", "gated backward"),
    }
    assert_fits(compile_some(shapes))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("size", [32, 64, 128, 256, 512])
def test_all_kernels_of_all_shapes_fit_every_architecture(size, dtype):
    found = compile_all("--arch", *SHARED, "--key-dim", str(size), "--value-dim", str(size), "--dtype", dtype)
    assert [kernel["arch"] for kernel in found] == [arch for arch in SHARED for _ in range(KERNELS["triton"])]
    assert_fits(found)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["80", "89", "gfx942"])
@pytest.mark.parametrize(("size", "dtype"), [(64, "bf16"), (256, "bf16"), (64, "fp16"), (128, "fp32")])
def test_the_largest_chunks_fit_gpus_with_less_shared_memory(size, dtype, arch):
    chunk = max(fitting_chunks(size, 2 if dtype == "bf16" else 4, SHARED[arch]))
    compile_all(
        "--arch", arch, "--key-dim", str(size), "--value-dim", str(size), "--dtype", dtype, "--chunk", str(chunk)
    )  # fmt: skip


# The portable backward holds two factors of the gates, because one need not be the other's reciprocal.
@pytest.mark.parametrize(
    ("shape", "count", "bound"), [(default_shape, 7, 512), (narrow_heads, 16, 128)], ids=["triton", "hopper"]
)
def test_the_plain_kernels_of_the_default_shape_do_not_spill_much_on_hopper(shape, count, bound):
    found = [kernel for kernel in shape() if kernel["arch"] == "90" and kernel["form"] == "plain"]
    assert len(found) == count
    assert max(kernel["stack_bytes"] for kernel in found) <= bound


def test_the_strong_kernels_do_not_spill_much():
    found = [kernel for kernel in narrow_heads() if kernel["form"] == "strong"]
    assert len(found) == 2
    assert max(kernel["stack_bytes"] for kernel in found) <= 128


def assert_two_programs_fit(found):
    """228 KiB of shared memory, of which every program takes 1 KiB more than it requests, and 65,536 registers."""
    for kernel in found:
        assert kernel["waits_first"]
        if kernel["form"] != "exact":
            assert kernel["faulty_descriptors"] == 0
            assert kernel["shared_bytes"] + 1024 <= 228 * 1024 // 2
            assert kernel["registers"] * 128 <= 65536 // 2


def test_two_programs_of_the_hopper_kernels_fit_a_multiprocessor():
    assert_two_programs_fit(narrow_heads())


@pytest.mark.full
def test_two_programs_of_the_hopper_kernels_fit_a_multiprocessor_beside_the_exact_ones():
    found = compile_all("--family", "hopper")
    assert len(found) == KERNELS["hopper"]
    assert_two_programs_fit(found)


def assert_wide_kernels_do_not_spill_much(found):
    for kernel in found:
        assert kernel["waits_first"]
        if kernel["form"] == "plain":
            # All gradients at once, and everything that they are made from.
            assert kernel["stack_bytes"] <= (128 if kernel["kernel"] == "backward" else 64), kernel
            assert kernel["faulty_descriptors"] == 0
        else:
            assert kernel["stack_bytes"] <= STACK[kernel["form"]], kernel


# Every kernel there is, with gates in every form, without or per head in some; for heads that fill no block, if any do.
WIDE = {
    "all keys in one block": {
        "--key-dim 80 --value-dim 112": (
            "gated recurrence", "gated reverse recurrence", "gated forward", "gated forward, checkpoints",
            "gated gradients", "gated backward", "gated exact forward", "gated exact backward",
            "gated exact backward from checkpoints", "recurrence", "forward", "gradients", "backward",
            "gated gradients, no dg", "gated backward, no dg",
        ),
        "--key-dim 128 --value-dim 192": ("gated reverse recurrence, parked",),
        "--key-dim 128 --value-dim 128 --gates bf16": ("gated forward", "per-head forward", "per-head backward"),
    },
    "256 columns of values": {
        "--key-dim 128 --value-dim 256": (
            "gated wider recurrence", "gated wider reverse recurrence", "gated wider forward",
            "gated wider forward, checkpoints", "gated gradients, parked", "gated wider reverse recurrence, parked",
            "wider forward", "per-head wider forward",
        ),
    },
    "more blocks of keys": {
        "--key-dim 256 --value-dim 512": (
            "gated frames", "gated reverse frames", "gated walk", "gated reverse walk", "gated walk, checkpoints",
            "reverse walk", "per-head frames",
        ),
        "--key-dim 512 --value-dim 320": (
            "gated readout", "gated reverse readout", "gated gradients", "reverse readout", "per-head readout",
            "per-head gradients",
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("shapes", WIDE.values(), ids=WIDE)
def test_the_kernels_for_wide_heads_fit_a_hopper_gpu_and_do_not_spill_much(shapes):
    found = compile_some({f"--family hopper {shape}": names for shape, names in shapes.items()})
    assert_wide_kernels_do_not_spill_much(found)


@pytest.mark.full
@pytest.mark.parametrize(("K", "V"), [(128, 256), (128, 192), (256, 512), (80, 112), (512, 320)])
def test_all_kernels_for_wide_heads_fit_a_hopper_gpu_and_do_not_spill_much(K, V):
    found = compile_all("--family", "hopper", "--key-dim", str(K), "--value-dim", str(V))
    assert found
    assert_wide_kernels_do_not_spill_much(found)


LARGEST = [
    (64, 64, "bf16", 64),
    (128, 256, "bf16", 64),
    (256, 256, "bf16", 64),
    (128, 128, "fp32", 64),
    (60, 100, "fp16", 16),
]


@pytest.mark.full
@pytest.mark.parametrize(("K", "V", "dtype", "chunk"), LARGEST)
def test_all_kernels_of_the_largest_chunks_fit_a_hopper_gpu(K, V, dtype, chunk):
    shape = ["--key-dim", str(K), "--value-dim", str(V), "--dtype", dtype, "--chunk", str(chunk)]
    found = compile_all(*shape)
    assert len(found) == KERNELS["triton"]


STRIDES_OF_64_BITS = """
import re, torch
from gla_kernels.inspection import ahead
from gla_kernels.launching.plans import hopper_plan
kind = ahead._type
ahead._type = lambda call, name, constants: "i64" if name.endswith("_b") else kind(call, name, constants)
call = ahead.call_of(128, 128, True, torch.bfloat16, hopper_plan(128, 128, torch.bfloat16))
forward = next(variant for variant in ahead.variants(call) if variant.name == "forward")
code = ahead.compile_kernel(call, forward, '90').asm["llir"]
print(*set(re.findall(r"mul[.]wide[^(]*[(]i32 [^,]+, (i[0-9]+)", code)))
"""


def test_a_stride_of_64_bits_is_not_cut_to_32():
    """In a batch with rows of 2^31 numbers or more, the batch stride is as large, and Triton passes it in 64 bits."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", STRIDES_OF_64_BITS], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["i32"], done.stderr[-2000:]
