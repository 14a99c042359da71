"""A whole backward pass but for its recurrence, which NumPy does here, against the adjoint in float64; what the
recurrence reads, computed for all steps at once, against the same graphs; the states before each step."""

from __future__ import annotations

import re

import numpy as np
import pytest
import step_cells
import test_adjoint
from backward_passes import Passes, Sample, recur
from cuda_on_cpu import DTYPES
from emulated import TINY, masks_of, task_of
from exact import unmarked
from msgspec.structs import replace

from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.backpropagation import backpropagate
from ecornn.analysis.evaluate import hoist, start, step
from ecornn.analysis.kept import kept
from ecornn.program import LATER
from ecornn.schedules.backward.assemble import parts_of, recurrence_task, replay, state_gradients
from ecornn.schedules.backward.memory import Memory, gathered, materialized, replayed
from ecornn.schedules.backward.passes import input_gradients, places_of_inputs
from ecornn.schedules.backward.weights import step_sums, vector_gradients, weight_gradients
from ecornn.schedules.base import Component, Task, joined
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import written
from ecornn.targets import KNOWN
from ecornn.workload import ALONE, Traversal, Workload

ROUNDED = {"float32": 0.0, "tf32": 0.0, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}
SUMS = {"float32": 3e-6, "tf32": 3e-3, "float16": 3e-6, "bfloat16": 3e-6}
MASKED = Traversal(lengths=True, resets=True)


def memory_of(cell, sizes, dtype, traversal=ALONE):
    T, B, I, H = sizes
    if cell in step_cells.SQUARE or cell == "residual":
        I = H
    kind, precision = ("float32", "tf32") if dtype == "tf32" else (dtype, None)
    work = Workload(cell, H, I, B, T, kind, precision=precision)
    task = Task(work, analyse(test_adjoint.cell_of(cell), I, H), TINY, traversal)
    back = adjoint(task.graph, sizes[3])
    return Memory(task, back, kept(back, "states"))


def gradients_of(memory, values, parameters):
    """What follows the recurrence, from the memory that the passes read, float64."""
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


