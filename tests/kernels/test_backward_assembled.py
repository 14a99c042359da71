"""Beside the recurrence of a backward pass, emulated, against the adjoint in float64: gradients of matrices, replay."""

from dataclasses import replace as changed

import numpy as np
import pytest
import step_cells
from backward_passes import Passes, recur
from backward_passes import draw as draw_recurrence
from cuda_on_cpu import DTYPES, Fault
from emulated import TINY, masks_of, task_of
from exact import unmarked
from msgspec.structs import replace
from test_backward_recurrence_emulated import SMALL, carried_out

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import hoist, start, step
from ecornn.analysis.kept import kept
from ecornn.program import LATER
from ecornn.schedules.backward.assemble import recurrence_task, replay, state_gradients
from ecornn.schedules.backward.memory import Memory, Place, gathered, materialized, replayed
from ecornn.schedules.backward.passes import input_gradients, places_of_inputs
from ecornn.schedules.backward.weights import step_sums, vector_gradients, weight_gradients
from ecornn.schedules.base import joined
from ecornn.schedules.gemm.job import Columns
from ecornn.schedules.hoisted import Hoisted, hoisted_of
from ecornn.schedules.keeping import written
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.workload import ALONE, Traversal

ROUNDED = {"float32": 0.0, "tf32": 0.0, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}
SUMS = {"float32": 3e-6, "tf32": 3e-3, "float16": 3e-6, "bfloat16": 3e-6}
# how far from float64, relative to the largest gradient: sums of products of exact 16-bit numbers are float32
WEIGHTS = {"float32": 1e-6, "bfloat16": 2e-6, "float16": 2e-6, "tf32": 1e-3}
LENGTHS = Traversal(lengths=True)


def memory_of(cell, sizes, dtype, traversal=ALONE, device=TINY):
    task = task_of(cell, sizes, dtype, device, traversal)
    back = adjoint(task.graph, sizes[3])
    return Memory(task, back, kept(back, "states"))


def gradients_of(memory, values, parameters):
    back, w = memory.adjoint, memory.task.workload
    shape = (*values["x"].shape[:2], w.hidden)
    read = memory.leaves() | memory.outputs() | replayed(memory)
    known = {v: values[p.columns.name].reshape(*shape[:2], -1)[..., p.columns.offset:][..., :p.columns.width]
             for v, p in read.items()}
    found = {f"d_{n}": np.zeros(p.shape) for n, p in parameters.items()}
    made = start(back.inputs, parameters, known)
    hoist(back.inputs, parameters, made, None, shape)
    step(back.inputs, parameters, made, shape)
    found["dx"] = np.zeros(values["x"].shape) if back.dx is None else made[back.dx]
    for o in (*back.recurrence.outer_products, *back.inputs.outer_products):
        value, operand = (values["x"] if v is None else np.broadcast_to(made[v], shape) for v in (o.value, o.operand))
        found[f"d_{o.parameter}"][o.gate] += np.einsum("tbj,tbk->jk", value, operand)
    last = {v: values[p.columns.name] for v, p in memory.last().items()}
    ended = start(back.finish, parameters, last)
    step(back.finish, parameters, ended, shape[1:])
    found |= {f"d_{n}_in": np.broadcast_to(ended[v], shape[1:]) for n, v in back.gradients.items()}
    totals: dict = {}
    for graph, of in ((back.recurrence, made), (back.inputs, made), (back.finish, ended)):
        for s in graph.sums:
            every = np.broadcast_to(of[s.value], shape if graph is not back.finish else shape[1:])
            totals[s.var] = totals.get(s.var, 0) + every.reshape(-1, w.hidden).sum(0)
    once = start(back.once, parameters, totals)
    for vector in back.vectors:
        found[f"d_{vector.parameter}"][vector.gate] += once[vector.var]
    return found


