"""The folders of runs: a new one, one to resume, one per version and round."""

import glob
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

from glabench.errors import UsageError
from glabench.measure.ceilings import find_ceilings
from glabench.measure.settings import Settings
from glabench.records import Record, RunFolder
from glabench.records.environment import MOMENTARY, Ceilings, packages_of_backends
from glabench.scheduling.loop import Lane, Version
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import RUNS, Plan, changed_at
from glabench.scheduling.revisions import WORKTREE
from glabench.sweeps import Sweep
from glabench.sweeps.load import dump_sweep, parse_sweep
from glabench.sweeps.parameters import option_of

_DATE = 8 * "[0-9]"
_MOST_DIGITS = 3  # of a round's number


def new_path(name: str) -> Path:
    """The path of a new folder under runs/, which does not exist yet."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(p for n in count(1) if not (p := RUNS / (stem if n == 1 else f"{stem}-{n}")).exists())


def latest_run(names: Sequence[str]) -> Path:
    """The newest run under runs/ of the named sweeps, or of all without names. Raises UsageError without a run."""
    patterns = [f"{glob.escape(name)}-{_DATE}-*" for name in names] or ["*"]
    found = [path for pattern in patterns for path in RunFolder.found_in(RUNS, pattern)]
    if not found:
        what = f"run of {' or '.join(names)}" if names else "run"
        raise UsageError(f"--resume: there is no {what} under {RUNS}/; name its folder: --resume FOLDER")
    return max(found, key=changed_at)


def create_run(path: Path, plan: Plan, observer: Observer) -> RunFolder:
    """A new run folder, with the device's ceilings. Raises UsageError if it holds a run already."""
    RunFolder.check_free(path)  # before the ceilings take their time
    environment = {**plan.environment(), "ceilings": asdict(find_ceilings(plan.place.device, observer.say))}
    return RunFolder.create(path, plan.sweep, environment, plan.place.plugins)


def kept_settings(folder: RunFolder, given: Mapping[str, Any]) -> Settings:
    """The settings of a run to resume. Of the given settings, only time-outs may differ from the stored ones.

    Raises UsageError that names the first setting that differs.
    """
    try:
        kept = Settings.from_json(folder.environment().get("settings") or {})
    except ValueError as problem:
        message = f"--resume: the settings of '{folder.path}' do not fit this version of glabench: {problem}"
        raise UsageError(message) from None
    for name, value in given.items():
        if name != "cell_timeout_s" and getattr(kept, name) != value:
            option, words = _describe_setting(name, getattr(kept, name), value)
            raise UsageError(
                f"{option}: '{folder.path}' was measured {words}; leave out the option, or start a new run"
            )
    return replace(kept, **{name: value for name, value in given.items() if name == "cell_timeout_s"})


def _describe_setting(name: str, kept: Any, given: Any) -> tuple[str, str]:
    """The option that gives a setting, and words for the stored and the given value."""
    word = name.removesuffix("_s").replace("_", "-")
    if isinstance(given, bool):
        return f"--{'' if given else 'no-'}{word}", f"{'without' if given else 'with'} {word}"
    return f"--{word}", f"with {kept}, not {given}"


def check_same_machine(
    folder: RunFolder, plan: Plan, environment: Mapping[str, Any] | None = None, may_differ: Collection[str] = ()
) -> None:
    """Raises UsageError if a run would be resumed with another sweep, on another machine or with other code.

    `environment` is what a new run would store, by default the plan's; its keys in `may_differ` may differ.
    """
    kept = folder.sweep()
    # As it would be read back from a file, so that the order of axes does not matter.
    wanted = parse_sweep(folder.run_id, dump_sweep(plan.sweep), "the sweep", stored=True)
    if kept != wanted:
        option = _changed_option(kept, wanted)
        raise UsageError(f"{option}: '{folder.path}' was started with another sweep; leave out {option} to continue it")
    stored, found = folder.environment(), environment or plan.environment()
    before, now = _lasting(stored), _lasting(found)
    compared = [key for key in before if key in now and key not in {*MOMENTARY, "settings", *may_differ}]
    differing = [key for key in compared if before[key] != now[key]]
    if differing:
        what = ", ".join(_where_differing(key, before[key], now[key]) for key in differing)
        raise UsageError(
            f"--resume: '{folder.path}' was measured elsewhere or with other code (it differs in: {what}); "
            "start a new run"
        )
    _check_packages(folder, stored, found)


