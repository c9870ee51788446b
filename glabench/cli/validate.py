"""The command `glabench validate`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from glabench.checking import Rounds
from glabench.cli.options import MeasuringOptions, between
from glabench.cli.output import Messages
from glabench.errors import GlabenchError, UsageError
from glabench.report.describe import describe_environment
from glabench.report.validation import markdown, spreads
from glabench.scheduling.folders import records_of
from glabench.scheduling.versions import measure_versions, present_version
from glabench.sweeps import preset_names

_TIMEOUT_S = 600


def validate(
    options: MeasuringOptions,
    sweep: Annotated[
        str, typer.Option(help="The sweep whose spread between processes is measured.", autocompletion=preset_names)
    ] = "validation",
    processes: Annotated[int, between("--processes", 2, 100, "How many fresh processes measure every cell.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default under runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the processes in --out.")] = False,
) -> None:
    """Test the timers on work of known size and against other timers, and measure the spread between processes.

    Writes known-work.json, validation.md, and one run folder per process. Needs an NVIDIA GPU. The other timers are
    Triton's do_bench and, if it is installed, NVIDIA's cuda-bench.
    """
    messages = Messages(options.quiet, options.verbose)
    plan = options.request(sweep).plan()
    if plan.place.kind != "cuda":
        raise UsageError("--device: validate needs an NVIDIA GPU, because it compares timers of GPUs")
    folder = Rounds(processes, out, resume).folder("validation")
    versions = {"process": present_version(plan.place.plugins)}
    go_on = f"the same command with --resume --out {folder}"
    measured = measure_versions(plan, versions, processes, folder, messages, go_on, resume, options.verbose)
    folders = measured["process"]
    messages.say("timing work of a known size")
    known = _time_known_work(plan.place.device)
    page = markdown(known, spreads(records_of(folders)), describe_environment(folders[0].environment()))
    (folder / "known-work.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    (folder / "validation.md").write_text(page, encoding="utf-8")
    if not options.quiet:
        print(page)


def _time_known_work(device: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "glabench.measure.validation", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
        found: list[dict[str, Any]] = json.loads(done.stdout)
    except subprocess.CalledProcessError as problem:
        last = (problem.stderr.strip().splitlines() or ["no message"])[-1]
        raise GlabenchError(f"timing work of a known size failed: {last}") from None
    except ValueError:
        raise GlabenchError("timing work of a known size gave no JSON; something else wrote to its stdout") from None
    except subprocess.TimeoutExpired:
        raise GlabenchError(f"timing work of a known size took more than {_TIMEOUT_S} s; is the GPU busy?") from None
    return found
