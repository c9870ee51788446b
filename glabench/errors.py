"""Errors that end a command, each with its exit code; the message says what was wrong and how to mend it."""

from enum import IntEnum


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


class GlabenchError(Exception):
    """An error of the user's making or surroundings: printed as one line, without a traceback."""

    exit_code = ExitCode.USAGE


class UsageError(GlabenchError):
    """An option, a sweep file or a run folder is wrong."""


class InterruptedRunError(GlabenchError):
    """The user stopped a sweep; what was measured is kept."""

    exit_code = ExitCode.INTERRUPTED


class NothingToRunError(GlabenchError):
    """The sweep has no cell, or none of its cells can run here."""

    exit_code = ExitCode.NOTHING_TO_RUN
