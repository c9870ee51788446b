"""Two revisions of a git repository side by side, so that their kernels can be measured in turns."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from glabench.devices.provenance import SET_BY_HOOKS
from glabench.errors import UsageError

WORKTREE = "WORKTREE"
KERNELS = Path("kernels") / "gla_kernels"


def _git(repository: Path, *arguments: str) -> str:
    try:
        # A hook of git that runs a check has its own index in its variables, which a checkout must not touch.
        variables = {name: value for name, value in os.environ.items() if name not in SET_BY_HOOKS}
        command = ["git", "-C", str(repository), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    except OSError as problem:
        raise UsageError(f"git does not run here: {problem.strerror}; install it") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise UsageError(f"git {arguments[0]} failed: {said[-1]}")
    return done.stdout.strip()


def repository_of(folder: Path) -> Path:
    """The top of the repository that a folder belongs to. Raises UsageError if it belongs to none."""
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel")).resolve()
    except UsageError as problem:
        raise UsageError(f"--rev: revisions are those of the repository around the working folder: {problem}") from None


def parse_range(text: str) -> tuple[str, str]:
    """`A..B` as two names; one name alone is measured against HEAD. Raises UsageError."""
    first, dots, second = text.partition("..")
    pair = (first or "HEAD", second or "HEAD") if dots else ("HEAD", first)
    if not first and not second:
        raise UsageError(f"--rev: '{text}' names no revision (allowed: main..HEAD, HEAD~3..WORKTREE, WORKTREE)")
    return pair


def commit_of(repository: Path, revision: str) -> str:
    """The commit that a name stands for; of the working tree the one that it departs from. Raises UsageError."""
    name = "HEAD" if revision == WORKTREE else revision
    try:
        return _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except UsageError:
        raise UsageError(f"--rev: '{revision}' is not a revision of {repository.name}, nor {WORKTREE}") from None


@contextmanager
def checked_out(repository: Path, revision: str) -> Iterator[Path]:
    """A folder with a revision's files; for WORKTREE the repository itself, with what is not committed yet."""
    if revision == WORKTREE:
        yield repository
        return
    commit = commit_of(repository, revision)
    with TemporaryDirectory(prefix="glabench-") as folder:
        tree = Path(folder) / "tree"
        try:
            _git(repository, "worktree", "add", "--detach", "--quiet", str(tree), commit)
            yield tree
        finally:
            # Interrupted in the middle of the first, the second finds nothing, and the third tidies up after both.
            with suppress(UsageError):
                _git(repository, "worktree", "remove", "--force", str(tree))
            shutil.rmtree(tree, ignore_errors=True)
            with suppress(UsageError):
                _git(repository, "worktree", "prune")


def worker_variables(tree: Path) -> dict[str, str]:
    """What makes a worker import a tree's kernels; the harness stays the one that is running."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tree / "kernels"), before]))}


def plugins_in(tree: Path, repository: Path, plugins: Sequence[str]) -> tuple[str, ...]:
    """Plugin files as they are in a tree: those of the repository are the revision's own.

    Raises UsageError for one that the tree lacks.
    """
    found = []
    for plugin in plugins:
        own = tree / Path(plugin).resolve().relative_to(repository) if is_within(repository, plugin) else Path(plugin)
        if not own.is_file():
            raise UsageError(f"--plugin: the revision has no '{plugin}'; give a copy outside of the repository")
        found.append(str(own))
    return tuple(found)


def is_within(repository: Path, plugin: str) -> bool:
    """Whether a plugin file belongs to a repository, so that each revision has its own."""
    return Path(plugin).resolve().is_relative_to(repository)


def unchanged_revision(folder: Path) -> str | None:
    """The commit of the repository that a folder belongs to; None if there is none, or files in it were changed."""
    try:
        repository = repository_of(folder)
        return (
            None if _git(repository, "status", "--porcelain", "--untracked-files=no") else commit_of(repository, "HEAD")
        )
    except UsageError:
        return None


def repository_with(commit: str | None) -> Path | None:
    """The repository that the working folder belongs to, if it has a commit."""
    try:
        repository = repository_of(Path.cwd())
        return repository if commit is not None and commit_of(repository, commit) else None
    except UsageError:
        return None
