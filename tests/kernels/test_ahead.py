"""Every kernel compiles for every architecture that we name, without a GPU, and fits its shared memory."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import cache

import pytest
from gla_kernels.inspection.ahead import SHARED
from gla_kernels.limits import fitting_chunks
from product import product

from glabench.inspecting.request import Request

# The most bytes of stack per thread on any GPU: of the exact kernels, which hardly ever have work, and of the others.
STACK = {"plain": 1024, "strong": 1024, "exact": 3584}
# Of those with gates of values, whose float32 operands take twice the registers.
VALUE_GATED_STACK = 2048
# The kernels of the ops: forward and backward, plain, strong and exact with gates, plain without; an exact backward
# from checkpoints; with gates, backwards without dg too; plain kernels with a gate per head, and their sums. In the
# portable family also the recurrence; for narrow heads on Hopper also both recurrences, plain forms for pieces and from
# checkpoints, and both scans over pieces. In both, those that clear tails and, if chunks have their usual length, those
# with gates of values, beside those of keys and alone.
VALUE_GATED = 2 * 8
KERNELS = {"triton": 23 + VALUE_GATED, "hopper": 50 + VALUE_GATED}


# The worker of `glabench inspect`, whose requests are the lines that it is given; a null ends what it answers.
COMPILER = """
import json, sys
from glabench.inspecting import worker
for line in sys.stdin:
    sys.argv[1:] = json.loads(line)
    worker.main()
    print("null", flush=True)
"""


@cache
def compiler():
    """A process for all tests, since loading torch and Triton takes longer than compiling a kernel."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", COMPILER], env=environment, **pipes)


@pytest.fixture(autouse=True, scope="module")
def ended_compiler():
    yield
    if compiler.cache_info().currsize:
        compiler().communicate()
        compiler.cache_clear()


def kernels_of(requests):
    process, found = compiler(), []
    try:
        print(json.dumps([json.dumps(asdict(request)) for request in requests]), file=process.stdin, flush=True)
        for kernel in map(json.loads, process.stdout):
            if kernel is None:
                return found
            found.append(kernel)
        raise AssertionError("the worker ended")
    except BaseException:  # the next test has a process of its own, without answers that are left of this one
        compiler.cache_clear()
        process.kill()
        process.communicate()
        raise


def checked(found):
    """With what holds for every kernel."""
    for kernel in found:
        assert not kernel["faults"], kernel
        assert kernel["shared_bytes"] <= SHARED[kernel["arch"].removeprefix("sm_")], kernel
        assert kernel["tensor_columns"] <= 512, kernel
    return found


@cache
def compile_all(size, value_dim=None, dtype="bf16", archs=("90",), chunk=None, family="triton"):
    return checked(kernels_of([Request(archs, size, value_dim or size, dtype, chunk, family)]))


def compile_some(requests):
    """The kernels of several requests, by one process; all names that these have must be found."""
    found = kernels_of(requests)
    asked = [(arch, name) for each in requests for arch in each.archs for name in each.names]
    assert sorted((kernel["arch"].removeprefix("sm_"), kernel["kernel"]) for kernel in found) == sorted(asked)
    return checked(found)


def request_of(family, K, V, names, arch="90", dtype="bf16", gates="fp32"):
    return Request((arch,), K, V, dtype, None, family, gates=gates, names=names)


def default_shape():
    names = ("forward", "backward", "recurrence")
    names += (*(f"{kind} {name}" for kind in ("gated", "per-head") for name in names), "gated backward, no dg")
    return compile_some([request_of("triton", 64, 64, names)])


@cache
def narrow_heads():
    kernels = ("forward", "backward", "forward, pieces", "backward, pieces", "recurrence", "reverse recurrence")
    plain = [name for name in kernels if "pieces" not in name]
    names = (*(f"gated {name}" for name in kernels), *plain, "gated strong forward", "gated strong backward")
    names += ("per-head forward", "per-head backward", "per-head backward from checkpoints, pieces")
    names += tuple(f"per-head {name}, with sums of gates" for name in ("forward", "recurrence"))
    names += ("gated backward, no dg",)
    return compile_some([request_of("hopper", 64, 64, names)])


def narrow_pieces_without_gates():
    return compile_some([request_of("hopper", 64, 64, ("forward, pieces", "backward, pieces"))])


def assert_fits(found):
    for kernel in found:
        of_values = kernel["kernel"].startswith("value-gated")
        assert kernel["stack_bytes"] <= (VALUE_GATED_STACK if of_values else STACK[kernel["form"]]), kernel


