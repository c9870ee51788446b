"""Dependencies point one way, and the kernels know nothing of the suite."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# A part may import those named beside it, and itself.
ALLOWED = {
    "errors": set(),
    "sweeps": {"errors"},
    "backends": {"sweeps", "errors"},
    "records": {"sweeps", "errors"},
    "report": {"records", "sweeps", "errors"},
    "measure": {"backends", "records", "sweeps", "errors"},
    "cli": {"measure", "backends", "report", "records", "sweeps", "errors"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("part", list(ALLOWED))
def test_a_part_imports_only_what_is_below_it(part):
    files = [ROOT / f"glabench/{part}.py"] if part == "errors" else (ROOT / "glabench" / part).rglob("*.py")
    for path in files:
        for module in imports(path):
            if module.startswith("glabench."):
                assert module.split(".")[1] in ALLOWED[part] | {part}, f"{path} imports {module}"
            if part != "backends":
                assert not module.startswith("gla_kernels"), f"{path} imports {module}"


def test_the_kernels_import_torch_and_triton_alone():
    for path in (ROOT / "kernels/gla_kernels").glob("*.py"):
        for module in imports(path):
            assert not module.startswith("glabench"), f"{path} imports {module}"


def test_no_module_is_longer_than_a_reader_likes():
    long = [p for p in (ROOT / "glabench").rglob("*.py") if len(p.read_text().splitlines()) > 400]
    assert long == []
