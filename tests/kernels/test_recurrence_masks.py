"""What directions, lengths and resets of a layer mean to the recurrence of its adjoint, against a tape, in float64.

The layer is written with factors of 0 and 1 here; ``backward_passes.recur`` cuts each row where the layer did.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backward_passes import Sample, recur
from emulated import masks_of
from test_adjoint import B, H, T, adjoint_of, cell_of, close, formula, graph_of, width
from test_adjoint import Sample as Arguments

from ecornn.analysis.evaluate import at, hoist, start, step
from ecornn.numpy_gradients import Traced, backward
from ecornn.schedules.backward.assemble import recurrence_task
from ecornn.schedules.base import Task
from ecornn.targets import KNOWN
from ecornn.workload import Traversal, Workload

CELLS = ("lstm(peepholes)", "gru", "gru_reset_before", "rnn_tanh", "slstm", "pair", "indrnn")


def masks(traversal: Traversal) -> tuple[dict[str, Any], list[tuple[int, Any, Any]]]:
    """Masks of a call; and for each step in the layer's order x's step, the rows that keep their states before it, and
    those that take part, 0 or 1, (B, 1) each."""
    found = masks_of(traversal, T, B)
    lengths, resets = found.get("lengths", np.full(B, T)), found.get("resets", np.zeros((T, B), bool))
    order = []
    for t in range(T)[::-1] if traversal.reverse else range(T):
        border = t + 1 if traversal.reverse else t
        cleared = resets[border] & (border < lengths) if border < T else np.zeros(B, bool)
        order.append((t, 1.0 - cleared[:, None], 1.0 * (t < lengths)[:, None]))
    return found, order


def through(name: str, order: Any, x: Any, states: list[Any], parameters: Any) -> tuple[list[Any], list[Any]]:
    """y of each step in ``order``, and the last states."""
    one, cell, y = formula(name), cell_of(name), []
    for t, keeps, live in order:
        before = [s * keeps for s in states]
        new = one(x[t], before, parameters)
        y.append(new[cell.states.index(cell.output_state())] * live)
        states = [n * live + s * (1.0 - live) for n, s in zip(new, before, strict=True)]
    return y, states


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("masked", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_stop_where_states_did(name: str, masked: tuple[bool, bool], reverse: bool):
    s, graph, made = Arguments(name), graph_of(name), adjoint_of(name)
    layer = Task(Workload(name, H, width(name), B, T), graph, KNOWN["sm_90a"], Traversal(reverse, 1, *masked))
    given, order = masks(layer.traversal)
    traced, states = {n: Traced(p) for n, p in s.parameters.items()}, [Traced(v) for v in s.states]
    y, last = through(name, order, s.x, states, traced)
    backward([*((v, s.dy[t]) for v, (t, _, _) in zip(y, order, strict=True)), *zip(last, s.dstates, strict=True)])
    # the same by the recurrence, of values that a forward pass leaves
    values, now, steps = start(graph, s.parameters), list(s.states), {}
    hoist(graph, s.parameters, values, s.x, (T, B, H))
    for t, keeps, live in order:
        before = [v * keeps for v in now]
        steps[t] = at(values, t, values) | dict(zip(graph.states.values(), before, strict=True))
        step(graph, s.parameters, steps[t], (B, H))
        now = [np.where(live, steps[t][v], old) for v, old in zip(graph.results.values(), before, strict=True)]
    known = {v: np.stack([np.broadcast_to(steps[t][v], (B, H)) for t in range(T)]) for v in made.needed
             if v in steps[0]} | {made.dys[0]: s.dy}
    task = recurrence_task(layer, made)
    values = start(task.graph, s.parameters, known)
    hoist(task.graph, s.parameters, values, None, (T, B, H))
    rows = np.stack([np.broadcast_to(values[v], (T, B, H)) for v in task.graph.hoisted_outputs], 2)
    first = {n: np.zeros((B, H)) for n in task.graph.states}
    first |= {made.first[n]: d for n, d in zip(graph.states, s.dstates, strict=True)}
    outputs, ends = recur(task, Sample(s.parameters, rows.reshape(T * B, -1, H), first), given)
    values = start(made.finish, s.parameters, {v: ends[n] for n, v in task.graph.states.items()})
    step(made.finish, s.parameters, values, (B, H))
    for n, state in zip(graph.states, states, strict=True):
        close(np.broadcast_to(values[made.gradients[n]], (B, H)), state.gradient, n)
    known |= {v: outputs[:, :, o] for o, v in enumerate(task.graph.outputs)}
    found = {n: np.zeros_like(p) for n, p in s.parameters.items()}
    for o in made.recurrence.outer_products:
        found[o.parameter][o.gate] += np.einsum("tbj,tbk->jk", known[o.value], known[o.operand])
    for n in {o.parameter for o in made.recurrence.outer_products}:
        close(found[n], traced[n].gradient, n)
