"""`glabench validate`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from glabench.cli.measuring import find_place, resolved
from glabench.cli.options import MeasuringOptions, between, with_options
from glabench.cli.output import Messages
from glabench.cli.rounds import Campaign, Version, campaign_folder, measure_rounds, records_of
from glabench.errors import GlabenchError, UsageError
from glabench.report.validation import markdown, spreads
from glabench.report.write import describe_environment
from glabench.sweeps import load_sweep

_TIMEOUT_S = 600


@with_options
def validate(
    options: MeasuringOptions,
    sweep: Annotated[str, typer.Option(help="The cells whose spread between processes is measured.")] = "validation",
    processes: Annotated[int, between("--processes", 2, 100, "Fresh processes that measure every cell.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; by default under runs/.")] = None,
) -> None:
    """Hold this harness against work of a known size and other people's timers, and against itself.

    Writes known-work.json, validation.md, and one run folder a process. Needs an NVIDIA GPU; NVIDIA's cuda-bench is
    compared with where it is installed.
    """
    messages = Messages(options.quiet, options.verbose)
    place = find_place(options.device, options.plugin)
    if place.device != "cuda":
        raise UsageError("--device: validate needs an NVIDIA GPU, whose timers it holds against each other")
    folder = campaign_folder(out, "validation")
    loaded, cells = resolved(load_sweep(sweep), options, place)
    campaign = Campaign(loaded, cells, options.settings(place.device), place, folder, messages, options.verbose)
    folders = measure_rounds(campaign, {"process": Version(plugins=tuple(options.plugin or ()))}, processes)["process"]
    messages.say("timing work of a known size")
    known = _known_work()
    found = spreads(records_of(folders))
    page = markdown(known, found, describe_environment(folders[0].environment()))
    (folder / "known-work.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    (folder / "validation.md").write_text(page, encoding="utf-8")
    if not options.quiet:
        print(page)


def _known_work() -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "glabench.measure.validation"]
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