# add: to the gradient of x, and to those of parameters; parts: of the products for these, whose kernel is told then
@pytest.mark.parametrize(("cell", "sizes", "dtype", "traversal", "add", "parts"), [
    ("lstm", (5, 3, 8, 32), "bfloat16", ALONE, True, None),  # all gates are one operand, on wgmma
    # an operand for each gate; more rows than a block sums at once
    pytest.param("lstm", (40, 5, 9, 17), "float32", ALONE, False, None, marks=pytest.mark.exhaustive),
    ("lstm(peepholes)", (3, 4, 6, 10), "tf32", ALONE, False, None),
    ("gru", (5, 7, 5, 12), "bfloat16", LENGTHS, True, None),
    ("rnn_tanh", (4, 3, 3, 24), "float16", ALONE, False, None),
    ("indrnn", (4, 3, 5, 12), "float32", ALONE, False, None),
    ("leaky", (4, 3, 10, 10), "float32", LENGTHS, True, None),  # from here on: more than one kernel for dx
    pytest.param("average", (3, 2, 6, 6), "float16", ALONE, False, None, marks=pytest.mark.exhaustive),
    ("decay", (3, 2, 3, 6), "float32", ALONE, False, None),  # x is not read
    ("echo", (3, 2, 6, 6), "float32", ALONE, True, None),
    ("pair", (3, 4, 5, 12), "float32", ALONE, False, None),  # a part of a sum comes from the end
    ("lstm(layer_norm)", (3, 3, 5, 12), "float32", LENGTHS, False, None),
    pytest.param("gru_reset_before", (3, 3, 5, 18), "bfloat16", ALONE, False, None, marks=pytest.mark.exhaustive),
    ("lstm", (1, 1, 1, 1), "bfloat16", ALONE, False, 1),  # the smallest of everything
    ("lstm", (20, 11, 40, 24), "bfloat16", ALONE, False, 1),  # on wgmma from here on: more stages than the ring has
    ("rnn_tanh", (13, 16, 72, 264), "float16", LENGTHS, False, 3),  # several tiles both ways, a part without a stage
    ("gru", (5, 13, 10, 36), "bfloat16", LENGTHS, False, 1),  # copies of 4 and 8 bytes
    ("lstm", (9, 9, 17, 5), "float16", ALONE, False, 2),  # nothing aligned, rows that are not of whole stages
    ("lstm", (13, 11, 40, 136), "bfloat16", ALONE, False, 3),  # several tiles both ways, more rows than a part's stages
    ("lstm", (13, 11, 34, 18), "bfloat16", LENGTHS, False, 1),  # 4-byte copies
    ("gru", (12, 8, 3, 36), "float32", LENGTHS, False, 2),  # gates in two runs of values
    ("gru", (3, 5, 6, 12), "tf32", ALONE, False, 1),
    ("rnn_tanh", (17, 3, 5, 17), "float32", ALONE, False, 2),
    ("rnn_tanh", (5, 3, 68, 130), "float32", ALONE, False, 1),
], ids=str)
def test_what_follows_the_recurrence(tmp_path, monkeypatch, cell, sizes, dtype, traversal, add, parts):
    """x beyond a length is NaN, and so are gradients before they are written."""
    if parts:
        for module in ("outer", "outer_wgmma"):
            monkeypatch.setattr(f"ecornn.schedules.gemm.{module}.best_parts", lambda *_: parts)
    memory = memory_of(cell, sizes, dtype, traversal, replace(TINY, cores=24) if parts else TINY)
    w, kind, generator = memory.task.workload, DTYPES[memory.task.workload.dtype], np.random.default_rng(2)
    values, parameters, vectors = draw(memory.task, memory)
    rows = (w.seq, w.batch)
    values["outputs"] = generator.uniform(-1, 1, (*rows, len(written(memory.adjoint)), w.hidden)).astype(kind)
    for space in materialized(memory):
        drawn = generator.uniform(-1, 1, (*rows, len(space.variables), w.hidden))
        values[space.name] = drawn.astype(DTYPES[space.dtype])
    values |= {p.columns.name: generator.uniform(-1, 1, (w.batch, w.hidden)).astype(kind)
               for p in memory.last().values()}
    exact, masks = {n: v.astype(np.float64) for n, v in values.items()}, {}
    if traversal.lengths:
        masks["lengths"] = np.arange(w.batch, dtype=np.int32) * 7 % (w.seq + 3)  # beyond T, too
        for b, n in enumerate(masks["lengths"]):
            for name in set(values) - {p.columns.name for p in memory.last().values()}:  # what may hold anything there
                zero = name == "outputs" or (parts and name == "before_h")
                values[name][n:, b], exact[name][n:, b] = (0 if zero else np.nan), 0
    weights = {n: p.astype(np.float64) for n, p in parameters.items()}
    wanted = gradients_of(memory, exact, weights)
    if traversal.lengths:
        for b, n in enumerate(masks["lengths"]):
            assert cell == "leaky" or not wanted["dx"][n:, b].any()
            wanted["dx"][n:, b] = 0
    given = {n: (v.shape, str(v.dtype)) for n, v in values.items() if v.size}
    given |= {"vectors": (vectors.shape, "float32")} | {n: (v.shape, "int32") for n, v in masks.items()}
    given |= {n: (v.shape, "float32" if n[2:] in parameters else w.dtype) for n, v in wanted.items()}
    there = {n: generator.uniform(-1, 1, v.shape).astype(np.float32 if n[2:] in parameters else kind)
             for n, v in wanted.items()}
    factors = memory.leaves() | memory.outputs() | replayed(memory) | places_of_inputs(memory)
    part = joined(input_gradients(memory, add), *weight_gradients(memory, factors, add or bool(parts)),
                  *step_sums(memory), state_gradients(memory), vector_gradients(memory, add or bool(parts)))
    if dtype == "tf32":
        values["outputs"] = (values["outputs"].view(np.uint32) + np.uint32(0x1000)).view(np.float32)
    passes = Passes(part, tmp_path, given)
    for adding in (False, True) if parts else (add,):
        found = passes.run(*rows, values | {"vectors": vectors} | masks | (there if adding else {}), parameters,
                           add=adding)
        for name, exactly in wanted.items():
            own = name[2:] in parameters
            if (adding if own else add) and not name.endswith("_in"):
                exactly = exactly + there[name].astype(np.float64)
            sums = SUMS["float32" if exactly.ndim == 2 and own else dtype]  # without products
            sums = WEIGHTS[dtype] if parts and own and exactly.ndim == 3 else sums
            sums *= 10 if cell == "lstm(layer_norm)" else 1
            limit = (0.0 if own else ROUNDED[dtype]) * np.abs(exactly) + sums * max(1.0, np.abs(exactly).max())
            error = np.abs(found[name].astype(np.float64) - exactly)
            assert (error <= limit).all(), (name, float((error - limit).max()), float(np.abs(exactly).max()))


