"""Runs as CUDA graphs, and the GPU's time of one, through PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WAIT = 400_000  # cycles, about 0.2 ms: longer than a launch takes


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of one call, captured after warm-up, and what the call returned: each replay writes it anew."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def graph_of(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The graph alone."""
    return captured(function)[0]


def clock(run: Callable[[], object], wait: int = WAIT) -> float:
    """Seconds of a run on an idle GPU. A kernel that waits so many cycles goes first, so that the run is queued before
    it starts and the time between its events is the GPU's alone."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(wait)  # type: ignore[attr-defined]
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3
