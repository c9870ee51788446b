"""Options that several commands share, and one option per axis."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, get_type_hints

import typer
from rich.markup import escape

from glabench.backends import Registry, load_registry
from glabench.errors import UsageError, did_you_mean
from glabench.measure.settings import CHECKS, SETTINGS, TIMINGS
from glabench.records import RunFolder
from glabench.records.metrics import BY_NAME, LIMITED
from glabench.scheduling.runs import Request
from glabench.sweeps import preset_names
from glabench.sweeps.axis import parse_axis
from glabench.sweeps.expand import parameters_of
from glabench.sweeps.parameters import Parameter, parse_names, read_mib

# The default preset for revisions and baselines.
GUARD = "guard"
# Columns that rich's tables of options need; with fewer they cut names.
_LEAST_COLUMNS = 80


def help_has_tables() -> bool:
    """Whether help texts are rich's tables, in which square brackets are markup, and not plain."""
    return get_terminal_size().columns >= _LEAST_COLUMNS


def in_help(text: str) -> str:
    """A text as a help shows it as it is."""
    return escape(text) if help_has_tables() else text


def find_axes(arguments: list[str]) -> Mapping[str, Parameter]:
    """Every axis by name: those of all backends and ops, including the plugins that the arguments name.

    Raises UsageError for a plugin that cannot be loaded; otherwise its axes would look like mistyped options.
    """
    plugins = [value for name, value in pairwise(arguments) if name == "--plugin"]
    plugins += [name.removeprefix("--plugin=") for name in arguments if name.startswith("--plugin=")]
    registry = load_registry(plugins)
    help_text = "Backends, as a list of names; `glabench backends` lists them."
    backend = Parameter("backend", help_text, parse_names, "names", choices=tuple(registry))
    axes = parameters_of(registry.traits().values()).values()
    return {axis.name: replace(axis, help=axis.help + _owners(axis.name, registry)) for axis in (*axes, backend)}


def _owners(axis: str, registry: Registry) -> str:
    """` (gla, linear)`: the ops that have an axis, or the backends that have it of their own; empty if all have it."""
    ops = [op.name for op in registry.ops.values() if axis in (*(own.name for own in op.parameters), *op.aliases)]
    backends = [each.name for each in registry.values() if axis in (own.name for own in each.parameters)]
    return f" ({', '.join([*ops, *backends])})" if backends or 0 < len(ops) < len(registry.ops) else ""


def complete_list(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Completes the last item of a comma-separated list, but not by items that are in it."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        left = [choice for choice in choices if choice not in before.split(",")]
        return [f"{before}{comma}{choice}" for choice in left if choice.startswith(last)]

    return complete


def complete_sweep_or_run(incomplete: str) -> list[str]:
    """Presets, .toml files and run folders."""
    return [*preset_names(), *_paths(incomplete, ".toml")]


def complete_runs(incomplete: str) -> list[str]:
    """Run folders."""
    return _paths(incomplete)


def _paths(incomplete: str, suffix: str | None = None) -> list[str]:
    """Run folders, files with a suffix, and folders on the way, which are entered if there is only one."""
    start = incomplete.rpartition("/")[2]
    before = incomplete.removesuffix(start)
    found = []
    for name in _names_in(Path(before)):
        if name.startswith(start) and (start or not name.startswith(".")):
            path = Path(before, name)
            with suppress(OSError):  # of a folder that may not be read
                if RunFolder.is_run(path) or (path.suffix == suffix and path.is_file()):
                    found.append(before + name)
                elif path.is_dir():
                    found.append(f"{before}{name}/")
    return _paths(found[0], suffix) or found if len(found) == 1 and found[0].endswith("/") else found


def _names_in(folder: Path) -> list[str]:
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir())
    return []


def _axis_option(axis: Parameter) -> Any:
    def check(text: str | None) -> str | None:
        if text is not None:
            parse_axis(axis.option, text, axis.parse, axis.allowed)
        return text

    values = f" Values: {', '.join(axis.choices)}." if axis.choices and axis.name != "backend" else ""
    return typer.Option(
        axis.option,
        callback=check,
        help=in_help(axis.help + values),
        rich_help_panel="Axes",
        metavar="VALUES",
        autocompletion=complete_list(axis.choices) if axis.choices else None,
    )


