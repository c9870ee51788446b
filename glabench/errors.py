"""Errors that end a command, each with its exit code. Messages say what was wrong, what is allowed and what to do."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum

# Control characters, lone surrogates, and characters that change the direction of text.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class ExitCode(IntEnum):
    """The exit codes of commands; docs/records.md explains them."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    NOTHING_TO_RUN = 3
    CELL_FAILED = 4
    ACCURACY = 5
    UNCLEAR = 6
    BUG = 70
    # Of `git bisect run`: this commit cannot be judged, go on with another; and: stop.
    SKIP = 125
    STOP = 128
    INTERRUPTED = 130
    # That of a process that SIGPIPE ended, as a shell reports it for `cat FILE | head`. Click's own 1 would be a
    # regression here, and 0 would hide that not everything was written.
    READER_LEFT = 141


def printable(text: str) -> str:
    """The text in one line that is safe to print: no escape sequences, no lone surrogates."""
    return _UNPRINTABLE.sub(" ", text)


def count_of(number: int, noun: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'NAME'?` with the most similar known name; empty if none is similar."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def allowed_names(known: Iterable[str], name: str) -> str:
    """`allowed: A, B; did you mean 'A'?`, for a name that is none of them."""
    listed = list(known)
    return f"allowed: {', '.join(listed)}{did_you_mean(name, listed)}"


class RenamedWarning(FutureWarning):
    """A name of the previous version was used."""


class GlabenchError(Exception):
    """An error caused by the user's input or machine: printed as one line, without a traceback."""

    exit_code = ExitCode.USAGE


class UsageError(GlabenchError):
    """An option, a sweep file or a run folder is wrong."""


class RecordNotKeptError(GlabenchError):
    """A record could not be written; earlier records are kept."""


class InterruptedRunError(GlabenchError):
    """The user stopped a sweep; measured records are kept."""

    exit_code = ExitCode.INTERRUPTED


class NothingToRunError(GlabenchError):
    """The sweep has no cell, or none of its cells can run here."""

    exit_code = ExitCode.NOTHING_TO_RUN
