"""Statistics of hidden units: how they are recognised, and what the schedules make of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import step_cells
from emulated import SHAPES, check_numbers, task_of
from exact import Wanted, expected, in_float64, of_stack
from step_cells import Formula, normal, run_analysed
from test_cpu_weights import needs_vnni
from tvm import te

import ecornn
from ecornn.analysis import StepGraph, analyse
from ecornn.cells import get, pointwise, product
from ecornn.interpreter import interpret
from ecornn.schedules import all_schedules
from ecornn.schedules.scalars.row_sums import parts_of
from ecornn.workload import ALONE, Traversal

pytestmark = pytest.mark.usefixtures("small_tiles")

CELLS = ("blend", "focus", "contrast")
MASKS = Traversal(lengths=True, resets=True)
REVERSE = Traversal(reverse=True, directions=2, lengths=True, resets=True)


def counts(graph: StepGraph) -> list[tuple[int, int]]:
    return [(len(p.products), len(p.statistics)) for p in graph.phases]


class Written(Formula):
    name, states, shapes = "written", ("h",), {"W": (1, "I"), "R": (1, "H")}

    def __init__(self, variance: Any) -> None:
        self.variance = variance

    def step(self, x, states, p):
        (h,), wx, rh = states, product(x, p["W"], 0), product(states[0], p["R"], 0)
        total, size = summed(rh, lambda b, k: rh[b, k]), int(h.shape[1])
        mean = te.compute(total.shape, lambda b: total[b] / te.const(size, "float32"))
        variance = self.variance(rh, mean, size)
        return [pointwise(lambda b, j: te.tanh((rh[b, j] - mean[b]) / te.sqrt(variance[b] + 1e-5) + wx[b, j]), h)]

    def numpy(self, x, h, W, R):
        return (np.tanh(normal(h @ R[0].T)[0] + x @ W[0].T),)


def summed(v: Any, value: Any) -> Any:
    k = te.reduce_axis((0, v.shape[1]), "k")
    return te.compute((v.shape[0],), lambda b: te.sum(value(b, k), axis=k), name="total")


def of_deviations(v: Any, mean: Any, size: int) -> Any:
    total = summed(v, lambda b, k: (v[b, k] - mean[b]) * (v[b, k] - mean[b]))
    return te.compute(total.shape, lambda b: total[b] * te.const(1.0 / size, "float32"))


def of_squares(v: Any, mean: Any, size: int) -> Any:
    total = summed(v, lambda b, k: v[b, k] * v[b, k])
    return te.compute(total.shape, lambda b: total[b] / te.const(size, "float32") - mean[b] * mean[b])


def of_magnitudes(v: Any, mean: Any, size: int) -> Any:
    total = summed(v, lambda b, k: te.power(te.abs(v[b, k] - mean[b]), 2.0))
    return te.compute(total.shape, lambda b: total[b] / te.const(size, "float32"))


@pytest.mark.parametrize(("variance", "phases"), [
    (of_deviations, [(1, 0), (0, 1)]), (of_squares, [(1, 0), (0, 2)]), (of_magnitudes, [(1, 0), (0, 1), (0, 1)])])
def test_ways_to_write_a_variance(variance: Any, phases: list[tuple[int, int]]):
    cell, generator = Written(variance), np.random.default_rng(0)
    graph = analyse(cell, 5, 7)
    assert counts(graph) == phases and (graph.statistics[0].squares is not None) == (variance is of_deviations)
    x, h = generator.uniform(-1, 1, (1, 3, 5)), generator.uniform(-1, 1, (3, 7))
    p = {n: generator.uniform(-1, 1, s) for n, s in graph.parameters.items()}
    y, _ = run_analysed(graph, x, p, [h])
    assert np.abs(y[0] - cell.numpy(x[0], h, **p)[0]).max() < 1e-6


def half_of_the_mean(v: Any, mean: Any, size: int) -> Any:
    return te.compute(mean.shape, lambda b: mean[b] * te.const(0.5, "float32"))


def half_of_the_sum(v: Any, mean: Any, size: int) -> Any:
    total = summed(v, lambda b, k: v[b, k])
    return te.compute(mean.shape, lambda b: total[b] * te.const(0.5 / size, "float32"), name="half")


@pytest.mark.parametrize("half", [half_of_the_mean, half_of_the_sum])
def test_deviations_from_what_is_no_mean_are_sums_of_their_own(half: Any):
    cell, rng = Written(lambda v, mean, size: of_deviations(v, half(v, mean, size), size)), np.random.default_rng(0)
    graph = analyse(cell, 7, 11)
    assert all(s.squares is None for s in graph.statistics) and len(graph.phases) == 3
    parameters = {n: rng.uniform(-0.3, 0.3, s) for n, s in graph.parameters.items()}
    x, h = rng.uniform(-1, 1, (4, 3, 7)), rng.uniform(-1, 1, (3, 11))
    np.testing.assert_allclose(run_analysed(graph, x, parameters, [h])[0], interpret(cell, x, parameters, [h])[0],
                               rtol=1e-6)  # 0.5 / H is float32's in both, and 1e-6 away from another mean's


@pytest.mark.parametrize(("cell", "hoisted", "phases", "parts"), [
    ("lstm(layer_norm)", 1, [(4, 0), (0, 1), (0, 1)], [0, (1, 2)]), ("gru(layer_norm)", 2, [(3, 0), (0, 2)], [0, (1,)]),
    ("gru_reset_before(layer_norm)", 2, [(2, 0), (0, 1), (1, 0), (0, 1)], [0, (1,), 2, (3,)]),
    ("blend", 1, [(1, 2), (1, 1), (0, 1)], [(0,), 0, (1,), 1, (2,)]), ("focus", 1, [], [0]),
    ("contrast", 0, [(0, 1)], [(0,)])])
def test_exchanges(cell: str, hoisted: int, phases: list[tuple[int, int]], parts: list[Any]):
    graph = task_of(cell, (1, 1, 5, 8), "float32").graph
    assert (len(graph.hoisted_statistics), counts(graph), parts_of(graph)) == (hoisted, phases, parts)
    assert all(s.squares is not None for s in graph.statistics if len(s.operands) > 1)


def test_what_serves_them():
    served = {c: {n for n, s in all_schedules().items() if s.serves(task_of(c, (9, 4, 16, 32), "float16")) is None}
              for c in ("blend", "focus", "contrast", "lstm(layer_norm)")}
    every = {"persistent", "layout_transform", "fused_step"}
    assert served == {"blend": every, "lstm(layer_norm)": every, "focus": {"scan", "elementwise", "fused_step"},
                      "contrast": {"fused_step"}}


@pytest.mark.parametrize(("schedule", "cell", "sizes", "dtype", "traversal"), [
    ("fused_step", "blend", SHAPES[1], "float16", MASKS), ("fused_step", "contrast", SHAPES[1], "float32", REVERSE),
    ("layout_transform", "blend", SHAPES[2], "float32", REVERSE),
    ("fused_step", "lstm(layer_norm)", (3, 2, 40, 1100), "float32", MASKS),  # more units than threads
    ("layout_transform", "lstm(layer_norm)", SHAPES[2], "float16", MASKS),
    ("layout_transform", "gru(layer_norm)", SHAPES[0], "bfloat16", MASKS),
    ("elementwise", "focus", SHAPES[2], "float32", REVERSE)], ids=str)
def test_masks(tmp_path, schedule, cell, sizes, dtype, traversal):
    task, chosen = task_of(cell, sizes, dtype, traversal=traversal), all_schedules()[schedule]
    check_numbers(tmp_path, chosen, task, chosen.default(task))


@pytest.mark.parametrize(("schedule", "cell", "dtype"), [
    ("layout_transform", "lstm(layer_norm)", "float16"), ("layout_transform", "gru(layer_norm)", "bfloat16"),
    ("elementwise", "focus", "bfloat16")])
def test_hoisted_values_in_16_bits(tmp_path: Path, schedule: str, cell: str, dtype: str):
    hidden, chosen = 45 if schedule == "layout_transform" else 46, all_schedules()[schedule]
    task = task_of(cell, (4, 5, 31, hidden), dtype)
    config = {**chosen.default(task), "hoisted": "same"}
    if "prefetch" in config:
        config["units"] = 2  # copies are of 4 bytes at least
    check_numbers(tmp_path, chosen, task, config, batch=4)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("cell", "hidden"), [*((c, 21) for c in CELLS), ("blend", 48)])
def test_stacks_on_this_cpu(cell: str, hidden: int, threads: int):
    T, B, I, generator = 7, 5, 6, np.random.default_rng(3)
    found = step_cells.CELLS[cell]
    module = ecornn.compile(found, hidden=hidden, input=I, batch=B, seq=T, layers=2, bidirectional=True, lengths=True,
                            resets=True, target="cpu")
    weights = {p.name: generator.uniform(-0.3, 0.3, p.shape).astype(np.float32) for p in module.manifest.parameters}
    x, lengths = generator.uniform(-1, 1, (T, B, I)).astype(np.float32), np.array([7, 1, 4, 0, 6])
    masks, zeros = {"lengths": lengths, "resets": generator.random((T, B)) < 0.3}, np.zeros((4, B, hidden))
    y, _ = module.bind(weights, threads=threads)(x, **masks)
    stack, states = module.manifest.stack, [zeros] * len(found.states)
    wanted, _ = of_stack(cell, stack, x, states, weights, masks, in_float64)
    assert np.linalg.norm(y - wanted) / np.linalg.norm(wanted) < 2e-6
    for b, n in enumerate(lengths):
        assert not y[n:, b].any()


@pytest.mark.parametrize("weights", ["bfloat16", pytest.param("int8", marks=needs_vnni)])
def test_rounded_weights_on_this_cpu(weights: str):
    T, B, H, generator, cell = 6, 3, 40, np.random.default_rng(5), get("lstm(layer_norm)")
    p = {n: generator.uniform(-0.5, 0.5, s).astype(np.float32) for n, s in cell.parameters(H, H).items()}
    x = generator.uniform(-1, 1, (T, B, H)).astype(np.float32)
    module = ecornn.compile(cell, hidden=H, batch=B, seq=T, target="cpu", weights=weights)
    y, _ = module.bind({f"{n}_l0": w.reshape(-1, *w.shape[2:]) for n, w in p.items()}, threads=2)(x)
    wanted, _ = interpret(cell, x, p, [np.zeros((B, H))] * 2)
    assert 1e-6 < np.linalg.norm(y - wanted) / np.linalg.norm(wanted) < {"bfloat16": 1e-2, "int8": 4e-2}[weights]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cell", ["lstm(layer_norm)", "gru(layer_norm)"])
def test_on_this_gpu(cell: str, dtype: str):
    import torch
    T, B, H, generator = 20, 9, 200, np.random.default_rng(7)
    found, kind = get(cell), getattr(torch, dtype)
    p = {n: torch.from_numpy(generator.uniform(-1, 1, s) * (H ** -0.5 if len(s) == 3 else 1)).to("cuda", kind)
         for n, s in found.parameters(H, H).items()}
    x = torch.from_numpy(generator.uniform(-1, 1, (T, B, H))).to("cuda", kind)
    layer = ecornn.compile(found, hidden=H, batch=B, seq=T, dtype=dtype).bind(
        {f"{n}_l0": w.reshape(-1, *w.shape[2:]) for n, w in p.items()})
    y, _ = layer(x)
    exact = {n: w.double().cpu().numpy() for n, w in p.items()}
    wanted = Wanted(dtype, lambda forward: expected(cell, ALONE, x.double().cpu().numpy(), {
        n: np.zeros((B, H)) for n in found.states}, exact, {}, forward))
    y = y.double().cpu().numpy()
    wanted.check(y)
    assert torch.equal(layer(x)[0].double().cpu(), torch.from_numpy(y))
