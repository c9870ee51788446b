"""Sites: packages that only one backend's processes see, so that one sweep compares versions that clash."""

import json
import os

import in_process
import pytest

from glabench.backends import sites
from glabench.backends.sites import on_path, parse_sites, variables_with
from glabench.errors import UsageError
from glabench.scheduling.process import ProcessWorker

# The backend `one` is measured; the others name their package before their worker loads torch, which takes seconds.
PLUGIN = """
from glabench.backends import Backend, Requirement


class One(Backend):
    name, op, title = "one", "linear", "a package of its own"
    requires = (Requirement("clashing", "pip install clashing"),)
    packages = ("clashing",)

    def launch(self, inputs, cell):
        import clashing

        return clashing.NAME

    def bind(self, inputs, cell):
        import clashing

        q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
        scale = q.shape[-1] ** -0.5
        return lambda: ((q * scale @ k.mT).tril() @ v).transpose(1, 2) * clashing.ONE


class Two(One):
    name = "two"

    def limits(self, cell):
        import clashing

        return f"of {clashing.NAME}"


class Three(Two):
    name = "three"


BACKENDS = [One, Two, Three]
"""
OF_ONE = ["run", "cpu-smoke", "--plugin", "p.py", "--device", "cpu", "--seqlen", "16", "--pass", "fwd"]
OF_ONE += ["--batch", "1", "--heads", "1", "--head-dim", "8", "--dtype", "fp32", "--out", "run"]
SWEEP = [*OF_ONE, "--backend", "one,two"]
TWO = [*OF_ONE, "--backend", "two"]


@pytest.fixture
def folder(tmp_path):
    """A plugin, and its package twice."""
    (tmp_path / "p.py").write_text(PLUGIN)
    for site in ("s1", "s2"):
        (tmp_path / site / "clashing").mkdir(parents=True)
        (tmp_path / site / "clashing/__init__.py").write_text(f"NAME, ONE = '{site}', 1.0\n")
        (tmp_path / site / "clashing-1.dist-info").mkdir()
        (tmp_path / site / "clashing-1.dist-info/METADATA").write_text(f"Name: clashing\nVersion: {site[1]}.0\n")
    return tmp_path


def records_of(folder):
    return [json.loads(line) for line in (folder / "run/records.jsonl").read_text().splitlines()]


def test_each_backends_processes_see_their_own_packages(folder):
    code, _, stderr = in_process.glabench(
        folder, *SWEEP, "--site", "one=s1", "--site", f"two={folder}/s2", workers=ProcessWorker
    )
    assert code == 0, stderr
    one, two = records_of(folder)
    assert (one["status"], one["launch"], two["reason"]) == ("ok", "s1", "of s2")
    environment = json.loads((folder / "run/environment.json").read_text())
    versions = {name: one["packages"]["clashing"] for name, one in environment["implementations"].items()}
    assert versions == {"one": "1.0", "two": "2.0"}
    assert "two=s2" in environment["command"]
    assert str(folder) not in environment["command"]


def test_a_part_that_a_package_adds_to_the_path_by_itself_is_found(folder):
    """As nvidia-cutlass-dsl does with a `.pth` file, which Python reads in no folder of PYTHONPATH."""
    (folder / "s1/clashing/parts").mkdir()
    (folder / "s1/clashing/parts/inner.py").write_text("NAME, ONE = 'part', 1.0\n")
    (folder / "s1/clashing/__init__.py").write_text(
        "def __getattr__(name):\n    import inner\n    return getattr(inner, name)\n"
    )
    added = "import sys, clashing; sys.path.insert(0, clashing.__path__[0] + '/parts')"
    (folder / "s1/clashing.pth").write_text(added)
    in_process.glabench(folder, *TWO, "--site", "two=s1", workers=ProcessWorker)
    assert [record["reason"] for record in records_of(folder)] == ["of part"]


def test_a_sites_package_without_an_init_comes_before_another_ones_with_one(folder, monkeypatch):
    """As flash-attn-4's `flash_attn` and flash-attn's."""
    (folder / "s1/clashing/__init__.py").rename(folder / "s1/clashing/part.py")
    (folder / "p.py").write_text(PLUGIN.replace("import clashing", "import clashing.part as clashing"))
    monkeypatch.setenv("PYTHONPATH", str(folder / "s2"))
    in_process.glabench(folder, *TWO, "--site", "two=s1", workers=ProcessWorker)
    assert [record["reason"] for record in records_of(folder)] == ["of s1"]


def test_a_resumed_run_needs_the_sites_that_it_was_begun_with(folder):
    in_process.glabench(folder, *OF_ONE, "--backend", "three,two", "--site", "three=s1", "--site", "two=s2")
    (folder / "run/records.jsonl").write_text("")
    go_on = ["run", "run", "--resume", "--site", "three=s1"]
    for rest, found in ([], "missing"), (["--site", "two=s1"], "1.0"):
        code, _, stderr = in_process.glabench(folder, *go_on, *rest)
        assert code == 2
        assert f"was begun with clashing 2.0 for two; here it is {found}" in stderr
    _, _, stderr = in_process.glabench(folder, *go_on, "--site", f"two={folder}/s2", workers=ProcessWorker)
    assert [record["reason"] for record in records_of(folder)] == ["of s1", "of s2"], stderr


def test_what_to_do_after_an_interruption_has_the_sites(folder, monkeypatch):
    monkeypatch.setattr(ProcessWorker, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    sites = ["--site=one=s1", "--site=two=s2"]
    stderr = in_process.glabench(folder, *SWEEP, *sites, workers=ProcessWorker)[2]
    assert f"continue with: glabench run --resume run {' '.join(sites)}" in stderr


def test_without_a_site_the_package_is_missing(folder):
    code, _, stderr = in_process.glabench(folder, *SWEEP)
    assert code == 3
    assert "one (clashing is not installed; install with: pip install clashing)" in stderr
    listed = in_process.glabench(folder, *SWEEP, "--dry-run", "--site", "one=s1")[1]
    assert "two, 1 cell: unsupported: clashing is not installed" in listed
    assert "one, 1 cell" not in listed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["one"], r"--site: 'one' is no site \(allowed: NAME=PATH"),
        (["oen=s1"], r"--site: 'oen' is not a backend \(allowed: one, two; did you mean 'one'\?\)"),
        (["one=gone"], "--site: '.*gone' is no folder"),
        (["one=.", "one=."], "--site: 'one' has two sites"),
    ],
)
def test_a_wrong_site_is_a_mistake_that_is_named(given, words):
    with pytest.raises(UsageError, match=words):
        parse_sites(given, ["one", "two"])


def test_a_site_of_several_folders_comes_before_all_others(tmp_path, monkeypatch):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    site = parse_sites([f"one={a}{os.pathsep}{b}"], ["one"])["one"]
    before = list(sites.sys.path)
    with on_path(site):
        assert sites.sys.path[:2] == [str(a), str(b)]
    assert sites.sys.path == before
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert variables_with(site, {})["PYTHONPATH"] == os.pathsep.join([str(a), str(b), "mine"])
    assert variables_with(site, {"PYTHONPATH": "theirs"})["PYTHONPATH"].endswith(f"{b}{os.pathsep}theirs")
    assert variables_with(None, {}) == {}