# of products, and of fast functions of them
REPLAYED_SUMS = {"float32": 2e-6, "tf32": 2e-3, "float16": 2e-6, "bfloat16": 2e-6}


def unpacked(values, layout, rows):
    if not layout.packed:
        return values[:rows * layout.row].reshape(rows, layout.outputs, layout.hidden).astype(np.float64)
    found, planes = [], values[:rows * layout.row].reshape(rows, layout.row).astype(np.float64)
    first = 0
    for n in layout.planes:
        plane = planes[:, first:first + n * layout.units].reshape(rows, layout.units, n)
        found += [plane[:, :layout.hidden, k] for k in range(n)]
        first += n * layout.units
    return np.stack(found, axis=1)


def replayed_exactly(task, memory, values, parameters):
    back, w = memory.adjoint, task.workload
    shape = (*values["x"].shape[:2], w.hidden)
    known = {v: values[p.columns.name][..., p.columns.offset:][..., :p.columns.width]
             for v, p in memory.leaves().items()}
    for graph in (memory.kept.replay, back.recurrence):
        known |= start(graph, parameters, known)
        hoist(graph, parameters, known, values["x"], shape)
        if graph is memory.kept.replay:
            step(graph, parameters, known, shape)
    return known, shape


def draw(task, memory, seed=0):
    w, generator = task.workload, np.random.default_rng(seed)
    kind = DTYPES[w.dtype]
    shapes = {p.columns.name: (w.seq, w.batch, p.columns.stride) for p in memory.leaves().values()}
    shapes["x"] = (w.seq, w.batch, w.input)
    values = {n: generator.uniform(-1, 1, s).astype(kind) for n, s in shapes.items()}
    parameters = {n: generator.uniform(-1, 1, s).astype(kind) * kind.type(s[-1] ** -0.5)
                  for n, s in task.graph.parameters.items()}
    vectors = np.zeros((max(1, len(task.graph.vectors)), w.hidden))
    for i, v in enumerate(task.graph.vectors):
        vectors[i] = parameters[v.parameter][v.gate]
    return values, parameters, vectors


