"""Te steps as Python that calls PyTorch, and loops over them: against NumPy, which carries out the same graphs."""

from typing import Any

import numpy as np
import other_cells
import published
import pytest
import step_cells
import torch
from tvm import te, tirx

from ecornn.bench.peers import nearest
from ecornn.bench.step_loop import StepLoop, torch_step
from ecornn.cells import BUILTIN, Cell, get, pointwise, product
from ecornn.errors import CellError
from ecornn.interpreter import interpret
from ecornn.numpy_gradients import reference_gradients
from ecornn.numpy_reference import random_weights, reference
from ecornn.workload import Stack, Workload

OPTIONS = ("lstm(peepholes,clip=3)", "lstm(layer_norm)", "lstm(projection,zoneout_h=0.1)", "gru(layer_norm)")
CELLS: dict[str, Cell] = BUILTIN | {name: get(name) for name in OPTIONS} | step_cells.CELLS | (
    other_cells.INPUTS | other_cells.OUTPUTS)
USUAL = ("lif", "on_lstm", "slstm_heads", "lstm_phased", "clockwork", "skip_rnn", "lmu", "mega_ema", "selective_ssm")
PUBLISHED = [pytest.param(cell, id=name, marks=() if name in USUAL else pytest.mark.exhaustive)
             for name, cell in published.CELLS.items()]


def run(cell: Cell, width: int, hidden: int, batch: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    p = {n: np.asarray(cell.sample(n, s, rng), np.float64) for n, s in cell.parameters(width, hidden).items()}
    x = rng.uniform(0.05, 1, (3, batch, cell.row_width(width, hidden)))
    states = [rng.uniform(0.1, 1, (batch, hidden)) for _ in cell.states]
    prepare, step = torch_step(cell, x.shape[2], hidden, batch).functions("cpu", torch.float64)
    prepared, now = prepare([torch.tensor(v) for v in p.values()]), [torch.tensor(s) for s in states]
    for row in torch.tensor(x):
        now = step(row, now, prepared)[:len(now)]
    return now, interpret(cell, x, p, states)[1]


@pytest.mark.parametrize("cell", [*(pytest.param(cell, id=name) for name, cell in CELLS.items()), *PUBLISHED])
def test_every_cell_is_what_numpy_makes_of_it(cell: Cell):
    for batch in (1, 3):
        for found, wanted in zip(*run(cell, 8, 8, batch), strict=True):
            assert found.shape == wanted.shape and found.dtype == torch.float64
            # both are float64, in other orders of summation and by other libraries' functions
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-13)


def test_it_reads_as_a_user_of_pytorch_would_write_it():
    assert torch_step(get("rnn_tanh"), 5, 6, 3).source == """\
def prepare(parameters):
    (p0, p1, p2, p3,) = parameters
    v1 = p0[0, :, :]
    v4 = p2[0, :]
    v5 = v4.reshape((1, 6,))
    v8 = p1[0, :, :]
    v12 = p3[0, :]
    v13 = v12.reshape((1, 6,))
    return (v1, v5, v8, v13,)


def step(x, states, prepared):
    (s0,) = states
    (v1, v5, v8, v13,) = prepared
    v3 = torch.nn.functional.linear(x, v1)
    v6 = v3 + v5
    v10 = torch.nn.functional.linear(s0, v8)
    v11 = v6 + v10
    v14 = v11 + v13
    v15 = torch.tanh(v14)
    return (v15,)
"""


@pytest.mark.parametrize("cell", ["lstm", "gru_reset_before"])
def test_a_loop_goes_through_stacks_and_has_their_gradients(cell: str):
    work, stack = Workload(cell, 6, 5, 3, 4), Stack(layers=2, bidirectional=True)
    rng, weights = np.random.default_rng(0), random_weights(cell, 5, 6, layers=2, directions=2)
    x, dy = rng.standard_normal((4, 3, 5)), rng.standard_normal((4, 3, 12))
    loop = StepLoop(get(cell), work, stack, 3, "llvm", "float64")
    parameters, rows = loop.tensors(weights), torch.tensor(x, requires_grad=True)
    y = loop(rows, parameters)
    np.testing.assert_allclose(y.detach().numpy(), reference(cell, x, weights)[0], rtol=1e-12)
    found = torch.autograd.grad(y, [rows, *parameters.values()], torch.tensor(dy))
    dx, dweights, _ = reference_gradients(cell, x, weights, dy=dy)
    for gradient, wanted in zip(found, (dx, *(dweights[n] for n in parameters)), strict=True):
        # float64 again, through four steps and two layers; sums of many terms may cancel
        np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-10, atol=1e-13)


def test_what_pytorch_has_nothing_for_is_said():
    def step(x: Any, h: Any, p: Any) -> Any:
        wx = product(x, p["W"], 0)
        return [pointwise(lambda b, j: te.tanh(wx[b, j] + tirx.popcount(tirx.Cast("int32", h[b, j]))), h)]
    with pytest.raises(CellError, match="popcount"):
        torch_step(step_cells.Given(step, lambda input, hidden: {"W": (1, hidden, input)}), 4, 4, 2)


def test_the_nearest_cell_of_cudnn():
    work = Workload("mgu", 8, 8, 2, 3)
    near = {"lstm(peepholes)": "lstm", "gru_reset_before": "gru", "indrnn": None, "slstm": "lstm"}
    assert {name: nearest(get(name), work) for name in near} == near
