"""The app and its commands."""

from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from typing import Annotated

import typer

from glabench import __version__
from glabench.cli import (
    backends,
    baseline,
    check,
    chunk_sweep,
    compare,
    env,
    plugin,
    report,
    run,
    speed,
    sweeps,
    validate,
)
from glabench.cli.options import with_options
from glabench.sweeps.parameters import Parameter

_EPILOG = (
    "Exit codes: 0 fine, 1 regression (check, compare --fail-on), 2 wrong usage, 3 nothing to run, 4 some cell failed "
    "(its record says why), 5 less accurate, 6 unclear (check --strict), 130 interrupted."
)
_MEASURING: Mapping[str, Callable[..., None]] = {
    "speed": speed.speed,
    "chunk-sweep": chunk_sweep.chunk_sweep,
    "run": run.run,
    "compare": compare.compare,
    "check": check.check,
    "validate": validate.validate,
}
_OTHERS: Mapping[str, Callable[..., None]] = {
    "report": report.report,
    "backends": backends.backends,
    "sweeps": sweeps.sweeps,
    "env": env.env,
}


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
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(command.__doc__ or "").split("\n\n"))


def takes_axes(arguments: Sequence[str]) -> bool:
    """Whether the command may have axis options. Finding them loads plugins, which commands such as `env` must not."""
    command = next((each for each in arguments if not each.startswith("-")), None)
    return command not in (*_OTHERS, "plugin")


def make_app(axes: Mapping[str, Parameter]) -> typer.Typer:
    """The command line, with one option per axis."""
    app = typer.Typer(
        name="glabench",
        help="Measures how fast, how memory-hungry and how accurate sequence-mixing layers are.",
        epilog=_EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_glabench)
    for name, command in _MEASURING.items():
        app.command(name, help=_help(command), epilog=_EPILOG)(with_options(command, axes))
    for name, command in _OTHERS.items():
        app.command(name, help=_help(command))(command)
    for name, help_text, command_name, command in (
        ("baseline", "Stored baselines, which glabench check compares with.", "save",
         with_options(baseline.save, axes)),
        ("plugin", "Plugins: backends and ops of your own.", "new", plugin.new),
    ):  # fmt: skip
        group = typer.Typer(help=help_text, no_args_is_help=True)
        group.callback()(lambda: None)
        group.command(command_name, help=_help(command))(command)
        app.add_typer(group, name=name)
    return app
