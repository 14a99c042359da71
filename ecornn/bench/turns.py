"""The sides that are timed and ours among them, where they run, what they read, and how they take turns."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ecornn.cells import Cell
from ecornn.errors import ArgumentError
from ecornn.runtime.loader import Module
from ecornn.tune.oracle import rounded, sampled
from ecornn.tune.record import INTEGERS
from ecornn.tune.timing import Arrays, TorchArrays, arrays_for, between_events
from ecornn.workload import Stack, Workload

if TYPE_CHECKING:
    import torch

ROUNDS = 100  # at most
FEWEST, WARM = 7, 3  # rounds on a GPU
WAIT = 400_000  # cycles, about 0.2 ms: longer than a launch takes
LAUNCHED = 4_000_000  # cycles, about 2 ms: longer than it takes to launch a graph of thousands of kernels
FEWEST_HERE = 3  # rounds on a CPU
LONG = 1.0  # seconds; longer runs are not preceded by one that is not timed
SAMPLE = 2e-3  # seconds that a side runs at least in its turn: shorter runs are made several times
MOST = 50  # times, at most
PAUSE = 0.005  # seconds in which no thread of this process must run before a side's turn
FOREIGN = 0.03  # seconds of other processes in a round that are too many, and share of its time
AGAIN = 4  # times as many rounds as asked for, at most, where others disturb them
Run = Callable[[], object]
Results = Mapping[str, Any]
Inputs = dict[str, Any]  # by name: x, and dy of a training step
Weights = Mapping[str, Any]  # NumPy float32 by the names under which a user passes them


class Times(msgspec.Struct, frozen=True):
    """Percentiles of runs, µs a step, interpolated: of fewer than a hundred ``runs`` p99 is near the slowest."""

    median: float
    p20: float
    p80: float
    p50: float
    p95: float
    p99: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float], steps: int) -> Times:
        p20, p50, p80, p95, p99 = map(float, np.percentile(seconds, (20, 50, 80, 95, 99)) * 1e6 / steps)
        return cls(p50, p20, p80, p50, p95, p99, len(seconds))


def take_turns(sides: Mapping[str, Run], fresh: Callable[[], object], repeats: int, seconds: float,
               clock: Callable[[Run], float]) -> dict[str, list[float]]:
    """The times of every run by ``clock``; ``repeats`` of each side after ``WARM`` that do not count, or as many as
    ``seconds`` allow, ``FEWEST`` at least. ``fresh`` makes the next input."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = float("inf")
    for count in range(WARM + repeats):
        if count == WARM:
            end = time.monotonic() + seconds
        if count >= WARM + FEWEST and time.monotonic() > end:
            break
        fresh()
        for name, run in sides.items():
            taken = clock(run)
            if count >= WARM:
                times[name].append(taken)
    return times


def settle() -> None:
    """Waits until no thread of this process spins any more; ONNX Runtime's do for some 40 ms."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(PAUSE)
        if time.process_time() - before < PAUSE / 5:
            return


def foreign() -> float:
    """Seconds of processor time that other processes, and other machines on this host, have used so far."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def host_turns(sides: Mapping[str, Run], fresh: Callable[[], object], repeats: int, seconds: float,
               clock: Callable[[Run], float]) -> tuple[dict[str, list[list[float]]], int]:
    """:func:`take_turns` on a CPU, and how many rounds were made again, within ``seconds``: those in which other
    processes used it. A side first waits until the threads of the one before stop spinning, then runs as often untimed
    as timed, which wakes threads and brings weights back to the caches."""
    counts, long = {}, {}
    for name, run in sides.items():
        clock(run)
        took = clock(run)
        counts[name], long[name] = max(1, min(MOST, int(SAMPLE / max(took, 1e-7)))), took > LONG
    turns: dict[str, list[list[float]]] = {name: [] for name in sides}
    made, kept, end = 0, 0, time.monotonic() + seconds
    while kept < repeats and (kept < FEWEST_HERE or time.monotonic() < end):
        start, before, round_ = time.perf_counter(), foreign(), {}
        fresh()
        for name, run in sides.items():
            settle()
            for _ in range(0 if long[name] else counts[name]):
                run()
            round_[name] = [clock(run) for _ in range(counts[name])]
        used, made = foreign() - before, made + 1
        if (used > max(FOREIGN, FOREIGN * (time.perf_counter() - start)) and made <= AGAIN * repeats
                and time.monotonic() < end):
            continue
        kept += 1
        for name, turn in round_.items():
            turns[name].append(turn)
    return turns, made - kept


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
    return captured(function)[0]


def gpu_clock(run: Run, wait: int = WAIT) -> float:
    """Seconds of a run on an idle GPU. A kernel that waits so many cycles goes first, so that the run is queued before
    it starts and the time between its events is the GPU's alone."""
    import torch

    torch.cuda.synchronize()
    return between_events(run, wait)[0]


@dataclass(frozen=True)
class Ready:
    """A side that can be run: ``run`` is what is timed, ``results`` runs it and has what came of it, by name; ``kept``
    is what a graph reads, which must stay as long."""

    run: Callable[[], object]
    results: Callable[[], Results]
    kept: object = None


