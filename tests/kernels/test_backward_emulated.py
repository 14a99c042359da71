"""``forward``, then ``backward`` on what it kept, emulated, against a float64 tape; also of unusual cells."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_adjoint
from cpu_training_sample import Call, reference
from cuda_on_cpu import DTYPES, Emulated
from emulated import TINY, masks_of, task_of, train_call, training_program
from emulated import check as compare
from exact import ALL_CELLS, unmarked
from msgspec import structs
from test_adjoint import ALL, H, cell_of, width
from test_backward_recurrence_emulated import check_recurrence
from test_persistent_emulated import SMALL
from tvm import te, tirx

from ecornn.analysis import analyse
from ecornn.analysis.adjoint import adjoint
from ecornn.analysis.liveness import late_operands
from ecornn.cells import Cell, mean, pointwise, product
from ecornn.numpy_gradients import reference_gradients
from ecornn.numpy_reference import random_weights
from ecornn.program import BACKWARD, FORWARD, PACKED, WORKSPACE, Chunks, Concurrent, launches
from ecornn.schedules import all_schedules, chunks, keeping
from ecornn.schedules.backward.assemble import recurrence_task
from ecornn.schedules.base import Task
from ecornn.schedules.gemm import projection
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.persistent_wide import PersistentWide
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.schedules.step.layout_transform import LayoutTransform
from ecornn.targets import KNOWN
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import ALONE, Traversal, Workload

# relative, of the largest error in a gradient: of 16 bits, some roundings of what is kept and exchanged
LIMITS = {"float32": 2e-5, "float16": 8 * 2.0 ** -11, "bfloat16": 8 * 2.0 ** -8}


def in_chunks(monkeypatch: pytest.MonkeyPatch, shortest: int = 1) -> None:
    eight = {"gates": 8, "states": 8}
    for constant, value in {"ROOM": 1, "LEAST": eight, "BACKWARD": eight, "SHORTEST": shortest}.items():
        monkeypatch.setattr(chunks, constant, value)


class Step:
    def __init__(self, folder: Path, schedule: str | None, of: str | Cell, sizes: tuple[int, int, int, int], dtype: str,
                 traversal: Traversal = ALONE, keep: str = "states", behind: str | None = None) -> None:
        (steps, batch, input, hidden), cell = sizes, of if isinstance(of, Cell) else cell_of(of)
        self.traversal = structs.replace(traversal, keep=keep)
        work = Workload(of if isinstance(of, str) else cell.name, hidden, input, batch, steps, dtype)
        self.task = Task(work, analyse(cell, input, hidden), TINY, self.traversal)
        found = all_schedules()[schedule] if schedule else serving_or_raise(self.task)[0]
        assert found.serves(self.task) is None
        self.program = training_program(found, self.task, behind=all_schedules()[behind] if behind else None)
        self.emulated = Emulated(self.program, folder)

    def arguments(self, steps: int, batch: int) -> Call:
        rng, work, kind = np.random.default_rng(3), self.task.workload, DTYPES[self.task.workload.dtype]
        def drawn(*shape: int) -> np.ndarray:
            return rng.uniform(-1, 1, shape).astype(kind).astype(np.float32)
        masks = masks_of(self.traversal, steps, batch, self.program.together)
        parameters = {n: (rng.uniform(-1, 1, s) / work.hidden ** 0.5).astype(kind).astype(np.float32)
                      for n, s in self.task.graph.parameters.items()}
        states, table = self.task.graph.states, masks.get("sequences")
        rows = batch if table is None else int(unmarked(table).max()) + 1
        return Call(drawn(steps, batch, work.input), [drawn(rows, work.hidden) for _ in states],
                    drawn(steps, batch, work.hidden), [drawn(rows, work.hidden) for _ in states], parameters,
                    masks.get("lengths"), masks.get("resets"), table)

    def run(self, call: Call, add: bool = True, apart: bool = False) -> dict[str, np.ndarray]:
        return train_call(self.emulated, list(self.task.graph.states), call, add=add, apart=apart)


@pytest.mark.parametrize(("schedule", "name", "sizes", "dtype", "traversal"), [
    ("persistent", "lstm", (5, 3, 6, H), "float32", Traversal(lengths=True, resets=True)),
    ("persistent", "lstm", (4, 3, 16, H), "bfloat16", ALONE),  # all gates are one operand of dx
    ("persistent", "gru", (5, 2, 7, H), "float32", Traversal(reverse=True, lengths=True)),
    ("persistent", "gru", (4, 5, 8, 40), "float16", Traversal(resets=True)),
    ("persistent", "gru", (4, 5, 6, 26), "bfloat16", ALONE),
    ("persistent", "rnn_tanh", (3, 1, 1, 1), "float32", ALONE),
    ("persistent", "lstm(peepholes)", (3, 2, 5, H), "float32", Traversal(reverse=True, resets=True)),
    ("persistent", "lstm(layer_norm)", (3, 2, 5, H), "float32", Traversal(lengths=True)),
], ids=str)
def test_a_training_step(schedule, name, sizes, dtype, traversal, tmp_path):
    check(Step(tmp_path, schedule, name, sizes, dtype, traversal), name, sizes, dtype, traversal)


@pytest.mark.parametrize(("name", "sizes", "dtype", "traversal", "keep"), [
    ("lstm", (5, 3, 6, H), "bfloat16", Traversal(lengths=True), "states"),
    ("gru", (4, 3, 74, H), "float16", Traversal(reverse=True), "gates"),
], ids=str)
def test_x_is_copied_to_rows_that_are_aligned(name, sizes, dtype, traversal, keep, tmp_path, monkeypatch):
    """As it is where many tiles read it: then products, and steps that multiply nothing, read the copy."""
    monkeypatch.setattr(projection, "WORDS", 1e9)
    step = Step(tmp_path, "persistent", name, sizes, dtype, traversal, keep)
    for entry in step.program.entries.values():
        assert [call.names["into"] for call in launches(entry.calls) if "align" in call.function] == [
            "backward_" * (entry is step.program.entries[BACKWARD]) + projection.ALIGNED]
    check(step, name, sizes, dtype, traversal)


@pytest.mark.parametrize(("schedule", "name", "sizes", "dtype", "traversal"), [
    ("persistent", "lstm", (5, 3, 6, H), "bfloat16", Traversal(lengths=True, resets=True)),
    ("persistent", "gru_reset_before", (4, 2, 7, H), "float32", Traversal(reverse=True, lengths=True)),
    ("layout_transform", "gru_reset_before", (3, 2, 5, H), "float32", Traversal(lengths=True)),  # of an earlier phase
    ("fused_step", "blend", (4, 5, 5, 9), "float32", Traversal(lengths=True)),  # rows have statistics
    pytest.param("elementwise", "highway", (5, 3, 7, 8), "float16", Traversal(lengths=True, resets=True),
                 marks=pytest.mark.exhaustive),
    pytest.param("persistent", "slstm", (3, 2, 5, H), "float32", ALONE, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "lstm(layer_norm)", (3, 2, 5, H), "float32", ALONE, marks=pytest.mark.exhaustive),
    pytest.param("layout_transform", "lstm(layer_norm)", (3, 2, 5, H), "float32", ALONE, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "pair", (3, 2, 5, H), "float32", ALONE, marks=pytest.mark.exhaustive),
    pytest.param("persistent_wide", "lstm", (6, 9, 6, H), "float16", Traversal(lengths=True),
                 marks=pytest.mark.exhaustive),
], ids=str)
def test_a_training_step_from_gates(schedule, name, sizes, dtype, traversal, tmp_path, monkeypatch):
    """Forward keeps them. What the recurrence writes is in rows of whole lines of memory, as of large layers."""
    monkeypatch.setattr(keeping, "LINES", 0)
    step = Step(tmp_path, schedule, name, sizes, dtype, traversal, "gates")
    values = [b for b in step.program.buffers if b.tensor in ("value_kept", "values_kept")]
    again = [b for b in step.program.buffers if b.name.startswith("backward_replay") and b.role == PACKED]
    assert values and (not again or step.task.graph.hoisted_statistics)  # of x, where steps have it normalized
    check(step, name, sizes, dtype, traversal)


def test_sums_of_gradients_that_are_much_smaller_than_those_of_the_step_before(tmp_path):
    """Of a row of zeros, which layer normalization divides by sqrt(1e-5), as rows are that take no part in a step."""
    name, (steps, batch, input, hidden) = "lstm(layer_norm)", (6, 5, 13, 40)
    step = Step(tmp_path, "persistent", name, (steps, batch, input, hidden), "float32", Traversal(lengths=True))
    rng = np.random.default_rng(0)
    x, dy, *states = (rng.standard_normal(s).astype(np.float32) for s in (
        (steps, batch, input), (steps, batch, hidden), *[(batch, hidden)] * 4))
    weights = {n: w.astype(np.float32) for n, w in random_weights(name, input, hidden, 1, 1, 1).items()}
    parameters = {n: weights[f"{n}_l0"].reshape(s) for n, s in step.task.graph.parameters.items()}
    call = Call(x, states[:2], dy, states[2:], parameters, np.array([4, 5, 1, 6, 6], np.int32))
    dx, dweights, dfirst = reference_gradients(name, x, weights, states[:2], dy=dy, dstate=states[2:],
                                               lengths=call.lengths)
    wanted = {"dx": dx, "dh_in": dfirst[0], "dc_in": dfirst[1],
              **{f"gradient_{n.removesuffix('_l0')}": d for n, d in dweights.items()}}
    compare(step.run(call), wanted, 1e-5)


@pytest.mark.parametrize(("name", "sizes", "dtype", "traversal"), [
    ("lstm", (5, 3, 6, H), "float32", Traversal(lengths=True, resets=True)),
    ("gru_reset_before", (4, 3, 7, 40), "bfloat16", Traversal(reverse=True)),
], ids=str)
def test_weights_that_do_not_fit_on_chip(name, sizes, dtype, traversal, tmp_path, monkeypatch):
    for schedule in (Persistent, PersistentWide):
        monkeypatch.setattr(schedule, "refuses", lambda self, task: "no room")
    step = Step(tmp_path, "layout_transform", name, sizes, dtype, traversal)
    assert "backward_step_0" in step.program.functions or "step_0" in step.program.functions
    assert not any("persistent" in function for function in step.program.functions)
    check(step, name, sizes, dtype, traversal)


def check(step, name, sizes, dtype, traversal):
    call = step.arguments(*sizes[:2])
    compare(step.run(call), reference(name, call, traversal.reverse), LIMITS[dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_a_training_step_of_every_cell(name, tmp_path):
    draws = np.random.default_rng(sum(name.encode()))
    steps, batch, input, hidden = (int(draws.integers(1, most)) for most in (6, 7, 18, 20))
    heads = int(found[1]) if (found := re.search(r"heads=(\d+)", name)) else 1
    reverse, lengths = draws.integers(2, size=2).astype(bool).tolist()
    hidden = hidden if heads == 1 else 32 * heads  # of which heads that train have a multiple
    sizes = (steps, batch, hidden if width(name) == H else input, hidden)
    step = Step(tmp_path, None, name, sizes, "float32", Traversal(reverse=reverse, lengths=lengths))
    call = step.arguments(steps, batch)
    found = step.run(call)
    for what, exactly in reference(name, call, reverse).items():
        error = np.abs(found[what].reshape(exactly.shape) - exactly).max()
        assert error <= LIMITS["float32"] * max(1.0, np.abs(exactly).max()), what


@pytest.mark.parametrize(("name", "sizes", "traversal"), [
    ("lstm", (20, 3, 6, H), Traversal(lengths=True, resets=True)),
    ("lstm(peepholes)", (20, 2, 5, H), Traversal(resets=True)),
    ("gru", (17, 2, 5, H), Traversal(reverse=True, lengths=True, resets=True)),
    ("lstm", (20, 3, H, H), Traversal(resets=True)),  # the gradient of x lies where states were kept
    pytest.param("lstm", (20, 3, H, H), Traversal(reverse=True, lengths=True), marks=pytest.mark.exhaustive),
], ids=str)
def test_a_training_step_in_chunks(name, sizes, traversal, tmp_path, monkeypatch):
    in_chunks(monkeypatch)
    step = Step(tmp_path, "persistent", name, sizes, "float32", traversal)
    for entry in (FORWARD, BACKWARD):
        cut = [c for c in step.program.entries[entry].calls if isinstance(c, Chunks)]
        assert [(c.steps, c.reverse) for c in cut] == [(8, traversal.reverse == (entry == FORWARD))]
    assert step.program.dx_in == ("c_kept" if sizes[2] == H else None)
    call = step.arguments(*sizes[:2])
    found = step.run(call)
    compare(found, reference(name, call, traversal.reverse), LIMITS["float32"])
    again = step.run(call)
    assert all((again[what] == value).all() for what, value in found.items())
    written = step.run(call, add=False)  # by the first chunk, and the others add
    for what, value in found.items():  # which was added to ones in float32, and has the rounding of such sums
        assert np.allclose(written[what], value, rtol=0, atol=1e-6 * max(1, np.abs(value).max())), what


@pytest.mark.parametrize(("name", "sizes", "traversal", "dx_in"), [
    ("lstm", (20, 3, H, H), Traversal(lengths=True), "c_kept"),
    ("gru", (5, 3, H, H), Traversal(reverse=True, resets=True), "value4_kept")], ids=str)  # in one piece
def test_gradients_of_gates_lie_where_these_were(name, sizes, traversal, dx_in, tmp_path, monkeypatch):
    """The same ones as apart from them, where a caller has what is kept, and may want it again."""
    in_chunks(monkeypatch, shortest=16)
    step = Step(tmp_path, "persistent", name, sizes, "float32", traversal, "gates")
    assert step.program.in_place == {"backward_outputs": "values_kept"} and step.program.dx_in == dx_in
    cut = [c for c in step.program.entries[BACKWARD].calls if isinstance(c, Chunks)]
    assert [c.in_place for c in cut] == [(("backward_outputs", "values_kept"),)] * (sizes[0] > 16)
    call = step.arguments(*sizes[:2])
    found, apart = step.run(call), step.run(call, apart=True)
    assert all((apart[what] == value).all() for what, value in found.items())
    compare(found, reference(name, call, traversal.reverse), LIMITS["float32"])


def large_batches(monkeypatch: pytest.MonkeyPatch, cut: dict[str, Any]) -> None:
    """Small layers, too, have `persistent_wide` carry out their adjoint, with ``cut`` of its configuration."""
    own = PersistentWide.default
    monkeypatch.setattr(Persistent, "refuses", lambda self, task: "no room")
    monkeypatch.setattr(PersistentWide, "default", lambda self, task: {
        **own(self, task), **(cut if task.traversal.backward else {})})


@pytest.mark.parametrize(("name", "sizes", "traversal", "cut"), [
    pytest.param("lstm", (18, 9, 6, H), Traversal(lengths=True, resets=True), {}, marks=pytest.mark.exhaustive),
    ("gru", (18, 9, 6, 72), Traversal(resets=True), {"units": 80, "parts": 2, "row_teams": 2, "groups": 1})], ids=str)
def test_a_training_step_of_large_batches(name, sizes, traversal, cut, tmp_path, monkeypatch):
    in_chunks(monkeypatch)
    large_batches(monkeypatch, cut)
    step = Step(tmp_path, "persistent_wide", name, sizes, "float16", traversal)
    assert "backward_persistent_wide" in step.program.functions
    check(step, name, sizes, "float16", traversal)


@pytest.mark.parametrize("keep", ["gates", "states"])
@pytest.mark.parametrize(("name", "apart"), [("lstm", True), ("gru", True), ("rnn_tanh", True),
                                             ("lstm(layer_norm)", False)])
def test_what_is_made_at_the_same_time(name, apart, keep):
    """Gradients of weights beside that of x; neither makes what the other one reads."""
    work = Workload(name, 256, 256, 16, 600, "bfloat16")
    task = Task(work, analyse(cell_of(name), 256, 256), KNOWN["sm_90a"], Traversal(lengths=True, keep=keep))
    program = training_program(all_schedules()["persistent"], task)
    calls = program.entries[BACKWARD].calls
    found = [c for c in (*calls, *(c for one in calls if isinstance(one, Chunks) for c in one.calls))
             if isinstance(c, Concurrent)]
    functions = [{launch.function for branch in one.branches for launch in launches(branch)} for one in found]
    assert ["backward_inputs_0" in f for f in functions] == [True] * apart
    for one in found:
        made, *others = ({launch.names.get(p.name, p.name) for launch in launches(branch)
                          for p in program.functions[launch.function].params} for branch in one.branches)
        common = made & others[0] - {"T", "B", "add"}
        known = ("x", "y", "lengths", "backward_outputs", "backward_before_", "backward_replayed")
        assert common and all(b.startswith(known) for b in common), common


def test_workspaces_do_not_grow_with_what_is_kept():
    """Those of T = 1024, which are of a chunk, serve T = 100,000, too."""
    work = Workload("lstm", 768, 768, 16, 1024, "bfloat16")
    task = Task(work, analyse(cell_of("lstm"), 768, 768), KNOWN["sm_90a"], Traversal(keep="states"))
    program = training_program(all_schedules()["persistent"], task)
    for entry in (FORWARD, BACKWARD):
        own = [b for b in program.buffers if b.role == WORKSPACE and b.name in program.entries[entry].takes]
        assert sum(b.nbytes(work.seq) for b in own) == sum(b.nbytes(100_000) for b in own) < 140 << 20


class Bare(Cell):
    shapes = staticmethod(lambda I, H: {})

    def parameters(self, input: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return self.shapes(input, hidden)


class Swap(Bare):
    """States change places: nothing but they has a gradient, and the adjoint's recurrence writes nothing."""

    name, states = "swap", ("h", "c")

    def step(self, x: Any, states: Any, p: Any) -> Any:
        return [states[1], states[0]]

    formula = staticmethod(lambda x, s, p: ({"h": s["c"], "c": s["h"]}, "h"))


