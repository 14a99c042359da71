"""A cell: its states, its parameters and one step, as TVM tensor expressions.

A cell is the only place that knows its own formula. Analysis, schedules, tuner and runtime work on the
tensor-expression graph that :meth:`Cell.step` returns, so a cell written by a user gets all that built-in ones get::

    class MinimalGatedUnit(Cell):
        name = "mgu"
        states = ("h",)

        def parameters(self, I, H):
            return {"weight_ih": (2, H, I), "weight_hh": (2, H, H), "bias": (2, H)}

        def step(self, x, states, p):
            (h,) = states
            W, R, v = p["weight_ih"], p["weight_hh"], p["bias"]
            fx, nx, fh = product(x, W, 0), product(x, W, 1), product(h, R, 0)
            f = pointwise(lambda b, j: te.sigmoid(fx[b, j] + fh[b, j] + v[0, j]), h)
            kept = pointwise(lambda b, j: f[b, j] * h[b, j], h)
            nh = product(kept, R, 1)
            n = pointwise(lambda b, j: te.tanh(nx[b, j] + nh[b, j] + v[1, j]), h)
            return [pointwise(lambda b, j: h[b, j] + f[b, j] * (n[b, j] - h[b, j]), h)]"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ecornn.errors import CellError, WeightsError, source_line

if TYPE_CHECKING:
    from numpy.random import Generator
    from tvm.ir import Expr
    from tvm.te import Tensor
    from tvm.tirx import Var

Shape = tuple[int, ...]


class Cell(ABC):
    """A recurrent cell.

    Class attributes
    ----------------
    name : short identifier, lower case
    states : names of the states, in the order in which ``step`` takes and returns them
    output : what is the layer's output y: the name of a state, whose new value it is, or another name, of a tensor
        (B, H) that ``step`` returns behind the states; or several such names, for as many outputs. Default: the first
        state
    nonnegative : states, and inputs, that are never below 0, so that the random ones that a candidate is checked with
        are not either: a quotient by such a state may have no exact value otherwise
    inputs : names of sequences beside x, a value for each step, batch row and unit: ``step`` finds each among its
        parameters, as a tensor (B, H) that is read at [b, j]. A call gives them as ``inputs``
    unread : parameters that are passed though ``step`` does not read all of them; of others that is an error
    buffers, frozen : values of what is ``learned`` and does not train, tensors or arrays by name: an
        :class:`ecornn.torch.Recurrent` has them as buffers, and as parameters without gradients, that begin so"""

    name: str
    states: tuple[str, ...]
    output: str | tuple[str, ...] = ""
    nonnegative: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    buffers: Mapping[str, Any] = MappingProxyType({})
    frozen: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def parameters(self, input: int, hidden: int) -> Mapping[str, Shape]:
        """Shapes of the parameters.

        ``(G, H, K)`` for G matrices that map K values to H (K is ``input`` or ``hidden``, or H / heads of a
        :func:`product` with heads), ``(G, H)`` for G vectors. A user passes them flattened over the first two axes, as
        PyTorch stores them: ``(G*H, K)`` and ``(G*H,)``."""

    @abstractmethod
    def step(self, x: Tensor, states: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """One step on te tensors: x (B, I) and states (B, H) to the new states, each (B, H), and behind them those of
        ``output`` that are no states; ``parameters`` by name, and ``inputs``, (B, H) each."""

    def learned(self, input: int, hidden: int) -> Mapping[str, Shape]:
        """Shapes of the arrays that are trained, where the step's parameters are computed from them: two axes or three,
        of any sizes, passed flattened over the first two. Default: the parameters themselves."""
        return self.parameters(input, hidden)

    def derived(self, p: Mapping[str, Any], xp: Any) -> Mapping[str, Any]:
        """Computes parameters from ``p``, the arrays that are ``learned``.

        Returns them by name, of the shapes that ``parameters`` gives them, or with 1 in place of an axis along which
        they are all the same. Parameters that are among the ``learned`` ones need not be named. ``xp`` is ``numpy``,
        ``torch`` or ``jax.numpy``, and the arrays are its own.

        It is carried out once for weights, not in each step. :func:`ecornn.derive` calls it for weights that a module
        is bound to; an :class:`ecornn.torch.Recurrent` has what is learned as its parameters, with their gradients."""
        return {}

    def sample(self, name: str, shape: Shape, rng: Generator) -> Any:
        """Values of the parameter ``name``, or of an array that is ``learned`` in its place, of that shape, (G, H, K)
        or (G, H), as a trained layer might have them: candidates of the tuner are checked with them. Default: uniform
        between -1/sqrt(H) and 1/sqrt(H), as PyTorch begins.

        To be overridden where such values tell nothing, or cannot be: a period, a variance, a matrix with small
        eigenvalues. ``rng`` is NumPy's; a value that does not come of it is the same in each check."""
        bound = shape[1] ** -0.5
        return rng.uniform(-bound, bound, shape)

    def row_width(self, input: int, hidden: int) -> int:
        """Values of a row that a module reads: the I of x itself, behind them H of each of ``inputs``, in order."""
        return input + len(self.inputs) * hidden

    def own_input(self, width: int, hidden: int) -> int:
        """The I of x itself, of a row of that width."""
        return width - len(self.inputs) * hidden

    def parameter_name(self, name: str, layer: int = 0, reverse: bool = False) -> str:
        """The name under which a user passes a parameter; PyTorch's, with its suffix."""
        return f"{name}_l{layer}" + ("_reverse" if reverse else "")

    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs: of states, or of tensors that ``step`` returns behind these."""
        return (self.output or self.states[0],) if isinstance(self.output, str) else tuple(self.output)

    def returned_names(self) -> tuple[str, ...]:
        """Names of all that ``step`` returns, in order."""
        return (*self.states, *(name for name in self.output_names() if name not in self.states))

    def output_state(self) -> str:
        """Name of the state that is y. Raises :class:`~ecornn.errors.CellError` where y is no state, or not one."""
        (name, *others) = self.output_names()
        if name not in self.states or others:
            raise CellError(f"cell {self.name!r}: output {self.output!r} is not one of its states {self.states}")
        return name

    def identity(self) -> str:
        """Key of this cell in records: a name and a digest; of a built-in one the name and options."""
        from ecornn.analysis.digest import digest

        return f"{self.name}@{digest(self)}"


def derives(cell: Cell) -> bool:
    """True where a user passes other arrays than the parameters that the cell's step reads."""
    kind = type(cell)
    return kind.learned is not Cell.learned or kind.derived is not Cell.derived


