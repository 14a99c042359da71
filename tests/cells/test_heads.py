"""Products with heads: against the same cell with whole matrices, whose blocks beside the diagonal are zeros."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import smaller_matrices
from cpu_training_sample import Call
from smaller_matrices import B, I, T, drawn, flat, gradients
from tvm import te

import ecornn
from ecornn import Cell, largest, pointwise, product
from ecornn.analysis import analyse
from ecornn.analysis.heads import heads_of
from ecornn.cli.step_text import step_text
from ecornn.errors import CellError
from ecornn.tune.oracle import relative_error
from ecornn.workload import Stack, Workload


class BlockRNN(Cell):
    """A GRU-like cell of products with heads: of a state, and of a gated state in a second exchange; and, if ``whole``,
    a product without heads of the same state. ``dense``: all matrices are whole."""

    def __init__(self, heads: int, whole: bool = False, dense: bool = False) -> None:
        self.heads, self.whole, self.dense = heads, whole, dense
        self.name, self.states = f"block_{heads}{'_whole' * whole}{'_dense' * dense}", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        own = hidden if self.dense else hidden // self.heads
        found = {"W": (2, hidden, input), "R": (2, hidden, own), "S": (1, hidden, own), "b": (2, hidden)}
        return found | ({"Q": (1, hidden, hidden)} if self.whole else {})

    def step(self, x, states, p):
        (h,), heads = states, 1 if self.dense else self.heads
        a, r, v = product(x, p["W"]), product(h, p["R"], heads=heads), p["b"]
        q = product(h, p["Q"], 0) if self.whole else h
        z = pointwise(lambda b, j: te.sigmoid(a[b, 0, j] + r[b, 0, j] + v[0, j] + q[b, j]), h)
        s = product(pointwise(lambda b, j: z[b, j] * h[b, j], h), p["S"], 0, heads=heads)
        n = pointwise(lambda b, j: te.tanh(a[b, 1, j] + r[b, 1, j] + s[b, j] + v[1, j]), h)
        return [pointwise(lambda b, j: z[b, j] * h[b, j] + (1.0 - z[b, j]) * n[b, j], h)]


def filled(parameters: dict[str, Any], heads: int) -> dict[str, Any]:
    """Those of the dense cell: blocks within zeros."""
    found = dict(parameters)
    for name in ("R", "S"):
        blocks = parameters[name]
        gates, hidden, own = blocks.shape
        whole = np.zeros((gates, hidden, hidden), blocks.dtype)
        for n in range(heads):
            one = slice(n * own, (n + 1) * own)
            whole[:, one, one] = blocks[:, one]
        found[name] = whole
    return found


def by_the_dense_cell(heads: int, whole: bool, x: Any, h: Any, parameters: dict[str, Any]) -> tuple[Any, Any]:
    y, (last,) = ecornn.reference(BlockRNN(heads, whole, dense=True), x, flat(filled(parameters, heads)), [h])
    return y, last


@pytest.mark.parametrize(("heads", "whole"), [(1, False), (2, False), (3, True), (12, False)])
def test_the_reference_is_the_dense_cell(heads: int, whole: bool):
    cell, hidden = BlockRNN(heads, whole), 12
    x, parameters, (h,) = drawn(cell, hidden)
    wanted = by_the_dense_cell(heads, whole, x, h, parameters)
    y, (last,) = ecornn.reference(cell, x, flat(parameters), [h])
    np.testing.assert_allclose(y, wanted[0], rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(last, wanted[1], rtol=1e-13, atol=1e-13)


def test_a_phase_has_one_number_of_heads():
    phases = analyse(BlockRNN(3, whole=True), I, 12).phases
    assert [(heads_of(p), len(p.products)) for p in phases] == [(3, 2), (1, 1), (3, 1)]
    assert all(t.heads == heads_of(p) for p in phases for q in p.products for t in q.terms)


def gradients_of(heads: int, whole: bool, hidden: int) -> tuple[BlockRNN, Call, dict[str, Any]]:
    """A cell, a call with gradients, and what must come of it: of the adjoint of the dense cell blocks are cut."""
    own = hidden // heads

    def blocks(found: dict[str, Any]) -> dict[str, Any]:
        return {name: np.concatenate([value[:, n * own:(n + 1) * own, n * own:(n + 1) * own] for n in range(heads)], 1)
                if name in ("R", "S") else value for name, value in found.items()}

    cell = BlockRNN(heads, whole)
    call, wanted = gradients(cell, hidden, BlockRNN(heads, whole, dense=True), lambda p: filled(p, heads), blocks)
    y, last = by_the_dense_cell(heads, whole, call.x, call.states[0], call.parameters)
    return cell, call, {"y": y, "h_out": last, **wanted}


@pytest.mark.parametrize(("heads", "whole"), [(2, False), (3, True), (6, False)])
def test_the_adjoint_is_that_of_the_dense_cell(heads: int, whole: bool):
    cell, call, wanted = gradients_of(heads, whole, 6)
    smaller_matrices.check_adjoint(cell, 6, call, {n: v for n, v in wanted.items() if n not in ("y", "h_out")})


@pytest.mark.parametrize(("heads", "whole", "hidden"), [(2, True, 32), pytest.param(
    3, False, 9, marks=pytest.mark.exhaustive), pytest.param(5, False, 70, marks=pytest.mark.exhaustive)])
def test_trains_on_a_cpu(heads: int, whole: bool, hidden: int):
    """Heads of whole vectors; of three units, in code of one lane; and of 14, in code of two."""
    cell, call, wanted = gradients_of(heads, whole, hidden)
    smaller_matrices.check_training_on_a_cpu(cell, hidden, call, wanted)


@pytest.mark.parametrize(("heads", "shape", "says"), [
    (5, (1, 12, 2), r"product\(\.\.\., R, heads=5\): H = 12 must be a multiple of heads"),
    (3, (1, 12, 12), r"R \(G, H, H / heads\); it is \(1, 12, 12\)"),
    (0, (1, 12, 12), r"heads=0\): heads must be an integer, 1 at least"),
    (3, (1, 12, 13), r"'R' has shape \(1, 12, 13\); expected .*H / heads"),
    (3, (1, 12, 5), r"H = 12 must be a multiple of heads, and R \(G, H, H / heads\); it is \(1, 12, 5\)"),
    (1, (1, 12, 4), r"sums 12 terms of h, which has 12 values a row, and R, whose rows have 4")])
def test_what_is_wrong_is_said(heads: int, shape: tuple[int, ...], says: str):
    class Wrong(BlockRNN):
        def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
            return {"R": shape}

        def step(self, x, states, p):
            return [product(states[0], p["R"], 0, heads=heads)]

    with pytest.raises(CellError, match=says):
        analyse(Wrong(heads), I, 12)


def test_x_has_no_heads():
    class Wrong(BlockRNN):
        def step(self, x, states, p):
            return [product(x, p["S"], 0, heads=self.heads)]

    with pytest.raises(CellError, match=r"heads=3\): heads are of products of H = 12 values, x has 4"):
        analyse(Wrong(3), I, 12)
    with pytest.raises(CellError, match=r"x has 3 heads; heads are of products of H values"):
        analyse(Wrong(3), 12, 12)


CUT = {"units": 8, "fences": "rare", "carrier": "cluster"}
GPU = [("fused_step", 2, False, 64, "float32", 3, {}), ("fused_step", 5, True, 70, "float32", 3, {}),
       ("persistent", 2, False, 64, "float32", 3, {}), ("layout_transform", 2, True, 64, "float32", 3, {}),
       ("layout_transform", 2, False, 64, "float16", 3, {}),
       ("persistent", 2, False, 64, "float16", 12, {"units": 8, "groups": 2, "carrier": "l2"}),
       ("persistent", 4, False, 64, "float16", 3, CUT)]


@pytest.mark.parametrize(("schedule", "heads", "whole", "hidden", "dtype", "batch", "knobs"), GPU)
def test_emulated_on_a_gpu(schedule: str, heads: int, whole: bool, hidden: int, dtype: str, batch: int,
                           knobs: dict[str, Any], tmp_path: Path):
    """Heads of whole tiles, and such that end within them; of one block, of several, of a cluster; rows in groups."""
    if knobs:
        knobs = knobs | {"warps": 1, "gate_warps": 2 if knobs["carrier"] == "l2" else 1, "registers": 100}
    smaller_matrices.check_on_a_gpu(tmp_path, schedule, BlockRNN(heads, whole), hidden, dtype, batch, knobs,
                   partial(by_the_dense_cell, heads, whole))


@pytest.mark.parametrize(("schedule", "heads", "whole", "hidden", "dtype"), [
    ("persistent", 2, False, 64, "float32"), ("layout_transform", 2, True, 64, "float32"),
    pytest.param("persistent", 2, False, 128, "float16", marks=pytest.mark.exhaustive)])
def test_trains_emulated_on_a_gpu(schedule: str, heads: int, whole: bool, hidden: int, dtype: str, tmp_path: Path):
    cell, call, wanted = gradients_of(heads, whole, hidden)
    smaller_matrices.check_training_on_a_gpu(tmp_path, schedule, cell, hidden, dtype, call, wanted)


class Groups(Cell):
    """A softmax over each group of units, as docs/CELLS.md has it."""

    name, states, groups = "groups", ("h",), 3

    def parameters(self, input, hidden):
        return self.learned(input, hidden) | {"ones": (1, hidden, hidden // self.groups)}

    def learned(self, input, hidden):
        return {"W": (1, hidden, input), "S": (1, hidden, hidden)}

    def derived(self, p, xp):
        return {"ones": 0 * p["S"][:, :1, :1] + 1}

    def step(self, x, states, p):
        (h,), a, scores = states, product(x, p["W"], 0), product(states[0], p["S"], 0)
        top = largest(scores)
        power = pointwise(lambda b, j: te.exp(scores[b, j] - top[b]), h)
        total = product(power, p["ones"], 0, heads=self.groups)
        return [pointwise(lambda b, j: te.tanh(a[b, j] + 3.0 * power[b, j] / total[b, j]) - 0.5 * h[b, j], h)]


def test_softmax_over_groups():
    """Of what is learned, with gradients: against PyTorch's."""
    import torch

    import ecornn.torch

    layer, hidden = ecornn.torch.Recurrent(Groups(), I, 12), 12
    x = torch.randn(T, B, I, requires_grad=True)
    y, _ = layer(x)
    W, S = (getattr(layer, name).detach().double().requires_grad_() for name in ("W_l0", "S_l0"))
    h, rows, found = torch.zeros(B, hidden).double(), x.detach().double().requires_grad_(), []
    for row in rows:
        share = (h @ S.T).reshape(B, 3, 4).softmax(2).reshape(B, hidden)
        h = torch.tanh(row @ W.T + 3 * share) - 0.5 * h
        found.append(h)
    wanted = torch.stack(found)
    assert relative_error(y.detach().numpy(), wanted.detach().numpy()) <= 2e-6
    y.square().sum().backward()
    wanted.square().sum().backward()
    assert relative_error(x.grad.numpy(), rows.grad.numpy()) <= 1e-5
    gradients = {name: value.grad.numpy() for name, value in layer.named_parameters()}
    assert relative_error(gradients["W_l0"], W.grad.numpy()) <= 1e-5
    assert relative_error(gradients["S_l0"], S.grad.numpy()) <= 1e-5


def test_the_text_of_a_step_tells_of_heads():
    text = step_text(analyse(BlockRNN(3), I, 12), Workload("block", 12, I, B, T), Stack())
    assert "every unit sees its own of 3 heads of h" in text and "R[0] @ h in 3 heads" in text
    assert f"recurrent {3 * 12 * 4 * 4:>15}" in text  # bytes of the blocks