@pytest.mark.parametrize(("cell", "sizes", "dtype", "traversal", "arch"), [
    ("lstm", (1, 1, 1, 1), "float32", ALONE, "sm_90a"),
    ("lstm", (5, 7, 24, 40), "bfloat16", ALONE, "sm_90a"),  # both products on wgmma
    ("lstm", (5, 7, 17, 40), "float16", ALONE, "sm_90a"),  # x not of whole words
    ("lstm(peepholes)", (3, 5, 3, 17), "bfloat16", Traversal(reverse=True, directions=2), "sm_80"),
    ("lstm(clip=1)", (4, 3, 6, 12), "tf32", ALONE, "sm_90a"),
    ("gru", (4, 9, 5, 36), "float32", ALONE, "sm_90a"),
    ("gru", (5, 7, 80, 24), "float16", Traversal(directions=2), "sm_90a"),
    ("rnn_tanh", (3, 3, 5, 17), "bfloat16", ALONE, "sm_90a"),  # no product at all
    ("rnn_relu", (2, 3, 4, 20), "float32", ALONE, "sm_90a"),
    ("gru(zoneout=0.2)", (3, 4, 6, 10), "float32", ALONE, "sm_90a"),
    ("gru_reset_before", (5, 3, 6, 18), "bfloat16", ALONE, "sm_90a"),  # from here on: more than one exchange
    ("lstm(layer_norm)", (3, 3, 5, 12), "float32", ALONE, "sm_90a"),
    ("gru(layer_norm)", (3, 2, 6, 17), "float16", ALONE, "sm_90a"),
    ("blend", (3, 2, 6, 9), "float32", ALONE, "sm_90a"),
    ("pair", (3, 2, 6, 9), "float32", ALONE, "sm_90a"),
    ("lstm(projection)", (3, 2, 6, 9), "float32", ALONE, "sm_90a"),
], ids=str)
def test_matches_float64(tmp_path, cell, sizes, dtype, traversal, arch):
    memory = memory_of(cell, sizes, dtype, traversal, replace(KNOWN[arch], cores=3))
    task, back = memory.task, memory.adjoint
    values, parameters, vectors = draw(task, memory)
    again = any(p.operands for p in memory.kept.replay.phases[1:])  # what was computed is rounded, and multiplied again
    sums = REPLAYED_SUMS[dtype] + ROUNDED[dtype] * again
    exact = [{n: v.astype(np.float64) for n, v in those.items()} for those in (values, parameters)]
    for kind in {task.workload.dtype, "float32"}:
        layout = Hoisted(kind, len(back.recurrence.hoisted_outputs), sizes[3])
        folder = tmp_path / kind
        folder.mkdir()
        given = {n: (v.shape, task.workload.dtype) for n, v in values.items()} | {"vectors": (vectors.shape, "float32")}
        passes = Passes(replay(memory, layout), folder, given)
        found = passes.run(*sizes[:2], values | {"vectors": vectors}, parameters)
        wanted, shape = replayed_exactly(task, memory, *exact)
        rows = sizes[0] * sizes[1]
        got = unpacked(found["hoisted"], layout, rows)
        for q, var in enumerate(back.recurrence.hoisted_outputs):
            check(var.name, got[:, q], np.broadcast_to(wanted[var], shape).reshape(rows, -1), sums, kind)
        for space in materialized(memory):
            for var, place in space.places().items():
                made = found[space.name][:rows * place.columns.stride].reshape(rows, -1)[:, place.columns.offset:]
                check(var.name, made[:, :place.columns.width].astype(np.float64),
                      np.broadcast_to(wanted[var], shape).reshape(rows, -1), sums, space.dtype)


def check(name, got, exactly, sums, kind):
    error = np.abs(got - exactly)
    limit = ROUNDED[kind] * np.abs(exactly) + sums * max(1.0, np.abs(exactly).max())
    assert (error <= limit).all(), (name, float((error - limit).max()), float(np.abs(exactly).max()))


def test_every_cell_has_a_replay():
    for cell in step_cells.CELLS:
        memory = memory_of(cell, (3, 2, 5, 5), "float32")
        layout = Hoisted("float32", len(memory.adjoint.recurrence.hoisted_outputs), 5)
        assert bool(replay(memory, layout).functions) == bool(layout.outputs)


