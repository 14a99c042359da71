"""A layer as a loop over its step, an operation of PyTorch after the other, as those write it who have no kernel.

It is written from the te graph (``interpreter.py``), never its analysis: it shares nothing with kernels."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ecornn.bench.turns import Weights
from ecornn.cells import Cell
from ecornn.errors import CellError
from ecornn.interpreter import BINARY, OPERATORS, Step, output_numbers
from ecornn.workload import Part, Stack, Workload

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.te import Tensor
    from tvm.tirx import Var

CLAMP = {"Max": "torch.clamp({0}, min={1})", "Min": "torch.clamp({0}, max={1})"}  # where one side is a number
NUMBERS = {"pow", *BINARY} - {"And", "Or"}  # those that take Python's numbers beside tensors

# of a value that says its own derivatives: written before a step that has one
CUSTOM = """\
class CustomGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, *pairs):
        ctx.save_for_backward(*pairs)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        operands, derivatives = ctx.saved_tensors[::2], ctx.saved_tensors[1::2]
        through = [(gradient * d).sum_to_size(x.shape) for x, d in zip(operands, derivatives)]
        return None, *(g for one in through for g in (one, None))


"""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Term:
    """A tensor of the program, by its name; ``fixed``: computed from parameters alone, so the same in every step."""

    name: str
    shape: Shape
    fixed: bool


Value = Term | np.ndarray  # an array is known before anything runs


@dataclass(frozen=True)
class TorchStep:
    """Python source of a step: ``prepare(parameters)``, which computes once a sequence what steps need of the
    parameters alone (in te shape, in the cell's order), and ``step(x, states, prepared)``, which returns the new states
    and other outputs behind them; x (B, I) has the cell's inputs behind it. ``constants`` are arrays that it names."""

    source: str
    constants: Mapping[str, np.ndarray]

    def functions(self, device: str, dtype: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """``prepare`` and ``step``, for tensors of a device and a data type."""
        import torch

        def tensor(value: np.ndarray) -> Any:
            on_device = torch.from_numpy(np.ascontiguousarray(value)).to(device)
            return on_device.to(dtype) if on_device.is_floating_point() else on_device

        names: dict[str, Any] = {"torch": torch, "kind": dtype}
        names |= {name: tensor(value) for name, value in self.constants.items()}
        exec(compile(self.source, "<te step>", "exec"), names)
        return names["prepare"], names["step"]


def torch_step(cell: Cell, input: int, hidden: int, batch: int) -> TorchStep:
    """The step for rows of ``input`` values, the cell's inputs among them; :class:`CellError` if it cannot be."""
    return _Writer(cell, (batch, input), (batch, hidden)).written()


class _Writer(Step):
    """Writes the lines. A value is a tensor of the program, or an array that is known before anything runs."""

    NOTHING = "no PyTorch operation is known for"
    UNKNOWN = "for which no PyTorch operation is known"

    def __init__(self, cell: Cell, x: Shape, state: Shape) -> None:
        super().__init__(cell, x, state)
        self.lines: dict[str, Term] = {}  # code -> the tensor that it makes; each line once
        self.constants: dict[str, np.ndarray] = {}
        self.flattened: dict[str, Term] = {}  # name of a reshaped tensor -> that tensor before

    def written(self) -> TorchStep:
        """The source of both functions."""
        (rows, hidden), width = (int(n) for n in self.states[0].shape), self.own
        x = Term("x", (rows, width), False)
        self.given(self.x, self.line(f"x[:, :{width}]", x.shape, [x]) if self.inputs else x)
        for n, tensor in enumerate(self.inputs):
            at = width + n * hidden
            self.given(tensor, self.line(f"x[:, {at}:{at + hidden}]", (rows, hidden), [x]))
        states = [f"s{n}" for n in range(len(self.states))]
        for name, tensor in zip(states, self.states, strict=True):
            self.given(tensor, Term(name, (rows, hidden), False))
        parameters = [f"p{n}" for n in range(len(self.parameters))]
        for name, tensor in zip(parameters, self.parameters.values(), strict=True):
            self.given(tensor, Term(name, tuple(int(s) for s in tensor.shape), True))
        results = [self.named(self.tensor(tensor)) for tensor in self.results]
        needed, kept = set(results), dict[str, Term]()  # names, and the lines that make them
        for code, term in reversed(self.lines.items()):
            if term.name in needed:
                kept[code] = term
                needed |= words(code)
        lines = dict(reversed(kept.items()))
        late = [f"    {t.name} = {code}" for code, t in lines.items() if not t.fixed]
        read = words(" ".join([*late, *results]))
        early = [f"    {t.name} = {code}" for code, t in lines.items() if t.fixed]
        passed = [name for name in (*parameters, *(t.name for t in lines.values() if t.fixed)) if name in read]
        custom = CUSTOM if any(code.startswith("CustomGradient") for code in lines) else ""
        return TorchStep(custom + "\n".join([
            "def prepare(parameters):", f"    {_tuple(parameters)} = parameters", *early,
            f"    return {_tuple(passed)}", "", "", "def step(x, states, prepared):",
            f"    {_tuple(states)} = states", f"    {_tuple(passed)} = prepared", *late,
            f"    return {_tuple(results)}", ""]), self.constants)

    def given(self, tensor: Tensor, value: Value) -> None:
        self.known[tensor.op, 0] = value

    def line(self, code: str, shape: Shape, of: Sequence[Value]) -> Term:
        """The tensor that ``code`` makes of these values; an earlier line of the same code serves."""
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
        return value.name if isinstance(value, Term) else self.constant(value)

    def written_as(self, value: Value) -> str:
        """A value in code: as a number if it is one, else as a tensor."""
        return repr(value.item()) if isinstance(value, np.ndarray) and value.size == 1 else self.named(value)

    # -- values ---------------------------------------------------------------------------------
    def expanded(self, value: Value, shape: Shape) -> Value:
        if value.shape == shape:
            return value
        if isinstance(value, np.ndarray):
            return np.broadcast_to(value, shape)
        return self.line(f"{value.name}.expand({_tuple(map(str, shape))})", shape, [value])

    def largest(self, value: Value, extents: Shape, kept: int) -> Value:
        whole, over = self.expanded(value, extents), _tuple(map(str, range(kept, len(extents))))
        return self.line(f"torch.amax({self.named(whole)}, {over})", extents[:kept], [whole])

    def plus(self, total: Value, start: Value) -> Value:
        if isinstance(start, np.ndarray) and not start.any():
            return total
        return self.line(f"{self.named(total)} + {self.written_as(start)}", total.shape, [total, start])

    def product(self, values: Sequence[Value], extents: Shape, kept: int) -> Value:
        shared = [any(v.shape[n] > 1 for v in values) for n in range(len(extents))]
        alike = float(np.prod([n for i, n in enumerate(extents) if i >= kept and not shared[i]]))
        numbers = [v for v in values if isinstance(v, np.ndarray) and v.size == 1]
        factor = float(np.prod([v.item() for v in numbers])) * alike
        others = [v for v in values if not any(v is n for n in numbers)]
        own = [tuple(n for n, size in enumerate(v.shape) if size > 1) for v in others]
        operands = [self.flat(v, tuple(v.shape[n] for n in axes)) for v, axes in zip(others, own, strict=True)]
        out = tuple(n for n in range(kept) if shared[n])
        total = self.flat(self.linear(operands, own, out) or self.einsum(operands, own, out),
                          tuple(e if shared[n] else 1 for n, e in enumerate(extents[:kept])))
        return total if factor == 1 else self.line(f"{self.named(total)} * {factor!r}", total.shape, [total])

    def linear(self, operands: Sequence[Value], own: Sequence[Shape], out: Shape) -> Value | None:
        """Rows times a matrix, as ``torch.nn`` multiplies; None for any other product. ``own``: each operand's axes."""
        for n, m in ((0, 1), (1, 0)) if len(own) == 2 else ():
            rows, matrix = own[n], own[m]
            if len(rows) in (1, 2) and rows[-1] in matrix[-1:] and rows[-1] not in out and (
                    out == (*rows[:-1], *matrix[:-1])):
                units, width = operands[m].shape[:-1], operands[m].shape[-1]
                flat = self.flat(operands[m], (math.prod(units), width))
                multiplied = self.line(f"torch.nn.functional.linear({self.named(operands[n])}, {self.named(flat)})",
                                       (*operands[n].shape[:-1], math.prod(units)), [operands[n], flat])
                return self.flat(multiplied, (*operands[n].shape[:-1], *units))
        return None

    def einsum(self, operands: Sequence[Value], own: Sequence[Shape], out: Shape) -> Value:
        """Any other sum of products."""
        axes, shape = string.ascii_letters, {n: s for v, o in zip(operands, own, strict=True)
                                             for n, s in zip(o, v.shape, strict=True)}
        sums = f"{','.join(''.join(axes[n] for n in o) for o in own)}->{''.join(axes[n] for n in out)}"
        return self.line(f"torch.einsum({sums!r}, {', '.join(map(self.named, operands))})",
                         tuple(shape[n] for n in out), operands)

    def flat(self, value: Value, shape: Shape) -> Value:
        """``value`` with axes of one entry left out or added, or neighbouring ones as one."""
        if tuple(value.shape) == shape:
            return value
        if isinstance(value, np.ndarray):
            return value.reshape(shape)
        value = self.flattened.get(value.name, value)
        if value.shape == shape:
            return value
        reshaped = self.line(f"{value.name}.reshape({_tuple(map(str, shape))})", shape, [value])
        self.flattened[reshaped.name] = value
        return reshaped

    def applied(self, name: str, arguments: Sequence[Value]) -> Value:
        if all(isinstance(a, np.ndarray) for a in arguments):
            return super().applied(name, arguments)
        number = [isinstance(a, np.ndarray) and a.size == 1 for a in arguments]
        code, numbers = OPERATORS[name].torch, name in NUMBERS - {*CLAMP}
        if name in CLAMP and any(number):
            code, numbers, arguments = CLAMP[name], True, arguments[::-1] if number[0] else arguments
        elif name == "if_then_else":  # of two numbers PyTorch would make its default type
            numbers = not all(number[1:])
        shape = tuple(np.broadcast_shapes(*(a.shape for a in arguments)))
        return self.line(code.format(*map(self.written_as if numbers else self.named, arguments)), shape, arguments)

    def custom_gradient(self, value: Value, pairs: Sequence[Expr], places: Mapping[Var, np.ndarray]) -> Value:
        of = [value, *(self.value(e, places) for e in pairs)]
        if all(isinstance(v, np.ndarray) for v in of):
            return value
        shape = tuple(np.broadcast_shapes(*(v.shape for v in of)))
        return self.line(f"CustomGradient.apply({', '.join(map(self.named, of))})", shape, of)

    def cast(self, value: Value, kind: str) -> Value:
        """``value`` as ``kind`` has it; to float32 and float64: the layer's type."""
        if isinstance(value, np.ndarray):
            return super().cast(value, kind)
        if kind in ("float32", "float64"):
            return self.line(f"{value.name}.to(kind)", value.shape, [value])
        back = ".to(kind)" if kind.startswith("float") else ""
        return self.line(f"{value.name}.to(torch.{kind}){back}", value.shape, [value])

    def load(self, source: Value, indices: Sequence[Value], axes: int) -> Value:
        at = [i for i in indices if isinstance(i, np.ndarray)]
        if len(at) < len(indices):
            raise CellError("the cell reads a tensor at a computed index, for which no PyTorch operation is known")
        if isinstance(source, np.ndarray):
            return super().load(source, at, axes)
        along = [[n for n, size in enumerate(i.shape) if size > 1] for i in at]
        moving = [own[0] for own in along if own]
        if any(len(own) > 1 for own in along) or len(set(moving)) < len(moving):
            shape = tuple(np.broadcast_shapes(*(i.shape for i in at)))
            return self.line(f"{source.name}[{', '.join(map(self.constant, at))}]", shape, [source])
        subscripts = []
        for d, i in enumerate(at):
            line = i.reshape(-1)
            low, high, size = int(line[0]), int(line[-1]) + 1, source.shape[d]
            if len(line) == 1:
                subscripts.append(str(low))
            elif low >= 0 and high <= size and (np.diff(line) == 1).all():
                subscripts.append(":" if (low, high) == (0, size) else f"{low}:{high}")
            else:
                source = self.line(f"torch.index_select({source.name}, {d}, {self.constant(line)})",
                                   (*source.shape[:d], len(line), *source.shape[d + 1:]), [source])
                subscripts.append(":")
        shape = tuple(i.size for i in at if i.size > 1)
        if set(subscripts) != {":"}:
            source = self.line(f"{source.name}[{', '.join(subscripts)}]", shape, [source])
        order = sorted(range(len(moving)), key=lambda n: moving[n])
        if order != list(range(len(moving))):
            shape = tuple(shape[n] for n in order)
            source = self.line(f"{source.name}.permute({_tuple(map(str, order))})", shape, [source])
        whole = [1] * axes
        for i in at:
            for n, size in enumerate(i.shape):
                whole[n] = max(whole[n], size)
        return self.flat(source, tuple(whole))


def words(code: str) -> set[str]:
    return set(re.findall(r"\w+", code))


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names).rstrip()})"


