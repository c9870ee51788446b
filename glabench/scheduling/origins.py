"""Which code published runs were measured with, from git's history."""

from collections.abc import Callable, Mapping
from pathlib import Path

from glabench.devices.provenance import hash_code, hash_package
from glabench.errors import UsageError
from glabench.records.published import Published, commits_of, kernels_of, tree_of
from glabench.scheduling import revisions


def complete_trees(
    known: Mapping[str, str | None], published: Mapping[str, Published], folder: Path, say: Callable[[str], None]
) -> dict[str, str | None]:
    """The hashes of all kernels that the runs do not name by such a hash, sorted; without those that are unknown.

    `known`: hashes found before. `folder`: the present kernels, in whose repository the others are looked for.
    """
    wanted = {
        name: commits_of(run, one.entry)
        for one in published.values()
        for run in one.runs
        if (name := kernels_of(run, one.entry)) is not None and tree_of(name, {}) is None
    }
    found = {name: known[name] for name in sorted(wanted) if name in known}
    for name in sorted(wanted.keys() - found.keys()):
        try:
            found[name] = _look_up(name, wanted[name], folder)
        except UsageError:
            say(f"the history with {' or '.join(wanted[name])} is not here: kernels {name} stay unknown")
    return dict(sorted(found.items()))


def _look_up(name: str, commits: list[str], folder: Path) -> str | None:
    """The hash of the code of the kernels that are called `name`; None if they are of none of the commits.

    Raises UsageError if the repository lacks one of the commits.
    """
    repository = revisions.repository_of(folder)
    for commit in commits:
        with revisions.checked_out(repository, commit) as tree:
            kernels = tree / revisions.KERNELS
            if name in (commit, hash_package(kernels)):
                return hash_code(kernels)
    return None
