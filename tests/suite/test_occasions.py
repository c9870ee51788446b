"""Occasions: taken from runs, an hour apart, kept in a file per device; fewer than three are not counted with."""

import json
import os
from dataclasses import replace

import pytest
from simulated import CELL, STEADY, measured

from glabench.errors import UsageError
from glabench.verdicts.occasions import ASSUMED, LEAST, Occasions, add_occasion, file_of

H200 = {
    "device": "cuda",
    "gpu": {"name": "NVIDIA H200", "id": "abc", "driver": "580", "cuda": "13"},
    "settings": {"timing": "cold"},
    "implementations": {CELL.backend: {"own_code": True, "packages": {"triton": "3"}}},
}


def taken(hour, factor=1.0, seed=0, code="c0de", cell=CELL):
    """Two rounds of two cells at an hour of a day."""
    started = {"started_at": f"2026-01-01T{hour:02}:00:00+00:00", "code": code}
    sides = [measured(STEADY, seed + n, factor, cell=replace(cell, seqlen=64 * n), **started) for n in (1, 2)]
    return [a + b for a, b in zip(*sides, strict=True)]


def test_occasions_are_added_to_the_file_of_their_device_and_count_from_three_on(tmp_path):
    path = tmp_path / "new" / "h200.json"
    for hour in range(LEAST):
        found, written = add_occasion(taken(hour, 1 + hour / 100, 9 * hour), [H200, H200], path)
        assert (written, Occasions.of("NVIDIA H200", path)) == (path, found)
        few = hour + 1 < LEAST
        assert (found.spread() == ASSUMED) == few
        assert ("assumed: 1.0%" in found.describe()) == few
    assert "% in common, " in found.describe()
    assert found.spread().shift == pytest.approx(0.01, rel=0.2)
    first = found.occasions[0]
    assert (first.gpu, first.driver, first.rounds, len(first.cells)) == ("abc", "580", 2, 2)
    assert first.codes == {CELL.backend: "c0de, triton 3, CUDA 13"}
    assert f"3 occasions of 2 cells of {CELL.backend}, " in found.describe()


def test_cells_of_other_code_are_other_cells_and_packages_have_versions(tmp_path):
    rival = replace(CELL, backend="a rival")

    def both(hour, code):
        return [a + b for a, b in zip(taken(hour, 1 + hour / 100, hour, code), taken(hour, cell=rival), strict=True)]

    def built_on(**packages):
        own = {"own_code": False, "packages": {"fla-core": "1", "triton": "3"} | packages}
        return [{**H200, "implementations": {**H200["implementations"], "a rival": own}}] * 2

    path = tmp_path / "h200.json"
    for hour, code in enumerate(("c0de", "0ther", "n3w")):
        found, _ = add_occasion(both(hour, code), built_on(), path)
    assert found.occasions[1].codes["a rival"] == "fla-core 1, triton 3, CUDA 13"
    assert found.occasions[1].codes[CELL.backend].startswith("0ther, ")
    assert found.spread().cells == 2  # those of the rival, which differ by noise alone
    assert found.spread().shift < 1e-3
    with pytest.raises(UsageError, match="no known occasion has two of its cells with the same code"):
        add_occasion(both(9, "f0urth"), built_on(triton="4"), path)


def test_rounds_of_several_sweeps_may_have_other_backends(tmp_path):
    rival = replace(CELL, backend="a rival")
    own = {"a rival": {"own_code": False, "packages": {"triton": "3"}}}
    rounds = [taken(0)[0], taken(0, cell=rival)[0]]
    found, _ = add_occasion(rounds, [H200, {**H200, "implementations": own}], tmp_path / "h200.json")
    assert found.occasions[0].codes == {CELL.backend: "c0de, triton 3, CUDA 13", "a rival": "triton 3, CUDA 13"}


