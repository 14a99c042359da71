"""The gradients of the layers in NumPy float64: what compiled gradients are checked against.

From the formulas of ``numpy_reference.py`` and a tape, apart from ``ecornn.analysis`` and without TVM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ecornn.boundary import public
from ecornn.errors import ShapeError
from ecornn.numpy_layers import Array, States, checked, run
from ecornn.numpy_reference import formula_of
from ecornn.numpy_tape import Traced, backward


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
    results = []
    for name, result, gradient in (("dy", y, dy), *((f"dstate[{n}]", s, d) for n, (s, d) in enumerate(
            zip(last, dstate, strict=True)))):
        gradient = np.asarray(gradient, np.float64)
        if gradient.shape != result.shape:
            raise ShapeError(f"{name}.shape", gradient.shape, str(result.shape))
        results.append((result, gradient))
    backward(results)
    return (traced.x.gradient, {n: w.gradient for n, w in traced.weights.items()},
            tuple(s.gradient.reshape(*call.outer, *s.shape[1:]) for s in traced.before))
