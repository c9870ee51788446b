"""The options that measuring commands share, declared once; and the axes, one option each."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from glabench.backends import load_registry
from glabench.errors import UsageError, did_you_mean
from glabench.measure.settings import TIMINGS
from glabench.records.metrics import BY_NAME
from glabench.scheduling.runs import Request
from glabench.sweeps import preset_names
from glabench.sweeps.axis import parse_axis
from glabench.sweeps.expand import parameters_of
from glabench.sweeps.parameters import Parameter, parse_names

_AXES_PANEL = "Axes (1k..16k doubles, 1k..4k:+1k adds, 1k,3k lists; k = 1024)"
# The preset that revisions and baselines are measured with.
GUARD = "guard"


def find_axes(arguments: list[str]) -> Mapping[str, Parameter]:
    """Every axis by name: those of the backends that come along, and those of the plugins that the arguments name.

    Raises UsageError for a plugin that cannot be loaded: its axes would be taken for mistyped options.
    """
    plugins = [value for name, value in pairwise(arguments) if name == "--plugin"]
    plugins += [name.removeprefix("--plugin=") for name in arguments if name.startswith("--plugin=")]
    registry = load_registry(plugins)
    backend = Parameter("backend", "Backends, by name.", parse_names, "names", choices=tuple(registry))
    return {**parameters_of(registry.traits().values()), "backend": backend}


def complete_list(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Completes the last item of a comma-separated list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{choice}" for choice in choices if choice.startswith(last)]

    return complete


def _axis_option(axis: Parameter) -> Any:
    def check(text: str | None) -> str | None:
        if text is not None:
            parse_axis(axis.option, text, axis.parse, axis.allowed)
        return text

    values = f" {', '.join(axis.choices)}." if axis.choices and axis.name != "backend" else ""
    return typer.Option(
        axis.option,
        callback=check,
        help=axis.help + values,
        rich_help_panel=_AXES_PANEL,
        metavar="VALUES",
        autocompletion=complete_list(axis.choices) if axis.choices else None,
    )


def between(option: str, low: float, high: float, help_text: str) -> Any:
    """An option for a number that must lie in a range."""

    def check(value: float | None) -> float | None:
        if value is not None and not low <= value <= high:
            raise UsageError(f"{option}: {value:g} is out of range (allowed: {low:g} to {high:g})")
        return value

    return typer.Option(option, callback=check, help=help_text)


def choice(option: str, allowed: tuple[str, ...], help_text: str) -> Any:
    """An option for one of a few words, completed and checked."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise UsageError(f"{option}: '{value}' is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
        return value

    return typer.Option(option, callback=check, help=help_text, autocompletion=complete_list(allowed))


def share(option: str, help_text: str, low: float = 0.0, high: float = float("inf")) -> Any:
    """An option for a share, given as 5% or 0.05."""

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


DeviceOption = Annotated[
    str,
    typer.Option(help="auto, cpu, cuda, or cuda:N.", autocompletion=complete_list(("auto", "cpu", "cuda", "cuda:0"))),
]
PluginOption = Annotated[list[Path] | None, typer.Option(help="A Python file with more backends or ops.")]
RevisedSweepOption = Annotated[
    str | None,
    typer.Option(
        help=f"What --rev measures, a preset or a .toml file; by default {GUARD}.", autocompletion=preset_names
    ),
]
JsonOption = Annotated[str | None, typer.Option("--json", help="Write as JSON, - for stdout.")]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help=f"What tables and figures show: {', '.join(BY_NAME)}.",
        metavar="NAMES",
        autocompletion=complete_list(tuple(BY_NAME)),
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No messages and no table, errors only.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Say more, with the tracebacks of failed cells.")]


