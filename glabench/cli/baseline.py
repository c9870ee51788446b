"""`glabench baseline save`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from glabench.cli.measuring import find_place, resolved
from glabench.cli.options import MeasuringOptions, between, with_options
from glabench.cli.output import Messages
from glabench.cli.rounds import Campaign, Version, campaign_folder, compile_cache, measure_rounds, records_of
from glabench.errors import ExitCode, NothingToRunError, UsageError
from glabench.measure.revisions import present_revision
from glabench.records import FAILED
from glabench.records.baseline import Baseline
from glabench.records.comparison import device_name
from glabench.sweeps import load_sweep

baseline = typer.Typer(help="Baselines, which glabench check holds later measurements against.", no_args_is_help=True)


@baseline.command("save")
@with_options
def save(
    options: MeasuringOptions,
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="A preset's name or a .toml file.")] = "gate",
    to: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("baseline.json"),
    rounds: Annotated[int, between("--rounds", 1, 100, "Times that every cell is measured, in fresh processes.")] = 3,
    runs: Annotated[Path | None, typer.Option(help="Folder for the rounds' runs; by default under runs/.")] = None,
) -> None:
    """Measure a sweep in several rounds and keep all of it in one file, tied to this device.

    Compiled kernels are not taken from earlier runs, so that first calls can be compared.
    """
    messages = Messages(options.quiet, options.verbose)
    if to.is_dir() or (to.parent.exists() and not to.parent.is_dir()):
        raise UsageError(f"--out: '{to}' needs to be a file in a folder")
    revision = present_revision()
    place = find_place(options.device, options.plugin)
    resolved_sweep, cells = resolved(load_sweep(sweep), options, place)
    folder = campaign_folder(runs, "baseline", "--runs")
    messages.say(f"{resolved_sweep.title}: {len(cells)} cells, {rounds} rounds on {device_name(place.known)}")
    campaign = Campaign(resolved_sweep, cells, options.settings(place.device), place, folder, messages, options.verbose)
    with TemporaryDirectory(prefix="glabench-cache-") as cache:
        version = Version(compile_cache(cache), tuple(options.plugin or ()))
        folders = measure_rounds(campaign, {"round": version}, rounds)["round"]
    records = records_of(folders)
    if not any(record.samples_ms for found in records for record in found):
        raise NothingToRunError(f"no cell has a time, so there is nothing to hold; what was tried is in {folder}")
    unchanged = revision if revision == present_revision() else None
    Baseline(resolved_sweep, folders[0].environment(), unchanged, records).save(to)
    messages.say(f"wrote {to}")
    if any(record.status in FAILED for found in records for record in found):
        messages.say("some cells failed; check holds what has a time in some round")
        raise typer.Exit(ExitCode.CELL_FAILED)
