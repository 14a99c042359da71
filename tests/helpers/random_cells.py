"""Random cells with all that a layer may have, beside ``random_steps.py``, which draws steps alone.

Each is a list of operations that is written once as te and once for NumPy, with a tape. It may have products with
heads, or through narrow matrices, sequences beside x, statistics of groups of units, outputs that are no states, and go
through time from the end, with lengths and resets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from limits import relative
from tape import Call, train
from tvm import te, tirx

from ecornn.cells import Cell, largest, mean, normalized, pointwise, product, softmax
from ecornn.numpy_gradients import Traced, erf
from ecornn.workload import Traversal

EPSILON = 0.1  # of a variance: rows are nearly constant at times
ROUNDING = 1e-7  # relative, of a value and of a gradient where they pass a node
CALM = 4e-6  # relative: what such errors may make of a result
ROWS = ("mean", "largest", "normalized", "softmax")
Array = Any


@dataclass(frozen=True)
class Node:
    """A value (B, H): what is done to earlier ones, by their numbers, and with what: ``product`` a parameter and gate,
    ``rows`` groups of units, ``state`` and ``input`` a number."""

    kind: str
    operands: tuple[int, ...] = ()
    name: str = ""
    number: int = 0


@dataclass(frozen=True)
class Drawn:
    """A step: a cell, sizes (T, B, I, H) of which I counts the cell's inputs, how it goes through time, and a call."""

    cell: Cell
    sizes: tuple[int, int, int, int]
    traversal: Traversal
    call: Call
    wanted: dict[str, Array] = field(compare=False)

    def errors(self, found: dict[str, Array]) -> dict[str, float]:
        """The relative error of each result, by the names of buffers."""
        return {n: relative(found[n].reshape(-1), v.reshape(-1), 1e-6) for n, v in self.wanted.items()}


def draw(seed: int) -> Drawn:
    """The step of a seed: the first of its candidates whose gradients do not depend on how they are rounded, as they do
    beside a threshold, or of a difference of equal values."""
    for attempt in range(100):
        rng = np.random.default_rng([seed, attempt])
        drawn = _candidate(seed, rng)
        if drawn is not None:
            return drawn
    raise AssertionError(f"seed {seed}: no step of a hundred is calm")


def _candidate(seed: int, rng: np.random.Generator) -> Drawn | None:
    steps, batch, hidden, groups, heads = (int(v) for v in (
        rng.integers(1, 7), rng.integers(1, 6), rng.integers(5, 41), rng.integers(2, 4), 1))
    if rng.random() < 0.08:
        hidden, heads = 64, 2
    groups = groups if hidden % groups == 0 else 1
    square = rng.random() < 0.25
    own = hidden if square else int(rng.integers(1, 9))
    cell = RandomCell(f"random{seed}", rng, square, groups, heads)
    width = cell.row_width(own, hidden)
    traversal = Traversal(*(bool(rng.random() < 0.25) if n != "directions" else 1
                            for n in ("reverse", "directions", "lengths", "resets")))

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32).astype(np.float64)

    def uniform(low: float, shape: Sequence[int]) -> Array:
        return rng.uniform(low, 1, shape).astype(np.float32).astype(np.float64)

    parameters = {n: (uniform(-1, s) * hidden ** -0.5).astype(np.float32).astype(np.float64)
                  for n, s in cell.parameters(own, hidden).items()}
    call = Call(normal(steps, batch, width), [uniform(0.1, (batch, hidden)) for _ in cell.states],
                normal(steps, batch, hidden * len(cell.output_names())), [normal(batch, hidden) for _ in cell.states],
                parameters, rng.integers(0, steps + 1, batch).astype(np.int32) if traversal.lengths else None,
                (rng.random((steps, batch)) < 0.4).astype(np.uint8) if traversal.resets else None)
    with np.errstate(all="ignore"):
        wanted = tape(cell, call, traversal.reverse)
        if not all(np.isfinite(v).all() and np.abs(v).max(initial=0) < 1e4 for v in wanted.values()):
            return None
        drawn = Drawn(cell, (steps, batch, width, hidden), traversal, call, wanted)
        for _ in range(3):
            errors = drawn.errors(tape(cell, call, traversal.reverse, rng))
            if not all(error < CALM for error in errors.values()):
                return None
    return drawn


