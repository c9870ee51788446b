"""The command `glabench results`."""

from pathlib import Path
from typing import Annotated

import typer

from glabench.cli.output import Messages, check_targets, write_json
from glabench.devices.provenance import hash_code, hash_package
from glabench.errors import UsageError
from glabench.records.published import (
    KERNELS,
    Published,
    commits_of,
    kernels_of,
    load_index,
    load_published,
    load_trees,
    tree_of,
)
from glabench.report.results import Kernels, make_results
from glabench.scheduling import revisions


def results(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Published runs with an index.toml, beside the folder kernels/.")
    ] = Path("results"),
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/results.md"),
) -> None:
    """Make the page of published runs: what each shows, when, where, with which code and by which command.

    Texts are from FOLDER/index.toml, everything else from the runs. Kernels are compared with the present ones by the
    hash of their code; hashes for runs that record none are found in git's history and kept in FOLDER/kernels.json.
    """
    messages = Messages()
    check_targets({"--out": str(out)})
    index = load_index(folder)
    published = load_published(folder, index)
    now = folder.resolve().parent / revisions.KERNELS
    if not now.is_dir():
        raise UsageError(f"FOLDER: '{folder}' has no {revisions.KERNELS} beside it, which runs are compared with")
    known = load_trees(folder)
    trees = _complete(known, published, now, messages)
    if trees != known:
        write_json(trees, str(folder / KERNELS))
    out.write_text(make_results(index, published, Kernels(hash_code(now), trees), out), encoding="utf-8")
    messages.say(f"wrote {out}")


def _complete(
    known: dict[str, str | None], published: dict[str, Published], folder: Path, messages: Messages
) -> dict[str, str | None]:
    """The hashes of all kernels that the runs do not name by such a hash, sorted; without those that are unknown."""
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
            messages.say(f"the history with {' or '.join(wanted[name])} is not here: kernels {name} stay unknown")
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