def test_kernels_that_need_the_most_fit_every_architecture():
    """Shared memory (wide heads of bfloat16, the exact backward of float16) and registers (float32)."""
    exact = "gated exact backward from checkpoints"
    of_amd = ("gated recurrence", "gated forward", "gated backward")
    requests = [
        request_of("triton", 128, 128, (exact,), "80", "fp16"),
        request_of("triton", 64, 64, ("gated backward", "per-head backward"), "80"),
        request_of("triton", 256, 256, ("gated forward", exact), "89"),
        request_of("triton", 128, 128, ("gated backward",), "100"),
        request_of("triton", 512, 512, ("gated backward", "per-head backward"), "120", "fp32"),
        request_of("triton", 128, 128, of_amd, "gfx942"),
    ]
    assert_fits(compile_some(requests))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("size", [32, 64, 128, 256, 512])
def test_all_kernels_of_all_shapes_fit_every_architecture(size, dtype):
    found = compile_all(size, dtype=dtype, archs=tuple(SHARED))
    expected = [arch for arch in SHARED for _ in range(KERNELS["triton"])]
    assert [kernel["arch"].removeprefix("sm_") for kernel in found] == expected
    assert_fits(found)


@pytest.mark.full
@pytest.mark.parametrize("arch", ["80", "89", "100", "gfx942"])
@pytest.mark.parametrize(("size", "dtype"), [(64, "bf16"), (256, "bf16"), (64, "fp16"), (128, "fp32")])
def test_the_largest_chunks_fit_gpus_with_less_shared_memory_or_with_tensor_memory(size, dtype, arch):
    chunk = max(fitting_chunks(size, 2 if dtype == "bf16" else 4, SHARED[arch], tensor_memory=arch == "100"))
    assert compile_all(size, dtype=dtype, archs=(arch,), chunk=chunk)


def test_a_kernel_for_long_chunks_has_more_than_32_registers():
    """Which is all that ptxas 12.8 gives this one, unless it is told that it may take 255."""
    request = Request(("80",), 64, 64, "bf16", 64, "triton", names=("per-head backward",))
    assert [kernel["registers"] > 32 for kernel in compile_some([request])] == [True]


def test_the_plain_backward_of_the_default_shape_does_not_spill_on_amds_gpus():
    (kernel,) = compile_some([request_of("triton", 64, 64, ("gated backward",), arch="gfx942")])
    assert kernel["stack_bytes"] == 0


# The portable backward holds two factors of the gates, because one need not be the other's reciprocal.
@pytest.mark.parametrize(
    ("shape", "count", "bound"),
    [
        pytest.param(default_shape, 10, 512, id="triton"),
        pytest.param(narrow_heads, 16, 128, id="hopper"),
        pytest.param(narrow_pieces_without_gates, 2, 128, id="pieces without gates", marks=pytest.mark.full),
    ],
)
def test_the_plain_kernels_of_the_default_shape_do_not_spill_much_on_hopper(shape, count, bound):
    found = [kernel for kernel in shape() if kernel["form"] == "plain"]
    assert len(found) == count
    assert max(kernel["stack_bytes"] for kernel in found) <= bound


def test_the_strong_kernels_do_not_spill_much():
    found = [kernel for kernel in narrow_heads() if kernel["form"] == "strong"]
    assert len(found) == 2
    assert max(kernel["stack_bytes"] for kernel in found) <= 128


# Scans over pieces, sums of gates per head, zeros behind packed sequences.
AROUND_OTHERS = {
    "of each kind": [
        request_of("hopper", 64, 64, (
            "gated scan", "gated reverse scan", "reverse scan", "per-head scan",
            "gated tails", "tails", "per-head tails", "per-head sums of gates",
        )),
        request_of("hopper", 64, 64, ("gated tails", "per-head sums of gates"), gates="bf16"),
        request_of("hopper", 128, 256, ("per-head sums of gates", "per-head tails")),
        *(request_of("triton", 64, 64, ("gated tails", "tails"), arch) for arch in ("80", "gfx942")),
    ],
    "others": [
        request_of("hopper", 64, 64, ("scan", "per-head reverse scan")),
        request_of("hopper", 128, 256, ("gated scan", "reverse scan")),
        request_of("triton", 64, 64, ("gated tails", "tails"), "100"),
    ],
}  # fmt: skip


