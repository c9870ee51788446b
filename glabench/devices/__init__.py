"""The machine: which device, its state and clocks, what it can do, and where a number comes from."""

from glabench.devices.choice import Device, parse_device, select_device

__all__ = ["Device", "parse_device", "select_device"]