def learned_shapes(cell: Cell, input: int, hidden: int) -> dict[str, Shape]:
    """Shapes of the arrays that are learned, as the cell gives them; :class:`CellError` where they are none."""
    try:
        shapes = {name: tuple(shape) for name, shape in cell.learned(input, hidden).items()}
    except Exception as error:  # the user's own code raises what it likes
        raise _failed(cell, type(cell).learned, f"learned() failed: {type(error).__name__}: {error}") from error
    for name, shape in shapes.items():
        if len(shape) not in (2, 3) or not all(isinstance(n, int) and n >= 1 for n in shape):
            raise _failed(cell, type(cell).learned, f"learned() gives {name!r} the shape {shape}; expected two or "
                          "three axes, such as (1, H), (1, 1) or (1, H, rank)")
    return shapes


def flat_shape(shape: Shape) -> Shape:
    """The shape of a parameter as a user passes it: gates are folded into the first axis."""
    return shape[0] * shape[1], *shape[2:]


def parameters_of(cell: Cell, given: Mapping[str, Any], input: int, hidden: int) -> dict[str, Any]:
    """The parameters that the cell's step reads, from the ``given`` arrays that it learned: arrays of one framework by
    name, in te shape. Raises :class:`CellError` where the cell's ``derived`` fails, or makes something else."""
    wanted = {name: tuple(shape) for name, shape in cell.parameters(input, hidden).items()}
    if not derives(cell):
        return {name: given[name] for name in wanted}
    xp, made_by = namespace(given), type(cell).derived
    try:
        values = {**given, **cell.derived(given, xp)}
    except Exception as error:  # the user's own code raises what it likes
        raise _failed(cell, made_by, f"derived() failed: {type(error).__name__}: {error}") from error
    if missing := [name for name in wanted if name not in values]:
        raise _failed(cell, made_by, f"derived() does not return {', '.join(missing)}, nor does learned()")
    parameters = {}
    for name, shape in wanted.items():
        has = tuple(values[name].shape)
        if len(has) != len(shape) or any(n not in (1, m) for n, m in zip(has, shape, strict=True)):
            raise _failed(cell, made_by, f"derived() returns {name!r} with shape {has}; expected {shape}; an axis "
                          "along which all values are equal may be 1")
        parameters[name] = values[name] if has == shape else xp.broadcast_to(values[name], shape)
    return parameters


