"""A wrong argument of a kernel is a ValueError that names it."""

from types import SimpleNamespace

import pytest
import torch
from gla_kernels import chunk_gla, chunk_linear_attn, fused_recurrent_gla, two_level_chunk_gla
from gla_kernels.launching import device
from gla_kernels.launching.device import Gpu


def tensors(B=1, T=8, H=2, K=16, V=16, dtype=torch.float32):
    shape = (B, T, H)
    return {
        "q": torch.zeros(*shape, K, dtype=dtype),
        "k": torch.zeros(*shape, K, dtype=dtype),
        "v": torch.zeros(*shape, V, dtype=dtype),
        "g": torch.zeros(*shape, K),
    }


WRONG = {
    "q: got shape": {"q": torch.zeros(8, 2, 16)},
    "k: got shape": {"k": torch.zeros(1, 8, 2, 8)},
    "v: got shape": {"v": torch.zeros(1, 9, 2, 16)},
    "g: got shape": {"g": torch.zeros(1, 8, 1, 16)},
    "k: got torch.bfloat16": {"k": torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)},
    "g: got torch.int64": {"g": torch.zeros(1, 8, 2, 16, dtype=torch.int64)},
    "initial_state: got shape": {"initial_state": torch.zeros(1, 2, 16, 8)},
    "initial_state: got torch.float64": {"initial_state": torch.zeros(1, 2, 16, 16, dtype=torch.float64)},
    "chunk_size: got 24": {"chunk_size": 24},
    "chunk_size: got 16.0": {"chunk_size": 16.0},
    "scale: got Tensor": {"scale": torch.ones(())},
    "g: got None": {"g": None},
    "chunk_size: got 128": {"chunk_size": 128},
    "cu_seqlens: got shape": {"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)},
    "cu_seqlens: got 1 numbers": {"cu_seqlens": torch.zeros(1, dtype=torch.int32)},
    "cu_seqlens: got torch.float32": {"cu_seqlens": torch.tensor([0.0, 8.0])},
    "initial_state: got shape .* it needs one state per sequence": {
        "cu_seqlens": torch.tensor([0, 4, 8]),
        "initial_state": torch.zeros(1, 2, 16, 16),
    },
    "g: got device meta": {"g": torch.zeros(1, 8, 2, 16, device="meta")},
}


@pytest.mark.parametrize("message", list(WRONG))
def test_the_argument_is_named(message):
    with pytest.raises(ValueError, match=message):
        chunk_gla(**tensors() | WRONG[message])


@pytest.mark.parametrize(("dims", "message"), [({"K": 513}, "q: got K = 513"), ({"V": 1040}, "v: got V = 1040")])
def test_head_dims_beyond_the_limit_are_refused(dims, message):
    with pytest.raises(ValueError, match=message):
        chunk_gla(**tensors(**dims))


WRONG_VALUES = {
    "g: got a gate of 0.5": {"g": torch.full((1, 8, 2, 16), 0.5)},
    "g: got a gate of nan": {"g": torch.full((1, 8, 2, 16), torch.nan)},
    "cu_seqlens: got .0, 9.; it needs": {"cu_seqlens": torch.tensor([0, 9])},
    "cu_seqlens: got .0, 6, 4, 8.": {"cu_seqlens": torch.tensor([0, 6, 4, 8])},
}


@pytest.mark.parametrize("message", list(WRONG_VALUES))
def test_wrong_values_are_named_when_a_check_is_asked_for(message):
    with pytest.raises(ValueError, match=message):
        chunk_gla(**tensors() | WRONG_VALUES[message], check=True)


def test_packed_sequences_in_more_than_one_row_are_refused():
    with pytest.raises(ValueError, match="q: got B = 2 beside cu_seqlens"):
        chunk_gla(**tensors(B=2), cu_seqlens=torch.tensor([0, 8]))


def test_float64_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="naive_recurrent_gla"):
        chunk_gla(**tensors(dtype=torch.float64))


def test_empty_heads_are_refused():
    with pytest.raises(ValueError, match="no empty dimension"):
        chunk_gla(**tensors(H=0))


def test_a_cpu_tensor_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    given = tensors()
    del given["g"]
    with pytest.raises(ValueError, match="device cpu; it needs a GPU"):
        chunk_linear_attn(**given)


def test_chunks_whose_products_do_not_fit_tensor_memory_are_refused(monkeypatch):
    monkeypatch.setattr("gla_kernels.operators.checks.gpu_of", lambda device: Gpu(tensor_memory=True))
    with pytest.raises(ValueError, match=r"chunk_size: got 64; it needs one of \(16, 32\)"):
        chunk_gla(**tensors(dtype=torch.bfloat16), chunk_size=64)


@pytest.mark.parametrize(("major", "there"), [(9, False), (10, True), (12, False)])
def test_gpus_of_compute_capability_10_have_tensor_memory(major, there, monkeypatch):
    found = SimpleNamespace(major=major, multi_processor_count=148, shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: found)
    assert device._gpu.__wrapped__(0) == Gpu(148, 227 * 1024, there)


def test_a_chunk_that_its_subchunks_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="chunk_size: got 40"):
        two_level_chunk_gla(**tensors(), chunk_size=40)


LISTED = {"q": "q: got list; it needs a tensor", "initial_state": "initial_state: got list; it needs a tensor, or None"}


@pytest.mark.parametrize("materialize", [True, "nothing"])
@pytest.mark.parametrize("name", list(LISTED))
def test_what_is_no_tensor_is_named(name, materialize):
    with pytest.raises(ValueError, match=LISTED[name]):
        chunk_gla(**tensors() | {name: [1.0]}, materialize=materialize)


def test_what_is_no_dense_tensor_is_named():
    given = tensors()
    with pytest.raises(ValueError, match=r"v: got layout torch\.sparse_coo; it needs a dense tensor"):
        chunk_gla(**given | {"v": given["v"].to_sparse()})


@pytest.mark.parametrize("gv", [None, torch.zeros(1, 8, 2, 16)])
def test_the_recurrent_form_names_its_arguments(gv):
    q, k, v = (torch.zeros(1, 8, 2, 16) for _ in range(3))
    with pytest.raises(ValueError, match="gk: got shape"):
        fused_recurrent_gla(q, k, v, q[:, :4], gv)
    with pytest.raises(ValueError, match="cu_seqlens: got list; it needs a tensor, or None"):
        fused_recurrent_gla(q, k, v, q, gv, cu_seqlens=[0, 8])
