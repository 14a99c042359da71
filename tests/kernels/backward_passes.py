"""Kernels of the backward pass, emulated, with what they read and write given by name; the recurrence of an adjoint on
random arguments: as kernels get them, and what comes of them in float64.

Kernels and float64 get the same hoisted values, as they lie in memory: who computes these answers for their rounding.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuda_on_cpu import DTYPES, Emulated
from numpy_packing import tf32

from ecornn.analysis import StepGraph
from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.backpropagation import Values, assign, hoist, replayed, start, summarize
from ecornn.analysis.kept import kept
from ecornn.program import WORKSPACE, Buffer, Extent, Program
from ecornn.schedules.base import Component, Task
from ecornn.schedules.hoisted import Hoisted
from ecornn.tune.oracle import rounded
from ecornn.workload import Traversal

Arrays = dict[str, np.ndarray]


class Passes:
    """A piece of a program, compiled for this CPU; ``given`` are shapes and types of what it needs beside its own."""

    def __init__(self, part: Component, folder: Path, given: Mapping[str, tuple[tuple[int, ...], str]],
                 **more: Any) -> None:
        self.given = given
        own = {b.name: b for b in part.buffers}
        assert len(own) == len(part.buffers), "a buffer twice"
        others = [Buffer(n, WORKSPACE, kind, Extent(int(np.prod(shape)))) for n, (shape, kind) in given.items()
                  if n not in own]
        self.program = Program.running(dict(part.functions), (*part.buffers, *others), part.calls)
        self.emulated = Emulated(self.program, folder, **more)

    def run(self, steps: int, batch: int, values: Mapping[str, np.ndarray],
            parameters: Mapping[str, np.ndarray] | None = None, made: Mapping[str, tuple[int, ...]] | None = None,
            twice: bool = True, add: bool = True) -> Arrays:
        """All buffers afterwards; what is not given is NaN before. ``twice``: a second run leaves the same bits."""
        if twice:
            found, again = (self.run(steps, batch, values, parameters, made, False, add) for _ in range(2))
            for name in self.given:
                assert found[name].tobytes() == again[name].tobytes(), f"{name} differs in a second run"
            return found
        memory = self.emulated.memory(steps, parameters or {}, lambda b: values.get(b.name))
        self.emulated.carry_out(memory, steps, batch, add=add)
        self.emulated.check_guards(memory)
        shapes = {n: shape for n, (shape, _) in self.given.items()} | dict(made or {})
        return {n: memory[n][:int(np.prod(shapes[n]))].reshape(shapes[n]) if n in shapes else memory[n] for n in memory}


Array = Any
Multiply = Callable[[Array, Array], Array]  # (B, H) by (H, H)


@dataclass(frozen=True)
class Sample:
    """Arguments of a recurrence, float64: ``weights`` in te shape, ``hoisted`` (T*B, Q, H), ``first`` states (B, H)."""

    weights: dict[str, Array]
    hoisted: Array
    first: dict[str, Array]


def draw(task: Task, adjoint: Adjoint, layout: Hoisted, seed: int = 0) -> Sample:
    w, graph = task.workload, task.graph
    rng, shape = np.random.default_rng([seed, w.seq, w.batch, w.hidden]), (w.seq, w.batch, w.hidden)
    def of_type(values: Array, dtype: str = w.dtype) -> Array:
        return values.astype(DTYPES[dtype]).astype(np.float64)
    weights = {n: of_type(rng.uniform(-1, 1, s) * w.hidden**-0.5) for n, s in graph.parameters.items()}
    states = [rng.uniform(-1, 1, shape[1:]) for _ in adjoint.forward.states]
    forward = adjoint.forward
    width = next((forward.parameters[p.terms[0].parameter][-1] for p in forward.hoisted_products), w.hidden)
    known = replayed(forward, kept(adjoint, "gates"), weights, rng.normal(size=(*shape[:2], width)), states)
    values = start(graph, weights, known | {dy: rng.normal(size=shape) for dy in adjoint.dys})
    hoist(graph, weights, values, None, shape)
    hoisted = [np.broadcast_to(values[v], shape) for v in graph.hoisted_outputs]
    rows = np.stack(hoisted, axis=2).reshape(-1, len(hoisted), w.hidden) if hoisted else np.zeros((0, 0, 0))
    given = set(adjoint.first.values())
    first = {n: of_type(rng.normal(size=shape[1:])) if n in given else np.zeros(shape[1:]) for n in graph.states}
    return Sample(weights, of_type(rows, layout.dtype), first)


def laid(layout: Hoisted, rows: Array) -> Array:
    return layout.laid(rows).astype(DTYPES[layout.dtype]).reshape(-1)


def lowered(outputs: Array) -> Array:
    """What a recurrence with TF32 products has left as ``raised`` values."""
    return (outputs.view(np.uint32) - np.uint32(0x1000)).view(np.float32)


def recur(task: Task, sample: Sample, masks: Mapping[str, Array], kind: str = "float32",
          multiply: Multiply = np.matmul) -> tuple[Array, dict[str, Array]]:
    """Outputs (T, B, O, H) and last states, each row apart, in float64; products' factors are rounded to ``kind``."""
    w, graph = task.workload, task.graph
    hoisted = sample.hoisted.reshape(w.seq, -1, len(graph.hoisted_outputs), w.hidden)
    batch = hoisted.shape[1]
    outputs = np.zeros((w.seq, batch, len(graph.outputs), w.hidden))
    last = {n: v[:batch].copy() for n, v in sample.first.items()}
    known = start(graph, sample.weights)
    matrices = {n: of_kind(v, kind) for n, v in sample.weights.items() if v.ndim == 3}
    together = [slice(None)] if not masks else [slice(b, b + 1) for b in range(batch)]
    for rows in together:
        given = {n: v[rows] for n, v in last.items()}
        now = given
        for steps, clears in pieces(task.traversal, w.seq, masks, rows):
            for t in steps:
                values = known | {v: hoisted[t, rows, q] for q, v in enumerate(graph.hoisted_outputs)}
                values |= {v: now[n] for n, v in graph.states.items()}
                step(graph, values, matrices, now[next(iter(now))].shape, kind, multiply)
                for o, v in enumerate(graph.outputs):
                    outputs[t, rows, o] = values[v]
                now = {n: np.broadcast_to(values[v], given[n].shape) for n, v in graph.results.items()}
            if clears:
                now = {n: np.zeros_like(v) for n, v in given.items()}
        for name, value in now.items():
            last[name][rows] = value
    return outputs, last