def derive(cell: Cell | str, weights: Mapping[str, Any], input: int, hidden: int) -> dict[str, Any]:
    """Computes the weights that a module is bound to from the arrays that a cell has learned.

    Parameters
    ----------
    cell : a cell that overrides :meth:`Cell.learned`; of any other, a built-in one by name among them, weights are
        returned as they are
    weights : by name, ``A_l0``, ``A_l0_reverse``, ``A_l1``, ..., as the cell's ``learned`` has them, flattened over
        their first two axes: arrays of NumPy, PyTorch or JAX; where these have gradients, so has what is returned
    input, hidden : I and H of the layer, or of the first one of a stack

    Raises
    ------
    WeightsError : a name is missing, unknown, or has another shape
    CellError : the cell's ``derived`` fails, or makes something else than its ``parameters``"""
    if isinstance(cell, str) or not derives(cell):
        return dict(weights)
    left, bound, layer = dict(weights), {}, 0
    ends = (False, True)[:1 + any(name.endswith("_reverse") for name in weights)]
    while layer == 0 or left:
        for second in ends:
            width, learned = len(ends) * hidden if layer else input, {}
            for name, shape in learned_shapes(cell, width, hidden).items():
                key = cell.parameter_name(name, layer, second)
                if key not in left or tuple(left[key].shape) != flat_shape(shape):
                    has = tuple(left[key].shape) if key in left else "missing"
                    raise WeightsError(f"weights[{key!r}]: {has}; expected {flat_shape(shape)} for I={input} and "
                                       f"H={hidden}; the given names are {', '.join(weights) or 'none'}")
                learned[name] = left.pop(key).reshape(shape)
            for name, value in parameters_of(cell, learned, width, hidden).items():
                bound[cell.parameter_name(name, layer, second)] = value.reshape(flat_shape(tuple(value.shape)))
        layer += 1
    return bound


def namespace(arrays: Mapping[str, Any]) -> Any:
    """The module with the functions for these arrays: ``torch``, ``jax.numpy`` or ``numpy``."""
    roots = {base.__module__.partition(".")[0] for value in arrays.values() for base in type(value).__mro__}
    for root, module in (("torch", "torch"), ("jax", "jax.numpy"), ("jaxlib", "jax.numpy")):
        if root in roots and module in sys.modules:  # there is such an array, so that it is imported
            return sys.modules[module]
    import numpy as np

    return np


def _failed(cell: Cell, function: Any, words: str) -> CellError:
    """An error with the line at which this function of the cell begins."""
    code = function.__code__
    at = code.co_filename, code.co_firstlineno
    return CellError(f"cell {cell.name!r}: {words}\n  {source_line(*at)}", at)