@dataclass(frozen=True)
class MeasuringOptions:
    """What to measure, and how. Options that were not given are None: a sweep, a stored run or a default decides."""

    # Axes that were given, as text, by their names in sweep files; each has an option of its own.
    axes: Mapping[str, str] = field(default_factory=dict, metadata={"internal": True})
    device: DeviceOption = "auto"
    precision: Annotated[
        float | None,
        share("--precision", "Stop once the median is known this well (95 % interval); by default 1%.", 1e-4, 0.5),
    ] = None
    time_limit: Annotated[
        float | None, between("--time-limit", 0.01, 3600, "Seconds of sampling per cell; by default 3, on a CPU 1.")
    ] = None
    cell_timeout: Annotated[
        float | None,
        between("--cell-timeout", 0.1, 1e5, "Seconds a whole cell may take, compiling included; by default 300."),
    ] = None
    timing: Annotated[
        str | None,
        choice("--timing", TIMINGS, "cold: caches flushed (default); hot: they are not; graph: cold, as a CUDA graph."),
    ] = None
    energy: Annotated[
        bool | None,
        typer.Option("--energy/--no-energy", help="Measure joules per call if the GPU can.", show_default=False),
    ] = None
    autotune: Annotated[
        bool | None,
        typer.Option("--autotune", help="Our kernels choose their launch by timing, once per shape; kept on disk."),
    ] = None
    plugin: PluginOption = None
    quiet: QuietOption = False
    verbose: VerboseOption = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were given, by their names in `Settings`."""
        given = {
            "precision": self.precision,
            "time_limit_s": self.time_limit,
            "cell_timeout_s": self.cell_timeout,
            "timing": self.timing,
            "energy": self.energy,
            "autotune": self.autotune,
        }
        return {name: value for name, value in given.items() if value is not None}

    def request(self, sweep: str, sweep_on_cpu: str | None = None) -> Request:
        """What is asked for with a sweep, or on a CPU with another one."""
        plugins, arguments = self.plugin or (), sys.argv[1:]
        return Request(
            sweep, sweep_on_cpu, self.axes, self.settings, self.device, plugins, arguments, show_errors=self.verbose
        )

    @property
    def given(self) -> list[str]:
        """The options of measuring that were given."""
        names = [*self.axes, *(name.removesuffix("_s") for name in self.settings)]
        names += [name for name, given in (("device", self.device != "auto"), ("plugin", bool(self.plugin))) if given]
        return ["--" + name.replace("_", "-") for name in names]


@dataclass(frozen=True)
class SweepOptions(MeasuringOptions):
    """The options of a command that measures one run: besides what to measure and how, where its records go."""

    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/<sweep>-<time>.")] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run as it was begun: the folder named, or the latest.")
    ] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Go on with a run, and measure again what is not ok.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells with the memory and time they may take; measure none.")
    ] = False
    metric: MetricOption = None
    json_to: Annotated[str | None, typer.Option("--json", help="Write the records as JSON, - for stdout.")] = None
    csv_to: Annotated[str | None, typer.Option("--csv", help="Write the records as CSV, - for stdout.")] = None


def with_options(command: Callable[..., None], axes: Mapping[str, Parameter]) -> Callable[..., None]:
    """The command with the options of the class that its parameter `options` names, and one option per axis."""
    own_hints = get_type_hints(command, include_extras=True)
    kind = own_hints["options"]
    hints = get_type_hints(kind, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    # Python keeps the name `pass` for itself.
    dests = {f"axis_{name}": name for name in axes}
    shown = [
        inspect.Parameter(dest, keyword, default=None, annotation=Annotated[str | None, _axis_option(axes[name])])
        for dest, name in dests.items()
    ]
    named = [f for f in fields(kind) if not f.metadata.get("internal")]
    shown += [inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in named]
    own = [
        p.replace(kind=keyword, annotation=own_hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.name != "options"
    ]

    @wraps(command)
    def wrapper(**given: Any) -> None:
        chosen = {name: text for dest, name in dests.items() if (text := given.pop(dest)) is not None}
        options = kind(axes=chosen, **{f.name: given.pop(f.name) for f in named})
        command(**given, options=options)

    wrapper.__signature__ = inspect.Signature([*own, *shown])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *shown]}
    return wrapper
