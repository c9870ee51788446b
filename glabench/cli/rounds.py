"""Measuring in rounds: every round is a run folder of its own, and every cell of it was measured in a fresh process."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from glabench.cli.measuring import Place, new_path, rated, warn_if_busy
from glabench.cli.output import Messages
from glabench.errors import InterruptedRunError, UsageError
from glabench.measure.ceiling import measure_ceilings
from glabench.measure.process import ProcessWorker
from glabench.measure.rounds import Turn, run_turns, turns
from glabench.measure.settings import Settings
from glabench.records import Ceilings, Record, RunFolder
from glabench.sweeps import Cell, Sweep

_MOST_DIGITS = 3  # of a round's number


@dataclass(frozen=True)
class Version:
    """One side of a measurement: what its workers find in their environment, the plugins that they load, its name."""

    variables: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    label: str | None = None


@dataclass(frozen=True)
class Campaign:
    """What is measured in rounds, where and how."""

    sweep: Sweep
    cells: Sequence[Cell]
    settings: Settings
    place: Place
    folder: Path
    messages: Messages
    verbose: bool = False

    def on(self, cells: Sequence[Cell], name: str) -> "Campaign":
        """The same with other cells, in a folder within this one's."""
        return replace(self, cells=cells, folder=self.folder / name)

    @property
    def environment(self) -> dict[str, Any]:
        """Hardware, versions and settings, as a run folder keeps them."""
        return {**self.place.known, "settings": self.settings.to_json()}


def measure_rounds(
    campaign: Campaign, versions: Mapping[str, Version], rounds: int, ceilings: Ceilings | None = None
) -> dict[str, list[RunFolder]]:
    """Measures the cells of a campaign, `rounds` times each version, in turns; the run folders of each version.

    `ceilings` are those of rounds just before, if there were some.
    """
    if ceilings is None:
        warn_if_busy(campaign.place, campaign.messages)
        ceilings = measure_ceilings() if campaign.place.device == "cuda" else Ceilings()
    order = turns(list(versions), rounds)
    environment = {**campaign.environment, "ceilings": asdict(ceilings)}
    folders = {
        turn: RunFolder.create(
            campaign.folder / f"{turn.side}-{turn.round}",
            campaign.sweep,
            {**environment, "version": versions[turn.side].label},
        )
        for turn in order
    }

    def start(turn: Turn, backend: str) -> ProcessWorker:
        version = versions[turn.side]
        return ProcessWorker(
            backend,
            folders[turn].run_id,
            campaign.settings,
            version.plugins,
            campaign.verbose,
            version.variables,
        )

    with campaign.messages.progress(len(order) * len(campaign.cells)) as progress:

        def keep(turn: Turn, record: Record) -> None:
            record = rated(record, campaign.place.registry, ceilings)
            folders[turn].append(record)
            progress.add(record, f"{turn.side}-{turn.round}")

        try:
            run_turns(campaign.cells, order, start, lambda turn: folders[turn].run_id, keep, progress.start)
        except KeyboardInterrupt:
            raise InterruptedRunError(f"interrupted; what was measured is in {campaign.folder}") from None
    return {side: [folders[turn] for turn in order if turn.side == side] for side in versions}


def records_of(folders: Sequence[RunFolder]) -> list[list[Record]]:
    """The records of every round."""
    return [folder.records() for folder in folders]


def rounds_in(path: Path) -> list[RunFolder]:
    """A run folder, or the rounds in a folder of rounds, by their numbers. Raises UsageError if there are none."""
    if not path.is_dir() or (path / "records.jsonl").exists():
        return [RunFolder.open(path)]
    found = [RunFolder.open(run) for run in path.iterdir() if (run / "records.jsonl").exists()]
    if not found:
        raise UsageError(f"RUN: '{path}' is not a run folder (it has no records.jsonl), nor a folder of some")
    if not all(_is_round(folder.path) for folder in found):
        raise UsageError(
            f"RUN: '{path}' holds runs that are no rounds of one measurement (NAME-1, NAME-2, ...); name one of them"
        )
    if len({_name_and_round(folder.path)[0] for folder in found}) > 1:
        raise UsageError(
            f"RUN: '{path}' holds rounds of several versions; name it alone, or two folders of one version"
        )
    return sorted(found, key=lambda folder: _name_and_round(folder.path))


def turns_in(path: Path, side: str) -> list[RunFolder]:
    """One side's rounds in the folder of a comparison. Raises UsageError if there are none."""
    runs = [run for run in path.glob(f"{side}-*") if _is_round(run) and (run / "records.jsonl").exists()]
    if not runs:
        raise UsageError(f"RUN_A RUN_B: needs two run folders; '{path}' alone is none that --rev made")
    return [RunFolder.open(run) for run in sorted(runs, key=_name_and_round)]


def _name_and_round(path: Path) -> tuple[str, int]:
    name, _, number = path.name.rpartition("-")
    return name, int(number)


def _is_round(path: Path) -> bool:
    """Whether a run's name ends in the number of a round; two runs of one day end in a time of six digits."""
    number = path.name.rpartition("-")[2]
    return number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS


def campaign_folder(out: Path | None, name: str, option: str = "--out") -> Path:
    """Where rounds go: the folder that was asked for, or a new one under runs/.

    Raises UsageError if the folder has something in it: rounds are measured in one go, never added to.
    """
    if out is not None and out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{option}: '{out}' is not empty; rounds need a new folder")
    return out or new_path(name)


def compile_cache(folder: str) -> dict[str, str]:
    """What makes a worker keep its compiled kernels in a folder, and find none there of an earlier run."""
    return {"TRITON_CACHE_DIR": folder, "GLA_KERNELS_CACHE": folder}
