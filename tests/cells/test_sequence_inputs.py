"""Sequences beside x, given for each step: every schedule, training, calls of NumPy and PyTorch; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
import torch
from drawn_layers import Drawn
from emulated import TINY, check_numbers, known_by_name, training_program
from emulated_training import check
from other_cells import INPUTS as CELLS

import ecornn
from ecornn.analysis import analyse
from ecornn.cells import Cell, pointwise, product
from ecornn.cli.cell_checks import RIGHT, Checks
from ecornn.cli.step_text import step_text
from ecornn.errors import ArgumentError, CellError, EcornnError, ShapeError
from ecornn.interpreter import interpret
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.torch import Recurrent
from ecornn.tune.oracle import write
from ecornn.workload import ALONE, SINGLE, Traversal, Workload

pytestmark = pytest.mark.usefixtures("small_tiles")

T, B, I, H = 6, 4, 5, 22
BOTH = Traversal(True, 2, True, True)
known = known_by_name(CELLS)


def task_of(cell: str, dtype: str, traversal: Traversal = ALONE) -> Task:
    width = CELLS[cell].row_width(I, H)
    return Task(Workload(cell, H, width, B, T, dtype), analyse(CELLS[cell], width, H), TINY, traversal)


@pytest.mark.parametrize(("cell", "schedule", "dtype", "traversal"), [
    ("masked", "fused_step", "float32", BOTH), ("timed_gru", "layout_transform", "bfloat16", ALONE),
    ("timed_gru", "persistent", "float32", BOTH), ("masked", "persistent", "float16", Traversal(sequences=True)),
    ("masked", "persistent_wide", "bfloat16", ALONE), ("gap", "elementwise", "tf32", BOTH)], ids=str)
def test_results(tmp_path: Path, cell: str, schedule: str, dtype: str, traversal: Traversal):
    kind = "float32" if dtype == "tf32" else dtype
    task, found = task_of(cell, kind, traversal), all_schedules()[schedule]
    assert found.serves(task) is None
    check_numbers(tmp_path, found, task, found.default(task))


def drawn_of(name: str, dtype: str = "float64") -> Drawn:
    return Drawn(CELLS[name], (T, B, I, H), dtype, least=0, ends=False)


def parts(drawn: Drawn) -> tuple[Any, dict[str, Any]]:
    """x itself, and the sequences beside it."""
    beside = np.split(drawn.x[..., I:], len(drawn.cell.inputs), axis=-1)
    return drawn.x[..., :I], dict(zip(drawn.cell.inputs, beside, strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_the_adjoint(cell: str):
    """Against differences of the formula; what the tuner checks with against that, too."""
    drawn, rng = drawn_of(cell), np.random.default_rng(1)
    drawn.check_call(*interpret(drawn.cell, drawn.x, drawn.parameters, drawn.first), 1e-13)
    dx, *_ = drawn.gradients()
    along = rng.standard_normal(dx.shape)
    up, down = (drawn.loss(x=drawn.x + by * along) for by in (1e-5, -1e-5))
    assert abs((up - down) / 2e-5 - (dx * along).sum()) < 1e-7


def test_help_while_writing(tmp_path: Path):
    """The reference, the analysed step as text, and the check of a cell."""
    drawn = drawn_of("masked")
    y, (last,) = ecornn.reference(drawn.cell, drawn.x, drawn.weights)
    wanted, states = step_cells.run(drawn.cell, drawn.x, {"h": np.zeros((B, H))}, drawn.parameters)
    assert abs(y - wanted).max() < 1e-13 and abs(last - states["h"]).max() < 1e-13
    task = task_of("masked", "float32")
    text = step_text(task.graph, task.workload, SINGLE)
    assert "I = 5 beside scale, m, H = 22" in text and "of x and inputs:" in text
    assert Checks(drawn.cell, I, H, 2).derivative().result == RIGHT


def test_candidates_are_checked_with_what_a_cell_says(tmp_path: Path):
    """Values of a time that goes on; answers of the whole rows."""
    cell, path = CELLS["gap"], tmp_path / "answers.npz"
    write(path, cell, Workload(cell.identity(), H, cell.row_width(I, H), B, T), seed=0)
    with np.load(path, allow_pickle=False) as found:
        x, h = found["x"].astype(np.float64), found["first_0"].astype(np.float64)
        parameters = {n: found[f"w:{n}_l0"].reshape(s).astype(np.float64) for n, s in cell.parameters(I, H).items()}
        assert x[..., I:].min() >= 0 > x[..., :I].min()
        assert abs(found["y"] - step_cells.run(cell, x, {"h": h}, parameters)[0]).max() < 1e-13


@pytest.mark.parametrize(("cell", "dtype"), [("masked", "float32"), ("timed_gru", "float32"), ("gap", "bfloat16")])
def test_a_training_step_of_a_gpu(tmp_path: Path, cell: str, dtype: str):
    """Emulated; dx has the gradients of the sequences behind that of x."""
    drawn, task = drawn_of(cell, dtype), task_of(cell, dtype, Traversal(keep="states"))
    schedule = all_schedules()["elementwise" if cell == "gap" else "persistent"]
    found, wanted = drawn.train(training_program(schedule, task), tmp_path), drawn.wanted()
    dx = wanted.pop("dx")
    for n in range(len(drawn.cell.inputs) + 1):  # each by itself: they are of different size
        part = np.s_[..., :I] if n == 0 else np.s_[..., I + (n - 1) * H:I + n * H]
        wanted[f"dx{n}"], found[f"dx{n}"] = dx[part], found["dx"].reshape(dx.shape)[part]
    check(found, wanted, {"float32": 2e-5, "bfloat16": 8 * 2.0 ** -8}[dtype])


@pytest.fixture(scope="module")
def trained() -> Any:
    return ecornn.compile(CELLS["masked"], hidden=H, input=I, batch=B, dtype="float64", target="cpu", training=True)


def test_calls_and_gradients_of_numpy(trained: Any):
    drawn, layer = drawn_of("masked"), None
    assert trained.manifest.inputs == ("scale", "m") and trained.manifest.own_input == I
    layer = trained.bind(drawn.weights)
    x, inputs = parts(drawn)
    y, last = layer(x, drawn.first, inputs=inputs)
    drawn.check_call(y, last, 1e-13)
    first, _ = layer(x.swapaxes(0, 1), drawn.first, inputs={n: v.swapaxes(0, 1) for n, v in inputs.items()},
                     batch_first=True)
    assert np.array_equal(first.swapaxes(0, 1), y) and np.array_equal(layer(drawn.x, drawn.first)[0], y)
    dx, *_ = drawn.gradients()
    _, _, kept = layer.forward(x, drawn.first, inputs=inputs)
    found = layer.backward(kept, drawn.dy)
    drawn.check_backward(found, 1e-12)
    for n, name in enumerate(drawn.cell.inputs):
        assert abs(found.inputs[name] - dx[..., I + n * H:I + (n + 1) * H]).max() < 1e-12


def test_one_value_for_all_units(trained: Any):
    drawn = drawn_of("masked")
    layer, (x, inputs) = trained.bind(drawn.weights), parts(drawn)
    shared = {"scale": inputs["scale"][..., 0], "m": inputs["m"][..., :1]}  # (T, B) and (T, B, 1)
    whole = {n: np.repeat(v.reshape(T, B, 1), H, axis=2) for n, v in shared.items()}
    results = []
    for given in (shared, whole):
        y, _, kept = layer.forward(x, inputs=given)
        results.append((y, layer.backward(kept, drawn.dy)))
    (y, found), (wanted, each) = results
    assert np.array_equal(y, wanted) and np.array_equal(found.x, each.x)
    for name, value in shared.items():
        assert found.inputs[name].shape == value.shape
        np.testing.assert_allclose(found.inputs[name].reshape(T, B), each.inputs[name].sum(-1), rtol=1e-12, atol=1e-13)


def test_what_is_no_input_is_refused(trained: Any):
    drawn = drawn_of("masked")
    layer, (x, inputs) = trained.bind(drawn.weights), parts(drawn)
    wrong: list[tuple[dict[str, Any], type[EcornnError], str]] = [
        ({}, ArgumentError, "arrays by name: scale, m, beside x of 5 values"),
        ({"inputs": {"m": inputs["m"]}}, ArgumentError, "expected arrays by name: scale, m"),
        ({"inputs": {**inputs, "m": inputs["m"][:, :, :3]}}, ShapeError, "a value for each hidden unit"),
        ({"inputs": {**inputs, "m": inputs["m"].astype("float32")}}, ArgumentError, "float64 on cpu, as x"),
        ({"inputs": {**inputs, "m": None}}, ArgumentError, "a NumPy array, as x is")]
    for options, kind, words in wrong:
        with pytest.raises(kind, match=words):
            layer(x, **options)
        with pytest.raises(kind, match=words):
            layer.forward(x, **options)
    plain = ecornn.compile("rnn_tanh", hidden=6, input=4, batch=B, target="cpu")
    bound = plain.bind({p.name: np.zeros(p.shape, np.float32) for p in plain.manifest.parameters})
    with pytest.raises(ArgumentError, match="the cell rnn_tanh has no inputs beside x"):
        bound(np.zeros((T, B, 4), np.float32), inputs={"m": np.zeros((T, B), np.float32)})
    with pytest.raises(ArgumentError, match="inputs beside x, which are of one layer"):
        ecornn.compile(CELLS["masked"], hidden=H, layers=2, target="cpu")


def test_a_layer_of_pytorch():
    """Gradients of the sequences, too; both directions read them."""
    drawn = drawn_of("masked")
    layer = Recurrent(CELLS["masked"], I, H, bidirectional=True, batch_first=True, dtype=torch.float64)
    x, inputs = parts(drawn)
    x = torch.from_numpy(x).transpose(0, 1).requires_grad_()
    m = torch.from_numpy(inputs["m"]).transpose(0, 1)[..., :1].requires_grad_()
    scale = torch.from_numpy(inputs["scale"]).transpose(0, 1).requires_grad_()
    y, h = layer(x, inputs={"scale": scale, "m": m})
    assert y.shape == (B, T, 2 * H) and h.shape == (2, B, H)

    def one(end: str, flip: Any) -> Any:
        W, R, b = (getattr(layer, f"{n}_l0{end}") for n in ("W", "R", "b"))
        state, found = torch.zeros(B, H, dtype=torch.float64), []
        for t in flip(range(T)):
            new = torch.tanh((x[:, t] @ W.T) * scale[:, t] + b + state @ R.T)
            state = m[:, t] * new + (1 - m[:, t]) * state
            found.append(state)
        return torch.stack(list(flip(found)), dim=1)

    wanted = torch.cat([one("", list), one("_reverse", lambda v: list(reversed(v)))], dim=-1)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    dy = torch.randn(y.shape, dtype=torch.float64)
    given = [x, scale, m, *layer.parameters()]
    for got, exact in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(wanted, given, dy), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)
    with pytest.raises(ArgumentError, match="tensors by name: scale, m"):
        layer(x)
    with pytest.raises(ShapeError, match="in place of the last"):
        layer(x, inputs={"scale": scale, "m": scale[..., :3]})


class Wrong(Cell):
    name, states, inputs = "wrong", ("h",), ("dt",)

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "R": (1, hidden, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, product(x, p["W"], 0)
        if self.multiplies:
            seen = product(pointwise(lambda b, j: p["dt"][b, j] * 2.0, h, "twice"), p["R"], 0)
            return [pointwise(lambda b, j: wx[b, j] + seen[b, j], h)]
        rh = product(h, p["R"], 0)
        return [pointwise(lambda b, j: wx[b, j] + rh[b, j], h)]

    multiplies = False


def test_cells_that_are_wrong_are_told_so():
    cell = Wrong()
    with pytest.raises(CellError, match=r"step\(\) does not read input 'dt'\n.*test_sequence_inputs"):
        analyse(cell, 10, 6)
    cell.multiplies = True
    with pytest.raises(CellError, match="depends on no state; only x itself can be hoisted"):
        analyse(cell, 10, 6)
    for inputs, words in ((("dt", "h"), "not all different"), ("dt", "expected a tuple of names"),
                          (("d t",), "the name of an input"), (("W",), "has the name of an input")):
        cell.inputs = inputs  # type: ignore[assignment]
        with pytest.raises(CellError, match=words):
            analyse(cell, 30, 6)
