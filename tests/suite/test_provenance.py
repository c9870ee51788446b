"""The origin of measured code: commits, hashes, variables and commands."""

import json
import os
from pathlib import Path

import pytest
from repositories import git

from glabench.devices import provenance
from glabench.devices.provenance import command_line, describe_code, hash_code, hash_package, relevant_variables
from glabench.records.environment import measured_code


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with packages of one module each; the first one stands for the suite."""
    for package in ("glabench", "gla_kernels"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"# {package}\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    monkeypatch.setattr(provenance, "_SUITE", tmp_path / "glabench")
    return tmp_path


def describe(checkout, plugins=()):
    return describe_code(plugins, checkout / "gla_kernels")


def test_code_is_known_by_its_commit_and_by_hashes_of_its_parts(checkout):
    found = describe(checkout)
    assert found["commit"] == git(checkout, "rev-parse", "HEAD")
    assert found["changed"] is False
    assert found["suite"] == hash_package(checkout / "glabench")
    assert found["kernels"] == hash_code(checkout / "gla_kernels")
    assert str(checkout) not in json.dumps(found)


def test_a_change_shows_in_the_hash_of_its_part_alone(checkout):
    before = describe(checkout)
    (checkout / "gla_kernels/__init__.py").write_text("other = 1\n")
    after = describe(checkout)
    assert after == before | {"changed": True, "kernels": after["kernels"]}
    assert after["kernels"] != before["kernels"]


def test_a_comment_changes_a_file_of_the_kernels_and_not_their_code(checkout):
    before = describe(checkout)
    (checkout / "gla_kernels/__init__.py").write_text("# other\n")
    assert describe(checkout) == before | {"changed": True}


def test_a_hash_of_code_is_never_that_of_a_files_bytes(checkout):
    (checkout / "mine.py").write_text("BACKENDS = [\n")  # does not parse, so its bytes count
    found = describe(checkout, [str(checkout / "mine.py")])
    assert found["kernels"].startswith("tree:")
    assert found["plugins"]["mine.py"].startswith("tree:")
    assert not found["suite"].startswith("tree:")
    old = {"kernels": hash_package(checkout / "gla_kernels"), "plugins": {}}
    assert measured_code(old) != measured_code(describe(checkout))


def test_a_file_that_git_does_not_track_is_no_change(checkout):
    (checkout / "note").write_text("")
    assert describe(checkout)["changed"] is False


def test_a_hook_of_another_repository_does_not_mislead(checkout, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    before = describe(checkout)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert describe(checkout) == before


def test_a_package_that_was_installed_inside_somebodys_repository_has_no_commit(checkout, monkeypatch):
    installed = checkout / ".venv/glabench"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("# glabench\n")
    monkeypatch.setattr(provenance, "_SUITE", installed)
    found = describe(checkout)
    assert (found["commit"], found["changed"]) == (None, None)
    assert found["suite"] == hash_package(checkout / "glabench")


def test_without_git_there_is_no_commit_and_there_are_hashes(checkout, monkeypatch):
    before = describe(checkout)
    monkeypatch.setenv("PATH", "")
    assert describe(checkout) == before | {"commit": None, "changed": None}


@pytest.mark.parametrize("hashed", [hash_code, hash_package])
def test_the_hash_of_a_package_tells_names_and_folders_and_passes_over_other_files(tmp_path, hashed):
    hashes = []
    for step in ("a/x.py", "b/x.py", "b/y/x.py"):
        folder = tmp_path / str(len(hashes))
        (folder / step).parent.mkdir(parents=True)
        (folder / step).write_text("1")
        hashes.append(hashed(folder))
        (folder / "x.pyc").write_text("compiled")
        assert hashed(folder) == hashes[-1]
        (folder / "x.c").write_text("int x;")
        assert hashed(folder) != hashes[-1]
    assert len(set(hashes)) == 3


def test_the_kernels_are_found_where_they_would_be_imported_from():
    kernels = Path(__file__).parent.parent.parent / "kernels/gla_kernels"
    assert describe_code()["kernels"] == hash_code(kernels)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [("helper.py", True), ("parts/deep.py", True), ("further.py", True), ("other.py", False), ("json.py", False)],
)
def test_files_that_a_plugin_imports_from_its_folder_count_as_its_code(tmp_path, checkout, changed, counts):
    sources = {
        "mine.py": "import json\nimport torch\n\ndef bind():\n    import helper\n",
        "helper.py": "from parts.deep import x\nimport helper, mine\n",
        "parts/__init__.py": "", "parts/deep.py": "import further\nx = 1\n", "further.py": "", "other.py": "",
        "json.py": "",
    }  # fmt: skip
    (tmp_path / "parts").mkdir()
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    before = describe(checkout, [str(tmp_path / "mine.py")])["plugins"]
    (tmp_path / changed).write_text(sources[changed] + "y = 2\n")
    assert (describe(checkout, [str(tmp_path / "mine.py")])["plugins"] != before) == counts


def test_plugins_are_known_by_name_and_content_not_by_folder(checkout):
    for folder in ("a", "b"):
        (checkout / folder).mkdir()
        (checkout / folder / "mine.py").write_text("BACKENDS = []\n")
    a, b = (describe(checkout, [str(checkout / folder / "mine.py")])["plugins"] for folder in ("a", "b"))
    assert a == b
    assert list(a) == ["mine.py"]
    both = describe(checkout, [str(checkout / folder / "mine.py") for folder in ("a", "b")])["plugins"]
    assert list(both) == ["mine.py"]
    (checkout / "b/mine.py").write_text("BACKENDS = [1]\n")
    assert describe(checkout, [str(checkout / folder / "mine.py") for folder in ("a", "b")])["plugins"] != both


def test_variables_that_change_what_is_measured_are_kept_without_paths_and_serials(monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    values = {
        "CUDA_VISIBLE_DEVICES": "1,GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "GLA_AUTOTUNE": "1",
        "HOME": "x",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "a" * 200,
        "TRITON_CACHE_DIR": "/somewhere/of/mine",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert relevant_variables() == {
        "CUDA_VISIBLE_DEVICES": "1,GPU-(a UUID)",
        "GLA_AUTOTUNE": "1",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "a" * 100,
        "TRITON_CACHE_DIR": "(a path)",
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "paper-fig2", "--out", "results/x"], "glabench run paper-fig2 --out results/x"),
        (["run", "/home/me/my sweep.toml"], "glabench run 'my sweep.toml'"),
        (["speed", "--plugin=/home/me/a=b.py", "--gate", "a=b"], "glabench speed --plugin=a=b.py --gate a=b"),
        (["run", "--site", "fa=/home/me/a:/home/me/b"], "glabench run --site fa=a:b"),
        (["run", "--site=fa=/home/me/a"], "glabench run --site=fa=a"),
        (["report", "/"], "glabench report /"),
        (["run", "a\nb"], "glabench run 'a b'"),
    ],
)
def test_a_command_is_told_as_typed_but_for_the_folders_of_absolute_paths(arguments, line):
    assert command_line(arguments) == line
