"""Random steps: cells that no one wrote, each with its formula in NumPy on a tape in float64.

A step is drawn as statements, which are carried out twice: as te, and on arrays of ``ecornn.numpy_gradients``.
``Drawn.sample()`` gives arguments in which no comparison is near enough to a tie for float32 to decide otherwise, and
whose gradients do not depend on the last digits."""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from exact import relative
from random_statements import COMPARED, GUARDED, OF_TWO, SMOOTH, STEPPED, Drawing, Expression
from tape import Call, train
from tvm import te, tirx

from ecornn.cells import Cell, largest, mean, normalized, pointwise, product, softmax
from ecornn.numpy_gradients import Traced, plain
from ecornn.workload import ALONE, Traversal

STEPS, BATCH, INPUT, HIDDEN = 3, 3, 5, 12
PARTS = 2  # heads of a product, groups of a reduction
NEAR = 2e-4  # a tie, for float32
SENSITIVE = 4e-6  # relative, of what rounding every value to float32 changes
CANCELLED = 1e-12  # of a result that is smaller, and not zero, its terms cancel: rounding is all that float32 has of it


class Te:
    def __init__(self, x: Any, states: Any, p: Any) -> None:
        self.x, self.p, self.like = x, p, states[0]

    def statement(self, s: Expression, values: dict[int, Any]) -> Any:
        kind, *rest = s
        if kind == "wx":
            return product(self.x, self.p["W"], rest[0])
        if kind == "product":
            return product(values[rest[0]], self.p[f"R{rest[1]}"], 0)
        if kind == "heads":
            return product(values[rest[0]], self.p[f"R{rest[1]}"], 0, heads=PARTS)
        if kind == "narrow":
            down = product(values[rest[0]], self.p["D"], 0)
            return product(pointwise(lambda b, j: te.tanh(down[b, j]), down) if rest[1] else down, self.p["E"], 0)
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
        if kind == "of two":
            return OF_TWO[rest[0]][0](*v)
        if kind == "compare":
            return (COMPARED | {"!=": tirx.NE})[rest[0]](*v)  # a != b is no expression yet
        named: dict[str, Callable[..., Any]] = {
            "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "exp": te.exp,
            "max": tirx.Max, "min": tirx.Min, "abs": te.abs, "select": tirx.Select, "if": tirx.if_then_else,
            "and": tirx.And, "or": tirx.Or, "not": tirx.Not, "cast": lambda c: tirx.Cast("float32", c)}
        return named[kind](*v)


class Tape:
    """A step on a tape: values are (B, H), numbers of rows (B, 1). ``margin``: how near to a tie it came."""

    def __init__(self, x: Any, states: Any, p: Any, rounds: bool = False) -> None:
        self.x, self.p, self.shape, self.margin, self.rounds = x, p, states[0].shape, np.inf, rounds

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
        if kind == "wx":
            return self.x @ self.p["W"][rest[0]].T
        if kind == "product":
            return values[rest[0]] @ self.p[f"R{rest[1]}"][0].T
        if kind == "narrow":
            down = values[rest[0]] @ self.p["D"][0].T
            return (np.tanh(down) if rest[1] else down) @ self.p["E"][0].T
        if kind == "pointwise":
            value, whole = self.scalar(rest[0], values), np.ones(self.shape)
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
        if kind == "of two":
            _, function, *slopes = OF_TWO[rest[0]]
            both = [(a if isinstance(a, Traced) else Traced(a)) * np.ones(self.shape) for a in v]
            at = [a.value for a in both]
            return Traced(function(*at), [(a, lambda g, s=s: g * s(*at)) for a, s in zip(both, slopes, strict=True)])
        if kind == "stepped":
            value = plain(v[0])
            between = value * 2 if rest[0] == "round" else value  # halves are ties, too
            self.near(np.abs(between - np.round(between)))
            return STEPPED[rest[0]](value)
        if kind in ("compare", "max", "min", "abs"):
            a, b = plain(v[0]), plain(v[1]) if len(v) > 1 else 0.0
            self.near(np.abs(a - b))
            if kind == "compare":
                return (COMPARED | {"!=": operator.ne})[rest[0]](a, b)
        named: dict[str, Callable[..., Any]] = {
            "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "exp": np.exp,
            "max": np.maximum, "min": np.minimum, "abs": np.abs, "and": np.logical_and, "or": np.logical_or,
            "not": np.logical_not, "cast": lambda c: np.asarray(c, np.float64)}
        if kind in ("select", "if"):
            made = [a if isinstance(a, Traced) else Traced(a) for a in v[1:]]
            shape = np.broadcast_shapes(np.shape(v[0]), *(a.shape for a in made))
            return np.where(v[0], *(a * np.ones(shape) for a in made))
        return named[kind](*v)


