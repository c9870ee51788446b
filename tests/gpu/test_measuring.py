"""The suite on a GPU: its clocks, every timing of every pass, and cells that break the device's context."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from glabench.devices.clock import sm_clock
from glabench.devices.nvml import open_nvml
from glabench.measure.ceilings import find_ceilings
from glabench.measure.energy import energy_per_call
from glabench.measure.known import spin
from glabench.measure.memory import give_back_unused, take_workspaces
from glabench.measure.timer import CudaTimer

SMALL = ["--batch", "2", "--heads", "4", "--head-dim", "64", "--time-limit", "0.2"]

WILD = """
import torch, triton, triton.language as tl
from gla_kernels import unaware_chunk_linear_attn
from glabench.backends import Backend

@triton.jit
def write_far_away(out):
    far = tl.full([], 1 << 44, tl.int64)
    tl.store(out + far, 1.0)

class Wild(Backend):
    op, title = "linear", "a fake"
    def bind(self, inputs, cell):
        def call():
            output = unaware_chunk_linear_attn(inputs["q"], inputs["k"], inputs["v"])[0]
            if cell.seqlen == 64:
                self.harm(output)
            return output
        return call

class Illegal(Wild):
    name = "illegal"
    def harm(self, output):
        write_far_away[(1,)](output)

class Asserting(Wild):
    name = "asserting"
    def harm(self, output):
        output[torch.tensor([10**6], device="cuda")].sum()

class Swallowing(Wild):
    name = "swallowing"
    def harm(self, output):
        write_far_away[(1,)](output)
        try:
            torch.cuda.synchronize()
        except Exception:
            pass

BACKENDS = [Illegal(), Asserting(), Swallowing()]
"""


def glabench(folder, *arguments):
    command = [sys.executable, "-m", "glabench", *arguments, "--json", "-", "--out", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("milliseconds", [0.5, 2.0])
def test_timers_tell_how_long_a_kernel_spins(milliseconds):
    work = spin(milliseconds)
    for timing in ("cold", "hot"):
        sample = CudaTimer(timing).bind(None, work.call)
        times = sorted(sample().ms for _ in range(15))
        assert times[7] == pytest.approx(milliseconds, rel=0.02)


def test_the_clock_counts_what_the_device_can_reach():
    clock, nvml = sm_clock(), open_nvml()
    work = spin(1)
    work.call()
    clock.begin()
    work.call()
    clock.end()
    limit = nvml.max_sm_clock_mhz() if nvml is not None else 4000
    assert 200 < clock.mhz() <= 1.01 * limit


def test_ceilings_are_those_of_a_gpu():
    found = find_ceilings("cuda:0", print)
    assert found.copy_gbps > 100
    assert found.product_tflops > 10
    assert found.l2_copy_gbps > found.copy_gbps
    assert 1 < found.fp32_product_tflops < found.product_tflops


@pytest.mark.parametrize("backend", ["gla-triton", "sdpa-flash", "linear-torch"])
def test_every_pass_is_timed_from_a_graph_as_well_and_in_a_fresh_process(tmp_path, backend):
    axes = ["speed", "--seqlen", "256", "--backend", backend, "--pass", "bwd,fwd,fwd+bwd", "--timing", "graph"]
    records, stderr = glabench(tmp_path, *axes, *SMALL, "--no-energy")
    assert [record["status"] for record in records] == ["ok"] * len(records), stderr
    assert all(record["timing"].startswith("graph") for record in records)


def test_a_record_says_under_what_circumstances_it_was_taken(tmp_path):
    nvml = open_nvml()
    if nvml is None:
        pytest.skip("no NVML here")
    axes = ["speed", "--seqlen", "2k", "--backend", "gla-triton", "--pass", "fwd", "--materialize", "on"]
    (record,), _ = glabench(tmp_path, *axes, *SMALL)
    assert 200 < record["sm_clock_mhz"] <= 1.01 * nvml.max_sm_clock_mhz()
    assert record["throttle"] is not None
    # This one: a test holds memory on the GPU, too; and so do other tests that run at the same time.
    others = record["other_processes"]
    assert others in (None, 1) or (others > 1 and "PYTEST_XDIST_WORKER" in os.environ)
    assert record["temperature_c"] > 0
    assert record["process_memory_mib"] > record["peak_allocated_mib"]
    assert 0 < record["roofline_pct"] < 105
    if nvml.energy_j() is not None:
        assert 0 < record["energy_j"] < 1
        assert 50 < record["energy_j"] / record["energy_call_ms"] * 1e3 < 1500  # watts, of any board


def test_what_products_leave_in_memory_does_not_hold_large_pieces():
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    give_back_unused("cuda")

    def held_bytes():
        before = torch.cuda.memory_reserved()
        piece = torch.empty(2**30, dtype=torch.int8, device="cuda")
        del piece
        take_workspaces("cuda")  # as any forward and backward with a product
        give_back_unused("cuda")
        return torch.cuda.memory_reserved() - before

    assert held_bytes() >= 2**30, "torch gives back pieces with workspaces in them; so nothing has to be done"
    torch._C._cuda_clearCublasWorkspaces()
    give_back_unused("cuda")
    take_workspaces("cuda")
    assert held_bytes() <= 0  # what the small product left is given back, too


def test_a_cell_has_all_the_memory_that_is_allowed_whatever_ran_before_it(tmp_path):
    """Both have states of all tokens, 1 GiB and 2: in what the first has left, the second's would not fit."""
    axes = ["speed", "--seqlen", "1k,2k", "--backend", "gla-stored-states", "--pass", "fwd+bwd"]
    sizes = ["--batch", "4", "--heads", "16", "--head-dim", "64", "--time-limit", "0.2", "--no-energy"]
    records, stderr = glabench(tmp_path, *axes, *sizes, "--memory-limit", "3GiB")
    assert [record["status"] for record in records] == ["ok", "ok"], stderr


def test_a_call_that_outlasts_the_energy_counters_changes_takes_the_energy_of_its_parts():
    nvml = open_nvml()
    if nvml is None or nvml.energy_j() is None:
        pytest.skip("no counter of energy here")
    timer = CudaTimer("hot")
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def products(count):
        def call():
            for _ in range(count):
                x @ x

        start = time.perf_counter()
        call()
        timer.synchronize()
        return energy_per_call(call, time.perf_counter() - start, timer.mark, nvml.energy_j)

    products(500)  # warms up
    short, long = products(1), products(300)
    assert long.call_ms > 300
    assert long.call_j == pytest.approx(300 * short.call_j, rel=0.05)
    if (limit := nvml.settings()["power_limit_w"]) is not None:
        assert 1e3 * long.call_j / long.call_ms < 1.05 * limit


@pytest.mark.parametrize("backend", ["illegal", "asserting", "swallowing"])
def test_a_cell_that_breaks_the_devices_context_costs_itself_only(tmp_path, backend):
    plugin = tmp_path / "wild.py"
    plugin.write_text(WILD)
    axes = ["speed", "--seqlen", "32,64,128", "--backend", backend, "--plugin", str(plugin), "--pass", "fwd"]
    records, stderr = glabench(tmp_path, *axes, *SMALL, "--dtype", "fp32", "--no-energy")
    assert [r["seqlen"] for r in records] == [32, 64, 128]
    assert [r["status"] == "ok" for r in records] == [True, False, True], stderr
    assert "CUDA error" in records[1]["reason"] or "crashed" in records[1]["status"]
