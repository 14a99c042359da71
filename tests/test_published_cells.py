"""Published cells, each against a formula that was written apart from its te step: in float32 on the CPU, and emulated
GPU code of some."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from published import CELLS
from published.base import Published

import ecornn
from ecornn.tune.oracle import relative_error

T, B, I, H = 5, 3, 5, 7
LIMIT = 1e-5  # relative; some roundings of float32


def drawn(cell: Published, seed: int = 0) -> tuple[Any, dict[str, Any], list[Any]]:
    """x (T, B, I), parameters in te shape, and first states; values of float32."""
    rng, width = np.random.default_rng(seed), H if cell.square else I
    parameters = {}
    for name, shape in cell.parameters(width, H).items():
        low, high = cell.ranges.get(name, (-1.0, 1.0))
        parameters[name] = rng.uniform(low, high, shape).astype(np.float32)
    states = [rng.uniform(-1, 1, (B, H)).astype(np.float32) for _ in cell.states]
    states = [abs(s) if n in cell.nonnegative else s for n, s in zip(cell.states, states, strict=True)]
    return rng.normal(size=(T, B, width)).astype(np.float32), parameters, states


def formula(cell: Published, x: Any, parameters: dict[str, Any], states: list[Any]) -> tuple[Any, list[Any]]:
    """y and the last states by the cell's formula, in float64."""
    p, now, y = {n: v.astype(np.float64) for n, v in parameters.items()}, [s.astype(np.float64) for s in states], []
    for row in x.astype(np.float64):
        now = list(cell.numpy(row, dict(zip(cell.states, now, strict=True)), p))
        y.append(now[cell.states.index(cell.output_state())])
    return np.stack(y), now


def flat(cell: Published, parameters: dict[str, Any]) -> dict[str, Any]:
    return {cell.parameter_name(n): v.reshape(-1, *v.shape[2:]) for n, v in parameters.items()}


def test_there_are_many():
    assert len(CELLS) >= 45 and all(cell.__doc__ for cell in CELLS.values())


@pytest.mark.parametrize("name", CELLS)
def test_the_te_step_is_the_formula(name: str):
    """In float64, so that what float32 would hide shows."""
    cell = CELLS[name]
    x, parameters, states = drawn(cell)
    wanted, last = formula(cell, x, parameters, states)
    y, after = ecornn.reference(cell, x, flat(cell, parameters), states)
    assert np.abs(wanted).max() > 1e-3
    for got, want in zip((y, *after), (wanted, *last), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-7)  # constants of a step are float32


@pytest.mark.parametrize("name", CELLS)
def test_compiled_for_the_cpu(name: str):
    cell = CELLS[name]
    x, parameters, states = drawn(cell)
    wanted, last = formula(cell, x, parameters, states)
    module = ecornn.compile(cell, hidden=H, input=x.shape[2], batch=B, seq=T, target="cpu")
    y, after = module.bind(flat(cell, parameters), threads=1)(x, states)
    for what, got, want in zip(("y", *cell.states), (y, *after), (wanted, *last), strict=True):
        assert relative_error(got, want) <= LIMIT, what
