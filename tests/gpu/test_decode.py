"""Models that decode on a GPU: steps from CUDA graphs, by our kernels and the packages', are right and repeat."""

import pytest
import torch

from glabench.backends import load_registry
from glabench.measure.decoding import DecodeMeter
from glabench.measure.job import Job
from glabench.measure.settings import Settings
from glabench.sweeps.model import Cell, Parameters

REGISTRY = load_registry()
OP = REGISTRY.ops["decode"]
BACKENDS = [name for name, each in REGISTRY.items() if each.work == "decode"]
SIZES = {"model_width": 256, "layers": 2, "vocabulary": 1000, "prefix": 1000}
SETTINGS = Settings(time_limit_s=0.2, max_samples=10)


def cell_of(backend, batch=4, **parameters):
    return Cell(backend, "decode", "infer", batch, 1, "bf16", Parameters(SIZES | parameters), "cuda")


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_model_decodes_and_is_measured(backend, graphs):
    cell = cell_of(backend, graphs=graphs)
    if (why := REGISTRY[backend].limits(cell)) is not None:
        pytest.skip(why)
    record = DecodeMeter(OP, REGISTRY[backend], Job(backend, "run", "cuda", SETTINGS)).measure(cell)
    assert record.status == "ok", record.reason
    assert ("graph" in record.timing) == (graphs == "on")
    assert record.rel_error["steps_at_size"] < 0.03


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graphs_steps_are_those_of_python(backend):
    cell, found = cell_of(backend), []
    if (why := REGISTRY[backend].limits(cell)) is not None:
        pytest.skip(why)
    rows = OP.make_rows(cell, 8)
    for is_graph in (False, True):
        decoder = REGISTRY[backend].decoder({"tokens": rows[:, :1].clone()}, cell)
        if is_graph:
            decoder.capture()
        decoder.prefill(rows[:, :1000])
        for place in range(1000, 1008):
            decoder.tokens.copy_(rows[:, place : place + 1])
            found.append(decoder.step().clone())
    for eager, replayed in zip(found[:8], found[8:], strict=True):
        torch.testing.assert_close(eager, replayed, rtol=2e-2, atol=2e-2)