class Level(Bare):
    """As this one, with what units exchange: their mean."""

    name, states = "level", ("h", "c")

    def step(self, x: Any, states: Any, p: Any) -> Any:
        h, middle = states[0], mean(states[0])
        return [pointwise(lambda b, j: 0.5 * states[1][b, j] + middle[b], h), h]

    formula = staticmethod(lambda x, s, p: ({"h": 0.5 * s["c"] + s["h"].mean(1, keepdims=True), "c": s["h"]}, "h"))


class Drift(Bare):
    """A mean of the state beside a product of x, and no product of the state."""

    name, states = "drift", ("h",)
    shapes = staticmethod(lambda I, H: {"W": (1, H, I)})

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx, middle = states, product(x, p["W"], 0), mean(states[0])
        return [pointwise(lambda b, j: te.tanh(wx[b, j] + 0.5 * h[b, j] - middle[b]), h)]

    formula = staticmethod(lambda x, s, p: (
        {"h": np.tanh(x @ p["W"][0].T + 0.5 * s["h"] - s["h"].mean(1, keepdims=True))}, "h"))


class Reset(Bare):
    """Spikes that are conditions made numbers, and a membrane that is multiplied by one."""

    name, states = "reset", ("v", "s")
    shapes = staticmethod(lambda I, H: {"W": (1, H, I), "R": (1, H, H)})

    def step(self, x: Any, states: Any, p: Any) -> Any:
        v, wx, rs = states[0], product(x, p["W"], 0), product(states[1], p["R"], 0)
        low, high = (tirx.const(value, "float32") for value in (-0.25, 0.5))
        u = pointwise(lambda b, j: 0.75 * v[b, j] + wx[b, j] + rs[b, j], v)
        quiet = pointwise(lambda b, j: tirx.Cast("float32", tirx.And(u[b, j] > low, u[b, j] <= high)) * u[b, j], v)
        return [quiet, pointwise(lambda b, j: tirx.Cast("float32", u[b, j] > high), v)]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        u = 0.75 * s["v"] + x @ p["W"][0].T + s["s"] @ p["R"][0].T
        value = u.value
        return {"v": u * ((value > -0.25) & (value <= 0.5)), "s": 0.0 * u + (value > 0.5)}, "v"