def between(option: str, low: float, high: float, help_text: str) -> Any:
    """An option for a number from `low` to `high`."""

    def check(value: float | None) -> float | None:
        if value is not None and not low <= value <= high:
            raise UsageError(f"{option}: {value:g} is out of range (allowed: {low:g} to {high:g})")
        return value

    return typer.Option(option, callback=check, help=help_text)


def choice(option: str, allowed: tuple[str, ...], help_text: str) -> Any:
    """An option for one of the words in `allowed`, with completion."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise UsageError(f"{option}: '{value}' is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
        return value

    return typer.Option(option, callback=check, help=help_text, autocompletion=complete_list(allowed))


def share(option: str, help_text: str, low: float = 0.0, high: float = float("inf")) -> Any:
    """An option for a share from `low` to `high`, given as 5% or 0.05."""

    def parse(text: str | float) -> float:
        try:
            number = str(text).strip()
            value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or value == float("inf"):
            bounds = f"from {low:g} up" if high == float("inf") else f"{low:g} to {high:g}"
            raise UsageError(f"{option}: '{text}' is not a share (allowed: 5%, 0.05; {bounds})")
        return value

    return typer.Option(option, parser=parse, help=help_text, metavar="SHARE")


def size(option: str, help_text: str) -> Any:
    """An option for an amount of memory, given as 40GiB or 500MiB; its value is in MiB."""

    def parse(text: str | int) -> int:
        try:
            return read_mib(str(text))
        except ValueError as problem:
            raise UsageError(f"{option}: {problem}") from None

    return typer.Option(option, parser=parse, help=help_text, metavar="SIZE")


DeviceOption = Annotated[
    str,
    typer.Option(help="auto, cpu, cuda, or cuda:N.", autocompletion=complete_list(("auto", "cpu", "cuda", "cuda:0"))),
]
PluginOption = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="A Python file with more backends or ops. May be given several times."),
]
SiteOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="A folder of packages that the processes of backend NAME alone see, for packages that clash. May be given "
        "several times.",
    ),
]
RevisedSweepOption = Annotated[
    str | None,
    typer.Option(
        help=f"The sweep that --rev measures: a preset or a .toml file; by default {GUARD}.",
        autocompletion=preset_names,
    ),
]
OccasionsOption = Annotated[
    Path | None,
    typer.Option(
        "--occasions",
        help="If the sides are not measured in turns: a file of `glabench baseline occasion`, whose spread counts; by "
        "default the device's that ships with glabench.",
    ),
]
RecordsJsonOption = Annotated[
    str | None, typer.Option("--json", help="Write the records as JSON to this file, or - for stdout.")
]
RecordsCsvOption = Annotated[
    str | None, typer.Option("--csv", help="Write the records as CSV to this file, or - for stdout.")
]
JsonOption = Annotated[str | None, typer.Option("--json", help="Write JSON to this file, or - for stdout.")]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help=f"Metrics for tables and figures, as a list: {', '.join(BY_NAME)}. docs/records.md explains them.",
        metavar="NAMES",
        autocompletion=complete_list(tuple(BY_NAME)),
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages and no tables, only errors.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print a line for every cell, and tracebacks of failed cells.")
]


@dataclass(frozen=True)
class MeasuringOptions:
    """What to measure and how. An option that was not given is None: the sweep, a stored run or a default decides."""

    # The axes that were given, as text, by their names in sweep files.
    axes: Mapping[str, str] = field(default_factory=dict)
    device: DeviceOption = "auto"
    precision: Annotated[
        float | None,
        share(
            "--precision",
            "Stop once the median's 95 % interval is within this share of it on either side; by default 1%.",
            1e-4,
            0.5,
        ),
    ] = None
    time_limit: Annotated[
        float | None,
        between("--time-limit", 0.01, 3600, "Most seconds of sampling per cell; by default the sweep's, or 3 (CPU 1)."),
    ] = None
    cell_timeout: Annotated[
        float | None,
        between("--cell-timeout", 0.1, 1e5, "Seconds that a whole cell may take, compiling included; by default 300."),
    ] = None
    timing: Annotated[
        str | None,
        choice(
            "--timing",
            TIMINGS,
            "cold: flush the cache before every sample (default); hot: do not; graph: cold, from a CUDA graph; "
            "eager: back to back by the host's clock, as an uncompiled loop.",
        ),
    ] = None
    check: Annotated[
        str | None,
        choice(
            "--check",
            CHECKS,
            "full: results are compared with the reference at every cell's own size too (default); small: at a small "
            "size alone, which is quicker.",
        ),
    ] = None
    energy: Annotated[
        bool | None,
        typer.Option(
            "--energy/--no-energy",
            help="Measure joules per call, if the GPU supports it; on by default, unless the sweep says otherwise.",
            show_default=False,
        ),
    ] = None
    memory_limit_mib: Annotated[
        int | None,
        size(
            "--memory-limit",
            "Memory that torch may hold on the GPU for a call, as on a GPU with less: a cell that needs more is `oom`. "
            "By default the sweep's own, if it has one.",
        ),
    ] = None
    autotune: Annotated[
        bool | None,
        typer.Option(
            "--autotune",
            help="Let our kernels choose their launch by timing, once per shape; the choice is kept on disk.",
        ),
    ] = None
    plugin: PluginOption = None
    site: SiteOption = None
    quiet: QuietOption = False
    verbose: VerboseOption = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were given, by their names in `Settings`."""
        given = {name: getattr(self, name.removesuffix("_s"), None) for name in SETTINGS}
        return {name: value for name, value in given.items() if value is not None}

    def request(self, sweep: str, sweep_on_cpu: str | None = None) -> Request:
        """What is asked for with a sweep, or on a CPU with another one."""
        plugins, arguments = self.plugin or (), sys.argv[1:]
        return Request(
            sweep, sweep_on_cpu, self.axes, self.settings, self.device, plugins, self.site or (), arguments,
            show_errors=self.verbose,
        )  # fmt: skip

    @property
    def given(self) -> list[str]:
        """The measuring options that were given, such as `--batch`."""
        names = [*self.axes, *(re.sub("_(s|mib)$", "", name) for name in self.settings)]
        others = {"device": self.device != "auto", "plugin": bool(self.plugin), "site": bool(self.site)}
        names += [name for name, given in others.items() if given]
        return ["--" + name.replace("_", "-") for name in names]


