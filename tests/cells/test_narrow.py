"""Matrices narrower than H: against a loop in NumPy, and against the same cell with zeros in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import smaller_matrices
from cpu_training_sample import Call
from smaller_matrices import B, I, T, drawn, flat, gradients
from step_cells import Given
from test_cpu_weights import needs_vnni
from tvm import te

import ecornn
from ecornn import Cell, pointwise, product
from ecornn.analysis import analyse
from ecornn.analysis.evaluate import hoist, start, step
from ecornn.analysis.narrow import columns_of, narrow_of
from ecornn.cli.step_text import step_text
from ecornn.errors import CellError
from ecornn.tune.oracle import relative_error
from ecornn.workload import Stack, Workload


def sig(v: Any) -> Any:
    return 1 / (1 + np.exp(-v))


class LowRank(Cell):
    """A gated unit whose recurrent matrices are U f(V h), of ``rank`` values with a bias; if ``whole`` beside a whole
    matrix, in sums with both."""

    def __init__(self, rank: int, whole: bool = False) -> None:
        self.rank, self.whole, self.name, self.states = rank, whole, f"low_rank_{rank}{'_whole' * whole}", ("h",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        found = {"W": (2, hidden, input), "V": (1, self.rank, hidden), "U": (2, hidden, self.rank), "b": (3, hidden)}
        return found | ({"R": (1, hidden, hidden)} if self.whole else {})

    def step(self, x, states, p):
        (h,), a, v = states, product(x, p["W"]), p["b"]
        narrow = product(h, p["V"], 0)
        deep = product(pointwise(lambda b, j: te.tanh(narrow[b, j] + v[2, j]), narrow), p["U"])
        z = pointwise(lambda b, j: te.sigmoid(a[b, 0, j] + deep[b, 0, j] + v[0, j]), h)
        kept = pointwise(lambda b, j: z[b, j] * h[b, j], h)
        new = product(kept, p["R"], 0) if self.whole else kept
        n = pointwise(lambda b, j: te.tanh(a[b, 1, j] + deep[b, 1, j] + new[b, j] + v[1, j]), h)
        return [pointwise(lambda b, j: kept[b, j] + (1.0 - z[b, j]) * n[b, j], h)]

    def numpy(self, x: Any, h: Any, p: dict[str, Any]) -> tuple[Any, Any]:
        y, p = [], {n: v.astype(float) for n, v in p.items()}
        for row in x.astype(float):
            a, deep = row @ p["W"].swapaxes(1, 2), np.tanh(h @ p["V"][0].T + p["b"][2, :self.rank])
            deep = deep @ p["U"].swapaxes(1, 2)
            z = sig(a[0] + deep[0] + p["b"][0])
            n = np.tanh(a[1] + deep[1] + p["b"][1] + (z * h @ p["R"][0].T if self.whole else z * h))
            h = z * h + (1 - z) * n
            y.append(h)
        return np.stack(y), h


class Projected(Cell):
    """An LSTM whose gates see a projection r (P) of its output (Sak et al. 2014, arXiv 1402.1128); its state is what is
    projected."""

    name, states, width = "lstm_projected", ("m", "c"), 3

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (4, hidden, input), "R": (4, hidden, self.width), "P": (1, self.width, hidden), "b": (4, hidden)}

    def step(self, x, states, p):
        (m, c), a, v = states, product(x, p["W"]), p["b"]
        r = product(product(m, p["P"], 0), p["R"])
        i, f, o = (pointwise(lambda b, j, g=g: te.sigmoid(a[b, g, j] + r[b, g, j] + v[g, j]), m) for g in (0, 1, 3))
        z = pointwise(lambda b, j: te.tanh(a[b, 2, j] + r[b, 2, j] + v[2, j]), m)
        new = pointwise(lambda b, j: f[b, j] * c[b, j] + i[b, j] * z[b, j], c)
        return [pointwise(lambda b, j: o[b, j] * te.tanh(new[b, j]), m), new]

    def numpy(self, x: Any, m: Any, p: dict[str, Any]) -> tuple[Any, Any]:
        y, p, c = [], {n: v.astype(float) for n, v in p.items()}, np.zeros_like(m, float)
        for row in x.astype(float):
            i, f, z, o = row @ p["W"].swapaxes(1, 2) + m @ p["P"][0].T @ p["R"].swapaxes(1, 2) + p["b"][:, None]
            c = sig(f) * c + sig(i) * np.tanh(z)
            m = sig(o) * np.tanh(c)
            y.append(m)
        return np.stack(y), m


CELLS = [LowRank(3), LowRank(5, whole=True), Projected()]


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: c.name)
def test_the_reference_and_the_analysed_step(cell: Any):
    x, parameters, states = drawn(cell, 12)
    wanted, last = cell.numpy(x, states[0], parameters)
    y, after = ecornn.reference(cell, x, flat(parameters), states)
    np.testing.assert_allclose(y, wanted, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(after[0], last, rtol=1e-13, atol=1e-13)
    graph, parameters = analyse(cell, I, 12), {n: v.astype(float) for n, v in parameters.items()}
    values = start(graph, parameters)
    hoist(graph, parameters, values, x[:1].astype(float), (1, B, 12))
    values |= {v: s.astype(float) for v, s in zip(graph.states.values(), states, strict=True)}
    step(graph, parameters, values, (1, B, 12))
    np.testing.assert_allclose(values[graph.results[cell.states[0]]][0], wanted[0], rtol=1e-12, atol=1e-12)


def test_what_is_exchanged_is_narrow():
    phases = analyse(LowRank(3), I, 12).phases
    assert [(*narrow_of(p), columns_of(p, 12)) for p in phases] == [(3, 0, 12), (0, 3, 3)]
    assert [narrow_of(p) for p in analyse(LowRank(12), I, 12).phases] == [(0, 0)] * 2


@pytest.mark.parametrize(("cell", "hidden", "weights", "limit"), [
    pytest.param(CELLS[1], 40, "int8", 3e-2, marks=needs_vnni),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        (CELLS[0], 40, None, 2e-6), (CELLS[2], 33, "int16", 2e-4), (LowRank(17), 70, None, 2e-6)))])
def test_on_a_cpu(cell: Any, hidden: int, weights: str | None, limit: float):
    x, parameters, states = drawn(cell, hidden)
    y, last = cell.numpy(x, states[0], parameters)
    module = ecornn.compile(cell, hidden=hidden, input=I, batch=B, seq=T, target="cpu", weights=weights)
    got, after = module.bind(flat(parameters), threads=2)(x, states)
    assert relative_error(got, y) <= limit and relative_error(after[0], last) <= limit


class Joined(Cell):
    """One matrix that is trained for h and c side by side, as docs/CELLS.md has it."""

    name, states = "joined", ("h", "c")

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"A": (2, hidden, hidden), "B": (2, hidden, hidden)}

    def learned(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"R": (2, hidden, 2 * hidden)}

    def derived(self, p: Any, xp: Any) -> dict[str, Any]:
        H = p["R"].shape[1]
        return {"A": p["R"][:, :, :H], "B": p["R"][:, :, H:]}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        a, b = product(states[0], p["A"]), product(states[1], p["B"])
        return [pointwise(lambda i, j, g=g: te.tanh(a[i, g, j] + b[i, g, j]), states[0]) for g in range(2)]


def test_an_operand_of_two_states_is_two_products():
    cell, rng, H = Joined(), np.random.default_rng(0), 6
    R, h, c = rng.normal(size=(2 * H, 2 * H)), rng.normal(size=(B, H)), rng.normal(size=(B, H))
    weights = ecornn.derive(cell, {"R_l0": R}, input=I, hidden=H)
    y, _ = ecornn.reference(cell, np.zeros((2, B, I)), weights, [h, c])
    for found in y:
        h, c = np.split(np.tanh(np.concatenate([h, c], axis=1) @ R.T), 2, axis=1)
        np.testing.assert_allclose(found, h, rtol=1e-12, atol=1e-12)


class NarrowInput(LowRank):
    """Its narrow values take a narrow product of x, too; if ``whole`` its units a whole one besides."""

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        found = {"W": (1, self.rank, input), "V": (1, self.rank, hidden), "U": (1, hidden, self.rank)}
        return found | ({"Q": (1, hidden, input)} if self.whole else {})

    def step(self, x, states, p):
        (h,), a, b = states, product(x, p["W"], 0), product(states[0], p["V"], 0)
        u = product(pointwise(lambda i, j: te.tanh(a[i, j] + b[i, j]), a), p["U"], 0)
        q = product(x, p["Q"], 0) if self.whole else h
        return [pointwise(lambda i, j: 0.5 * h[i, j] + u[i, j] + 0.25 * q[i, j], h)]

    def numpy(self, x: Any, h: Any, p: dict[str, Any]) -> tuple[Any, Any]:
        (W, V, U, *Q), y = (v[0].astype(float) for v in p.values()), []
        for row in x.astype(float):
            h = 0.5 * h + np.tanh(row @ W.T + h @ V.T) @ U.T + 0.25 * (row @ Q[0].T if Q else h)
            y.append(h)
        return np.stack(y), h


def test_a_narrow_product_of_x():
    cell = NarrowInput(3)
    x, parameters, (h,) = drawn(cell, 10)
    module = ecornn.compile(cell, hidden=10, input=I, batch=B, seq=T, target="cpu")
    y, _ = module.bind(flat(parameters))(x, [h])
    assert relative_error(y, cell.numpy(x, h, parameters)[0]) <= 2e-6


L2 = {"units": 8, "warps": 1, "groups": 2, "gate_warps": 2, "registers": 100, "carrier": "l2"}
CLUSTER = L2 | {"groups": 1, "gate_warps": 1, "fences": "rare", "carrier": "cluster"}


@pytest.mark.parametrize(("schedule", "cell", "hidden", "dtype", "batch", "knobs"), [
    ("persistent", LowRank(18), 64, "float16", 12, L2), ("persistent", LowRank(7), 40, "float16", 3, CLUSTER),
    ("layout_transform", LowRank(5, True), 40, "float16", 3, {}),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("persistent", NarrowInput(5), 40, "float32", 3, {}), ("fused_step", Projected(), 40, "float32", 3, {}),
        ("persistent_block", LowRank(5, True), 40, "float32", 3, {})))])
def test_emulated_on_a_gpu(schedule: str, cell: Any, hidden: int, dtype: str, batch: int, knobs: dict[str, Any],
                           tmp_path: Path):
    """Narrow values of a part of a block, of one and a half, and of blocks that send none."""
    smaller_matrices.check_on_a_gpu(tmp_path, schedule, cell, hidden, dtype, batch, knobs, cell.numpy)


def gradients_of(cell: LowRank, hidden: int) -> tuple[Call, dict[str, Any]]:
    """A call with gradients, and what must come of it: of the same cell with H rows and columns, those beyond zeros."""
    full, shapes = type(cell)(hidden, cell.whole), cell.parameters(I, hidden)

    def filled(parameters: dict[str, Any]) -> dict[str, Any]:
        return {n: np.pad(parameters[n], [(0, to - has) for to, has in zip(s, shapes[n], strict=True)])
                for n, s in full.parameters(I, hidden).items()}

    call, wanted = gradients(cell, hidden, full, filled, lambda found: {
        n: found[n][tuple(map(slice, shape))] for n, shape in shapes.items()})
    y, last = cell.numpy(call.x, call.states[0], call.parameters)
    return call, {"y": y, "h_out": last, **wanted}


@pytest.mark.parametrize("cell", [LowRank(3), LowRank(5, whole=True), NarrowInput(3), NarrowInput(2, whole=True)],
                         ids=lambda c: f"{type(c).__name__}_{c.name}")
def test_the_adjoint(cell: LowRank):
    call, wanted = gradients_of(cell, 9)
    smaller_matrices.check_adjoint(cell, 9, call, {n: v for n, v in wanted.items() if n not in ("y", "h_out")})


@pytest.mark.parametrize(("cell", "hidden"), [(LowRank(5), 33), (NarrowInput(18, whole=True), 40), *(
    pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        (LowRank(18, whole=True), 40), (NarrowInput(5), 33)))])
def test_trains_on_a_cpu(cell: LowRank, hidden: int):
    smaller_matrices.check_training_on_a_cpu(cell, hidden, *gradients_of(cell, hidden))


@pytest.mark.parametrize(("schedule", "cell", "hidden", "dtype"), [
    ("persistent", LowRank(5), 40, "float32"), ("persistent", NarrowInput(18, whole=True), 40, "float16"),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
        ("layout_transform", LowRank(18, whole=True), 40, "float16"), ("persistent", NarrowInput(5), 40, "float32")))])
def test_trains_emulated_on_a_gpu(schedule: str, cell: LowRank, hidden: int, dtype: str, tmp_path: Path):
    smaller_matrices.check_training_on_a_gpu(tmp_path, schedule, cell, hidden, dtype, *gradients_of(cell, hidden))


def through(value: Any) -> Any:
    """A step that multiplies ``value(narrow, h, b, j)`` of a narrow product by U."""
    def step(h: Any, p: Any) -> Any:
        narrow = product(h, p["V"], 0)
        return product(pointwise(lambda b, j: value(narrow[b, j], h, b, j), narrow), p["U"], 0)

    return step


@pytest.mark.parametrize(("step", "says"), [
    (through(lambda v, h, b, j: v + h[b, j]), "h[b, j] is read beside 3 values a row"),
    (through(lambda v, h, b, j: 1.0 / v),
     "pointwise, which is multiplied, is narrower than H, and not finite where the products are 0"),
    (lambda h, p: product(te.compute((3, 12), lambda b, j: h[b, j // 2]), p["X"], 0),
     "compute, which is multiplied, has 12 values a row; what is not x itself has H at most, here 6"),
    (lambda h, p: product(h, p["V"], 0), "new state 'h' has shape (3, 3); expected (B, H), here (3, 6)"),
    (lambda h, p: pointwise(lambda b, j: product(h, p["V"], 0)[b, j] + h[b, j], h), "h_V has 3 values a row; what is "
     "read for each hidden unit has H, here 6"),
    (lambda h, p: product(product(h, p["V"], 0), p["T"], 0), "sums 3 terms of h_V, which has 3 values a row, and T")])
def test_what_is_wrong_is_said(step: Any, says: str):
    shapes = {"V": (1, 3, 6), "U": (1, 6, 3), "T": (1, 6, 2), "X": (1, 6, 12)}
    with pytest.raises(CellError) as caught:
        analyse(Given(lambda x, h, p: [step(h, p)], lambda input, hidden: shapes, unread=tuple(shapes)), 12, 6)
    assert says in str(caught.value) and caught.value.at is not None


def test_the_text_of_a_step_tells_of_bytes():
    text = step_text(analyse(LowRank(3), I, 12), Workload("low_rank", 12, I, B, T), Stack())
    assert "V (1, 3, 12): 1 matrix from 12 values to 3" in text and "U[0, 1] @" in text
    assert f"exchanged {B * (12 + 3) * 4:>15}" in text and f"recurrent {(12 * 3 + 2 * 3 * 12) * 4:>15}" in text
