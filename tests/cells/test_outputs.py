"""Outputs that are no states, and several of them: every schedule, training, calls of NumPy and PyTorch; what is
refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_layers import Drawn
from emulated import TINY, check_numbers, known_by_name, training_program
from emulated_training import check
from msgspec import structs
from other_cells import OUTPUTS as CELLS
from step_cells import run_analysed

import ecornn
from ecornn.analysis import analyse
from ecornn.cells import Cell, pointwise, product
from ecornn.cli.cell_checks import RIGHT, Checks
from ecornn.cli.step_text import step_text
from ecornn.errors import ArgumentError, CellError, EcornnError, ShapeError
from ecornn.outputs import by_output
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.task import make_program, read_out_task
from ecornn.torch import Recurrent
from ecornn.workload import ALONE, SINGLE, Traversal, Workload

pytestmark = pytest.mark.usefixtures("small_tiles")

T, B, I, H = 6, 4, 5, 22
BOTH = Traversal(True, 2, True, True)
known = known_by_name(CELLS)


def drawn_of(name: str, dtype: str = "float64") -> Drawn:
    return Drawn(CELLS[name], (T, B, I, H), dtype)


def task_of(cell: str, dtype: str, traversal: Traversal = ALONE) -> Task:
    return Task(Workload(cell, H, I, B, T, dtype), analyse(CELLS[cell], I, H), TINY, traversal)


@pytest.mark.parametrize(("cell", "schedule", "dtype", "traversal"), [
    ("many", "fused_step", "float32", BOTH), ("many", "layout_transform", "bfloat16", ALONE),
    ("many", "persistent", "float32", BOTH), ("shown", "persistent", "float16", Traversal(sequences=True)),
    ("shown", "persistent_wide", "bfloat16", BOTH), ("split", "elementwise", "float32", BOTH)], ids=str)
def test_results(tmp_path: Path, cell: str, schedule: str, dtype: str, traversal: Traversal):
    task, found = task_of(cell, dtype, traversal), all_schedules()[schedule]
    assert found.serves(task) is None
    check_numbers(tmp_path, found, task, found.default(task))


class Loop:
    """A schedule of a layer of which it has the loop."""

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
def test_what_only_outputs_need_follows_the_loop(tmp_path: Path, cell: str, schedule: str, dtype: str,
                                                 traversal: Traversal):
    whole, found = task_of(cell, dtype, traversal), all_schedules()[schedule]
    task = read_out_task(whole)
    assert task.after is not None and found.serves(task) is None
    left, all_of_them = (sum(len(p.products) for p in t.graph.phases) for t in (task, whole))
    assert left == all_of_them - (1 + (cell == "mixed")) and len(task.graph.outputs) <= 4
    check_numbers(tmp_path, Loop(found, task), whole, found.default(task))  # type: ignore[arg-type]


def test_what_has_no_read_out():
    """A cell whose outputs need nothing more; layers that train, and rounded weights, have one loop."""
    assert read_out_task(task_of("split", "float32")).after is None
    assert read_out_task(task_of("read", "float32", Traversal(keep="states"))).after is None
    task = task_of("read", "float32")
    rounded = replace(task, workload=structs.replace(task.workload, weights="bfloat16"))
    assert read_out_task(rounded) is rounded


@pytest.mark.parametrize(("cell", "batch", "options"), [
    ("mixed", 1, {"bidirectional": True, "lengths": True}), ("read", B, {"lengths": True}),
    ("many", 1, {"reverse": True})], ids=str)
def test_on_this_cpu_it_follows_the_steps_of_a_chunk(cell: str, batch: int, options: dict[str, bool]):
    """Of more steps than a chunk has, by several threads."""
    drawn, steps = drawn_of(cell), 2 * T + 1
    module = ecornn.compile(drawn.cell, hidden=H, input=I, batch=batch, seq=2, dtype="float64", target="cpu", **options)
    assert module.manifest.config["chunk"] == 2
    assert any(b.name.endswith("left_0") for b in module.manifest.buffers)
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


@pytest.mark.parametrize("name", CELLS)
def test_the_analysis(name: str):
    """And the adjoint, against differences of the formula, whatever is kept."""
    drawn, rng = drawn_of(name), np.random.default_rng(1)
    drawn.check_call(*run_analysed(analyse(drawn.cell, I, H), drawn.x, drawn.parameters, drawn.first), 1e-13)
    along = rng.standard_normal(drawn.x.shape)
    up, down = (drawn.loss(x=drawn.x + by * along) for by in (1e-5, -1e-5))
    for keep in ("gates", "states"):
        dx, *_ = drawn.gradients(keep=keep)
        assert abs((up - down) / 2e-5 - (dx * along).sum()) < 1e-7


def test_help_while_writing():
    """The reference, the analysed step as text, and the check of a cell."""
    drawn = drawn_of("many")
    y, last = ecornn.reference(drawn.cell, drawn.x, drawn.weights, drawn.first)
    assert [*y] == ["read", "h", "z", "seen"] and len(last) == 2
    assert abs(np.concatenate([*y.values()], axis=2) - drawn.y).max() < 1e-13
    plain, _ = ecornn.reference(CELLS["shown"], drawn.x, drawn_of("shown").weights)
    assert plain.shape == (T, B, H)
    task = task_of("many", "float32")
    assert "; y is read.2, new, z, seen" in " ".join(step_text(task.graph, task.workload, SINGLE).split())
    assert Checks(drawn.cell, I, H, 2).derivative().result == RIGHT


@pytest.mark.parametrize(("cell", "dtype", "keep"), [
    ("many", "float32", "gates"), ("split", "bfloat16", "states"), ("read", "bfloat16", "states")])
def test_a_training_step_of_a_gpu(tmp_path: Path, cell: str, dtype: str, keep: str):
    """Emulated; rows of y and of its gradient have all outputs."""
    drawn, task = drawn_of(cell, dtype), task_of(cell, dtype, Traversal(keep=keep))
    schedule = all_schedules()["elementwise" if cell == "split" else "persistent"]
    found = drawn.train(training_program(schedule, task), tmp_path)
    check(found, drawn.wanted(), {"float32": 2e-5, "bfloat16": 8 * 2.0 ** -8}[dtype])


@pytest.fixture(scope="module")
def trained() -> Any:
    return ecornn.compile(CELLS["many"], hidden=H, input=I, batch=B, dtype="float64", target="cpu", training=True)


def test_calls_and_gradients_of_numpy(trained: Any):
    drawn = drawn_of("many")
    assert trained.manifest.outputs == drawn.names and trained.manifest.states == ("h", "c")
    layer = trained.bind(drawn.weights)
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


def test_an_output_that_is_a_product_alone():
    """Its gradient multiplies before anything of the recurrence is known."""
    module = ecornn.compile(CELLS["read"], hidden=H, input=I, batch=B, dtype="float64", target="cpu", training=True)
    drawn = drawn_of("read")
    layer = module.bind(drawn.weights)
    y, last, kept = layer.forward(drawn.x, drawn.first)
    drawn.check_call(y, last, 1e-13)
    drawn.check_backward(layer.backward(kept, drawn.dy, drawn.dlast), 1e-12)


def test_what_is_no_output_is_refused(trained: Any):
    drawn = drawn_of("many")
    layer, part = trained.bind(drawn.weights), drawn.dy[..., :H]
    wrong: list[tuple[Any, type[EcornnError], str]] = [
        ({"c": part}, ArgumentError, "expected gradients of read, h, z, seen"),
        ({"z": drawn.dy}, ShapeError, r"dy\['z'\].shape"), (part, ShapeError, r"\(6, 4, 88\)"),
        ({"z": part.astype("float32")}, ArgumentError, "float64 on cpu, as x")]
    for dy, kind, words in wrong:
        with pytest.raises(kind, match=words):
            layer.backward(layer.forward(drawn.x)[2], dy)
    with pytest.raises(ShapeError, match=r"\(6, 4, 88\): \(T, B, D\*O\*H\)"):
        layer(drawn.x, out=np.empty((T, B, H)))
    with pytest.raises(ArgumentError, match="outputs read, h, z, seen, of which nobody can say what the next layer"):
        ecornn.compile(CELLS["many"], hidden=H, layers=2, target="cpu")


def test_a_layer_of_pytorch():
    """Both directions, with gradients by autograd; packed sequences; a call like an earlier one."""
    cell = CELLS["split"]
    layer = Recurrent(cell, I, H, bidirectional=True, batch_first=True, dtype=torch.float64)
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


class Wrong(Cell):
    name, states, output, count = "wrong", ("h",), ("h", "r"), 2

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"W": (1, hidden, input), "R": (1, hidden, hidden)}

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, product(x, p["W"])
        rh = product(h, p["R"], 0)
        new = pointwise(lambda b, j: wx[b, 0, j] + rh[b, j], h)
        return [new, {2: wx, 3: 1.0}.get(self.count, new)][:self.count or 1]


def test_cells_that_are_wrong_are_told_so():
    cell = Wrong()
    for cell.count, words in (
            (0, r"step\(\) returned 1 tensors for 1 states \('h',\) and 1 outputs \('r',\) behind them"),
            (2, r"output 'r' has shape \(3, 1, 6\); expected \(B, H\), here \(3, 6\)\n.*test_outputs"),
            (3, "output 'r' is no tensor: 1.0")):
        with pytest.raises(CellError, match=words):
            analyse(cell, 5, 6)
    for output, words in (((), "expected a name, or a tuple of at least one name"), (("r", "r"), "not all different"),
                          ("a b", "the name of an output has letters"), (("h", "x"), "output 'x' has the name of x")):
        cell.output = output  # type: ignore[assignment]
        with pytest.raises(CellError, match=words):
            analyse(cell, 5, 6)
    with pytest.raises(CellError, match="not one of its states"):
        CELLS["shown"].output_state()
