"""A graph of torch.fx carried out on te tensors."""

from __future__ import annotations

import inspect
import linecache
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ecornn.cells import product
from ecornn.errors import CellError
from ecornn.torch import traced_cells
from ecornn.torch.traced_operators import ATTRIBUTES, NUMBERS, POINTWISE, allowed, key_of
from ecornn.torch.traced_values import (
    BATCHED,
    Input,
    Joined,
    Matrix,
    Row,
    Vector,
    combined,
    cut,
    described,
    layer_norm,
    whole,
)

OTHERS = str(Path(torch.__file__).parent), str(Path(__file__).resolve().parent.parent), "<"  # not the user's files


@dataclass(frozen=True)
class Source:
    """Where a parameter of the cell comes from: one of the module, (R,) or (R, K); of that, transposed if it is stored
    so, ``columns`` of it. ``gates`` G, ``width`` what K is: ``I``, ``H``, less than H, or empty for a vector; ``rows``:
    R where it is less than H, else 0."""

    name: str
    gates: int
    width: str | int = ""
    columns: tuple[int, int] | None = None
    transposed: bool = False
    rows: int = 0

    def shape(self, input: int, hidden: int) -> tuple[int, ...]:
        """In te: (G, H, K) or (G, H); of a narrow matrix (1, R, K)."""
        if self.width == "":
            return self.gates, hidden
        own = {"I": input, "H": hidden}.get(str(self.width), self.width)
        return self.gates, self.rows or hidden, int(own)

    def of(self, value: torch.Tensor, hidden: int) -> torch.Tensor:
        """Its values, (G*H, K) or (G*H,); a narrow vector with zeros behind it."""
        value = value.t() if self.transposed else value
        if self.rows and self.width == "":
            return torch.nn.functional.pad(value, (0, hidden - self.rows))
        return value if self.columns is None else value[:, slice(*self.columns)]


@dataclass(frozen=True)
class Traced:
    """A step, its sizes and the names of its states."""

    step: Any
    input: int
    hidden: int
    states: tuple[str, ...]


class Tracer(torch.fx.Tracer):
    """Notes the user's line of each node, as ``meta["at"]``."""

    def create_node(self, *args: Any, **options: Any) -> torch.fx.Node:
        """As torch.fx's."""
        node, frame = super().create_node(*args, **options), inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith(OTHERS):
            frame = frame.f_back
        node.meta["at"] = [(frame.f_code.co_filename, frame.f_lineno)] if frame is not None else []
        return node


def trace(step: Any) -> torch.fx.Graph | None:
    """The graph of a step; None of a torch.nn cell, which is known as it is."""
    if isinstance(step, torch.nn.RNNCellBase):
        return None
    try:
        return Tracer().trace(step)
    except CellError:
        raise
    except Exception as error:  # the user's own code, and torch.fx, raise what they like
        raise pointed(f"the step cannot be traced: {type(error).__name__}: {str(error).splitlines()[0]}",
                      places(error)) from error


def places(error: BaseException) -> list[tuple[str, int]]:
    """Files and lines of an error, the innermost last."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return found


def pointed(message: str, at: Sequence[tuple[str, int]]) -> CellError:
    """The error with the last place that is not PyTorch's or ours."""
    own = [place for place in at if not place[0].startswith(OTHERS)]
    if not own:
        return CellError(message)
    file, line = own[-1]
    text = linecache.getline(file, line).strip()
    return CellError(f"{message}\n  {file}:{line}" + (f": {text}" if text else ""), own[-1])