class Host:
    """A CPU; or a GPU in a process without PyTorch, of which the host's clock times a call and the wait for it."""

    def __init__(self, arrays: Arrays, seed: int) -> None:
        self.arrays, self.rng = arrays, np.random.default_rng(seed)

    def refill(self, inputs: Inputs, shapes: Mapping[str, tuple[int, ...]], positive: Sequence[slice]) -> None:
        """New values of the normal distribution, where sides read them; in ``positive`` slices of x never below 0."""
        for name, shape in shapes.items():
            values = self.rng.standard_normal(shape, np.float32)
            for part in positive if name == "x" else ():
                values[..., part] = abs(values[..., part])
            inputs[name] = self.arrays.put(values)

    def ready(self, function: Callable[[], Results]) -> Ready:
        return Ready(function, function)

    def peak(self, function: Callable[[], Results]) -> int | None:
        """Bytes of a GPU's memory that a call takes at most, beside what is there before it; None on a CPU."""
        return None

    def take_turns(self, sides: Mapping[str, Ready], fresh: Callable[[], object],
                   seconds: float) -> tuple[dict[str, list[float]], int]:
        """Seconds of every run of each side, ``seconds`` for all of them, and how many rounds were made again."""
        found, again = host_turns({name: side.run for name, side in sides.items()}, fresh, ROUNDS, seconds,
                                  self.arrays.clock)
        return {name: [*chain(*runs)] for name, runs in found.items()}, again


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
        graph, found = captured(function)

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
        return take_turns({name: side.run for name, side in sides.items()}, fresh, ROUNDS, seconds,
                          lambda run: gpu_clock(run, LAUNCHED)), 0


Machine = Host | Gpu


def machine_of(module: Module, seed: int) -> Machine:
    arrays = arrays_for(module)
    return Gpu(arrays, seed) if isinstance(arrays, TorchArrays) else Host(arrays, seed)


@dataclass(frozen=True)
class Subject:
    """The layer that all sides compute. ``inputs``: each call reads x (T, B, I), a cell's own inputs behind it in
    its rows, and with ``training`` dy (T, B, D*O*H)."""

    module: Module  # ours
    cell: Cell | None  # the module's; None for one of a user's that only the module file has
    steps: int  # T of a call
    rows: int  # B
    threads: int | None  # of a call on a CPU
    training: bool  # a call is forward and backward
    machine: Machine
    inputs: Inputs = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rows > self.work.batch:
            raise ArgumentError("--batch", self.rows, f"at most {self.work.batch}, the batch that the module was "
                                "compiled for")
        if self.training and self.stack.keep is None:
            raise ArgumentError("--training", True, "a module that was compiled with --training")
        self.refill()

    @property
    def work(self) -> Workload:
        return self.module.manifest.workload

    @property
    def stack(self) -> Stack:
        return self.module.manifest.stack

    @property
    def kind(self) -> str:
        """The kind of the device, ``cuda`` or ``llvm``."""
        return self.module.manifest.device.kind

    def refill(self) -> None:
        """New random inputs."""
        shapes = {"x": (self.steps, self.rows, self.work.input)}
        if self.training:
            shapes["dy"] = (self.steps, self.rows, self.module.manifest.y_width)
        positive: list[slice] = []
        if self.cell is not None:
            begin, hidden = self.cell.own_input(self.work.input, self.work.hidden), self.work.hidden
            positive = [slice(begin + n * hidden, begin + (n + 1) * hidden) for n, name in enumerate(self.cell.inputs)
                        if name in self.cell.nonnegative]
        self.machine.refill(self.inputs, shapes, positive)


@dataclass(frozen=True)
class Side:
    """Something to time: ``call`` computes y or, of a training step, gradients of x and the weights, by name."""

    name: str
    call: Callable[[], Results]
    about: str  # what it is
    cell: Cell | None  # that it computes, with weights: not always the subject's
    weights: Weights
    subject: Subject | None = None  # of a side of ours, with its module


def random_weights(cell: Cell, work: Workload, stack: Stack, rng: np.random.Generator) -> dict[str, Any]:
    """Weights as the cell samples them, of every layer and direction; values that the layer's type has."""
    kind = work.dtype if work.weights in INTEGERS else work.stored
    found = {}
    for part in stack.parts(work):
        own = cell.own_input(part.workload.input, work.hidden)
        for name, shape in cell.parameters(own, work.hidden).items():
            values = rounded(sampled(cell, name, tuple(shape), rng), kind)
            found[cell.parameter_name(name, part.layer, part.second)] = values.reshape(-1, *shape[2:])
    return found


def uniform_weights(module: Module, rng: np.random.Generator) -> dict[str, Any]:
    bound = module.manifest.workload.hidden ** -0.5
    return {p.name: rounded(rng.uniform(-bound, bound, p.shape), "float32") for p in module.manifest.parameters}


def ours(subject: Subject, weights: Weights) -> Side:
    """The compiled module."""
    machine, inputs = subject.machine, subject.inputs
    layer: Any = subject.module.bind({name: machine.arrays.weight(value) for name, value in weights.items()},
                                     threads=subject.threads if subject.kind == "llvm" else None)
    layer.whole_rows = True

    def forward() -> Results:
        return {"y": layer(inputs["x"])[0]}

    def step() -> Results:
        kept = layer.forward(inputs["x"])[2]
        found = layer.backward(kept, inputs["dy"], want_state=False)
        return {"x": found.x, **found.weights}

    call = step if subject.training else forward
    return Side("ecornn", call, subject.module.manifest.schedule, subject.cell, weights, subject)
