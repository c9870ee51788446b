"""Baselines: read back as written, also from earlier formats; anything else is refused by name."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from simulated import CELL, World, measured

from glabench.errors import UsageError
from glabench.sweeps import Sweep, Variant
from glabench.verdicts import Baseline, Limits, compare_sides

STORED = Path(__file__).parents[2] / "results/baselines/nvidia-h200.json"
SWEEP = Sweep("guard", {"seqlen": "1k", "batch": "2"}, (Variant("gla-triton", {"materialize": "states"}),), "A title")


@pytest.fixture
def baseline():
    environment = {"packages": {}, "device": "cuda", "gpu": {"name": "NVIDIA H200"}, "settings": {"timing": "cold"}}
    return Baseline(SWEEP, environment, "abc1234", measured(World(samples=5), 0))


def test_a_baseline_is_read_back_as_it_was_written(baseline, tmp_path):
    file = tmp_path / "new" / "b.json"
    baseline.save(file)
    assert Baseline.load(file) == baseline
    assert len(file.read_text().splitlines()) < 60


def test_a_baseline_of_the_first_format_takes_the_base_of_a_comparison():
    stored = Baseline.load(STORED)
    assert json.loads(STORED.read_text())["format"] == 1
    assert (stored.sweep.name, stored.sweep.against) == ("gate", "sdpa-flash")
    assert stored.side.name == f"baseline ({stored.revision[:10]})"
    found = compare_sides(stored.side, replace(stored.side, rounds=stored.rounds[:1]), Limits.of())
    assert len(found.cells) == 24
    assert {finding.verdict for finding in found.cells} <= {"same", "not slower"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-20], "truncated"),
        (lambda text: "", "truncated"),
        (lambda text: "[" * 100_000, "nested too deeply"),
        (lambda text: "9" * 5000, "not a baseline"),
        (lambda text: json.dumps({"format": 1}), "it has no environment"),
        (lambda text: json.dumps(json.loads(text) | {"format": 3}), "its format is 3; known are 1, 2"),
        (lambda text: json.dumps(json.loads(text) | {"rounds": []}), "it holds no records"),
        (lambda text: json.dumps(json.loads(text) | {"rounds": [[]]}), "it holds no records"),
        (lambda text: json.dumps(json.loads(text) | {"rounds": [[{"run_id": 3}]]}), "run_id"),
        (lambda text: json.dumps(json.loads(text) | {"rounds": 7}), "rounds"),
        (lambda text: json.dumps(json.loads(text) | {"environment": "H200"}), "environment"),
        (lambda text: json.dumps(json.loads(text) | {"environment": {"gpu": {"name": 3}}}), "gpu.name"),
        (lambda text: json.dumps(json.loads(text) | {"sweep": {"name": "x", "toml": "= ="}}), "not a TOML file"),
        (lambda text: json.dumps(json.loads(text) | {"sweep": {"name": "x"}}), "toml"),
    ],
)
def test_garbage_is_no_baseline(baseline, tmp_path, change, words):
    file = tmp_path / "b.json"
    baseline.save(file)
    file.write_text(change(file.read_text()))
    with pytest.raises(UsageError, match=rf"^--baseline: .*{words}"):
        Baseline.load(file)


@pytest.mark.parametrize("revision", ["main", "--upload-pack=x", "WORKTREE", "HEAD~1", 3])
def test_a_baseline_names_the_code_that_it_came_from_by_its_hash_alone(baseline, tmp_path, revision):
    file = tmp_path / "b.json"
    baseline.save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"revision": revision}))
    with pytest.raises(UsageError, match="revision must be the hash of a commit"):
        Baseline.load(file)


def test_names_in_a_baseline_cannot_drive_a_terminal(baseline, tmp_path):
    file = tmp_path / "b.json"
    odd = replace(CELL, backend="x\x1b]0;title\x07")
    replace(baseline, rounds=measured(World(samples=5), 0, cell=odd)).save(file)
    assert Baseline.load(file).rounds[0][0].cell.backend == "x ]0;title "


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda _: None])
def test_what_is_no_file_is_named_and_never_read(tmp_path, make):
    path = tmp_path / "baseline.json"
    make(path)
    with pytest.raises(UsageError, match=r"--baseline: there is no file '.*/baseline\.json'"):
        Baseline.load(path)


def test_a_file_too_large_for_a_baseline_is_not_read_to_its_end(tmp_path, monkeypatch):
    file = tmp_path / "baseline.json"
    monkeypatch.setattr("glabench.verdicts.baseline._MOST_BYTES", 2**10)
    file.write_bytes(b" " * 2**11)
    with pytest.raises(UsageError, match=r"--baseline: '.*' is not a baseline \(it is too large \(allowed: "):
        Baseline.load(file)
