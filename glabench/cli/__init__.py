"""The command line. Each command's module parses, calls one function, prints; torch is never imported here."""

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
    """A batch system's SIGTERM and a closed terminal's SIGHUP end a run as Ctrl-C does: workers go, records stay."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has SIGHUP ignored, and means it
            signal.signal(number, _interrupt)


def _show_notices() -> None:
    """A name that is of one version ago is a line on stderr, once."""
    show = warnings.showwarning

    def show_notice(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
        if issubclass(category, RenamedWarning):
            print(f"glabench: note: {printable(str(message))}", file=sys.stderr)
        else:
            show(message, category, *where, **options)

    warnings.showwarning = show_notice


def _flush_stdout() -> None:
    """Writes what is left now, where it can fail with a message: at the interpreter's end it cannot."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def main() -> NoReturn:
    """The program, and the one place where errors become exit codes.

    A user's mistake is one line on stderr; a traceback is a bug.
    """
    try:
        # Imported here, so that an interruption during imports ends like any other.
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
        # Typer turns an interruption into an exit of its own, without a word.
        _fail("interrupted" if end.code == ExitCode.INTERRUPTED else "", end.code if isinstance(end.code, int) else 1)
    except Exception as problem:
        # Usage errors of click, which newer versions of Typer ship under a name of their own.
        format_message = getattr(problem, "format_message", None)
        if format_message is None:
            traceback.print_exc()
            sys.exit(ExitCode.BUG)
        _fail(" ".join(format_message().split()), getattr(problem, "exit_code", ExitCode.USAGE))
    sys.exit(code if isinstance(code, int) else ExitCode.OK)


__all__ = ["main"]
