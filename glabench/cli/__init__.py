"""The command line. Each command's module parses, calls one function, prints; torch is never imported here."""

import sys
import traceback
from typing import NoReturn

from glabench.errors import ExitCode, GlabenchError


def _fail(message: str, code: int) -> NoReturn:
    if message:
        print(f"glabench: error: {message}", file=sys.stderr)
    sys.exit(code)


def main() -> NoReturn:
    """The program, and the one place where errors become exit codes.

    A user's mistake is one line on stderr; a traceback is a bug.
    """
    try:
        # Imported here, so that an interruption during imports ends like any other.
        from glabench.cli.app import app

        code = app(standalone_mode=False)
    except GlabenchError as problem:
        _fail(str(problem), problem.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", ExitCode.INTERRUPTED)
    except OSError as problem:
        named = f"'{problem.filename}': " if problem.filename else ""
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
