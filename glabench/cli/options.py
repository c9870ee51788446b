"""The options that all measuring commands share, declared once."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from glabench.errors import UsageError
from glabench.measure.settings import Settings
from glabench.measure.timer import TIMINGS
from glabench.sweeps import AXES
from glabench.sweeps.axis import parse_axis

_AXES_PANEL = "Axes (1k..16k doubles, 1k..4k:+1k adds, 1k,3k lists; k = 1024)"
_DEFAULT = Settings()


def _axis(name: str, help_text: str) -> Any:
    kind = AXES[name]

    def check(text: str | None) -> str | None:
        if text is not None:
            parse_axis(kind.option, text, kind.parse, kind.allowed)
        return text

    return typer.Option(kind.option, callback=check, help=help_text, rich_help_panel=_AXES_PANEL, metavar="VALUES")


def between(option: str, low: float, high: float, help_text: str) -> Any:
    """An option for a number that must lie in a range."""

    def check(value: float | None) -> float | None:
        if value is not None and not low <= value <= high:
            raise UsageError(f"{option}: {value:g} is out of range (allowed: {low:g} to {high:g})")
        return value

    return typer.Option(option, callback=check, help=help_text)


def parse_share(text: str) -> float:
    """A share as a number: 5% and 0.05 are the same. Raises ValueError for what is no number, or below 0."""
    number = text.strip()
    value = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    if not 0 <= value < float("inf"):
        raise ValueError("out of range")
    return value


def share(option: str, help_text: str) -> Any:
    """An option for a share, given as 5% or 0.05."""

    def parse(text: str | float) -> float:
        try:
            return parse_share(str(text))
        except ValueError:
            raise UsageError(f"{option}: '{text}' is not a share (allowed: 5%, 0.05, from 0 up)") from None

    return typer.Option(option, parser=parse, help=help_text, metavar="SHARE")


@dataclass(frozen=True)
class MeasuringOptions:
    """What to measure, and how; an axis that was not given is None and stays as the sweep has it."""

    seqlen: Annotated[str | None, _axis("seqlen", "Sequence length T.")] = None
    batch: Annotated[str | None, _axis("batch", "Batch size B.")] = None
    heads: Annotated[str | None, _axis("heads", "Heads H.")] = None
    head_dim: Annotated[str | None, _axis("head_dim", "Head dim: K and V together.")] = None
    key_dim: Annotated[str | None, _axis("key_dim", "Key head dim K.")] = None
    value_dim: Annotated[str | None, _axis("value_dim", "Value head dim V.")] = None
    chunk: Annotated[str | None, _axis("chunk", "Chunk length C, or auto.")] = None
    materialize: Annotated[str | None, _axis("materialize", "Chunk states kept in memory: on, off.")] = None
    dtype: Annotated[str | None, _axis("dtype", "bf16, fp16, fp32, fp64.")] = None
    pass_: Annotated[str | None, _axis("pass", "infer, fwd, bwd, fwd+bwd.")] = None
    gate: Annotated[str | None, _axis("gate", "Distribution of the gates.")] = None
    backend: Annotated[str | None, _axis("backend", "Backends, by name.")] = None
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto"
    precision: Annotated[float, between("--precision", 1e-4, 0.5, "Stop when the median is known this well.")] = (
        _DEFAULT.precision
    )
    time_limit: Annotated[
        float | None, between("--time-limit", 0.01, 3600, "Seconds of sampling a cell; by default 3, on a CPU 1.")
    ] = None
    cell_timeout: Annotated[
        float, between("--cell-timeout", 0.1, 1e5, "Seconds a whole cell may take, with starting and compiling.")
    ] = _DEFAULT.cell_timeout_s
    timing: Annotated[
        str, typer.Option(help="cold: caches flushed; hot: they are not; graph: cold, as a CUDA graph.")
    ] = _DEFAULT.timing
    energy: Annotated[bool, typer.Option("--energy/--no-energy", help="Measure joules a call where the GPU can.")] = (
        _DEFAULT.energy
    )
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Our kernels choose their launch by timing, once a shape; kept on disk.")
    ] = False
    plugin: Annotated[list[str] | None, typer.Option(help="A Python file with more backends.")] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No messages and no table, errors only.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more, with the tracebacks of failed cells.")] = (
        False
    )

    def axes(self) -> dict[str, str]:
        """The axes that were given, by their names in sweep files."""
        given = {name: getattr(self, "pass_" if name == "pass" else name) for name in AXES}
        return {name: text for name, text in given.items() if text is not None}

    def settings(self, device: str) -> Settings:
        """How cells are measured on a device: a CPU's samples rarely settle, so it gets less time."""
        if self.timing not in TIMINGS:
            raise UsageError(f"--timing: '{self.timing}' is not a timing (allowed: {', '.join(TIMINGS)})")
        if self.timing == "graph" and device != "cuda":
            raise UsageError("--timing: 'graph' needs a GPU (allowed here: cold, hot)")
        return Settings(
            precision=self.precision,
            time_limit_s=self.time_limit or (_DEFAULT.time_limit_s if device == "cuda" else 1.0),
            cell_timeout_s=self.cell_timeout,
            autotune=self.autotune,
            timing=self.timing,
            energy=self.energy,
        )


@dataclass(frozen=True)
class SweepOptions(MeasuringOptions):
    """The options of a command that measures one run: besides what to measure and how, where its records go."""

    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/<sweep>-<time>.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, or with the latest.")] = False
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Go on with a run, and measure again what is not ok.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and their memory estimate; measure none.")
    ] = False
    json_to: Annotated[str | None, typer.Option("--json", help="Write the records as JSON, - for stdout.")] = None
    csv_to: Annotated[str | None, typer.Option("--csv", help="Write the records as CSV, - for stdout.")] = None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the shared options on the command line: those of the class that its `options` parameter names."""
    own_hints = get_type_hints(command, include_extras=True)
    kind = own_hints["options"]
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]
    names = {f.name for f in fields(kind)}

    @wraps(command)
    def wrapper(**given: Any) -> None:
        own = {name: value for name, value in given.items() if name not in names}
        command(**own, options=kind(**{name: given[name] for name in names}))

    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.name != "options"
    ]
    wrapper.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}
    return wrapper
