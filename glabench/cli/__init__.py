"""The command line. Each command's module parses, calls one function, prints; torch is never imported here."""

from glabench.cli.app import main

__all__ = ["main"]
