"""The app and its commands."""

from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from glabench import __version__
from glabench.cli import (
    backends,
    baseline,
    check,
    chunk_sweep,
    compare,
    decode,
    env,
    history,
    inspect,
    plugin,
    profile,
    recall,
    report,
    results,
    run,
    speed,
    sweeps,
    train,
    validate,
)
from glabench.cli.options import help_has_tables, in_help, with_options
from glabench.errors import UsageError
from glabench.sweeps import preset_names
from glabench.sweeps.parameters import Parameter

_EXIT_CODES = (
    "Exit codes: 0 fine, 1 regression (check, compare --fail-on), 2 wrong usage, 3 nothing to run, 4 some cell failed "
    "(its record says why), 5 less accurate, 6 unclear (check --strict), 70 a bug in glabench, 130 interrupted, 141 "
    "the reader of the output left."
)
_MEASURING_EPILOG = (
    "VALUES of axes: 1k..16k doubles, 1k..4k:+1k adds, 1k..1m:*4 multiplies, 1k,3k lists; k = 1024.\n\n" + _EXIT_CODES
)
_MEASURING: Mapping[str, Callable[..., None]] = {
    "speed": speed.speed,
    "chunk-sweep": chunk_sweep.chunk_sweep,
    "run": run.run,
    "train": train.train,
    "recall": recall.recall,
    "decode": decode.decode,
    "profile": profile.profile,
    "compare": compare.compare,
    "check": check.check,
    "validate": validate.validate,
}
_OTHERS: Mapping[str, Callable[..., None]] = {
    "report": report.report,
    "history": history.history,
    "results": results.results,
    "inspect": inspect.inspect,
    "backends": backends.backends,
    "sweeps": sweeps.sweeps,
    "env": env.env,
}


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return parameters


class _Group(TyperGroup):
    """A group whose help shows no type beside flags, and which knows that presets are no commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options."""
        return _without_types_of_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that `args` begin with. Raises UsageError for a preset's name."""
        name = args[0] if args else ""
        if name not in self.commands and name in preset_names():
            raise UsageError(f"'{name}' is a preset, not a command; measure it with: glabench run {name}")
        return super().resolve_command(ctx, args)


class _Command(TyperCommand):
    """A command whose help shows no type beside flags, and arguments as their metavars say."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options and arguments."""
        return _without_types_of_flags(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line, `RUN...` instead of `{RUN...}...`."""
        return [piece.removesuffix("...").strip("{}") for piece in super().collect_usage_pieces(ctx)]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"glabench {__version__}")
        raise typer.Exit


def _glabench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _help(command: Callable[..., None]) -> str:
    """The docstring with one line per paragraph, because Typer keeps line breaks after the first paragraph."""
    paragraphs = in_help(cleandoc(command.__doc__ or "")).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def takes_axes(arguments: Sequence[str]) -> bool:
    """Whether the command may have axis options. Finding them loads plugins, which commands such as `env` must not."""
    command = next((each for each in arguments if not each.startswith("-")), None)
    return command not in (*_OTHERS, "plugin")


def make_app(axes: Mapping[str, Parameter]) -> typer.Typer:
    """The command line, with one option per axis."""
    app = typer.Typer(
        cls=_Group,
        name="glabench",
        help="Measures how fast, how memory-hungry and how accurate sequence-mixing layers are.",
        epilog=_EXIT_CODES,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if help_has_tables() else None,
    )
    app.callback()(_glabench)
    for name, command in _MEASURING.items():
        app.command(name, cls=_Command, help=_help(command), epilog=_MEASURING_EPILOG)(with_options(command, axes))
    for name, command in _OTHERS.items():
        app.command(name, cls=_Command, help=_help(command))(command)
    baselines = _add_group(app, "baseline", "Stored baselines, which glabench check compares with.")
    baselines.command("save", cls=_Command, help=_help(baseline.save), epilog=_MEASURING_EPILOG)(
        with_options(baseline.save, axes)
    )
    baselines.command("occasion", cls=_Command, help=_help(baseline.occasion))(baseline.occasion)
    plugins = _add_group(app, "plugin", "Plugins: backends and ops of your own.")
    plugins.command("new", cls=_Command, help=_help(plugin.new))(plugin.new)
    return app


def _add_group(app: typer.Typer, name: str, help_text: str) -> typer.Typer:
    group = typer.Typer(cls=_Group, help=help_text, no_args_is_help=True)
    group.callback()(lambda: None)
    app.add_typer(group, name=name)
    return group
