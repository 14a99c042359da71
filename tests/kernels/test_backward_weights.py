"""Gradients of matrices, sums of outer products over all rows, and of biases from what a recurrence leaves, emulated,
against float64."""

from __future__ import annotations

import numpy as np
import pytest
from backward_passes import Passes, draw, laid, recur
from cuda_on_cpu import DTYPES, Emulated, Fault
from emulated import TINY, task_of
from msgspec.structs import replace
from test_backward_recurrence_emulated import SMALL, memory_for
from without_spills import needs_ptxas, resources_without_spills

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.evaluate import start
from ecornn.analysis.kept import kept
from ecornn.build.cuda import lower
from ecornn.program import WORKSPACE, Buffer, Extent, Program
from ecornn.schedules.backward.assemble import recurrence_task
from ecornn.schedules.backward.memory import Memory, Place
from ecornn.schedules.backward.weights import step_sums, vector_gradients, weight_gradients
from ecornn.schedules.base import joined
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.keeping import written
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.workload import ALONE, Traversal

# how far from float64, relative to the largest gradient: sums of products of exact 16-bit numbers are float32
LIMITS = {"float32": 1e-6, "bfloat16": 2e-6, "float16": 2e-6, "tf32": 1e-3}
LENGTHS = Traversal(lengths=True)


@pytest.mark.parametrize(("cell", "sizes", "dtype", "traversal", "parts"), [
    ("lstm", (1, 1, 1, 1), "bfloat16", ALONE, 1),  # the smallest of everything
    ("lstm", (20, 11, 40, 24), "bfloat16", ALONE, 1),  # on wgmma from here on: more stages than the ring has
    ("rnn_tanh", (13, 16, 72, 264), "float16", LENGTHS, 3),  # several tiles both ways, the last part without a stage
    ("gru", (5, 13, 10, 36), "bfloat16", LENGTHS, 1),  # copies of 4 and 8 bytes
    ("lstm", (9, 9, 17, 5), "float16", ALONE, 2),  # nothing aligned, rows that are not of whole stages
    ("lstm", (13, 11, 40, 136), "bfloat16", ALONE, 3),  # several tiles both ways, more rows than one part has stages
    ("lstm", (13, 11, 34, 18), "bfloat16", LENGTHS, 1),  # 4-byte copies; x beyond a length is NaN
    ("gru", (12, 8, 3, 36), "float32", LENGTHS, 2),  # gates in two runs of values
    ("gru", (3, 5, 6, 12), "tf32", ALONE, 1),
    ("rnn_tanh", (17, 3, 5, 17), "float32", ALONE, 2),
    ("rnn_tanh", (5, 3, 68, 130), "float32", ALONE, 1),
])
def test_matches_float64(tmp_path, monkeypatch, cell, sizes, dtype, traversal, parts):
    steps, batch, inputs, H = sizes
    for module in ("outer", "outer_wgmma"):
        monkeypatch.setattr(f"ecornn.schedules.gemm.{module}.best_parts", lambda *_: parts)
    task = task_of(cell, sizes, dtype, replace(TINY, cores=24), traversal)
    back = adjoint(task.graph, H)
    memory = Memory(task, back, kept(back, "states"))
    places = memory.leaves() | memory.outputs()
    kind, count = task.workload.dtype, len(memory.outputs())
    generator = np.random.default_rng(5)
    values = {"x": generator.normal(size=(steps, batch, inputs)), "before_h": generator.normal(size=(steps, batch, H)),
              "outputs": generator.normal(size=(steps, batch, count, H))}
    values = {n: v.astype(DTYPES[kind]) for n, v in values.items()}
    exact = {n: v.astype(np.float64) for n, v in values.items()}
    masks = {}
    if traversal.lengths:
        masks["lengths"] = np.arange(batch, dtype=np.int32) * 7 % (steps + 3)  # beyond T, too
        for b, n in enumerate(masks["lengths"]):
            values["x"][n:, b], exact["x"][n:, b] = np.nan, 0
            for name in ("outputs", "before_h"):
                values[name][n:, b] = exact[name][n:, b] = 0
    values["before_h"] = filled_up(values["before_h"], memory)
    if dtype == "tf32":  # raised, as recurrences leave them
        values["outputs"] = (values["outputs"].view(np.uint32) + np.uint32(0x1000)).view(np.float32)
    given = {n: (v.shape, kind) for n, v in values.items()} | {n: (v.shape, "int32") for n, v in masks.items()}
    given |= {f"d_{n}": (s, "float32") for n, s in task.graph.parameters.items() if len(s) == 3}
    where = {v: o for o, v in enumerate(memory.outputs())}
    wanted = {n: np.zeros(s) for n, s in task.graph.parameters.items() if len(s) == 3}
    for o in (*back.recurrence.outer_products, *back.inputs.outer_products):
        operand = exact["x"] if o.operand is None else exact["before_h"]
        wanted[o.parameter][o.gate] += np.einsum("tbj,tbk->jk", exact["outputs"][:, :, where[o.value]], operand)
    start = {f"d_{n}": generator.normal(size=w.shape).astype(np.float32) for n, w in wanted.items()}
    passes = Passes(weight_gradients(memory, places, add=True), tmp_path, given)
    for add in (False, True):  # written where there is NaN, or added to what is there
        found = passes.run(steps, batch, values | masks | (start if add else {}), add=add)
        for name, exactly in wanted.items():
            result = found[f"d_{name}"] - (start[f"d_{name}"].astype(np.float64) if add else 0)
            assert np.abs(result - exactly).max() <= LIMITS[dtype] * max(1.0, np.abs(exactly).max()), (name, add)


