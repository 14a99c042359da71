"""The results of a layer in float64, and how near to them a side must be."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from ecornn.bench.peers import exact_layer
from ecornn.bench.turns import Results, Side, Subject, Weights
from ecornn.cells import Cell
from ecornn.errors import CellError, MissingPackageError
from ecornn.numpy_gradients import reference_gradients
from ecornn.numpy_reference import checked, formula_of, formula_of_cell, run
from ecornn.tune.oracle import has_formula, norm, relative_error
from ecornn.tune.record import GRADIENTS, INTEGERS, TOLERANCE

Exact = Mapping[str, np.ndarray]  # as a side's results
EXACT = 1e-12  # of gradients in float64
AGREE = 1e-9  # between two references, of which each has its roundings in float64
ROUNDED = {"bfloat16": 1e-1, "float16": 1e-2}  # weights that are rounded to these in a layer of float32
PEER = 4.0  # times as far from float64 as ours alone may be a library of 16 bits, which rounds its states in each step
FAINT = 1e-6  # a gradient is held against the largest one's norm, times this, if it is smaller still
ALONE, ROUNDING = "ecornn", "cudnn-tf32"


def expected(subject: Subject, cell: Cell, weights: Weights) -> Exact:
    """The results of a layer on the inputs: y by formulas in NumPy, else by the te graph. Gradients are PyTorch's in
    float64, whose y must be NumPy's; without PyTorch those of the formulas, which take long, and
    :class:`MissingPackageError` where a cell has none."""
    arrays, reverse = subject.machine.arrays, subject.stack.reverse
    x = arrays.get(subject.inputs["x"])
    x = x[::-1] if reverse else x
    if not subject.training:
        y = _forward(subject, cell, x, weights)
        return {"y": y[::-1] if reverse else y}
    dy = arrays.get(subject.inputs["dy"])
    width = subject.stack.directions * len(cell.output_names()) * subject.work.hidden
    dy = (dy[::-1] if reverse else dy)[..., :width]
    if importlib.util.find_spec("torch") is not None:
        dx, found = _by_torch(subject, cell, x, weights, dy)
    elif has_formula(cell):
        dx, found, _ = reference_gradients(cell.identity(), x, weights, dy=dy)
    else:
        raise MissingPackageError(f"torch is not installed, which is needed to check the gradients of cell "
                                  f"{cell.name!r}: install ecornn's extra [bench], or pip install torch")
    return {"x": dx[::-1] if reverse else dx, **found}


def _forward(subject: Subject, cell: Cell, x: Any, weights: Weights) -> Any:
    """y (T, B, D*O*H) of x."""
    work, count = subject.work, subject.stack.count
    shape = (count, subject.rows, work.hidden) if count > 1 else (subject.rows, work.hidden)
    state = [np.zeros(shape) for _ in cell.states]  # which says how large H is
    formula = formula_of(cell.identity()) if has_formula(cell) else formula_of_cell(cell, x, weights, state)
    return run(checked(formula, x, weights, state, None, None))[0]


def _by_torch(subject: Subject, cell: Cell, x: Any, weights: Weights, dy: Any) -> tuple[Any, dict[str, Any]]:
    """Gradients of x and the weights; x and dy in the order in which they are read."""
    import torch

    run, parameters, device = exact_layer(subject, cell, weights)
    rows, above = (torch.as_tensor(np.ascontiguousarray(value)).to(device) for value in (x, dy))
    rows.requires_grad_()
    y = run(rows, parameters)
    if relative_error(y.detach().cpu().numpy(), _forward(subject, cell, x, weights)) > AGREE:
        raise CellError(f"cell {cell.name!r}: the step gives different results in PyTorch and in NumPy, both in "
                        "float64")
    dx, *others = (g.cpu().numpy() for g in torch.autograd.grad(y, [rows, *parameters.values()], above))
    return dx, dict(zip(parameters, others, strict=True))


def errors_of(subject: Subject, found: Results, exact: Exact) -> dict[str, float]:
    get, least = subject.machine.arrays.get, max(FAINT * max(map(norm, exact.values())), 1e-300)
    return {name: relative_error(get(found[name]), value, least) for name, value in exact.items()}


def limits_of(subject: Subject, side: Side, errors: Mapping[str, Mapping[str, float]],
              sides: Mapping[str, Side]) -> dict[str, float]:
    """How far each result of a side may be. Ours in 16 bits or TF32: twice as far as the farthest library that computes
    the same in that type, and else as tables say; so is every other in float32 and float64."""
    of_ours = side.name == ALONE or side.subject is not None
    subject, names = side.subject or subject, errors[side.name]
    work, arithmetic = subject.work, subject.work.arithmetic
    own = (INTEGERS | ROUNDED).get(work.weights or "", TOLERANCE[arithmetic])
    if subject.training:
        own = EXACT if work.dtype == "float64" else GRADIENTS[arithmetic]
    if side.name == ROUNDING and arithmetic == "float32":
        return dict.fromkeys(names, PEER * TOLERANCE["tf32"])
    exact = arithmetic in ("float32", "float64") or work.weights is not None
    if exact or not of_ours:
        return dict.fromkeys(names, own if exact else PEER * own)
    peers = [of for name, of in errors.items() if name != ALONE and sides[name].subject is None
             and sides[name].cell is side.cell]
    return {name: max((2 * of[name] + 1e-6 for of in peers if of[name] <= PEER * own), default=own) for name in names}