def _check_packages(folder: RunFolder, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UsageError if a backend would go on with another version of a package than it began with."""
    found = packages_of_backends(now)
    for (backend, package), version in packages_of_backends(before).items():
        another = found.get((backend, package), version)
        if version != another:
            raise UsageError(
                f"--resume: '{folder.path}' was begun with {package} {version or 'missing'} for {backend}; here it is "
                f"{another or 'missing'}. Give the site that it was begun with, as --site {backend}=FOLDER, or start a "
                "new run"
            )


def _where_differing(key: str, before: Any, now: Any) -> str:
    if key == "code":
        plugins = [code.get("plugins") for code in (before, now) if isinstance(code, Mapping)]
        return "code of the --plugin" if len(plugins) == 2 and plugins[0] != plugins[1] else key
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return ", ".join(f"{key} {name}" for name in before if before[name] != now.get(name)) or key
    return f"{key}: {before}, now {now}"


def check_plugins(folder: RunFolder, given: Sequence[str | Path]) -> None:
    """Raises UsageError if plugins are given that a run was not begun with. They may be elsewhere now."""
    begun, names = folder.environment().get("plugins"), [Path(plugin).name for plugin in given]
    if names and begun is not None and sorted(names) != sorted(begun):
        raise UsageError(
            f"--plugin: '{folder.path}' was begun with {', '.join(begun) or 'no plugin'}, not {', '.join(names)}; "
            "leave out the option, or start a new run"
        )


def _changed_option(kept: Sweep, changed: Sweep) -> str:
    """The option that changed the sweep, as far as it can be inferred; otherwise --resume."""
    if [variant.backend for variant in kept.variants] != [variant.backend for variant in changed.variants]:
        return option_of("backend")
    tables = [
        (kept.axes, changed.axes),
        *((a.axes, b.axes) for a, b in zip(kept.variants, changed.variants, strict=True)),
    ]
    names = [name for before, now in tables for name in now if now[name] != before.get(name)]
    return option_of(names[0]) if names else "--resume"


def _lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """An environment without what changes no number.

    That is the commit beside the code's hashes, the number of the GPU, and with a GPU the threads of torch on the CPU.
    """
    drops = {"code": ("commit", "changed"), "gpu": ("index",)}
    parts = {key: environment[key] for key in drops if isinstance(environment.get(key), Mapping)}
    unused = ("torch_threads",) if environment.get("device") == "cuda" else ()
    return {
        **{key: value for key, value in environment.items() if key not in unused},
        **{key: {k: v for k, v in part.items() if k not in drops[key]} for key, part in parts.items()},
    }


def lanes_of_rounds(
    plan: Plan,
    versions: Mapping[str, Version],
    rounds: int,
    path: Path,
    observer: Observer,
    resume: bool,
    look: str = "",
) -> list[Lane]:
    """One lane per version and round, in turns, each with a run folder `SIDE-ROUND` under `path`.

    Lanes are called `SIDE-ROUND`, after the word `look` if there is one. With `resume`, existing folders are continued;
    without it, raises UsageError if `path` is not empty.
    """
    if not resume and path.is_dir() and any(path.iterdir()):
        raise UsageError(f"--out: '{path}' is not empty; rounds need a new folder, or --resume to go on")
    order = [(side, number) for number in range(1, rounds + 1) for side in _turn(list(versions), number)]
    general = plan.environment()
    environments = {
        side: {**general, "version": version.label, "code": {**general["code"], **version.code}}
        for side, version in versions.items()
    }
    lanes: list[Lane] = []
    ceilings: Ceilings | None = None
    for side, number in order:
        target = path / f"{side}-{number}"
        if resume and RunFolder.is_run(target):
            folder = RunFolder.open(target)
            _check_same_commit(folder, versions[side])
            check_same_machine(folder, plan, environments[side])
            kept_settings(folder, plan.settings.to_json())
        else:
            ceilings = ceilings or find_ceilings(plan.place.device, observer.say)
            environment = {**environments[side], "ceilings": asdict(ceilings)}
            folder = RunFolder.create(target, plan.sweep, environment, plan.place.plugins)
        lanes.append(Lane(folder, versions[side], f"{look} {target.name}".strip()))
    return lanes


def _check_same_commit(folder: RunFolder, version: Version) -> None:
    """Raises UsageError if a round was begun with another commit. Of the working tree only the code counts."""
    labels = [folder.environment().get("version") or "", version.label or ""]
    begun, now = (label.rpartition(" (")[2] for label in labels)
    if all(labels) and begun != now and not all(label.startswith(WORKTREE) for label in labels):
        raise UsageError(
            f"--rev: '{folder.path}' was begun with {labels[0]}, which is another commit than {labels[1]}; "
            "name the same commit, or start a new folder"
        )


def _turn(sides: list[str], number: int) -> list[str]:
    """The order of a round: A B, B A, A B, ... Steady drift affects both sides equally, and pairs run back to back."""
    return sides if number % 2 else sides[::-1]


def records_of(folders: Sequence[RunFolder]) -> list[list[Record]]:
    """The records of every folder."""
    return [folder.records() for folder in folders]


def rounds_in(path: Path) -> list[RunFolder]:
    """A run folder by itself, or the rounds in a folder of rounds, by number. Raises UsageError if there are none."""
    if not path.is_dir() or RunFolder(path).records_file.exists():
        return [RunFolder.open(path)]
    found = [RunFolder.open(run) for run in RunFolder.found_in(path)]
    if not found:
        raise UsageError(f"RUN: '{path}' is neither a run folder (it has no records.jsonl) nor a folder of rounds")
    if not all(_is_round(folder.path) for folder in found):
        raise UsageError(
            f"RUN: '{path}' holds runs that are not rounds of one measurement (NAME-1, NAME-2, ...); name one of them"
        )
    if len({_name_and_round(folder.path)[0] for folder in found}) > 1:
        raise UsageError(
            f"RUN: '{path}' holds rounds of several versions; name it alone, or two folders of one version"
        )
    return sorted(found, key=lambda folder: _name_and_round(folder.path))


def turns_in(path: Path, side: str) -> list[RunFolder]:
    """The rounds of one side (`base` or `new`) in the folder of a comparison. Raises UsageError if there are none."""
    old = {"base": "A", "new": "B"}[side]  # the names in version 0.1
    runs = [run for name in (side, old) for run in RunFolder.found_in(path, f"{name}-*") if _is_round(run)]
    if not runs:
        raise UsageError(f"RUN_A RUN_B: needs two run folders; '{path}' alone is not a folder that --rev made")
    return [RunFolder.open(run) for run in sorted(runs, key=_name_and_round)]


def _name_and_round(path: Path) -> tuple[str, int]:
    name, _, number = path.name.rpartition("-")
    return name, int(number)


def _is_round(path: Path) -> bool:
    """Whether a run's name ends in the number of a round, and not in a time of six digits as other runs do."""
    number = path.name.rpartition("-")[2]
    return number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS
