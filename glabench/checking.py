"""Comparisons and checks: measures versions of the code and passes their records to the verdict engine."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from glabench.devices.provenance import describe_code
from glabench.errors import NothingToRunError, UsageError, count_of, did_you_mean
from glabench.measure.settings import Settings
from glabench.measure.validation import time_known_work
from glabench.records import RunFolder
from glabench.records.described import device_name
from glabench.report.describe import describe_environment
from glabench.report.validation import markdown, spreads
from glabench.scheduling.folders import new_path, records_of, rounds_in, turns_in
from glabench.scheduling.loop import Version
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import Plan
from glabench.scheduling.revisions import WORKTREE, parse_range, repository_with, unchanged_revision
from glabench.scheduling.runs import Request, announce, plan_to_resume
from glabench.scheduling.versions import measure_versions, present_version, revision, runs_same_code
from glabench.verdicts import CONFIRMING_ROUNDS, Baseline, Comparison, Limits, Side, Verdict, compare_sides


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


def plan_of(request: Request, rounds: Rounds) -> Plan:
    """The plan of what is asked for, or if rounds are resumed, of the first of them. Raises UsageError."""
    if rounds.resume and rounds.out is not None:
        begun = sorted(path.parent for path in rounds.out.glob("*-1/records.jsonl"))
        if begun:
            return plan_to_resume(RunFolder.open(begun[0]), request)
    return request.plan()


def compare_folders(a: Path, b: Path | None, limits: Limits, any_device: bool = False) -> Comparison:
    """Compares two runs or two folders of rounds; if `b` is None, both sides that `compare_revisions` put into `a`.

    Raises UsageError if there is nothing to compare.
    """
    folders = [turns_in(a, "base"), turns_in(a, "new")] if b is None else [rounds_in(a), rounds_in(b)]
    names = [f"{a}, base", f"{a}, new"] if b is None else [str(a), str(b)]
    sides = [_side(name, found) for name, found in zip(names, folders, strict=True)]
    paired = b is None and len(sides[0].rounds) == len(sides[1].rounds)
    return compare_sides(sides[0], sides[1], limits, paired=paired, any_device=any_device)


def _side(name: str, folders: Sequence[RunFolder]) -> Side:
    rounds = [records for records in records_of(folders) if records]
    if not rounds:
        raise UsageError(f"RUN_A RUN_B: '{folders[0].path}' has no records yet")
    environment = folders[0].environment()
    return Side(str(environment.get("version") or name), rounds, environment)


def compare_revisions(request: Request, rev: str, rounds: Rounds, limits: Limits, observer: Observer) -> Comparison:
    """Measures two git revisions (`main..HEAD`, `WORKTREE`) in turns, in fresh processes, and compares them."""
    path = rounds.folder("compare")
    plan = plan_of(request, rounds)
    base, new = parse_range(rev)
    with ExitStack() as stack:
        sides = [stack.enter_context(revision(name, plan.place.plugins)) for name in (base, new)]
        look = _Look(plan, sides[0], sides[1], rounds, path, limits, observer, request.show_errors)
        return look.in_turns()


def check_revision(request: Request, rev: str, rounds: Rounds, limits: Limits, observer: Observer) -> Comparison:
    """Compares the working tree with a revision, measured in turns; doubtful cells are measured once more.

    Raises UsageError for a wrong revision, NothingToRunError if no cell of the revision has a time.
    """
    path = rounds.folder("check")
    plan = plan_of(request, rounds)
    with revision(rev, plan.place.plugins) as base, revision(WORKTREE, plan.place.plugins) as new:
        look = _Look(plan, base, new, rounds, path, limits, observer, request.show_errors, True)
        found = look.in_turns()
        _refuse_to_pass_unmeasured(found)
        return look.again(found)


def _refuse_to_pass_unmeasured(found: Comparison) -> None:
    """Raises NothingToRunError if the base has no time at all: the check would pass without comparing anything."""
    if all(finding.verdict is Verdict.NOT_COMPARED for finding in found.cells):
        first = found.cells[0]
        raise NothingToRunError(f"no cell has a time in {found.base}; the first is {first.name}: {first.reason}")


def check_baseline(request: Request, baseline: Path, rounds: Rounds, limits: Limits, observer: Observer) -> Comparison:
    """Compares the installed code with a stored baseline, measuring the baseline's cells with its settings.

    Doubtful cells are measured once more: in turns with the baseline's own revision if the repository has it and its
    code differs, otherwise in fresh rounds of the installed code alone. Raises UsageError for a baseline that is wrong
    or from another device.
    """
    held = Baseline.load(baseline)
    plan = _plan_of(held, request)
    new = present_version(plan.place.plugins)
    look = _Look(plan, held.side, new, rounds, rounds.folder("check"), limits, observer, request.show_errors, True)
    found = look.in_turns()
    if not found.suspects() and not found.slow_first_calls():
        return found
    with ExitStack() as stack:
        if held.revision is not None and repository_with(held.revision) is not None:
            try:
                base = stack.enter_context(revision(held.revision, plan.place.plugins))
                look = look if runs_same_code(base, new) else replace(look, base=base)
            except UsageError as problem:
                observer.say(f"the baseline's revision cannot be checked out ({problem})")
        return look.again(found)


@dataclass(frozen=True)
class _Look:
    """How two versions are measured and compared. A base that cannot be measured is a stored `Side`."""

    plan: Plan
    base: Version | Side
    new: Version
    rounds: Rounds
    path: Path
    limits: Limits
    observer: Observer
    show_errors: bool = False
    # Whether a cell that the new side lacks counts as failed.
    expects_all: bool = False

    def in_turns(self) -> Comparison:
        """Measures and compares both sides, or the new one alone if the base is stored."""
        names = [self.base.label or "base", self.new.label or "now"] if isinstance(self.base, Version) else ["now"]
        device = device_name(self.plan.place.environment)
        cells, rounds = count_of(len(self.plan.cells), "cell"), count_of(self.rounds.count, "round")
        self.observer.say(
            f"{self.plan.sweep.title}: {cells}, {rounds} of {' and '.join(names)} on {device}, in {self.path}"
        )
        announce(self.plan, self.observer, self.rounds.count * len(names))
        return self._measure(self.plan, self.path, self.rounds.count)

    def again(self, found: Comparison) -> Comparison:
        """The comparison after a second look at its suspects.

        Only the fresh rounds count: an outlier is unlikely to occur twice.
        """
        in_turns = isinstance(self.base, Version)
        if found.suspects():
            self.observer.say(f"measuring {count_of(len(found.suspects()), 'cell')} once more")
            again = self._measure(self.plan.on(found.suspects()), self.path / "again", CONFIRMING_ROUNDS)
            found = found.confirmed(again, "measured once more" + (", in turns" if in_turns else ""))
        slow = found.slow_first_calls()
        if slow:
            self.observer.say(f"first calls of {', '.join(slow)} are measured once more")
            cells = [cell for cell in self.plan.cells if cell.backend in slow]
            again = self._measure(self.plan.on(cells), self.path / "first-calls", 1)
            found = found.confirmed_first_calls(again, "compiled once more" + (", in turns" if in_turns else ""))
        return found

    def _measure(self, plan: Plan, path: Path, rounds: int) -> Comparison:
        measured = {"base": self.base} if isinstance(self.base, Version) else {}
        versions = {**measured, "new": self.new}
        # Folders of a second look are inside the first one's, so the same command resumes both.
        go_on = f"the same command with --resume --out {self.path}"
        folders = measure_versions(
            plan, versions, rounds, path, self.observer, go_on, self.rounds.resume, self.show_errors
        )
        new = Side(self.new.label or "now", records_of(folders["new"]), folders["new"][0].environment())
        if not isinstance(self.base, Version):
            return compare_sides(_only(self.base, plan), new, self.limits, expects_all=self.expects_all)
        base = Side(self.base.label or "base", records_of(folders["base"]), folders["base"][0].environment())
        return compare_sides(base, new, self.limits, paired=True, expects_all=self.expects_all)


def _only(side: Side, plan: Plan) -> Side:
    """A stored side, reduced to the cells of a plan."""
    cells = set(plan.cells)
    return replace(side, rounds=[[record for record in records if record.cell in cells] for records in side.rounds])


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
    plan = plan_of(request, rounds)
    before = _revision(plan)
    path = rounds.folder("baseline", "--runs")
    version = present_version(plan.place.plugins)
    cells, times = count_of(len(plan.cells), "cell"), count_of(rounds.count, "round")
    observer.say(f"{plan.sweep.title}: {cells}, {times} on {device_name(plan.place.environment)}, in {path}")
    announce(plan, observer, rounds.count)
    go_on = f"the same command with --resume --runs {path}"
    folders = measure_versions(
        plan, {"round": version}, rounds.count, path, observer, go_on, rounds.resume, request.show_errors
    )["round"]
    records = records_of(folders)
    if not any(record.samples_ms for found in records for record in found):
        raise NothingToRunError(f"no cell has a time, so there is nothing to hold; what was tried is in {path}")
    unchanged = before if before == _revision(plan) else None
    saved = Baseline(plan.sweep, folders[0].environment(), unchanged, records)
    saved.save(out)
    return saved


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
    plan = plan_of(request, rounds)
    if plan.place.kind != "cuda":
        raise UsageError("--device: validate needs an NVIDIA GPU, whose timers it holds against each other")
    path = rounds.folder("validation")
    announce(plan, observer, rounds.count)
    versions = {"process": present_version(plan.place.plugins)}
    go_on = f"the same command with --resume --out {path}"
    measured = measure_versions(plan, versions, rounds.count, path, observer, go_on, rounds.resume, request.show_errors)
    folders = measured["process"]
    observer.say("timing work of a known size")
    known = time_known_work(plan.place.device)
    page = path / "validation.md"
    surroundings = describe_environment(folders[0].environment())
    (path / "known-work.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    page.write_text(markdown(known, spreads(records_of(folders)), surroundings), encoding="utf-8")
    return page