@pytest.mark.parametrize(("cell", "sizes", "dtype", "traversal", "add"), [
    ("lstm", (1, 1, 1, 1), "float16", ALONE, False),
    ("lstm", (5, 3, 8, 32), "bfloat16", ALONE, True),  # all gates are one operand, on wgmma
    # an operand for each gate; more rows than a block sums at once
    pytest.param("lstm", (40, 5, 9, 17), "float32", ALONE, False, marks=pytest.mark.exhaustive),
    ("lstm(peepholes)", (3, 4, 6, 10), "tf32", ALONE, False),
    ("gru", (5, 7, 5, 12), "bfloat16", Traversal(lengths=True), True),
    ("rnn_tanh", (4, 3, 3, 24), "float16", ALONE, False),
    ("indrnn", (4, 3, 5, 12), "float32", ALONE, False),
    ("leaky", (4, 3, 10, 10), "float32", Traversal(lengths=True), True),  # from here on: more than one kernel for dx
    pytest.param("average", (3, 2, 6, 6), "float16", ALONE, False, marks=pytest.mark.exhaustive),
    ("decay", (3, 2, 3, 6), "float32", ALONE, False),  # x is not read
    ("echo", (3, 2, 6, 6), "float32", ALONE, True),
    ("pair", (3, 4, 5, 12), "float32", ALONE, False),  # a part of a sum comes from the end
    ("lstm(layer_norm)", (3, 3, 5, 12), "float32", Traversal(lengths=True), False),
    pytest.param("gru_reset_before", (3, 3, 5, 18), "bfloat16", ALONE, False, marks=pytest.mark.exhaustive),
], ids=str)
def test_what_follows_the_recurrence(tmp_path, cell, sizes, dtype, traversal, add):
    memory = memory_of(cell, sizes, dtype, traversal)
    w, kind, generator = memory.task.workload, DTYPES[memory.task.workload.dtype], np.random.default_rng(2)
    values, parameters, vectors = draw(memory.task, memory)
    rows = (w.seq, w.batch)
    values["outputs"] = generator.uniform(-1, 1, (*rows, len(written(memory.adjoint)), w.hidden)).astype(kind)
    for space in materialized(memory):
        drawn = generator.uniform(-1, 1, (*rows, len(space.variables), w.hidden))
        values[space.name] = drawn.astype(DTYPES[space.dtype])
    values |= {p.columns.name: generator.uniform(-1, 1, (w.batch, w.hidden)).astype(kind)
               for p in memory.last().values()}
    exact = {n: v.astype(np.float64) for n, v in values.items()}
    masks = {}
    if traversal.lengths:
        masks["lengths"] = np.arange(w.batch, dtype=np.int32) * 2 % (w.seq + 1)
        for b, n in enumerate(masks["lengths"]):
            for name in set(values) - {p.columns.name for p in memory.last().values()}:  # what may hold anything there
                values[name][n:, b], exact[name][n:, b] = (0 if name == "outputs" else np.nan), 0
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
             for n, v in wanted.items()} if add else {}
    factors = memory.leaves() | memory.outputs() | replayed(memory) | places_of_inputs(memory)
    part = joined(input_gradients(memory, add), weight_gradients(memory, factors, add), step_sums(memory),
                  state_gradients(memory), vector_gradients(memory, add))
    if dtype == "tf32":
        values["outputs"] = (values["outputs"].view(np.uint32) + np.uint32(0x1000)).view(np.float32)
    found = Passes(part, tmp_path, given).run(*rows, values | {"vectors": vectors} | masks | there, parameters)
    again = cell in ("lstm(layer_norm)",)
    for name, exactly in wanted.items():
        if name in there and not name.endswith("_in"):
            exactly = exactly + there[name].astype(np.float64)
        rounded = 0.0 if name[2:] in parameters else ROUNDED[dtype]
        sums = SUMS["float32" if exactly.ndim == 2 and name[2:] in parameters else dtype]  # without products
        limit = rounded * np.abs(exactly) + sums * (1 + 9 * again) * max(1.0, np.abs(exactly).max())
        error = np.abs(found[name].astype(np.float64) - exactly)
        assert (error <= limit).all(), (name, float((error - limit).max()), float(np.abs(exactly).max()))


def by_rows(memory, x, weights, states, dy, dstates, masks):
    """Gradients in float64, sequence by sequence; states after each step."""
    traversal, steps, batch = memory.task.traversal, *x.shape[:2]
    names, H = list(memory.adjoint.forward.states), dy.shape[2]
    after = {n: np.zeros((steps, batch, H)) for n in names}
    dx, total = np.zeros_like(x), {n: np.zeros_like(p) for n, p in weights.items()}
    first = {n: np.zeros((batch, H)) for n in names}
    for b in range(batch):
        order = list(range(min(masks["lengths"][b], steps) if "lengths" in masks else steps))
        cuts = [t for t in order if "resets" in masks and masks["resets"][t, b]]
        pieces = np.split(np.array(order, int), cuts)
        if traversal.reverse:
            pieces = [p[::-1] for p in pieces[::-1] if len(p)]
        else:
            pieces = [pieces[0], *(p for p in pieces[1:] if len(p))]  # a start at 0 leaves the first one empty
        if not order:
            for n in names:
                first[n][b] = dstates[n][b]
            continue
        kept_states = [states[n][b] for n in names]
        for number, piece in enumerate(pieces):
            begin = [s if number == 0 else np.zeros(H) for s in kept_states]
            if len(piece) == 0:
                continue
            run = [s[None] for s in begin]
            for t in piece:
                run = forward_step(memory, weights, x[t, b][None], run)
                for n, value in zip(names, run, strict=True):
                    after[n][t, b] = value[0]
            ends = [dstates[n][b][None] if number == len(pieces) - 1 else np.zeros((1, H)) for n in names]
            found = backpropagate(memory.adjoint, x[piece, b][:, None], weights, [s[None] for s in begin],
                                  dy[piece, b][:, None], ends, "states")
            dx[piece, b] = found[0][:, 0]
            for n, gradient in found[1].items():
                total[n] += gradient
            if number == 0:
                for n, gradient in zip(names, found[2], strict=True):
                    first[n][b] = gradient[0]
    return dx, total, first, after


def forward_step(memory, weights, x, states):
    graph, shape = memory.adjoint.forward, states[0].shape
    values = start(graph, weights)
    hoist(graph, weights, values, x[None], (1, *shape))
    now = {v: a[0] if np.ndim(a) == 3 else a for v, a in values.items()}
    now |= dict(zip(graph.states.values(), states, strict=True))
    step(graph, weights, now, shape)
    return [np.broadcast_to(now[v], shape) for v in graph.results.values()]


@pytest.mark.parametrize(("cell", "sizes", "traversal"), [
    ("lstm", (6, 5, 3, 12), MASKED), ("gru", (5, 4, 6, 7), Traversal(True, 2, True, True)),
    ("gru_reset_before", (4, 3, 5, 6), Traversal(reverse=True)), ("gru(layer_norm)", (4, 3, 5, 8), ALONE),
    pytest.param("blend", (4, 3, 5, 8), ALONE, marks=pytest.mark.exhaustive),
    pytest.param("slstm", (4, 3, 5, 8), ALONE, marks=pytest.mark.exhaustive),
], ids=str)
def test_all_gradients(tmp_path, cell, sizes, traversal):
    memory = memory_of(cell, sizes, "float32", traversal)
    w, generator, layout = memory.task.workload, np.random.default_rng(4), None
    steps, batch, I, H = w.seq, w.batch, w.input, w.hidden
    names = list(memory.adjoint.forward.states)
    _, parameters, vectors = draw(memory.task, memory)
    x, dy = (generator.uniform(-1, 1, (steps, batch, n)).astype(np.float32) for n in (I, H))
    states, dstates = ({n: generator.uniform(-1, 1, (batch, H)).astype(np.float32) for n in names} for _ in range(2))
    masks = masks_of(traversal, steps, batch)
    weights = {n: p.astype(np.float64) for n, p in parameters.items()}
    dx, total, first, after = by_rows(memory, x.astype(np.float64), weights, states, dy, dstates, masks)
    if "lengths" in masks:
        for b, n in enumerate(masks["lengths"]):
            x[n:, b] = dy[n:, b] = np.nan
    width, own = traversal.y_width(H), slice(traversal.y_offset(H), traversal.y_offset(H) + H)
    wide = {n: np.full((steps, batch, width), np.nan, np.float32) for n in ("y", "dy")}
    wide["y"][..., own], wide["dy"][..., own] = after[memory.adjoint.forward.output], dy
    given = {"x": x, **wide, "vectors": vectors} | masks | {f"{n}_in": s for n, s in states.items()}
    given |= {f"{n}_kept": after[n].astype(np.float32) for n in memory.kept.states if memory.after(n).name != "y"}
    kinds = {n: (v.shape, {"lengths": "int32", "resets": "uint8"}.get(n, "float32")) for n, v in given.items()}
    made = {f"d_{n}": p.shape for n, p in weights.items()} | {"dx": x.shape} | {
        f"d_{n}_in": (batch, H) for n in names}
    kinds |= {n: (s, "float32") for n, s in made.items()}
    kinds |= {p.columns.name: ((batch, H), "float32") for p in memory.last().values()}
    layout = Hoisted("float32", len(memory.adjoint.recurrence.hoisted_outputs), H)
    part = joined(*parts_of(memory.task, memory.adjoint, memory.kept, layout, Component()))
    found = Passes(part, tmp_path, kinds)
    start_at = found.run(steps, batch, given, parameters, twice=False)  # the first half: what follows reads NaN
    hoisted = unpacked(start_at["hoisted"], layout, steps * batch).reshape(steps, batch, layout.outputs, H)
    task = recurrence_task(memory.task, memory.adjoint)
    ends = {n: np.zeros((batch, H)) for n in task.graph.states}
    ends |= {memory.adjoint.first[n]: gradient.astype(np.float64) for n, gradient in dstates.items()}
    outputs, last = recur(task, Sample(weights, hoisted.reshape(steps * batch, -1, H), ends), masks)
    left = {"outputs": outputs, **{f"last_{n}": value for n, value in last.items()}}
    found = found.run(steps, batch, given | left, parameters)
    for name, exactly in ({f"d_{n}": g for n, g in total.items()} | {f"d_{n}_in": g for n, g in first.items()}
                          | {"dx": dx}).items():
        assert np.abs(found[name] - exactly).max() <= 2e-5 * max(1.0, np.abs(exactly).max()), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", test_adjoint.ALL)
