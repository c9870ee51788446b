"""Verdicts between occasions, and on a machine that is slower or faster as a whole: no cell is blamed for it."""

from dataclasses import replace

import numpy as np
import pytest
from simulated import CELL, STEADY, compare, measured, record

from glabench.verdicts import FAILING, Verdict
from glabench.verdicts.occasions import ASSUMED, Occasion, Occasions

PASSING = set(Verdict) - FAILING - {Verdict.UNCLEAR}


def cells_of(factors, seed, backend_of=("gla-triton", "sdpa-flash", "linear-triton"), rounds=3):
    """Rounds of cells of several backends, each with its factor."""
    generator = np.random.default_rng(seed)
    cells = [replace(CELL, backend=backend_of[n % len(backend_of)], seqlen=64 * (n + 1)) for n in range(len(factors))]
    return [
        [record(STEADY.round(generator, f), cell) for cell, f in zip(cells, factors, strict=True)]
        for _ in range(rounds)
    ]


def known(scatter=0.003, shift=0.003, count=8, cells=24):
    """Occasions with a given spread."""
    generator = np.random.default_rng(0)
    logs = generator.normal(0, shift, (count, 1)) + generator.normal(0, scatter, (count, cells))
    times = [{f"cell {n}": float(np.exp(x)) for n, x in enumerate(row)} for row in logs]
    found = [
        Occasion(f"2026-01-0{n + 1}T00:00:00+00:00", "a", None, {"cell": "c0de"}, 1, each)
        for n, each in enumerate(times)
    ]
    return Occasions("an unknown machine", found)


def check_on_machine(machine, odd=1.0, occasions=None, **options):
    """A check against a baseline on a machine that takes `machine` times as long, the first cell `odd` times that."""
    factors = [machine * odd, *[machine] * 23]
    return compare(
        cells_of([1.0] * 24, 0), cells_of(factors, 1), expects_all=True, occasions=occasions or known(), **options
    )


def counts(found):
    return {str(verdict) for verdict in (finding.verdict for finding in found.cells[1:])}


def test_a_comparison_in_turns_does_not_count_with_other_occasions_and_others_say_what_they_count_with():
    sides = measured(STEADY, 0), measured(STEADY, 1)
    turns, apart, told = compare(*sides, paired=True), compare(*sides), compare(*sides, occasions=known(0.004))
    widths = [found.cells[0].ratio.high - found.cells[0].ratio.low for found in (turns, told, apart)]
    assert widths == sorted(widths)
    assert widths[2] > 2 * 2.5 * 1.4 * ASSUMED.total
    assert turns.notes == ()
    assert apart.notes[0].startswith("spread between occasions assumed: 1.0% (0 of at least 3 occasions known on")
    assert told.notes[0].startswith("spread between occasions: 0.")


@pytest.mark.parametrize(("ms", "verdict"), [(1.0, "slower"), (0.01, "unclear")])
def test_a_microsecond_more_is_no_slow_down_of_a_short_call_unless_measured_in_turns(ms, verdict):
    sides = measured(STEADY, 0, ms), measured(STEADY, 1, 1.07 * ms)
    assert compare(*sides, occasions=known()).cells[0].verdict == verdict
    assert compare(*sides, paired=True).cells[0].verdict == "slower"


@pytest.mark.parametrize("machine", [0.94, 0.99, 1.01, 1.04, 1.08])
def test_no_cell_is_blamed_for_a_machine_that_is_slower_or_faster_as_a_whole(machine):
    found = check_on_machine(machine)
    assert not counts(found) & {"slower"}
    assert found.machine.differs == (abs(machine - 1) > 0.015)
    assert found.machine.whole.ratio == pytest.approx(machine, abs=0.003)
    assert any(str(found.machine) in note for note in found.notes)
    assert (str(found.machine) in found.summary()) == found.machine.differs


@pytest.mark.parametrize(
    ("machine", "odd", "verdict"),
    [
        (0.94, 1.07, "unclear"),  # as long as in the base, only because the machine is faster
        (0.94, 1.15, "slower"),
        (1.0, 1.10, "slower"),
        (1.04, 1.10, "slower"),
        (1.04, 0.97, "same"),
        (1.04, 0.80, "faster"),
    ],
)
def test_a_cell_is_also_judged_relative_to_the_machine(machine, odd, verdict):
    found = check_on_machine(machine, odd)
    assert found.cells[0].verdict == verdict
    if verdict == "unclear":
        assert "relative to the machine as a whole" in found.cells[0].reason
        assert found.suspects()[0] == found.cells[0].cell


def test_what_one_backend_lost_is_not_put_on_the_machine():
    ours = [1.1 if n % 3 != 1 else 1.0 for n in range(24)]
    found = compare(cells_of([1.0] * 24, 0), cells_of(ours, 1), expects_all=True, occasions=known())
    assert {f.verdict for f in found.cells if f.cell.backend == "sdpa-flash"} <= PASSING
    assert {f.verdict for f in found.cells if f.cell.backend != "sdpa-flash"} == {Verdict.SLOWER}


def test_a_second_look_counts_with_the_machine_that_the_first_one_saw():
    first = check_on_machine(1.04)
    few = compare(cells_of([1.0], 2), cells_of([1.04], 3), expects_all=True, occasions=known(), before=first)
    assert few.machine == first.machine
    assert few.cells[0].verdict is not Verdict.SLOWER
    alone = compare(cells_of([1.0], 2), cells_of([1.04], 3), expects_all=True, occasions=known())
    assert (alone.machine, alone.cells[0].verdict) == (None, Verdict.SLOWER)


def test_a_comparison_of_runs_says_the_shift_but_judges_the_ratio_alone():
    found = compare(cells_of([1.0] * 24, 0), cells_of([1.2] * 24, 1), occasions=known())
    assert {f.verdict for f in found.cells} == {Verdict.SLOWER}
    assert "the machine as a whole, or most of the code, is 20." in found.summary()
    assert found.to_json()["machine"]["differs"]
