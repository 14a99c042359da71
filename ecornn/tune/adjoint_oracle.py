"""What the recurrence of an adjoint must get right: a short pass backwards in float64.

Its inputs are factors that the analysis derives, so the analysis must say what they are, and what comes of them. It
is believed only once the gradients of the whole layer that follow are those of somebody who shares nothing with it:
the tape of ``numpy_tape.py`` through the formula in NumPy, where the cell has one, else differences of what the
interpreter makes of the cell's te graph. Then each candidate's outputs and last states are compared with it directly:
that sees more than gradients of weights would, in which errors of gates are summed.
"""

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
from ecornn.interpreter import interpret
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
    """Writes :func:`answers` as .npz, under the names of :func:`ecornn.tune.oracle.write`."""
    save(path, *answers(cell, work, np.random.default_rng(seed)))


def answers(cell: Cell, work: Workload, rng: np.random.Generator) -> Answers:
    """For a workload that is an adjoint's: ``x`` (T, B, Q, H), what it reads of each step, of a forward pass over
    random inputs; ``y`` (T, B, O, H), its outputs; its states before and after, in their order; the layer's weights.

    Raises :class:`~ecornn.errors.CellError` where the cell cannot be differentiated, or its gradients are wrong.
    """
    made = adjoint(analyse(cell, work.input, work.hidden), work.hidden)
    made = replace(made, recurrence=recurrence_graph(made))
    given = draw(cell, work, rng)
    shape = work.batch, work.hidden
    sizes = (STEPS, work.batch, made.forward.written * work.hidden), *(shape for _ in cell.states)
    dy, *dstates = (rounded(rng.uniform(-1, 1, size), work.dtype) for size in sizes)
    found = carry_out(made, given.x, given.shaped, given.states, dy, dstates)
    if fault := disagreement(cell, given, (dy, dstates), found, rng):
        raise CellError(f"the gradients that were derived for {cell.identity()} are wrong: {fault}")
    return found.hoisted.astype(np.float32), found.outputs, [*found.first.values()], [*found.last.values()], given.flat


def disagreement(cell: Cell, given: Inputs, upstream: Upstream, found: Backpropagated,
                 rng: np.random.Generator) -> str | None:
    """Which gradient is another than an independent one; None: all agree."""
    if not has_formula(cell):
        return far_from_differences(cell, given, upstream, found, rng)
    from ecornn.numpy_gradients import reference_gradients

    dx, weights, states = reference_gradients(cell.identity(), given.x, given.flat, given.states, dy=upstream[0],
                                              dstate=upstream[1])
    own = {cell.parameter_name(name): value for name, value in found.parameters.items()}
    pairs = chain((("x", found.dx, dx),), ((name, own[name].reshape(value.shape), value) for name, value in
                                           weights.items()), zip(cell.states, found.states, states, strict=True))
    return next((f"of {name}" for name, got, wanted in pairs
                 if not norm(got - wanted) <= EXACT * max(norm(wanted), EXACT)), None)


def far_from_differences(cell: Cell, given: Inputs, upstream: Upstream, found: Backpropagated,
                         rng: np.random.Generator) -> str | None:
    """The input along which the layer has another slope than its gradient says, in every direction that was tried."""
    for name, gradient, moved in shifts(cell, given, found):
        for _ in range(DIRECTIONS):
            direction = rng.uniform(-1, 1, gradient.shape)
            slope = sum(sign * value(cell, moved(sign * SHIFT * direction), upstream) for sign in (1, -1)) / (2 * SHIFT)
            scale = norm(gradient) * norm(direction) / max(direction.size, 1) ** 0.5
            if abs(slope - (gradient * direction).sum()) <= NEAR * scale + EXACT:
                break
        else:
            return f"of {name}"
    return None


def shifts(cell: Cell, given: Inputs,
           found: Backpropagated) -> Iterator[tuple[str, Array, Callable[[Array], Inputs]]]:
    """Of each input its name, its gradient, and the inputs with it moved."""
    yield "x", found.dx, lambda by: replace(given, x=given.x + by)
    for name, gradient in found.parameters.items():
        yield name, gradient, partial(_with_parameter, given, name)
    for n, (name, gradient) in enumerate(zip(cell.states, found.states, strict=True)):
        yield name, gradient, partial(_with_state, given, n)


def _with_parameter(given: Inputs, name: str, by: Array) -> Inputs:
    return replace(given, shaped=given.shaped | {name: given.shaped[name] + by})


def _with_state(given: Inputs, n: int, by: Array) -> Inputs:
    return replace(given, states=[s + by if m == n else s for m, s in enumerate(given.states)])


def value(cell: Cell, given: Inputs, upstream: Upstream) -> float:
    """What ``upstream`` is the gradient of: y and the last states, weighted with it and added up."""
    y, last = interpret(cell, given.x, given.shaped, given.states)
    dy, dstates = upstream
    return float(sum((g * v).sum(dtype=np.float64) for g, v in zip((dy, *dstates), (y, *last), strict=True)))
