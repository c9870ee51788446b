"""Errors that end a command, each with its exit code; the message says what was wrong and how to mend it."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum

# Control characters and halves of surrogate pairs; and what turns the direction of the text around it.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class ExitCode(IntEnum):
    """What a command's exit code means."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    NOTHING_TO_RUN = 3
    CELL_FAILED = 4
    ACCURACY = 5
    UNCLEAR = 6
    BUG = 70
    INTERRUPTED = 130


def printable(text: str) -> str:
    """The text in one line that a terminal takes for nothing but text: no escape sequences, no lone surrogates."""
    return _UNPRINTABLE.sub(" ", text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'NAME'?` for the known name that is nearest, or nothing if none is near."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


class RenamedWarning(FutureWarning):
    """Something was called by its name of one version ago."""


class GlabenchError(Exception):
    """An error of the user's making or surroundings: printed as one line, without a traceback."""

    exit_code = ExitCode.USAGE


class UsageError(GlabenchError):
    """An option, a sweep file or a run folder is wrong."""


class RecordNotKeptError(GlabenchError):
    """The disk does not take a record; those before it are kept."""


class InterruptedRunError(GlabenchError):
    """The user stopped a sweep; what was measured is kept."""

    exit_code = ExitCode.INTERRUPTED


class NothingToRunError(GlabenchError):
    """The sweep has no cell, or none of its cells can run here."""

    exit_code = ExitCode.NOTHING_TO_RUN