def filled_up(values, memory):
    """States before each step as they lie in memory, with NaN where nobody reads."""
    missing = memory.before("h").stride - values.shape[-1]
    return np.pad(values, [(0, 0), (0, 0), (0, missing)], constant_values=np.nan)


def test_a_gate_that_nobody_uses_has_no_gradient(tmp_path):
    task = task_of("highway", (3, 2, 5, 5), "float32")
    back = adjoint(task.graph, 5)
    memory = Memory(task, back, kept(back, "states"))
    places = memory.leaves() | {v: Place(Columns("outputs", 5, 5 * len(memory.outputs()), 5 * o), "float32")
                                for o, v in enumerate(memory.outputs())}
    unused = {n: (g + 1, *s) for n, (g, *s) in task.graph.parameters.items()}
    object.__setattr__(task.graph, "parameters", unused)
    given = {n: (s, "float32") for n, s in (("x", (3, 2, 5)), ("outputs", (3, 2, len(memory.outputs()), 5)))}
    given |= {f"d_{n}": (s, "float32") for n, s in unused.items() if len(s) == 3}
    values = {n: np.ones(s) for n, (s, _) in given.items() if not n.startswith("d_")}
    passes = Passes(weight_gradients(memory, places, add=True), tmp_path, given)
    for there in (0, 2):
        start = {n: np.full(s, there) for n, (s, _) in given.items() if n.startswith("d_")} if there else {}
        found = passes.run(3, 2, values | start, add=bool(there))
        for name in given:
            if name.startswith("d_"):
                assert (found[name][:-1] == 6 + there).all() and (found[name][-1] == there).all()


def small(dtype, sizes, cores=2):
    """A vanilla layer's memory, drawn, its weight gradients in float64, and the passes' calls."""
    task = task_of("rnn_tanh", sizes, dtype, replace(TINY, cores=cores))
    back = adjoint(task.graph, sizes[3])
    memory = Memory(task, back, kept(back, "states"))
    steps, batch, inputs, H = sizes
    generator = np.random.default_rng(6)
    values = {n: generator.normal(size=(steps, batch, width)).astype(DTYPES[dtype])
              for n, width in (("x", inputs), ("before_h", H), ("outputs", H))}
    exact = {n: v.reshape(steps * batch, -1).astype(np.float64) for n, v in values.items()}
    wanted = {"d_weight_ih": exact["outputs"].T @ exact["x"], "d_weight_hh": exact["outputs"].T @ exact["before_h"]}
    values["before_h"] = filled_up(values["before_h"], memory)
    given = {n: (v.shape, dtype) for n, v in values.items()} | {n: (v.shape, "float32") for n, v in wanted.items()}
    return values, wanted, given, weight_gradients(memory, memory.leaves() | memory.outputs())


@pytest.mark.parametrize(("dtype", "sizes"), [("bfloat16", (40, 12, 24, 72)), ("float32", (20, 9, 12, 36)),
                                              ("float16", (20, 12, 9, 17))])
