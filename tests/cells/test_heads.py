"""Products with heads: against the same cell with whole matrices, whose blocks beside the diagonal are zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import Call
from cuda_on_cpu import Emulated
from emulated import TINY, training_program
from msgspec.structs import replace
from test_backward_emulated import LIMITS, Step

import ecornn
from ecornn import Cell, largest, pointwise, product
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.heads import heads_of
from ecornn.cli.step_text import step_text
from ecornn.errors import CellError
from ecornn.schedules import Task, all_schedules
from ecornn.tune.oracle import relative_error
from ecornn.workload import Stack, Traversal, Workload

T, B, I = 5, 3, 4


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
        from tvm import te

        (h,), heads = states, 1 if self.dense else self.heads
        a, r, v = product(x, p["W"]), product(h, p["R"], heads=heads), p["b"]
        q = product(h, p["Q"], 0) if self.whole else h
        z = pointwise(lambda b, j: te.sigmoid(a[b, 0, j] + r[b, 0, j] + v[0, j] + q[b, j]), h)
        s = product(pointwise(lambda b, j: z[b, j] * h[b, j], h), p["S"], 0, heads=heads)
        n = pointwise(lambda b, j: te.tanh(a[b, 1, j] + r[b, 1, j] + s[b, j] + v[1, j]), h)
        return [pointwise(lambda b, j: z[b, j] * h[b, j] + (1.0 - z[b, j]) * n[b, j], h)]


def drawn(cell: Cell, hidden: int, seed: int = 0, batch: int = B) -> tuple[Any, dict[str, Any], Any]:
    """x, parameters in te shape and the first state: values of float16 in float32."""
    rng = np.random.default_rng(seed)

    def values(shape: tuple[int, ...], scale: float = 1.0) -> Any:
        return (rng.uniform(-1, 1, shape) * scale).astype(np.float16).astype(np.float32)

    parameters = {n: values(s, 2 * s[-1] ** -0.5) for n, s in cell.parameters(I, hidden).items()}
    return values((T, batch, I)), parameters, values((batch, hidden))


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


def flat(parameters: dict[str, Any]) -> dict[str, Any]:
    return {f"{n}_l0": v.reshape(-1, *v.shape[2:]) for n, v in parameters.items()}


def by_the_dense_cell(heads: int, whole: bool, x: Any, parameters: dict[str, Any], h: Any) -> tuple[Any, Any]:
    y, (last,) = ecornn.reference(BlockRNN(heads, whole, dense=True), x, flat(filled(parameters, heads)), [h])
    return y, last


@pytest.mark.parametrize(("heads", "whole"), [(1, False), (2, False), (3, True), (12, False)])
def test_the_reference_is_the_dense_cell(heads: int, whole: bool):
    cell, hidden = BlockRNN(heads, whole), 12
    x, parameters, h = drawn(cell, hidden)
    wanted = by_the_dense_cell(heads, whole, x, parameters, h)
    y, (last,) = ecornn.reference(cell, x, flat(parameters), [h])
    np.testing.assert_allclose(y, wanted[0], rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(last, wanted[1], rtol=1e-13, atol=1e-13)


def test_a_phase_has_one_number_of_heads():
    phases = analyse(BlockRNN(3, whole=True), I, 12).phases
    assert [(heads_of(p), len(p.products)) for p in phases] == [(3, 2), (1, 1), (3, 1)]
    assert all(t.heads == heads_of(p) for p in phases for q in p.products for t in q.terms)


def gradients(heads: int, whole: bool, hidden: int) -> tuple[Any, ...]:
    """A call with gradients, and what must come of it: by the adjoint of the dense cell, cut to blocks."""
    cell = BlockRNN(heads, whole)
    x, parameters, h = drawn(cell, hidden)
    rng = np.random.default_rng(1)
    dy, dh = (rng.normal(size=s).astype(np.float16).astype(np.float32) for s in ((T, B, hidden), (B, hidden)))
    graph = analyse(BlockRNN(heads, whole, dense=True), I, hidden)
    dx, found, (first,) = backpropagate(adjoint(graph, hidden), x, filled(parameters, heads), [h], dy, [dh])
    own = hidden // heads
    for name in ("R", "S"):
        found[name] = np.concatenate([found[name][:, n * own:(n + 1) * own, n * own:(n + 1) * own]
                                      for n in range(heads)], axis=1)
    return cell, x, parameters, h, dy, dh, dx, found, first


@pytest.mark.parametrize(("heads", "whole"), [(2, False), (3, True), (6, False)])
def test_the_adjoint_is_that_of_the_dense_cell(heads: int, whole: bool):
    cell, x, parameters, h, dy, dh, dx, wanted, first = gradients(heads, whole, 6)
    own = adjoint(analyse(cell, I, 6), 6)
    got = backpropagate(own, x, parameters, [h], dy, [dh])
    np.testing.assert_allclose(got[0], dx, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got[2][0], first, rtol=1e-12, atol=1e-12)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[1][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "whole", "hidden"), [(2, True, 32), pytest.param(
    3, False, 9, marks=pytest.mark.exhaustive), pytest.param(5, False, 70, marks=pytest.mark.exhaustive)])
def test_trains_on_a_cpu(heads: int, whole: bool, hidden: int):
    """Heads of whole vectors; of three units, in code of one lane; and of 14, in code of two."""
    cell, x, parameters, h, dy, dh, dx, wanted, first = gradients(heads, whole, hidden)
    y, last = by_the_dense_cell(heads, whole, x, parameters, h)
    module = ecornn.compile(cell, hidden=hidden, input=I, batch=B, seq=T, target="cpu", training=True)
    layer = module.bind(flat(parameters), threads=2)
    got, after, kept = layer.forward(x, [h])
    assert relative_error(got, y) <= 2e-6 and relative_error(after[0], last) <= 2e-6
    assert np.array_equal(layer(x, [h])[0], got)
    found = layer.backward(kept, dy, [dh])
    assert relative_error(found.x, dx) <= 1e-5 and relative_error(found.state[0], first) <= 1e-5
    for name, value in wanted.items():
        assert relative_error(found.weights[f"{name}_l0"].reshape(value.shape), value) <= 1e-5, name


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
    cell = BlockRNN(heads, whole)
    x, parameters, h = drawn(cell, hidden, batch=batch)
    y, last = by_the_dense_cell(heads, whole, x, parameters, h)
    device = replace(TINY, cores=24) if knobs else TINY
    work = Workload(cell.name, hidden, I, batch, T, dtype)
    task, found = Task(work, analyse(cell, I, hidden), device), all_schedules()[schedule]
    assert found.serves(task) is None
    config = {**found.default(task), **knobs}
    if knobs:
        config |= {"warps": 1, "gate_warps": 2 if knobs["carrier"] == "l2" else 1, "registers": 100}
    assert found.check(task, config) is None
    emulated = Emulated(found.program(task, found.plan(task, config)), tmp_path)
    got, after = emulated.run(x.astype(dtype), {"h": h.astype(dtype)}, parameters)
    limit = 2e-5 if dtype == "float32" else 2e-3
    assert relative_error(got, y) <= limit and relative_error(after["h"], last) <= limit


class TrainingStep(Step):
    """A layer of a cell with heads, and one training step of it."""

    def __init__(self, folder: Path, schedule: str, cell: BlockRNN, hidden: int, dtype: str) -> None:
        self.name, self.dtype, self.traversal = cell.name, dtype, Traversal(keep="states")
        work = Workload(cell.name, hidden, I, B, T, dtype)
        self.task = Task(work, analyse(cell, I, hidden), TINY, self.traversal)
        self.program = training_program(all_schedules()[schedule], self.task)
        self.emulated = Emulated(self.program, folder)


@pytest.mark.parametrize(("schedule", "heads", "whole", "hidden", "dtype"), [
    ("persistent", 2, False, 64, "float32"), ("layout_transform", 2, True, 64, "float32"),
    pytest.param("persistent", 2, False, 128, "float16", marks=pytest.mark.exhaustive)])
def test_trains_emulated_on_a_gpu(schedule: str, heads: int, whole: bool, hidden: int, dtype: str, tmp_path: Path):
    cell, x, parameters, h, dy, dh, dx, wanted, first = gradients(heads, whole, hidden)
    step = TrainingStep(tmp_path, schedule, cell, hidden, dtype)
    found = step.run(Call(x, [h], dy, [dh], parameters))
    y, last = by_the_dense_cell(heads, whole, x, parameters, h)
    limit = LIMITS[dtype]
    for name, value in {"y": y, "h_out": last, "dx": dx, "dh_in": first,
                        **{f"gradient_{n}": g for n, g in wanted.items()}}.items():
        assert relative_error(found[name].reshape(value.shape), value) <= limit, name


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
        from tvm import te

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
