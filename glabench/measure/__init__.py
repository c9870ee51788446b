"""Measuring: timers, memory, accuracy, the worker process that measures one cell, the runner that drives workers."""
