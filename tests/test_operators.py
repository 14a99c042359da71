"""The table of scalar operators: values and derivatives, and that every schedule can write each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ecornn
from ecornn.analysis import analyse
from ecornn.analysis.evaluate import evaluate
from ecornn.analysis.operators import OPERATORS, key_of, operator_of
from ecornn.analysis.scalar import children
from ecornn.cells import Cell, pointwise
from ecornn.errors import CellError
from ecornn.schedules.cpu import math as vector_functions
from ecornn.schedules.scalars import cuda_functions

# where an operator is defined and smooth; elsewhere from -2 to 2
WITHIN = {"log": (0.1, 3), "log2": (0.1, 3), "log10": (0.1, 3), "log1p": (-0.5, 3), "sqrt": (0.1, 3),
          "rsqrt": (0.1, 3),
          "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "atanh": (-0.9, 0.9), "acosh": (1.1, 3), "tan": (-1, 1),
          "pow": (0.2, 2),
          "Div": (0.5, 2)}
NODES = [key for key, row in OPERATORS.items() if row.fields]
CALLS = [key for key, row in OPERATORS.items() if not row.fields]


def expression(key: str, *operands: Any) -> Any:
    """The operator on TVM scalars."""
    from tvm import te, tirx

    if key in ("Select", "if_then_else"):
        return (tirx.Select if key == "Select" else tirx.if_then_else)(operands[0] > 0.0, *operands[1:])
    if key == "Cast":
        return tirx.Cast("float32", operands[0])
    if key in NODES:
        return getattr(tirx, key)(*operands)
    return getattr(te, {"fabs": "abs", "pow": "power"}.get(key, key), None or getattr(tirx, key, None))(*operands)


def arity(key: str) -> int:
    return {"Select": 3, "if_then_else": 3, "pow": 2, "atan2": 2}.get(key, len(OPERATORS[key].fields) or 1)


@pytest.mark.parametrize("key", [k for k in OPERATORS if k not in ("And", "Or", "Not")])
def test_derivatives_are_differences(key: str):
    from tvm import tirx

    variables = [tirx.Var(f"v{n}", "float32") for n in range(arity(key))]
    e, result = expression(key, *variables), tirx.Var("result", "float32")
    assert key_of(e) == key and operator_of(e) is OPERATORS[key]
    rng, (low, high) = np.random.default_rng(1), WITHIN.get(key, (-2, 2))
    values = {v: rng.uniform(low, high, 200) for v in variables}
    at, row = evaluate(e, values), OPERATORS[key]
    partial = row.derivative(e, children(e), result)
    assert len(partial) == len(children(e))
    if key in ("Select", "if_then_else"):
        variables = [None, *variables[1:]]
    for v, d in zip(variables, partial, strict=True):
        if v is None:
            assert d == 0.0
            continue
        step = 1e-6
        ahead, behind = (evaluate(e, values | {v: values[v] + s}).astype(float) for s in (step, -step))
        got = d if isinstance(d, float) else evaluate(d, values | {result: at})
        np.testing.assert_allclose(np.broadcast_to(got, at.shape), (ahead - behind) / (2 * step), rtol=2e-7, atol=1e-8)


def test_ties_are_pytorchs():
    torch = pytest.importorskip("torch")
    from tvm import tirx

    a, b = (tirx.Var(n, "float32") for n in "ab")
    zero, one, low = (tirx.const(v, "float32") for v in (0.0, 1.0, -1.0))
    points = torch.tensor([-1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    clip = tirx.Max(tirx.Min(a, one), low)
    cases = [(tirx.Max(a, zero), torch.relu), (tirx.Max(zero, a), torch.relu),
             (tirx.Min(a, one), lambda v: v.clamp(max=1)), (tirx.Max(a, low), lambda v: v.clamp(min=-1)),
             (tirx.abs(a), torch.abs), (tirx.Max(tirx.Min(a, one), zero), lambda v: v.clamp(0, 1)),
             (tirx.Max(a, b), lambda v: torch.maximum(v, points)), (tirx.Min(a, b), lambda v: torch.minimum(v, points)),
             (clip, lambda v: v.clamp(-1, 1))]
    for e, function in cases:
        leaf = points.clone().requires_grad_()
        function(leaf).sum().backward()
        values, got = {a: points.numpy(), b: points.numpy()}, np.ones(4)
        while type(e).__name__ != "Var":  # down to a, through the first operand that is no constant
            inner = children(e)
            n = next(k for k, c in enumerate(inner) if type(c).__name__ != "FloatImm")
            place = tirx.Var("place", "float32")
            named = [place if k == n else c for k, c in enumerate(inner)]
            result = tirx.Var("r", "float32")
            d = operator_of(e).derivative(e, named, result)[n]
            known = {place: evaluate(inner[n], values), result: evaluate(e, values)}
            got, e = got * evaluate(d, values | known), inner[n]
        np.testing.assert_array_equal(got, leaf.grad.numpy(), err_msg=str(function))


class Faulty(Cell):
    name, states = "faulty", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        from tvm import te, tirx

        (h,) = states
        return [te.compute(h.shape, lambda b, j: tirx.nextafter(h[b, j], h[b, j]) + 1.0)]  # here


def test_an_unknown_operator_is_named_with_its_line():
    with pytest.raises(CellError, match="uses nextafter, which cannot be scheduled") as caught:
        analyse(Faulty(), 4, 4)
    assert caught.value.at is not None
    file, line = caught.value.at
    assert Path(file) == Path(__file__) and Path(file).read_text().splitlines()[line - 1].endswith("# here")


def test_functions_of_schedules_are_of_the_table():
    for table in (vector_functions.FUNCTIONS, *cuda_functions.FUNCTIONS.values()):
        assert set(table) <= set(OPERATORS)


class Calls(Cell):
    """A state for each function: new state n is function n of x, within its bounds."""

    name, states = "calls", tuple(f"s{n}" for n in range(len(CALLS)))

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        def new(key: str, state: Any) -> Any:
            low, high = WITHIN.get(key, (-2, 2))

            def value(b: Any, j: Any) -> Any:
                operand = x[b, j] * float(high - low) + float(low)
                return expression(key, *[operand] * arity(key)) + state[b, j] * 0.0

            return pointwise(value, x)

        return [new(key, state) for key, state in zip(CALLS, states, strict=True)]


def test_cpus_compute_every_function():
    layer = ecornn.compile(Calls(), hidden=16, input=16, batch=3, target="cpu").bind({})
    x = np.random.default_rng(0).uniform(0, 1, (1, 3, 16)).astype(np.float32)
    _, states = layer(x)
    for key, got in zip(CALLS, states, strict=True):
        low, high = WITHIN.get(key, (-2, 2))
        operand = x[0].astype(float) * (high - low) + low
        first = [operand > 0] if key == "if_then_else" else [operand]
        expected = OPERATORS[key].numpy(*first, *[operand] * (arity(key) - 1))
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6, err_msg=key)
