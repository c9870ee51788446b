"""Faults of the compiler are found in PTX that has them, and correct PTX is not blamed."""

import pytest
from gla_kernels.inspection.ptx import overflowing_pairs, waits_first

FAULTY = """
\tmov.u32 \t%r4, %tid.x;
\tand.b32 \t%r13, %r4, 3;
\tmul.wide.u32 \t%rd36, %r4, 268435456;
\tcvt.u64.u32 \t%rd37, %r13;
\tshl.b64 \t%rd38, %rd37, 33;
\tor.b64 \t%rd39, %rd36, %rd38;
\tmov.b64 \t{_, %r18}, %rd39;
"""


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({}, 1),
        ({"%rd36, %r4, 268435456": "%rd36, %r4, 4194304"}, 0),
        ({"%rd36, %r4, 268435456": "%rd36, %r4, 8388608"}, 1),
        ({"%rd36, %r4, 268435456": "%rd36, %r13, 268435456"}, 0),
        ({"mov.u32 \t%r4, %tid.x": "ld.param.b32 \t%r4, [kernel_param_0]"}, 1),
        ({"or.b64": "add.s64"}, 1),
        ({"%rd36, %rd38": "%rd38, %rd36"}, 1),
        ({"%rd37, 33": "%rd37, 3"}, 0),
        ({"mul.wide.u32 \t%rd36, %r4, 268435456": "cvt.u64.u32 \t%rd36, %r4"}, 0),
        ({"mul.wide.u32 \t%rd36, %r4, 268435456": "shl.b64 \t%rd36, %rd35, 28"}, 1),
        ({"mul.wide.u32 \t%rd36, %r4, 268435456": "cvt.u64.u32 \t%rd35, %r4;\n\tshl.b64 \t%rd36, %rd35, 22"}, 0),
        ({"\tor.b64": "\tand.b64 \t%rd36, %rd36, 4294967295;\n\tor.b64"}, 0),
        ({"%rd36, %r4, 268435456": "%rd36, %r4, %r5"}, 0),
    ],
)
def test_a_lower_half_that_may_reach_into_the_upper_one_is_a_fault(changed, faults):
    ptx = FAULTY
    for old, new in changed.items():
        assert old in ptx
        ptx = ptx.replace(old, new)
    assert len(overflowing_pairs(ptx)) == faults


@pytest.mark.parametrize(
    ("ptx", "allowed", "right"),
    [
        ("griddepcontrol.wait;\nld.global.b32", [], True),
        ("ld.param.b64\ngriddepcontrol.wait;", [], True),
        ("st.global.b32\ngriddepcontrol.wait;", [], False),
        ("cp.async.cg.shared.global\ngriddepcontrol.wait;", [], False),
        ("cp.async.cg.shared.global\ngriddepcontrol.wait;\nld.global.b32", ["cp.async"], True),
        ("cp.async.cg.shared.global\nld.global.b32\ngriddepcontrol.wait;", ["cp.async"], False),
        ("ld.global.b32\ncp.async.cg.shared.global\ngriddepcontrol.wait;", ["cp.async", "ld.global"], True),
        ("st.global.b32\ngriddepcontrol.wait;", ["cp.async", "ld.global"], False),
        ("ld.global.b32", [], False),
        ("ld.global.b32", ["ld.global"], False),
    ],
)
def test_a_kernel_that_touches_memory_before_its_wait_is_found(ptx, allowed, right):
    assert waits_first(ptx, *allowed) == right