@dataclass(frozen=True)
class SweepOptions(MeasuringOptions):
    """The options of a command that measures one run: what to measure and how, and where the records go."""

    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/<sweep>-<time>.")] = None
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue a run with its own settings: the named folder, or the latest run."),
    ] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="As --resume, but also repeat cells that are not ok.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells with estimated memory and time, without measuring.")
    ] = False
    metric: MetricOption = None
    json_to: RecordsJsonOption = None
    csv_to: RecordsCsvOption = None


@dataclass(frozen=True)
class LimitOptions:
    """The limits of a check, by the metric's name."""

    by_metric: Mapping[str, float] = field(default_factory=dict)


def with_options(command: Callable[..., None], axes: Mapping[str, Parameter]) -> Callable[..., None]:
    """The command with one option per field of the dataclasses that annotate its parameters.

    A field `axes` has one option per axis, a field `by_metric` one per metric with a limit that has an option.
    """
    hints = get_type_hints(command, include_extras=True)
    kinds: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    # With a prefix, because `pass` cannot be a parameter in Python.
    many = {
        "axes": {
            name: _option(f"axis_{name}", Annotated[str | None, _axis_option(axis)]) for name, axis in axes.items()
        },
        "by_metric": {
            m.name: _option(f"limit_{m.name}", Annotated[float | None, share(m.option, m.help)], m.limit)
            for m in LIMITED
        },
    }
    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.name not in kinds
    ]
    shown = [*own, *(option for kind in kinds.values() for option in _options_of(kind, many))]

    @wraps(command)
    def wrapper(**given: Any) -> None:
        for name, kind in kinds.items():
            values = {each.name: given.pop(each.name) for each in fields(kind) if each.name not in many}
            for each in many.keys() & {each.name for each in fields(kind)}:
                found = {key: given.pop(option.name) for key, option in many[each].items()}
                values[each] = {key: value for key, value in found.items() if value is not None}
            given[name] = kind(**values)
        command(**given)

    wrapper.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in shown}
    return wrapper


def _options_of(kind: Any, many: Mapping[str, Mapping[str, inspect.Parameter]]) -> Iterator[inspect.Parameter]:
    """The options of a dataclass; those in `many` for the fields that have several."""
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        if each.name in many:
            yield from many[each.name].values()
        else:
            yield _option(each.name, hints[each.name], each.default)


def _option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
