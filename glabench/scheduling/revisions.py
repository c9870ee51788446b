"""Revisions of a git repository, checked out side by side, so that their kernels can be measured in turns."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from glabench.apart import ask_git
from glabench.errors import GlabenchError, UsageError

WORKTREE = "WORKTREE"
KERNELS = Path("kernels") / "gla_kernels"


def repository_of(folder: Path) -> Path:
    """The top of the repository that a folder belongs to. Raises UsageError if it belongs to none."""
    try:
        return Path(ask_git(folder, "rev-parse", "--show-toplevel")).resolve()
    except GlabenchError as problem:
        raise UsageError(f"--rev: needs a git repository around the working folder: {problem}") from None


def parse_range(text: str) -> tuple[str, str]:
    """The two names in `A..B`; one name alone is compared with HEAD. Raises UsageError if there is no name."""
    first, dots, second = text.partition("..")
    pair = (first or "HEAD", second or "HEAD") if dots else ("HEAD", first)
    if not first and not second:
        raise UsageError(f"--rev: '{text}' names no revision (allowed: main..HEAD, HEAD~3..WORKTREE, WORKTREE)")
    return pair


def commit_of(repository: Path, revision: str) -> str:
    """The commit that a name refers to; HEAD's for WORKTREE. Raises UsageError if there is none."""
    name = "HEAD" if revision == WORKTREE else revision
    try:
        return ask_git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except GlabenchError:
        raise UsageError(f"--rev: '{revision}' is neither a revision of {repository.name} nor {WORKTREE}") from None


@contextmanager
def checked_out(repository: Path, revision: str) -> Iterator[Path]:
    """A folder with a revision's files; for WORKTREE the repository itself, with uncommitted changes."""
    if revision == WORKTREE:
        yield repository
        return
    commit = commit_of(repository, revision)
    with TemporaryDirectory(prefix="glabench-") as folder:
        tree = Path(folder) / "tree"
        try:
            ask_git(repository, "worktree", "add", "--detach", "--quiet", str(tree), commit)
            yield tree
        finally:
            # If `worktree add` was interrupted, `worktree remove` may fail; deleting and pruning then clean up.
            with suppress(GlabenchError):
                ask_git(repository, "worktree", "remove", "--force", str(tree))
            shutil.rmtree(tree, ignore_errors=True)
            with suppress(GlabenchError):
                ask_git(repository, "worktree", "prune")


def worker_variables(tree: Path) -> dict[str, str]:
    """Environment variables that make a worker import a tree's kernels. The suite remains the running one."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tree / "kernels"), before]))}


def plugins_in(tree: Path, repository: Path, plugins: Sequence[str]) -> tuple[str, ...]:
    """The paths of plugin files for a tree: those inside of the repository are replaced by the tree's own.

    Raises UsageError for a plugin that the tree lacks.
    """
    found = []
    for plugin in plugins:
        own = tree / Path(plugin).resolve().relative_to(repository) if is_within(repository, plugin) else Path(plugin)
        if not own.is_file():
            raise UsageError(f"--plugin: the revision has no '{plugin}'; give a copy outside of the repository")
        found.append(str(own))
    return tuple(found)


def is_within(repository: Path, plugin: str) -> bool:
    """Whether a plugin file is inside of a repository, so that each revision has its own."""
    return Path(plugin).resolve().is_relative_to(repository)


def unchanged_revision(folder: Path) -> str | None:
    """The commit of the repository that a folder belongs to; None if there is none, or files in it were changed."""
    try:
        repository = repository_of(folder)
        return (
            None
            if ask_git(repository, "status", "--porcelain", "--untracked-files=no")
            else commit_of(repository, "HEAD")
        )
    except GlabenchError:
        return None


def repository_with(commit: str | None) -> Path | None:
    """The repository around the working folder, if it has `commit`; otherwise None."""
    try:
        repository = repository_of(Path.cwd())
        return repository if commit is not None and commit_of(repository, commit) else None
    except GlabenchError:
        return None