def pieces(traversal: Traversal, steps: int, masks: Mapping[str, Array],
           rows: slice) -> Iterator[tuple[list[int], bool]]:
    """The steps between two resets, in the adjoint's order, and whether states were cleared before them."""
    n = int(masks["lengths"][rows.start]) if traversal.lengths else steps
    of_layer = list(range(n)) if traversal.reverse else list(range(n))[::-1]
    cleared = [False] * n
    if traversal.resets:
        resets = masks["resets"][:, rows.start]
        # going forward the layer cleared its states before such a step; backwards after it, of all but step 0
        cleared = [bool(resets[t]) if traversal.reverse else t + 1 < n and bool(resets[t + 1]) for t in of_layer]
    found: list[int] = []
    for t, clear in list(zip(of_layer, cleared, strict=True))[::-1]:
        found.append(t)
        if clear:
            yield found, True
            found = []
    if found:
        yield found, False


def step(graph: StepGraph, values: Values, matrices: Mapping[str, Array], shape: tuple[int, ...], kind: str,
         multiply: Multiply) -> None:
    assign(graph.prologue, values)
    for phase in graph.phases:
        summarize(phase.statistics, values, shape)
        for product in phase.products:
            total = 0.0
            for term in product.terms:
                matrix = matrices[term.parameter][term.gate]
                operand = of_kind(np.broadcast_to(values[term.operand], shape), kind)
                total = total + multiply(operand, matrix if term.transposed else matrix.T)
            values[product.var] = total
        assign(phase.assigns, values)


def of_kind(values: Array, kind: str) -> Array:
    if kind == "float32":
        return values
    return np.float64(tf32(np.asarray(values, np.float32)) if kind == "tf32" else rounded(values, kind))
