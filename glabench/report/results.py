"""The page of published runs, from their index and what they record."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glabench.errors import printable
from glabench.records import Run
from glabench.records.environment import device_name, versions_of_sites
from glabench.records.published import Group, Index, Published, kernels_of, recorded_code, started, tree_of
from glabench.report.describe import describe_progress
from glabench.report.text import escape, escape_bars

_COMMIT = 7
_HEAD = "<!-- Made by `glabench results` from results/index.toml and from what the runs record: edit these instead. -->"
_LEGEND = """\
Kernels:

- **as now**: their code is that of this tree; comments, docstrings and layout do not count.
- **carried over**: their code is another, and a check on the same kind of device found all cells of the check the same.
- **older**: some code of the package is another; notes say what that means for a run's kernels. \
**changed**: it is that of no commit. **unknown**: nothing was recorded.

If a run recorded no commit, its kernels are taken to be those of the commit that published it. Commands marked *by \
hand* were not recorded.
"""
# Packages that belong to backends, by the beginnings of their names; all runs depend on the first two.
_ALWAYS = ("torch", "triton")
_PACKAGES = (
    ("flash-attn", "flash-attn"),
    ("transformer-decode", "flash-attn"),
    ("flash-attn-3", "flash-attn-3"),
    ("flash-attn-4", "flash-attn-4"),
    ("mamba", "mamba-ssm"),
    *((f"mamba{n}-{work}", "causal-conv1d") for n in (1, 2) for work in ("model", "recall", "decode")),
    ("mlstm", "mlstm-kernels"),
    ("fla-", "fla-core"),
    ("sdpa-cudnn", "nvidia-cudnn-cu13"),
)


@dataclass(frozen=True)
class Kernels:
    """What is known of kernels: the hash of the present code, and hashes by the names that runs give them."""

    now: str
    trees: Mapping[str, str | None]


def make_results(index: Index, published: Mapping[str, Published], kernels: Kernels, out: Path) -> str:
    """The page as Markdown. `out` is its path, which links are relative to."""
    page = _Page(published, kernels, out.resolve().parent)
    sections = [page.section(group) for group in index.groups]
    intro = [f"{index.intro.strip()}\n"] if index.intro.strip() else []
    return "\n".join([f"{_HEAD}\n\n# Results\n", *intro, _LEGEND, *sections])


@dataclass(frozen=True)
class _Page:
    published: Mapping[str, Published]
    kernels: Kernels
    folder: Path

    def section(self, group: Group) -> str:
        runs = [self.published[entry.path] for entry in group.runs]
        head = ["run", "what it shows", "measured", "kernels", "command"]
        rows = [head, ["---"] * len(head), *map(self._row, runs)]
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        notes = [f"{group.notes.strip()}\n"] if group.notes.strip() else []
        return "\n".join([f"## {group.title}\n", table, _list_surroundings(runs), *notes])

    def _row(self, one: Published) -> list[str]:
        link = f"[{one.entry.path}]({self._to(one.page or one.path)})"
        return [link, one.entry.shows.strip(), _when(one), self._kernels(one), _command(one)]

    def _to(self, path: Path) -> str:
        return Path(os.path.relpath(path.resolve(), self.folder)).as_posix()

    def _kernels(self, one: Published) -> str:
        if sides := one.sides():
            return ", ".join(f"{name}: {self._state(self._tree(run, one), run, one)}" for name, run in sides.items())
        tree = self._tree(one.first, one)
        state = self._state(tree, one.first, one)
        checks = self._checks_from(tree, one) if tree is not None and state == "older" else []
        links = ", ".join(f"[{check.entry.path}]({self._to(check.page or check.path)})" for check in checks)
        return f"carried over by {links}" if checks else state

    def _tree(self, run: Run, one: Published) -> str | None:
        return tree_of(kernels_of(run, one.entry), self.kernels.trees)

    def _state(self, tree: str | None, run: Run, one: Published) -> str:
        if tree is None:
            return "changed" if kernels_of(run, one.entry) in self.kernels.trees else "unknown"
        return "as now" if tree == self.kernels.now else "older"

    def _checks_from(self, tree: str, run: Published) -> list[Published]:
        """The fewest checks, on a run's device, that found no change and lead from its code to the present one."""
        device = device_name(run.first.environment)
        checks = [one for one in self.published.values() if device_name(one.first.environment) == device]
        chains: dict[str, list[Published]] = {tree: []}
        waiting = [tree]
        while waiting:
            at = waiting.pop(0)
            for check in checks:
                pair = self._unchanged(check)
                for other in pair - chains.keys() if at in pair else ():
                    chains[other] = [*chains[at], check]
                    waiting.append(other)
        return chains.get(self.kernels.now, [])

    def _unchanged(self, one: Published) -> set[str]:
        """The hashes of two codes between which a check found no change; empty for any other run."""
        trees = {self._tree(run, one) for run in one.sides().values()} if one.unchanged else set()
        return {tree for tree in trees if tree is not None} if len(trees) == 2 else set()


def _when(one: Published) -> str:
    """The day, the suite's version and its commit, and how far an interrupted run came."""
    environment = one.first.environment
    code = recorded_code(one.first)
    day = started(one.first)[:10] or "unknown day"
    if code.get("commit"):
        where = f" at {str(code['commit'])[:_COMMIT]}{' with changes' if code.get('changed') else ''}"
    else:
        where = f", published in {one.entry.published[:_COMMIT]}" if one.entry.published else ", commit unknown"
    progress = "".join(f", {words}" for words in map(describe_progress, one.runs) if words)
    return escape(f"{day}, {environment.get('glabench') or 'unknown version'}{where}{progress}")


def _command(one: Published) -> str:
    recorded = one.first.environment.get("command")
    if isinstance(recorded, str):
        return f"`{escape_bars(printable(recorded))}`"
    return f"`{escape_bars(printable(one.entry.command))}` *by hand*" if one.entry.command else "unknown"


def _list_surroundings(runs: Sequence[Published]) -> str:
    """Hardware and versions, in one line per group of runs with the same."""
    found: dict[str, list[str]] = {}
    for one in runs:
        found.setdefault(_surroundings(one), []).append(one.entry.path)
    if len(found) == 1:
        return f"All on {next(iter(found))}.\n"
    return "".join(f"- {line}: {', '.join(names)}\n" for line, names in found.items())


def _surroundings(one: Published) -> str:
    environment = one.first.environment
    gpu, packages = environment.get("gpu"), environment.get("packages", {})
    driver = gpu.get("driver") if isinstance(gpu, Mapping) else None
    backends = {record.cell.backend for run in one.runs for record in run.records}
    own = [package for start, package in _PACKAGES if any(name.startswith(start) for name in backends)]
    needed = dict.fromkeys([*_ALWAYS, *own])
    known = {package: [packages.get(package), *versions_of_sites(environment, package)] for package in needed}
    versions = [f"{package} {' and '.join(filter(None, known[package]))}" for package in needed if any(known[package])]
    return escape(", ".join([device_name(environment), *([f"driver {driver}"] if driver else []), *versions]))
