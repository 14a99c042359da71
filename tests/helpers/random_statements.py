"""What random steps are drawn as: statements of expressions, and the operators in these."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import te, tirx

from ecornn.numpy_gradients import erf

Expression = tuple[Any, ...]  # (kind, ...): see ``Drawing.expression``


def _sigmoid(v: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * v))


# operators of one value, by their names in te: the value and the slope in float64
SMOOTH: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tanh": (np.tanh, lambda v: 1 - np.tanh(v) ** 2), "sigmoid": (_sigmoid, lambda v: _sigmoid(v) * (1 - _sigmoid(v))),
    "sin": (np.sin, np.cos), "cos": (np.cos, lambda v: -np.sin(v)), "atan": (np.arctan, lambda v: 1 / (1 + v * v)),
    "erf": (erf, lambda v: 2 / np.sqrt(np.pi) * np.exp(-v * v))}
# of a value that is at least zero, or at most one; each is written as the operator of a square, or of a tanh
GUARDED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sqrt": (np.sqrt, lambda v: 0.5 / np.sqrt(v)), "rsqrt": (lambda v: v ** -0.5, lambda v: -0.5 * v ** -1.5),
    "log": (np.log, lambda v: 1 / v), "log1p": (np.log1p, lambda v: 1 / (1 + v))}
STEPPED = {"floor": np.floor, "ceil": np.ceil, "round": np.round}
COMPARED = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}
# of two values, of layers with all that they may have: on te scalars, the value in float64, and both slopes
OF_TWO: dict[str, tuple[Callable[[Any, Any], Any], ...]] = {
    "atan2": (lambda a, b: tirx.atan2(a, b * b + 0.5), lambda a, b: np.arctan2(a, b * b + 0.5),
              lambda a, b: (b * b + 0.5) / (a * a + (b * b + 0.5) ** 2),
              lambda a, b: -2 * a * b / (a * a + (b * b + 0.5) ** 2)),
    "power": (lambda a, b: b * te.power(a * a + 0.5, tirx.const(0.75, "float32")),
              lambda a, b: b * (a * a + 0.5) ** 0.75,
              lambda a, b: 1.5 * a * b * (a * a + 0.5) ** -0.25, lambda a, b: (a * a + 0.5) ** 0.75)}


class Drawing:
    """The statements of a step: each makes a value (B, H), a condition (B, H), or a number of each row (B,).

        ("x",) ("state", name)              what there is; x is read at the unit, where I = H
        ("wx", gate)                        a product of x
        ("product", source, matrix)         of a value before
        ("row", kind, source)               mean, square (the mean of squares), largest: of all units
        ("whole", kind, source)             normalized, softmax: the same, at each unit
        ("heads", source, matrix)           a product with heads
        ("groups", kind, source)            mean, largest, normalized, softmax of the unit's own group
        ("narrow", source, bent)            products to half as many values, and back; between them perhaps a tanh
        ("input", name)                     a sequence beside x
        ("pointwise", expression)           arithmetic at a unit"""

    def __init__(self, rng: np.random.Generator, states: int, more: bool = False, whole: bool = False) -> None:
        self.rng, self.more, self.whole = rng, more, whole
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
        for name in ("u", "w")[:int(rng.integers(3))] if whole else ():
            self.put(("input", name), self.rows, False)
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
        if self.whole and self.rng.random() < 0.1:
            source = self.any(v for v in self.rows if v in self.recurrent)
            self.put(("narrow", source, what < 0.5), self.rows, True)
        elif self.more and self.rng.random() < 0.3:
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
        if self.whole and self.rng.random() < 0.15:
            name = self.any((*OF_TWO, "if"))
            first = self.condition(depth - 1) if name == "if" else self.expression(depth - 1)
            rest = (self.expression(depth - 1) for _ in range(1 + (name == "if")))
            return (name, first, *rest) if name == "if" else ("of two", name, first, *rest)
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
        among = {**COMPARED, "!=": None} if self.whole else COMPARED
        return ("compare", self.any(among), self.moving(), self.any((("constant", 0.1), self.leaf())))

    def moving(self) -> Expression:
        """A value that is rarely a number which others are, too."""
        return ("-", ("value", self.any(self.rows)), ("constant", float(self.any((0.0371, 0.1713)))))

    def needed(self) -> list[int]:
        found: set[int] = set()
        waiting: list[Any] = list(self.results)
        while waiting:
            what = waiting.pop()
            if isinstance(what, int):
                if what in found:
                    continue
                found.add(what)
                what = self.statements[what]
                if what[0] in ("product", "heads", "narrow"):
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
