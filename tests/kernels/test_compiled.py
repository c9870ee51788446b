"""What is in compiled kernels: how addresses are multiplied, and what a kernel does before the one before has ended."""

import os
import subprocess
import sys


def output_of(script):
    """What a script prints in a process that compiles kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


STRIDES_OF_64_BITS = """
import re, torch
from gla_kernels.inspection import ahead
from gla_kernels.launching.plans import hopper_plan
kind = ahead.type_of
ahead.type_of = lambda call, kernel, name, *others: "i64" if name.endswith("_b") else kind(call, kernel, name, *others)
call = ahead.call_of(128, 128, True, torch.bfloat16, hopper_plan(128, 128, torch.bfloat16))
forward = next(variant for variant in ahead.variants(call) if variant.name == "forward")
code = ahead.compile_kernel(call, forward, '90').asm["llir"]
print(*set(re.findall(r"mul[.]wide[^(]*[(]i32 [^,]+, (i[0-9]+)", code)))
"""


def test_a_stride_of_64_bits_is_not_cut_to_32():
    """In a batch with rows of 2^31 numbers or more, the batch stride is as large, and Triton passes it in 64 bits."""
    assert output_of(STRIDES_OF_64_BITS).split() == ["i32"]


WAITS_OF_GROUPS_OF_WARPS = """
import re, torch
from gla_kernels.inspection import ahead
from gla_kernels.inspection.ptx import waits_first
from gla_kernels.launching.plans import hopper_plan
call = ahead.call_of(128, 256, False, torch.bfloat16, hopper_plan(128, 256, torch.bfloat16), head_gated=True)
early = [variant for variant in ahead.variants(call) if variant.name == "wider forward, nothing given or kept"]
ptx = ahead.compile_kernel(call, early[0], '90').asm["ptx"]
first, second = re.split(r"setmaxnreg[.]inc[.]sync[.]aligned[.]u32[^0-9]*32;", ptx)
print(waits_first(first), waits_first(second), waits_first(second, "cp.async.cg"), early[0].reads_early)
name = "wider forward, nothing given or kept, with sums of gates"
first_of_a_call = next(variant for variant in ahead.variants(call) if variant.name == name)
ptx = ahead.compile_kernel(call, first_of_a_call, '90').asm["ptx"]
print(waits_first(ptx), ptx.count("griddepcontrol.wait"), first_of_a_call.reads_early)
"""


def test_each_group_of_warps_waits_for_the_kernel_that_makes_sums_of_gates():
    """The group that copies may begin with rows of k. It is behind the other in the text, so it is looked at alone.

    A kernel that makes the sums itself is a call's first: it waits once, before the groups part.
    """
    assert output_of(WAITS_OF_GROUPS_OF_WARPS) == "True False True ('cp.async.cg',)\nTrue 1 ()\n"


WAITS_OF_HEAD_FORWARD = """
import torch
from gla_kernels.inspection import ahead
from gla_kernels.inspection.ptx import waits_first
from gla_kernels.launching.plans import hopper_plan
plan = hopper_plan(80, 48, torch.bfloat16)
nothing = "forward, nothing given or kept"
calls = (True, False, nothing), (True, False, "forward"), (True, True, nothing), (False, False, nothing)
for head_gated, varlen, name in calls:
    call = ahead.call_of(80, 48, False, torch.bfloat16, plan, head_gated=head_gated, varlen=varlen)
    ptx = ahead.compile_kernel(call, next(x for x in ahead.variants(call) if x.name == name), '90').asm["ptx"]
    print(waits_first(ptx), waits_first(ptx, "cp.async.cg"), ptx.count("griddepcontrol.wait"))
"""


def test_a_forward_of_wide_heads_copies_rows_early_only_behind_the_kernel_that_makes_sums_of_gates():
    """With an initial state the kernel before may make that; packed, it reads where sequences are; without gates it may
    be a call's first kernel."""
    early, *late = output_of(WAITS_OF_HEAD_FORWARD).splitlines()
    assert (early, late) == ("False True 1", ["True True 1"] * 3)
