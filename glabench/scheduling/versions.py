"""Measures versions of the code in turns: git revisions checked out side by side, and the present code."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from glabench.devices.provenance import describe_code
from glabench.errors import UsageError
from glabench.records import RunFolder
from glabench.scheduling.folders import lanes_of_rounds
from glabench.scheduling.loop import Version, measure_lanes
from glabench.scheduling.observer import Observer
from glabench.scheduling.plan import Plan
from glabench.scheduling.process import ProcessWorker
from glabench.scheduling.revisions import (
    KERNELS,
    checked_out,
    commit_of,
    is_within,
    plugins_in,
    repository_of,
    worker_variables,
)

_SHORT_COMMIT = 10


def measure_versions(
    plan: Plan,
    versions: Mapping[str, Version],
    rounds: int,
    path: Path,
    observer: Observer,
    go_on: str,
    resume: bool = False,
    show_errors: bool = False,
    look: str = "",
) -> dict[str, list[RunFolder]]:
    """Measures the cells `rounds` times per version, in turns, in fresh processes. Returns the folders per version.

    `go_on` is the command to resume, and `look` a word before the names of rounds, for messages. Every version has its
    own, initially empty cache of compiled kernels. Raises what `lanes_of_rounds` and `measure_lanes` raise.
    """
    with TemporaryDirectory(prefix="glabench-cache-") as cache:
        apart = {
            side: replace(version, variables={**version.variables, **_compile_cache(f"{cache}/{side}")})
            for side, version in versions.items()
        }
        lanes = lanes_of_rounds(plan, apart, rounds, path, observer, resume, look)
        start = partial(ProcessWorker, show_errors=show_errors)
        measure_lanes(lanes, plan, observer, go_on, start_worker=start)
    return {side: [lane.folder for lane in lanes if lane.version is version] for side, version in apart.items()}


def _compile_cache(folder: str) -> dict[str, str]:
    """Environment variables that make a worker keep its compiled kernels in a folder."""
    return {"TRITON_CACHE_DIR": folder, "GLA_KERNELS_CACHE": folder}


def present_version(plugins: Sequence[str]) -> Version:
    """The installed code."""
    return Version(plugins=tuple(plugins), code=describe_code(plugins))


@contextmanager
def revision(name: str, plugins: Sequence[str], folder: Path | None = None) -> Iterator[Version]:
    """A revision of the repository around `folder` (by default the working folder), checked out during the context.

    Kernels, and plugin files of the repository, are those of the revision; this glabench measures them. `WORKTREE` is
    the working tree. Raises UsageError if there is no such revision, or nothing in it to measure.
    """
    repository = repository_of(folder or Path.cwd())
    with checked_out(repository, name) as tree:
        own = plugins_in(tree, repository, plugins)
        kernels = tree / KERNELS
        if not kernels.is_dir() and not any(is_within(repository, plugin) for plugin in plugins):
            raise UsageError(f"--rev: {name} has neither {KERNELS} nor a --plugin to measure")
        code = describe_code(own, kernels if kernels.is_dir() else None)
        label = f"{name} ({commit_of(repository, name)[:_SHORT_COMMIT]})"
        yield Version(label, worker_variables(tree), own, code)