def product(source: Tensor, weight: Tensor, gates: Sequence[int] | int | None = None, name: str = "",
            heads: int = 1) -> Tensor:
    """Matrix products of ``source`` (B, K) with gates of ``weight`` (G, H, K).

    ``gates`` selects: a sequence (default: all G) gives a tensor (B, len(gates), H), whose entry
    ``[b, g, j]`` is ``sum_k source[b, k] * weight[gates[g], j, k]``; one integer gives (B, H).

    With ``heads`` a matrix has blocks on its diagonal, and ``weight`` (G, H, H / heads) these alone: row j multiplies
    the H / heads values of ``source`` (B, H) that belong to j's own head, ``j // (H / heads)``. In memory that is
    (G, heads, H / heads, H / heads). Raises :class:`CellError` where H is no multiple of ``heads``, or ``weight`` has
    another shape."""
    from tvm import te, tirx

    batch, hidden = source.shape[0], weight.shape[1]
    name = name or f"{source.op.name}_{weight.op.name}"
    own = _head_size(source, weight, heads)
    k = te.reduce_axis((0, own), "k")

    def at(j: Expr) -> Expr:
        return k if heads == 1 else tirx.floordiv(j, tirx.const(own, "int32")) * own + k

    if isinstance(gates, int):
        return te.compute((batch, hidden),
                          lambda b, j: te.sum(source[b, at(j)] * weight[gates, j, k], axis=k), name=name)
    chosen = range(int(weight.shape[0])) if gates is None else gates
    if not isinstance(chosen, Sequence) or not all(isinstance(g, int) for g in chosen):
        raise CellError(f"product(..., gates={gates!r}): gates must be an integer, or a sequence of integers")
    if not (count := len(chosen)):
        raise CellError("product(..., gates=[]): at least one gate is needed")
    first = chosen[0]
    if list(chosen) != list(range(first, first + count)):
        raise CellError(f"product(..., gates={list(chosen)}): gates must be consecutive")
    return te.compute((batch, count, hidden),
                      lambda b, g, j: te.sum(source[b, at(j)] * weight[g + first, j, k], axis=k), name=name)


def _head_size(source: Tensor, weight: Tensor, heads: int) -> Any:
    """Values that a unit's row of ``weight`` multiplies."""
    if heads == 1:
        return source.shape[1]
    shape, width, name = tuple(int(s) for s in weight.shape), int(source.shape[1]), weight.op.name
    if not isinstance(heads, int) or heads < 1:
        raise CellError(f"product(..., {name}, heads={heads!r}): heads must be an integer of at least 1")
    if shape[1] != width:
        raise CellError(f"product({source.op.name}, {name}, heads={heads}): only products of H = {shape[1]} values can "
                        f"have heads; {source.op.name} has {width}")
    if width % heads or len(shape) != 3 or shape[2] != width // heads:
        raise CellError(f"product(..., {name}, heads={heads}): H = {width} must be a multiple of heads, and {name} "
                        f"(G, H, H / heads); it is {shape}")
    return width // heads


def pointwise(function: Callable[[Var, Var], Expr | tuple[Expr, ...]], like: Tensor, name: str = "") -> Any:
    """A tensor (B, H), or several, from ``function(b, j)``; ``like`` is any state. Raises :class:`CellError` where the
    function returns no values."""
    from tvm import te
    from tvm.ir import Expr
    from tvm.te.tensor import TensorSlice

    def value(b: Var, j: Var) -> Any:  # TVM looks at the signature, and takes no default arguments
        values = function(b, j)
        for one in values if isinstance(values, (tuple, list)) else (values,):
            if not isinstance(one, (Expr, TensorSlice, int, float)):  # TVM does not survive None
                raise CellError(f"pointwise(function, ...): function(b, j) returned {one!r}; expected one or several "
                                "values, such as h[b, j] or floats")
        return values

    return te.compute(like.shape, value, name=name or "pointwise")


def mean(source: Tensor, name: str = "", groups: int = 1) -> Tensor:
    """The mean (B,) of each batch row of ``source``, (B, H), or over all gates together of (B, G, H). With ``groups``
    it is (B, H): at each unit that of its own group of H / groups units, one behind the other."""
    return _mean(source, lambda value: value, name or f"{source.op.name}_mean", groups)


def normalized(source: Tensor, epsilon: float = 1e-5, name: str = "", groups: int = 1) -> Tensor:
    """Layer normalization (Ba et al. 2016, arXiv 1607.06450) without gain and bias, of the shape of ``source``:
    (B, H), or (B, G, H), whose gates then share one mean and variance. With ``groups`` each group of H / groups units
    has its own (Wu and He 2018, arXiv 1803.08494).

    ``(source - mean) / sqrt(variance + epsilon)``, the variance that of all values, not of a sample."""
    from tvm import te

    name = name or f"{source.op.name}_normalized"
    middle = mean(source, f"{name}_mean", groups)
    apart = te.compute(source.shape, lambda *at: source[at] - _own(middle, at), name=f"{name}_apart")
    variance = _mean(apart, lambda value: value * value, f"{name}_variance", groups)
    scale = te.compute(variance.shape, lambda *at: te.rsqrt(variance[at] + te.const(epsilon, "float32")),
                       name=f"{name}_scale")
    return te.compute(source.shape, lambda *at: apart[at] * _own(scale, at), name=name)


