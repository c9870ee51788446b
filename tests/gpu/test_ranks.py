"""Several GPUs: small models by DDP, FSDP2 and stretches, through NCCL, with our kernels and FlashAttention-2."""

import json
import subprocess
import sys

import pytest
import torch

SMALL = ["--width", "512", "--layers", "4", "--vocabulary", "4k", "--seqlen", "512", "--batch", "4"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["gla-model", "transformer-model"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_gpus_train_as_one_does(tmp_path, backend, dtype):
    if (backend, dtype) == ("transformer-model", "fp32"):
        pytest.skip("FlashAttention takes no fp32")
    chosen = ["--backend", backend, "--dtype", dtype, "--gpus", "1,2", "--time-limit", "0.5", "--json", "-"]
    command = [sys.executable, "-m", "glabench", "run", "train-340m-gpus", *SMALL, *chosen]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    records = {(r.get("gpus"), r.get("parallel")): r for r in json.loads(done.stdout)}
    assert records.keys() == {(None, None), (2, None), (2, "fsdp")}
    assert {r["status"] for r in records.values()} == {"ok"}, ([r["reason"] for r in records.values()], done.stderr)
    alone = records[None, None]
    for record in records.values():
        assert record["rel_error"]["gradient"] < 2 * alone["rel_error"]["gradient"]
    # Of weights, gradients and moments, a rank of FSDP2 holds a half.
    assert records[2, "fsdp"]["peak_allocated_mib"] < records[2, None]["peak_allocated_mib"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize(
    "backend", ["gla-model", "simple-gla-model", "linear-model", "retnet-model", "transformer-model"]
)
def test_gpus_that_share_sequences_train_as_one_does(tmp_path, backend, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    shared = ["--gpus", f"1,{gpus}", "--parallel", "sequence"]
    chosen = ["--backend", backend, "--dtype", "bf16", *shared, "--time-limit", "0.3"]
    command = [sys.executable, "-m", "glabench", "run", "train-340m-gpus", *SMALL, *chosen, "--json", "-"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    records = {r.get("gpus"): r for r in json.loads(done.stdout)}
    assert {r["status"] for r in records.values()} == {"ok"}, ([r["reason"] for r in records.values()], done.stderr)
    assert records[gpus]["rel_error"]["gradient"] < 2 * records[None]["rel_error"]["gradient"]
    assert records[gpus]["sent_mib"] > 0