class RandomCell(Cell):
    def __init__(self, name: str, drawing: Drawing) -> None:
        self.name, self.states, self.drawing = name, drawing.states, drawing
        self.output = "y" * (len(drawing.results) > len(drawing.states))
        if self.output and drawing.whole:
            self.output = ("y", self.states[0])
        self.needed = drawing.needed()
        self.statements = [drawing.statements[n] for n in self.needed]
        self.inputs = tuple(s[1] for s in self.statements if s[0] == "input")
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
        if any(s[0] == "narrow" for s in self.statements):
            made |= {"D": (1, hidden // 2, hidden), "E": (1, hidden, hidden // 2)}
        return made | ({"v": (count["vector"], hidden)} if count["vector"] else {})

    def carry_out(self, world: Te | Tape, states: Any) -> list[Any]:
        given = {("x",): world.x, **{("state", n): s for n, s in zip(self.states, states, strict=True)},
                 **{("input", n): world.p[n] for n in self.inputs}}
        values: dict[int, Any] = {}
        for n, s in zip(self.needed, self.statements, strict=True):
            values[n] = given[s] if s in given else world.statement(s, values)
        return [values[n] for n in self.drawing.results]

    def step(self, x: Any, states: Any, parameters: Any) -> list[Any]:
        return self.carry_out(Te(x, states, parameters), states)


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
    seed: int
    cell: RandomCell

    @property
    def square(self) -> bool:
        return ("x",) in self.cell.statements

    @property
    def description(self) -> str:
        lines = [f"v{n} = {s}" for n, s in zip(self.cell.needed, self.cell.statements, strict=True)]
        new = [f"{s}' = v{n}" for s, n in zip((*self.cell.states, "y"), self.cell.drawing.results, strict=False)]
        return "\n".join([f"{self.cell.name}:", *(f"  {line}" for line in lines + new)])

    def width(self, hidden: int = HIDDEN, input: int = INPUT) -> int:
        return hidden if self.square else input

    def sample(self, steps: int = STEPS, batch: int = BATCH, hidden: int = HIDDEN, input: int = INPUT,
               traversal: Traversal = ALONE) -> Call:
        """Random arguments that are well conditioned in float32. Raises ValueError where 40 draws give none."""
        for attempt in range(40):
            rng = np.random.default_rng([self.seed, attempt])
            a = self._arguments(rng, steps, batch, hidden, input)
            if traversal.lengths:
                a = replace(a, lengths=rng.integers(0, steps + 1, batch).astype(np.int32))
            if traversal.resets:
                a = replace(a, resets=(rng.random((steps, batch)) < 0.4).astype(np.uint8))
            if self._conditioned(a, traversal.reverse):
                return a
        raise ValueError(f"no well conditioned arguments\n{self.description}")

    def _arguments(self, rng: np.random.Generator, steps: int, batch: int, hidden: int, input: int) -> Call:
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)
        input, states = self.width(hidden, input), range(len(self.cell.states))
        parameters = {n: (rng.uniform(-1, 1, s) / s[-1] ** 0.5 * (1 if len(s) > 2 else 3)).astype(np.float32)
                      for n, s in self.cell.parameters(input, hidden).items()}
        x = normal(steps, batch, self.cell.row_width(input, hidden))
        first = [0.5 * normal(batch, hidden) for _ in states]
        return Call(x, first, normal(steps, batch, hidden * len(self.cell.output_names())),
                    [normal(batch, hidden) for _ in states], parameters)

    def _conditioned(self, a: Call, reverse: bool) -> bool:
        exact, margin = self._gradients(a, reverse)
        if margin < NEAR or not all(np.isfinite(v).all() for v in exact.values()):
            return False
        if any(0 < np.linalg.norm(v) < CANCELLED for v in exact.values()):
            return False
        with np.errstate(over="ignore", invalid="ignore"):  # of what float32 cannot hold
            rounded, _ = self._gradients(a, reverse, True)
        return all(relative(rounded[n], v, 1e-6) < SENSITIVE for n, v in exact.items())

    def reference(self, a: Call, reverse: bool = False) -> dict[str, np.ndarray]:
        return self._gradients(a, reverse)[0]

    def _gradients(self, a: Call, reverse: bool, rounds: bool = False) -> tuple[dict[str, np.ndarray], float]:
        margins, hidden = list[float](), a.states[0].shape[1]
        own = self.cell.own_input(a.x.shape[2], hidden)
        def step(x: Traced, states: list[Traced], parameters: dict[str, Traced]) -> list[Traced]:
            beside = {n: x[:, own + k * hidden:own + (k + 1) * hidden] for k, n in enumerate(self.cell.inputs)}
            tape = Tape(x[:, :own], states, parameters | beside, rounds)
            made = self.cell.carry_out(tape, states)
            margins.append(tape.margin)
            return made
        return train(self.cell, step, a, reverse), min(margins)


def draw(seed: int, more: bool = False, whole: bool = False) -> Drawn:
    """A random step, the same for the same seed, of one to four states. ``more``: also with products with heads,
    reductions of groups, and a y that is no state. ``whole``: also with products through narrow matrices, sequences
    beside x, and two outputs."""
    for attempt in range(40):
        rng = np.random.default_rng([seed, attempt, 48])
        drawing = Drawing(rng, int(rng.choice([1, 2, 3, 4], p=[0.3, 0.35, 0.25, 0.1])), more, whole)
        drawn = Drawn(seed, RandomCell(f"random_step_{seed}", drawing))
        try:
            drawn.sample()
        except ValueError:
            continue
        return drawn
    raise ValueError(f"no well conditioned step of seed {seed}")


@dataclass(frozen=True)
class Training:
    """A training step: sizes (T, B, I, H), with the cell's inputs in I, a call, and its results by buffers' names."""

    cell: Cell
    sizes: tuple[int, int, int, int]
    traversal: Traversal
    call: Call
    wanted: dict[str, np.ndarray] = field(compare=False)

    def errors(self, found: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {n: relative(found[n].reshape(-1), v.reshape(-1), 1e-6) for n, v in self.wanted.items()}


def training(seed: int, whole: bool = False, head: int = 1) -> Training:
    """A training step of random sizes. ``whole``: of a layer with all that it may have, backwards in time, too.
    ``head``: a head has a multiple of so many units."""
    rng, found, traversal = np.random.default_rng(seed), draw(seed, whole, whole), ALONE
    for _ in range(40):
        steps, batch, input, hidden = (int(v) for v in rng.integers((1, 1, 1, 5), (7, 6, 9, 41)))
        if whole:
            hidden += hidden % PARTS
            if any(s[0] == "heads" for s in found.cell.statements):
                hidden += -hidden % (PARTS * head)
            reverse, lengths, resets = map(bool, rng.random(3) < 0.25)
            traversal = Traversal(reverse, lengths=lengths, resets=resets)
        try:
            a = found.sample(steps, batch, hidden, input, traversal)
        except ValueError:  # the step is ill conditioned at that size
            continue
        return Training(found.cell, (steps, batch, a.x.shape[2], hidden), traversal, a,
                        found.reference(a, traversal.reverse))
    raise ValueError(f"no well conditioned size\n{found.description}")