def largest(source: Tensor, name: str = "", groups: int = 1) -> Tensor:
    """The maximum (B,) of each batch row of ``source``, (B, H), or over all gates together of (B, G, H). With
    ``groups`` it is (B, H): at each unit that of its own group of H / groups units, one behind the other. Its gradient
    is shared among all values that are the maximum, as of PyTorch's ``amax``."""
    from tvm import te

    return _reduced(source, te.max, lambda value: value, name or f"{source.op.name}_largest", groups)


def softmax(source: Tensor, name: str = "", groups: int = 1) -> Tensor:
    """exp(source) / sum(exp(source)) over the hidden units of each batch row of ``source``, (B, H); with ``groups``
    over each group of H / groups units. The source may be narrower than H.

    The row's maximum is subtracted before, so that no exponential is too large: a maximum, and a sum that waits for it.
    """
    from tvm import te

    from ecornn.analysis.declared import SHIFT

    if len(source.shape) != 2:
        raise CellError(f"softmax({source.op.name}): expected a tensor (B, H), such as a product of one gate; it "
                        f"has {len(source.shape)} axes")
    name = name or f"{source.op.name}_softmax"
    shift = _reduced(source, te.max, lambda value: value, f"{name}_shift", groups, {SHIFT: 1})
    power = te.compute(source.shape, lambda *at: te.exp(source[at] - _own(shift, at)), name=f"{name}_exp")
    total = _reduced(power, te.sum, lambda value: value, f"{name}_sum", groups)
    return te.compute(source.shape, lambda *at: power[at] / _own(total, at), name=name)


def scaled(source: Tensor, gain: Tensor, first: int = 0) -> Tensor:
    """:func:`normalized` ``source`` (B, G, H), times gates ``first``, ``first`` + 1, ... of ``gain`` (G', H)."""
    from tvm import te

    value = normalized(source)
    return te.compute(source.shape, lambda b, g, j: value[b, g, j] * gain[g + first, j],
                      name=f"{source.op.name}_scaled")


def _own(value: Tensor, at: Sequence[Var]) -> Expr:
    """The element of ``value``, (B,) of rows or (B, H) of groups, that a unit reads."""
    return value[at[0]] if len(value.shape) == 1 else value[at[0], at[-1]]


def _mean(source: Tensor, function: Callable[[Expr], Expr], name: str, groups: int) -> Tensor:
    """The mean of a function of the values of each batch row, or group."""
    from tvm import te

    total = _reduced(source, te.sum, function, f"{name}_sum", groups)
    count = math.prod(int(extent) for extent in source.shape[1:]) // groups
    return te.compute(total.shape, lambda *at: total[at] * te.const(1.0 / count, "float32"), name=name)


def _reduced(source: Tensor, reduction: Callable[..., Expr], function: Callable[[Expr], Expr], name: str, groups: int,
             attributes: dict[str, int] | None = None) -> Tensor:
    """A sum or maximum over the units of each batch row, and over gates: (B,), or with ``groups`` (B, H)."""
    from tvm import te, tirx

    *gates, hidden = (int(extent) for extent in source.shape[1:])
    if not isinstance(groups, int) or groups < 1 or hidden % groups:
        raise CellError(f"{name}: groups={groups!r} must be an integer that divides H = {hidden}")
    own = hidden // groups
    axes = [te.reduce_axis((0, extent), "k") for extent in (*gates, own)]

    def value(b: Var, *j: Var) -> Expr:
        place = [tirx.floordiv(unit, tirx.const(own, "int32")) * own + axes[-1] for unit in j] or axes[-1:]
        return reduction(function(source(b, *axes[:-1], *place)), axis=axes)

    batch, options = source.shape[0], {"name": name, "attrs": attributes or {}}
    if groups == 1:
        return te.compute((batch,), lambda b: value(b), **options)
    return te.compute((batch, hidden), lambda b, j: value(b, j), **options)
