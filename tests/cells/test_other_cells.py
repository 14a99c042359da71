"""Cells beside the built-in ones: every schedule, gradients, the reference; what is refused.

Limits of 1e-10 to 1e-13 are of float64 on both sides, whose sums are in different orders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated
import numpy as np
import pytest
import torch
from drawn_layers import Drawn
from emulated import check, check_numbers, known_by_name, training_program
from exact import ALL_CELLS
from msgspec import structs
from other_cells import INPUTS, MAXIMA, OUTPUTS
from step_cells import LATE, Formula, Given, normal, run_analysed
from test_backward_recurrence_emulated import check_recurrence
from test_persistent_emulated import SMALL, cut
from tvm import te

import ecornn
from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.digest import canonical
from ecornn.analysis.liveness import late_operands
from ecornn.build.cuda import lower
from ecornn.build.nvcc import compile_cubin
from ecornn.cells import largest, normalized, pointwise, product, softmax
from ecornn.cli.step_text import step_text
from ecornn.errors import CellError
from ecornn.interpreter import interpret
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.targets import KNOWN
from ecornn.workload import ALONE, SINGLE, Traversal, Workload

T, B, I, H = 6, 4, 5, 22
BOTH, COLUMNS = Traversal(True, 2, True, True), Traversal(sequences=True)
CELLS = INPUTS | OUTPUTS | MAXIMA | LATE
known = known_by_name(CELLS)


def task_of(cell: str, dtype: str, traversal: Traversal = ALONE, hidden: int = H) -> Task:
    sizes = (6, 5, 9, 22) if cell in LATE else (T, B, CELLS[cell].row_width(I, hidden), hidden)
    return emulated.task_of(cell, sizes, dtype, traversal=traversal)


def drawn_of(name: str, dtype: str = "float64") -> Drawn:
    if name in INPUTS:
        return Drawn(CELLS[name], (T, B, I, H), dtype, least=0, ends=False)
    return Drawn(CELLS[name], (T, B, I, H), dtype, scale=0.25 if name in OUTPUTS else 0.5)


@pytest.mark.parametrize(("cell", "schedule", "dtype", "traversal", "change"), [(*case, {}) for case in (
    ("masked", "fused_step", "float32", BOTH), ("timed_gru", "layout_transform", "bfloat16", ALONE),
    ("timed_gru", "persistent", "float32", BOTH), ("masked", "persistent", "float16", COLUMNS),
    ("masked", "persistent_wide", "bfloat16", ALONE), ("gap", "elementwise", "float32", BOTH),
    ("many", "fused_step", "float32", BOTH), ("many", "layout_transform", "bfloat16", ALONE),
    ("many", "persistent", "float32", BOTH), ("shown", "persistent", "float16", COLUMNS),
    ("shown", "persistent_wide", "bfloat16", BOTH), ("split", "elementwise", "float32", BOTH),
    ("peaks", "fused_step", "float32", BOTH), ("peaks", "layout_transform", "float16", ALONE),
    ("attending", "fused_step", "float32", BOTH), ("grouped", "fused_step", "float32", ALONE),
    ("grouped", "layout_transform", "float16", ALONE), ("chunks", "fused_step", "float32", ALONE),
    ("slots", "fused_step", "float32", ALONE), ("lru", "fused_step", "float32", BOTH),
    ("scrn", "fused_step", "float16", ALONE), ("lru", "persistent_wide", "bfloat16", BOTH),
    ("lru", "persistent_wide", "float16", COLUMNS), ("scrn", "persistent", "float16", COLUMNS),
    ("scrn", "persistent", "float32", ALONE))] + [  # two products that wait for each other
    ("lru", "layout_transform", "bfloat16", ALONE, {"hoisted": "same"}),
    ("scrn", "layout_transform", "float32", BOTH, {"hoisted": "float32"}),
    ("lru", "persistent", "bfloat16", BOTH, {"hoisted": "same"})], ids=str)
def test_results(tmp_path: Path, cell: str, schedule: str, dtype: str, traversal: Traversal, change: dict[str, Any]):
    task, found = task_of(cell, dtype, traversal), all_schedules()[schedule]
    assert found.serves(task) is None
    check_numbers(tmp_path, found, task, {**found.default(task), **change})


@pytest.mark.parametrize(("cell", "hidden", "dtype", "change", "traversal"), [
    ("peaks", 22, "float32", {"carrier": "l2", "units": 8}, BOTH),
    ("peaks", 40, "float16", {"carrier": "l2", "units": 32}, ALONE),
    ("peaks", 40, "bfloat16", {"carrier": "cluster", "units": 16}, COLUMNS),
    ("peaks", 22, "float32", {"carrier": "cluster", "units": 8}, BOTH),
    ("grouped", 22, "float32", {"carrier": "l2", "units": 8}, BOTH),
    ("grouped", 40, "float16", {"carrier": "cluster", "units": 16}, ALONE),
    ("chunks", 22, "float32", {"carrier": "cluster", "units": 8}, BOTH),
    ("lru", 22, "float32", {"carrier": "cluster", "units": 8}, BOTH)], ids=str)
def test_exchanged_between_blocks(tmp_path, cell, hidden, dtype, change, traversal):
    task = replace(task_of(cell, dtype, traversal, hidden), device=structs.replace(SMALL, cores=15))
    config = cut(task, fences="rare", **change)
    wanted = {"peaks": (3, 1, 1, 1), "grouped": (2, 2, 2, 2), "chunks": (1, 1, 2, 1)}
    assert cell == "lru" or Persistent().plan(task, config).sums == wanted[cell]
    check_numbers(tmp_path, all_schedules()["persistent"], task, config)


@pytest.mark.parametrize("name", [*INPUTS, *OUTPUTS, *MAXIMA])
def test_the_analysis_and_its_gradients(name: str):
    """Against differences of the formula, whatever is kept; what the tuner checks with against that, too."""
    drawn, rng, limit = drawn_of(name), np.random.default_rng(1), 1e-7 if name in MAXIMA else 1e-13
    drawn.check_call(*run_analysed(analyse(drawn.cell, drawn.width, H), drawn.x, drawn.parameters, drawn.first), limit)
    drawn.check_call(*interpret(drawn.cell, drawn.x, drawn.parameters, drawn.first), limit)
    for keep in ("gates", "states"):
        dx, parameters, _ = drawn.gradients(keep=keep)
        for where, gradient in {"x": dx, **parameters}.items():
            along = rng.standard_normal(gradient.shape)
            base = drawn.x if where == "x" else drawn.parameters[where]
            up, down = (drawn.loss(**{where: base + by * along}) for by in (1e-6, -1e-6))
            most = 1e-7 if where == "x" and name not in MAXIMA else 22e-6 * np.linalg.norm(gradient)
            assert abs((up - down) / 2e-6 - (gradient * along).sum()) < most, where


@pytest.mark.parametrize(("name", "limit", "of_gradients"), [
    ("peaks", 1e-7, 1e-9), ("grouped", 1e-7, 1e-9), ("chunks", 1e-7, 1e-9), ("read", 1e-13, 1e-12),
    ("scrn", 1e-12, 1e-10), pytest.param("lru", 1e-12, 1e-10, marks=pytest.mark.exhaustive)])
def test_a_training_step_on_this_cpu(name: str, limit: float, of_gradients: float):
    """Also of an output that is a product alone: its gradient multiplies before anything of the recurrence is known."""
    drawn = drawn_of(name)
    module = ecornn.compile(drawn.cell, hidden=H, input=I, batch=B, dtype="float64", target="cpu", training=True)
    layer = module.bind(drawn.weights, threads=2)
    y, last, kept = layer.forward(drawn.x, drawn.first)
    drawn.check_call(y, last, limit)
    drawn.check_backward(layer.backward(kept, drawn.dy, drawn.dlast), of_gradients)


@pytest.mark.parametrize(("name", "dtype", "keep"), [
    ("masked", "float32", "states"), ("timed_gru", "float32", "states"), ("gap", "bfloat16", "states"),
    ("many", "float32", "gates"), ("split", "bfloat16", "states"), ("read", "bfloat16", "states"),
    ("peaks", "float32", "states"), ("peaks", "bfloat16", "gates"), ("grouped", "float32", "gates"),
    pytest.param("chunks", "float32", "states", marks=pytest.mark.exhaustive)])
def test_a_training_step_of_a_gpu(tmp_path: Path, name: str, dtype: str, keep: str):
    """Gradients of sequences lie behind that of x. Where values have 16 bits another one may be the largest."""
    drawn = drawn_of(name, dtype)
    schedule = all_schedules()["elementwise" if name in ("gap", "split") else "persistent"]
    program = training_program(schedule, task_of(name, dtype, Traversal(keep=keep)))
    found, wanted = drawn.train(program, tmp_path), drawn.wanted()
    for made in (found, wanted):  # gradients of x and of each sequence by itself: they are of different size
        dx = made.pop("dx").reshape(drawn.x.shape)
        made |= {f"dx{n}": part for n, part in enumerate(np.split(dx, range(I, drawn.width, H), axis=2))}
    check(found, wanted, {"float32": 2e-5, "bfloat16": (16 if name in MAXIMA else 8) * 2.0 ** -8}[dtype])


def test_equal_values_share_the_gradient():
    def step(x: Any, h: Any, p: Any) -> Any:
        top = largest(h)
        return [pointwise(lambda b, j: h[b, j] * 0.5 + top[b] * x[b, j], h)]
    h = np.array([[2.0, -1.0, 2.0, 1.0], [-3.0, -3.0, -3.0, -3.0]])
    x, d = np.random.default_rng(0).normal(size=(1, 2, 4)), np.arange(8.0).reshape(2, 4)
    first = torch.tensor(h, requires_grad=True)
    (first * 0.5 + first.amax(dim=1, keepdim=True) * torch.tensor(x[0])).backward(torch.tensor(d))
    _, _, (found,) = backpropagate(adjoint(analyse(Given(step), 4, 4), 4), x, {}, [h], d[None], [np.zeros((2, 4))])
    np.testing.assert_allclose(found, first.grad.numpy(), rtol=1e-12)


def test_mean_and_variance_of_groups_are_one_exchange():
    for name, phase in ("grouped", 0), ("chunks", 1):
        graph = task_of(name, "float32").graph
        assert [s.squares is not None and s.units is not None for s in graph.phases[phase].statistics] == (
            [True, True] if name == "grouped" else [True])
        assert sum(s.squares is not None for s in graph.statistics) == (2 if name == "grouped" else 1)


def test_how_it_is_understood():
    task = task_of("attending", "float32")
    text = " ".join(step_text(task.graph, task.workload, SINGLE).split())
    assert "exchange 1: units find the largest of scores" in text and "exchange 2: units add up seen" not in text
    assert "exchange 2: units add up share_exp" in text and "= maximum over all units of scores" in text
    assert [len(p.statistics) for p in task.graph.phases] == [1, 1]
    assert [len(p.statistics) for p in adjoint(task.graph, H).recurrence.phases] == [1]
    assert "shift, maximum of scores" in canonical(task.graph)
    task = task_of("slots", "float32")
    text = " ".join(step_text(task.graph, task.workload, SINGLE).split())
    assert "scores_1 = sum over units 11 to 21 of scores.1 scores.2 = where(j < 11, scores_0, scores_1)" in text
    assert "vectors 0 none" in text


def smallest(x: Any, h: Any, p: Any) -> Any:
    rh, wx, k = product(h, p["R"]), product(x, p["W"], 0), te.reduce_axis((0, h.shape[1]), "k")
    least = te.compute((h.shape[0],), lambda b: te.min(wx[b, k] + rh[b, 0, k] + rh[b, 1, k], axis=k), name="least")
    return [pointwise(lambda b, j: least[b] + h[b, j], h)]


@pytest.mark.parametrize(("step", "says"), [
    (smallest, r"'least' is neither a sum over the hidden.*nor such a maximum\n.*test_other_cells"),
    (lambda x, h, p: [softmax(product(h, p["R"]))],
     r"softmax\(h_R\): expected a tensor \(B, H\), such as a product of one gate")])
def test_cells_that_are_wrong_are_told_so(step: Any, says: str):
    with pytest.raises(CellError, match=says):
        analyse(Given(step, lambda input, hidden: {"R": (2, hidden, hidden), "W": (1, hidden, input)}), 5, 6)


def of_four(h: Any, at: Any, count: int = 3, size: int = 4) -> Any:
    k = te.reduce_axis((0, size), "k")
    most = te.compute((h.shape[0], count), lambda b, g: te.max(h[b, g * size + k], axis=k), name="most")
    return pointwise(lambda b, j: h[b, j] - most[b, at(j)], h)


def beside(h: Any) -> Any:
    k = te.reduce_axis((0, 4), "k")
    return te.compute(h.shape, lambda b, j: te.max(h[b, j // 4 * 4 + k] - h[b, j], axis=k), name="apart")


@pytest.mark.parametrize(("step", "says"), [
    (lambda h: of_four(h, lambda j: j // 3), "'most' of groups of 4 units is read at [b, j // 3]; expected [b, j // 4"),
    (lambda h: of_four(h, lambda j: j), "most has 3 values per row; expected H = 12, since it is"),
    (lambda h: of_four(h, lambda j: 3), "is read at [b, 3]; expected [b, j // 4], or the number of a group"),
    (lambda h: of_four(h, lambda j: j // 4, 4, 3), "groups of 3 units is read at [b, j // 4]; expected [b, j // 3]"),
    (lambda h: of_four(h, lambda j: j // 5, 2, 5), "'most' is neither a product sum_k source[b, k] * "
     "weight[gate, j, k] nor a sum of groups"),
    (beside, "h[b, j // 4 * 4] outside a product must be read at [b, j]"),
    (lambda h: largest(h, groups=5), "h_largest: groups=5 must be an integer of which H = 12 is a multiple"),
    (lambda h: softmax(h, groups=0), "groups=0 must be an integer of which H = 12 is a multiple")])
def test_what_is_wrong_of_groups_is_said(step: Any, says: str):
    with pytest.raises(CellError) as caught:
        analyse(Given(lambda x, h, p: [step(h)]), 5, 12)
    assert says in str(caught.value) and caught.value.at is not None


def test_very_many_groups():
    many = Given(lambda x, h, p: [softmax(product(h, p["R"], 0), groups=int(h.shape[1]) // 2)],
                 lambda input, hidden: {"R": (1, hidden, hidden)}, name="many")
    with pytest.raises(CellError, match="has 65 groups; at most 64 are possible"):
        analyse(many, 5, 130)
    task = Task(Workload("many", 40, I, B, T), analyse(many, I, 40), structs.replace(SMALL, cores=15))
    found = all_schedules()["persistent"].check(task, cut(task, fences="rare", carrier="l2", units=8))
    assert found == "rows of 8 lanes are too short for 20 statistics at once"


@pytest.mark.parametrize(("cell", "schedule", "dtype", "traversal"), [
    ("lru", "persistent", "float32", Traversal(False, 1, True, True)), ("scrn", "persistent", "bfloat16", ALONE),
    ("lru", "persistent_wide", "bfloat16", Traversal(False, 1, True, True)),
    ("scrn", "layout_transform", "float32", Traversal(False, 1, True, True))], ids=str)
def test_adjoints_of_late_operands(tmp_path: Path, cell: str, schedule: str, dtype: str, traversal: Traversal):
    check_recurrence(tmp_path, all_schedules()[schedule], task_of(cell, dtype, traversal))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "scrn" else pytest.mark.exhaustive) for name in LATE])
def test_training_of_late_operands_compiles_for_a_gpu(name: str):
    entries = ecornn.compile(LATE[name], hidden=24, input=9, batch=3, target="sm_90a", training=True).manifest.entries
    assert {"run", "forward", "backward"} <= {*entries}


@pytest.mark.parametrize("schedule", ["persistent", "persistent_wide"])
def test_registers_suffice_for_late_operands(schedule: str):
    task = emulated.task_of("lru", (300, 64, 512, 1024), "bfloat16", KNOWN["sm_90a"], Traversal(lengths=True))
    found = all_schedules()[schedule]
    assert found.serves(task) is None
    kernels, source = lower(found.program(task, found.plan(task, found.default(task))), "sm_90a")
    used = compile_cubin(source, "sm_90a")[1][kernels[schedule].symbol]
    assert used["spill_stores"] == used["stack"] == 0


class Normalized(Formula):
    name, states, shapes = "normalized", ("h",), {"W": (1, "I"), "R": (1, "H")}

    def step(self, x, states, p):
        (h,), wx = states, normalized(product(x, p["W"], 0))
        mixed = product(pointwise(lambda b, j: h[b, j] * wx[b, j], h, "mixed"), p["R"], 0)
        return [pointwise(lambda b, j: mixed[b, j] + wx[b, j], h)]

    def numpy(self, x, h, W, R):
        (wx,) = normal(x @ W[0].T)
        return ((h * wx) @ R[0].T + wx,)


def test_who_cannot_take_late_operands_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ALL_CELLS, "normalized", Normalized())
    task, schedules = emulated.task_of("normalized", (6, 5, 9, 22), "float32"), all_schedules()
    assert [o.name for o in late_operands(task.graph)] == ["mixed__0"]
    assert "depends on statistics of x and on a state" in str(schedules["persistent"].serves(task))
    for name in ("fused_step", "layout_transform"):
        (tmp_path / name).mkdir()
        check_numbers(tmp_path / name, schedules[name], task, schedules[name].default(task))
    beside = schedules["persistent"]
    late = emulated.task_of("lru", (9, 4, 64, 256), "bfloat16", KNOWN["sm_90a"])
    config = {**beside.default(late), "carrier": "l2", "fences": "every", "groups": 1, "units": 8, "ahead": 50}
    assert beside.check(late, {**config, "ahead": 100}) is None
    assert "read the product with x" in str(beside.check(late, config))
