"""A cell's te step as Python that calls PyTorch, as a user of PyTorch writes a cell: an operation a line.

From the te graph as the cell wrote it, never from its analysis: what runs beside kernels shares nothing with them.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ecornn.bench.torch_operators import BINARY, CLAMP, FUNCTIONS, NUMBERS
from ecornn.cells import Cell
from ecornn.errors import CellError
from ecornn.interpreter import BINARY as NUMPY_BINARY
from ecornn.interpreter import FUNCTIONS as NUMPY_FUNCTIONS
from ecornn.interpreter import Step, factors

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.te import Tensor
    from tvm.tirx import Var

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Term:
    """A tensor of the program, by its name; ``fixed``: made of parameters alone, and so the same in every step."""

    name: str
    shape: Shape
    fixed: bool


Value = Term | np.ndarray  # an array is known before anything runs


@dataclass(frozen=True)
class TorchStep:
    """``source`` defines ``prepare(parameters)``, what steps need of the parameters alone, once a sequence, and
    ``step(x, states, prepared)``, the new states and other outputs behind them; x (B, I) has the cell's inputs behind
    it. Parameters are in te shape, in the cell's order. ``constants`` are arrays that the source names."""

    source: str
    constants: Mapping[str, np.ndarray]

    def made(self, device: str, dtype: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Both functions, for tensors of a device and a data type."""
        import torch

        def tensor(value: np.ndarray) -> Any:
            found = torch.from_numpy(np.ascontiguousarray(value)).to(device)
            return found.to(dtype) if found.is_floating_point() else found

        names: dict[str, Any] = {"torch": torch, "kind": dtype}
        names |= {name: tensor(value) for name, value in self.constants.items()}
        exec(compile(self.source, "<te step>", "exec"), names)
        return names["prepare"], names["step"]


def torch_step(cell: Cell, input: int, hidden: int, batch: int) -> TorchStep:
    """The step for rows of ``input`` values, the cell's inputs among them. Raises :class:`~ecornn.errors.CellError` for
    an operation that is not known here."""
    return _Writer(Step(cell, (batch, input), (batch, hidden))).written()


@dataclass
class _Writer:
    """Writes the lines; values with axes have a dimension for each, of one entry where they do not depend on it."""

    step: Step
    lines: dict[str, Term] = field(default_factory=dict)  # code -> what it makes; each line once
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    known: dict[Any, Value] = field(default_factory=dict)
    flattened: dict[str, Term] = field(default_factory=dict)  # what is a reshaped one of another

    def written(self) -> TorchStep:
        of, parameters = self.step, []
        width = of.own
        rows, hidden = (int(n) for n in of.states[0].shape)
        x = Term("x", (rows, width), False)
        self.given(of.x, self.line(f"x[:, :{width}]", x.shape, [x]) if of.inputs else x)
        for n, tensor in enumerate(of.inputs):
            at = width + n * hidden
            self.given(tensor, self.line(f"x[:, {at}:{at + hidden}]", (rows, hidden), [x]))
        for n, tensor in enumerate(of.states):
            self.given(tensor, Term(f"s{n}", (rows, hidden), False))
        for n, tensor in enumerate(of.parameters.values()):
            parameters.append(f"p{n}")
            self.given(tensor, Term(f"p{n}", tuple(int(s) for s in tensor.shape), True))
        results = [self.named(self.tensor(tensor)) for tensor in of.results]
        lines = self.needed(results)
        late = [f"    {t.name} = {code}" for code, t in lines.items() if not t.fixed]
        read = words(" ".join([*late, *results]))
        early = [f"    {t.name} = {code}" for code, t in lines.items() if t.fixed]
        passed = [name for name in (*parameters, *(t.name for t in lines.values() if t.fixed)) if name in read]
        states = [f"s{n}" for n in range(len(of.states))]
        return TorchStep("\n".join([
            "def prepare(parameters):", f"    {_tuple(parameters)} = parameters", *early,
            f"    return {_tuple(passed)}", "", "", "def step(x, states, prepared):",
            f"    {_tuple(states)} = states", f"    {_tuple(passed)} = prepared", *late,
            f"    return {_tuple(results)}", ""]), self.constants)

    def needed(self, results: Sequence[str]) -> dict[str, Term]:
        """The lines that these come of."""
        names, found = set(results), dict[str, Term]()
        for code, term in reversed(self.lines.items()):
            if term.name in names:
                found[code] = term
                names |= words(code)
        return dict(reversed(found.items()))

    def given(self, tensor: Tensor, value: Value) -> None:
        self.known[tensor.op, 0] = value

    def line(self, code: str, shape: Shape, of: Sequence[Value]) -> Term:
        """A line that makes ``code`` of these values; an earlier one that does the same serves."""
        if code not in self.lines:
            fixed = all(not isinstance(v, Term) or v.fixed for v in of)
            self.lines[code] = Term(f"v{len(self.lines)}", shape, fixed)
        return self.lines[code]

    def constant(self, value: np.ndarray) -> str:
        """The name of an array."""
        for name, other in self.constants.items():
            if other.dtype == value.dtype and np.array_equal(other, value):
                return name
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def named(self, value: Value) -> str:
        """A value in code, as a tensor."""
        return value.name if isinstance(value, Term) else self.constant(value)

    def written_as(self, value: Value) -> str:
        """The same, a number where it is one."""
        return repr(value.item()) if isinstance(value, np.ndarray) and value.size == 1 else self.named(value)

    def tensor(self, tensor: Tensor) -> Value:
        """All values of a tensor."""
        key = tensor.op, tensor.value_index
        if key not in self.known:
            if type(tensor.op).__name__ != "ComputeOp":
                raise CellError(f"PyTorch has nothing for {tensor.op.name}, a {type(tensor.op).__name__}")
            self.known[key] = self.compute(tensor.op, tensor.op.body[tensor.value_index])
        return self.known[key]

    def compute(self, op: Any, body: Expr) -> Value:
        """``body`` at all places of the operation's axes."""
        reduction = type(body).__name__ == "Reduce"
        axes = [*op.axis, *(body.axis if reduction else ())]
        extents = tuple(int(axis.dom.extent) for axis in axes)
        places = {axis.var: int(axis.dom.min) + np.arange(extents[n]).reshape(
            [extents[n] if m == n else 1 for m in range(len(axes))]) for n, axis in enumerate(axes)}
        shape = extents[:len(op.axis)]
        if not reduction:
            return self.expanded(self.value(body, places), shape)
        start, combined = self.step.parts(op.name, body)
        if type(body.combiner.result[body.value_index]).__name__ == "Max":
            whole = self.expanded(self.value(combined, places), extents)
            over = _tuple(map(str, range(len(shape), len(extents))))
            return self.line(f"torch.amax({self.named(whole)}, {over})", shape, [whole])
        found = self.product([self.value(f, places) for f in factors(combined)], extents, len(shape))
        begin = None if start is None else self.value(start, places)
        if begin is not None and (isinstance(begin, Term) or begin.any()):
            found = self.line(f"{self.named(found)} + {self.written_as(begin)}", found.shape, [found, begin])
        return self.expanded(found, shape)

    def expanded(self, value: Value, shape: Shape) -> Value:
        """With as many entries along each axis as it has."""
        if value.shape == shape:
            return value
        if isinstance(value, np.ndarray):
            return np.broadcast_to(value, shape)
        return self.line(f"{value.name}.expand({_tuple(map(str, shape))})", shape, [value])

    def product(self, values: Sequence[Value], extents: Shape, kept: int) -> Value:
        """The product of ``values``, summed over the axes behind ``kept``: (the kept extents, one entry for those that
        no value depends on)."""
        shared = [any(v.shape[n] > 1 for v in values) for n in range(len(extents))]
        alike = float(np.prod([n for i, n in enumerate(extents) if i >= kept and not shared[i]]))
        numbers = [v for v in values if isinstance(v, np.ndarray) and v.size == 1]
        factor = float(np.prod([v.item() for v in numbers])) * alike
        others = [v for v in values if not any(v is n for n in numbers)]
        own = [tuple(n for n, size in enumerate(v.shape) if size > 1) for v in others]
        operands = [self.flat(v, tuple(v.shape[n] for n in axes)) for v, axes in zip(others, own, strict=True)]
        out = tuple(n for n in range(kept) if shared[n])
        made = self.linear(operands, own, out) or self.einsum(operands, own, out)
        found = self.flat(made, tuple(e if shared[n] else 1 for n, e in enumerate(extents[:kept])))
        return found if factor == 1 else self.line(f"{self.named(found)} * {factor!r}", found.shape, [found])

    def linear(self, operands: Sequence[Value], own: Sequence[Shape], out: Shape) -> Value | None:
        """Rows times a matrix, as ``torch.nn`` multiplies; None where that is not what it is."""
        for n, m in ((0, 1), (1, 0)) if len(own) == 2 else ():
            rows, matrix = own[n], own[m]
            if len(rows) in (1, 2) and rows[-1] in matrix[-1:] and rows[-1] not in out and (
                    out == (*rows[:-1], *matrix[:-1])):
                units, width = operands[m].shape[:-1], operands[m].shape[-1]
                flat = self.flat(operands[m], (math.prod(units), width))
                made = self.line(f"torch.nn.functional.linear({self.named(operands[n])}, {self.named(flat)})",
                                 (*operands[n].shape[:-1], math.prod(units)), [operands[n], flat])
                return self.flat(made, (*operands[n].shape[:-1], *units))
        return None

    def einsum(self, operands: Sequence[Value], own: Sequence[Shape], out: Shape) -> Value:
        """Any other sum of products."""
        axes, shape = string.ascii_letters, {n: s for v, o in zip(operands, own, strict=True)
                                             for n, s in zip(o, v.shape, strict=True)}
        sums = f"{','.join(''.join(axes[n] for n in o) for o in own)}->{''.join(axes[n] for n in out)}"
        return self.line(f"torch.einsum({sums!r}, {', '.join(map(self.named, operands))})",
                         tuple(shape[n] for n in out), operands)

    def flat(self, value: Value, shape: Shape) -> Value:
        """With axes of one entry left out or added, or neighbouring ones as one."""
        if tuple(value.shape) == shape:
            return value
        if isinstance(value, np.ndarray):
            return value.reshape(shape)
        value = self.flattened.get(value.name, value)
        if value.shape == shape:
            return value
        found = self.line(f"{value.name}.reshape({_tuple(map(str, shape))})", shape, [value])
        self.flattened[found.name] = value
        return found

    def value(self, e: Expr, places: Mapping[Var, np.ndarray]) -> Value:
        """An expression at all ``places`` of its axes."""
        kind = type(e).__name__
        if kind == "Var":
            return places[e]
        if kind in ("FloatImm", "IntImm"):
            return np.full((1,) * len(places), e.value)
        if kind == "Call" and e.op.name == "te.tensor_load":
            return self.load(self.tensor(e.args[0]), [self.value(i, places) for i in e.args[1:]], len(places))
        if kind == "Cast":
            return self.cast(self.value(e.value, places), str(e.ty))
        if kind == "Not":
            return self.applied("torch.logical_not({0})", np.logical_not, [self.value(e.a, places)])
        if kind == "Select":
            arguments = [self.value(c, places) for c in (e.condition, e.true_value, e.false_value)]
            return self.chosen(arguments)
        if kind in BINARY:
            arguments = [self.value(e.a, places), self.value(e.b, places)]
            number = [isinstance(a, np.ndarray) and a.size == 1 for a in arguments]
            if kind in CLAMP and any(number) and not all(number):
                return self.applied(CLAMP[kind], NUMPY_BINARY[kind], arguments[::-1] if number[0] else arguments, True)
            return self.applied(BINARY[kind], NUMPY_BINARY[kind], arguments, kind in NUMBERS - {*CLAMP})
        name = (e.op.name if kind == "Call" else kind).rsplit(".", 1)[-1]
        if kind != "Call" or name not in FUNCTIONS:
            raise CellError(f"the cell uses {name}, for which no operation of PyTorch is known here")
        arguments = [self.value(a, places) for a in e.args]
        if name == "if_then_else":
            return self.chosen(arguments)
        return self.applied(FUNCTIONS[name], NUMPY_FUNCTIONS[name], arguments, name in NUMBERS)

    def chosen(self, arguments: Sequence[Value]) -> Value:
        """One of two values; of two numbers PyTorch would make its default type."""
        numbers = any(not isinstance(a, np.ndarray) or a.size > 1 for a in arguments[1:])
        return self.applied(FUNCTIONS["if_then_else"], np.where, arguments, numbers)

    def applied(self, code: str, known: Callable[..., Any], arguments: Sequence[Value], numbers: bool = False) -> Value:
        """An operator; at once where all is known."""
        if all(isinstance(a, np.ndarray) for a in arguments):
            return np.asarray(known(*arguments))
        shape = tuple(np.broadcast_shapes(*(a.shape for a in arguments)))
        return self.line(code.format(*map(self.written_as if numbers else self.named, arguments)), shape, arguments)

    def cast(self, value: Value, kind: str) -> Value:
        """``value`` as ``kind`` has it; to float32 and float64: the layer's type."""
        if isinstance(value, np.ndarray):
            return value.astype(np.float64 if kind.startswith("float") else kind)
        if kind in ("float32", "float64"):
            return self.line(f"{value.name}.to(kind)", value.shape, [value])
        back = ".to(kind)" if kind.startswith("float") else ""
        return self.line(f"{value.name}.to(torch.{kind}){back}", value.shape, [value])

    def load(self, source: Value, indices: Sequence[Value], axes: int) -> Value:
        """``source`` at the places that ``indices`` are, one for each of its dimensions."""
        at = [i for i in indices if isinstance(i, np.ndarray)]
        if len(at) < len(indices):
            raise CellError("the cell reads a tensor at a place that it computes, for which PyTorch has nothing here")
        if isinstance(source, np.ndarray):
            return np.asarray(source[tuple(at)])
        along = [[n for n, size in enumerate(i.shape) if size > 1] for i in at]
        moving = [own[0] for own in along if own]
        if any(len(own) > 1 for own in along) or len(set(moving)) < len(moving):
            shape = tuple(np.broadcast_shapes(*(i.shape for i in at)))
            return self.line(f"{source.name}[{', '.join(map(self.constant, at))}]", shape, [source])
        words = []
        for d, i in enumerate(at):
            line = i.reshape(-1)
            low, high, size = int(line[0]), int(line[-1]) + 1, source.shape[d]
            if len(line) == 1:
                words.append(str(low))
            elif low >= 0 and high <= size and (np.diff(line) == 1).all():
                words.append(":" if (low, high) == (0, size) else f"{low}:{high}")
            else:
                source = self.line(f"torch.index_select({source.name}, {d}, {self.constant(line)})",
                                   (*source.shape[:d], len(line), *source.shape[d + 1:]), [source])
                words.append(":")
        found: Term = source
        shape = tuple(i.size for i in at if i.size > 1)
        if set(words) != {":"}:
            found = self.line(f"{source.name}[{', '.join(words)}]", shape, [source])
        order = sorted(range(len(moving)), key=lambda n: moving[n])
        if order != list(range(len(moving))):
            shape = tuple(shape[n] for n in order)
            found = self.line(f"{found.name}.permute({_tuple(map(str, order))})", shape, [found])
        whole = [1] * axes
        for i in at:
            for n, size in enumerate(i.shape):
                whole[n] = max(whole[n], size)
        return self.flat(found, tuple(whole))


def words(code: str) -> set[str]:
    """The names in code."""
    return set(re.findall(r"\w+", code))


def _tuple(names: Iterable[str]) -> str:
    """In Python's words."""
    return f"({''.join(f'{name}, ' for name in names).rstrip()})"
