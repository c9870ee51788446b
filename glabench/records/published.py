"""Published runs: a folder of runs with `index.toml`, which says what only a person can say about them.

intro = "..."                 # Markdown, like all texts here; links are relative to the page that is made from it

[[groups]]
title = "..."                 # a heading of the page
notes = "..."                 # below the group's table (optional)

[[groups.runs]]
path = "h200-paper-fig2"      # a run folder, or one with the rounds of a check, a comparison or a validation
shows = "..."                 # in one line
command = "glabench ..."      # of runs that do not record it
published = "2637a21"         # the commit that published a run which records none
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glabench.errors import UsageError, printable
from glabench.plain import Name, read_as, read_json
from glabench.records.run import Run
from glabench.records.runfolder import RunFolder

INDEX, KERNELS = "index.toml", "kernels.json"
_TREE = "tree:"
_PAGES = ("report.md", "check.md", "compare.md", "validation.md")
_COMPARISONS = ("check.json", "compare.json")
_SIDES = ("base", "new")


@dataclass(frozen=True)
class Entry:
    """What the index says about a run, or about the rounds of a check."""

    path: Name
    shows: str
    command: str | None = None
    published: Name | None = None


@dataclass(frozen=True)
class Group:
    """A section of the page."""

    title: Name
    runs: list[Entry]
    notes: str = ""


@dataclass(frozen=True)
class Index:
    """The index of a folder of published runs."""

    groups: list[Group]
    intro: str = ""


@dataclass(frozen=True)
class Published:
    """An entry of the index with its runs: one, or several rounds.

    `page` is the report to link to, if there is one; `unchanged` tells that a comparison found every cell the same.
    """

    entry: Entry
    path: Path
    runs: tuple[Run, ...]
    page: Path | None
    unchanged: bool

    @property
    def first(self) -> Run:
        """The run that was measured first."""
        return min(self.runs, key=lambda run: started(run) or "~")

    def sides(self) -> dict[str, Run]:
        """A round of each side (`base` and `new`) of a check or a comparison of revisions; empty for other runs."""
        rounds = {run.name.rpartition("-")[0]: run for run in self.runs if run.path.parent == self.path}
        return {name: rounds[name] for name in _SIDES} if rounds.keys() >= set(_SIDES) else {}


@dataclass(frozen=True)
class _Comparison:
    verdicts: dict[str, int]


def started(run: Run) -> str:
    """When the first cell was begun; empty if unknown."""
    return min((record.started_at for record in run.records if record.started_at), default="")


def load_index(folder: Path) -> Index:
    """The index of a folder of published runs. Raises UsageError if there is none, or if it is wrong."""
    path = folder / INDEX
    if not path.is_file():
        raise UsageError(f"FOLDER: '{folder}' has no {INDEX}; name a folder of published runs, such as results")
    try:
        return read_as(Index, tomllib.loads(path.read_text(encoding="utf-8")))
    except ValueError as problem:
        raise UsageError(f"{path}: {printable(str(problem))}") from None


def load_published(folder: Path, index: Index) -> dict[str, Published]:
    """The runs of an index by their paths in it.

    Raises UsageError if a run is not in the index, or the index names something that is no run.
    """
    listed = [entry for group in index.groups for entry in group.runs]
    found = {entry.path: _load(folder, entry) for entry in listed}
    if len(found) < len(listed):
        raise UsageError(f"{folder / INDEX}: a path is in it twice; take one out")
    covered = {run.path for published in found.values() for run in published.runs}
    if missing := sorted(set(RunFolder.found_in(folder, "**")) - covered):
        raise UsageError(f"{folder / INDEX}: '{missing[0].relative_to(folder)}' is not in it; add it to a group")
    return found


def _load(folder: Path, entry: Entry) -> Published:
    path = folder / entry.path
    runs = tuple(RunFolder.open(run).load() for run in sorted(RunFolder.found_in(path, "**")))
    if not any(run.records for run in runs):
        raise UsageError(f"{folder / INDEX}: '{entry.path}' has no records; correct its path or take it out")
    if len(runs) == 1 and runs[0].environment.get("command") and entry.command:
        raise UsageError(f"{folder / INDEX}: '{entry.path}' records its command; take out `command`")
    page = next((path / name for name in _PAGES if (path / name).is_file()), None)
    return Published(entry, path, runs, page, _is_unchanged(path))


def _is_unchanged(path: Path) -> bool:
    files = [path / name for name in _COMPARISONS if (path / name).is_file()]
    try:
        found = [read_as(_Comparison, read_json(file.read_bytes())) for file in files]
    except ValueError as problem:
        raise UsageError(f"{files[0]}: not a comparison: {problem}") from None
    return bool(found) and all(set(each.verdicts) == {"same"} for each in found)


def load_trees(folder: Path) -> dict[str, str | None]:
    """The hashes of the code of kernels that runs name by a commit or by a hash of bytes; None if of no commit.

    Kept beside the runs, so that no history is needed. Raises UsageError if the file is wrong.
    """
    path = folder / KERNELS
    try:
        return read_as(dict[str, str | None], read_json(path.read_bytes())) if path.is_file() else {}
    except ValueError as problem:
        raise UsageError(f"{path}: {problem}") from None


def kernels_of(run: Run, entry: Entry) -> str | None:
    """The name of a run's kernels: the recorded hash, otherwise the commit that published it; None if unknown."""
    return str(recorded_code(run).get("kernels") or entry.published or "") or None


def tree_of(name: str | None, trees: Mapping[str, str | None]) -> str | None:
    """The hash of the code that a name of `kernels_of` stands for; None if unknown."""
    return name if name is not None and name.startswith(_TREE) else trees.get(name or "")


def commits_of(run: Run, entry: Entry) -> list[str]:
    """The commits whose kernels a run may have measured, as far as it or the index names them."""
    # `main (0123456789)`, of a run in a comparison of revisions
    label = str(run.environment.get("version") or "").rpartition("(")[2].rstrip(")")
    named = (label, recorded_code(run).get("commit"), entry.published)
    return [commit for commit in named if isinstance(commit, str) and commit]


def recorded_code(run: Run) -> Mapping[str, Any]:
    """The commit and the hashes of code that a run recorded; empty if it recorded none."""
    code = run.environment.get("code")
    return code if isinstance(code, Mapping) else {}
