"""The gradients of the layers in NumPy float64, which compiled ones are checked against: from the formulas of
``numpy_reference.py`` and a tape of arrays that remember how they were computed, apart from ``ecornn.analysis`` and
without TVM. The tape knows the functions that these formulas use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ecornn.boundary import public
from ecornn.errors import ShapeError
from ecornn.numpy_reference import Array, States, checked, formula_of, run

Back = Callable[[Array], Any]  # gradient of a result -> that of one operand, which may be broader than the operand


@public
def reference_gradients(cell: str, x: Any, weights: Mapping[str, Any], state: Sequence[Any] | None = None, *, dy: Any,
                        dstate: Sequence[Any] | None = None, lengths: Any = None,
                        resets: Any = None) -> tuple[Array, dict[str, Array], States]:
    """Gradients of a layer, or of a stack of them, in float64.

    Parameters
    ----------
    cell : one that has a formula in NumPy, by its name
    x, weights, state, lengths, resets : as of :func:`~ecornn.numpy_reference.reference`
    dy : (T, B, D*H), the gradient of y
    dstate : gradients of the states after the last step, of the shape of ``state``; None: zeros

    Returns
    -------
    dx : (T, B, I) float64
    dweights : by the names of ``weights``, of their shapes, float64
    dstate : gradients of the first states, float64

    Raises
    ------
    ArgumentError, WeightsError, ShapeError : as ``reference``; ``dy`` or ``dstate`` has another shape than y or states
    """
    call = checked(formula_of(cell), x, weights, state, lengths, resets)
    traced = replace(call, x=Traced(call.x), weights={n: Traced(w) for n, w in call.weights.items()},
                     before=[Traced(s) for s in call.before])
    y, last = run(traced)
    dstate = [np.zeros(s.shape) for s in last] if dstate is None else dstate
    if len(dstate) != len(last):
        raise ShapeError("len(dstate)", len(dstate), f"{len(last)} for {cell!r}")
    names = ("dy", *(f"dstate[{n}]" for n in range(len(last))))
    results = [*zip((y, *last), (np.asarray(g, np.float64) for g in (dy, *dstate)), strict=True)]
    for name, (result, gradient) in zip(names, results, strict=True):
        if gradient.shape != result.shape:
            raise ShapeError(f"{name}.shape", gradient.shape, str(result.shape))
    backward(results)
    return (traced.x.gradient, {n: w.gradient for n, w in traced.weights.items()},
            tuple(s.gradient.reshape(*call.outer, *s.shape[1:]) for s in traced.before))


class Traced(NDArrayOperatorsMixin):
    """An array with a tape: its ``value``, and after :func:`backward` of a result of it its ``gradient``. Where there
    is no derivative: ``maximum`` and ``minimum`` share it between equal values but give none to one that is equal to a
    number; ``clip`` counts its bounds to its inside; ``abs`` has 0 at 0."""

    def __init__(self, value: Any, parents: Sequence[tuple[Traced, Back]] = ()) -> None:
        self.value = np.asarray(value, np.float64)
        self.parents, self.gradient = tuple(parents), np.zeros_like(self.value)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        values = [plain(v) for v in inputs]
        result = function(*values)
        if result.dtype == bool or function not in DERIVATIVES:
            return result if result.dtype == bool else NotImplemented
        backs = DERIVATIVES[function](result, *values)
        return Traced(result, [(v, back) for v, back in zip(inputs, backs, strict=True) if isinstance(v, Traced)])

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Any:
        return FUNCTIONS[function](*args, **options) if function in FUNCTIONS else NotImplemented

    def __getitem__(self, index: Any) -> Traced:
        def back(g: Array) -> Array:
            whole = np.zeros_like(self.value)
            np.add.at(whole, index, g)
            return whole

        return Traced(self.value[index], [(self, back)])

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Traced]:
        return (self[n] for n in range(len(self)))

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    T = property(lambda self: Traced(self.value.T, [(self, lambda g: g.T)]))

    def reshape(self, *shape: int) -> Traced:
        return Traced(self.value.reshape(*shape), [(self, lambda g: g.reshape(self.shape))])

    def mean(self, axis: int, keepdims: bool = False) -> Traced:
        count = self.shape[axis]

        def back(g: Array) -> Array:
            return np.broadcast_to(g if keepdims else np.expand_dims(g, axis), self.shape) / count

        return Traced(self.value.mean(axis=axis, keepdims=keepdims), [(self, back)])

    def var(self, axis: int) -> Traced:
        return np.square(self - self.mean(axis, keepdims=True)).mean(axis)


def plain(value: Any) -> Any:
    """The array without its tape."""
    return value.value if isinstance(value, Traced) else np.asarray(value)


def backward(results: Sequence[tuple[Traced, Array]]) -> None:
    """Adds to ``gradient`` of all arrays that ``results`` were computed from, by the gradients of the results."""
    order, seen, waiting = list[Traced](), set[int](), [(r, False) for r, _ in results]
    while waiting:
        array, done = waiting.pop()
        if done:
            order.append(array)
        elif id(array) not in seen:
            seen.add(id(array))
            waiting += [(array, True), *((p, False) for p, _ in array.parents)]
    for array, gradient in results:
        array.gradient = array.gradient + gradient
    for array in reversed(order):
        for parent, back in array.parents:
            parent.gradient = parent.gradient + _narrowed(np.asarray(back(array.gradient)), parent.shape)


def _narrowed(g: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of an array of ``shape`` that was broadcast."""
    g = g.sum(axis=tuple(range(g.ndim - len(shape))))
    return g.sum(axis=tuple(n for n, size in enumerate(shape) if size == 1 != g.shape[n]), keepdims=True)


