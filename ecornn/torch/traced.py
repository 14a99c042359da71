"""``cell()``: a step that is written in PyTorch, as a cell, which is compared with it on random inputs."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from ecornn.boundary import public
from ecornn.cells.base import parameters_of
from ecornn.errors import ArgumentError, CellError
from ecornn.torch.traced_graph import Learned, Sizes, Traced, carried_out, operator_name, place_of, pointed, reached
from ecornn.torch.traced_step import TracedCell, named
from ecornn.torch.traced_values import BATCH, COLUMNS, GATES, ONE, UNITS, Value

# B, where x and states come from, and the scale of gradients: also values in (0, 1), where all functions have one,
# zeros, with which sequences begin and where many have kinks, and large gradients, which backward passes may clip.
DRAWS = ((3, "normal", 1.0), (2, "normal, large", 100.0), (4, "unit", 1.0), (1, "zeros", 1.0))
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-4}  # relative; constants of a step are float32
Array = NDArray[Any]


@public
def cell(step: Any, *, input_size: int | None = None, hidden_size: int | None = None,
         states: Sequence[str] | None = None, name: str | None = None) -> TracedCell:
    """A step that is written in PyTorch, as an :class:`ecornn.Cell`.

    Parameters
    ----------
    step : a ``torch.nn.Module`` or a function, called as ``step(x, h)``, ``step(x, h, c)`` or, with several ``states``,
        ``step(x, (h, c))``, with x (B, I) and states (B, H); it returns the new states in their order, or y (B, H)
        before these. Also a ``torch.nn.LSTMCell``, ``GRUCell`` or ``RNNCell``
    input_size, hidden_size : I and H of the module; default: its attributes of these names
    states : their names; default: those of the step's arguments behind x
    name : of the cell; default: the module's class

    Its parameters are the module's, with underscores for dots in their names; :meth:`TracedCell.weights` returns their
    values. A matrix, or vector, of less than H rows stays so at any H; such a vector is a parameter (H,), zeros behind
    it. PyTorch computes tensors that the module computes of its weights alone, as a weight norm or a mask, once for
    weights and not in each step: then the cell's ``learned`` are the module's. Buffers do not train, nor do parameters
    that are frozen.

    torch.export reads the step once: a branch of Python cannot depend on the values of tensors. The cell is compared
    with the module, on random inputs and states, values and gradients, before it is returned.

    Raises :class:`~ecornn.errors.CellError` for an operator that is not taken, with its line, and if the cell computes
    anything else than the module, with the first operator that differs; and
    :class:`~ecornn.errors.ArgumentError` if a size or a name is missing."""
    if not isinstance(step, torch.nn.Module) and not callable(step):
        raise ArgumentError("step", step, "a torch.nn.Module or a function")
    sizes = {}
    for key, value in (("input_size", input_size), ("hidden_size", hidden_size)):
        size = value if value is not None else getattr(step, key, None)
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(key, size, "an integer of at least 1, as an argument or an attribute of the module")
        sizes[key] = size
    own = type(step).__name__ if isinstance(step, torch.nn.Module) else getattr(step, "__name__", "step")
    name = re.sub(r"\W", "_", own).strip("_").lower() if name is None else name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII):
        raise ArgumentError("name", name, "letters, digits and underscores, with a letter first")
    names = states_of(step, states)
    together = len(names) > 1 and len(_positional(step)) == 2
    traced = named(name, Traced(step, sizes["input_size"], sizes["hidden_size"], names, together))
    hold(traced)
    return traced


def states_of(step: Any, states: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the states, given or of the step's arguments. Raises :class:`ArgumentError` if there are none."""
    if states is not None:
        if isinstance(states, str) or not states or not all(isinstance(s, str) for s in states):
            raise ArgumentError("states", states, "a tuple of names, such as ('h', 'c')")
        return tuple(states)
    given = _positional(step)[1:]
    if given == ["hx"] and isinstance(step, torch.nn.RNNCellBase):
        return ("h", "c") if isinstance(step, torch.nn.LSTMCell) else ("h",)
    if not given:
        raise ArgumentError("step", step, "a step with states as arguments after x")
    return tuple(given)


