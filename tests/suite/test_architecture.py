"""Dependencies point one way, the kernels do not import the suite, and the parent process does not import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# A part may import itself and the parts listed with it. The registry needs records, whose field names are taken.
ALLOWED = {
    "errors": set(),
    "correlation": set(),
    "plain": {"errors"},
    "apart": {"plain", "errors"},
    "sweeps": {"plain", "errors"},
    "ops": {"sweeps"},
    "records": {"sweeps", "plain", "errors"},
    "models": {"ops", "sweeps", "errors"},
    "backends": {"models", "ops", "sweeps", "records", "plain", "errors"},
    "devices": {"apart", "plain", "errors"},
    "inspecting": {"errors"},
    "measure": {"correlation", "devices", "backends", "models", "ops", "records", "sweeps", "apart", "plain", "errors"},
    "profiling": {"measure", "inspecting", "backends", "records", "sweeps", "plain", "errors"},
    "scheduling": {"measure", "devices", "backends", "records", "sweeps", "apart", "plain", "errors"},
    "verdicts": {"correlation", "records", "sweeps", "plain", "errors"},
    "report": {"verdicts", "records", "sweeps", "errors"},
    "checking": {"scheduling", "report", "verdicts", "measure", "devices", "records", "sweeps", "errors"},
    "api": {"checking", "scheduling", "report", "verdicts", "records", "sweeps", "errors"},
    "cli": {
        *(
            "api",
            "checking",
            "scheduling",
            "inspecting",
            "profiling",
            "verdicts",
            "report",
            "measure",
            "devices",
            "backends",
            "records",
            "sweeps",
        ),
        "errors",
    },
}
# `glabench` itself imports the API, and `python -m glabench` the command line.
ENTRANCES = {"__init__": {"api", "records", "sweeps"}, "__main__": {"cli"}}
HEAVY = ("torch", "triton", "numpy", "pandas", "matplotlib", "scipy")


def files_of(part):
    path = ROOT / "glabench" / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imports(path):
    """Every module that a file imports anywhere, by its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_part_has_its_place():
    found = {
        path.stem for path in (ROOT / "glabench").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert found == {*ALLOWED, *ENTRANCES}


@pytest.mark.parametrize("part", [*ALLOWED, *ENTRANCES])
def test_a_part_imports_only_what_is_below_it(part):
    allowed = (ALLOWED | ENTRANCES)[part] | {part, "__version__"}
    for path in files_of(part):
        for module in imports(path):
            if module.startswith("glabench."):
                assert module.split(".")[1] in allowed, f"{path} imports {module}"


def test_the_parts_are_in_an_order():
    below = set()
    for part, needed in ALLOWED.items():
        assert needed <= below, f"{part} needs something above it"
        below.add(part)


def test_records_are_imported_by_one_module_of_backends_alone():
    users = {path.name for path in files_of("backends") if any(m.startswith("glabench.records") for m in imports(path))}
    assert users == {"registry.py"}


def test_the_kernels_the_forms_in_pytorch_and_inspection_are_used_by_a_module_each():
    files = (ROOT / "glabench").rglob("*.py")
    users = {path.name for path in files if any(module.startswith("gla_kernels") for module in imports(path))}
    assert users == {"gla.py", "torch_forms.py", "worker.py"}


def test_the_kernels_import_nothing_of_the_suite():
    files = sorted((ROOT / "kernels/gla_kernels").rglob("*.py"))
    assert len(files) > 20
    for path in files:
        assert not any(module.startswith("glabench") for module in imports(path)), path


# What the rooms of the kernels may import, from below to above; the public modules may import all but inspection.
ROOMS = {
    "limits": set(),
    "launching": {"limits"},
    "portable": {"launching", "limits"},
    "hopper": {"portable", "launching", "limits"},
    "reference": set(),
    "operators": {"hopper", "portable", "launching", "limits"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_the_kernels_imports_only_what_is_below_it(room):
    path = ROOT / "kernels/gla_kernels" / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    assert files
    for file in files:
        for module in imports(file):
            if module.startswith("gla_kernels"):
                assert module.split(".")[1] in ROOMS[room] | {room}, f"{file} imports {module}"


def test_nobody_but_developers_imports_the_inspection_of_kernels():
    files = [x for x in (ROOT / "kernels/gla_kernels").rglob("*.py") if "inspection" not in x.parts]
    assert not [x for x in files if any(module.startswith("gla_kernels.inspection") for module in imports(x))]


def test_a_parent_process_is_light():
    """Tests the API, the command line, the registry and a preset's cells in one process."""
    code = f"""
import sys
import glabench, glabench.api, glabench.checking, glabench.cli.app
from glabench.backends import load_registry
from glabench.sweeps import expand, load_sweep, resolve
assert set(glabench.__all__) <= set(dir(glabench))
assert [getattr(glabench, name) for name in glabench.__all__]
traits = load_registry().traits()
assert expand(resolve(load_sweep("cpu-smoke"), "cpu", {{}}, traits), traits, "cpu")
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_no_module_is_longer_than_a_reader_likes():
    long = [p for p in (ROOT / "glabench").rglob("*.py") if len(p.read_text().splitlines()) > 400]
    assert long == []
