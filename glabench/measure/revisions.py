"""Two revisions of a git repository side by side, so that their kernels can be measured in turns."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from glabench.errors import UsageError

WORKTREE = "WORKTREE"
_KERNELS = Path("kernels") / "gla_kernels"


def _git(repository: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False)
    except OSError as problem:
        raise UsageError(f"git does not run here: {problem.strerror}; install it") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise UsageError(f"git {arguments[0]} failed: {said[-1]}")
    return done.stdout.strip()


def repository_of(folder: Path) -> Path:
    """The top of the repository that a folder belongs to. Raises UsageError if it belongs to none."""
    return Path(_git(folder, "rev-parse", "--show-toplevel"))


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
    """Plugin files as they are in a tree: those of the repository are the revision's own."""

    def within(path: Path) -> str:
        absolute = path.resolve()
        top = repository.resolve()
        return str(tree / absolute.relative_to(top)) if absolute.is_relative_to(top) else str(path)

    return tuple(within(Path(plugin)) for plugin in plugins)


def has_code(tree: Path, repository: Path, plugins: Sequence[str]) -> bool:
    """Whether a tree holds anything that its workers would take from it: kernels, or plugins of the repository."""
    return (tree / _KERNELS).is_dir() or plugins_in(tree, repository, plugins) != tuple(map(str, map(Path, plugins)))


def differs_from_present(tree: Path, repository: Path, plugins: Sequence[str]) -> bool:
    """Whether workers of a tree would run other code than those of the present: other kernels, or other plugins.

    Only then does measuring both say anything of the code: all else is the present one's on both sides.
    """
    spec = find_spec("gla_kernels")
    present = Path(spec.origin).parent if spec is not None and spec.origin else None
    kernels = tree / _KERNELS
    if kernels.is_dir() and (present is None or _sources(kernels) != _sources(present)):
        return True
    pairs = zip(plugins_in(tree, repository, plugins), plugins, strict=True)
    return any(_read(Path(before)) != _read(Path(now)) for before, now in pairs)


def _sources(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): _read(path) for path in sorted(folder.rglob("*.py"))}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def present_revision() -> str | None:
    """The commit of the repository that the working folder belongs to; None where there is none, or it was changed."""
    try:
        repository = repository_of(Path.cwd())
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
