"""Comparisons and checks: measures versions of the code and passes their records to the verdict engine."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from glabench.devices.provenance import describe_code
from glabench.errors import NothingToRunError, UsageError, count_of, did_you_mean
from glabench.measure.settings import Settings
from glabench.measure.validation import time_known_work
from glabench.records import RunFolder
from glabench.records.environment import device_name, measured_code
from glabench.report.describe import describe_environment
from glabench.report.validation import markdown, spreads
from glabench.scheduling.folders import records_of, rounds_in, turns_in
from glabench.scheduling.loop import Version
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import Plan
from glabench.scheduling.revisions import WORKTREE, parse_range, repository_with, unchanged_revision
from glabench.scheduling.runs import Request
from glabench.scheduling.versions import Rounds, Trial
from glabench.sweeps import Cell
from glabench.verdicts import CONFIRMING_ROUNDS, Baseline, Comparison, Limits, Side, Verdict, compare_sides
from glabench.verdicts.occasions import Occasions, add_occasion

# The folder of the second look, inside of the first one's.
_AGAIN = "again"
_ONCE_MORE = "measured once more"
_IN_TURNS = "--occasions: sides that are measured in turns are from one occasion; leave it out"


def compare_folders(
    a: Path, b: Path | None, limits: Limits, any_device: bool = False, occasions: Path | None = None
) -> Comparison:
    """Compares two runs or two folders of rounds; if `b` is None, both sides that `compare_revisions` put into `a`.

    `occasions` is a file with those of the device, by default the one that ships with glabench. Raises UsageError if
    there is nothing to compare.
    """
    if b is None:
        if occasions is not None:
            raise UsageError(_IN_TURNS)
        return _compare_turns(a, limits, any_device)
    base, new = (_side(str(path), rounds_in(path)) for path in (a, b))
    known = Occasions.load(occasions, device_name(base.environment)) if occasions is not None else None
    found = compare_sides(base, new, limits, paired=False, any_device=any_device, occasions=known)
    return replace(found, notes=("both sides are the same run", *found.notes)) if a.resolve() == b.resolve() else found


def _compare_turns(path: Path, limits: Limits, any_device: bool) -> Comparison:
    """Compares both sides in a folder, as a check does: of cells that it measured once more, only that counts."""

    def compare(folder: Path, before: Comparison | None = None) -> Comparison:
        base, new = (_side(f"{path}, {name}", turns_in(folder, name)) for name in ("base", "new"))
        return compare_sides(base, new, limits, paired=True, any_device=any_device, before=before)

    found, again = compare(path), path / _AGAIN
    if not _has_both_sides(again):
        return found
    return found.confirmed(compare(again, found), f"{_ONCE_MORE}, in turns", is_partial=True)


def _has_both_sides(folder: Path) -> bool:
    """Whether there are records of both sides, as not in a second look that was interrupted or of a baseline."""
    measured = [run.name for run in RunFolder.found_in(folder) if RunFolder(run).records_file.stat().st_size]
    return all(any(name.startswith(f"{side}-") for name in measured) for side in ("base", "new"))


def _side(name: str, folders: Sequence[RunFolder]) -> Side:
    rounds = [records for records in records_of(folders) if records]
    if not rounds:
        raise UsageError(f"RUN_A RUN_B: '{folders[0].path}' has no records yet")
    environment = folders[0].environment()
    return Side(str(environment.get("version") or name), rounds, environment)


def compare_revisions(request: Request, rev: str, rounds: Rounds, limits: Limits, observer: Observer) -> Comparison:
    """Measures two git revisions (`main..HEAD`, `WORKTREE`) in turns, in fresh processes, and compares them."""
    trial = Trial.of(request, rounds, rounds.folder("compare"), observer)
    base, new = parse_range(rev)
    with trial.revision(base) as first, trial.revision(new) as second:
        return _Look(trial.on({"base": first, "new": second}), limits).first()


def check(
    request: Request,
    rev: str | None,
    baseline: Path | None,
    rounds: Rounds,
    limits: Limits,
    observer: Observer,
    occasions: Path | None = None,
) -> Comparison:
    """Compares the working tree with a revision, or the installed code with a stored baseline.

    `occasions` is a file with those of the device, by default the one that ships with glabench; with a baseline alone.
    Doubtful cells are measured once more. Raises UsageError unless either is given.
    """
    if rev is not None and baseline is None:
        if occasions is not None:
            raise UsageError(_IN_TURNS)
        return _check_revision(request, rev, rounds, limits, observer)
    if baseline is not None and rev is None:
        return _check_baseline(request, baseline, rounds, limits, observer, occasions)
    raise UsageError("--rev: give either a revision (--rev main) or a file (--baseline FILE)")


def _check_revision(request: Request, rev: str, rounds: Rounds, limits: Limits, observer: Observer) -> Comparison:
    """Both versions are measured in turns. Raises NothingToRunError if no cell of the revision has a time."""
    trial = Trial.of(request, rounds, rounds.folder("check"), observer)
    with trial.revision(rev) as base, trial.revision(WORKTREE) as new:
        look = _Look(trial.on({"base": base, "new": new}), limits, expects_all=True)
        found = look.first()
        _refuse_to_pass_unmeasured(found)
        return look.again(found)


def _refuse_to_pass_unmeasured(found: Comparison) -> None:
    """Raises NothingToRunError if the base has no time at all: the check would pass without comparing anything."""
    if all(finding.verdict is Verdict.NOT_COMPARED for finding in found.cells):
        first = found.cells[0]
        raise NothingToRunError(f"no cell has a time in {found.base}; the first is {first.name}: {first.reason}")


def _check_baseline(
    request: Request, path: Path, rounds: Rounds, limits: Limits, observer: Observer, occasions: Path | None
) -> Comparison:
    """Measures the baseline's cells with its settings.

    The second look is in turns with the baseline's own revision if the repository has it and its code differs,
    otherwise at the installed code alone. Raises UsageError for a baseline that is wrong or from another device.
    """
    held = Baseline.load(path)
    plan = _plan_of(held, request)
    known = Occasions.load(occasions, device_name(held.environment)) if occasions is not None else None
    new = Version.installed(plan.place.plugins)
    trial = Trial(plan, {"new": new}, rounds, rounds.folder("check"), observer, request.show_errors)
    look = _Look(trial, limits, held.side, expects_all=True, occasions=known)
    found = look.first()
    if not found.suspects() and not found.worse_sums():
        return found
    with ExitStack() as stack:
        if held.revision is not None and repository_with(held.revision) is not None:
            try:
                base = stack.enter_context(trial.revision(held.revision))
                if measured_code(base.code) != measured_code(new.code):
                    look = replace(look, trial=trial.on({"base": base, "new": new}), stored=None)
            except UsageError as problem:
                observer.say(f"the baseline's revision cannot be checked out ({problem})")
        return look.again(found)


@dataclass(frozen=True)
class _Look:
    """How the versions of a trial are compared. If only the new one can be measured, the base is `stored`."""

    trial: Trial
    limits: Limits
    stored: Side | None = None
    # Whether a cell that the new side lacks counts as failed.
    expects_all: bool = False
    # Those of the device, if not the ones that ship with glabench.
    occasions: Occasions | None = None

    def first(self) -> Comparison:
        """Measures and compares both sides, or the new one if the base is stored."""
        return self._compare(self.trial.measure(), self.trial.plan.cells)

    def again(self, found: Comparison) -> Comparison:
        """The comparison after a second look at its suspects.

        Only the fresh rounds count: an outlier is unlikely to occur twice. What the first look saw of the machine, on
        all cells, counts as well.
        """
        say, in_turns = self.trial.observer.say, "" if self.stored else ", in turns"
        if suspects := found.suspects():
            say(f"measuring {count_of(len(suspects), 'cell')} once more")
            found = found.confirmed(
                self._look_at(suspects, _AGAIN, CONFIRMING_ROUNDS, found), f"{_ONCE_MORE}{in_turns}"
            )
        if worse := found.worse_sums():
            say(f"{', '.join(finding.name for finding in worse)} are measured once more")
            backends = {finding.backend for finding in worse}
            cells = [cell for cell in self.trial.plan.cells if cell.backend in backends]
            found = found.confirmed_sums(self._look_at(cells, "first-calls", 1, found), f"compiled once more{in_turns}")
        return found

    def _look_at(self, cells: Sequence[Cell], folder: str, rounds: int, before: Comparison) -> Comparison:
        return self._compare(self.trial.measure_again(cells, self.trial.path / folder, rounds), cells, before)

    def _compare(
        self, folders: Mapping[str, Sequence[RunFolder]], cells: Sequence[Cell], before: Comparison | None = None
    ) -> Comparison:
        base = _side("base", folders["base"]) if self.stored is None else self.stored.on(cells)
        new = _side("now", folders["new"])
        paired = self.stored is None
        return compare_sides(
            base, new, self.limits, paired, expects_all=self.expects_all, occasions=self.occasions, before=before
        )


def _plan_of(held: Baseline, request: Request) -> Plan:
    """The plan that measures a baseline's cells again. Raises UsageError if this machine cannot."""
    # If the baseline's GPU is missing here, the device's name shows it below.
    device = "cpu" if request.device == "auto" and held.environment.get("device") == "cpu" else request.device
    try:
        settings = Settings.from_json(held.environment.get("settings") or {})
    except ValueError:
        raise UsageError(
            "--baseline: its settings do not fit this version of glabench; make a new one with: glabench baseline save"
        ) from None
    place = replace(request, device=device).find_place()
    if device_name(held.environment) != device_name(place.environment):
        raise UsageError(
            f"--baseline: it was made on {device_name(held.environment)}, this is {device_name(place.environment)}; "
            "make one here with: glabench baseline save"
        )
    cells = list(dict.fromkeys(r.cell for records in held.rounds for r in records if r.samples_ms))
    unknown = sorted({cell.backend for cell in cells} - set(place.registry))
    if unknown:
        near = did_you_mean(unknown[0], place.registry)
        raise UsageError(f"--baseline: it holds unknown backends: {', '.join(unknown)}; give their --plugin{near}")
    if not cells:
        raise NothingToRunError("the baseline holds no cell with a time")
    return Plan(held.sweep, cells, settings, place, request.arguments)


