"""docs/CELLS.md: its cells against the formulas of tests/published, and the errors that it tells of."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from published import CELLS
from rooms import ROOT
from test_published_cells import LIMIT, drawn, flat, formula

import ecornn
from ecornn.analysis import analyse
from ecornn.cells import Cell, pointwise, product
from ecornn.cli.cell_checks import Checks
from ecornn.errors import CellError
from ecornn.host_cpu import detect
from ecornn.schedules.cpu import CPUSequence
from ecornn.tune.oracle import relative_error

TEXT = (ROOT / "docs" / "CELLS.md").read_text()
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
          if block.startswith(("from", "import", "class"))]  # the others are parts of a step
ROWS = [re.findall(r"`([^`]*)`", line)[:2] for line in TEXT.partition("## Errors you may meet")[2].splitlines()
        if line.startswith("| `")]
OWN_NAMES = {"ugrnn": {"weight_ih": "W", "weight_hh": "R", "bias": "b"}}  # of the documentation's cell -> ours


@pytest.fixture(scope="module")
def documented() -> dict[str, Cell]:
    """The cells of all code blocks, run in their order, by name."""
    known: dict[str, Any] = {"__name__": "cells_of_the_documentation"}
    for block in BLOCKS:
        exec(compile(block, "CELLS.md", "exec"), known)
    own = [v for v in known.values() if isinstance(v, type) and issubclass(v, Cell) and v is not Cell]
    return {v.name: v() for v in own} | {"of PyTorch": known["cell"]}


def test_there_are_ten_cells_and_six_errors(documented: dict[str, Cell]):
    assert len(ROWS) >= 6
    assert len(documented) >= 11 and documented.keys() <= CELLS.keys() | {"of PyTorch"}
    assert "module = ecornn.compile(UGRNN()" in BLOCKS[0]  # so that it was compiled, too


@pytest.mark.parametrize("name", re.findall(r"^    name(?:, \w+)* = \"(\w+)\"", TEXT, re.MULTILINE))
def test_its_cells_are_their_formulas(documented: dict[str, Cell], name: str):
    ours, cell = CELLS[name], documented[name]
    x, parameters, states = drawn(ours)
    wanted, last = formula(ours, x, parameters, states)
    names = {theirs: n for n, theirs in OWN_NAMES.get(name, {}).items()}
    weights = flat(ours, {names.get(n, n): v for n, v in parameters.items()})
    y, after = ecornn.reference(cell, x, weights, states)
    assert cell.states == ours.states
    for got, want in zip((y, *after), (wanted, *last), strict=True):
        assert relative_error(got, want) <= LIMIT
    assert cell.output_names() == ours.output_names()


def test_its_neurons_train_on_a_cpu(documented: dict[str, Cell]):
    checks = Checks(documented["lif"], 5, 8, 3)
    assert checks.derivative().result == "right"
    forward, gradients = checks.run_one(detect(), CPUSequence(), "float32", None)
    assert (forward.result, gradients.result) == ("right", "right"), gradients.why


def test_a_stack_of_the_first_one_is_its_reference(documented: dict[str, Cell]):
    """What the first block compiles, at a small size."""
    cell, rng = documented["ugrnn"], np.random.default_rng(0)
    module = ecornn.compile(cell, hidden=8, batch=3, layers=2, bidirectional=True, lengths=True, target="cpu")
    weights = {p.name: rng.uniform(-1, 1, p.shape).astype(np.float32) for p in module.manifest.parameters}
    x, lengths = rng.normal(size=(5, 3, 8)).astype(np.float32), np.array([5, 0, 3])
    y, (last,) = module.bind(weights)(x, lengths=lengths)
    wanted, (end,) = ecornn.reference(cell, x, weights, lengths=lengths)
    assert relative_error(y, wanted) <= LIMIT and relative_error(last, end) <= LIMIT


def test_the_step_of_pytorch_is_the_first_cell(documented: dict[str, Cell]):
    """Both are update gate RNNs."""
    cell, rng = documented["of PyTorch"], np.random.default_rng(0)
    weights = {n: w.double().numpy() for n, w in cell.weights().items()}
    x = rng.normal(size=(5, 3, 6))
    names = {"weight_ih_l0": "x_weight_l0", "weight_hh_l0": "h_weight_l0"}
    other = {n: weights[w] for n, w in names.items()} | {"bias_l0": weights["x_bias_l0"] + weights["h_bias_l0"]}
    y, _ = ecornn.reference(cell, x, weights)
    # both are float64, in other orders of summation; 1e-12 is 4500 of its roundings
    np.testing.assert_allclose(y, ecornn.reference(documented["ugrnn"], x, other)[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("written", "message"), ROWS)
def test_errors_are_those_that_are_told(written: str, message: str):
    from tvm import te, tirx

    class Mine(Cell):
        name, states = "mine", ("h",)

        def parameters(self, input, hidden):
            return {"W": (2, hidden, input), "R": (1, hidden, hidden), "v": (1, hidden)}

        def step(self, x, states, p):
            (h,), W, R, v = states, p["W"], p["R"], p["v"]
            known = {"x": x, "h": h, "W": W, "R": R, "v": v, "wx": product(x, W), "te": te, "tirx": tirx,
                     "product": product, "pointwise": pointwise}
            return [pointwise(eval(f"lambda b, j: {written}", known), h)]

    with pytest.raises(CellError) as caught:
        analyse(Mine(), 8, 12)
    assert message in str(caught.value)
