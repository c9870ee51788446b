"""Memory: what a call is measured to need, what it may hold, what is free, and estimates before anything runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glabench.backends import load_registry
from glabench.measure.cell import CellMeter
from glabench.measure.job import Job
from glabench.measure.loop import with_memory
from glabench.measure.memory import left_in_container, limited, measure_memory
from glabench.measure.workload import Steps
from glabench.records import RunFolder
from glabench.sweeps import Cell, Parameters

REGISTRY = load_registry()


@pytest.mark.parametrize(("K", "keeps_all"), [(128, False), (256, False), (272, True)])
def test_a_forward_without_gradients_is_estimated_to_hold_all_states_where_no_program_holds_all_keys(K, keeps_all):
    triton = REGISTRY["gla-triton"]
    sizes = {"heads": 4, "key_dim": K, "value_dim": 64, "gate": "logsigmoid/16"}
    cell = Cell("gla-triton", "gla", "infer", 8, 4096, "bf16", Parameters(sizes))
    kept = triton.working_bytes(replace(cell, pass_="fwd", parameters=Parameters({**sizes, "materialize": "states"})))
    assert (triton.working_bytes(cell) == kept) == keeps_all


@pytest.fixture
def allocator(monkeypatch):
    """Made up, in MiB: 100 are held in 160 reserved; `call` needs 40 more and reserves 30 more, `keep` keeps 7."""
    held = {"allocated": 100, "reserved": 160}
    peak = {"allocated": 900, "reserved": 900}  # of what was before

    def call():
        for kind, more in (("allocated", 40), ("reserved", 30)):
            peak[kind] = max(peak[kind], held[kind] + more)

    def keep():
        held["allocated"] += 7
        return ()

    mib = 2**20
    made_up = {
        "synchronize": lambda: None,
        "empty_cache": lambda: held.update(reserved=110),
        "reset_peak_memory_stats": lambda: peak.update(held),
        "memory_allocated": lambda: held["allocated"] * mib,
        "memory_reserved": lambda: held["reserved"] * mib,
        "max_memory_allocated": lambda: peak["allocated"] * mib,
        "max_memory_reserved": lambda: peak["reserved"] * mib,
    }
    for name, function in made_up.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return SimpleNamespace(call=call, keep=keep)


def test_memory_on_a_gpu_is_what_calls_need_above_what_was_held(allocator):
    found = measure_memory(Steps(None, allocator.call, allocator.keep), "cuda", of_process=lambda: 3.0)
    assert (found.peak_allocated_mib, found.peak_reserved_mib) == (40, 30)
    assert (found.saved_mib, found.process_memory_mib) == (7, 3.0)


def test_memory_of_a_models_step_is_all_that_is_held(allocator):
    cell = Cell("gla-model", "training", "fwd+bwd", 1, 64, "bf16", Parameters({}), "cuda")
    found = with_memory(Job("gla-model", "run", "cuda").begin(cell), allocator.call)
    assert (found.peak_allocated_mib, found.peak_reserved_mib) == (140, 140)


def test_what_earlier_cells_left_is_given_back_before_a_cell_has_its_inputs(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("given back"))

    def prepare(cell):
        done.append("inputs")
        raise MemoryError

    cell = Cell("gla-triton", "gla", "infer", 1, 64, "bf16", Parameters({}), "cuda")
    with pytest.raises(MemoryError):
        CellMeter(SimpleNamespace(prepare=prepare), Job("gla-triton", "run", "cuda"), None).measure(cell)
    assert done == ["given back", "inputs"]


@pytest.mark.parametrize(("limit_mib", "share"), [(None, None), (40 * 1024, 0.5), (200 * 1024, 1.0)])
def test_a_call_may_hold_no_more_than_the_limit_and_the_suite_may(monkeypatch, limit_mib, share):
    """Of a made-up GPU with 80 GiB."""
    shares = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)

    def fail():
        with limited(limit_mib):
            assert shares == ([] if share is None else [share])
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert shares == ([] if share is None else [share, 1.0])


@pytest.mark.parametrize("backend", ["gla-torch", "linear-torch"])
def test_the_estimated_memory_of_plain_pytorch_is_an_upper_bound_of_what_stored_runs_measured(backend):
    results = Path(__file__).parents[2] / "results"
    records = [r for run in results.glob("h200-*/records.jsonl") for r in RunFolder(run.parent).records()]
    measured = [r for r in records if r.cell.backend == backend and r.peak_allocated_mib]
    op = REGISTRY.op_of(backend)
    for cell, peak in ((r.cell, r.peak_allocated_mib * 2**20) for r in measured):
        held = sum(spec.bytes(cell) for spec in op.inputs(cell).values())
        assert held + peak <= op.least_bytes(cell) + REGISTRY[backend].working_bytes(cell) < 2 * (held + peak)
    assert len(measured) > 20


def test_a_backward_on_a_cpu_is_estimated_to_keep_what_it_freed():
    sizes = Parameters({"heads": 4, "key_dim": 64, "value_dim": 64})
    cell = Cell("gla-torch", "gla", "fwd+bwd", 1, 1024, "fp32", sizes, "cpu")
    # Measured: 197 MiB, inputs included.
    assert 197 < REGISTRY["gla-torch"].working_bytes(cell) / 2**20 < 300


@pytest.mark.parametrize(
    ("pass_", "key_dim", "value_dim", "measured"),
    [("infer", 64, 64, 44.5), ("fwd", 64, 64, 69.0), ("fwd+bwd", 128, 256, 240.0), ("fwd+bwd", 32, 64, 58.2)],
)
def test_the_estimate_for_gates_of_both_sides_is_just_above_what_tensors_took(pass_, key_dim, value_dim, measured):
    """2 sequences of 512 tokens with 2 heads, in MiB: the largest sum of tensors that were alive at a time."""
    sizes = Parameters({"heads": 2, "key_dim": key_dim, "value_dim": value_dim})
    cell = Cell("gla-both-torch", "gla-both", pass_, 2, 512, "bf16", sizes, "cuda")
    assert measured < REGISTRY["gla-both-torch"].working_bytes(cell) / 2**20 < 1.2 * measured


OLDER_GROUP = {"limit_in_bytes": "1000\n", "usage_in_bytes": "900\n", "stat": ""}


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 600\ninactive_file 50\n"}, 350),
        ({"memory.max": "1000\n", "memory.current": "1010\n", "memory.stat": "anon 1010\n"}, 1),
        ({"memory.max": "max\n", "memory.current": "700\n", "memory.stat": "anon 600\n"}, None),
        ({f"memory/memory.{name}": text for name, text in OLDER_GROUP.items()}, 100),
        ({}, None),
    ],
)  # fmt: skip
def test_what_a_container_may_still_take_is_read_from_both_versions_of_control_groups(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert left_in_container(tmp_path) == left
