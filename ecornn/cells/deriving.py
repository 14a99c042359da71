"""Parameters that are computed once, not in each step, from the arrays that a cell learns."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ecornn.cells.base import Cell, Shape
from ecornn.errors import CellError, WeightsError

Arrays = dict[str, Any]


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
            raise _failed(cell, type(cell).learned, f"learned() gives {name!r} the shape {shape}; expected two axes or "
                            "three, of any sizes, such as (1, H), (1, 1) or (1, H, rank)")
    return shapes


def flat_shape(shape: Shape) -> Shape:
    """The shape of a parameter as a user passes it: gates are folded into the first axis."""
    return shape[0] * shape[1], *shape[2:]


def parameters_of(cell: Cell, given: Mapping[str, Any], input: int, hidden: int) -> Arrays:
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
        raise _failed(cell, made_by, f"derived() does not make {', '.join(missing)}, and learned() does not have it")
    parameters = {}
    for name, shape in wanted.items():
        has = tuple(values[name].shape)
        if len(has) != len(shape) or any(n not in (1, m) for n, m in zip(has, shape, strict=True)):
            raise _failed(cell, made_by, f"derived() makes {name!r} of shape {has}; expected {shape}, or 1 in place "
                          "of an axis along which all are the same")
        parameters[name] = values[name] if has == shape else xp.broadcast_to(values[name], shape)
    return parameters


def derive(cell: Cell | str, weights: Mapping[str, Any], input: int, hidden: int) -> Arrays:
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
    CellError : the cell's ``derived`` fails, or makes something else than its ``parameters``
    """
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
                    raise WeightsError(f"weights[{key!r}]: {has}; expected {flat_shape(shape)} of I={input} and "
                                       f"H={hidden}; given are {', '.join(weights) or 'none'}")
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
    return CellError(f"cell {cell.name!r}: {words}\n  {at[0]}:{at[1]}", at)
