"""The differences between two environments, and whether times measured in them can be compared."""

from collections.abc import Iterator, Mapping
from typing import Any

from glabench.errors import UsageError
from glabench.records.environment import MOMENTARY, device_name

# The code is what is compared.
_NO_DIFFERENCE = MOMENTARY | {"code", "glabench"}


def differences(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What differs between two environments: a name, and both values."""
    flat_base, flat_new = dict(_flat(base)), dict(_flat(new))
    # What one side did not keep is not known to differ.
    common = [name for name in flat_base if name in flat_new]
    return [(name, flat_base[name], flat_new[name]) for name in common if flat_base[name] != flat_new[name]]


def _flat(environment: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in environment.items():
        if not prefix and key in _NO_DIFFERENCE:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value


def check_same_device(base: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises UsageError for environments with different devices."""
    if device_name(base) != device_name(new):
        raise UsageError(
            f"the base was measured on {device_name(base)}, the new times on {device_name(new)}, so they do not show "
            "what the code changed; compare anyway with --any-device"
        )
