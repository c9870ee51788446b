"""The command `glabench profile`."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import typer

from glabench.backends.sites import variables_with
from glabench.cli.options import JsonOption, MeasuringOptions
from glabench.cli.output import Messages, check_apart, check_files, check_targets, print_table, write_json
from glabench.errors import ExitCode, GlabenchError, InterruptedRunError, UsageError, allowed_names, count_of, printable
from glabench.profiling.counters import find_program, with_counters
from glabench.profiling.request import Answer, Request, profile_cell
from glabench.records import FAILED, Record, RunFolder
from glabench.records.environment import device_name
from glabench.records.metrics import choose_metrics, significant
from glabench.records.profile import Profile
from glabench.report.kinds import has_kinds, kinds_table
from glabench.report.profiled import CUT_OFF, TITLE
from glabench.report.profiles import LEAST_SHARE, describe_profile, profile_table
from glabench.report.series import rows_of_runs
from glabench.report.write import write_report
from glabench.scheduling.plan import Place, Plan
from glabench.scheduling.revisions import checked_out, commit_of, parse_range, repository_of, worker_variables
from glabench.scheduling.runs import Request as RunRequest
from glabench.scheduling.runs import measure_run
from glabench.sweeps import Sweep
from glabench.sweeps.model import Cell, Variant

# What is profiled if no axis says otherwise. A model's width gives the sizes that an op's authors use.
_AXES: Mapping[str, str] = {"seqlen": "2k", "batch": "8", "dtype": "bf16", "pass": "fwd+bwd"}
_ON_CPU: Mapping[str, str] = {"seqlen": "256", "batch": "1", "dtype": "fp32"}
_WIDTH = "1024"
_SIZES = {"width", "heads", "head_dim", "key_dim", "value_dim", "inner", "state_size"}
# What to do after an interruption: a run is profiled by the command that measures it alone.
_AGAIN = "for profiles run glabench profile again, which measures anew"
# Statuses of cells that can be profiled.
TIMED = ("ok", "inaccurate", "suspicious")


@dataclass(frozen=True)
class _Earlier:
    """The run to compare with: its name, as it was given, its profiles, its device, and if one was cut off."""

    name: str
    profiles: Mapping[Cell, Profile]
    device: str
    cut_off: bool

    @classmethod
    def open(cls, path: Path) -> Self:
        """Reads the profiles of a run. Raises UsageError if it has none."""
        folder = RunFolder.open(path, "--compare")
        found, cut_off = folder.profiles(), folder.profiles_cut_off()
        if not found:
            why = f" ({CUT_OFF})" if cut_off else ""
            raise UsageError(f"--compare: '{path}' has no profiles{why}; name a run of `glabench profile`")
        return cls(str(path), found, device_name(folder.environment()), cut_off)

    def profile_for(self, cell: Cell, device: str) -> tuple[Profile | None, list[str]]:
        """The profile to compare with: of the same cell or, if there is only one, of that; a line per difference."""
        if cell not in self.profiles and len(self.profiles) > 1:
            return None, [f"Not compared: {self.name} has {len(self.profiles)} profiles, none of this cell."]
        notes = []
        if cell not in self.profiles:
            ((cell, _),) = self.profiles.items()
            notes.append(f"{self.name} has one profile, of another cell: {cell}")
        if self.device != device:
            notes.append(f"{self.name} is of another device: {self.device}; this one is {device}")
        return self.profiles[cell], notes


@dataclass(frozen=True)
class _Shown:
    """What is said about profiles while they are made."""

    messages: Messages
    all_kernels: bool
    earlier: _Earlier | None
    quiet: bool
    # The device's name.
    device: str


@dataclass(frozen=True)
class _Extra:
    """What is made besides profiles: a trace, torch's snapshot of allocations, counters of the hardware."""

    trace: Path | None
    memory: Path | None
    counters: bool