def test_copies_at_once(tmp_path, dtype, sizes):
    """Copies that come before a stage is free, and products that read theirs late."""
    values, wanted, given, part = small(dtype, sizes)
    found = Passes(part, tmp_path, given, lazy=False).run(*sizes[:2], values)
    for name, exactly in wanted.items():
        assert np.abs(found[name] - exactly).max() <= LIMITS[dtype] * np.abs(exactly).max(), name


@pytest.mark.parametrize("dropped", [False, True])
def test_the_fence_between_copies_and_products(tmp_path, dropped):
    """cp.async writes by another proxy than wgmma reads."""
    values, wanted, given, part = small("bfloat16", (8, 9, 8, 16))
    fence = "tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta();"

    def change(text: str) -> str:
        assert text.count(fence) == 2  # of either kernel
        return text.replace(fence, "") if dropped else text

    passes = Passes(part, tmp_path, given, ordered=True, change=change)
    try:
        found = passes.run(8, 9, values, twice=False)
    except Fault:
        assert dropped
        return
    right = all(np.abs(found[n] - v).max() <= LIMITS["bfloat16"] * np.abs(v).max() for n, v in wanted.items())
    assert right != dropped


@needs_ptxas
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 800), ("bfloat16", 803), ("float32", 800)])
def test_compiles_without_spills(dtype, width):
    """The layout of an LSTM with 800 units."""
    task = task_of("lstm", (300, 20, width, width), dtype, KNOWN["sm_90a"])
    back = adjoint(task.graph, width)
    memory = Memory(task, back, kept(back, "states"))
    part = weight_gradients(memory, memory.leaves() | memory.outputs(), add=True)
    names = ("x", "before_h", "outputs", "d_weight_ih", "d_weight_hh")
    others = tuple(Buffer(n, WORKSPACE, dtype if n[:2] != "d_" else "float32", Extent(1)) for n in names)
    source = lower(Program.running(dict(part.functions), (*part.buffers, *others), part.calls), "sm_90a")[1]
    assert ("wgmma" in source) == (width % 2 == 0 and dtype == "bfloat16")
    assert resources_without_spills(source)


@pytest.mark.parametrize("schedule", [Persistent(), pytest.param(LayoutTransform(), marks=pytest.mark.exhaustive)],
                         ids=["persistent", "step"])
def test_sums_are_of_values_before_tf32_rounds_them(tmp_path, schedule):
    """One step from zeros: all products are zero, so that what is summed is exact but for float32."""
    sizes = T, B, _, H = 1, 9, 5, 24
    layer = task_of("gru", sizes, "tf32", SMALL, Traversal(lengths=True))
    back = adjoint(layer.graph, H)
    task = recurrence_task(layer, back)
    config = schedule.default(task)
    layout, masks = hoisted_of(task, str(config.get("hoisted", "float32"))), {"lengths": np.int32(np.arange(B) % 3 > 0)}
    sample = draw(task, back, layout)
    sample = type(sample)(sample.weights, sample.hoisted, {n: 0 * v for n, v in sample.first.items()})
    program = schedule.program(task, schedule.plan(task, config))
    memory = memory_for(program, sample.weights, sample.first, masks, T)
    values = laid(layout, sample.hoisted)
    memory["hoisted"][:values.size] = values
    (tmp_path / "recurrence").mkdir()
    Emulated(program, tmp_path / "recurrence").carry_out(memory, T, B)
    exact, _ = recur(task, sample, masks)
    totals = {s.var: exact[:, :, written(back).index(s.value)].sum((0, 1))
              for s in (*back.recurrence.sums, *back.inputs.sums)}
    once = totals | start(back.once, sample.weights, totals)
    wanted = {n: np.zeros(p.shape) for n, p in sample.weights.items() if p.ndim == 2}
    for vector in back.vectors:
        wanted[vector.parameter][vector.gate] += once[vector.var]
    passes = Memory(layer, back, kept(back, "gates"))
    given = {"outputs": (exact.shape, "float32"), "vectors": ((len(layer.graph.vectors), H), "float32"),
             **{f"d_{n}": (v.shape, "float32") for n, v in wanted.items()}}
    (tmp_path / "sums").mkdir()
    found = Passes(joined(step_sums(passes), vector_gradients(passes)), tmp_path / "sums", given).run(
        T, B, {"outputs": memory["outputs"][:exact.size].reshape(exact.shape)})
    for name, exactly in wanted.items():
        assert exactly.any() and np.abs(found[f"d_{name}"] - exactly).max() <= 1e-6 * np.abs(exactly).max(), name
