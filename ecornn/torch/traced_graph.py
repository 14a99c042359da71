"""The exported graph of a step: functional core ATen operators, with parameters, buffers and constants as inputs."""

from __future__ import annotations

import inspect
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from traceback import StackSummary, walk_tb
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import Node

from ecornn.errors import CellError, source_line
from ecornn.torch.custom_gradient import own_backwards

OTHERS = str(Path(torch.__file__).parent), str(Path(__file__).resolve().parent.parent), "<"  # not the user's files
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
PREFIX = "step."  # of the names of a step's parameters within the module that is exported
CONSTANT = ("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "empty_like")
# Operators that stay whole, since their parts overflow, or are not the forms that the analysis knows.
WHOLE = ("softplus", "mish", "gelu", "elu", "silu", "native_layer_norm", "native_group_norm", "_softmax",
         "_log_softmax", "hardtanh", "linalg_vector_norm", "std", "var", "var_mean", "mean", "amax", "amin", "clamp",
         "split_with_sizes", "native_dropout", "stack", "log_sigmoid_forward", "detach")
BROKEN_UP = "addcmul", "addcdiv", "lerp", "leaky_relu", "mv", "dot", "baddbmm", "rms_norm", "square", "logit", "frac"
BRANCH = "the step reads values of a tensor in Python, which a cell cannot do: use torch.where instead of a branch"
_one_at_a_time = threading.Lock()  # PyTorch exports with settings of the whole process

Place = tuple[str, int]
# The width of a row: "H", "I", a number of values less than H; 1: one value, whatever H is.
Width = str | int
T = TypeVar("T")


@dataclass(frozen=True)
class Traced:
    """A step, its sizes, the names of its states, and whether it takes several as one tuple."""

    step: Any
    input: int
    hidden: int
    states: tuple[str, ...]
    together: bool


@dataclass(frozen=True)
class Sizes:
    """The numbers B, I and H."""

    batch: int
    input: int
    hidden: int

    def width(self, width: Width) -> int:
        return {"H": self.hidden, "I": self.input}[width] if isinstance(width, str) else width

    @staticmethod
    def in_words(width: Width) -> str:
        """A width, for messages."""
        return f"{width} values" if isinstance(width, str) else f"{width} value{'s' * (width > 1)}, less than H"

    def parts(self, size: int) -> tuple[int, Width] | None:
        """The number of gates in ``size`` values, and the width of each; None if they are no gates."""
        if size == 1:
            return 1, 1
        if size % self.hidden == 0:
            return size // self.hidden, "H"
        return (1, size) if size < self.hidden else None

    def common(self, widths: set[Width]) -> Width | None:
        """The one width of rows of these widths, H also for x beside what has H values; None if they differ."""
        if len(widths) > 1:
            return "H" if {self.width(width) for width in widths} == {self.hidden} else None
        return next(iter(widths), 1)


@dataclass(frozen=True, eq=False)
class Learned:
    """A ``parameter``, ``buffer`` or ``constant`` that the graph reads; the last has the graph's own name."""

    kind: str
    name: str
    value: torch.Tensor

    def among(self, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor of this name in another module, by default this one; without gradients."""
        return known.get(self.name, self.value).detach()


@dataclass(frozen=True, eq=False)
class Graph:
    nodes: tuple[Node, ...]  # in order, without placeholders and outputs
    learned: dict[Node, Learned]  # placeholder -> the tensor of the step that it stands for
    given: tuple[Node, ...]  # the placeholders of x and of the states
    returned: tuple[Node, ...]  # the results, y or not and the new states
    sizes: Sizes  # those of the example it was exported with; no other axis has its B
    data: frozenset[Node]  # what depends on x or a state
    suspects: tuple[tuple[str, tuple[Place, ...]], ...]  # operators that change gradients alone, with lines

    def below(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes and all nodes that they depend on, in the graph's order."""
        needed = reached(nodes, lambda node: [] if node.op == "placeholder" or operator_name(
            node) in CONSTANT else node.all_input_nodes)
        return [node for node in (*self.learned, *self.given, *self.nodes) if node in needed]

    def number(self, node: Node) -> float | bool | int | None:
        """The one value that a constant has everywhere; None if it has several, or depends on a parameter or buffer."""
        order = self.below([node])
        if any(torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ()) for one in order):
            raise CellError("a step that draws random numbers cannot be a cell")
        learned = {n: self.learned[n] for n in order if n in self.learned}
        if any(weights.kind != "constant" for weights in learned.values()):
            return None
        value = carried_out(order, {n: weights.value for n, weights in learned.items()}, None)[node]
        first = value.reshape(-1)[0]
        return first.item() if bool((value == first).all()) else None

    def alike_in_rows(self, node: Node, axis: int) -> bool:
        """Tells whether a tensor computed of weights is the same along an axis for any weights."""
        order = self.below([node])
        generator = torch.Generator().manual_seed(0)
        given = {n: self.learned[n].value.detach().cpu() for n in order if n in self.learned}
        given |= {n: v + torch.rand(v.shape, generator=generator) for n, v in given.items() if v.is_floating_point()}
        value = carried_out(order, given, None)[node]
        return bool((value == value.narrow(axis, 0, 1)).all())


class Wrapped(torch.nn.Module):
    """The step as a module that takes x and its states one by one."""

    def __init__(self, step: Any, together: bool) -> None:
        super().__init__()
        self.step, self.together = step, together

    def forward(self, x: Any, *states: Any) -> Any:
        return self.step(x, states) if self.together else self.step(x, *states)


def export(traced: Traced) -> Graph:
    """The graph of a step. Raises :class:`~ecornn.errors.CellError`, with the user's line, if PyTorch cannot export it,
    if it changes its buffers, and if it returns anything but tensors."""
    batch = batch_of(traced)
    like = next((t for t in tensors_of(traced.step) if t.is_floating_point()), torch.empty(0))
    widths = traced.input, *[traced.hidden] * len(traced.states)
    example = tuple(torch.zeros(batch, width, dtype=like.dtype, device=like.device) for width in widths)
    with _one_at_a_time, _quiet(), _whole_lines(), _one_precision(), own_backwards():
        try:
            wrapped = Wrapped(traced.step, traced.together)
            try:
                program = torch.export.export(wrapped, example, strict=False)
            except RuntimeError as error:
                if "inplace" not in str(error):
                    raise
                with torch.no_grad():  # where PyTorch cannot train what is written to, it still computes it
                    program = torch.export.export(wrapped, example, strict=False)
            suspects = tuple(_suspects(program.graph_module))
            program = program.run_decompositions(_decompositions())
        except CellError:
            raise
        except Exception as error:  # the user's own code, and PyTorch, raise what they like
            places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
            raise pointed(f"the step cannot be exported: {_why(error, traced)}", places) from error
    return _graph(traced, program, batch, suspects)


def batch_of(traced: Traced) -> int:
    """A number of rows that is the size of no axis of the step's tensors."""
    known: set[int] = {traced.input, *(size for t in tensors_of(traced.step) for size in t.shape)}
    known |= {count * traced.hidden for count in range(1, 64)}
    sizes: tuple[int, ...] = (11, 13, 17, 19, 23, 29, 31, *range(37, 10_000, 2))
    return next(n for n in sizes if n not in known)


def tensors_of(step: Any) -> list[torch.Tensor]:
    """The parameters and buffers of a module; a function has none."""
    return [*step.parameters(), *step.buffers()] if isinstance(step, torch.nn.Module) else []


def _graph(traced: Traced, program: Any, batch: int, suspects: tuple[Any, ...]) -> Graph:
    nodes = list(program.graph.nodes)
    by_name, signature = {node.name: node for node in nodes}, program.graph_signature
    learned: dict[Node, Learned] = {}
    given: list[Node] = []
    first: dict[int, Node] = {}
    for spec in signature.input_specs:
        node, kind = by_name[spec.arg.name], spec.kind.name
        if kind == "USER_INPUT":
            given.append(node)
        elif kind in ("PARAMETER", "BUFFER"):
            name = spec.target.removeprefix(PREFIX)
            value = attrgetter(name)(traced.step)
            node.replace_all_uses_with(first.setdefault(id(value), node))  # one node stands for tied weights
            learned[node] = Learned(kind.lower(), name, value)
        elif kind == "CONSTANT_TENSOR":
            learned[node] = Learned("constant", spec.arg.name, program.constants[spec.target].detach())
        else:
            raise CellError(f"the step has an input of the kind {kind}, which a cell cannot take")
    output, changed, returned = next(node for node in nodes if node.op == "output"), [], []
    for spec, node in zip(signature.output_specs, output.args[0], strict=True):
        if spec.kind.name == "USER_OUTPUT":
            returned.append(node)
        elif spec.kind.name != "USER_INPUT_MUTATION":
            changed.append(str(spec.target).removeprefix(PREFIX))
    if changed:
        raise CellError(f"the step changes {', '.join(changed)} of its module in each call, which a layer cannot do. "
                        "Make it a state, or call the module's eval() first if that stops the changes")
    if not all(isinstance(node, Node) for node in returned):
        raise CellError(f"the step returns {[n for n in returned if not isinstance(n, Node)]}; expected only tensors")
    needed = reached(returned, lambda node: node.all_input_nodes)
    inner = tuple(node for node in nodes if node.op == "call_function" and node in needed)
    for node in inner:
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise pointed(f"{operator_name(node)}: {BRANCH}", node)
    data = set(given)
    for node in inner:
        if not data.isdisjoint(node.all_input_nodes) and operator_name(node) not in CONSTANT:
            data.add(node)
    learned = {node: weights for node, weights in learned.items() if node in needed}
    return Graph(inner, learned, tuple(given), tuple(returned), Sizes(batch, traced.input, traced.hidden),
                 frozenset(data), suspects)


def reached(first: Iterable[T], after: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """The first nodes and all that are reached from these, each once."""
    pending, seen = list(first), dict[T, None]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen[node] = None
            pending += after(node)
    return seen


@lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = dict(getattr(torch.export, "default_decompositions", core_aten_decompositions)())
    table |= get_decompositions([getattr(torch.ops.aten, name) for name in BROKEN_UP if hasattr(torch.ops.aten, name)])
    return {op: how for op, how in table.items() if op._schema.name.partition("::")[2] not in WHOLE}


def _suspects(module: Any) -> Iterator[tuple[str, tuple[Place, ...]]]:
    for node in module.graph.nodes:
        name = operator_name(node)
        if name == "wrap_with_set_grad_enabled" and not node.args[0]:
            inner = getattr(module, str(node.args[1].target), None) if len(node.args) > 1 else None
            within = [n for n in inner.graph.nodes if n.op == "call_function"] if inner is not None else []
            yield "torch.no_grad", lines_of(within[0]) if within else ()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences PyTorch's warnings and logs about a program that it exports: errors say the same."""
    names = "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch"
    before = [(logger, logger.level) for logger in map(logging.getLogger, names)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger, _ in before:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in before:
                logger.setLevel(level)


@contextmanager
def _whole_lines() -> Iterator[None]:
    """Has nodes keep the lines of all functions of the user, not only of those called ``forward``."""
    from torch.fx.proxy import TracerBase

    before = getattr(TracerBase, "_filter_traceback_frames", None)
    if before is None:  # earlier versions of PyTorch keep more
        yield
        return
    TracerBase._filter_traceback_frames = lambda self, frames: StackSummary.from_list(
        [frame for frame in frames if not frame.filename.startswith(OTHERS)])
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = before


@contextmanager
def _one_precision() -> Iterator[None]:
    """Sets one precision for all of cuDNN, and the settings of before at the end: torch.export reads and sets
    ``torch.backends.cudnn.allow_tf32``, which raises if newer settings differ from it, and loses these."""
    if not hasattr(torch._C, "_get_fp32_precision_getter"):  # PyTorch before 2.9 has one setting
        yield
        return
    before = _precisions()
    torch._C._set_cudnn_allow_tf32(True)
    try:
        yield
    finally:
        torch._C._set_cudnn_allow_tf32(before.pop(("cuda", "older")) == "tf32")  # which sets the newer ones, too
        for where, value in before.items():
            torch._C._set_fp32_precision_setter(*where, value)


def _precisions() -> dict[tuple[str, str], str]:
    """PyTorch's own values of its settings, the outermost first: each is read while those around it are open, since
    otherwise PyTorch returns theirs. The last, cuDNN's older one, agrees with two others or PyTorch raises."""
    before = {}
    for where in (("generic", "all"), ("cuda", "all"), ("cuda", "conv"), ("cuda", "rnn")):
        before[where] = torch._C._get_fp32_precision_getter(*where)
        torch._C._set_fp32_precision_setter(*where, "none" if where[1] == "all" else "tf32")
    try:
        before["cuda", "older"] = "tf32" if torch._C._get_cudnn_allow_tf32() else "none"
    except RuntimeError:
        before["cuda", "older"] = "none"
    return before


def _why(error: Exception, traced: Traced) -> str:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)) or "data-dependent" in str(error):
        return BRANCH
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if not traced.together and len(traced.states) == 1 and isinstance(error, (ValueError, IndexError, TypeError)):
        text += "; where its argument behind x is a tuple of states, name them: cell(..., states=('h', 'c'))"
    return text


def carried_out(nodes: Iterable[Node], known: Mapping[Node, torch.Tensor],
                like: torch.Tensor | None) -> dict[Node, Any]:
    """The values of nodes, in their order, by PyTorch; constants are on the device and of the type of ``like``."""
    values = dict(known)
    for node in nodes:
        if node in values:
            continue
        options = dict(node.kwargs)
        if like is not None and "device" in options:
            options["device"] = like.device
        if like is not None and options.get("dtype") in (torch.float32, torch.float16, torch.bfloat16):
            options["dtype"] = like.dtype
        args, options = torch.fx.node.map_arg((node.args, options), lambda n: values[n] if n in values else torch.zeros(
            shape_of(n), dtype=None if like is None else like.dtype))  # of which the shape alone counts
        values[node] = node.target(*args, **options)
    return values


def operator_name(node: Node) -> str:
    """PyTorch's name of a node's operator, without its overload: ``mul``, ``split_with_sizes``, ``getitem``."""
    if (schema := getattr(node.target, "_schema", None)) is None:
        return str(getattr(node.target, "__name__", node.target))
    return str(schema.name.partition("::")[2])


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of a node's operator by name, ``self`` as ``input``, with defaults for those left out."""
    given = {}
    for n, argument in enumerate(node.target._schema.arguments):
        usual = argument.default_value if argument.has_default_value() else None
        given["input" if argument.name == "self" else argument.name] = (
            node.args[n] if n < len(node.args) and not argument.kwarg_only else node.kwargs.get(argument.name, usual))
    return given


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


# -- lines of the user's files ------------------------------------------------------------------
def lines_of(node: Node) -> tuple[Place, ...]:
    """The files and lines that a node comes from, the innermost last."""
    return tuple((file, int(line)) for file, line in FRAME.findall(node.meta.get("stack_trace") or ""))


def pointed(message: str, at: Node | Sequence[Place]) -> CellError:
    """A :class:`CellError` with the last place, or line of a node, that is not PyTorch's or ours."""
    at = lines_of(at) if isinstance(at, Node) else at
    own = [place for place in at if not place[0].startswith(OTHERS)]
    if not own:
        return CellError(message)
    return CellError(f"{message}\n  {source_line(*own[-1])}", own[-1])


def place_of(definition: Callable[..., Any] | type) -> list[Place]:
    """The place where a class or function of the user is defined, if it has one."""
    try:
        return [(inspect.getsourcefile(definition) or "<unknown>", inspect.getsourcelines(definition)[1])]
    except (OSError, TypeError):
        return []
