"""A training step of cells whose steps lack what most have, or have it in other places, emulated, against a tape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_adjoint
from emulated import task_of
from exact import ALL_CELLS
from test_backward_emulated import Step, check
from test_backward_recurrence_emulated import check_recurrence
from test_persistent_emulated import SMALL
from tvm import te, tirx

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.liveness import late_operands
from ecornn.cells import Cell, mean, pointwise, product
from ecornn.schedules.backward.assemble import recurrence_task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.workload import ALONE, Traversal


class Swap(Cell):
    """States change places: nothing but they has a gradient, and the adjoint's recurrence writes nothing."""

    name, states = "swap", ("h", "c")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        return [states[1], states[0]]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        return {"h": s["c"], "c": s["h"]}, "h"


class Level(Cell):
    """As this one, with what units exchange: their mean."""

    name, states = "level", ("h", "c")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        h, middle = states[0], mean(states[0])
        return [pointwise(lambda b, j: 0.5 * states[1][b, j] + middle[b], h), h]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        return {"h": 0.5 * s["c"] + s["h"].mean(1, keepdims=True), "c": s["h"]}, "h"


class Drift(Cell):
    """A mean of the state beside a product of x, and no product of the state."""

    name, states = "drift", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx, middle = states, product(x, p["W"], 0), mean(states[0])
        return [pointwise(lambda b, j: te.tanh(wx[b, j] + 0.5 * h[b, j] - middle[b]), h)]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        return {"h": np.tanh(x @ p["W"][0].T + 0.5 * s["h"] - s["h"].mean(1, keepdims=True))}, "h"


class Reset(Cell):
    """Spikes that are conditions made numbers, and a membrane that is multiplied by one."""

    name, states = "reset", ("v", "s")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "R": (1, hidden, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        v, wx, rs = states[0], product(x, p["W"], 0), product(states[1], p["R"], 0)
        low, high = (tirx.const(value, "float32") for value in (-0.25, 0.5))
        u = pointwise(lambda b, j: 0.75 * v[b, j] + wx[b, j] + rs[b, j], v)
        quiet = pointwise(lambda b, j: tirx.Cast("float32", tirx.And(u[b, j] > low, u[b, j] <= high)) * u[b, j], v)
        return [quiet, pointwise(lambda b, j: tirx.Cast("float32", u[b, j] > high), v)]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        u = 0.75 * s["v"] + x @ p["W"][0].T + s["s"] @ p["R"][0].T
        value = u.value
        return {"v": u * ((value > -0.25) & (value <= 0.5)), "s": 0.0 * u + (value > 0.5)}, "v"


class Detour(Cell):
    """A product that is multiplied again, two exchanges later: those of narrow matrices are apart, and between."""

    name, states = "detour", ("c", "h")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"D": (1, max(1, hidden // 2), hidden), "E": (1, hidden, max(1, hidden // 2)), "R": (2, hidden, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        c, h = states
        down = product(c, p["D"], 0)
        bent = te.compute(down.shape, lambda b, j: te.tanh(down[b, j]), name="bent")
        twice, back = product(product(h, p["R"], 0), p["R"], 1), product(bent, p["E"], 0)
        return [pointwise(lambda b, j: back[b, j] + c[b, j], h), pointwise(lambda b, j: te.tanh(twice[b, j]), h)]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        return {"c": np.tanh(s["c"] @ p["D"][0].T) @ p["E"][0].T + s["c"],
                "h": np.tanh(s["h"] @ p["R"][0].T @ p["R"][1].T)}, "c"


class Shown(Cell):
    """y and the new state are products, of what takes x: the adjoint multiplies their gradients as they are."""

    name, states, output = "shown", ("h",), "o"

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "R": (2, hidden, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, product(x, p["W"], 0)
        seen = pointwise(lambda b, j: te.tanh(wx[b, j] + h[b, j]), h)
        return [product(seen, p["R"], 0), product(seen, p["R"], 1)]


BARE = {cell.name: cell for cell in (Swap(), Level(), Drift(), Reset(), Detour())}
BOTH = Traversal(lengths=True, resets=True)


@pytest.mark.parametrize("schedule", [Persistent(), LayoutTransform(), FusedStep()], ids=lambda s: s.name)
def test_an_adjoint_that_multiplies_a_gradient_of_y(schedule, tmp_path, monkeypatch):
    monkeypatch.setitem(ALL_CELLS, "shown", Shown())
    layer = task_of("shown", (5, 3, 6, 20), "float32", SMALL, BOTH)
    task = recurrence_task(layer, adjoint(layer.graph, 20))
    assert late_operands(task.graph) and not task.graph.prologue
    check_recurrence(tmp_path, schedule, layer)


@pytest.mark.parametrize(("schedule", "name", "backward", "traversal", "keep"), [
    ("elementwise", "swap", "sequence", BOTH, "states"), ("fused_step", "swap", "sequence", ALONE, "gates"),
    ("fused_step", "level", "rows_0", BOTH, "states"), ("fused_step", "drift", "rows_0", BOTH, "states"),
    ("fused_step", "drift", "rows_0", Traversal(reverse=True), "gates"),
    ("persistent_block", "reset", "persistent", ALONE, "gates"), ("fused_step", "reset", "persistent", BOTH, "states"),
    ("fused_step", "detour", "outer_3", ALONE, "gates")], ids=str)
def test_a_training_step(schedule, name, backward, traversal, keep, tmp_path, monkeypatch):
    monkeypatch.setitem(test_adjoint.OF_STEP, name, BARE[name])
    sizes = (5, 3, 6, 20)
    step = Step(tmp_path, schedule, name, sizes, "float32", traversal, keep)
    assert f"backward_{backward}" in step.program.functions
    check(step, name, sizes, "float32", traversal)
