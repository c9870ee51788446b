"""Backends, each one implementation of one op, and their registry, to which plugins can add."""

from glabench.backends.base import Backend, Counts, Part, Requirement
from glabench.backends.registry import Registry, load_registry

__all__ = ["Backend", "Counts", "Part", "Registry", "Requirement", "load_registry"]