@pytest.mark.parametrize(
    ("code", "environments"),
    [
        (None, [H200] * 2),
        ("c0de", [{**H200, "implementations": {}}] * 2),
        ("c0de", [{**H200, "implementations": {CELL.backend: {"own_code": True, "packages": {"triton": None}}}}] * 2),
        ("c0de", [H200, {**H200, "gpu": {**H200["gpu"], "cuda": "12"}}]),
    ],
)
def test_an_occasion_of_unknown_code_is_refused_at_once(tmp_path, code, environments):
    with pytest.raises(UsageError, match=rf"the same in all rounds \(not known of: {CELL.backend}\)"):
        add_occasion(taken(0, code=code), environments, tmp_path / "h200.json")
    assert not (tmp_path / "h200.json").exists()


@pytest.mark.parametrize(
    ("rounds", "environments", "words"),
    [
        (taken(0), [H200, H200], "less than an hour from the known occasion"),
        (taken(9, code="0ther"), [H200, H200], "no known occasion has two of its cells with the same code"),
        (taken(9), [{"settings": {"timing": "cold"}}], "whose identity is recorded"),
        (taken(9), [H200, {**H200, "gpu": {**H200["gpu"], "id": "xyz"}}], "an occasion is of one GPU"),
        (taken(9), [{**H200, "settings": {"timing": "hot"}}], "cold ones"),
        ([], [H200], "no cell has a time"),
        (
            measured(STEADY, 0, started_at="2026-01-01T09:00:00+00:00", code="c0de"),
            [H200] * 2,
            "fewer than two cells have a time and code whose version is known",
        ),
        (taken(9), [{**H200, "gpu": {**H200["gpu"], "name": "NVIDIA H100"}}] * 2, "holds occasions of NVIDIA H200"),
    ],
)
def test_what_is_no_further_occasion_is_refused_and_the_file_stays(tmp_path, rounds, environments, words):
    path = tmp_path / "h200.json"
    add_occasion(taken(0), [H200, H200], path)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=words):
        add_occasion(rounds, environments, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["", "[]", '{"device": "NVIDIA H200", "occasions": [{"started_at": "now"}]}'])
def test_a_file_that_holds_no_occasions_is_refused(tmp_path, text):
    path = tmp_path / "h200.json"
    path.write_text(text)
    for read, option in ((Occasions.of, "--out"), (lambda *_: Occasions.load(path, "NVIDIA H200"), "--occasions")):
        with pytest.raises(UsageError, match=f"^{option}: .* is not a file of occasions"):
            read("NVIDIA H200", path)


def test_a_file_that_is_missing_huge_or_of_another_device_is_not_counted_with(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    os.mkfifo(tmp_path / "pipe")
    for each in (path, tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match=r"^--occasions: there is no file '"):
            Occasions.load(each, "NVIDIA H200")
    add_occasion(taken(0), [H200, H200], path)
    assert len(Occasions.load(path, "NVIDIA H200").occasions) == 1
    with pytest.raises(UsageError, match=r"^--occasions: .* holds occasions of NVIDIA H200, not NVIDIA B200"):
        Occasions.load(path, "NVIDIA B200")
    with monkeypatch.context() as patch:
        patch.setattr("glabench.verdicts.occasions._MOST_OCCASIONS", 0)
        with pytest.raises(UsageError, match=r"^--occasions: .* is not a file of occasions .*too many"):
            Occasions.load(path, "NVIDIA H200")
    monkeypatch.setattr("glabench.verdicts.occasions._MOST_BYTES", 2**6)
    with pytest.raises(UsageError, match=r"^--occasions: .* is not a file of occasions .*too large"):
        Occasions.load(path, "NVIDIA H200")


def test_the_files_that_ship_with_glabench_are_found_by_their_devices_name():
    shipped = sorted(file_of("x").parent.glob("*.json"))
    for path in shipped:
        device = json.loads(path.read_text())["device"]
        assert file_of(device) == path
        assert Occasions.of(device).occasions
    assert shipped
    assert Occasions.of("a machine that nobody has").occasions == []
