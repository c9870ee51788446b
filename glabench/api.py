"""The Python API: the commands as functions, for notebooks and scripts.

    import glabench

    run = glabench.run("paper-fig2", seqlen="1k..4k", backend=["gla-triton", "sdpa-flash"])
    run.table()[["cell", "time_ms", "peak_mib"]]
    glabench.make_report(run, figure="speed.pdf")
    glabench.compare("runs/before", "runs/after").table()

Importing this module does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glabench import checking
from glabench.checking import compare_folders, compare_revisions
from glabench.errors import UsageError, allowed_names
from glabench.records import Record, Run, RunFolder
from glabench.records.metrics import choose_metrics
from glabench.report.series import backends_in, rows_of_runs
from glabench.report.write import write_report
from glabench.scheduling.folders import new_path
from glabench.scheduling.observer import Observer
from glabench.scheduling.runs import Request, check_settings, measure_run, resume_run
from glabench.scheduling.versions import Rounds
from glabench.sweeps import Sweep
from glabench.verdicts import SAME_WITHIN, Comparison, Limits

_NO_SETTINGS: Mapping[str, Any] = {}


class _Listener(Observer):
    def __init__(self, on_record: Callable[[Record], None]) -> None:
        self._on_record = on_record

    def record(self, record: Record, lane: str) -> None:  # noqa: ARG002
        self._on_record(record)


def run(
    sweep: str | Path | Sweep,
    *,
    out: str | Path | None = None,
    plugins: str | Path | Sequence[str | Path] = (),
    on_record: Callable[[Record], None] | None = None,
    device: str = "auto",
    settings: Mapping[str, Any] = _NO_SETTINGS,
    **axes: Any,
) -> Run:
    """Measures a sweep: a preset's name, the path of a .toml file, or a `Sweep`.

    `axes` change the sweep: text in the axis grammar or Python values (`seqlen="1k..16k"`, `batch=8`,
    `chunk=[16, None]`, `materialize="states"`, `backend=["gla-triton"]`); the axis `pass` is `pass_`. `out` is the run
    folder, by default a new one under runs/. `plugins` is one or several files that add backends or ops. `on_record` is
    called with each record once it is on the disk. `device` is auto, cpu, cuda or cuda:N. `settings` are fields of
    `glabench.measure.settings.Settings`, times in seconds. A cell that fails gets a record with a status and a reason.

    Raises UsageError, NothingToRunError or another GlabenchError; the message says what to do.
    """
    request = _request(sweep, axes, settings, device, plugins)
    return measure_run(request, _path(out), _observer(on_record))


def resume(
    path: str | Path,
    *,
    retry_failed: bool = False,
    on_record: Callable[[Record], None] | None = None,
) -> Run:
    """Continues an interrupted run with its own sweep and settings; `retry_failed` also repeats cells that are not ok.

    Raises UsageError if the folder holds no run, or if the machine or the code has changed.
    """
    return resume_run(Request(""), Path(path), _observer(on_record), retry_failed)


def load(path: str | Path) -> Run:
    """The run in a folder, on any machine. Raises UsageError if the folder holds no run."""
    return RunFolder.open(Path(path)).load()


def make_report(
    runs: str | Path | Run | Sequence[str | Path | Run],
    *,
    out: str | Path | None = None,
    metrics: str | Sequence[str] | None = None,
    against: str | None = None,
    figure: str | Path | None = None,
) -> list[Path]:
    """Writes records.csv, report.md, figure.png and figure.svg of one or several runs; returns the paths.

    `out` is the folder, by default the run's own, or for several runs a new one under runs/. `metrics` are names such
    as `["time", "energy"]` or `"time,energy"`, `against` is the backend that ratios refer to; by default they are those
    of the first run's sweep. `figure` is one more .png, .svg or .pdf file for the figure.

    Raises UsageError for runs without records or without these metrics, for an `out` that holds another run, and for
    files that cannot be written.
    """
    loaded = [_load(run) for run in ([runs] if isinstance(runs, str | Path | Run) else runs)]
    if not loaded:
        raise UsageError("RUN: name at least one run to report")
    for run in loaded:
        if not run.records:
            raise UsageError(f"RUN: '{run.path}' has no records yet")
    paths = [run.path.resolve() for run in loaded]
    if twice := [run.path for number, run in enumerate(loaded) if paths[number] in paths[:number]]:
        raise UsageError(f"RUN: '{twice[0]}' is named twice")
    known = backends_in(loaded)
    if against is not None and against not in known:
        raise UsageError(f"--against: '{against}' is not in the run ({allowed_names(known, against)})")
    names = (metrics if metrics is None or isinstance(metrics, str) else ",".join(metrics)) or loaded[0].sweep.metrics
    chosen = choose_metrics(names, rows_of_runs(loaded))
    folder = _path(out) or (loaded[0].path if len(loaded) == 1 else new_path("report"))
    if RunFolder.is_run(folder) and [folder.resolve()] != paths:
        raise UsageError(f"--out: '{folder}' holds another run, whose report it would replace; name another folder")
    return write_report(loaded, folder, chosen, against, _path(figure))


def compare(
    a: str | Path | Run,
    b: str | Path | Run,
    *,
    same_within: float = SAME_WITHIN,
    any_device: bool = False,
    occasions: str | Path | None = None,
) -> Comparison:
    """Compares run b with run a cell by cell. Each may also be a folder of rounds. `same_within` 0.02 means 2 %.

    `occasions` is a file that `glabench baseline occasion` made; by default that of the device that ships with
    glabench. Raises UsageError for runs without a common cell, or from different devices unless `any_device`.
    """
    limits = Limits.of_comparison(same_within)
    return compare_folders(_folder(a), _folder(b), limits, any_device, _path(occasions))


def compare_versions(
    rev: str,
    *,
    sweep: str | Path | Sweep = "guard",
    rounds: int = 4,
    same_within: float = SAME_WITHIN,
    out: str | Path | None = None,
    resume: bool = False,
    plugins: str | Path | Sequence[str | Path] = (),
    on_record: Callable[[Record], None] | None = None,
    device: str = "auto",
    settings: Mapping[str, Any] = _NO_SETTINGS,
    **axes: Any,
) -> Comparison:
    """Two git revisions (`main..HEAD`) measured in turns; `resume` goes on with the rounds in `out`.

    Other arguments and errors are those of `run`.
    """
    request = _request(sweep, axes, settings, device, plugins)
    limits = Limits.of_comparison(same_within)
    return compare_revisions(request, rev, Rounds(rounds, _path(out), resume), limits, _observer(on_record))


def check(
    *,
    rev: str | None = None,
    baseline: str | Path | None = None,
    sweep: str | Path | Sweep = "guard",
    rounds: int = 2,
    limits: Mapping[str, float] = _NO_SETTINGS,
    occasions: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    plugins: str | Path | Sequence[str | Path] = (),
    on_record: Callable[[Record], None] | None = None,
    device: str = "auto",
    settings: Mapping[str, Any] = _NO_SETTINGS,
    **axes: Any,
) -> Comparison:
    """Checks if the working tree is slower, larger or less accurate than a revision (`rev="main"`) or a baseline file.

    `limits` are by metric (`{"time": 0.05}`, 5 %). With a baseline, its own sweep and settings count, and `occasions`
    may name a file, as for `compare`. Other arguments are those of `run` and `compare_versions`.
    `Comparison.exit_code()` is that of `glabench check`. Raises UsageError unless one of both is given.
    """
    request, counted = _request(sweep, axes, settings, device, plugins), Rounds(rounds, _path(out), resume)
    limited, observer = Limits.of(**limits), _observer(on_record)
    return checking.check(request, rev, _path(baseline), counted, limited, observer, _path(occasions))


def _request(
    sweep: str | Path | Sweep,
    axes: Mapping[str, Any],
    settings: Mapping[str, Any],
    device: str,
    plugins: str | Path | Sequence[str | Path],
) -> Request:
    check_settings(settings, axes)
    named = {name.removesuffix("_"): value for name, value in axes.items()}
    return Request(sweep, None, named, settings, device, [plugins] if isinstance(plugins, str | Path) else plugins)


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)


def _load(run: str | Path | Run) -> Run:
    return run if isinstance(run, Run) else load(run)


def _folder(run: str | Path | Run) -> Path:
    return run.path if isinstance(run, Run) else Path(run)


def _observer(on_record: Callable[[Record], None] | None) -> Observer:
    return Observer() if on_record is None else _Listener(on_record)