def before(after, first, traversal, masks):
    found = np.zeros_like(after)
    for b in range(after.shape[1]):
        end = min(masks.get("lengths", [len(after)] * after.shape[1])[b], len(after))
        order = list(range(end))[::-1] if traversal.reverse else list(range(end))
        for number, t in enumerate(order):
            value = first[b] if number == 0 else after[order[number - 1], b]
            if traversal.resets and (masks["resets"][order[number - 1], b] if traversal.reverse and number else
                                     not traversal.reverse and masks["resets"][t, b]):
                value = np.zeros_like(value)
            found[t, b] = value
    return found


def before_in_columns(after, first, traversal, table):
    found = np.zeros_like(after)
    for number in range(len(first)):
        t, c = (at[::-1] if traversal.reverse else at for at in np.nonzero(unmarked(table) == number))
        found[t[0], c[0]] = first[number]
        found[t[1:], c[1:]] = after[t[:-1], c[:-1]]
    return found


@pytest.mark.parametrize(("sizes", "dtype", "traversal"), [
    ((1, 1, 1, 1), "float32", Traversal()), ((7, 5, 3, 17), "bfloat16", Traversal(lengths=True, resets=True)),
    ((6, 3, 3, 12), "float16", Traversal(reverse=True)),
    ((5, 9, 1, 6), "float32", Traversal(directions=2, resets=True)),
    ((7, 5, 3, 16), "bfloat16", Traversal(reverse=True, directions=2, lengths=True, resets=True)),
    ((1, 4, 1, 3), "float16", Traversal(reverse=True, lengths=True)),
    ((9, 5, 1, 6), "bfloat16", Traversal(sequences=True)), ((1, 2, 1, 1), "float32", Traversal(sequences=True)),
    ((11, 4, 1, 12), "float32", Traversal(reverse=True, sequences=True)),
], ids=str)
def test_gathers(tmp_path, sizes, dtype, traversal):
    memory, (steps, batch, _, H) = memory_of("lstm", sizes, dtype, traversal), sizes
    generator, masks = np.random.default_rng(3), masks_of(traversal, steps, batch, 0)
    rows = int(unmarked(masks["sequences"]).max()) + 1 if traversal.sequences else batch
    assert steps < 9 or not traversal.sequences or (masks["sequences"] >= LATER).any()
    values = {n: generator.normal(size=s).astype(DTYPES[dtype]) for n, s in (
        ("y", (steps, batch, traversal.y_width(H))), ("c_kept", (steps, batch, H)), ("h_in", (rows, H)),
        ("c_in", (rows, H)))}
    given = {n: (v.shape, dtype) for n, v in values.items()}
    given |= {n: (v.shape, "uint8" if n == "resets" else "int32") for n, v in masks.items()}
    made = {f"before_{s}": (steps, batch, memory.before(s).stride) for s in "hc"}
    found = Passes(joined(*gathered(memory)), tmp_path, given).run(steps, batch, values | masks, made=made)
    own = values["y"][..., traversal.y_offset(H):][..., :H]
    for state, after in (("h", own), ("c", values["c_kept"])):
        first = values[f"{state}_in"]
        wanted = (before_in_columns(after, first, traversal, masks["sequences"]) if traversal.sequences else
                  before(after, first, traversal, masks))
        assert found[f"before_{state}"][..., :H].tobytes() == wanted.tobytes(), state


def filled_up(values, memory):
    missing = memory.before("h").stride - values.shape[-1]
    return np.pad(values, [(0, 0), (0, 0), (0, missing)], constant_values=np.nan)


def test_a_gate_that_nobody_uses_has_no_gradient(tmp_path):
    memory = memory_of("highway", (3, 2, 5, 5), "float32")
    places = memory.leaves() | {v: Place(Columns("outputs", 5, 5 * len(memory.outputs()), 5 * o), "float32")
                                for o, v in enumerate(memory.outputs())}
    unused = {n: (g + 1, *s) for n, (g, *s) in memory.task.graph.parameters.items()}
    object.__setattr__(memory.task.graph, "parameters", unused)
    given = {n: (s, "float32") for n, s in (("x", (3, 2, 5)), ("outputs", (3, 2, len(memory.outputs()), 5)))}
    given |= {f"d_{n}": (s, "float32") for n, s in unused.items() if len(s) == 3}
    values = {n: np.ones(s) for n, (s, _) in given.items() if not n.startswith("d_")}
    passes = Passes(joined(*weight_gradients(memory, places, add=True)), tmp_path, given)
    for there in (0, 2):
        start = {n: np.full(s, there) for n, (s, _) in given.items() if n.startswith("d_")} if there else {}
        found = passes.run(3, 2, values | start, add=bool(there))
        for name in given:
            if name.startswith("d_"):
                assert (found[name][:-1] == 6 + there).all() and (found[name][-1] == there).all()