class Walk:
    """One walk through the graph. ``parameter(name, source)`` is the te tensor of a parameter."""

    def __init__(self, traced: Traced, graph: torch.fx.Graph | None, x: Any, states: Sequence[Any],
                 parameter: Callable[[str, Source], Any]) -> None:
        self.traced, self.graph, self.parameter = traced, graph, parameter
        self.x, self.states, self.like = Input(x), [Row(s) for s in states], states[0]
        self.known: dict[torch.fx.Node, Any] = {}

    def run(self) -> list[Any]:
        """The new states, te tensors (B, H); before them y where that is none of them."""
        if self.graph is None:
            found: Any = traced_cells.apply(self, self.traced.step, "", self.x, self.states)
        else:
            found, given = None, self.given()
            for node in self.graph.nodes:
                try:
                    if node.op == "output":
                        found = self.value(node.args[0])
                    else:
                        self.known[node] = next(given) if node.op == "placeholder" else self.of(node)
                except StopIteration:
                    raise CellError(f"the step has more arguments than x and {len(self.states)} states") from None
                except CellError as error:
                    if error.at is not None:
                        raise
                    raise pointed(f"{key_or_target(node)}: {error}", node.meta["at"]) from error
        return self.results(found)

    def given(self) -> Iterator[Any]:
        """x, and the states: one by one, or as a tuple where the step has one argument for them."""
        assert self.graph is not None
        yield self.x
        if len(self.states) > 1 and sum(n.op == "placeholder" for n in self.graph.nodes) == 2:
            yield tuple(self.states)
        else:
            yield from self.states

    def results(self, found: Any) -> list[Any]:
        """What the step returned, as te tensors."""
        flat = list(flattened(found))
        if len(flat) == len(self.states) + 1 and flat[0] is flat[1]:
            flat = flat[1:]  # y is the first state
        if len(flat) not in (len(self.states), len(self.states) + 1):
            raise CellError(f"the step returns {len(flat)} tensors for {len(self.states)} states; expected the new "
                            "states, or y before them. Name the states of a tuple: cell(..., states=('h', 'c'))")
        for value in flat:
            if not isinstance(value, BATCHED) or value.count != 1 or value.narrow:
                raise CellError(f"the step returns {described(value)}; expected (B, H)")
        return [whole(value, self.like, "state") for value in flat]

    # -- nodes ----------------------------------------------------------------------------------
    def value(self, argument: Any) -> Any:
        """An argument of a node."""
        if isinstance(argument, torch.fx.Node):
            return self.known[argument]
        if isinstance(argument, (tuple, list)):
            return tuple(self.value(a) for a in argument)
        if isinstance(argument, slice):
            return slice(*(self.value(a) for a in (argument.start, argument.stop, argument.step)))
        return argument

    def of(self, node: torch.fx.Node) -> Any:
        """The value of a node."""
        args, options = self.value(node.args), {k: self.value(v) for k, v in node.kwargs.items()}
        if node.op == "get_attr":
            return self.attribute(str(node.target))
        if node.op == "call_module":
            return self.module(str(node.target), node.name, args, options)
        key = key_of(node.target)
        if (node.target is getattr and args[1] in ("T", "mT")) or key in ("t", "transpose"):
            return self.transposed(args[0])
        if node.target is operator.getitem or key == "getitem":
            return self.item(*args)
        shapes: dict[str, Callable[..., Any]] = {
            "linear": self.linear, "matmul": self.matmul, "mm": self.matmul, "cat": self.cat, "concat": self.cat,
            "chunk": self.chunk, "split": self.split, "layernorm": self.layer_norm}
        if key in shapes:
            return shapes[key](node.name, *args, **options)
        return self.pointwise(key, node.name, args, options)

    def transposed(self, value: Any) -> Matrix:
        """Of a parameter."""
        if not isinstance(value, Matrix):
            raise CellError(f"the transpose of {described(value)}; expected a parameter")
        return Matrix(value.name, value.shape, not value.transposed)

    def pointwise(self, key: str, name: str, args: Any, options: dict[str, Any]) -> Any:
        """Arithmetic on each value."""
        options = {k: v for k, v in options.items() if k not in ("inplace", "rounding_mode") or v}
        if key in POINTWISE:
            if "alpha" in options and key in ("add", "sub"):
                args = (args[0], combined(lambda a, b: a * b, [args[1], options.pop("alpha")], self.like, name))
            return combined(POINTWISE[key], [*args, *options.values()], self.like, name)
        if key in NUMBERS:
            numbers = [a for a in (*args[1:], *options.values()) if a is not None]
            if not all(isinstance(n, (int, float)) for n in numbers):
                raise CellError("its arguments must be numbers; use torch.minimum and torch.maximum")
            return combined(lambda v: NUMBERS[key](v, *args[1:], **options), args[:1], self.like, name)
        raise CellError(f"not an operator of a step; there are {allowed()}")

    def attribute(self, name: str) -> Any:
        """A parameter or a buffer."""
        value: Any = self.traced.step
        for part in name.split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise CellError(f"{name} is a {type(value).__name__}")
        if value.dim() == 2:
            return Matrix(name, tuple(value.shape))
        if value.dim() == 1 and (value.numel() % self.traced.hidden == 0 or value.numel() < self.traced.hidden):
            return self.vector(name, value.numel())
        raise CellError(f"{name} has shape {tuple(value.shape)}; expected (G*H,) or (G*H, K): a scalar is a vector of "
                        "equal values")

    def vector(self, name: str, size: int) -> Vector:
        """A parameter of ``size`` values."""
        narrow = size if 0 < size < self.traced.hidden else 0
        gates = 1 if narrow else self.gates(size, name)
        return Vector(self.parameter(name.replace(".", "_"), Source(name, gates, rows=narrow)), 0, gates, narrow)

    def gates(self, size: Any, what: str) -> int:
        """How many times H a size is."""
        if not isinstance(size, int) or size < 1 or size % self.traced.hidden:
            raise CellError(f"{what} has {size} values, which is no multiple of H = {self.traced.hidden}")
        return size // self.traced.hidden

    # -- products -------------------------------------------------------------------------------
    def linear(self, name: str, operand: Any, weight: Any, bias: Any = None) -> Any:
        """Of what is multiplied, a matrix and perhaps a vector."""
        if not isinstance(weight, Matrix):
            raise CellError(f"a product with {described(weight)}; expected a parameter (G*H, K)")
        rows, columns = weight.shape[::-1] if weight.transposed else weight.shape
        narrow = rows if rows < self.traced.hidden else 0
        gates = 1 if narrow else self.gates(rows, weight.name)
        parts = operand.parts if isinstance(operand, Joined) else (operand,)
        total, place = None, 0
        for n, part in enumerate(parts):
            if not isinstance(part, (Row, Input)) or part.count != 1:
                raise CellError(f"a product of {described(part)}; expected x, a state, or a value (B, H), or of less")
            source = whole(part, self.like, f"{name}_operand") if isinstance(part, Row) else part.tensor
            width = self.traced.input if isinstance(part, Input) else part.narrow or self.traced.hidden
            kind = "I" if isinstance(part, Input) else part.narrow or "H"
            where = (place, place + width) if len(parts) > 1 else None
            own = weight.name.replace(".", "_") + (f"_{n}" if where else "")
            matrix = self.parameter(own, Source(weight.name, gates, kind, where, weight.transposed, narrow))
            one = Row(product(source, matrix, 0 if gates == 1 else None, f"{name}_{n}"), 0, gates, narrow)
            total = one if total is None else combined(lambda a, b: a + b, [total, one], self.like, f"{name}_sum")
            place += width
        if place != columns:
            raise CellError(f"{weight.name} multiplies {columns} values, and gets {place}")
        return total if bias is None else combined(lambda a, b: a + b, [total, bias], self.like, f"{name}_biased")

    def matmul(self, name: str, operand: Any, weight: Any) -> Any:
        """``operand @ weight``: as :meth:`linear` of the transpose."""
        if not isinstance(weight, Matrix):
            raise CellError(f"a product with {described(weight)}; expected a parameter")
        return self.linear(name, operand, Matrix(weight.name, weight.shape, not weight.transposed))

    # -- shapes ---------------------------------------------------------------------------------
    def cat(self, name: str, parts: Any, dim: int = 0) -> Joined:
        """Side by side."""
        columns_only(dim)
        return Joined(tuple(parts))

    def chunk(self, name: str, value: Any, count: int, dim: int = 0) -> tuple[Any, ...]:
        """In ``count`` parts."""
        columns_only(dim)
        if not isinstance(value, (Row, Vector)) or value.count % count:
            raise CellError(f"{count} parts of {described(value)}, of a multiple of H values each")
        size = value.count // count
        return tuple(cut(value, n * size, size) for n in range(count))

    def split(self, name: str, value: Any, split_size: Any = None, dim: int = 0, **options: Any) -> tuple[Any, ...]:
        """In parts of these sizes."""
        columns_only(dim)
        size = options.get("split_size_or_sections", split_size)
        if not isinstance(value, (Row, Vector)):
            raise CellError(f"parts of {described(value)}")
        one = self.gates(size, "a part") if isinstance(size, int) else 0
        sizes = [one] * (value.count // one) if one else [self.gates(s, "a part") for s in size]
        places = [sum(sizes[:n]) for n in range(len(sizes))]
        return tuple(cut(value, place, count) for place, count in zip(places, sizes, strict=True))

    def item(self, value: Any, index: Any) -> Any:
        """One of several values, or columns of one."""
        if isinstance(value, tuple):
            return value[index]
        every = (slice(None), Ellipsis)
        if isinstance(value, Row) and isinstance(index, tuple) and len(index) == 2 and index[0] in every:
            index = index[1]
        elif not isinstance(value, Vector):
            raise CellError(f"[{index}] of {described(value)}; expected [:, FIRST:LAST] in multiples of H")
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise CellError(f"columns {index}; expected FIRST:LAST in multiples of H")
        low, high, _ = index.indices(value.count * self.traced.hidden)
        first = self.gates(low, "the first column") if low else 0
        return cut(value, first, self.gates(high - low, "a part"))

    def layer_norm(self, name: str, value: Any, normalized_shape: Any, weight: Any = None, bias: Any = None,
                   eps: float = 1e-5) -> Any:
        """Layer normalization, with gain and bias."""
        width = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
        if isinstance(value, BATCHED) and width != (value.narrow or value.count * self.traced.hidden,):
            raise CellError(f"normalizes {width} values of {described(value)}")
        found = layer_norm(value, eps, self.like, name)
        found = found if weight is None else combined(lambda a, b: a * b, [found, weight], self.like, f"{name}_scaled")
        return found if bias is None else combined(lambda a, b: a + b, [found, bias], self.like, f"{name}_shifted")

    def module(self, path: str, name: str, args: Any, options: dict[str, Any]) -> Any:
        """A module of torch.nn."""
        module = self.traced.step.get_submodule(path)
        own = {n: self.attribute(f"{path}.{n}") for n, _ in module.named_parameters(recurse=False)}
        if isinstance(module, torch.nn.Linear):
            return self.linear(name, args[0], own["weight"], own.get("bias"))
        if isinstance(module, torch.nn.LayerNorm):
            return self.layer_norm(name, args[0], module.normalized_shape, own.get("weight"), own.get("bias"),
                                   module.eps)
        if isinstance(module, torch.nn.RNNCellBase):
            states = args[1] if len(args) > 1 else options.get("hx")
            if states is None:
                raise CellError("call it with its states")
            found = traced_cells.apply(self, module, f"{path}.", args[0], flattened(states))
            return found if len(found) > 1 else found[0]
        if isinstance(module, torch.nn.Dropout) and not module.training:
            return args[0]
        key = key_of(type(module))
        numbers = {k: getattr(module, k) for k in ATTRIBUTES.get(key, ())}
        return self.pointwise(key, name, args, numbers)


def flattened(found: Any) -> Iterator[Any]:
    """The values of nested tuples."""
    if isinstance(found, (tuple, list)):
        for one in found:
            yield from flattened(one)
    else:
        yield found


def columns_only(dim: int) -> None:
    """Raises where ``dim`` is the batch."""
    if dim not in (1, -1):
        raise CellError(f"dim={dim} is the batch; expected 1 or -1")


def key_or_target(node: torch.fx.Node) -> str:
    """What a node is called in messages."""
    return f"module {node.target}" if node.op == "call_module" else str(getattr(node.target, "__name__", node.target))