def profile(
    options: MeasuringOptions,
    backend: Annotated[
        str, typer.Argument(metavar="BACKEND", help="The backend, or a list; `glabench backends` lists them.")
    ],
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/profile-<time>.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write torch's snapshot of all allocations of a call, for its memory viewer."
        ),
    ] = None,
    ncu: Annotated[
        bool, typer.Option("--ncu", help="Add counters of the hardware to the tables, by Nsight Compute.")
    ] = False,
    all_kernels: Annotated[bool, typer.Option("--all", help="Show those of less than 0.5 % of the time too.")] = False,
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Put the profiles beside those of an earlier run.")
    ] = None,
    rev: Annotated[
        str | None,
        typer.Option(metavar="A..B", help="Put the profiles of two revisions of the kernels side by side; no run."),
    ] = None,
    json_to: JsonOption = None,
) -> None:
    """Show where the time of a call goes: every kernel, the gaps between them, and the host's side.

    Cells are measured as in any run, then profiled in processes of their own, which time nothing. The run folder holds
    both. Without axes it is the width of a small model: 8 sequences of 2k tokens, forward and backward. On a CPU,
    torch's operators are shown.

    Example: glabench profile gla-triton,fla-gla --seqlen 4k --batch 32 --heads 4 --key-dim 128 --value-dim 256
    """
    check_targets({"--json": json_to})
    check_files({"--trace": trace, "--memory": memory})
    check_apart({"--trace": trace, "--memory": memory, "--json": json_to})
    of_one = [name for name, given in (("--trace", trace), ("--memory", memory)) if given]
    if rev is not None and (clash := [name for name, given in (("--out", out), ("--compare", compare)) if given]):
        raise UsageError(f"--rev: makes no run; leave out {clash[0]}")
    if rev is not None and of_one:
        raise UsageError(f"{of_one[0]}: is of one profile, and --rev makes two; leave out {of_one[0]} or --rev")
    if rev is not None and ncu:
        raise UsageError("--ncu: counts no revisions; leave out --rev")
    earlier = None if compare is None else _Earlier.open(compare)
    request = _request(options, backend)
    plan = request.plan()
    if len(plan.cells) > 1 and of_one:
        raise UsageError(f"{of_one[0]}: the axes name {count_of(len(plan.cells), 'cell')}; give one value each")
    if memory is not None and plan.place.kind != "cuda":
        raise UsageError("--memory: torch keeps a history of allocations on a GPU alone; leave it out")
    if ncu:
        if plan.place.kind != "cuda":
            raise UsageError("--ncu: counters are a GPU's; leave it out")
        find_program()
    extra = _Extra(trace, memory, ncu)
    messages, device = Messages(options.quiet, options.verbose), device_name(plan.place.environment)
    shown = _Shown(messages, all_kernels, earlier, options.quiet or json_to == "-", device)
    if earlier is not None and earlier.cut_off:
        messages.say(f"{earlier.name}: {CUT_OFF}")
    if rev is not None:
        if not _compare_revisions(plan, rev, json_to, shown):
            raise typer.Exit(ExitCode.CELL_FAILED)
        return
    run = measure_run(request, out, messages, _AGAIN)
    folder, failed = RunFolder(run.path), False
    try:
        for record in run.records:
            profiled = _profile_record(record, plan, folder, shown, extra)
            failed |= not profiled or record.status in FAILED
    except KeyboardInterrupt:
        kept = f"what was measured and profiled is kept, glabench report {shlex.quote(str(run.path))} shows it"
        raise InterruptedRunError(f"interrupted; {kept}; {_AGAIN}") from None
    run = folder.load()
    if json_to is not None:
        records = {record.cell: record for record in run.records}
        write_json([_as_json(cell, found, records[cell]) for cell, found in run.profiles.items()], json_to)
    paths = write_report([run], run.path, choose_metrics(None, rows_of_runs([run])), None)
    messages.say("wrote " + ", ".join(str(path) for path in (*paths, trace, memory) if path is not None))
    if failed or not run.profiles:
        raise typer.Exit(ExitCode.CELL_FAILED if failed else ExitCode.NOTHING_TO_RUN)


def _request(options: MeasuringOptions, backends: str) -> RunRequest:
    """What is measured before it is profiled. Raises UsageError."""
    if "backend" in options.axes:
        raise UsageError("--backend: BACKEND names it already; leave it out")
    request = options.request("profile")
    known, names = tuple(request.find_place().registry), [name.strip() for name in backends.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"BACKEND: '{name}' is unknown ({allowed_names(known, name)})")
    width = {} if options.axes.keys() & _SIZES else {"width": _WIDTH}
    variants = tuple(Variant(name) for name in dict.fromkeys(names))
    sweep = Sweep("profile", {**_AXES, **width}, variants, title=TITLE, on_cpu=_ON_CPU)
    return replace(request, sweep=sweep)


def _profile_record(record: Record, plan: Plan, folder: RunFolder, shown: _Shown, extra: _Extra) -> bool:
    """Profiles a measured cell and shows it; whether all of that worked. What did not is said."""
    cell = record.cell
    if record.status not in TIMED:
        shown.messages.say(f"{cell}: {record.status}: {record.reason}")
        return record.status == "unsupported"
    try:
        answer = profile_of_cell(cell, plan.place, plan.settings.cell_timeout_s, extra.trace, extra.memory)
    except GlabenchError as problem:
        shown.messages.say(f"error: {problem}")
        return False
    found, failures = answer.profile, [answer.failure] if answer.failure is not None else []
    if extra.counters:
        request, variables = Request(cell, plan.place.device, plan.place.plugins), _variables(plan.place, cell)
        try:
            found = with_counters(found, request, variables, plan.settings.cell_timeout_s)
        except GlabenchError as problem:
            failures.append(str(problem))
    folder.add_profile(cell, found)
    for failure in failures:
        shown.messages.say(f"error: {failure}")
    if not shown.quiet:
        _show_profile(record, found, shown)
    return not failures