class Detour(Bare):
    """A product that is multiplied again, two exchanges later: those of narrow matrices are apart, and between."""

    name, states = "detour", ("c", "h")
    shapes = staticmethod(lambda I, H: {"D": (1, max(1, H // 2), H), "E": (1, H, max(1, H // 2)), "R": (2, H, H)})

    def step(self, x: Any, states: Any, p: Any) -> Any:
        c, h = states
        down = product(c, p["D"], 0)
        bent = te.compute(down.shape, lambda b, j: te.tanh(down[b, j]), name="bent")
        twice, back = product(product(h, p["R"], 0), p["R"], 1), product(bent, p["E"], 0)
        return [pointwise(lambda b, j: back[b, j] + c[b, j], h), pointwise(lambda b, j: te.tanh(twice[b, j]), h)]

    @staticmethod
    def formula(x: Any, s: Any, p: Any) -> Any:
        return {"c": np.tanh(s["c"] @ p["D"][0].T) @ p["E"][0].T + s["c"],
                "h": np.tanh(s["h"] @ p["R"][0].T @ p["R"][1].T)}, "c"


class Shown(Bare):
    """y and the new state are products, of what takes x: the adjoint multiplies their gradients as they are."""

    name, states, output = "shown", ("h",), "o"
    shapes = staticmethod(lambda I, H: {"W": (1, H, I), "R": (2, H, H)})

    def step(self, x: Any, states: Any, p: Any) -> Any:
        (h,), wx = states, product(x, p["W"], 0)
        seen = pointwise(lambda b, j: te.tanh(wx[b, j] + h[b, j]), h)
        return [product(seen, p["R"], 0), product(seen, p["R"], 1)]


BARE = {cell.name: cell for cell in (Swap(), Level(), Drift(), Reset(), Detour())}
BOTH = Traversal(lengths=True, resets=True)


@pytest.mark.parametrize("schedule", [Persistent(), LayoutTransform(), FusedStep()], ids=lambda s: s.name)
def test_an_adjoint_that_multiplies_a_gradient_of_y(schedule, tmp_path, monkeypatch):
    monkeypatch.setitem(ALL_CELLS, "shown", Shown())
    layer = task_of("shown", (5, 3, 6, 20), "float32", SMALL, BOTH)
    task = recurrence_task(layer, adjoint(layer.graph, 20))
    assert late_operands(task.graph) and not task.graph.prologue
    check_recurrence(tmp_path, schedule, layer)


@pytest.mark.parametrize(("schedule", "name", "backward", "traversal", "keep"), [
    ("elementwise", "swap", "sequence", BOTH, "states"), ("fused_step", "swap", "sequence", ALONE, "gates"),
    ("fused_step", "level", "rows_0", BOTH, "states"), ("fused_step", "drift", "rows_0", BOTH, "states"),
    ("fused_step", "drift", "rows_0", Traversal(reverse=True), "gates"),
    ("persistent_block", "reset", "persistent", ALONE, "gates"), ("fused_step", "reset", "persistent", BOTH, "states"),
    ("fused_step", "detour", "outer_3", ALONE, "gates")], ids=str)
def test_a_training_step_of_bare_cells(schedule, name, backward, traversal, keep, tmp_path, monkeypatch):
    monkeypatch.setitem(test_adjoint.OF_STEP, name, BARE[name])
    sizes = (5, 3, 6, 20)
    step = Step(tmp_path, schedule, name, sizes, "float32", traversal, keep)
    assert f"backward_{backward}" in step.program.functions
    check(step, name, sizes, "float32", traversal)
