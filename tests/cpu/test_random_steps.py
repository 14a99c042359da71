"""Random steps trained on a CPU: results and gradients against a tape in float64, and never an error without a type.

    ECORNN_RANDOM=1000:2000 pytest -n 0 -s -m exhaustive tests/cpu/test_random_steps.py    # prints figures"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import Layer, build, compare
from pairwise import seeds
from random_steps import BATCH, HIDDEN, INPUT, STEPS, Training, draw, training
from step_cells import Formula, normal
from tvm import te

from ecornn.analysis.operators import OPERATORS
from ecornn.cells import largest, normalized, pointwise, product
from ecornn.errors import EcornnError, InternalError
from ecornn.workload import ALONE, Traversal

# a product that is a state, among others; a parameter that is one; a maximum of hoisted values that the step reads; a
# comparison as a number; new states of states that others have a part of; a parameter that is a state and a factor
SEEDS = (2, 3, 7, 16, 17, 38, 1352)
LATE = (1514, 1574)  # a state is multiplied in the last of several phases, where its new values are stored
MANY = seeds(range(1000, 2000))
TOGETHER = 10  # layers in a module
KEEP = ("gates", "states")
MASKED = Traversal(lengths=True, resets=True, reverse=True)


class Averages(Formula):
    name, states, shapes = "averages", ("f", "g"), {"W": (1, "I")}

    def step(self, x, states, p):
        (f, g), wx = states, product(x, p["W"], 0)
        return [pointwise(lambda b, j: 0.9 * f[b, j] + 0.1 * wx[b, j], f),
                pointwise(lambda b, j: 0.5 * g[b, j] + 0.5 * wx[b, j], f)]

    def numpy(self, x, f, g, W):
        wx = x @ W[0].T
        return 0.9 * f + 0.1 * wx, 0.5 * g + 0.5 * wx


class Projected(Formula):
    name, states, shapes = "projected", ("h", "a", "b", "c"), {"W": (1, "I"), "R": (1, "H"), "v": (1,)}

    def step(self, x, states, p):
        (h, a, b, c), wx, v = states, product(x, p["W"], 0), p["v"]
        rb = product(b, p["R"], 0)
        return [pointwise(lambda i, j: 0.5 * h[i, j] * c[i, j] + rb[i, j], h), wx,
                pointwise(lambda i, j: v[0, j], h), a]

    def numpy(self, x, h, a, b, c, W, R, v):
        return 0.5 * h * c + b @ R[0].T, x @ W[0].T, v[0] + 0.0 * h, a


class Peak(Formula):
    """The largest product of x; ``peaks``: beside a recurrent product; ``top``: of what is normalized, alone."""

    states = ("h",)

    def __init__(self, name: str = "peak") -> None:
        self.name, self.shapes = name, {"W": (1, "I")} | ({"R": (1, "H")} if name == "peaks" else {})

    def step(self, x, states, p):
        (h,), wx = states, product(x, p["W"], 0)
        if self.name == "top":
            top = largest(normalized(wx))
            return [pointwise(lambda b, j: te.tanh(h[b, j] * top[b]), h)]
        top, rh = largest(wx), product(h, p["R"], 0) if "R" in p else h
        return [pointwise(lambda b, j: te.tanh(rh[b, j] * top[b] + wx[b, j]), h)]

    def numpy(self, x, h, W, R=None):
        wx = x @ W[0].T
        if self.name == "top":
            (wx,) = normal(wx)
        top = wx[np.arange(len(wx.value)), wx.value.argmax(axis=1)].reshape(-1, 1)
        return (np.tanh((h if R is None else h @ R[0].T) * top + (0.0 if self.name == "top" else 1.0) * wx),)


class Step:
    def __init__(self, seed: int, keep: str, training: Training) -> None:
        (steps, batch, width, hidden), self.seed, self.training = training.sizes, seed, training
        self.layer = Layer(training.cell, width, hidden, batch, steps, training.traversal, keep=keep)

    def errors(self) -> dict[str, float]:
        off = self.training.errors(self.layer(self.training.call))
        return {n: e for n, e in off.items() if not e < (1e-5 if n == "y" or n.endswith("_out") else 2e-5)}


def any_step(seed: int, more: bool | None = None) -> Step:
    """A whole layer for every fourth seed, else a step; a third of these have ``more``."""
    if more is None and seed % 4 == 3:
        return Step(seed, KEEP[seed // 4 % 2], training(seed, whole=True))
    drawn = draw(seed, more=seed % 4 == 2 if more is None else more)
    a, sizes = drawn.sample(), (STEPS, BATCH, drawn.width(), HIDDEN)
    return Step(seed, KEEP[seed % 2], Training(drawn.cell, sizes, ALONE, a, drawn.reference(a)))


def test_steps_that_share_values_and_states_that_are_products_train(tmp_path: Path):
    steps = [any_step(seed, more=False) for seed in SEEDS] + [any_step(seed) for seed in LATE]
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
