"""Measuring one cell: timers, sampling, memory, accuracy, and the worker process."""
