"""Random steps trained on a CPU: results and gradients against a tape in float64, and never an error without a type.

    ECORNN_RANDOM=1000:2000 pytest -n 0 -s -m exhaustive tests/cpu/test_random_steps.py    # prints figures
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_cells
from cpu_training_sample import Layer, build, compare
from limits import relative
from pairwise import seeds
from random_steps import BATCH, HIDDEN, INPUT, STEPS, Drawn, draw
from tape import Call
from tvm import te

from ecornn.analysis.operators import OPERATORS
from ecornn.cells import Cell, largest, pointwise, product
from ecornn.errors import EcornnError, InternalError
from ecornn.workload import Traversal

# a product that is a state, among others; a parameter that is one; a maximum of hoisted values that the step reads; a
# comparison as a number; new states of states that others have a part of; a parameter that is a state and a factor
SEEDS = (2, 3, 7, 16, 17, 38, 1352)
LATE = (1514, 1574)  # a state is multiplied in the last of several phases, where its new values are stored
MANY = seeds(range(1000, 2000))
TOGETHER = 10  # layers in a module
MASKED = Traversal(lengths=True, resets=True, reverse=True)


class Averages(Cell):
    """Two moving averages of one product: the gradient of each goes on by itself."""

    name, states = "averages", ("f", "g")

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input)}

    def step(self, x, states, p):
        (f, g), wx = states, product(x, p["W"], 0)
        return [pointwise(lambda b, j: 0.9 * f[b, j] + 0.1 * wx[b, j], f),
                pointwise(lambda b, j: 0.5 * g[b, j] + 0.5 * wx[b, j], f)]

    @staticmethod
    def formula(x, s, p):
        wx = x @ p["W"][0].T
        return {"f": 0.9 * s["f"] + 0.1 * wx, "g": 0.5 * s["g"] + 0.5 * wx}, "f"


class Projected(Cell):
    """A state that is a product of x, one that is a parameter, and one that is the state before."""

    name, states = "projected", ("h", "a", "b", "c")

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input), "R": (1, hidden, hidden), "v": (1, hidden)}

    def step(self, x, states, p):
        (h, a, b, c), wx, v = states, product(x, p["W"], 0), p["v"]
        rb = product(b, p["R"], 0)
        return [pointwise(lambda i, j: 0.5 * h[i, j] * c[i, j] + rb[i, j], h), wx,
                pointwise(lambda i, j: v[0, j], h), a]

    @staticmethod
    def formula(x, s, p):
        return {"h": 0.5 * s["h"] * s["c"] + s["b"] @ p["R"][0].T, "a": x @ p["W"][0].T,
                "b": p["v"][0] + 0.0 * s["h"], "c": s["a"]}, "h"


class Peak(Cell):
    """The largest product of x, which the step reads as it is."""

    name, states = "peak", ("h",)

    def parameters(self, input, hidden):
        return {"W": (1, hidden, input)}

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"], 0)
        top = largest(wx)
        return [pointwise(lambda b, j: te.tanh(h[b, j] * top[b] + wx[b, j]), h)]

    @staticmethod
    def formula(x, s, p):
        wx = x @ p["W"][0].T
        value = wx.value
        top = wx[np.arange(len(value)), value.argmax(axis=1)].reshape(-1, 1)
        return {"h": np.tanh(s["h"] * top + wx)}, "h"


@dataclass(frozen=True)
class Step:
    """A training step of a random cell: its layer on a CPU, a call, and what must come of it."""

    seed: int
    layer: Layer
    call: Call
    wanted: dict[str, np.ndarray]

    def errors(self) -> dict[str, float]:
        """What is beyond its limit, relative to the tape."""
        found = self.layer(self.call)
        off = {n: relative(found[n], v.reshape(found[n].shape), 1e-6) for n, v in self.wanted.items()}
        return {n: e for n, e in off.items() if not e < (1e-5 if n == "y" or n.endswith("_out") else 2e-5)}


def step_of(drawn: Drawn) -> Step:
    a, keep = drawn.sample(), ("gates", "states")[drawn.seed % 2]
    return Step(drawn.seed, Layer(drawn.cell, drawn.width(), HIDDEN, BATCH, STEPS, keep=keep),
                a, drawn.reference(a))


def any_step(seed: int) -> Step:
    """Of every fourth seed a cell of ``random_cells.py``, with masks, of others a step of ``random_steps.py``, a third
    of these with heads and groups, too."""
    if seed % 4 != 3:
        return step_of(draw(seed, more=seed % 4 == 2))
    drawn, keep = random_cells.draw(seed), ("gates", "states")[seed // 4 % 2]
    steps, batch, width, hidden = drawn.sizes
    return Step(seed, Layer(drawn.cell, width, hidden, batch, steps, drawn.traversal, keep=keep), drawn.call,
                drawn.wanted)


def test_steps_that_share_values_and_states_that_are_products_train(tmp_path: Path):
    """Also with lengths, resets, backwards in time, and a chunk after another."""
    steps = [step_of(draw(seed)) for seed in SEEDS] + [any_step(seed) for seed in LATE]
    own = [Layer(Averages(), INPUT, HIDDEN, 130, 5), Layer(Projected(), INPUT, HIDDEN, BATCH, 7, MASKED),
           Layer(Peak(), INPUT, HIDDEN, BATCH, 7)]
    build(tmp_path, *(step.layer for step in steps), *own)
    for step in steps:
        assert not step.errors(), step
    for layer in own:
        compare(layer, layer.arguments(layer.seq, layer.batch))


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_many_random_steps(tmp_path: Path):
    found: dict[str, list[Any]] = defaultdict(list)
    waiting: list[Step] = []

    def kind_of(error: Exception) -> str:
        """An error of ecornn that names an operator, or a sum of parameters alone, is a reason."""
        named = "depends on neither x nor a state" in str(error) or any(name in str(error) for name in OPERATORS)
        meant = isinstance(error, EcornnError) and not isinstance(error, InternalError)
        return "refused" if meant and named else "untyped"

    def run(some: list[Step]) -> None:
        try:
            build(tmp_path, *(step.layer for step in some))
        except Exception as error:
            if len(some) == 1:
                found[kind_of(error)].append((some[0].seed, repr(error)[:200]))
            else:
                for one in some:
                    run([one])
            return
        for step in some:
            off = step.errors()
            found["wrong" if off else "trained"].append((step.seed, off))
            print(step.seed, off or "", flush=True)

    for seed in MANY:
        try:
            waiting.append(any_step(seed))
        except Exception as error:
            found[kind_of(error)].append((seed, repr(error)[:200]))
            print(seed, kind_of(error), repr(error)[:200], flush=True)
        if len(waiting) == TOGETHER or seed == MANY[-1]:
            if waiting:
                run(waiting)
            waiting = []
    print(f"{len(MANY)} random steps: " + ", ".join(f"{len(found[k])} {k}" for k in ("trained", "refused", "wrong",
                                                                               "untyped")))
    assert not found["wrong"] and not found["untyped"], dict(found["wrong"]) | dict(found["untyped"])
    assert len(found["refused"]) <= len(MANY) // 100, found["refused"]


def test_the_generator_is_the_same_each_time_and_has_every_kind_of_value():
    kinds: set[str] = set()
    for seed in range(60):
        drawn = draw(seed)
        assert seed > 5 or drawn.description == draw(seed).description
        kinds |= {part for statement in drawn.cell.statements for part in _kinds(statement)}
        a = drawn.sample()
        assert all(np.isfinite(v).all() for v in drawn.reference(a).values())
    assert kinds >= {"x", "wx", "product", "mean", "square", "largest", "normalized", "softmax", "select", "compare",
                     "max", "min", "abs", "cast", "vector", "constant", "held", "floor", "log1p", "erf", "and", "not"}


def _kinds(e: Any) -> set[str]:
    return {v for part in e for v in ([part] if isinstance(part, str) else _kinds(part) if isinstance(part, tuple)
                                      else ())}