def _show_profile(record: Record, found: Profile, shown: _Shown) -> None:
    print(f"\n{record.cell}")
    if shown.earlier is not None:
        earlier, notes = shown.earlier.profile_for(record.cell, shown.device)
        for note in notes:
            print(printable(note))
        if earlier is not None:
            _show_beside([(shown.earlier.name, earlier), ("now", found)], shown.all_kernels)
            return
    if has_kinds(found):
        print_table(*kinds_table(found))
    print_table(*profile_table(found, record, shown.all_kernels))
    for line in describe_profile(found, record):
        print(line)


def profile_of_cell(
    cell: Cell, place: Place, timeout_s: float, trace: Path | None = None, memory: Path | None = None
) -> Answer:
    """The profile of a cell, made in a process of its own. Raises GlabenchError if that fails."""
    request = Request(
        cell, place.device, place.plugins, trace_to=_text(trace and trace.resolve()),
        memory_to=_text(memory and memory.resolve()),
    )  # fmt: skip
    return profile_cell(request, _variables(place, cell), timeout_s)


def _compare_revisions(plan: Plan, rev: str, json_to: str | None, shown: _Shown) -> bool:
    """Profiles every cell with the kernels of two revisions and puts them side by side; whether all worked.

    What did not is said. Raises UsageError for what is no revision.
    """
    repository, names = repository_of(Path.cwd()), parse_range(rev)
    for name in names:
        commit_of(repository, name)
    written, worked = [], True
    for cell in plan.cells:
        sides: list[tuple[str, Profile]] = []
        try:
            for name in names:
                answer = _profile_revision(cell, name, repository, plan)
                sides.append((name, answer.profile))
                if answer.failure is not None:
                    shown.messages.say(f"error: {name}: {answer.failure}")
                    worked = False
        except GlabenchError as problem:
            shown.messages.say(f"error: {names[len(sides)]}: {problem}")
            worked = False
            continue
        written.append({"cell": cell.to_json(), "sides": [{"revision": name, **x.to_json()} for name, x in sides]})
        if not shown.quiet:
            print(f"\n{cell}")
            _show_beside(sides, shown.all_kernels)
    if json_to is not None:
        write_json(written, json_to)
    return worked


def _profile_revision(cell: Cell, revision: str, repository: Path, plan: Plan) -> Answer:
    """A cell's profile with the kernels of a revision. Raises GlabenchError if it fails."""
    request = Request(cell, plan.place.device, plan.place.plugins)
    with checked_out(repository, revision) as tree:
        variables = {**_variables(plan.place, cell), **worker_variables(tree)}
        return profile_cell(request, variables, plan.settings.cell_timeout_s)


def _show_beside(sides: Sequence[tuple[str, Profile]], all_kernels: bool = True) -> None:
    """What kernels add to a call in two profiles with names, those that take the longest first."""
    profiles = [found for _, found in sides]
    times = [found.by_name() for found in profiles]
    longest = {name: max(side.get(name, 0.0) for side in times) for name in times[0].keys() | times[1].keys()}
    least = 0.0 if all_kernels else LEAST_SHARE * max(found.span_ms for found in profiles)
    names = sorted((name for name in longest if longest[name] >= least), key=lambda name: -longest[name])
    rows = [_beside(name, *(side.get(name) for side in times)) for name in names]
    if hidden := longest.keys() - set(names):
        rest = [sum(side.get(name, 0.0) for name in hidden) for side in times]
        rows.append(_beside(f"{len(hidden)} others (--all)", *rest))
    rows.append(_beside("all, from the first start to the last end", *(found.span_ms for found in profiles)))
    what = "kernel" if profiles[-1].on_device else "operator"
    print_table((what, *(f"adds, ms, {name}" for name, _ in sides), "ratio"), rows)


def _beside(name: str, there: float | None, here: float | None) -> Sequence[str]:
    ratio = "-" if not there or here is None else f"x{here / there:.3g}"
    return (name, *("-" if ms is None else significant(ms) for ms in (there, here)), ratio)


def _as_json(cell: Cell, found: Profile, record: Record) -> Mapping[str, object]:
    return {"cell": cell.to_json(), "time_ms": record.time_ms, "status": record.status, **found.to_json()}


def _variables(place: Place, cell: Cell) -> Mapping[str, str]:
    return variables_with(place.sites.get(cell.backend), {})


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
