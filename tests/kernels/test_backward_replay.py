"""What the adjoint's recurrence reads, computed for all steps at once, against the same graphs in float64; the states
before each step, against indexing in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import step_cells
from backward_passes import Passes
from cuda_on_cpu import DTYPES
from emulated import masks_of, task_of
from exact import unmarked
from msgspec.structs import replace

from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.evaluate import hoist, start, step
from ecornn.analysis.kept import kept
from ecornn.program import LATER
from ecornn.schedules.backward.assemble import replay
from ecornn.schedules.backward.memory import Memory, gathered, materialized
from ecornn.schedules.base import joined
from ecornn.schedules.hoisted import Hoisted
from ecornn.targets import KNOWN
from ecornn.workload import ALONE, Traversal

ROUNDED = {"float32": 0.0, "tf32": 0.0, "float16": 2.0 ** -11, "bfloat16": 2.0 ** -8}
SUMS = {"float32": 2e-6, "tf32": 2e-3, "float16": 2e-6, "bfloat16": 2e-6}  # of products, and of fast functions of them


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


def replayed(task, memory, values, parameters):
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
    sums = SUMS[dtype] + ROUNDED[dtype] * again
    exact = [{n: v.astype(np.float64) for n, v in those.items()} for those in (values, parameters)]
    for kind in {task.workload.dtype, "float32"}:
        layout = Hoisted(kind, len(back.recurrence.hoisted_outputs), sizes[3])
        folder = tmp_path / kind
        folder.mkdir()
        given = {n: (v.shape, task.workload.dtype) for n, v in values.items()} | {"vectors": (vectors.shape, "float32")}
        passes = Passes(replay(memory, layout), folder, given)
        found = passes.run(*sizes[:2], values | {"vectors": vectors}, parameters)
        wanted, shape = replayed(task, memory, *exact)
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
