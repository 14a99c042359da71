"""Outputs that are no states, and sequences beside x: what follows the loop, gradients, what is refused.

Limits of 1e-10 to 1e-13 are of float64 on both sides, whose sums are in different orders."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
import torch
from drawn_layers import Drawn
from emulated import check_numbers
from msgspec import structs
from refusals import refused
from step_cells import Given
from test_other_cells import BOTH, CELLS, B, H, I, T, drawn_of, known, task_of  # noqa: F401

import ecornn
from ecornn.analysis import analyse
from ecornn.cells import pointwise, product
from ecornn.cli.cell_checks import RIGHT, Checks
from ecornn.cli.step_text import step_text
from ecornn.errors import ArgumentError, CellError, EcornnError, ShapeError
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.task import make_program, read_out_task
from ecornn.torch import Recurrent
from ecornn.tune.oracle import write
from ecornn.workload import ALONE, SINGLE, Traversal, Workload, by_output

pytestmark = pytest.mark.usefixtures("small_tiles")


@cache
def trained(name: str) -> Any:
    return ecornn.compile(CELLS[name], hidden=H, input=I, batch=B, dtype="float64", target="cpu", training=True)


class Loop:
    def __init__(self, schedule: Any, task: Task) -> None:
        self.schedule, self.task = schedule, task

    def check(self, _: Task, config: Any) -> str | None:
        return self.schedule.check(self.task, config)

    def plan(self, _: Task, config: Any) -> Any:
        return config

    def program(self, _: Task, plan: Any) -> Any:
        return make_program(self.schedule, self.task, plan)


@pytest.mark.parametrize(("cell", "schedule", "dtype", "traversal"), [
    ("read", "persistent", "float32", BOTH), ("read", "persistent_wide", "bfloat16", ALONE),
    ("read", "fused_step", "float32", Traversal(lengths=True)), ("mixed", "elementwise", "float32", BOTH),
    ("mixed", "elementwise", "float16", Traversal(resets=True)), ("many", "persistent", "bfloat16", BOTH),
    ("shown", "persistent", "float16", Traversal(sequences=True))], ids=str)
def test_what_only_outputs_need_follows_the_loop(tmp_path, cell, schedule, dtype, traversal):
    whole, found = task_of(cell, dtype, traversal), all_schedules()[schedule]
    task = read_out_task(whole)
    assert task.after is not None and found.serves(task) is None
    left, all_of_them = (sum(len(p.products) for p in t.graph.phases) for t in (task, whole))
    assert left == all_of_them - (1 + (cell == "mixed")) and len(task.graph.outputs) <= 4
    check_numbers(tmp_path, Loop(found, task), whole, found.default(task))  # type: ignore[arg-type]


def test_what_has_no_read_out():
    assert read_out_task(task_of("split", "float32")).after is None
    assert read_out_task(task_of("read", "float32", Traversal(keep="states"))).after is None
    task = task_of("read", "float32")
    rounded = replace(task, workload=structs.replace(task.workload, weights="bfloat16"))
    assert read_out_task(rounded) is rounded


@pytest.mark.parametrize(("cell", "batch", "options"), [
    ("mixed", 1, {"bidirectional": True, "lengths": True}), ("read", B, {"lengths": True}),
    ("many", 1, {"reverse": True})], ids=str)
def test_on_this_cpu_it_follows_the_steps_of_a_chunk(cell: str, batch: int, options: dict[str, bool]):
    drawn, steps = drawn_of(cell), 2 * T + 1
    module = ecornn.compile(drawn.cell, hidden=H, input=I, batch=batch, seq=2, dtype="float64", target="cpu", **options)
    assert module.manifest.config["chunk"] == 2 and any(b.name.endswith("left_0") for b in module.manifest.buffers)
    rng, both = np.random.default_rng(7), options.get("bidirectional", False)
    x, ends = rng.uniform(-1, 1, (steps, batch, I)), np.array([9, steps, 0, 5])[:batch]
    weights = {p.name: rng.uniform(-0.25, 0.25, p.shape) for p in module.manifest.parameters}
    masks = {"lengths": ends} if "lengths" in options else {}
    if options.get("reverse"):
        wanted, last = ecornn.reference(drawn.cell, x[::-1], weights)
        wanted = {n: v[::-1] for n, v in wanted.items()}
    else:
        wanted, last = ecornn.reference(drawn.cell, x, weights, **masks)
    y, after = module.bind(weights, threads=3)(x, **masks)
    pairs = [*zip(y.values(), wanted.values(), strict=True)] if isinstance(wanted, dict) else [(y, wanted)]
    assert module.manifest.y_width == (1 + both) * len(drawn.names) * H
    for got, exact in (*pairs, *zip(after, last, strict=True)):
        assert np.abs(got - exact).max() < 1e-7  # constants of a step are float32


def test_help_while_writing():
    drawn = drawn_of("many")
    y, last = ecornn.reference(drawn.cell, drawn.x, drawn.weights, drawn.first)
    assert [*y] == ["read", "h", "z", "seen"]
    drawn.check_call(y, last, 1e-13)
    plain, _ = ecornn.reference(CELLS["shown"], drawn.x, drawn_of("shown").weights)
    assert plain.shape == (T, B, H)
    masked = drawn_of("masked")
    masked.check_call(*ecornn.reference(masked.cell, masked.x, masked.weights, masked.first), 1e-13)
    for name, words in ("many", ["; y is read.2, new, z, seen"]), ("masked", ["I = 5 beside scale, m, H = 22",
                                                                            "of x and inputs:"]):
        task = task_of(name, "float32")
        text = " ".join(step_text(task.graph, task.workload, SINGLE).split())
        assert all(part in text for part in words) and Checks(CELLS[name], I, H, 2).derivative().result == RIGHT


def test_candidates_are_checked_with_what_a_cell_says(tmp_path: Path):
    cell, path = CELLS["gap"], tmp_path / "answers.npz"
    write(path, cell, Workload(cell.identity(), H, cell.row_width(I, H), B, T), seed=0)
    with np.load(path, allow_pickle=False) as found:
        x, h = found["x"].astype(np.float64), found["first_0"].astype(np.float64)
        parameters = {n: found[f"w:{n}_l0"].reshape(s).astype(np.float64) for n, s in cell.parameters(I, H).items()}
        assert x[..., I:].min() >= 0 > x[..., :I].min()
        assert abs(found["y"] - step_cells.run(cell, x, {"h": h}, parameters)[0]).max() < 1e-13


def test_calls_and_gradients_of_outputs():
    drawn, module = drawn_of("many"), trained("many")
    assert module.manifest.outputs == drawn.names and module.manifest.states == ("h", "c")
    layer = module.bind(drawn.weights)
    y, last = layer(drawn.x, drawn.first)
    assert [*y] == [*drawn.names]
    drawn.check_call(y, last, 1e-13)
    out = np.full_like(drawn.y, np.nan)
    assert layer(drawn.x, drawn.first, out=out)[0] is out and abs(out - drawn.y).max() < 1e-13
    turned, _ = layer(drawn.x.swapaxes(0, 1), drawn.first, batch_first=True)
    assert all(np.array_equal(turned[n].swapaxes(0, 1), y[n]) for n in y)
    parts = by_output(drawn.dy, drawn.names, 1)
    for dy in (parts, drawn.dy):
        again, _, kept = layer.forward(drawn.x, drawn.first)
        assert all(np.array_equal(again[n], y[n]) for n in y)
        drawn.check_backward(layer.backward(kept, dy, drawn.dlast), 1e-12)
    results = []
    for dy in ({"z": parts["z"]}, {n: v * (n == "z") for n, v in parts.items()}):
        results.append(layer.backward(layer.forward(drawn.x, drawn.first)[2], dy).x)
    assert np.array_equal(*results)


def test_what_is_no_output_is_refused():
    drawn = drawn_of("many")
    layer, part = trained("many").bind(drawn.weights), drawn.dy[..., :H]
    wrong: list[tuple[Any, type[EcornnError], str]] = [
        ({"c": part}, ArgumentError, "expected gradients of read, h, z, seen"),
        ({"z": drawn.dy}, ShapeError, r"dy\['z'\].shape"), (part, ShapeError, r"\(6, 4, 88\)"),
        ({"z": part.astype("float32")}, ArgumentError, "float64 on cpu, as x")]
    for dy, kind, words in wrong:
        with pytest.raises(kind, match=words):
            layer.backward(layer.forward(drawn.x)[2], dy)
    refused(ShapeError, r"\(6, 4, 88\): \(T, B, D\*O\*H\)", layer, drawn.x, out=np.empty((T, B, H)))
    with pytest.raises(ArgumentError, match=r"several outputs \(read, h, z, seen\), and only one"):
        ecornn.compile(CELLS["many"], hidden=H, layers=2, target="cpu")


def parts(drawn: Drawn) -> tuple[Any, dict[str, Any]]:
    beside = np.split(drawn.x[..., I:], len(drawn.cell.inputs), axis=-1)
    return drawn.x[..., :I], dict(zip(drawn.cell.inputs, beside, strict=True))


def test_calls_and_gradients_of_inputs():
    drawn, module = drawn_of("masked"), trained("masked")
    assert module.manifest.inputs == ("scale", "m") and module.manifest.own_input == I
    layer = module.bind(drawn.weights)
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


def test_one_value_for_all_units():
    drawn = drawn_of("masked")
    layer, (x, inputs) = trained("masked").bind(drawn.weights), parts(drawn)
    shared = {"scale": inputs["scale"][..., 0], "m": inputs["m"][..., :1]}  # (T, B) and (T, B, 1)
    whole, results = {n: np.repeat(v.reshape(T, B, 1), H, axis=2) for n, v in shared.items()}, []
    for given in (shared, whole):
        y, _, kept = layer.forward(x, inputs=given)
        results.append((y, layer.backward(kept, drawn.dy)))
    (y, found), (wanted, each) = results
    assert np.array_equal(y, wanted) and np.array_equal(found.x, each.x)
    for name, value in shared.items():
        assert found.inputs[name].shape == value.shape
        np.testing.assert_allclose(found.inputs[name].reshape(T, B), each.inputs[name].sum(-1), rtol=1e-12, atol=1e-13)


def test_what_is_no_input_is_refused():
    drawn = drawn_of("masked")
    layer, (x, inputs) = trained("masked").bind(drawn.weights), parts(drawn)
    wrong: list[tuple[dict[str, Any], type[EcornnError], str]] = [
        ({}, ArgumentError, "arrays by name: scale, m, beside x of 5 values"),
        ({"inputs": {"m": inputs["m"]}}, ArgumentError, "expected arrays by name: scale, m"),
        ({"inputs": {**inputs, "m": inputs["m"][:, :, :3]}}, ShapeError, "a value for each hidden unit"),
        ({"inputs": {**inputs, "m": inputs["m"].astype("float32")}}, ArgumentError, "float64 on cpu, as x"),
        ({"inputs": {**inputs, "m": None}}, ArgumentError, "a NumPy array, as x is")]
    for options, kind, words in wrong:
        refused(kind, words, layer, x, **options)
        refused(kind, words, layer.forward, x, **options)
    plain = ecornn.compile("rnn_tanh", hidden=6, input=4, batch=B, target="cpu")
    bound = plain.bind({p.name: np.zeros(p.shape, np.float32) for p in plain.manifest.parameters})
    with pytest.raises(ArgumentError, match="the cell rnn_tanh has no inputs beside x"):
        bound(np.zeros((T, B, 4), np.float32), inputs={"m": np.zeros((T, B), np.float32)})
    with pytest.raises(ArgumentError, match="inputs beside x, which only one layer can have"):
        ecornn.compile(CELLS["masked"], hidden=H, layers=2, target="cpu")


def test_a_layer_of_pytorch_with_outputs():
    layer = Recurrent(CELLS["split"], I, H, bidirectional=True, batch_first=True, dtype=torch.float64)
    x = torch.randn(B, T, I, dtype=torch.float64, requires_grad=True)
    y, h = layer(x)
    assert [*y] == ["low", "high"] and h.shape == (2, B, H)
    def one(end: str, flip: Any) -> tuple[Any, Any]:
        W, v = (getattr(layer, f"{n}_l0{end}") for n in ("W", "v"))
        state, low, high = torch.zeros(B, H, dtype=torch.float64), [], []
        for t in flip(range(T)):
            wx = x[:, t] @ W.T
            state = state + torch.sigmoid(v) * (wx - state)
            low.append(2 * state)
            high.append(wx - state)
        return tuple(torch.stack(list(flip(part)), dim=1) for part in (low, high))

    pairs = zip(one("", list), one("_reverse", lambda v: list(reversed(v))), strict=True)
    wanted = [torch.cat(pair, dim=-1) for pair in pairs]
    for got, exact in zip(y.values(), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    given, dy = [x, *layer.parameters()], torch.randn_like(wanted[1])
    for got, exact in zip(torch.autograd.grad(y["high"], given, dy), torch.autograd.grad(wanted[1], given, dy),
                          strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(layer(x)[0]["high"], y["high"])
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, [T] * B, batch_first=True)
        rows = torch.nn.utils.rnn.pad_packed_sequence(layer(packed)[0]["low"], batch_first=True)[0]
        torch.testing.assert_close(rows, y["low"], rtol=1e-12, atol=1e-12)


def test_a_layer_of_pytorch_with_inputs():
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
    dy, given = torch.randn(y.shape, dtype=torch.float64), [x, scale, m, *layer.parameters()]
    for got, exact in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(wanted, given, dy), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)
    refused(ArgumentError, "tensors by name: scale, m", layer, x)
    refused(ShapeError, "or with 1 as the last", layer, x, inputs={"scale": scale, "m": scale[..., :3]})


def wrong(*more: Any, **attributes: Any) -> Given:
    def step(x: Any, h: Any, p: Any) -> Any:
        wx, rh = product(x, p["W"], 0), product(h, p["R"], 0)
        return [pointwise(lambda b, j: wx[b, j] + rh[b, j], h), *(one(x, h, p) for one in more)]
    return Given(step, lambda input, hidden: {"W": (1, hidden, input), "R": (1, hidden, hidden)}, **attributes)


@pytest.mark.parametrize(("cell", "says"), [
    (wrong(output=("h", "r")), r"step\(\) returned 1 tensors for 1 states \('h',\) and 1 outputs \('r',\) after them"),
    (wrong(lambda x, h, p: product(x, p["W"]), output=("h", "r")),
     r"output 'r' has shape \(3, 1, 6\); expected \(B, H\), here \(3, 6\)\n.*test_outputs_and_inputs"),
    (wrong(lambda x, h, p: 1.0, output=("h", "r")), "output 'r' is not a tensor: 1.0"),
    (wrong(output=()), "expected a name, or a tuple of at least one name"),
    (wrong(output=("r", "r")), "not all different"), (wrong(output="a b"), "the name of an output has letters"),
    (wrong(output=("h", "x")), "output 'x' has the name of x"),
    (wrong(inputs=("dt",)), r"step\(\) does not read input 'dt'\n.*step_cells"),
    (wrong(lambda x, h, p: product(pointwise(lambda b, j: p["dt"][b, j] * 2.0, h, "twice"), p["R"], 0),
           inputs=("dt",), output=("h", "r")), "depends on no state; such a product can only read x itself"),
    (wrong(inputs=("dt", "h")), "not all different"), (wrong(inputs="dt"), "expected a tuple of names"),
    (wrong(inputs=("d t",)), "the name of an input"), (wrong(inputs=("W",)), "has the name of an input")])
def test_cells_that_are_wrong_are_told_so(cell: Given, says: str):
    refused(CellError, says, analyse, cell, 30, 6)


def test_a_cell_whose_output_is_no_state():
    with pytest.raises(CellError, match="not one of its states"):
        CELLS["shown"].output_state()