class StepLoop:
    """A function from x (T, B, I) and weights to y (T, B, D*O*H), from zero states; every layer and direction of a
    stack. Only values of the weights alone are computed outside the loop. Raises :class:`~ecornn.errors.CellError` for
    a step that uses what PyTorch has no operation for."""

    def __init__(self, cell: Cell, work: Workload, stack: Stack, rows: int, kind: str, dtype: str) -> None:
        import torch

        self.torch, self.cell, self.stack, self.rows = torch, cell, stack, rows
        self.device, self.dtype = "cuda" if kind == "cuda" else "cpu", getattr(torch, dtype)
        self.hidden, self.outputs = work.hidden, output_numbers(cell)
        self.parts = stack.parts(work)
        self.steps = {width: torch_step(cell, width, work.hidden, rows).functions(self.device, self.dtype)
                      for width in {part.workload.input for part in self.parts}}

    def tensors(self, weights: Weights) -> dict[str, Any]:
        return {name: self.torch.as_tensor(value).to(self.device, self.dtype).requires_grad_()
                for name, value in weights.items()}

    def __call__(self, x: Any, weights: Weights) -> Any:
        y = x
        for layer in range(self.stack.layers):
            directions = [self.sequence(part, y, weights) for part in self.parts if part.layer == layer]
            y = self.torch.cat(directions, 2) if len(directions) > 1 else directions[0]
        return y

    def sequence(self, part: Part, x: Any, weights: Weights) -> Any:
        """One layer in one direction."""
        prepare, step = self.steps[part.workload.input]
        own = self.cell.own_input(part.workload.input, self.hidden)
        prepared = prepare([weights[self.cell.parameter_name(name, part.layer, part.second)].reshape(tuple(shape))
                            for name, shape in self.cell.parameters(own, self.hidden).items()])
        states = [x.new_zeros(self.rows, self.hidden) for _ in self.cell.states]
        y: list[Any] = [None] * len(x)
        rows = x.unbind(0)
        for t in reversed(range(len(x))) if part.traversal.reverse else range(len(x)):
            returned = step(rows[t], states, prepared)
            states = returned[:len(states)]
            outputs = [returned[n] for n in self.outputs]
            y[t] = self.torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        return self.torch.stack(y)