@product(lambda requests: requests == "of each kind", requests=AROUND_OTHERS)
def test_the_kernels_around_others_keep_everything_in_registers(requests):
    assert not [kernel for kernel in compile_some(requests) if kernel["stack_bytes"]]


OF_VALUES = tuple(f"value-gated {name}" for name in ("states", "reverse states"))
PARTS_OF_VALUES = ("outputs", "gradients of values", "gradients of keys")
ALONE = tuple(f"value-gated {name}, values alone" for name in ("states", *PARTS_OF_VALUES))
WITH_GATES_OF_VALUES = {
    "of each kind": [
        request_of("hopper", 128, 256, (
            *OF_VALUES, *(f"value-gated {part}" for part in PARTS_OF_VALUES),
            *(f"value-gated strong {part}" for part in PARTS_OF_VALUES[1:]), *ALONE,
        )),
        *(
            request_of("triton", 64, 64, (OF_VALUES[0], "value-gated strong gradients of keys"), arch)
            for arch in ("80", "gfx942")
        ),
    ],
    "others": [
        request_of("hopper", 128, 256, ("value-gated strong outputs",)),
        request_of("triton", 64, 64, ALONE, "80"),
        request_of("triton", 64, 64, ("value-gated gradients of keys",), "80"),
        request_of("triton", 64, 64, (
            OF_VALUES[0], "value-gated gradients of keys", "value-gated strong gradients of keys",
        ), "100"),
    ],
}  # fmt: skip


@product(lambda requests: requests == "of each kind", requests=WITH_GATES_OF_VALUES)
def test_the_kernels_with_gates_of_values_fit_every_architecture(requests):
    for kernel in compile_some(requests):
        assert kernel["stack_bytes"] <= (64 if kernel["form"] == "plain" else 640), kernel


def test_chunks_of_a_given_length_have_no_gates_of_values():
    request = Request(("90",), 64, 64, "bf16", 64, "hopper", "value-gated")
    assert not kernels_of([request])


def assert_two_programs_fit(found, warps=4):
    """228 KiB of shared memory, of which every program takes 1 KiB more than it requests, and 65,536 registers."""
    for kernel in found:
        if kernel["form"] != "exact":
            assert kernel["shared_bytes"] + 1024 <= 228 * 1024 // 2
            assert kernel["registers"] * 32 * warps <= 65536 // 2


def test_two_programs_of_the_hopper_kernels_fit_a_multiprocessor():
    assert_two_programs_fit(narrow_heads())


@pytest.mark.full
def test_two_programs_of_the_hopper_kernels_fit_a_multiprocessor_beside_the_exact_ones():
    found = compile_all(64, family="hopper")
    assert len(found) == KERNELS["hopper"]
    assert_two_programs_fit(found)


def assert_wide_kernels_do_not_spill_much(found):
    for kernel in found:
        # A backward makes all gradients at once, and everything that they are made from.
        bound = 128 if kernel["kernel"].endswith("backward") else 64
        assert kernel["stack_bytes"] <= (bound if kernel["form"] == "plain" else STACK[kernel["form"]]), kernel


def test_two_programs_of_the_gradients_fit_a_multiprocessor_if_values_are_one_block():
    found = compile_some([request_of("hopper", 128, 64, ("gradients", "per-head gradients"), gates="fp32")])
    assert_two_programs_fit(found, warps=8)
    assert all(kernel["stack_bytes"] == 0 for kernel in found)


# Every kernel there is, with gates in every form, without or per head in some; for heads that fill no block, if any do.
WIDE = {
    "all keys in one block": [
        (80, 112, "fp32", (
            "gated recurrence", "gated reverse recurrence", "gated forward", "gated forward, checkpoints",
            "gated gradients", "gated backward", "gated exact forward", "gated exact backward",
            "gated exact backward from checkpoints", "recurrence", "forward", "gradients", "backward",
            "gated gradients, no dg", "gated backward, no dg",
        )),
        (128, 192, "fp32", ("gated reverse recurrence, parked",)),
        (128, 128, "bf16", ("gated forward", "per-head forward, nothing given or kept", "per-head backward")),
    ],
    "256 columns of values": [
        (128, 256, "fp32", (
            "gated wider recurrence", "gated wider reverse recurrence", "gated wider forward",
            "gated wider forward, checkpoints", "gated gradients, parked", "gated wider reverse recurrence, parked",
            "wider forward", "per-head wider forward",
            "per-head wider forward, nothing given or kept, with sums of gates",
        )),
    ],
    "more blocks of keys": [
        (256, 512, "fp32", (
            "gated frames", "gated reverse frames", "gated walk", "gated reverse walk", "gated walk, checkpoints",
            "reverse walk", "per-head frames",
        )),
        (512, 320, "fp32", (
            "gated readout", "gated reverse readout", "gated gradients", "reverse readout", "per-head readout",
            "per-head gradients",
        )),
    ],
}  # fmt: skip


