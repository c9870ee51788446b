"""Measures versions of the code in turns: git revisions checked out side by side, and the present code."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from glabench.devices.provenance import describe_code
from glabench.errors import UsageError, count_of
from glabench.records import RunFolder
from glabench.records.environment import device_name
from glabench.scheduling.folders import lanes_of_rounds, new_path
from glabench.scheduling.loop import Version, measure_lanes
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import Plan
from glabench.scheduling.process import ProcessWorker
from glabench.scheduling.revisions import (
    KERNELS,
    checked_out,
    commit_of,
    is_within,
    plugins_in,
    repository_of,
    worker_variables,
)
from glabench.scheduling.runs import Request, announce, plan_to_resume
from glabench.sweeps import Cell

_SHORT_COMMIT = 10


@dataclass(frozen=True)
class Rounds:
    """How many times each version is measured, and where the runs go (None: a new folder under runs/)."""

    count: int
    out: Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"rounds: {self.count} is out of range (allowed: 1 or more)")

    def folder(self, name: str, option: str = "--out") -> Path:
        """The folder of the runs, by default a new one. Raises UsageError if a folder to resume is missing."""
        if self.resume and (self.out is None or not self.out.is_dir()):
            raise UsageError(f"--resume: name the folder of the rounds to continue: {option} FOLDER")
        return self.out or new_path(name)


@dataclass(frozen=True)
class Trial:
    """Versions of the code, by the name of their run folders, that are measured in turns in some rounds."""

    plan: Plan
    versions: Mapping[str, Version]
    rounds: Rounds
    path: Path
    observer: Observer
    show_errors: bool = False
    # The option that names `path`.
    option: str = "--out"

    @classmethod
    def of(cls, request: Request, rounds: Rounds, path: Path, observer: Observer, option: str = "--out") -> "Trial":
        """What is asked for, or if rounds are resumed, what the first of them measured; without versions yet."""
        begun = sorted(RunFolder.found_in(rounds.out, "*-1")) if rounds.resume and rounds.out is not None else []
        plan = plan_to_resume(RunFolder.open(begun[0]), request) if begun else request.plan()
        return cls(plan, {}, rounds, path, observer, request.show_errors, option)

    def on(self, versions: Mapping[str, Version]) -> "Trial":
        """The same trial of other versions."""
        return replace(self, versions=versions)

    def installed(self, name: str) -> "Trial":
        """The same trial of the installed code."""
        return self.on({name: Version.installed(self.plan.place.plugins)})

    def revision(self, name: str) -> AbstractContextManager[Version]:
        """A git revision with the trial's plugins, checked out."""
        return revision(name, self.plan.place.plugins)

    def measure(self) -> dict[str, list[RunFolder]]:
        """Says what is measured, and measures it. Returns the run folders of each version, by round."""
        of = " and ".join(version.label for version in self.versions.values() if version.label)
        cells, rounds = count_of(len(self.plan.cells), "cell"), count_of(self.rounds.count, "round")
        where = f"on {device_name(self.plan.place.environment)}, in {self.path}"
        self.observer.say(f"{self.plan.sweep.title}: {cells}, {rounds}{of and f' of {of}'} {where}")
        announce(self.plan, self.observer, self.rounds.count * len(self.versions))
        return self.measure_again(self.plan.cells, self.path, self.rounds.count)

    def measure_again(self, cells: Sequence[Cell], path: Path, rounds: int) -> dict[str, list[RunFolder]]:
        """Measures some cells into a folder that is `path`, or inside it: in turns, in fresh processes.

        Every version has its own, initially empty cache of compiled kernels. Raises what `lanes_of_rounds` and
        `measure_lanes` raise.
        """
        plan, look = self.plan.on(cells), "" if path == self.path else "again"
        with TemporaryDirectory(prefix="glabench-cache-") as cache:
            apart = {
                side: replace(version, variables={**version.variables, **_compile_cache(f"{cache}/{side}")})
                for side, version in self.versions.items()
            }
            lanes = lanes_of_rounds(plan, apart, rounds, path, self.observer, self.rounds.resume, look)
            start = partial(ProcessWorker, show_errors=self.show_errors)
            measure_lanes(lanes, plan, self.observer, f"continue with: {self._go_on()}", start_worker=start)
        return {side: [lane.folder for lane in lanes if lane.version is version] for side, version in apart.items()}

    def _go_on(self) -> str:
        """The command to resume, also a second look, whose folders are inside the first one's."""
        if not self.plan.arguments:  # called from Python
            return f"the same call with resume=True, out={str(self.path)!r}"
        resume = [] if self.rounds.resume else ["--resume"]
        out = [] if self.rounds.out else [self.option, str(self.path)]
        return shlex.join(["glabench", *self.plan.arguments, *resume, *out])


def _compile_cache(folder: str) -> dict[str, str]:
    """Environment variables that make a worker keep its compiled kernels in a folder."""
    return {"TRITON_CACHE_DIR": folder, "GLA_KERNELS_CACHE": folder}


@contextmanager
def revision(name: str, plugins: Sequence[str], folder: Path | None = None) -> Iterator[Version]:
    """A revision of the repository around `folder` (by default the working folder), checked out during the context.

    Kernels, and plugin files of the repository, are those of the revision; this glabench measures them. `WORKTREE` is
    the working tree. Raises UsageError if there is no such revision, or nothing in it to measure.
    """
    repository = repository_of(folder or Path.cwd())
    with checked_out(repository, name) as tree:
        own = plugins_in(tree, repository, plugins)
        kernels = tree / KERNELS
        if not kernels.is_dir() and not any(is_within(repository, plugin) for plugin in plugins):
            raise UsageError(f"--rev: {name} has neither {KERNELS} nor a --plugin to measure")
        code = describe_code(own, kernels if kernels.is_dir() else None)
        label = f"{name} ({commit_of(repository, name)[:_SHORT_COMMIT]})"
        yield Version(label, worker_variables(tree), own, code)
