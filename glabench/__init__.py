"""glabench: measures how fast, how memory-hungry and how accurate sequence-mixing layers are."""

__version__ = "0.1.0"