def small(dtype, sizes):
    memory, generator = memory_of("rnn_tanh", sizes, dtype, device=replace(TINY, cores=2)), np.random.default_rng(6)
    steps, batch, inputs, H = sizes
    values = {n: generator.normal(size=(steps, batch, width)).astype(DTYPES[dtype])
              for n, width in (("x", inputs), ("before_h", H), ("outputs", H))}
    exact = {n: v.reshape(steps * batch, -1).astype(np.float64) for n, v in values.items()}
    wanted = {"d_weight_ih": exact["outputs"].T @ exact["x"], "d_weight_hh": exact["outputs"].T @ exact["before_h"]}
    values["before_h"] = filled_up(values["before_h"], memory)
    given = {n: (v.shape, dtype) for n, v in values.items()} | {n: (v.shape, "float32") for n, v in wanted.items()}
    return values, wanted, given, joined(*weight_gradients(memory, memory.leaves() | memory.outputs()))


@pytest.mark.parametrize(("dtype", "sizes"), [("bfloat16", (40, 12, 24, 72)), ("float32", (20, 9, 12, 36)),
                                              ("float16", (20, 12, 9, 17))])
def test_copies_at_once(tmp_path, dtype, sizes):
    """Copies that come before a stage is free, and products that read theirs late."""
    values, wanted, given, part = small(dtype, sizes)
    found = Passes(part, tmp_path, given, lazy=False).run(*sizes[:2], values)
    for name, exactly in wanted.items():
        assert np.abs(found[name] - exactly).max() <= WEIGHTS[dtype] * np.abs(exactly).max(), name


@pytest.mark.parametrize("dropped", [False, True])
def test_the_fence_between_copies_and_products(tmp_path, dropped):
    """cp.async writes by another proxy than wgmma reads."""
    values, wanted, given, part = small("bfloat16", (8, 9, 8, 16))
    fence = "tvm_builtin_ptx_fence_proxy_proxy_async_shared__cta();"
    def change(text: str) -> str:
        assert text.count(fence) == 2  # of either kernel
        return text.replace(fence, "") if dropped else text
    try:
        found = Passes(part, tmp_path, given, ordered=True, change=change).run(8, 9, values, twice=False)
    except Fault:
        assert dropped
        return
    right = all(np.abs(found[n] - v).max() <= WEIGHTS["bfloat16"] * np.abs(v).max() for n, v in wanted.items())
    assert right != dropped


@pytest.mark.parametrize("schedule", [Persistent(), pytest.param(LayoutTransform(), marks=pytest.mark.exhaustive)])
def test_sums_are_of_values_before_tf32_rounds_them(tmp_path, schedule):
    """One step from zeros: all products are zero, so that what is summed is exact but for float32."""
    sizes = T, B, _, H = 1, 9, 5, 24
    layer = task_of("gru", sizes, "tf32", SMALL, Traversal(lengths=True))
    back, masks = adjoint(layer.graph, H), {"lengths": np.int32(np.arange(B) % 3 > 0)}
    task = recurrence_task(layer, back)
    config = schedule.default(task)
    sample = draw_recurrence(task, back, hoisted_of(task, str(config.get("hoisted", "float32"))))
    sample = changed(sample, first={n: 0 * v for n, v in sample.first.items()})
    for folder in ("recurrence", "sums"):
        (tmp_path / folder).mkdir()
    memory = carried_out(tmp_path / "recurrence", schedule, task, config, sample, masks)
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
    found = Passes(joined(*step_sums(passes), vector_gradients(passes)), tmp_path / "sums", given).run(
        T, B, {"outputs": memory["outputs"][:exact.size].reshape(exact.shape)})
    for name, exactly in wanted.items():
        assert exactly.any() and np.abs(found[f"d_{name}"] - exactly).max() <= 1e-6 * np.abs(exactly).max(), name
