"""Products with heads, and matrices narrower than H, against formulas on CPUs and emulated GPUs; what is refused.

Limits of 1e-10 to 1e-13 are of float64 on both sides, whose sums are in different orders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import Emulated
from emulated import TINY
from msgspec.structs import replace
from smaller_matrices import B, BlockRNN, I, LowRank, NarrowInput, Projected, T, drawn, flat, near, training_call
from step_cells import Given, run, run_analysed
from test_backward_emulated import LIMITS, Step
from test_cpu_weights import needs_vnni
from tvm import te

import ecornn
from ecornn import Cell, largest, pointwise, product
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.heads import heads_of
from ecornn.analysis.narrow import columns_of, narrow_of
from ecornn.cli.step_text import step_text
from ecornn.errors import CellError
from ecornn.schedules import Task, all_schedules
from ecornn.tune.oracle import relative_error
from ecornn.workload import Stack, Workload


def name_of(value: Any) -> str:
    return f"{type(value).__name__}_{value.name}" if isinstance(value, Cell) else str(value)


def exhaustive(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


def formula(cell: Cell, x: Any, states: list[Any], parameters: dict[str, Any]) -> tuple[Any, Any]:
    y, last = run(cell, x, dict(zip(cell.states, states, strict=True)), parameters)
    return y, last[cell.states[0]]


@pytest.mark.parametrize("cell", [BlockRNN(1), BlockRNN(2), BlockRNN(3, True), BlockRNN(12), LowRank(3),
                                  LowRank(5, whole=True), Projected()], ids=name_of)
def test_the_reference_and_the_analysed_step(cell: Cell):
    x, parameters, states = drawn(cell, 12)
    wanted, last = formula(cell, x, states, parameters)
    y, after = ecornn.reference(cell, x, flat(parameters), states)
    np.testing.assert_allclose(y, wanted, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(after[0], last, rtol=1e-13, atol=1e-13)
    y, _ = run_analysed(analyse(cell, I, 12), x, parameters, states)
    np.testing.assert_allclose(y, wanted, rtol=1e-12, atol=1e-12)


def test_a_phase_has_one_number_of_heads():
    phases = analyse(BlockRNN(3, whole=True), I, 12).phases
    assert [(heads_of(p), len(p.products)) for p in phases] == [(3, 2), (1, 1), (3, 1)]
    assert all(t.heads == heads_of(p) for p in phases for q in p.products for t in q.terms)


def test_what_is_exchanged_is_narrow():
    assert [(*narrow_of(p), columns_of(p, 12)) for p in analyse(LowRank(3), I, 12).phases] == [(3, 0, 12), (0, 3, 3)]
    assert [narrow_of(p) for p in analyse(LowRank(12), I, 12).phases] == [(0, 0)] * 2


@pytest.mark.parametrize(("cell", "hidden", "weights", "limit"), [
    pytest.param(LowRank(5, whole=True), 40, "int8", 3e-2, marks=needs_vnni), (NarrowInput(3), 10, None, 2e-6),
    *exhaustive((LowRank(3), 40, None, 2e-6), (Projected(), 33, "int16", 2e-4), (LowRank(17), 70, None, 2e-6))])
def test_on_a_cpu(cell: Cell, hidden: int, weights: str | None, limit: float):
    x, parameters, states = drawn(cell, hidden)
    y, last = formula(cell, x, states, parameters)
    module = ecornn.compile(cell, hidden=hidden, input=I, batch=B, seq=T, target="cpu", weights=weights)
    got, after = module.bind(flat(parameters), threads=2)(x, states)
    assert relative_error(got, y) <= limit and relative_error(after[0], last) <= limit


L2 = {"units": 8, "warps": 1, "groups": 2, "gate_warps": 2, "registers": 100, "carrier": "l2"}
CLUSTER = L2 | {"groups": 1, "gate_warps": 1, "fences": "rare", "carrier": "cluster"}


@pytest.mark.parametrize(("schedule", "cell", "hidden", "dtype", "batch", "knobs"), [
    ("fused_step", BlockRNN(2), 64, "float32", 3, {}), ("fused_step", BlockRNN(5, True), 70, "float32", 3, {}),
    ("persistent", BlockRNN(2), 64, "float32", 3, {}), ("layout_transform", BlockRNN(2, True), 64, "float32", 3, {}),
    ("layout_transform", BlockRNN(2), 64, "float16", 3, {}), ("persistent", BlockRNN(2), 64, "float16", 12, L2),
    ("persistent", BlockRNN(4), 64, "float16", 3, {n: v for n, v in CLUSTER.items() if n != "groups"}),
    ("persistent", LowRank(18), 64, "float16", 12, L2), ("persistent", LowRank(7), 40, "float16", 3, CLUSTER),
    ("layout_transform", LowRank(5, True), 40, "float16", 3, {}),
    *exhaustive(("persistent", NarrowInput(5), 40, "float32", 3, {}), ("fused_step", Projected(), 40, "float32", 3, {}),
                ("persistent_block", LowRank(5, True), 40, "float32", 3, {}))], ids=name_of)
def test_emulated_on_a_gpu(schedule, cell, hidden, dtype, batch, knobs, tmp_path):
    """Heads of whole tiles, and such that end within them; narrow values of parts of blocks; one block and several."""
    x, parameters, states = drawn(cell, hidden, batch)
    work = Workload(cell.name, hidden, I, batch, T, dtype)
    task = Task(work, analyse(cell, I, hidden), replace(TINY, cores=24) if knobs else TINY)
    found = all_schedules()[schedule]
    assert found.serves(task) is None
    config = {**found.default(task), **knobs}
    assert found.check(task, config) is None
    emulated = Emulated(found.program(task, found.plan(task, config)), tmp_path)
    given = {n: s.astype(dtype) for n, s in zip(cell.states, states, strict=True)}
    got, after = emulated.run(x.astype(dtype), given, parameters)
    wanted = dict(zip(("y", "last"), formula(cell, x, states, parameters), strict=True))
    near({"y": got, "last": after[cell.states[0]]}, wanted, 2e-5 if dtype == "float32" else 2e-3)


@pytest.mark.parametrize(("cell", "hidden"), [
    (BlockRNN(2), 6), (BlockRNN(3, True), 6), (BlockRNN(6), 6), (LowRank(3), 9), (LowRank(5, whole=True), 9),
    (NarrowInput(3), 9), (NarrowInput(2, whole=True), 9)], ids=name_of)
def test_the_adjoint(cell: Cell, hidden: int):
    call, wanted = training_call(cell, hidden)
    own = adjoint(analyse(cell, I, hidden), hidden)
    dx, weights, (first,) = backpropagate(own, call.x, call.parameters, call.states, call.dy, call.dstates)
    for name, value in {"dx": dx, "dh_in": first, **{f"gradient_{n}": v for n, v in weights.items()}}.items():
        # both are float64, with sums in another order: some thousand roundings of 1e-16
        np.testing.assert_allclose(value, wanted[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("cell", "hidden"), [
    (BlockRNN(2, True), 32), (LowRank(5), 33), (NarrowInput(18, whole=True), 40),
    *exhaustive((BlockRNN(3), 9), (BlockRNN(5), 70), (LowRank(18, whole=True), 40), (NarrowInput(5), 33))], ids=name_of)
def test_trains_on_a_cpu(cell: Cell, hidden: int):
    call, wanted = training_call(cell, hidden)
    module = ecornn.compile(cell, hidden=hidden, input=I, batch=B, seq=T, target="cpu", training=True)
    layer = module.bind(flat(call.parameters), threads=2)
    y, (last,), kept = layer.forward(call.x, call.states)
    assert np.array_equal(layer(call.x, call.states)[0], y)
    near({"y": y, "h_out": last}, wanted, 2e-6)
    made = layer.backward(kept, call.dy, call.dstates)
    near({"dx": made.x, "dh_in": made.state[0], **{f"gradient_{n}": made.weights[f"{n}_l0"] for n in call.parameters}},
         wanted, 1e-5)


@pytest.mark.parametrize(("schedule", "cell", "hidden", "dtype"), [
    ("persistent", BlockRNN(2), 64, "float32"), ("layout_transform", BlockRNN(2, True), 64, "float32"),
    ("persistent", LowRank(5), 40, "float32"), ("persistent", NarrowInput(18, whole=True), 40, "float16"),
    *exhaustive(("persistent", BlockRNN(2), 128, "float16"), ("persistent", NarrowInput(5), 40, "float32"),
                ("layout_transform", LowRank(18, whole=True), 40, "float16"))], ids=name_of)
def test_trains_emulated_on_a_gpu(schedule: str, cell: Cell, hidden: int, dtype: str, tmp_path: Path):
    call, wanted = training_call(cell, hidden)
    found = Step(tmp_path, schedule, cell, (T, B, I, hidden), dtype).run(call)
    near({n: found[n] for n in wanted}, wanted, LIMITS[dtype])


def headed(heads: int, shape: tuple[int, ...] = (1, 12, 4), of_x: bool = False) -> Given:
    return Given(lambda x, h, p: [product(x if of_x else h, p["R"], 0, heads=heads)],
                 lambda input, hidden: {"R": shape})


def narrow(step: Any) -> Given:
    shapes = {"V": (1, 3, 6), "U": (1, 6, 3), "T": (1, 6, 2), "X": (1, 6, 12)}
    return Given(lambda x, h, p: [step(h, p)], lambda input, hidden: shapes, unread=tuple(shapes))


def through(value: Any) -> Any:
    def step(h: Any, p: Any) -> Any:
        narrow = product(h, p["V"], 0)
        return product(pointwise(lambda b, j: value(narrow[b, j], h, b, j), narrow), p["U"], 0)
    return step


@pytest.mark.parametrize(("cell", "input", "hidden", "says"), [
    (headed(5, (1, 12, 2)), 4, 12, "product(..., R, heads=5): H = 12 must be a multiple of heads"),
    (headed(3, (1, 12, 12)), 4, 12, "R (G, H, H / heads); it is (1, 12, 12)"),
    (headed(0, (1, 12, 12)), 4, 12, "heads=0): heads must be an integer of at least 1"),
    (headed(3, (1, 12, 13)), 4, 12, "'R' has shape (1, 12, 13); expected ... H / heads"),
    (headed(3, (1, 12, 5)), 4, 12, "H = 12 must be a multiple of heads, and R (G, H, H / heads); it is (1, 12, 5)"),
    (headed(1), 4, 12, "sums 12 terms of h, which has 12 values per row, with R, whose rows have 4"),
    (headed(3, of_x=True), 4, 12, "heads=3): only products of H = 12 values can have heads; x has 4"),
    (headed(3, of_x=True), 12, 12, "x has 3 heads, which only products of H values can have"),
    (narrow(through(lambda v, h, b, j: v + h[b, j])), 12, 6, "h[b, j] is combined with 3 values per row"),
    (narrow(through(lambda v, h, b, j: 1.0 / v)), 12, 6,
     "the factor pointwise of a product is narrower than H, and it is not finite when the products"),
    (narrow(lambda h, p: product(te.compute((3, 12), lambda b, j: h[b, j // 2]), p["X"], 0)), 12, 6,
     "the factor compute of a product has 12 values per row; only x can have more than H = 6"),
    (narrow(lambda h, p: product(h, p["V"], 0)), 12, 6, "new state 'h' has shape (3, 3); expected (B, H), here (3, 6)"),
    (narrow(lambda h, p: pointwise(lambda b, j: product(h, p["V"], 0)[b, j] + h[b, j], h)), 12, 6,
     "h_V has 3 values per row; expected H = 6, since it is read for each hidden unit"),
    (narrow(lambda h, p: product(product(h, p["V"], 0), p["T"], 0)), 12, 6,
     "sums 3 terms of h_V, which has 3 values per row, with T")])
def test_what_is_wrong_is_said(cell: Given, input: int, hidden: int, says: str):
    with pytest.raises(CellError) as caught:
        analyse(cell, input, hidden)
    assert all(part in str(caught.value) for part in says.split(" ... "))
    assert caught.value.at is not None or says.startswith("'R' has")  # parameters() has no line


class Joined(Cell):
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
    y, _ = ecornn.reference(cell, np.zeros((2, B, I)), ecornn.derive(cell, {"R_l0": R}, input=I, hidden=H), [h, c])
    for found in y:
        h, c = np.split(np.tanh(np.concatenate([h, c], axis=1) @ R.T), 2, axis=1)
        np.testing.assert_allclose(found, h, rtol=1e-12, atol=1e-12)


class Groups(Cell):
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
    import torch

    import ecornn.torch

    layer, hidden = ecornn.torch.Recurrent(Groups(), I, 12), 12
    x = torch.randn(T, B, I, requires_grad=True)
    y, _ = layer(x)
    W, S = (getattr(layer, name).detach().double().requires_grad_() for name in ("W_l0", "S_l0"))
    h, rows, found = torch.zeros(B, hidden).double(), x.detach().double().requires_grad_(), []
    for row in rows:
        h = torch.tanh(row @ W.T + 3 * (h @ S.T).reshape(B, 3, 4).softmax(2).reshape(B, hidden)) - 0.5 * h
        found.append(h)
    wanted = torch.stack(found)
    assert relative_error(y.detach().numpy(), wanted.detach().numpy()) <= 2e-6
    y.square().sum().backward()
    wanted.square().sum().backward()
    for got, exact in ((x, rows), (layer.W_l0, W), (layer.S_l0, S)):
        assert relative_error(got.grad.numpy(), exact.grad.numpy()) <= 1e-5


def test_the_text_of_a_step_tells_of_heads_and_of_bytes():
    text = step_text(analyse(BlockRNN(3), I, 12), Workload("block", 12, I, B, T), Stack())
    assert "every unit sees its own of 3 heads of h" in text and "R[0] @ h in 3 heads" in text
    assert f"recurrent {3 * 12 * 4 * 4:>15}" in text  # bytes of the blocks
    text = step_text(analyse(LowRank(3), I, 12), Workload("low_rank", 12, I, B, T), Stack())
    assert "V (1, 3, 12): 1 matrix from 12 values to 3" in text and "U[0, 1] @" in text
    assert f"exchanged {B * (12 + 3) * 4:>15}" in text and f"recurrent {(12 * 3 + 2 * 3 * 12) * 4:>15}" in text