@product(lambda shapes: shapes == "more blocks of keys", shapes=WIDE)
def test_the_kernels_for_wide_heads_fit_a_hopper_gpu_and_do_not_spill_much(shapes):
    requests = [request_of("hopper", K, V, names, gates=gates) for K, V, gates, names in shapes]
    assert_wide_kernels_do_not_spill_much(compile_some(requests))


@pytest.mark.full
@pytest.mark.parametrize(("K", "V"), [(128, 256), (128, 192), (256, 512), (80, 112), (512, 320)])
def test_all_kernels_for_wide_heads_fit_a_hopper_gpu_and_do_not_spill_much(K, V):
    found = compile_all(K, V, family="hopper")
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
    assert len(compile_all(K, V, dtype, chunk=chunk)) == KERNELS["triton"] - VALUE_GATED


LAUNCHED_BUT_NOT_COMPILED = """
from itertools import product
import torch
from gla_kernels.inspection import ahead
from gla_kernels.launching.buffers import Inputs
from gla_kernels.launching.call import Call, make_call
from gla_kernels.launching.plans import hopper_plan, plan_text, triton_plan
from gla_kernels.operators.passes import KEEP_CHECKPOINTS, KEEP_STATES, launch_backward, launch_forward

launched, wrong = set(), set()
types = {"bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64", "int32": "*i32", "int64": "*i64"}

def launch(call, kernel, tile, programs, arguments, switches, early=True):
    launched.add(kernel.__name__)
    if kernel.__name__ == "clear_tails_kernel":  # compiled as for a backward, and launched by forwards too
        return
    constants = call.constants(tile) | switches
    for name, x in zip([name for name in kernel.arg_names if name not in constants], arguments, strict=True):
        compiled = ahead.type_of(call, kernel, name, {})
        if isinstance(x, torch.Tensor) and x.numel() and types[str(x.dtype).removeprefix("torch.")] != compiled:
            wrong.add((kernel.__name__, name, str(x.dtype), compiled))

Call.launch = launch
heads = (64, 64), (128, 128), (128, 256), (256, 512), (512, 320)
kinds = ("", "g", "h", "bf16 g", "bf16 h")
for (K, V), of_hopper, gates, packed, H in product(heads, (False, True), kinds, (0, 1), (1, 300)):
    dtype = torch.bfloat16 if of_hopper or H == 1 else torch.float32
    make = lambda *sizes, dtype=dtype: torch.empty(1, 2048, H, *sizes, dtype=dtype, device="meta")
    marks = torch.empty(3, dtype=torch.int64, device="meta") if packed else None
    given = {"dtype": torch.bfloat16 if "bf16" in gates else torch.float32}
    q, k, v, g = make(K), make(K), make(V), {"": None, "g": make(K, **given), "h": make(**given)}[gates[-1:]]
    plan = hopper_plan(K, V, q.dtype) if of_hopper else triton_plan(K, V, q.dtype, None, bool(gates))
    call = make_call(q, v, g, marks, 1.0, None, plan_text(plan))
    state = torch.empty(call.state_shape(call.sequences), device="meta")
    launched.clear()
    for keep in (KEEP_STATES, KEEP_CHECKPOINTS):
        inputs = Inputs.of(call, q, k, v, g, marks)
        o, final, kept, flags = launch_forward(call, inputs, state, True, keep)
        launch_backward(call, inputs, torch.empty_like(v), state, kept, flags, True, bool(gates), keep)
    compiled = {variant.kernel.__name__ for variant in ahead.variants(call)}
    if missing := launched - compiled:
        print(plan.family, K, V, gates, packed, H, *sorted(missing))
for each in sorted(wrong):
    print(*each)
print("all seen:", *sorted(launched & {"scan_pieces", "clear_tails_kernel", "head_gate_sums"}))
"""


def test_every_kernel_that_a_call_launches_is_among_those_compiled_with_its_types():
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", LAUNCHED_BUT_NOT_COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "all seen: clear_tails_kernel head_gate_sums scan_pieces\n", done.stderr[-2000:]
