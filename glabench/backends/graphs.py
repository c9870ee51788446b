"""CUDA graphs: which models are replayed from one, and how one is made of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from glabench.sweeps.model import Cell
from glabench.sweeps.parameters import choices

GRAPHS = choices("graphs", "Whether steps are replayed from a CUDA graph; by default on a GPU.", ("on", "off"))

Returned = TypeVar("Returned")


def graph_limits(cell: Cell) -> str | None:
    """Why the cell's steps cannot be replayed as asked for; None if they can."""
    asks = cell.get("graphs") == "on" and cell.device != "cuda"
    return "CUDA graphs need a GPU; use --graphs off" if asks else None


def uses_graph(cell: Cell) -> bool:
    """Whether steps are replayed from a CUDA graph."""
    return cell.get("graphs") != "off" and cell.device == "cuda"


def replayed(function: Callable[[], Returned]) -> Callable[[], Returned]:
    """The function as a graph replays it: every call returns the same tensors, written anew.

    It has to have run before, so that nothing is compiled or allocated for the first time. It runs once more, and does
    nothing, while the graph is made. Raises RuntimeError if it cannot be captured.
    """
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            returned = function()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as problem:
        raise RuntimeError(f"a step cannot be captured in a CUDA graph (use --graphs off): {problem}") from problem

    def replay() -> Returned:
        graph.replay()
        return returned

    return replay
