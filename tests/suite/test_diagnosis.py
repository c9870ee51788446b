"""Doubts: their tags, and explanations with numbers and a fitting hint."""

from dataclasses import replace

import pytest

from glabench.records import Record
from glabench.records.diagnosis import Diagnosis, diagnose, explain
from glabench.sweeps import Cell

CELL = Cell("gla-triton", "gla", "fwd", 1, 1024, "bf16")
SOUND = Record(cell=CELL, run_id="run", status="ok", time_ms=1.0, samples_ms=(1.0,) * 30, stop_reason="precision")
DOUBTFUL = {
    Diagnosis.UNSETTLED: {"stop_reason": "time limit"},
    Diagnosis.EXPOSED: {"exposed_samples": 12},
    Diagnosis.THROTTLED: {"thrown_out_ms": (2.0,) * 10},
    Diagnosis.HOT: {"throttle": "power cap, temperature", "temperature_c": 86.4},
    Diagnosis.SHARED: {"other_processes": 2},
    Diagnosis.OUTLIERS: {"samples_ms": (1.0,) * 18 + (3.0,) * 2},
    Diagnosis.DRIFT: {"samples_ms": (1.0,) * 15 + (1.05,) * 15},
    Diagnosis.HOST: {"host_ms": 1.5},
}


@pytest.mark.parametrize("kind", list(Diagnosis), ids=lambda kind: kind.name)
def test_each_doubt_is_found_alone_and_explained_in_one_line_with_what_to_do(kind):
    record = replace(SOUND, **DOUBTFUL[kind])
    assert diagnose(record) == [kind]
    text = explain(kind, [record])
    assert "\n" not in text
    assert text.endswith(".")
    assert len(kind) <= 10


def test_a_sound_record_has_no_doubts():
    assert diagnose(SOUND) == []
    assert diagnose(replace(SOUND, time_ms=None, stop_reason="time limit")) == []


def test_what_was_seen_is_counted():
    def text(kind):
        return explain(kind, [replace(SOUND, **DOUBTFUL[kind])])

    assert "12 of 30 samples may include launch latency" in text(Diagnosis.EXPOSED)
    assert "during 10 of 40 samples" in text(Diagnosis.THROTTLED)
    assert "(temperature, at up to 86 °C)" in text(Diagnosis.HOT)
    assert "2 other processes computed" in text(Diagnosis.SHARED)
    assert "2 of 20 samples took more than 1.5 times the median" in text(Diagnosis.OUTLIERS)
    assert "5.0 % longer" in text(Diagnosis.DRIFT)


def test_of_many_cells_the_worst_is_counted():
    records = [SOUND, replace(SOUND, exposed_samples=12), replace(SOUND, exposed_samples=20)]
    assert explain(Diagnosis.EXPOSED, records).startswith("2 of 3 cells: up to 20 of 30 samples")


def test_the_hint_fits_the_timing_in_use():
    exposed = replace(SOUND, exposed_samples=12)
    assert explain(Diagnosis.EXPOSED, [exposed]).endswith("Rerun with --timing graph.")
    by_graph = replace(exposed, timing="graph, cold, device events behind a spin")
    assert explain(Diagnosis.EXPOSED, [by_graph]).endswith("Measure a longer call.")
    busy = replace(SOUND, host_ms=1.5)
    assert explain(Diagnosis.HOST, [busy]).endswith("see --timing eager.")
    eager = replace(busy, timing="eager, calls back to back, wall clock")
    assert explain(Diagnosis.HOST, [eager]).endswith("so the device waits for the host.")