def _positional(step: Any) -> list[str]:
    given = inspect.signature(step.forward if isinstance(step, torch.nn.Module) else step).parameters.values()
    return [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


# -- a comparison of a traced cell with its module ------------------------------------------------
@dataclass(frozen=True)
class Draw:
    x: torch.Tensor
    states: list[torch.Tensor]
    upstream: list[torch.Tensor]


def hold(cell: TracedCell) -> None:
    """Compares a cell with its module. Raises :class:`~ecornn.errors.CellError` if it computes anything else."""
    from ecornn.analysis import analyse
    from ecornn.analysis.adjoint import adjoint

    try:
        graph = analyse(cell, cell.own.input, cell.own.hidden)
    except CellError as error:
        raise _at_its_operator(cell, error) from error
    derivative = None
    with suppress(CellError, NotImplementedError):  # of a step that has none, which an error says when it is to train
        derivative = adjoint(graph, cell.own.hidden)
    if (exact := _double(cell)) is not None:
        with suppress(CellError):  # constants may be other ones in float64, such as the least epsilon
            _hold(cell, derivative, exact, torch.float64)
            return
    _hold(cell, derivative, cell.traced.step, torch.float32)


def _hold(cell: TracedCell, derivative: Any, step: Any, kind: torch.dtype) -> None:
    for batch, how, steep in DRAWS:
        draw = _drawn(cell, batch, how, steep, kind)
        try:
            wanted = _of_module(cell, step, draw)
        except Exception as error:  # the user's own code raises what it likes
            raise CellError(f"the step fails with {batch} row{'s' * (batch > 1)}: {type(error).__name__}: {error}") \
                from error
        _compare(cell, derivative, draw, wanted, LIMITS[kind])


def _double(cell: TracedCell) -> Any | None:
    """The step on float64, by a copy of its module; None if that fails."""
    step = cell.traced.step
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = copy.deepcopy(step).cpu().double() if isinstance(step, torch.nn.Module) else step
            _called(cell, step, _drawn(cell, 2, "unit", 1.0, torch.float64))
    except Exception:  # a module that cannot be copied, or has constants of another type
        return None
    return step


def _drawn(cell: TracedCell, batch: int, how: str, steep: float, kind: torch.dtype) -> Draw:
    generator = torch.Generator().manual_seed(batch)

    def drawn(width: int) -> torch.Tensor:
        if how == "zeros":
            return torch.zeros(batch, width, dtype=kind)
        if how == "unit":
            return (0.05 + 0.9 * torch.rand(batch, width, generator=generator)).to(kind)
        return (torch.randn(batch, width, generator=generator) * (4.0 if how == "normal, large" else 1.0)).to(kind)

    states, results = [drawn(cell.own.hidden) for _ in cell.traced.states], range(len(cell.states))
    upstream = [torch.randn(states[0].shape, generator=generator).to(kind) * steep for _ in results]
    return Draw(drawn(cell.own.input), states, upstream)


def _called(cell: TracedCell, step: Any, draw: Draw) -> list[torch.Tensor]:
    """The tensors that the module returns, without y if that is the first state."""
    device = next((t.device for t in step.parameters()), None) if isinstance(step, torch.nn.Module) else None
    x, states = draw.x.to(device), [s.to(device) for s in draw.states]
    flat: list[torch.Tensor] = tree_leaves(step(x, tuple(states)) if cell.traced.together else step(x, *states))
    return flat if len(flat) == len(states) + cell.shown else flat[1:]


@dataclass(frozen=True)
class Wanted:
    """The module's new states, gradients of x and the states, gradients of parameters, and all results."""

    values: list[Array]
    inner: list[Array] | None
    outer: dict[str, Array]
    returned: list[torch.Tensor]


def _of_module(cell: TracedCell, step: Any, draw: Draw) -> Wanted:
    given = [v.clone().requires_grad_() for v in (draw.x, *draw.states)]
    parameters = {n: p for n, p in step.named_parameters() if p.requires_grad} if isinstance(
        step, torch.nn.Module) else {}
    wanted = [*given, *parameters.values()]

    def called() -> list[torch.Tensor]:
        x, *states = (v * 1.0 for v in given)  # copies, since the step may write to them
        return _called(cell, step, Draw(x, states, []))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.enable_grad():
                results = called()
                _no_others(results, wanted)
                reached = [(m, g.to(m.device, m.dtype)) for m, g in zip(results, draw.upstream, strict=True) if
                           m.requires_grad]
                gradients = torch.autograd.grad([m for m, _ in reached], wanted, [g for _, g in reached],
                                                allow_unused=True) if reached else [None] * len(wanted)
        except RuntimeError:  # of an operator without a derivative, or a value that was written to: it does not train
            with torch.no_grad():
                return Wanted([_array(m) for m in called()], None, {}, [])
    arrays = [np.zeros(tuple(v.shape)) if g is None else _array(g) for v, g in zip(wanted, gradients, strict=True)]
    outer = dict(zip(parameters, arrays[len(given):], strict=True))
    return Wanted([_array(m) for m in results], arrays[:len(given)], outer, results)


def _no_others(results: list[torch.Tensor], known: list[torch.Tensor]) -> None:
    """Raises :class:`CellError` if the step has gradients for a tensor that is no parameter of its module."""
    own = {id(v) for v in known}
    for node in _backwards(results):
        value = getattr(node, "variable", None)
        if value is not None and id(value) not in own:
            raise CellError(f"the step reads a parameter of shape {tuple(value.shape)} that its module does not "
                            "have; register it in the module, so that the layer also has it")


def _array(value: torch.Tensor) -> Array:
    return np.asarray(value.detach().double().cpu().numpy())


def _compare(cell: TracedCell, derivative: Any, draw: Draw, wanted: Wanted, limit: float) -> None:
    """Raises the error that says how values or gradients of the cell differ from those that are ``wanted``."""
    from ecornn.analysis.backpropagation import backpropagate
    from ecornn.interpreter import interpret

    originals = {learned: learned.value.detach().double().cpu() for learned in cell.graph.learned.values()}
    for learned, value in originals.items():
        value.requires_grad_(learned.kind == "parameter" and value.is_floating_point())
    parameters = _parameters(cell, originals)
    arrays = {name: _array(value) for name, value in parameters.items()}
    x, states = _array(draw.x)[None], [_array(s) for s in draw.states]
    before = [np.zeros_like(states[0])] * cell.shown + states
    with np.errstate(all="ignore"):
        _, last = interpret(cell, x, arrays, before)
        if any(_far(got, value, limit) for got, value in zip(last, wanted.values, strict=True)):
            raise _differs(cell, draw, arrays, limit)
        if derivative is None or wanted.inner is None or not all(np.isfinite(value).all() for value in wanted.values):
            return  # there is nothing to compare
        outputs = np.zeros((1, len(x[0]), derivative.forward.written * cell.own.hidden))
        dx, dparameters, dstates = backpropagate(derivative, x, arrays, before, outputs,
                                                 [_array(g) for g in draw.upstream])
    through = {name: p for name, p in parameters.items() if p.requires_grad}
    trained = {one.name: value for one, value in originals.items() if value.requires_grad}
    upstream = [torch.from_numpy(np.ascontiguousarray(dparameters[n])).reshape(p.shape) for n, p in through.items()]
    gradients = torch.autograd.grad([*through.values()], [*trained.values()], upstream, allow_unused=True) if (
        through and trained) else [None] * len(trained)
    by_name = dict(zip(trained, gradients, strict=True))
    pairs = [*zip(("x", *cell.traced.states), (dx[0], *dstates[cell.shown:]), wanted.inner, strict=True)]
    pairs += [(name, np.zeros_like(want) if (g := by_name.get(name)) is None else _array(g), want)
              for name, want in wanted.outer.items()]
    largest = max((float(np.abs(want[np.isfinite(want)]).max(initial=0.0)) for *_, want in pairs), default=0.0)
    wrong = next((name for name, got, want in pairs if _far(got, want, 2 * limit, largest)), None)
    if wrong is not None:
        raise _other_gradient(cell, wrong, wanted.returned)


def _parameters(cell: TracedCell, originals: dict[Learned, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The cell's parameters in te shape, from the module's tensors, with their gradients."""
    read, (input, hidden) = cell.read, (cell.own.input, cell.own.hidden)
    own = {name: source.use.of(originals[source.learned], cell.own) for name, source in read.direct.items()}
    own |= {name: originals[one].reshape(cell.learned(input, hidden)[name]) for name, one in read.originals.items()}
    return {name: torch.as_tensor(value) for name, value in parameters_of(cell, own, input, hidden).items()}


def _far(got: Array, wanted: Array, limit: float, largest: float = 0.0) -> bool:
    """Tells whether values differ from those that are wanted; places that are no numbers in both are equal."""
    if got.shape != wanted.shape or (np.isfinite(got) != np.isfinite(wanted)).any():
        return True
    finite = np.isfinite(wanted)
    unit = max(float(np.abs(wanted[finite]).max(initial=0.0)), 1e-3 * largest, 1e-6)  # no square of which overflows
    apart, size = np.linalg.norm((got[finite] - wanted[finite]) / unit), np.linalg.norm(wanted[finite] / unit)
    return not apart <= limit * max(float(size), 1.0)


# -- what to say --------------------------------------------------------------------------------
def _at_its_operator(cell: TracedCell, error: CellError) -> CellError:
    """The analysis' error with the line of the operator that it names."""
    text = str(error).splitlines()[0]
    words = {word.rstrip("0123456789").rstrip("_") if cut else word for word in re.findall(r"\w+", text)
             for cut in (False, True)}
    named = [node for node in cell.graph.nodes if node in cell.graph.data and node.name in words]
    return pointed(text, named[0]) if named else CellError(text)


def _differs(cell: TracedCell, draw: Draw, arrays: dict[str, Array], limit: float) -> CellError:
    """The error that names the first operator whose te value is not PyTorch's."""
    from ecornn.interpreter import Step

    batch = cell.own.batch
    again = torch.arange(batch) % len(draw.x)  # constants of the graph have its own number of rows
    rows = Draw(draw.x[again].double(), [s[again].double() for s in draw.states], [])
    states = [np.zeros((batch, cell.own.hidden))] * cell.shown + [_array(s) for s in rows.states]
    step = Step(cell, (batch, cell.own.input), (batch, cell.own.hidden))
    step(_array(rows.x), states, arrays)
    walk = cell.walk(step.x, step.states, step.parameters)
    known: dict[Any, Any] = dict(zip(cell.graph.given, (rows.x, *rows.states), strict=True))
    known |= {node: learned.value.detach().cpu().double() if learned.value.is_floating_point() else learned.value.cpu()
              for node, learned in cell.graph.learned.items()}
    wanted = carried_out(cell.graph.nodes, known, rows.x)
    for node in cell.graph.nodes:
        value = walk.known.get(node)
        if isinstance(value, Value) and _far(_assembled(step, value, cell.own), _array(wanted[node] * 1.0), limit):
            return pointed(f"cell {cell.name!r}: {operator_name(node)} computes another value than PyTorch. This is "
                           "a fault of ecornn; please report it", node)
    return CellError(f"cell {cell.name!r}: the step returns other values than its exported graph. It may depend on "
                     "something that changes between calls, such as an attribute that it sets or the number of rows")


def _assembled(step: Any, value: Value, sizes: Sizes) -> Array:
    """A value in the shape that PyTorch's tensor has."""
    rows = []
    for gate in value.gates:
        row = np.asarray(step.tensor(gate.tensor), np.float64)
        row = row[:, None] if row.ndim == 1 else row[:, gate.index] if row.ndim == 3 else row
        rows.append(row[:, :sizes.width(gate.width)])
    axes = [axis for axis in value.axes if axis != ONE]
    if UNITS in axes and COLUMNS not in axes:
        whole, own = np.stack(rows, axis=1), [BATCH, GATES, UNITS]
    else:
        last = next((axis for axis in (COLUMNS, GATES) if axis in axes), ONE)
        whole, own = np.concatenate(rows, axis=1), [BATCH, last]
    order = [own.index(axis) for axis in axes] + [n for n, axis in enumerate(own) if axis not in axes]
    return np.asarray(whole.transpose(order).reshape(value.shape(sizes)))


def _other_gradient(cell: TracedCell, name: str, returned: list[torch.Tensor]) -> CellError:
    """The error that says what may have dropped or replaced a gradient."""
    own = [node._forward_cls for node in _backwards(returned) if isinstance(
        node, torch.autograd.function.BackwardCFunction)]
    reasons = [(f"the backward of {kind.__name__}, a torch.autograd.Function, is not grad_output times a value for "
                "each element", tuple(place_of(kind)))
               for kind in own]
    reasons += [(f"{what} drops a gradient", where) for what, where in cell.graph.suspects]
    why, where = reasons[0] if reasons else ("a tensor has a hook, or an operator defines its own derivative", ())
    return pointed(f"cell {cell.name!r}: the gradient of {name} differs from the module's: {why}. A "
                   "cell has the gradients of its forward step, and of Functions such values", where)


def _backwards(returned: list[torch.Tensor]) -> Iterable[Any]:
    return reached([t.grad_fn for t in returned if t.grad_fn is not None],
                   lambda node: [after for after, _ in node.next_functions if after is not None])
