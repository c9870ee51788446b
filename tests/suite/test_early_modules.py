"""What workers load before they wait for their turn."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from glabench.backends.base import COMPILER
from glabench.backends.builtin import BACKENDS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_loaded_early_starts_nothing():
    look = """
import sys
from pathlib import Path
from glabench.backends.builtin import BACKENDS
from glabench.measure.worker import _load_early
_load_early("linear-torch")
print("torch.fx.experimental.symbolic_shapes" in sys.modules, "torch._dynamo" in sys.modules)
for backend in BACKENDS:
    _load_early(backend.name)
print({"torch._dynamo", "torch._inductor.compile_fx"} < sys.modules.keys())
threads = list(Path("/proc/self/task").iterdir())
print(len(threads), *[(thread / "children").read_text() for thread in threads])
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False", "True", "1"]


@pytest.mark.parametrize("backend", [each for each in BACKENDS if each.early_modules], ids=lambda each: each.name)
def test_early_modules_are_no_packages_of_backends_and_are_found_if_installed(backend):
    """A backend's package may take the device."""
    for module in backend.early_modules:
        top = module.partition(".")[0]
        assert top in ("torch", "transformers")
        assert find_spec(top) is None or find_spec(module) is not None


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (["fla-gla", "fla-kda", "mlstm-kernels", "flex", "gla-torch-compiled"], COMPILER),
        (["flash-attn", "flash-attn-kvcache"], ("torch._dynamo",)),
        (["mamba1", "mamba2", "mamba2-step"], ("transformers.generation.utils",)),
    ],
)
def test_what_rivals_load_besides_is_loaded_early(names, modules):
    assert [each.early_modules for each in BACKENDS if each.name in names] == [modules] * len(names)
