"""A short random sequence with its float64 answer, in a file: what every candidate must get right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecornn.cells import Cell
from ecornn.cells.base import learned_shapes, parameters_of
from ecornn.errors import CellError, source_line
from ecornn.interpreter import interpret
from ecornn.numpy_reference import NORMALIZED, reference
from ecornn.numpy_reference import STEPS as REFERENCES
from ecornn.tune.record import INTEGERS
from ecornn.workload import Workload

Array = NDArray[Any]
STEPS = 8  # enough to pass through every state buffer and barrier several times


def numpy_dtype(dtype: str) -> Any:
    if hasattr(np, dtype):
        return np.dtype(dtype)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, dtype))


def rounded(values: Any, dtype: str) -> Any:
    return np.asarray(values, np.float32).astype(numpy_dtype(dtype)).astype(np.float32)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a layer, float32 with values that its type has: ``x`` (T, B, I), the cell's inputs behind it; first
    ``states`` (B, H); and the parameters, ``shaped`` as in te by the cell's names, ``flat`` as a user passes them."""

    x: Array
    states: list[Array]
    shaped: dict[str, Array]
    flat: dict[str, Array]


def draw(cell: Cell, work: Workload, rng: np.random.Generator) -> Inputs:
    """Random inputs of ``STEPS`` steps."""
    hidden, own = work.hidden, cell.own_input(work.input, work.hidden)
    x = rounded(rng.uniform(-1, 1, (STEPS, work.batch, work.input)), work.dtype)
    for n, name in enumerate(cell.inputs):
        if name in cell.nonnegative:
            beside = x[..., own + n * hidden:own + (n + 1) * hidden]
            beside[:] = abs(beside)
    states = [rounded(rng.uniform(-1, 1, (work.batch, hidden)), work.dtype) for _ in cell.states]
    states = [abs(state) if name in cell.nonnegative else state
              for name, state in zip(cell.states, states, strict=True)]
    learned = {name: sampled(cell, name, shape, rng) for name, shape in learned_shapes(cell, own, hidden).items()}
    kind = work.dtype if work.weights is None or work.weights in INTEGERS else work.weights
    shaped = {name: rounded(value, kind) for name, value in parameters_of(cell, learned, own, hidden).items()}
    flat = {cell.parameter_name(name): value.reshape(-1, *value.shape[2:]) for name, value in shaped.items()}
    return Inputs(x, states, shaped, flat)


def sampled(cell: Cell, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """The result of the cell's ``sample``; :class:`CellError` for anything but finite numbers of that shape."""
    def fault(words: str) -> CellError:
        code = type(cell).sample.__code__
        at = code.co_filename, code.co_firstlineno
        return CellError(f"cell {cell.name!r}: sample({name!r}, {shape}, rng) {words}\n  {source_line(*at)}", at)

    try:
        values = np.asarray(cell.sample(name, shape, rng), np.float64)
    except Exception as error:  # the user's own code raises what it likes
        raise fault(f"failed: {type(error).__name__}: {error}") from error
    if values.shape != shape or not np.isfinite(values).all():
        what = f"of shape {values.shape}" if values.shape != shape else "of which some are not finite"
        raise fault(f"returned values {what}; expected finite ones of shape {shape}")
    return values


def write(path: Path, cell: Cell, work: Workload, seed: int) -> None:
    """Writes inputs, which the dtype has, and float64 outputs as .npz, by nothing that makes kernels: ``x`` (T, B, I),
    ``y`` (T, B, H), ``first_<n>`` and ``last_<n>`` (B, H) for the n-th state, ``w:<name>`` for each parameter as a user
    passes it."""
    given = draw(cell, work, np.random.default_rng(seed))
    y, last = (reference(cell.identity(), given.x, given.flat, given.states) if has_formula(cell) else
               interpret(cell, given.x, given.shaped, given.states))
    save(path, given.x, y, given.states, last, given.flat)


def has_formula(cell: Cell) -> bool:
    return cell.identity() in REFERENCES | NORMALIZED


def save(path: Path, x: Array, y: Array, first: Sequence[Array], last: Sequence[Array],
         flat: Mapping[str, Array]) -> None:
    arrays = {"x": x, "y": y}
    arrays.update({f"first_{n}": s for n, s in enumerate(first)})
    arrays.update({f"last_{n}": s for n, s in enumerate(last)})
    arrays.update({f"w:{name}": w for name, w in flat.items()})
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # names of arrays, and none of its own options


def relative_error(got: Any, expected: Any, least: float = 1e-30) -> float:
    """||got - expected|| / max(||expected||, ``least``); infinite for no numbers, or another shape."""
    got = np.asarray(got, np.float64)
    if got.shape != expected.shape or not np.isfinite(got).all():
        return float("inf")
    return norm(got - expected) / max(norm(expected), least)


def norm(values: Any) -> float:
    """The Euclidean norm. NumPy's has BLAS start a thread for each processor, while builds use them."""
    return float(np.sqrt(np.square(values).sum()))
