"""The command line. Each command's module parses options, calls one function and prints. Never imports torch."""

import os
import signal
import sys
import traceback
import warnings
from typing import Any, NoReturn

from glabench.errors import ExitCode, GlabenchError, RenamedWarning, printable


def _fail(message: str, code: int) -> NoReturn:
    if message:
        print(f"glabench: error: {printable(message)}", file=sys.stderr)
    sys.exit(code)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _end_like_an_interruption() -> None:
    """Makes SIGTERM (batch systems) and SIGHUP (closed terminals) act as Ctrl-C: workers end, records are kept."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP on purpose
            signal.signal(number, _interrupt)


def _show_notices() -> None:
    """Prints a notice on stderr, once, if a name of the previous version is used."""
    show = warnings.showwarning

    def show_notice(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, RenamedWarning):
            print(f"glabench: note: {printable(str(message))}", file=sys.stderr)
        else:
            show(message, category, *where, **options)

    warnings.showwarning = show_notice


def _flush_stdout() -> None:
    """Flushes stdout now, while an error can still be reported; at interpreter exit it cannot."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def main() -> NoReturn:
    """Runs the command line and turns every error into an exit code.

    A user's mistake gives one line on stderr; a traceback means a bug in glabench.
    """
    try:
        # Imported here, so that an interruption during imports is handled like any other.
        from glabench.cli.app import make_app, takes_axes
        from glabench.cli.options import find_axes

        _end_like_an_interruption()
        _show_notices()
        code = make_app(find_axes(sys.argv[1:]) if takes_axes(sys.argv[1:]) else {})(standalone_mode=False)
        _flush_stdout()
    except GlabenchError as problem:
        _fail(str(problem), problem.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", ExitCode.INTERRUPTED)
    except OSError as problem:
        named = f"'{problem.filename}': " if problem.filename else "cannot write: "
        _fail(f"{named}{problem.strerror or problem}", ExitCode.USAGE)
    except SystemExit as end:
        # Typer turns an interruption into a silent exit.
        _fail("interrupted" if end.code == ExitCode.INTERRUPTED else "", end.code if isinstance(end.code, int) else 1)
    except Exception as problem:
        # Click's usage errors, recognized by their method: newer versions of Typer rename the class.
        format_message = getattr(problem, "format_message", None)
        if format_message is None:
            traceback.print_exc()
            sys.exit(ExitCode.BUG)
        _fail(" ".join(format_message().split()), getattr(problem, "exit_code", ExitCode.USAGE))
    sys.exit(code if isinstance(code, int) else ExitCode.OK)


__all__ = ["main"]
