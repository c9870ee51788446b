"""Gates and initial states that need no gradient, on a GPU: the other gradients against the float64 recurrence."""

import pytest
import torch
from gla_cases import assert_close, cumulative, make_case, run
from gla_kernels import chunk_gla

BOUNDS = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 5e-6}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# B, T, H, K, V, dtype: narrow heads, whole and in pieces; wide ones in one kernel, parked, in pieces, walked and read
# out; those of the portable kernels.
SHAPES = [
    (2, 600, 2, 64, 64, BF16), (1, 4096, 2, 64, 48, BF16), (8, 300, 16, 128, 112, BF16), (33, 512, 4, 128, 256, BF16),
    (1, 2100, 2, 128, 256, BF16), (2, 600, 2, 256, 256, BF16), (1, 300, 1, 304, 32, BF16), (2, 300, 2, 60, 100, BF16),
    (2, 300, 2, 64, 64, FP16), (2, 300, 2, 128, 256, FP16), (1, 300, 2, 64, 64, FP32), (1, 300, 1, 300, 20, FP32),
]  # fmt: skip


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("gate", ["mild", "strong", "one channel resets"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(map(str, shape)).replace("torch.", ""))
def test_the_other_gradients_are_right(shape, gate, materialize):
    """The third call and the fourth are repeated ones."""
    B, T, H, K, V, dtype = shape
    case = make_case(gate, B=B, T=T, H=H, K=K, V=V, dtype=dtype, device="cuda")
    first, *others = (
        run(chunk_gla, case.inputs, case.grads, frozen=("g", "initial"), materialize=materialize) for _ in range(4)
    )
    assert first.keys() == {"o", "final", "dq", "dk", "dv"}
    assert_close(first, case, BOUNDS[dtype])
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


@pytest.mark.parametrize("shape", [(64, 64), (128, 256), (60, 100)], ids=str)
def test_the_other_gradients_of_packed_sequences_are_right(shape):
    K, V = shape
    lengths = [300, 1, 0, 700]
    case = make_case("resets", H=4, K=K, V=V, dtype=BF16, device="cuda", lengths=lengths)
    found = run(chunk_gla, case.inputs, case.grads, frozen=("g",), cu_seqlens=cumulative(lengths).cuda())
    assert found.keys() == {"o", "final", "dq", "dk", "dv", "dinitial"}
    assert_close(found, case, BOUNDS[BF16])
