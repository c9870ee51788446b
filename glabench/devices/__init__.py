"""The machine: the device, its state, clocks and ceilings, and the origin of measured code."""

from glabench.devices.choice import Device, parse_device, select_device

__all__ = ["Device", "parse_device", "select_device"]
