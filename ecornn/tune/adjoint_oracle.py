"""A short pass backwards in float64, with the answers that the recurrence of an adjoint must get right.

The analysis derives the inputs of the recurrence. It is believed only where the layer's gradients agree with those of
``numpy_gradients.py``, or for a cell without a formula with differences of what the interpreter computes. Outputs and
last states are compared: in gradients of weights errors of gates would be summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import Backpropagated, carry_out
from ecornn.cells import Cell
from ecornn.errors import CellError
from ecornn.interpreter import Tangents, interpret
from ecornn.numpy_gradients import reference_gradients
from ecornn.schedules.backward.assemble import recurrence_graph
from ecornn.tune.oracle import STEPS, Array, Inputs, draw, has_formula, norm, rounded, save
from ecornn.workload import Workload

EXACT = 1e-9  # relative, between two gradients in float64
SHIFT = 1e-8  # of differences: half of what an input moves by, so little that hardly any value passes a kink
NEAR = 2e-5  # of differences, to the norm of the gradient
DIRECTIONS = 3  # at most: in one of them some value may pass a kink

Answers = tuple[Array, Array, list[Array], list[Array], dict[str, Array]]
Upstream = tuple[Array, list[Array]]  # gradients of y and of the last states


def write(path: Path, cell: Cell, work: Workload, seed: int) -> None:
    save(path, *answers(cell, work, np.random.default_rng(seed)))


def answers(cell: Cell, work: Workload, rng: np.random.Generator) -> Answers:
    """The answers for an adjoint's workload: ``x`` (T, B, Q, H), the values of each step that it reads, of a random
    forward pass; its outputs ``y`` (T, B, O, H); states before and after, (B, H) each; and weights. Raises
    :class:`~ecornn.errors.CellError` where the cell cannot be differentiated, or its gradients are wrong."""
    backward = adjoint(analyse(cell, work.input, work.hidden), work.hidden)
    backward = replace(backward, recurrence=recurrence_graph(backward))
    given = draw(cell, work, rng)
    shape = work.batch, work.hidden
    sizes = (STEPS, work.batch, backward.forward.written * work.hidden), *(shape for _ in cell.states)
    dy, *dstates = (rounded(rng.uniform(-1, 1, size), work.dtype) for size in sizes)
    result = carry_out(backward, given.x, given.shaped, given.states, dy, dstates)
    if fault := disagreement(cell, given, (dy, dstates), result, rng):
        raise CellError(f"the gradients that were derived for {cell.identity()} are wrong: {fault}")
    return (result.hoisted.astype(np.float32), result.outputs, [*result.first.values()], [*result.last.values()],
            given.flat)


def disagreement(cell: Cell, given: Inputs, upstream: Upstream, gradients: Backpropagated,
                 rng: np.random.Generator) -> str | None:
    """The name of a gradient that differs from an independent one; None: all agree."""
    if not has_formula(cell):
        return far_from_differences(cell, given, upstream, gradients, rng)
    dx, weights, states = reference_gradients(cell.identity(), given.x, given.flat, given.states, dy=upstream[0],
                                              dstate=upstream[1])
    own = {cell.parameter_name(name): value for name, value in gradients.parameters.items()}
    pairs = chain((("x", gradients.dx, dx),), ((name, own[name].reshape(value.shape), value) for name, value in
                                           weights.items()), zip(cell.states, gradients.states, states, strict=True))
    return next((f"of {name}" for name, got, wanted in pairs
                 if not norm(got - wanted) <= EXACT * max(norm(wanted), EXACT)), None)


def far_from_differences(cell: Cell, given: Inputs, upstream: Upstream, gradients: Backpropagated,
                         rng: np.random.Generator) -> str | None:
    """The input along which the layer has another slope than its gradient says, in every direction that was tried."""
    tangents: Tangents = []
    interpret(cell, given.x, given.shaped, given.states, tangents)
    for name, gradient, moved in shifts(cell, given, gradients):
        for _ in range(DIRECTIONS):
            direction = rng.uniform(-1, 1, gradient.shape)
            slope = sum(sign * value(cell, moved(sign * SHIFT * direction), upstream, tangents)
                        for sign in (1, -1)) / (2 * SHIFT)
            scale = norm(gradient) * norm(direction) / max(direction.size, 1) ** 0.5
            if abs(slope - (gradient * direction).sum()) <= NEAR * scale + EXACT:
                break
        else:
            return f"of {name}"
    return None


def shifts(cell: Cell, given: Inputs,
           gradients: Backpropagated) -> Iterator[tuple[str, Array, Callable[[Array], Inputs]]]:
    """The name and gradient of each input, and a function that moves it among all inputs."""
    def parameter(name: str, by: Array) -> Inputs:
        return replace(given, shaped=given.shaped | {name: given.shaped[name] + by})

    def state(n: int, by: Array) -> Inputs:
        return replace(given, states=[s + by if m == n else s for m, s in enumerate(given.states)])

    yield "x", gradients.dx, lambda by: replace(given, x=given.x + by)
    for name, gradient in gradients.parameters.items():
        yield name, gradient, partial(parameter, name)
    for n, (name, gradient) in enumerate(zip(cell.states, gradients.states, strict=True)):
        yield name, gradient, partial(state, n)


def value(cell: Cell, given: Inputs, upstream: Upstream, tangents: Tangents) -> float:
    """The sum of y and the last states weighted with ``upstream``, which is its gradient."""
    y, last = interpret(cell, given.x, given.shaped, given.states, tangents)
    dy, dstates = upstream
    return float(sum((g * v).sum(dtype=np.float64) for g, v in zip((dy, *dstates), (y, *last), strict=True)))
