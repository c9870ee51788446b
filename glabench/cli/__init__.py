"""The command line. Each command's module parses options, calls one function and prints. Never imports torch."""

import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from glabench.errors import ExitCode, GlabenchError, RenamedWarning, UsageError, printable


def _fail(message: str, code: int) -> NoReturn:
    error = "" if code == ExitCode.INTERRUPTED else "error: "
    _end(f"glabench: {error}{printable(message)}" if message else "", code)


def _end(message: str, code: int) -> NoReturn:
    """Ends the process with a code, also if the message, or earlier output, cannot be written.

    `git bisect run` would take the codes of mistakes and bugs for those of a bad commit, so it gets one that stops it.
    """
    if sys.argv[1:2] == ["check"] and "--bisect" in sys.argv and code in (ExitCode.USAGE, ExitCode.BUG):
        code = ExitCode.STOP
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is sys.stderr and message:
                print(message, file=stream)
            stream.flush()
        except OSError:
            _discard(stream)
    sys.exit(code)


def _discard(stream: Any) -> None:
    """Sends what a stream still holds nowhere, because it would fail again at the interpreter's exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complete_streams() -> None:
    """Makes stdin, stdout and stderr exist, so that no file of ours gets their number, and able to print any text."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python found it closed
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _check_working_folder() -> None:
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        raise UsageError("the working folder no longer exists; change to another one") from None


def _hint(message: str, arguments: Sequence[str]) -> str:
    """What to do about an option that does not exist: it may be an axis of a plugin that was not given."""
    has_plugin = any(each.partition("=")[0] == "--plugin" for each in arguments)
    is_asked_for = message.startswith("No such option") and not has_plugin
    return "; if it belongs to a plugin, also give --plugin FILE" if is_asked_for else ""


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
        _discard(sys.stdout)
        raise


def main() -> NoReturn:
    """Runs the command line and turns every error into an exit code.

    A user's mistake gives one line on stderr; a traceback means a bug in glabench.
    """
    _complete_streams()
    try:
        _check_working_folder()
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
    except BrokenPipeError:
        _end("", ExitCode.READER_LEFT)
    except OSError as problem:
        named = f"'{problem.filename}': " if problem.filename else "cannot write: "
        _fail(f"{named}{problem.strerror or problem}", ExitCode.USAGE)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # which rich and Typer turn into a silent exit
            _end("", ExitCode.READER_LEFT)
        # Typer turns an interruption into a silent exit.
        _fail("interrupted" if end.code == ExitCode.INTERRUPTED else "", end.code if isinstance(end.code, int) else 1)
    except Exception as problem:
        # Click's usage errors, recognized by their method: newer versions of Typer rename the class.
        format_message = getattr(problem, "format_message", None)
        if format_message is None:
            _end("\n".join(map(printable, traceback.format_exc().splitlines())), ExitCode.BUG)
        message = " ".join(format_message().split())
        hint = _hint(message, sys.argv[1:]) if takes_axes(sys.argv[1:]) else ""
        _fail(message + hint, getattr(problem, "exit_code", ExitCode.USAGE))
    # Typer may also return the code of an interruption.
    _fail("interrupted" if code == ExitCode.INTERRUPTED else "", code if isinstance(code, int) else ExitCode.OK)


__all__ = ["main"]