def test_all_cells(tmp_path, cell):
    """Sizes and directions drawn for each."""
    draws = np.random.default_rng(sum(cell.encode()))
    T, B, I, H = (int(draws.integers(1, most)) for most in (6, 7, 18, 20))
    heads = int(found[1]) if (found := re.search(r"heads=(\d+)", cell)) else 1
    reverse, lengths = draws.integers(2, size=2).astype(bool).tolist()
    test_all_gradients(tmp_path, cell, (T, B, I, -(-H // heads) * heads), Traversal(reverse=reverse, lengths=lengths))


# of products, and of fast functions of them
REPLAYED_SUMS = {"float32": 2e-6, "tf32": 2e-3, "float16": 2e-6, "bfloat16": 2e-6}


def unpacked(values, layout, rows):
    """(T*B, Q, H) from the layout's order."""
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
    """All values of the replay and of the recurrence's hoisted part, float64."""
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
    """Leaves, parameters and the shapes of what is given."""
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
    task = task_of(cell, sizes, dtype, replace(KNOWN[arch], cores=3), traversal)
    back = adjoint(task.graph, sizes[3])
    memory = Memory(task, back, kept(back, "states"))
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
    """Of some of them no test runs it, but all can be planned."""
    for cell in step_cells.CELLS:
        task = task_of(cell, (3, 2, 5, 5), "float32")
        back = adjoint(task.graph, 5)
        memory = Memory(task, back, kept(back, "states"))
        layout = Hoisted("float32", len(back.recurrence.hoisted_outputs), 5)
        assert bool(replay(memory, layout).functions) == bool(layout.outputs)


def before(after, first, traversal, masks):
    """What each step begins with; zero where it takes no part."""
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
    """The same of sequences, whose pieces lie in the order of their steps."""
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
    task = task_of("lstm", sizes, dtype, traversal=traversal)
    steps, batch, _, H = sizes
    back = adjoint(task.graph, H)
    memory = Memory(task, back, kept(back, "states"))
    part = joined(*gathered(memory))
    generator, masks = np.random.default_rng(3), masks_of(traversal, steps, batch, 0)
    rows = int(unmarked(masks["sequences"]).max()) + 1 if traversal.sequences else batch
    assert steps < 9 or not traversal.sequences or (masks["sequences"] >= LATER).any()
    values = {n: generator.normal(size=s).astype(DTYPES[dtype]) for n, s in (
        ("y", (steps, batch, traversal.y_width(H))), ("c_kept", (steps, batch, H)), ("h_in", (rows, H)),
        ("c_in", (rows, H)))}
    given = {n: (v.shape, dtype) for n, v in values.items()}
    given |= {n: (v.shape, "uint8" if n == "resets" else "int32") for n, v in masks.items()}
    made = {f"before_{s}": (steps, batch, memory.before(s).stride) for s in "hc"}
    found = Passes(part, tmp_path, given).run(steps, batch, values | masks, made=made)
    own = values["y"][..., traversal.y_offset(H):][..., :H]
    for state, after in (("h", own), ("c", values["c_kept"])):
        first = values[f"{state}_in"]
        wanted = (before_in_columns(after, first, traversal, masks["sequences"]) if traversal.sequences else
                  before(after, first, traversal, masks))
        assert found[f"before_{state}"][..., :H].tobytes() == wanted.tobytes(), state
