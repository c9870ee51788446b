"""Made-up and stored runs, and what reports show of them."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from rich.console import Console

from glabench.backends import load_registry
from glabench.records import Record, Run, RunFolder
from glabench.records.metrics import BY_NAME, TIME, parse_metrics
from glabench.records.run import rows_of
from glabench.report.figures import draw
from glabench.report.series import make_view
from glabench.report.tables import make_markdown, render_tables
from glabench.sweeps import expand, load_sweep, resolve

TRAITS = load_registry().traits()
PEAK = BY_NAME["peak"]
USUAL = parse_metrics("time,peak,roof")
H200 = {"device": "cuda", "gpu": {"name": "NVIDIA H200"}, "packages": {"torch": "2"}}
STORED = sorted(path.parent for path in (Path(__file__).parents[1] / "results").glob("*/records.jsonl"))
OUTCOMES = {
    "all fine": lambda cell: "ok",
    "long sequences fail": lambda cell: "oom" if cell.seqlen > 4096 else "ok",
    "short sequences fail": lambda cell: "timeout" if cell.seqlen < 2048 else "ok",
    "one in the middle fails": lambda cell: "crashed" if cell.seqlen == 4096 else "ok",
    "all of one backend fails": lambda cell: "inaccurate" if cell.backend == "gla-triton" else "ok",
    "everything fails": lambda cell: "error",
    "nothing is supported": lambda cell: "unsupported",
}


def made_up(preset, changes=None, outcome=lambda cell: "ok", name="a-run", environment=None, panels=None, **fields):
    """A run with a record for every cell of a preset, without its panels; times grow with the work."""
    sweep = replace(resolve(load_sweep(preset), "cuda", changes or {}, TRAITS), panels=panels or {})
    records = []
    for cell in expand(sweep, TRAITS, "cuda"):
        status = outcome(cell)
        time = cell.seqlen / 1000 * len(cell.backend) * len(cell.pass_)
        measured = {
            "time_ms": time,
            "time_ms_p20": 0.98 * time,
            "time_ms_p80": 1.03 * time,
            "samples_ms": (time,) * 3,
            "peak_allocated_mib": cell.seqlen / 10,
            "rel_error": {"o": 3e-3},
            "stop_reason": "precision",
            **fields,
        }
        measured = measured if status == "ok" else {"reason": "a reason"}
        records.append(Record(run_id=name, cell=cell, status=status, **measured))
    return Run(Path(name), sweep, environment or {}, records)


def rows(run):
    return rows_of(run.records)


def shown(runs, metrics=USUAL, width=200, against=None):
    """The text on a terminal of this width."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        for each in render_tables(runs, metrics, width, against):
            console.print(each)
    return captured.get()


def markdown(run, metrics=USUAL, against=None):
    return make_markdown(make_view([run]), metrics, against)


def drawn(run, metrics=(TIME, PEAK)):
    return draw(make_view([run]), metrics)


@cache
def stored(name):
    return RunFolder.open(STORED[0].parent / name).load()
