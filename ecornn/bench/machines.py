"""Where sides run: what they read, how a result is had of one, and how they take turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ecornn.bench import cuda_graphs, host_turns, turns
from ecornn.tune.timing import Arrays, TorchArrays, arrays_for

if TYPE_CHECKING:
    from ecornn.runtime.loader import Module

ROUNDS = 100  # at most
LONG = 4_000_000  # cycles, about 2 ms: longer than it takes to launch a graph of thousands of kernels
Results = Mapping[str, Any]
Inputs = dict[str, Any]  # by name: x, and dy of a training step


@dataclass(frozen=True)
class Ready:
    """A side that can be run: ``run`` is what is timed, ``results`` runs it and has what came of it, by name; ``kept``
    is what a graph reads, which must stay as long."""

    run: Callable[[], object]
    results: Callable[[], Results]
    kept: object = None


class Machine(Protocol):
    """A device with its memory."""

    @property
    def arrays(self) -> Arrays:
        """What its memory takes and gives."""

    def refill(self, inputs: Inputs, shapes: Mapping[str, tuple[int, ...]], positive: Sequence[slice]) -> None:
        """New random values, from the normal distribution, where sides read them; of x those in the slices of rows
        that are ``positive`` never below 0."""

    def ready(self, function: Callable[[], Results]) -> Ready:
        """Of a side's call."""

    def peak(self, function: Callable[[], Results]) -> int | None:
        """Bytes of a GPU's memory that a call takes at most, beside what is there before it; None on a CPU."""

    def take_turns(self, sides: Mapping[str, Ready], fresh: Callable[[], object],
                   seconds: float) -> tuple[dict[str, list[float]], int]:
        """Seconds of every run of each side, ``seconds`` for all of them together, and how many rounds were made
        again."""


class Host:
    """A CPU; or a GPU in a process without PyTorch, of which the host's clock times a call and the wait for it."""

    def __init__(self, arrays: Arrays, seed: int) -> None:
        self.arrays, self.rng = arrays, np.random.default_rng(seed)

    def refill(self, inputs: Inputs, shapes: Mapping[str, tuple[int, ...]], positive: Sequence[slice]) -> None:
        for name, shape in shapes.items():
            values = self.rng.standard_normal(shape, np.float32)
            for part in positive if name == "x" else ():
                values[..., part] = abs(values[..., part])
            inputs[name] = self.arrays.put(values)

    def ready(self, function: Callable[[], Results]) -> Ready:
        return Ready(function, function)

    def peak(self, function: Callable[[], Results]) -> int | None:
        return None

    def take_turns(self, sides: Mapping[str, Ready], fresh: Callable[[], object],
                   seconds: float) -> tuple[dict[str, list[float]], int]:
        found = host_turns.take_turns({name: side.run for name, side in sides.items()}, fresh, ROUNDS, seconds,
                                      clock=self.arrays.clock)
        return {name: found.runs(name) for name in sides}, found.disturbed


class Gpu:
    """A GPU through PyTorch: every side is a CUDA graph, which reads inputs where they lay when it was captured."""

    def __init__(self, arrays: TorchArrays, seed: int, device: str = "cuda") -> None:
        import torch

        self.arrays, self.torch, self.device = arrays, torch, device
        torch.manual_seed(seed)

    def refill(self, inputs: Inputs, shapes: Mapping[str, tuple[int, ...]], positive: Sequence[slice]) -> None:
        for name, shape in shapes.items():
            values = self.torch.randn(shape, device=self.device)
            for part in positive if name == "x" else ():
                values[..., part].abs_()
            if name not in inputs:
                inputs[name] = self.torch.empty(shape, dtype=self.arrays.dtype, device=self.device)
            inputs[name].copy_(values)

    def ready(self, function: Callable[[], Results]) -> Ready:
        graph, found = cuda_graphs.captured(function)

        def results() -> Results:
            with self.torch.no_grad():
                for tensor in found.values():
                    tensor.fill_(float("nan"))  # what a replay does not write is seen
            graph.replay()
            return found

        return Ready(graph.replay, results, function)

    def peak(self, function: Callable[[], Results]) -> int | None:
        cuda = self.torch.cuda
        if not cuda.is_available():
            return None
        gc.collect()
        cuda.synchronize()
        cuda.empty_cache()
        before = int(cuda.memory_allocated())
        cuda.reset_peak_memory_stats()
        function()
        cuda.synchronize()
        return int(cuda.max_memory_allocated()) - before

    def take_turns(self, sides: Mapping[str, Ready], fresh: Callable[[], object],
                   seconds: float) -> tuple[dict[str, list[float]], int]:
        return turns.take_turns({name: side.run for name, side in sides.items()}, fresh, ROUNDS, seconds,
                                lambda run: cuda_graphs.clock(run, LONG)), 0


def machine_of(module: Module, seed: int) -> Machine:
    """The one that runs a module."""
    arrays = arrays_for(module)
    return Gpu(arrays, seed) if isinstance(arrays, TorchArrays) else Host(arrays, seed)
