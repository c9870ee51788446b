"""The functions in C: how they describe tensors, and what becomes of calls without them."""

import ctypes
import os
import struct
import subprocess
import sys

import pytest
import torch
from gla_cases import assert_close, make_case, run
from gla_kernels import chunk_gla
from gla_kernels.launching import native
from gla_kernels.launching.replay import Plan
from gla_kernels.operators import kinds, plain


def described(*tensors):
    """(device type, device, dims + 1, dtype), sizes and strides of each."""
    found = native.functions().describe(*tensors)
    return None if found is None else [(x[:4], x[4:8], x[8:]) for x in struct.iter_unpack("4i8q", found)]


def test_sizes_and_strides_are_described_even_where_they_do_not_matter():
    x = torch.zeros(20000, dtype=torch.bfloat16)
    tensors = [x.as_strided((1, 100, 1, 64), (7, 128, 3, 1)), x[:6].view(2, 3), None, x[0]]
    (first, *layout), second, third, last = described(*tensors)
    assert layout == [(1, 100, 1, 64), (7, 128, 3, 1)]
    assert first[2] == 5
    assert second == ((*first[:2], 3, first[3]), (2, 3, 0, 0), (3, 1, 0, 0))
    assert third == ((0,) * 4, (0,) * 4, (0,) * 4) != last


def test_dtypes_differ():
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.bool, torch.uint8]
    assert len({kinds._describe(torch.zeros(3, dtype=dtype)) for dtype in dtypes}) == len(dtypes)


@pytest.mark.parametrize(
    "x", [3, "q", torch.zeros(2, device="meta"), torch.eye(3).to_sparse(), torch.zeros([1] * 5)], ids=str
)
def test_what_has_no_plain_memory_is_not_described(x):
    assert described(torch.zeros(3), x) is None
    assert described(torch.zeros(3)) is not None  # no exception is left behind


@pytest.mark.parametrize(
    "x", [torch._efficientzerotensor((2, 3)), torch._to_functional_tensor(torch.ones(2, 3))], ids=["zeros", "wrapper"]
)
def test_tensors_without_memory_are_not_plain(x):
    assert described(x) is None
    assert not plain.is_plain(x)


def test_describing_tensors_keeps_no_references():
    x = torch.zeros(3)
    counts = [sys.getrefcount(y) for y in (x, None, torch.Tensor, torch.Tensor.is_neg)]
    for _ in range(100):
        described(x, None)
        described(x, 3)
    after = [sys.getrefcount(y) for y in (x, None, torch.Tensor, torch.Tensor.is_neg)]
    assert all(abs(now - before) < 50 for now, before in zip(after, counts, strict=True))


def test_more_tensors_than_there_is_room_for_are_not_described():
    assert described(*[torch.zeros(3)] * 16) is not None
    assert described(*[torch.zeros(3)] * 17) is None


def test_the_plan_has_the_layout_of_the_c_structure():
    assert [Plan.cells.offset, Plan.launch.offset, ctypes.sizeof(Plan)] == [64, 112, struct.calcsize("8q9P")]


def test_processes_may_build_the_functions_at_the_same_time(tmp_path):
    code = "from gla_kernels.launching.native import functions; assert functions() is not None"
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=variables) for _ in range(2)]
    assert [each.wait(timeout=60) for each in started] == [0, 0]
    (built,) = (path for path in tmp_path.rglob("*") if path.is_file())  # nothing is left beside it
    assert built.name.startswith("gla_kernels_native")


@pytest.mark.parametrize("missing", ["compiler", "functions of tensors", "known functions"])
def test_without_the_functions_calls_are_right(missing, monkeypatch):
    if missing == "compiler":
        monkeypatch.setattr("triton.runtime.build.compile_module_from_src", lambda *_: 1 / 0)
    elif missing == "known functions":
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", object())
    else:
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    native._build.cache_clear()
    assert native._build() is None
    monkeypatch.setattr(native, "functions", native._build)
    case = make_case("mild", T=40, K=16, V=16)
    for _ in range(3):
        assert_close(run(chunk_gla, case.inputs, case.grads), case, 5e-6)
    native._build.cache_clear()
