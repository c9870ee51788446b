"""The app, its commands, and the one place where errors become exit codes."""

import sys
from typing import Annotated, NoReturn

import typer

from glabench import __version__
from glabench.cli import backends, chunk_sweep, env, report, run, speed, sweeps
from glabench.errors import ExitCode, GlabenchError

_EPILOG = (
    "Exit codes: 0 fine, 2 wrong usage, 3 nothing to run, 4 some cell failed (its record says why), 130 interrupted."
)

app = typer.Typer(
    name="glabench",
    help="Measures how fast, how memory-hungry and how accurate sequence-mixing layers are.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"glabench {__version__}")
        raise typer.Exit


@app.callback()
def _glabench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("speed", epilog=_EPILOG)(speed.speed)
app.command("chunk-sweep", epilog=_EPILOG)(chunk_sweep.chunk_sweep)
app.command("run", epilog=_EPILOG)(run.run)
app.command("report")(report.report)
app.command("backends")(backends.backends)
app.command("sweeps")(sweeps.sweeps)
app.command("env")(env.env)


def _fail(message: str, code: int) -> NoReturn:
    print(f"glabench: error: {message}", file=sys.stderr)
    sys.exit(code)


def main() -> NoReturn:
    """The program. A user's mistake is one line on stderr; a traceback is a bug."""
    try:
        code = app(standalone_mode=False)
    except GlabenchError as problem:
        _fail(str(problem), problem.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        sys.exit(ExitCode.OK)
    except Exception as problem:
        # click's usage errors, which Typer ships under a name of its own in newer versions
        format_message = getattr(problem, "format_message", None)
        if format_message is None:
            raise
        _fail(" ".join(format_message().split()), getattr(problem, "exit_code", ExitCode.USAGE))
    sys.exit(code if isinstance(code, int) else ExitCode.OK)
