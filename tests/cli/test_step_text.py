"""``ecornn compile --emit step``: what it prints of two cells, and that its formulas are the cell's.

    pytest tests/cli/test_step_text.py --renew    writes the two texts anew
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
from click.testing import CliRunner
from step_cells import Chain, Peephole, Thrice

from ecornn.analysis import analyse
from ecornn.cells import Cell, get
from ecornn.cli import main
from ecornn.cli.step_text import step_text
from ecornn.interpreter import interpret
from ecornn.layer_spec import LayerSpec

GOLDEN = {"step_lstm.txt": ["--cell", "lstm", "--hidden", "800", "--dtype", "float32"],
          "step_gated.txt": ["--cell", f"{step_cells.__file__}:Gated", "--hidden", "96", "--input", "31", "--batch",
                             "7", "--dtype", "bfloat16", "--target", "sm_90a", "--layers", "3", "--bidirectional"]}


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["compile", *arguments, "--emit", "step"])
    assert result.exit_code == 0, result.output
    return result.stdout


def text_of(cell: Cell, input: int = 31, hidden: int = 30) -> str:
    spec = LayerSpec(cell, hidden, input, 20)
    return step_text(analyse(cell, input, hidden), spec.workload, spec.stack)


@pytest.mark.parametrize("file", GOLDEN)
def test_the_text_of_a_step(file: str, same_as_file: Callable[[str, str], None]):
    same_as_file(file, printed(*GOLDEN[file]))


def test_it_is_written_to_a_file_and_beside_a_module(tmp_path: Path):
    file, module = tmp_path / "step.txt", tmp_path / "m.so"
    layer = ["--cell", "rnn_tanh", "--hidden", "16", "--target", "cpu"]
    assert printed(*layer, "--emit-to", str(file)) == ""
    result = CliRunner().invoke(main, ["compile", *layer, "--emit", "step", "-o", str(module)])
    assert "wrote" in result.stderr and module.exists() and file.read_text() == result.stdout


@pytest.mark.parametrize("cell", [*step_cells.CELLS.values(), Thrice(), get("gru(layer_norm)"), get("slstm")],
                         ids=lambda c: c.name)
def test_it_is_readable_at_80_columns_and_names_every_parameter(cell: Cell):
    text = text_of(cell, 30)
    assert max(map(len, text.splitlines())) <= 80 and "__" not in text
    assert all(f"{name} (" in text for name in cell.parameters(30, 30))


@pytest.mark.parametrize("cell", [get("lstm"), get("gru_reset_before"), Chain(), Peephole(),
                                  *(step_cells.CELLS[n] for n in ("gated", "pair", "highway", "leaky"))],
                         ids=lambda c: c.name)
def test_its_formulas_compute_the_step(cell: Cell):
    """Every assignment, read as Python on arrays (H, B), against the te graph."""
    rng, hidden, batch = np.random.default_rng(0), 30, 4
    x, states = rng.normal(size=(batch, hidden)), [rng.normal(size=(batch, hidden)) for _ in cell.states]
    parameters = {n: rng.normal(size=s) for n, s in cell.parameters(hidden, hidden).items()}
    known: dict[str, Any] = {"x": x.T, **{n: s.T for n, s in zip(cell.states, states, strict=True)},
                             "tanh": np.tanh, "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
                             **{n: p if p.ndim == 3 else p[..., None] for n, p in parameters.items()}}
    lines = re.sub(r"\n {5,}(?! )(?=\S)", " ", text_of(cell, hidden).split("\n\n", 2)[-1].partition("Bytes")[0])
    new: dict[str, Any] = {}
    for line in lines.splitlines():
        formula = re.sub(r"([A-Za-z_]\w*)\.(\d+)", r"\1__\2", line.strip())
        if "'" in formula:
            new |= {n: known[v] if v in known else eval(v, {}, known)
                    for n, v in re.findall(r"(\w+)' = ([^,;]+)", formula)}
        elif " = " in formula:
            name, _, value = formula.partition(" = ")
            known[name] = eval(value, {}, known)
    _, expected = interpret(cell, x[None], parameters, states)
    for name, value in zip(cell.states, expected, strict=True):
        np.testing.assert_allclose(new[name].T, value, rtol=1e-6, atol=1e-6)  # constants have seven digits
