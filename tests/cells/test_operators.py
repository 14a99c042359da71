"""The table of scalar operators: values and derivatives, and that every schedule can write each of them."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rooms import ROOT
from step_cells import Given
from tvm import te, tirx

import ecornn
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.operators import CUSTOM, OPERATORS, key_of, operator_of
from ecornn.analysis.scalar import children, evaluate
from ecornn.cells import Cell, pointwise
from ecornn.schedules.cpu import emit as vector_functions
from ecornn.schedules.cuda.isa import functions

pytestmark = pytest.mark.usefixtures("small_tiles")

# Where an operator is defined and smooth; elsewhere from -2 to 2. All are a few binary digits long.
WITHIN = {"log": (0.125, 3), "log2": (0.125, 3), "log10": (0.125, 3), "log1p": (-0.5, 3), "sqrt": (0.125, 3),
          "rsqrt": (0.125, 3), "asin": (-0.875, 0.875), "acos": (-0.875, 0.875), "atanh": (-0.875, 0.875),
          "acosh": (1.125, 3), "tan": (-1, 1), "pow": (0.25, 2), "Div": (0.5, 2)}
STEP, WIDE = 2.0**-17, 2.0**-10  # near eps ** (1/3) and eps ** (1/5): there roundings weigh as much as what is left out
OF_NUMPY = 4 * np.finfo(np.float64).eps  # NumPy's vector functions are right to 4 units in the last place
EPS = 2.0**-23  # a unit in the last place of float32, of the value, is at most this
OF_LIBM = 2 * EPS  # no float function of glibc's that is called here errs more, by its manual's table
# Key -> (relative, absolute), how far float32 code on a CPU may be from float64, where libm has no function of its own
# or code does not call it. Operands have no error here: see Calls.
ERRORS = {key: (0.0, 0.0) for key in ("fabs", "floor", "ceil", "trunc", "round", "nearbyint", "if_then_else")} | {
    "sqrt": (EPS / 2, 0.0),  # rounded as IEEE 754 says
    "rsqrt": (EPS, 0.0),  # so is the quotient
    "exp": (2e-7, 0.0), "tanh": (3e-7, 0.0), "sigmoid": (0.0, 1.5e-7),  # as schedules/cpu/emit.py says
    # exp(x log 10): the constant and the product are rounded, each half a unit of up to 4.6, which exp's operand keeps
    "exp10": (OF_LIBM + 2 * np.log(10) * EPS, 0.0),
    "tan": (2 * OF_LIBM + EPS / 2, 0.0),  # sin / cos
    # (log(1 + x) - log(1 - x)) / 2, whose operands are exact: each logarithm has its error, the difference its own
    "atanh": (EPS / 2, OF_LIBM * (np.log(8) + np.log(1.875)) / 2),
}
NODES = [key for key, row in OPERATORS.items() if row.fields]
CALLS = [key for key, row in OPERATORS.items() if not row.fields and key != CUSTOM]  # of test_surrogates


def expression(key: str, *operands: Any) -> Any:
    if key in ("Select", "if_then_else"):
        return (tirx.Select if key == "Select" else tirx.if_then_else)(operands[0] > 0.0, *operands[1:])
    if key == "Cast":
        return tirx.Cast("float32", operands[0])
    if key in NODES:
        return getattr(tirx, key)(*operands)
    return getattr(te, {"fabs": "abs", "pow": "power"}.get(key, key), None or getattr(tirx, key, None))(*operands)


def arity(key: str) -> int:
    row = OPERATORS[key]
    return {"Select": 3, "if_then_else": 3}.get(key, len(row.fields) or getattr(row.numpy, "nin", 1))


def difference(f: Callable[[Any], Any], x: Any) -> tuple[Any, Any]:
    """The slope of f at x by a central difference, and how far that may be from the derivative.

    What is left out is ``STEP ** 2 / 6`` times the third derivative, which a wider difference gives to a thousandth
    (``WIDE ** 2 / 4`` times the ratio of the fifth to the third, at most 99/4 x^-2, of rsqrt). Values err by OF_NUMPY
    of the largest number in them, which may be 1 beside a smaller result (sigmoid, acos). The roundings of what is
    compared are as many, but not divided by STEP."""
    ahead, behind = x + STEP, x - STEP
    rounding = OF_NUMPY * np.maximum(1.0, np.maximum(np.abs(f(ahead)), np.abs(f(behind)))) / STEP
    third = (f(x + 2 * WIDE) - 2 * f(x + WIDE) + 2 * f(x - WIDE) - f(x - 2 * WIDE)) / (2 * WIDE**3)
    return (f(ahead) - f(behind)) / (ahead - behind), STEP**2 / 6 * np.abs(third) * 1.001 + rounding * (1 + STEP)


@pytest.mark.parametrize("key", [k for k in OPERATORS if k not in ("And", "Or", "Not", CUSTOM)])
def test_derivatives_are_differences(key: str):
    variables = [tirx.Var(f"v{n}", "float32") for n in range(arity(key))]
    e, result = expression(key, *variables), tirx.Var("result", "float32")
    assert key_of(e) == key and operator_of(e) is OPERATORS[key]
    rng, (low, high) = np.random.default_rng(1), WITHIN.get(key, (-2, 2))
    values = {v: rng.uniform(low, high, 200) for v in variables}
    if key not in WITHIN:  # away from the origin, where atan2 has no value to the left of it, and others have steps
        values = {v: x + np.copysign(0.125, x) for v, x in values.items()}
    at, row = evaluate(e, values), OPERATORS[key]
    partial = row.derivative(e, children(e), result)
    assert len(partial) == len(children(e))
    if key in ("Select", "if_then_else"):
        variables = [None, *variables[1:]]
    for v, d in zip(variables, partial, strict=True):
        if v is None:
            assert d == 0.0
            continue
        slope, error = difference(lambda x, v=v: evaluate(e, values | {v: x}).astype(float), values[v])
        got = d if isinstance(d, float) else evaluate(d, values | {result: at})
        assert np.all(np.abs(got - slope) <= error)


def test_constants_of_derivatives_keep_their_digits():
    """TVM's arithmetic of constants is float32's."""
    a, result = tirx.Var("a", "float32"), tirx.Var("r", "float32")
    e, at = te.power(a, tirx.const(0.3, "float32")), np.array([0.5, 2.0])
    got = evaluate(OPERATORS["pow"].derivative(e, children(e), result)[0], {a: at, result: at**0.3})
    np.testing.assert_allclose(got, 0.3 * at**-0.7, rtol=1e-15)


def test_ties_are_pytorchs():
    torch = pytest.importorskip("torch")
    zero, one, low = (tirx.const(v, "float32") for v in (0.0, 1.0, -1.0))
    points = torch.tensor([[-1.0, 0.0, 1.0, 0.5]], dtype=torch.float64)
    cases: list[tuple[Callable[[Any, Any], Any], Any]] = [
        (lambda a, b: tirx.Max(a, zero), torch.relu), (lambda a, b: tirx.Max(zero, a), torch.relu),
        (lambda a, b: tirx.Min(a, one), lambda v: v.clamp(max=1)),
        (lambda a, b: tirx.Max(a, low), lambda v: v.clamp(min=-1)), (lambda a, b: tirx.abs(a), torch.abs),
        (lambda a, b: tirx.Max(tirx.Min(a, one), zero), lambda v: v.clamp(0, 1)),
        (lambda a, b: tirx.Max(a, b), lambda v: torch.maximum(v, points)),
        (lambda a, b: tirx.Min(a, b), lambda v: torch.minimum(v, points)),
        (lambda a, b: tirx.Max(tirx.Min(a, one), low), lambda v: v.clamp(-1, 1))]
    for e, function in cases:
        leaf, h = points.clone().requires_grad_(), points.numpy()
        function(leaf).sum().backward()
        cell = Given(lambda x, h, p, e=e: [pointwise(lambda i, j: e(h[i, j], x[i, j]), h)])
        _, _, (got,) = backpropagate(adjoint(analyse(cell, 4, 4), 4), h[None], {}, [h], 0 * h[None], [np.ones_like(h)])
        np.testing.assert_array_equal(got, leaf.grad.numpy(), err_msg=str(function))


def test_functions_of_schedules_are_of_the_table():
    for table in (vector_functions.FUNCTIONS, *functions.FUNCTIONS.values()):
        assert set(table) <= set(OPERATORS)


class Calls(Cell):
    """New state n is function n of x, within its bounds; x is a multiple of 1/1024, so that float32 is exact before."""

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


def values(x: Any) -> Iterator[Any]:
    for key in CALLS:
        low, high = WITHIN.get(key, (-2, 2))
        operand = x * (high - low) + low
        yield OPERATORS[key].numpy(operand > 0 if key == "if_then_else" else operand, *[operand] * (arity(key) - 1))


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_cpus_compute_every_function(dtype: str):
    layer = ecornn.compile(Calls(), hidden=16, input=16, batch=3, dtype=dtype, target="cpu").bind({})
    x = np.random.default_rng(0).integers(0, 1024, (1, 3, 16)).astype(dtype) / 1024
    _, states = layer(x)
    units = np.finfo(dtype).eps / EPS
    for key, got, expected in zip(CALLS, states, values(x[0].astype(np.longdouble)), strict=True):
        relative, absolute = ERRORS.get(key, (OF_LIBM, 0.0))
        np.testing.assert_allclose(got, expected, rtol=relative * units, atol=absolute * units, err_msg=key)


def test_the_reference_computes_every_function():
    x = np.random.default_rng(0).integers(1, 1024, (1, 3, 16)) / 1024
    _, states = ecornn.reference(Calls(), x, {}, [np.zeros((3, 16))] * len(CALLS))
    for key, got, expected in zip(CALLS, states, values(x[0]), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13, err_msg=key)


def test_the_documentation_names_every_operator():
    (row,) = [line for line in (ROOT / "docs" / "CELLS.md").read_text().splitlines() if line.startswith("| `+` Add")]
    assert set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", row)) == set(OPERATORS) - {CUSTOM}
