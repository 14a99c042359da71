"""Random steps: cells that no one wrote, each with its formula in NumPy on a tape in float64.

A step is drawn as statements, which are carried out twice, apart from each other: as te, for the compiler, and on
arrays of ``ecornn.numpy_gradients``. ``draw(seed)`` gives a :class:`Drawn`; ``Drawn.sample()`` arguments in which no
comparison, maximum or magnitude is near enough to a tie for float32 to decide otherwise, and whose gradients do not
depend on the last digits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from limits import relative
from tape import Call, train
from tvm import te, tirx

from ecornn.cells import Cell, largest, mean, normalized, pointwise, product, softmax
from ecornn.numpy_gradients import Traced, erf, plain

STEPS, BATCH, INPUT, HIDDEN = 3, 3, 5, 12
PARTS = 2  # heads of a product, groups of a reduction
NEAR = 2e-4  # a tie, for float32
SENSITIVE = 4e-6  # relative, of what rounding every value to float32 changes
Expression = tuple[Any, ...]  # (kind, ...): see ``Drawing.expression``


def _sigmoid(v: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * v))


# operators of one value, by their names in te: the value and the slope in float64
SMOOTH: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tanh": (np.tanh, lambda v: 1 - np.tanh(v) ** 2),
    "sigmoid": (_sigmoid, lambda v: _sigmoid(v) * (1 - _sigmoid(v))),
    "sin": (np.sin, np.cos), "cos": (np.cos, lambda v: -np.sin(v)),
    "atan": (np.arctan, lambda v: 1 / (1 + v * v)),
    "erf": (erf, lambda v: 2 / np.sqrt(np.pi) * np.exp(-v * v))}
# of a value that is at least zero, or at most one; each is written as the operator of a square, or of a tanh
GUARDED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sqrt": (np.sqrt, lambda v: 0.5 / np.sqrt(v)), "rsqrt": (lambda v: v ** -0.5, lambda v: -0.5 * v ** -1.5),
    "log": (np.log, lambda v: 1 / v), "log1p": (np.log1p, lambda v: 1 / (1 + v))}
STEPPED = {"floor": np.floor, "ceil": np.ceil, "round": np.round}
COMPARED = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


class Drawing:
    """The statements of a step: each makes a value (B, H), a condition (B, H), or a number of each row (B,).

        ("x",) ("state", name)              what there is; x is read at the unit, where I = H
        ("wx", gate)                        a product of x
        ("product", source, matrix)         of a value before
        ("row", kind, source)               mean, square (the mean of squares), largest: of all units
        ("whole", kind, source)             normalized, softmax: the same, at each unit
        ("heads", source, matrix)           a product with heads
        ("groups", kind, source)            mean, largest, normalized, softmax of the unit's own group
        ("pointwise", expression)           arithmetic at a unit
    """

    def __init__(self, rng: np.random.Generator, states: int, more: bool = False) -> None:
        self.rng, self.more = rng, more
        self.states = tuple("hcnm"[:states])
        self.statements: list[Expression] = []
        self.rows: list[int] = []  # statements that are values (B, H)
        self.conditions: list[int] = []
        self.numbers: list[int] = []
        self.recurrent: set[int] = set()  # what depends on a state
        self.gates = self.matrices = self.vectors = 0
        for name in self.states:
            self.put(("state", name), self.rows, True)
        if rng.random() < 0.2:
            self.put(("x",), self.rows, False)
        for _ in range(int(rng.integers(0 if rng.random() < 0.1 else 1, 4))):
            self.put(("wx", self.gates), self.rows, False)
            self.gates += 1
        for _ in range(int(rng.integers(1, 7))):
            self.statement()
        self.results = [self.result(name) for name in self.states]
        if more and rng.random() < 0.5:
            self.results.append(self.any(self.rows))  # y, which is no state

    def put(self, statement: Expression, kind: list[int], recurrent: bool) -> int:
        at = len(self.statements)
        self.statements.append(statement)
        kind.append(at)
        if recurrent:
            self.recurrent.add(at)
        return at

    def any(self, among: Any) -> Any:
        among = list(among)
        return among[int(self.rng.integers(len(among)))]

    def statement(self) -> None:
        what = self.rng.random()
        if self.more and self.rng.random() < 0.3:
            if what < 0.5:
                source = self.any(v for v in self.rows if v in self.recurrent)
                self.put(("heads", source, self.matrices), self.rows, True)
                self.matrices += 1
            else:
                source, kind = self.any(self.rows), self.any(("mean", "largest", "normalized", "softmax"))
                self.put(("groups", kind, source), self.rows, source in self.recurrent)
        elif what < 0.3:
            source = self.any(v for v in self.rows if v in self.recurrent)
            self.put(("product", source, self.matrices), self.rows, True)
            self.matrices += 1
        elif what < 0.45:
            source = self.any(self.rows)
            self.put(("row", self.any(("mean", "square", "largest")), source), self.numbers, source in self.recurrent)
        elif what < 0.5:
            source = self.any(self.rows)
            self.put(("whole", self.any(("normalized", "softmax")), source), self.rows, source in self.recurrent)
        elif what < 0.57:
            e = self.condition(1)
            self.put(("pointwise", e), self.conditions, self.reads(e))
        else:
            self.compute(self.expression(2))

    def compute(self, e: Expression) -> int:
        return self.put(("pointwise", e), self.rows, self.reads(e))

    def reads(self, e: Expression) -> bool:
        """Whether an expression depends on a state."""
        if e[0] in ("value", "number", "held"):
            return e[1] in self.recurrent
        return any(self.reads(v) for v in e if isinstance(v, tuple))

    def result(self, name: str) -> int:
        """A new state; most are bounded, so that steps do not add up to what float32 has no digits for."""
        what, state = self.rng.random(), self.states.index(name)
        if what < 0.12:
            return self.any(self.rows)  # a product, a state, or what another state is, too
        if what < 0.16:
            return self.compute(("vector", self.vector()))  # a parameter outright
        if what < 0.4:  # a moving average, perhaps of what others are an average of
            keep = self.any((0.9, 0.5))
            return self.compute(("+", ("*", ("constant", keep), ("value", state)),
                                 ("*", ("constant", 1 - keep), ("value", self.any(self.rows)))))
        if what < 0.6:
            z, new = (("smooth", n, self.expression(1)) for n in ("sigmoid", "tanh"))
            return self.compute(("+", ("*", z, ("value", state)), ("*", ("-", ("constant", 1.0), z), new)))
        return self.compute(("smooth", self.any(("tanh", "sigmoid", "sin")), self.expression(2)))

    def vector(self) -> int:
        if self.vectors == 0 or self.rng.random() < 0.7:
            self.vectors += 1
        return self.vectors - 1

    def leaf(self) -> Expression:
        what = self.rng.random()
        if what < 0.1:
            return ("constant", float(self.any((-1.0, 0.25, 0.5, 1.5))))
        if what < 0.2:
            return ("vector", self.vector())
        if what < 0.35 and self.numbers:
            return ("number", self.any(self.numbers))
        return ("value", self.any(self.rows))

    def expression(self, depth: int) -> Expression:
        if depth == 0:
            return self.leaf()
        what = self.rng.random()
        if what < 0.35:
            return (self.any("+-*"), self.expression(depth - 1), self.expression(depth - 1))
        if what < 0.6:
            return ("smooth", self.any(SMOOTH), self.expression(depth - 1))
        if what < 0.68:
            name, inner = self.any(GUARDED), self.expression(depth - 1)
            return ("guarded", name, ("+", ("constant", 1.0), ("*", inner, inner)))
        if what < 0.73:
            inner = self.expression(depth - 1)
            return ("/", self.expression(depth - 1), ("+", ("constant", 1.0), ("*", inner, inner)))
        if what < 0.76:
            return ("exp", ("smooth", "tanh", self.expression(depth - 1)))
        if what < 0.84:
            return (self.any(("max", "min")), self.moving(), self.expression(depth - 1))
        if what < 0.87:
            return ("abs", self.moving())
        if what < 0.9:
            return ("stepped", self.any(STEPPED), ("*", ("constant", 1.5), self.moving()))
        if what < 0.93:
            return ("cast", self.condition(depth - 1))
        return ("select", self.condition(depth - 1), self.expression(depth - 1), self.expression(depth - 1))

    def condition(self, depth: int) -> Expression:
        what = self.rng.random()
        if self.conditions and what < 0.3:
            return ("held", self.any(self.conditions))
        if depth and what < 0.5:
            return (self.any(("and", "or")), self.condition(depth - 1), self.condition(depth - 1))
        if what < 0.55:
            return ("not", self.condition(0))
        return ("compare", self.any(COMPARED), self.moving(), self.any((("constant", 0.1), self.leaf())))

    def moving(self) -> Expression:
        """A value that is rarely a number which others are, too."""
        return ("-", ("value", self.any(self.rows)), ("constant", float(self.any((0.0371, 0.1713)))))

    def needed(self) -> list[int]:
        """The statements that the new states read."""
        found: set[int] = set()
        waiting: list[Any] = list(self.results)
        while waiting:
            what = waiting.pop()
            if isinstance(what, int):
                if what in found:
                    continue
                found.add(what)
                what = self.statements[what]
                if what[0] in ("product", "heads"):
                    waiting.append(what[1])
                elif what[0] in ("row", "whole", "groups"):
                    waiting.append(what[2])
                elif what[0] == "pointwise":
                    waiting.append(what[1])
            elif what[0] in ("value", "number", "held"):
                waiting.append(what[1])
            else:
                waiting += [v for v in what if isinstance(v, tuple)]
        return sorted(found)


class Te:
    """A step as te."""

    def __init__(self, x: Any, states: Any, p: Any) -> None:
        self.x, self.states, self.p = x, states, p
        self.like = next(iter(states.values()))

    def statement(self, s: Expression, values: dict[int, Any]) -> Any:
        kind, *rest = s
        if kind == "x":
            return self.x
        if kind == "state":
            return self.states[rest[0]]
        if kind == "wx":
            return product(self.x, self.p["W"], rest[0])
        if kind == "product":
            return product(values[rest[0]], self.p[f"R{rest[1]}"], 0)
        if kind == "heads":
            return product(values[rest[0]], self.p[f"R{rest[1]}"], 0, heads=PARTS)
        if kind == "pointwise":
            return pointwise(lambda b, j: self.scalar(rest[0], values, b, j), self.like)
        name, source = rest[0], values[rest[1]]
        if name == "square":
            return mean(pointwise(lambda b, j: source[b, j] * source[b, j], self.like))
        of = {"mean": mean, "largest": largest, "normalized": normalized, "softmax": softmax}[name]
        return of(source, groups=PARTS) if kind == "groups" else of(source)

    def scalar(self, e: Expression, values: dict[int, Any], b: Any, j: Any) -> Any:
        kind, *rest = e
        if kind == "constant":
            return tirx.const(rest[0], "float32")
        if kind in ("value", "held"):
            return values[rest[0]][b, j]
        if kind == "number":
            return values[rest[0]][b]
        if kind == "vector":
            return self.p["v"][rest[0], j]
        v = [self.scalar(a, values, b, j) for a in rest if isinstance(a, tuple)]
        if kind in ("smooth", "guarded", "stepped"):
            return (getattr(te, rest[0], None) or getattr(tirx, rest[0]))(v[0])
        if kind == "compare":
            return COMPARED[rest[0]](*v)
        named: dict[str, Callable[..., Any]] = {
            "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "exp": te.exp,
            "max": tirx.Max, "min": tirx.Min, "abs": te.abs, "select": tirx.Select, "and": tirx.And, "or": tirx.Or,
            "not": tirx.Not, "cast": lambda c: tirx.Cast("float32", c)}
        return named[kind](*v)


class Tape:
    """A step on a tape: values are (B, H), numbers of rows (B, 1). ``margin``: how near to a tie it came."""

    def __init__(self, x: Any, states: Any, p: Any, rounds: bool = False) -> None:
        self.x, self.states, self.p, self.margin, self.rounds = x, states, p, np.inf, rounds
        self.shape = next(iter(states.values())).shape

    def near(self, distance: Any) -> None:
        self.margin = min(self.margin, float(np.min(distance)))

    def rounded(self, v: Any) -> Any:
        """``v``, and its gradient: that of a softmax can cancel, where all units have the same."""
        if self.rounds and isinstance(v, Traced):
            return Traced(v.value.astype(np.float32), [(v, lambda g: g.astype(np.float32))])
        return v

    def statement(self, s: Expression, values: dict[int, Any]) -> Any:
        return self.rounded(self._statement(s, values))

    def _statement(self, s: Expression, values: dict[int, Any]) -> Any:
        kind, *rest = s
        if kind == "x":
            return self.x
        if kind == "state":
            return self.states[rest[0]]
        if kind == "wx":
            return self.x @ self.p["W"][rest[0]].T
        if kind == "product":
            return values[rest[0]] @ self.p[f"R{rest[1]}"][0].T
        if kind == "pointwise":
            value = self.scalar(rest[0], values)
            whole = np.ones(self.shape)
            if isinstance(value, Traced):
                return value * whole
            return np.broadcast_to(value, self.shape) if np.asarray(value).dtype == bool else Traced(value * whole)
        if kind in ("heads", "groups"):
            v, width = values[rest[0 if kind == "heads" else 1]], self.shape[1] // PARTS
            cuts = [slice(n * width, (n + 1) * width) for n in range(PARTS)]
            if kind == "heads":
                return np.concatenate([v[:, c] @ self.p[f"R{rest[1]}"][0][c].T for c in cuts], axis=1)
            return np.concatenate([self.row(rest[0], v[:, c]) * np.ones((1, width)) for c in cuts], axis=1)
        return self.row(rest[0], values[rest[1]])

    def row(self, name: str, v: Any) -> Any:
        """What goes over the units of a row."""
        if name == "mean":
            return v.mean(1, keepdims=True)
        if name == "square":
            return np.square(v).mean(1, keepdims=True)
        if name == "normalized":
            apart = self.rounded(v - v.mean(1, keepdims=True))
            return apart / self.rounded(np.sqrt(np.square(apart).mean(1, keepdims=True) + 1e-5))
        top = v.value.max(axis=1, keepdims=True)
        if name == "softmax":
            power = self.rounded(np.exp(v - top))
            return power / self.rounded(power.mean(1, keepdims=True) * float(v.shape[1]))
        ordered = np.sort(v.value, axis=1)
        self.near(ordered[:, -1] - ordered[:, -2])
        return Traced(top, [(v, lambda g: g * (v.value == top))])

    def scalar(self, e: Expression, values: dict[int, Any]) -> Any:
        return self.rounded(self._scalar(e, values))

    def _scalar(self, e: Expression, values: dict[int, Any]) -> Any:
        kind, *rest = e
        if kind == "constant":
            return np.float64(np.float32(rest[0]))
        if kind in ("value", "held", "number"):
            return values[rest[0]]
        if kind == "vector":
            return self.p["v"][rest[0]]
        v = [self.scalar(a, values) for a in rest if isinstance(a, tuple)]
        if kind in ("smooth", "guarded"):
            (function, slope), value = (SMOOTH | GUARDED)[rest[0]], plain(v[0])
            made = function(value)
            if not isinstance(v[0], Traced):
                return made
            return Traced(made, [(v[0], lambda g: g * slope(value))])
        if kind == "stepped":
            value = plain(v[0])
            between = value * 2 if rest[0] == "round" else value  # halves are ties, too
            self.near(np.abs(between - np.round(between)))
            return STEPPED[rest[0]](value)
        if kind in ("compare", "max", "min", "abs"):
            a, b = plain(v[0]), plain(v[1]) if len(v) > 1 else 0.0
            self.near(np.abs(a - b))
            if kind == "compare":
                return COMPARED[rest[0]](a, b)
        named: dict[str, Callable[..., Any]] = {
            "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "exp": np.exp,
            "max": np.maximum, "min": np.minimum, "abs": np.abs, "and": np.logical_and, "or": np.logical_or,
            "not": np.logical_not, "cast": lambda c: np.asarray(c, np.float64)}
        if kind == "select":
            made = [a if isinstance(a, Traced) else Traced(a) for a in v[1:]]
            shape = np.broadcast_shapes(np.shape(v[0]), *(a.shape for a in made))
            return np.where(v[0], *(a * np.ones(shape) for a in made))
        return named[kind](*v)


class RandomCell(Cell):
    """The cell of a drawing."""

    def __init__(self, name: str, drawing: Drawing) -> None:
        self.name, self.states, self.drawing = name, drawing.states, drawing
        self.output = "y" * (len(drawing.results) > len(drawing.states))
        self.needed = drawing.needed()
        self.statements = [drawing.statements[n] for n in self.needed]
        # gates of W, matrices and vectors that are read count from 0
        number: dict[str, dict[int, int]] = {}
        for e in _parts(self.statements):
            if e[0] in ("wx", "vector"):
                seen = number.setdefault(e[0], {})
                seen.setdefault(e[1], len(seen))
        self.statements = [_renumbered(s, number) for s in self.statements]

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        count = {kind: len({e[1] for e in _parts(self.statements) if e[0] == kind}) for kind in ("wx", "vector")}
        made: dict[str, tuple[int, ...]] = {"W": (count["wx"], hidden, input)} if count["wx"] else {}
        width = {"product": hidden, "heads": hidden // PARTS}
        made |= {f"R{s[2]}": (1, hidden, width[s[0]]) for s in self.statements if s[0] in width}
        return made | ({"v": (count["vector"], hidden)} if count["vector"] else {})

    def carry_out(self, world: Te | Tape) -> list[Any]:
        values: dict[int, Any] = {}
        for n, s in zip(self.needed, self.statements, strict=True):
            values[n] = world.statement(s, values)
        return [values[n] for n in self.drawing.results]

    def step(self, x: Any, states: Any, parameters: Any) -> list[Any]:
        return self.carry_out(Te(x, dict(zip(self.states, states, strict=True)), parameters))

    def formula(self, x: Any, states: dict[str, Any], parameters: Any) -> tuple[dict[str, Any], str]:
        """The step on a tape; the states by name, and the one that is y."""
        made = self.carry_out(Tape(x, states, parameters))
        return dict(zip((*self.states, "y"), made, strict=False)), self.output or self.states[0]


def _parts(of: Any) -> Iterator[Expression]:
    for part in of:
        if isinstance(part, tuple):
            yield part
            yield from _parts(part)


def _renumbered(e: Any, number: dict[str, dict[int, int]]) -> Any:
    if not isinstance(e, tuple):
        return e
    return (e[0], number[e[0]][e[1]]) if e[0] in number else tuple(_renumbered(v, number) for v in e)


@dataclass(frozen=True)
class Drawn:
    """A random step. ``square``: it reads x at the unit, and needs I = H."""

    seed: int
    cell: RandomCell

    @property
    def square(self) -> bool:
        return ("x",) in self.cell.statements

    @property
    def description(self) -> str:
        """The step in lines, ``v<n> = ...``, expressions as tuples."""
        lines = [f"v{n} = {s}" for n, s in zip(self.cell.needed, self.cell.statements, strict=True)]
        new = [f"{s}' = v{n}" for s, n in zip((*self.cell.states, "y"), self.cell.drawing.results, strict=False)]
        return "\n".join([f"{self.cell.name}:", *(f"  {line}" for line in lines + new)])

    def width(self, hidden: int = HIDDEN, input: int = INPUT) -> int:
        """The input size that goes with a hidden size."""
        return hidden if self.square else input

    def sample(self, steps: int = STEPS, batch: int = BATCH, hidden: int = HIDDEN, input: int = INPUT) -> Call:
        """Random arguments that are well conditioned in float32. Raises ValueError where 40 draws give none."""
        for attempt in range(40):
            a = self._arguments(np.random.default_rng([self.seed, attempt]), steps, batch, hidden, input)
            if self._conditioned(a):
                return a
        raise ValueError(f"no well conditioned arguments\n{self.description}")

    def _arguments(self, rng: np.random.Generator, steps: int, batch: int, hidden: int, input: int) -> Call:
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        input, states = self.width(hidden, input), range(len(self.cell.states))
        shapes = self.cell.parameters(input, hidden)
        parameters = {n: (rng.uniform(-1, 1, s) / s[-1] ** 0.5 * (1 if len(s) > 2 else 3)).astype(np.float32)
                      for n, s in shapes.items()}
        x, first = normal(steps, batch, input), [0.5 * normal(batch, hidden) for _ in states]
        return Call(x, first, normal(steps, batch, hidden), [normal(batch, hidden) for _ in states], parameters)

    def _conditioned(self, a: Call) -> bool:
        exact, margin = self._gradients(a, False)
        if margin < NEAR or not all(np.isfinite(v).all() for v in exact.values()):
            return False
        rounded, _ = self._gradients(a, True)
        return all(relative(rounded[n], v, 1e-6) < SENSITIVE for n, v in exact.items())

    def reference(self, a: Call) -> dict[str, np.ndarray]:
        """In float64: y, dx, ``<state>_out``, ``d<state>_in``, ``gradient_<parameter>``."""
        return self._gradients(a, False)[0]

    def _gradients(self, a: Call, rounds: bool) -> tuple[dict[str, np.ndarray], float]:
        margins: list[float] = []

        def step(x: Traced, states: list[Traced], parameters: dict[str, Traced]) -> list[Traced]:
            tape = Tape(x, dict(zip(self.cell.states, states, strict=True)), parameters, rounds)
            made = self.cell.carry_out(tape)
            margins.append(tape.margin)
            return made

        return train(self.cell, step, a), min(margins)


def draw(seed: int, more: bool = False) -> Drawn:
    """A random step, the same for the same seed, of one to four states. ``more``: also with products with heads,
    reductions of groups, and a y that is no state."""
    for attempt in range(40):
        rng = np.random.default_rng([seed, attempt, 48])
        drawing = Drawing(rng, int(rng.choice([1, 2, 3, 4], p=[0.3, 0.35, 0.25, 0.1])), more)
        drawn = Drawn(seed, RandomCell(f"random_step_{seed}", drawing))
        try:
            drawn.sample()
        except ValueError:
            continue
        return drawn
    raise ValueError(f"no well conditioned step of seed {seed}")
