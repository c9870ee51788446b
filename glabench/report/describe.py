"""Lines above tables and figures that describe runs: hardware, versions, settings, progress."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glabench.errors import printable
from glabench.records import Run
from glabench.records.environment import device_name, packages_of_backends, versions_of_sites
from glabench.records.metrics import significant
from glabench.records.run import name_runs

_VERSIONS = ("torch", "triton")
# Recorded for a backend of fla-core only where it runs them in place of its own kernels.
_RUN_BY_FLA = ("tilelang", "flash-qla", "flash-kda")
_MOST_TITLES = 2
_COMMIT = 12


def describe_environment(environment: Mapping[str, Any]) -> str:
    """One line: the GPU or CPU, versions of torch and Triton, also of backends with a site, and what fla may run."""
    packages = environment.get("packages", {})
    versions = [f"{name} {packages[name]}{_by_sites(environment, name)}" for name in _VERSIONS if packages.get(name)]
    return ", ".join([device_name(environment), *versions, *_run_by_fla(environment)])


def _run_by_fla(environment: Mapping[str, Any]) -> list[str]:
    """`fla-core may run tilelang 0.1.9`, if a backend of fla-core found packages that it prefers to its own kernels."""
    packages = packages_of_backends(environment).items()
    found = sorted({f"{package} {version}" for (_, package), version in packages if package in _RUN_BY_FLA and version})
    return [f"fla-core may run {' and '.join(found)}"] if found else []


def _by_sites(environment: Mapping[str, Any], package: str) -> str:
    """` (3.7.1 for fla-simple-gla)`; empty if all backends have the run's version."""
    found = versions_of_sites(environment, package)
    words = "; ".join(f"{version} for {', '.join(names)}" for version, names in found.items())
    return f" ({words})" if found else ""


def describe_settings(run: Run) -> str:
    """One line: how samples were taken, when sampling stopped, and the commit, as far as the run stores them."""
    settings, code = run.environment.get("settings"), run.environment.get("code")
    settings = settings if isinstance(settings, Mapping) else {}
    precision, limit, most = (_number(settings, name) for name in ("precision", "time_limit_s", "max_samples"))
    commit = code.get("commit") if isinstance(code, Mapping) else None
    timings = dict.fromkeys(record.timing for record in run.records if record.timing)
    sampling = [
        None if precision is None else f"sampled until the median was known to {significant(100 * precision)} %",
        None if limit is None else f"or for {limit:g} s",
        None if most is None else f"or {most:g} times",
    ]
    held_mib = _number(settings, "memory_limit_mib")
    words = [
        "timing: " + "; ".join(timings) if timings else None,
        *(sampling if any(record.samples_ms for record in run.records) else []),
        None if held_mib is None else f"torch held to {held_mib / 1024:g} GiB",
        "launch plans autotuned" if settings.get("autotune") is True else None,
        f"commit {commit[:_COMMIT]}" if isinstance(commit, str) and commit else None,
    ]
    return ", ".join(filter(None, words))


def describe_progress(run: Run) -> str:
    """`4 of 20 cells` for an interrupted run; empty for a complete one."""
    return "" if run.complete else f"{len(run.records)} of {run.cells} cells"


def title_of(runs: Sequence[Run]) -> str:
    """The sweep's title; for several sweeps their titles, or the runs' names if there are many.

    A title that goes on where another one ends (`X: the best rates with other seeds`) is left out.
    """
    found = dict.fromkeys(printable(run.sweep.title) for run in runs)
    titles = [title for title in found if not any(title.startswith(f"{other}: ") for other in found)]
    return "; ".join(titles) if len(titles) <= _MOST_TITLES else ", ".join(name_runs(runs))


def surroundings_of(runs: Sequence[Run]) -> list[str]:
    """Hardware, versions and progress of the runs, in one line per group of runs with the same."""
    found = _one_line_each(
        runs, lambda run: ", ".join(filter(None, [describe_environment(run.environment), describe_progress(run)]))
    )
    return list(found) if len(runs) == 1 else [f"{', '.join(names)}: {line}" for line, names in found.items()]


def settings_of(runs: Sequence[Run]) -> list[str]:
    """How the runs were measured, in one line per group of runs with the same settings."""
    found = _one_line_each(runs, describe_settings)
    return list(found) if len(found) == 1 else [f"{', '.join(names)}: {line}" for line, names in found.items()]


def _one_line_each(runs: Sequence[Run], describe: Callable[[Run], str]) -> dict[str, list[str]]:
    """Each description with the names of its runs."""
    found: dict[str, list[str]] = {}
    for run, name in zip(runs, name_runs(runs), strict=True):
        if line := describe(run):
            found.setdefault(line, []).append(name)
    return found


def _number(settings: Mapping[str, Any], name: str) -> float | None:
    value = settings.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
