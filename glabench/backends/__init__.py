"""Backends: one implementation of one op each, in a registry that others can add to."""

from glabench.backends.base import Backend, Counts, Requirement
from glabench.backends.registry import Registry, load_registry

__all__ = ["Backend", "Counts", "Registry", "Requirement", "load_registry"]