def _extremum(r: Array, a: Array, b: Array) -> tuple[Back, Back]:
    of_a, of_b = (0.5 if v.ndim else 0.0 for v in (b, a))  # where they are equal
    return lambda g: g * np.where(a == b, of_a, a == r), lambda g: g * np.where(a == b, of_b, b == r)


def _clip(a: Any, low: Any, high: Any) -> Any:
    value = plain(a)
    return Traced(np.clip(value, low, high), [(a, lambda g: g * ((value >= low) & (value <= high)))])


def _where(condition: Any, yes: Any, no: Any) -> Any:
    parts = ((yes, lambda g: np.where(condition, g, 0.0)), (no, lambda g: np.where(condition, 0.0, g)))
    return Traced(np.where(condition, plain(yes), plain(no)), [(v, b) for v, b in parts if isinstance(v, Traced)])


def _concatenate(arrays: Sequence[Any], axis: int = 0) -> Traced:
    cuts = np.cumsum([0, *(a.shape[axis] for a in arrays)])
    parents = [(a, lambda g, n=n: np.take(g, range(cuts[n], cuts[n + 1]), axis))
               for n, a in enumerate(arrays) if isinstance(a, Traced)]
    return Traced(np.concatenate([plain(a) for a in arrays], axis), parents)


def _stack(arrays: Sequence[Any]) -> Traced:
    parents = [(a, lambda g, n=n: g[n]) for n, a in enumerate(arrays) if isinstance(a, Traced)]
    return Traced(np.stack([plain(a) for a in arrays]), parents)


def _split(array: Traced, parts: int, axis: int = 0) -> list[Traced]:
    width, before = array.shape[axis] // parts, (slice(None),) * axis
    return [array[before + (slice(n * width, (n + 1) * width),)] for n in range(parts)]  # noqa: RUF005


def erf(array: Any) -> Any:
    value = plain(array)
    result = np.vectorize(math.erf, otypes=[np.float64])(value)
    slope = 2 / math.sqrt(math.pi) * np.exp(-np.square(value))
    return Traced(result, [(array, lambda g: g * slope)]) if isinstance(array, Traced) else result


def custom_gradient(value: Any, *pairs: tuple[Any, Any]) -> Any:
    """``value``, with the derivatives that ``pairs`` say: (operand, derivative by it) each, as in ecornn's."""
    derivatives = [(x, plain(d)) for x, d in pairs]
    parents = [(x, lambda g, d=d: g * d) for x, d in derivatives if isinstance(x, Traced)]
    return Traced(plain(value), parents) if parents else plain(value)


SURROGATES: dict[str, Callable[[Array, float], Any]] = {  # of (u, slope)
    "fast_sigmoid": lambda u, slope: (1.0 + slope * np.abs(u)) ** -2.0,
    "arctan": lambda u, slope: 0.5 * slope / (1.0 + np.square(0.5 * np.pi * slope * u)),
    "sigmoid": lambda u, slope: 0.25 * slope * (1.0 - np.square(np.tanh(0.5 * slope * u))),
    "triangle": lambda u, slope: np.where(np.abs(u) * slope < 1.0, slope - slope * slope * np.abs(u), 0.0),
    "straight_through": lambda u, slope: np.ones_like(u)}


def spike(v: Any, threshold: Any = 0.0, surrogate: str = "fast_sigmoid", slope: float = 25.0) -> Any:
    """1 where ``v`` is above the threshold, else 0, with the derivative of a surrogate, as ``ecornn.spike`` has it."""
    u = v - threshold
    return custom_gradient(np.where(plain(u) > 0.0, 1.0, 0.0), (u, SURROGATES[surrogate](plain(u), slope)))


DERIVATIVES: dict[Any, Callable[..., tuple[Back, ...]]] = {  # of (result, operands)
    np.add: lambda r, a, b: (lambda g: g, lambda g: g),
    np.subtract: lambda r, a, b: (lambda g: g, lambda g: -g),
    np.multiply: lambda r, a, b: (lambda g: g * b, lambda g: g * a),
    np.divide: lambda r, a, b: (lambda g: g / b, lambda g: -g * r / b),
    np.matmul: lambda r, a, b: (lambda g: g @ b.T, lambda g: a.T @ g),
    np.negative: lambda r, a: (lambda g: -g,),
    np.square: lambda r, a: (lambda g: 2.0 * g * a,),
    np.sqrt: lambda r, a: (lambda g: 0.5 * g / r,),
    np.exp: lambda r, a: (lambda g: g * r,),
    np.log: lambda r, a: (lambda g: g / a,),
    np.tanh: lambda r, a: (lambda g: g * (1.0 - r * r),),
    np.absolute: lambda r, a: (lambda g: g * np.sign(a),),
    np.maximum: _extremum,
    np.minimum: _extremum,
}
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.clip: _clip, np.where: _where, np.concatenate: _concatenate, np.stack: _stack, np.split: _split,
    np.ndim: lambda a: a.ndim, np.shape: lambda a: a.shape, np.zeros_like: lambda a: np.zeros(a.shape)}
