"""The machine: the device, its state, clocks and ceilings, and the origin of measured code."""
