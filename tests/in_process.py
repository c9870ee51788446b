"""The command line in this process with made-up workers, which tests the flow without starting processes.

A made-up worker answers with the time that the plugin's backend `says` for a cell. The figures of reports are drawn but
not rendered, which would take most of a command's time; `renders=True` renders them.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, lru_cache
from io import StringIO
from unittest import mock
from zlib import crc32

import numpy as np
import simulated
from matplotlib.text import Text
from typer.main import get_command

from glabench import cli
from glabench.backends import load_registry
from glabench.cli.app import make_app
from glabench.cli.options import help_has_tables
from glabench.devices import provenance
from glabench.devices.choice import parse_device
from glabench.devices.environment import collect
from glabench.errors import RenamedWarning
from glabench.measure.outcome import failure
from glabench.measure.worker import _Cells
from glabench.profiling import worker
from glabench.profiling.request import Answer, Request
from glabench.records.profile import Profile
from glabench.report.figures import check_figure

# Tests commit it and change it to make revisions that are slower, wrong or busy.
PLUGIN = """
from glabench.backends import Backend

class Steady(Backend):
    name, op, title = "steady", "linear", "takes as long as it says"

    def says(self, cell):
        return {"ms": 4.0, "error": 0.001, "first_call_s": 0.1}

    def bind(self, inputs, cell):
        raise AssertionError("a made-up worker calls nothing")

BACKENDS = [Steady]
"""
SIZES = ["--batch", "1", "--heads", "1", "--head-dim", "16", "--dtype", "fp32"]
TINY = ["--seqlen", "16,32", "--pass", "fwd", *SIZES]
MADE_UP = [*TINY, "--plugin", "steady.py", "--backend", "steady", "--device", "cpu"]
# A parameter of a plugin's own.
WINDOWED = PLUGIN.replace(
    '    name, op, title = "steady"',
    '    parameters = (integers("window", "Tokens looked back.", 64),)\n    name, op, title = "steady"',
).replace("import Backend", "import Backend\nfrom glabench.sweeps.parameters import integers")


class MadeUpWorker:
    """A stand-in for a process."""

    def __init__(self, job, variables, show_errors=False):
        self._job = job
        self._backend = load_registry(job.plugins)[job.backend]
        self._generator = np.random.default_rng(crc32(job.run_id.encode()))

    def is_loaded(self):
        return True

    def pause(self):
        pass

    def measure(self, cell):
        if reason := self._backend.unavailable(cell.device) or self._backend.supports(cell):
            return failure(self._job, cell, "unsupported", reason)
        said = self._backend.says(cell) if hasattr(self._backend, "says") else {"ms": 1.0, "error": 0.001}
        if "status" in said:
            return failure(self._job, cell, said["status"], "as it says")
        world = replace(simulated.STEADY, noise=said.get("noise", simulated.STEADY.noise))
        samples = world.round(self._generator, said["ms"])
        fields = {"rel_error": {"o": said["error"]}, "first_call_s": said.get("first_call_s", 0.1)}
        made_up = simulated.record(samples, cell, peak_allocated_mib=None, peak_resident_mib=1.0, **fields)
        return replace(made_up, run_id=self._job.run_id, code=self._job.code)

    def close(self):
        pass


class WorkerHere:
    """Measures in this process, which has loaded torch already: for cells that do it no harm."""

    def __init__(self, job, variables, show_errors=False):
        self._cells = _Cells(load_registry(job.plugins), job)

    def is_loaded(self):
        return True

    def pause(self):
        pass

    def measure(self, cell):
        return self._cells.record(cell)

    def close(self):
        pass


@cache
def environment():
    """The environment of this process, which has already loaded torch."""
    return collect("cpu")


def probe(device="auto"):
    parse_device(device, 0)
    return environment()


# What every process finds or builds once, and what is the same for many commands.
read_checkout = cache(provenance._read_checkout)
built_command = lru_cache(16)(get_command)


@lru_cache(16)
def built_app(axes, has_tables):
    return make_app(dict(axes))


def app_of(axes):
    return built_app(tuple(axes.items()), help_has_tables())


def profile_here(request, variables, timeout_s):
    """Stands in for `profile_cell`, without its process, which would load torch. Its backend must not fail."""
    answer = worker._answer(Request.from_json(json.loads(json.dumps(request.to_json()))))
    return Answer(Profile.from_json(json.loads(json.dumps(answer["profile"]))), answer["failure"])


def sketch(figure, path):
    """Writes a figure's texts and the points of its lines, which differ where figures do, instead of the figure."""
    check_figure(path)
    texts = [text.get_text() for text in figure.findobj(Text)]
    points = [line.get_xydata().tolist() for axes in figure.axes for line in axes.lines]
    path.write_text("\n".join(map(str, [*filter(None, texts), *points])))


@contextmanager
def made_up_workers(workers=MadeUpWorker, renders=False) -> Iterator[None]:
    """Starts no process for the environment, and none for cells unless `workers` does."""
    with ExitStack() as stack:
        if not renders:
            stack.enter_context(mock.patch("glabench.report.write.save_figure", sketch))
        for place in ("glabench.scheduling.plan.probe", "glabench.cli.env.probe"):
            stack.enter_context(mock.patch(place, probe))
        for place in ("glabench.scheduling.runs.ProcessWorker", "glabench.scheduling.versions.ProcessWorker"):
            stack.enter_context(mock.patch(place, workers))
        stack.enter_context(mock.patch.object(provenance, "_read_checkout", read_checkout))
        stack.enter_context(mock.patch.object(sys, "path", list(sys.path)))
        yield


def glabench(folder, *arguments, workers=MadeUpWorker, stdout=None, renders=False):
    """Runs the command in a folder; gives (exit code, stdout, stderr). With the file `stdout`, stdout goes there."""
    stdout, stderr = stdout or StringIO(), StringIO()
    with ExitStack() as stack:
        stack.enter_context(made_up_workers(workers, renders))
        stack.enter_context(chdir(folder))
        stack.enter_context(mock.patch.object(sys, "argv", ["glabench", *map(str, arguments)]))
        stack.enter_context(mock.patch.object(cli, "_end_like_an_interruption"))
        stack.enter_context(mock.patch("glabench.cli.app.make_app", app_of))
        stack.enter_context(mock.patch("typer.main.get_command", built_command))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default", RenamedWarning)
        stack.enter_context(redirect_stdout(stdout))
        stack.enter_context(redirect_stderr(stderr))
        try:
            cli.main()
        except SystemExit as end:
            return end.code, stdout.getvalue() if isinstance(stdout, StringIO) else "", stderr.getvalue()
    raise AssertionError("the command did not end")


def shown(text):
    """The words of a table or a help text, without its layout."""
    return " ".join("".join(c for c in text if c not in "│╭╮╰╯─━┃┏┓┗┛┡┩┠┨╇┳┻╋").split())
