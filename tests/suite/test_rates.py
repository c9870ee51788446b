"""Learning rates in reports of models that learn to recall, and the sweep that repeats the best ones."""

from dataclasses import replace

import pytest
from test_recall import cell_of

from glabench.backends import load_registry
from glabench.cli.output import Messages
from glabench.cli.recall import name_best
from glabench.records import Record, RunFolder
from glabench.report.rates import draw_rates, learners_of, rates_markdown
from glabench.sweeps import load_sweep
from glabench.sweeps.expand import expand, resolve
from glabench.sweeps.model import Parameters

TRAITS = load_registry().traits()
# Accuracies by rate and seed.
GLA = {(1e-3, 0): 0.5, (3e-3, 0): 0.9, (1e-2, 0): 0.8, (3e-3, 1): 0.7, (3e-3, 2): 0.5}
ATTENTION = {(1e-3, 0): 0.2, (3e-3, 0): 0.3, (1e-2, 0): 1.0}


def records_of(backend, accuracies, **changes):
    for (rate, seed), accuracy in accuracies.items():
        cell = replace(cell_of(backend, rate=rate, **changes), seed=seed)
        yield Record(run_id="r", cell=cell, status="ok", accuracy=accuracy, epochs_trained=1, train_s=2.0)


@pytest.fixture
def make_run(tmp_path):
    def make(*records, name="run"):
        sweep = load_sweep("mqar-quick")
        folder = RunFolder.create(tmp_path / name, sweep, {"cells": len(records)})
        for record in records:
            folder.append(record)
        return folder.load()

    return make


def test_the_best_rate_is_chosen_by_the_seeds_that_all_rates_have(make_run):
    (learner,) = learners_of([make_run(*records_of("gla-recall", GLA))])
    assert learner.best == 3e-3  # though over all of its seeds 1e-2 is higher
    assert learner.reached == [0.9, 0.7, 0.5]


def test_models_of_several_runs_are_put_together(make_run):
    first = make_run(*records_of("gla-recall", {key: x for key, x in GLA.items() if key[1] == 0}))
    again = make_run(*records_of("gla-recall", {key: x for key, x in GLA.items() if key[1]}), name="again")
    (learner,) = learners_of([first, again])
    assert (learner.best, learner.reached) == (3e-3, [0.9, 0.7, 0.5])


def test_a_row_has_the_mean_the_least_and_the_most_of_all_seeds_and_every_rate(make_run):
    run = make_run(*records_of("gla-recall", GLA), *records_of("transformer-recall", ATTENTION))
    lines = [line for line in rates_markdown([run]).splitlines() if line.startswith("| ")]
    assert lines[0].split(" | ")[-3:] == ["at 0.001", "at 0.003", "at 0.01 |"]
    assert lines[-2] == "| gla-recall | 32 | 2 | 16 | 0.003 | 70 | 50 | 90 | 3 | 50 | 70 | 80 |"
    assert lines[-1] == "| transformer-recall | 32 | 2 | 16 | 0.01 | 100 | 100 | 100 | 1 | 20 | 30 | 100 |"


def test_one_rate_and_one_seed_are_no_choice(make_run):
    assert rates_markdown([make_run(*records_of("gla-recall", {(1e-3, 0): 0.5}))]) == ""


def test_widths_have_a_panel_beside_those_of_rates(make_run):
    wide = records_of("gla-recall", {(1e-3, 0): 0.9, (3e-3, 0): 0.6}, model_width=64)
    figure = draw_rates([make_run(*records_of("gla-recall", GLA), *wide)])
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "width, at the best rate",
        "learning rate, at width 32",
        "learning rate, at width 64",
    ]
    across = figure.axes[0].lines[0]
    assert list(across.get_xdata()) == [32, 64]
    assert list(across.get_ydata()) == pytest.approx([70, 90])


def test_the_sweep_of_the_best_rates_repeats_them_with_other_seeds(make_run, capsys):
    run = make_run(*records_of("gla-recall", {(1e-3, 0): 0.5, (3e-3, 0): 0.9}))
    assert name_best(run, None, Messages(quiet=False, verbose=False)) == (run, True)
    path = run.path / "best.toml"
    assert f"glabench run {path}" in capsys.readouterr().err
    cells = expand(resolve(load_sweep(str(path)), "cpu", {}, TRAITS), TRAITS, "cpu")
    (learner,) = learners_of([run])
    best = Parameters({**learner.cell.parameters, "rate": 3e-3})
    assert list(cells) == [replace(learner.cell, parameters=best, seed=seed) for seed in (1, 2)]


def test_seeds_that_there_are_already_are_not_repeated(make_run, capsys):
    run = make_run(*records_of("gla-recall", {(rate, seed): 0.5 for rate in (1e-3, 3e-3) for seed in (1, 3)}))
    name_best(run, None, Messages(quiet=False, verbose=False))
    assert "the best rates with seeds 2,4: glabench run" in capsys.readouterr().err
    cells = expand(resolve(load_sweep(str(run.path / "best.toml")), "cpu", {}, TRAITS), TRAITS, "cpu")
    assert [cell.seed for cell in cells] == [2, 4]


def test_a_rate_with_which_training_fails_was_tried_too(make_run, capsys):
    failed, worked = records_of("gla-recall", {(1e-3, 0): 0.5, (3e-3, 0): 0.9})
    run = make_run(replace(failed, status="inaccurate", accuracy=None, reason="the weights are not finite"), worked)
    name_best(run, None, Messages(quiet=False, verbose=False))
    assert "the best rates with seeds 1,2" in capsys.readouterr().err
    cells = expand(resolve(load_sweep(str(run.path / "best.toml")), "cpu", {}, TRAITS), TRAITS, "cpu")
    assert {cell.parameters["rate"] for cell in cells} == {3e-3}


def test_a_long_title_does_not_run_into_the_legend(make_run):
    made = list(records_of("gla-recall", {(1e-3, 0): 0.5, (3e-3, 0): 0.9}))
    runs = [make_run(*made), make_run(*records_of("gla-recall", {(3e-3, 1): 0.9}), name="again")]
    runs[1] = replace(runs[1], sweep=replace(runs[1].sweep, title=f"{runs[1].sweep.title}: the best rates again"))
    figure = draw_rates(runs)
    figure.draw_without_rendering()
    title, legend = (x.get_window_extent() for x in (figure._suptitle, figure.legends[0]))
    assert not title.overlaps(legend)


def test_one_rate_leaves_no_sweep(make_run):
    run = make_run(*records_of("gla-recall", {(1e-3, 0): 0.5, (1e-3, 1): 0.9}))
    name_best(run, None, Messages(quiet=False, verbose=False))
    assert not (run.path / "best.toml").exists()
