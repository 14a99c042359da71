"""A layer that is timed, and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ecornn.bench.turns import Inputs, Machine, Results
from ecornn.cells import Cell
from ecornn.errors import ArgumentError
from ecornn.runtime.loader import Module
from ecornn.tune.oracle import rounded, sampled
from ecornn.tune.record import INTEGERS
from ecornn.workload import Stack, Workload

Weights = Mapping[str, Any]  # NumPy float32 by the names under which a user passes them


@dataclass(frozen=True)
class Subject:
    """What all sides compute. ``inputs``: what they read, at each call: x (T, B, I), a cell's own inputs behind it in
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
            raise ArgumentError("--batch", self.rows, f"at most {self.work.batch}, what the module was compiled for")
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
        """Of the device, ``cuda`` or ``llvm``."""
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
    """Something to time: ``call`` computes what the inputs make of the layer, y or, of a training step, the gradients
    of x and of the weights, by their names."""

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
    """Weights of a module whose cell is not known."""
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