class RandomCell(Cell):
    """A cell of random operations. ``square``: x may be read at [b, j]; ``groups`` of units, and ``heads``, that H is a
    multiple of."""

    def __init__(self, name: str, rng: np.random.Generator, square: bool, groups: int, heads: int) -> None:
        self.name, self.groups, self.heads = name, groups, heads
        self.states = tuple("abcd"[:int(rng.integers(1, 5))])
        self.nodes: list[Node] = []
        self.shapes: dict[str, tuple[int, ...] | tuple[int | str, ...]] = {}
        kinds = _Kinds(self, rng)
        kinds.begin(square)
        for _ in range(int(rng.integers(1, 10))):
            kinds.extend()
        output = ("o",) if (few := rng.random()) < 0.1 else ("o", self.states[0]) if few < 0.2 else ()
        count, last = len(self.states) + bool(output), len(self.nodes)
        self.results = [int(rng.integers(last) if rng.random() < 0.5 else last - 1 - rng.integers(min(3, last)))
                        for _ in range(count)]
        self.used = self._read()
        self.inputs = tuple(n for n in ("u", "w") if any(self.nodes[i] == Node("input", name=n) for i in self.used))
        self.output = output if len(output) > 1 else "".join(output)
        self.unread = tuple(self.shapes)

    def _read(self) -> list[int]:
        found, waiting = set[int](), list(self.results)
        while waiting:
            if (number := waiting.pop()) not in found:
                found.add(number)
                waiting += self.nodes[number].operands
        return sorted(found)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes = {"I": input, "H": hidden, "P": max(1, hidden // 2), "K": hidden // self.heads}
        return {n: tuple(sizes[s] if isinstance(s, str) else s for s in shape) for n, shape in self.shapes.items()}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        values: dict[int, Any] = {}
        for i in self.used:
            node = self.nodes[i]
            values[i] = self._te(node, f"{node.kind}{i}", x, states, p, [values[o] for o in node.operands])
        return [values[i] for i in self.results]

    def _te(self, node: Node, name: str, x: Any, states: Any, p: Any, v: list[Any]) -> Any:
        def at(function: Callable[[Any, Any], Any]) -> Any:
            return pointwise(function, states[0], name)

        if node.kind == "state":
            return states[node.number]
        if node.kind == "x":
            return x
        if node.kind == "input":
            return p[node.name]
        if node.kind == "vector":
            return at(lambda b, j: p[node.name][node.number, j])
        if node.kind == "product":
            return product(v[0] if v else x, p[node.name], node.number, name,
                           self.heads if node.name == "B" else 1)
        if node.kind == "narrow":
            down = product(v[0], p["D"], 0)
            bent = te.compute(down.shape, lambda b, j: te.tanh(down[b, j]), name=f"{name}_bent")
            return product(bent if node.number else down, p["E"], 0, name)
        if node.kind in ROWS:
            if node.kind in ("mean", "largest"):
                row = (mean if node.kind == "mean" else largest)(v[0], groups=node.number)
                return row if node.number > 1 else at(lambda b, j: row[b])
            return normalized(v[0], EPSILON, groups=node.number) if node.kind == "normalized" else softmax(
                v[0], groups=node.number)
        function = functions()[node.kind][0]
        return at(lambda b, j: function(*(value[b, j] for value in v)))

    def formula(self, x: Traced, states: list[Traced], p: dict[str, Traced], rng: Any = None) -> list[Traced]:
        """The step; ``rng``: with values and gradients rounded where they pass a node."""
        values: dict[int, Traced] = {}
        for i in self.used:
            node = self.nodes[i]
            made = self._numpy(node, x, states, p, [values[o] for o in node.operands])
            values[i] = made if rng is None else _rounded(made, rng)
        return [values[i] for i in self.results]

    def _numpy(self, node: Node, x: Any, states: Any, p: Any, v: list[Any]) -> Traced:
        if node.kind == "state":
            return states[node.number]
        if node.kind == "x":
            return x
        if node.kind == "input":
            return p[node.name]
        if node.kind == "vector":
            return p[node.name][node.number] + 0.0 * states[0]
        if node.kind == "product":
            matrix, operand = p[node.name][node.number], v[0] if v else x
            if node.name != "B":
                return operand @ matrix.T
            pairs = zip(np.split(operand, self.heads, axis=1), np.split(matrix, self.heads), strict=True)
            return np.concatenate([part @ block.T for part, block in pairs], axis=1)
        if node.kind == "narrow":
            down = v[0] @ p["D"][0].T
            return (np.tanh(down) if node.number else down) @ p["E"][0].T
        if node.kind in ROWS:
            batch, hidden = v[0].shape
            return _row(node.kind, v[0].reshape(batch * node.number, -1)).reshape(batch, hidden)
        return functions()[node.kind][1](*v)


class _Kinds:
    """Picks the operations of a cell."""

    def __init__(self, cell: RandomCell, rng: np.random.Generator) -> None:
        self.cell, self.rng, self.recurrent = cell, rng, rng.random() < 0.8
        self.of_state, self.varying = set[int](), set[int]()  # what depends on a state; on anything but parameters

    def begin(self, square: bool) -> None:
        cell, rng = self.cell, self.rng
        for number in range(len(cell.states)):
            self.add(Node("state", number=number))
        if rng.random() < 0.85:
            self.parameter("W", (int(rng.integers(1, 4)), "H", "I"), "product")
        if square and rng.random() < 0.7:
            self.add(Node("x"))
        for name in ("u", "w")[:int(rng.integers(1, 3))] if rng.random() < 0.15 else ():
            self.add(Node("input", name=name))
        if rng.random() < 0.6:
            self.parameter("v", (int(rng.integers(1, 3)), "H"), "vector")

    def parameter(self, name: str, shape: tuple[int | str, ...], kind: str) -> None:
        """One, and a node for each gate."""
        self.cell.shapes[name] = shape
        for gate in range(int(shape[0])):
            self.add(Node(kind, name=name, number=gate))

    def add(self, node: Node) -> None:
        number = len(self.cell.nodes)
        self.cell.nodes.append(node)
        for known, own in ((self.of_state, node.kind == "state"), (self.varying, node.kind != "vector")):
            if known.intersection(node.operands) if node.operands else own:
                known.add(number)

    def any(self, among: set[int] | None = None) -> int:
        return int(self.rng.choice(sorted(among) if among else len(self.cell.nodes)))

    def extend(self) -> None:
        rng, shapes, which = self.rng, self.cell.shapes, self.rng.random()
        if which < 0.22 and self.recurrent:
            operand, kind = (self.any(self.of_state),), rng.random()
            if self.cell.heads > 1 and kind < 0.5:
                shapes.setdefault("B", (2, "H", "K"))
                self.add(Node("product", operand, "B", int(rng.integers(2))))
            elif kind < 0.2:
                shapes.setdefault("D", (1, "P", "H"))
                shapes.setdefault("E", (1, "H", "P"))
                self.add(Node("narrow", operand, number=int(rng.integers(2))))
            else:
                name = f"R{rng.integers(2)}"
                shapes.setdefault(name, (2, "H", "H"))
                self.add(Node("product", operand, name, int(rng.integers(2))))
        elif which < 0.32:
            groups = self.cell.groups if rng.random() < 0.5 else 1
            self.add(Node(str(rng.choice(ROWS)), (self.any(self.varying),), number=groups))
        else:
            kind = str(rng.choice(list(functions())))
            self.add(Node(kind, tuple(self.any() for _ in range(functions()[kind][2]))))


def tape(cell: RandomCell, call: Call, reverse: bool, rng: Any = None) -> dict[str, Array]:
    """What a training step makes of a call, by the names of buffers; ``rng``: as of :meth:`RandomCell.formula`."""
    hidden = call.states[0].shape[1]
    own = cell.own_input(call.x.shape[2], hidden)

    def step(row: Traced, states: list[Traced], p: dict[str, Traced]) -> list[Traced]:
        beside = {n: row[:, own + k * hidden:own + (k + 1) * hidden] for k, n in enumerate(cell.inputs)}
        return cell.formula(row[:, :own], states, {**p, **beside}, rng)

    return train(cell, step, call, reverse)


def _rounded(a: Traced, rng: np.random.Generator) -> Traced:
    """The same with small errors, relative to it and to its largest value, of it and of its gradient."""
    def near(v: Array) -> Array:
        size = np.abs(v) + np.abs(v).max(initial=0)
        return v + ROUNDING * size * rng.uniform(-1, 1, v.shape)

    return Traced(near(a.value), [(a, near)])


def _row(kind: str, a: Traced) -> Traced:
    zero, count = 0.0 * a, a.shape[1]
    if kind == "mean":
        return zero + a.mean(1, keepdims=True)
    if kind == "largest":
        most = a.value >= a.value.max(1, keepdims=True)
        return zero + count * (a * (most / most.sum(1, keepdims=True))).mean(1, keepdims=True)
    if kind == "normalized":
        apart = a - a.mean(1, keepdims=True)
        return apart / np.sqrt((apart * apart).mean(1, keepdims=True) + EPSILON)
    power = np.exp(a - a.value.max(1, keepdims=True))
    return power / (count * power.mean(1, keepdims=True))


def _of_one(function: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Callable[[Traced], Traced]:
    return lambda a: Traced(function(a.value), [(a, lambda g: g * slope(a.value))])


def _flat(function: Callable[[Array], Array]) -> Callable[[Traced], Traced]:
    """What has no derivative."""
    return lambda a: Traced(function(a.value).astype(np.float64))


@cache
def functions() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], int]]:
    """Of each name: on te scalars, on arrays with a tape, and of how many values."""
    def f(value: float) -> Any:
        return tirx.const(value, "float32")

    def below(a: Traced, most: float) -> Traced:
        return np.where(a.value <= most, a, Traced(np.full(a.shape, most)))

    def angle(a: Traced, b: Traced) -> Traced:
        y, x = a.value, b.value * b.value + 0.5
        square = x * x + y * y
        return Traced(np.arctan2(y, x), [(a, lambda g: g * x / square),
                                         (b, lambda g: -g * y / square * 2.0 * b.value)])

    of_one: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "tanh": (te.tanh, np.tanh), "sigmoid": (te.sigmoid, lambda a: 1.0 / (1.0 + np.exp(-a))),
        "scale": (lambda a: a * f(0.75), lambda a: a * 0.75), "abs": (te.abs, np.abs),
        "square": (lambda a: a * a * f(0.5), lambda a: a * a * 0.5),
        "relu": (lambda a: tirx.max(a, f(0.0)), lambda a: a * (a.value > 0)),
        "clip": (lambda a: tirx.min(tirx.max(a, f(-0.5)), f(0.5)), lambda a: np.clip(a, -0.5, 0.5)),
        "erf": (te.erf, erf), "sin": (te.sin, _of_one(np.sin, np.cos)),
        "atan": (te.atan, _of_one(np.arctan, lambda v: 1 / (1 + v * v))),
        "exp": (lambda a: te.exp(tirx.min(a, f(1.0))), lambda a: np.exp(below(a, 1.0))),
        "log": (lambda a: te.log(te.abs(a) + f(1.0)), lambda a: np.log(np.abs(a) + 1.0)),
        "log1p": (lambda a: tirx.log1p(te.exp(tirx.min(a, f(3.0)))), lambda a: np.log(1.0 + np.exp(below(a, 3.0)))),
        "sqrt": (lambda a: te.sqrt(a * a + f(0.5)), lambda a: np.sqrt(a * a + 0.5)),
        "rsqrt": (lambda a: te.rsqrt(a * a + f(0.5)), lambda a: 1.0 / np.sqrt(a * a + 0.5)),
        "power": (lambda a: te.power(te.abs(a) + f(0.5), f(1.5)),
                  lambda a: _of_one(lambda v: v ** 1.5, lambda v: 1.5 * v ** 0.5)(np.abs(a) + 0.5)),
        "floor": (lambda a: te.floor(a * f(3.0)), _flat(lambda v: np.floor(v * 3))),
        "round": (lambda a: te.round(a * f(3.0)), _flat(lambda v: np.round(v * 3))),
        "spike": (lambda a: tirx.Select(a > f(0.0), f(1.0), f(0.0)), _flat(lambda v: v > 0)),
        "fires": (lambda a: tirx.Cast("float32", a >= f(0.125)), _flat(lambda v: v >= 0.125)),
        "quiet": (lambda a: tirx.Cast("float32", tirx.And(a > f(-0.25), tirx.Not(a > f(0.5)))) * a,
                  lambda a: a * ((a.value > -0.25) & (a.value <= 0.5)))}
    of_two: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "add": (lambda a, b: a + b, lambda a, b: a + b), "subtract": (lambda a, b: a - b, lambda a, b: a - b),
        "multiply": (lambda a, b: a * b, lambda a, b: a * b),
        "mix": (lambda a, b: a * f(0.875) + b * f(0.125), lambda a, b: a * 0.875 + b * 0.125),
        "maximum": (tirx.max, np.maximum), "minimum": (tirx.min, np.minimum),
        "divide": (lambda a, b: a / (f(1.5) + b * b), lambda a, b: a / (1.5 + b * b)), "atan2": (
            lambda a, b: tirx.atan2(a, b * b + f(0.5)), angle),
        "either": (lambda a, b: tirx.Select(tirx.Or(a <= b, b < f(0.0)), a, f(0.25)),
                   lambda a, b: np.where((a.value <= b.value) | (b.value < 0), a, Traced(np.full(a.shape, 0.25)))),
        "branch": (lambda a, b: tirx.if_then_else(a >= f(0.125), b * f(2.0), a),
                   lambda a, b: np.where(a.value >= 0.125, b * 2.0, a))}
    of_four: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "choose": (lambda a, b, c, d: tirx.Select(a > b, c, d), lambda a, b, c, d: np.where(a.value > b.value, c, d)),
        "both": (lambda a, b, c, d: tirx.Select(tirx.And(a < b, c != d), c, d * f(0.5)),
                 lambda a, b, c, d: np.where((a.value < b.value) & (c.value != d.value), c, d * 0.5))}
    return {name: (*those, count) for count, table in ((1, of_one), (2, of_two), (4, of_four))
            for name, those in table.items()}