def save_baseline(request: Request, out: Path, rounds: Rounds, observer: Observer) -> Baseline:
    """Measures a sweep in several rounds and stores them in one file, for checks on the same kind of device.

    Raises UsageError if the file cannot be written, NothingToRunError if no cell has a time.
    """
    if out.is_dir() or (out.parent.exists() and not out.parent.is_dir()):
        raise UsageError(f"--out: '{out}' needs to be a file in a folder")
    trial = Trial.of(request, rounds, rounds.folder("baseline", "--runs"), observer, "--runs").installed("round")
    before = _revision(trial.plan)
    folders = trial.measure()["round"]
    records = records_of(folders)
    if not any(record.samples_ms for found in records for record in found):
        raise NothingToRunError(f"no cell has a time, so there is nothing to hold; what was tried is in {trial.path}")
    unchanged = before if before == _revision(trial.plan) else None
    saved = Baseline(trial.plan.sweep, folders[0].environment(), unchanged, records)
    saved.save(out)
    return saved


def save_occasion(runs: Sequence[Path], path: Path | None) -> tuple[Occasions, Path]:
    """Adds runs, the rounds of one occasion, to a file: by default that of the device. Raises UsageError."""
    folders = [folder for run in runs for folder in rounds_in(run)]
    return add_occasion(records_of(folders), [folder.environment() for folder in folders], path)


def _revision(plan: Plan) -> str | None:
    """The commit of the measured code, if it is that of a repository and was not changed."""
    if plan.place.plugins:
        return unchanged_revision(Path(plan.place.plugins[0]).resolve().parent)
    code = describe_code()
    return str(code["commit"]) if code["changed"] is False else None


def validate_harness(request: Request, rounds: Rounds, observer: Observer) -> Path:
    """Holds the timers against work of a known size and other people's timers, and fresh processes against each other.

    Writes known-work.json, validation.md and one run folder per process; returns the page's path. Raises UsageError
    without an NVIDIA GPU, GlabenchError if the known work cannot be timed.
    """
    path = rounds.folder("validation")
    trial = Trial.of(request, rounds, path, observer).installed("process")
    place = trial.plan.place
    if place.kind != "cuda":
        raise UsageError("--device: validate needs an NVIDIA GPU, whose timers it holds against each other")
    folders = trial.measure()["process"]
    observer.say("timing work of a known size")
    known = time_known_work(place.device)
    (path / "known-work.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    page = path / "validation.md"
    surroundings = describe_environment(folders[0].environment())
    page.write_text(markdown(known, spreads(records_of(folders)), surroundings), encoding="utf-8")
    return page
