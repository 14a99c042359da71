"""Training steps of GPU programs, emulated, against float64: what forward keeps for backward; layers and directions of
stacks; sequences in columns, each of them apart; random cells, against a tape over their formulas.

    ECORNN_RANDOM=200:700 python -m pytest -s -m exhaustive tests/kernels/test_training_emulated.py -k many"""

import tempfile
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_training_sample import Call, Layer, reference
from cuda_on_cpu import DTYPES, Emulated
from emulated import TINY, check, check_numbers, task_of, train, train_call, training_program
from exact import ALL_CELLS, unmarked
from msgspec.structs import replace
from pairwise import seeds
from random_steps import Training, training
from test_adjoint import H as UNITS
from test_backward_emulated import LIMITS, in_chunks, large_batches
from test_backward_emulated import Step as LayerStep
from test_persistent_wide import SMALL, config_for
from test_random_steps import Averages, Peak, Projected
from tvm_ffi import structural_equal

from ecornn import Columns, reference_gradients
from ecornn.analysis import analyse
from ecornn.cells import Cell, get
from ecornn.compiler import plan
from ecornn.compose import compose, parameter_prefix
from ecornn.errors import CellError, ScheduleError
from ecornn.program import BACKWARD, ENTRIES, FORWARD, KEPT, RUN, Chunks, Concurrent, Program, launches
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.training import with_backward
from ecornn.targets import KNOWN
from ecornn.task import adjoint_task, make_task
from ecornn.tune.choose import serving_or_raise
from ecornn.workload import ALONE, SERIAL, Overlap, Stack, Traversal, Workload


def trains(reverse: bool = False, directions: int = 1, lengths: bool = False, resets: bool = False) -> Traversal:
    return Traversal(reverse, directions, lengths, resets, keep="states")


# batch: the call's, if it is not the compiled one
@pytest.mark.parametrize(("schedule", "cell", "sizes", "dtype", "change", "traversal", "batch"), [
    ("persistent", "lstm", (5, 3, 24, 41), "bfloat16", {}, trains(), None),
    ("persistent", "lstm", (6, 9, 7, 33), "float32", {"groups": 2, "units": 24}, trains(True, 2, True, True), None),
    ("persistent", "lstm", (9, 5, 24, 40), "float16", {"ahead": 50}, trains(lengths=True), 2),  # the projection beside
    ("persistent", "lstm", (6, 9, 9, 40), "float16", {"units": 8, "carrier": "cluster", "fences": "rare"},
     trains(False, 2, True, True), 4),
    ("persistent", "slstm", (5, 5, 9, 40), "tf32", {}, trains(True, resets=True), None),  # three states besides y
    ("persistent", "pair", (1, 1, 24, 9), "bfloat16", {"units": 8, "warps": 1}, trains(), None),  # y is the second one
    ("persistent_wide", "lstm", (5, 9, 7, 41), "bfloat16", {"units": 16}, trains(True, 2, True, True), None),
    ("persistent_wide", "lstm", (5, 11, 7, 96), "float16", {"units": 48, "row_teams": 2, "registers": 50},
     trains(lengths=True), 3),
    ("layout_transform", "lstm", (4, 5, 7, 17), "bfloat16", {}, trains(True, 2, True, True), 3),
    ("layout_transform", "pair", (4, 3, 5, 9), "float32", {}, trains(resets=True), None),
    ("fused_step", "lstm", (4, 3, 5, 7), "float16", {}, trains(lengths=True), None),
    ("fused_step", "blend", (4, 5, 5, 9), "float32", {}, trains(True, 2, True, True), 3),  # rows have statistics
    ("elementwise", "highway", (21, 3, 5, 12), "float16", {"units": 4, "group": 4}, trains(False, 2, True, True), None),
    ("elementwise", "highway", (9, 5, 5, 7), "float32", {"group": 4, "prefetch": 8}, trains(True, 1, True, True), 2),
    ("elementwise", "highway", (5, 2, 9, 8), "bfloat16", {"units": 2, "group": 4, "prefetch": 8}, trains(), None),
    pytest.param("persistent", "lstm(layer_norm)", (5, 3, 24, 40), "bfloat16", {}, trains(resets=True), None,
                 marks=pytest.mark.exhaustive)], ids=str)
def test_kept_states_match_float64(tmp_path, schedule, cell, sizes, dtype, change, traversal, batch):
    device = {"persistent": replace(SMALL, cores=9), "persistent_wide": SMALL}.get(schedule, TINY)
    task, found = task_of(cell, sizes, dtype, device, traversal), all_schedules()[schedule]
    check_numbers(tmp_path, found, task, config_for(found, task, **change), batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["persistent", "persistent_wide", "layout_transform", "fused_step", "elementwise"])
@pytest.mark.parametrize("cell", [*ALL_CELLS, "lstm(peepholes,clip=0.75,zoneout_h=0.25)", "gru(layer_norm)"])
def test_every_cell_that_is_served(tmp_path, schedule, cell):
    found = all_schedules()[schedule]
    exact = "tf32" if cell == "slstm" else "float32"  # it divides by states that are drawn near zero
    for dtype, traversal in ((exact, trains(True, 2, True, True)), ("bfloat16", trains(lengths=True, resets=True))):
        task = task_of(cell, (6, 5, 12, 12), dtype, replace(SMALL, cores=15), traversal)
        if found.refuses(task) is None:
            (tmp_path / dtype).mkdir()
            check_numbers(tmp_path / dtype, found, task, found.default(task), 4)


@pytest.mark.parametrize(("schedule", "cell", "kept"), [
    ("persistent", "lstm", ["c"]), ("persistent_wide", "lstm", ["c"]), ("layout_transform", "lstm", ["c"]),
    ("fused_step", "slstm", ["c", "n", "m"]), ("elementwise", "highway", ["c"]), ("persistent", "gru", []),
    ("layout_transform", "gru_reset_before", []), ("elementwise", "indrnn", [])])
def test_what_is_added_to_a_program(schedule, cell, kept):
    task, plain = (task_of(cell, (5, 16, 24, 64), "bfloat16", replace(SMALL, cores=40), traversal)
                   for traversal in (trains(resets=True), Traversal(resets=True)))
    found, config = all_schedules()[schedule], all_schedules()[schedule].default(plain)
    made, plain = (found.program(each, found.plan(each, config)) for each in (task, plain))
    assert made.entries[RUN] == plain.entries[RUN] and set(plain.entries) == {RUN}
    assert all(structural_equal(made.functions[name], f) for name, f in plain.functions.items())
    added = [b for b in made.buffers if b not in plain.buffers]
    assert [(b.tensor, b.state, b.role, b.extent.at(5)) for b in added] == [
        ("state_kept", name, KEPT, 5 * 16 * 64) for name in kept]
    assert made.entries[FORWARD].takes == (*plain.entries[RUN].takes, *(b.name for b in added))
    assert {b.tensor for b in made.buffers if b.tensor} <= {*ENTRIES[FORWARD]}
    new = set(made.functions) - set(plain.functions)
    assert len(new) == bool(kept) and all(name.endswith("_keeping") for name in new)
    assert kept or made.entries[FORWARD].calls == made.entries[RUN].calls


T, B, I, H = 5, 3, 6, 20
SIDES = Overlap("directions", 2)


def program_of(cell: str, stack: Stack, dtype: str, overlap: Overlap, steps: int) -> Program:
    whole, made, schedule = Workload(cell, H, I, B, steps, dtype), {}, Persistent()
    for part in stack.parts(whole):
        task = Task(part.workload, analyse(get(cell), part.workload.input, H), TINY, part.traversal)
        made.setdefault((part.workload, part.traversal), training_program(schedule, task, overlap))
    return compose(stack, whole, [made[p.workload, p.traversal] for p in stack.parts(whole)], overlap)


class Step:
    """A training step on random arguments: what it must give, by :func:`reference_gradients`, and what it gives."""

    def __init__(self, cell: str, stack: Stack, dtype: str, steps: int, rows: int = B) -> None:
        rng, self.cell = np.random.default_rng(5), cell
        def drawn(*shape: int, scale: float = 1.0) -> np.ndarray:
            return (rng.uniform(-scale, scale, shape)).astype(DTYPES[dtype]).astype(np.float32)
        self.steps, names, width = steps, get(cell).states, H * stack.directions
        self.parameters, self.weights = dict[str, Any](), dict[str, Any]()
        for part in stack.parts(Workload(cell, H, I, B, steps, dtype)):
            for name, shape in get(cell).parameters(part.workload.input, H).items():
                made = drawn(*shape, scale=H ** -0.5)
                self.parameters[parameter_prefix(stack, part) + name] = made
                self.weights[f"{name}_{part.label}"] = made.reshape(-1, *shape[2:])
        self.given = {"x": drawn(steps, B, I), "dy": drawn(steps, B, width)}
        self.states, self.dstates = ([drawn(stack.count, rows, H) for _ in names] for _ in range(2))
        self.by_state = {"state_in": dict(zip(names, self.states, strict=True)),
                         "dstate_out": dict(zip(names, self.dstates, strict=True))}
        self.sizes = {"y": steps * B * width, "dx": steps * B * I, "state_out": rows * H, "dstate_in": rows * H}

    def run(self, program: Program, folder: Path, add: bool = True) -> dict[str, np.ndarray]:
        given = {b.name: self.given[b.tensor] for b in program.buffers if b.tensor in self.given}
        given |= {b.name: self.by_state[b.tensor][b.state][b.part] for b in program.buffers
                  if b.tensor in self.by_state}
        made = {b.name: self.sizes[b.tensor] for b in program.buffers if b.tensor in self.sizes}
        return train(Emulated(program, folder), given, made, self.parameters, self.steps, B, add)

    def wanted(self, program: Program, weights: dict[str, Any], states: Any) -> dict[str, Any]:
        found = {}
        for b in program.buffers:
            if b.tensor == "gradient":
                prefix, _, name = b.state.rpartition(".")
                found[b.name] = weights[f"{name}_{prefix}"]
            elif b.tensor == "dstate_in":
                found[b.name] = states[list(self.by_state["state_in"]).index(b.state)][b.part]
        return found

    def check(self, program: Program, folder: Path, dtype: str, add: bool = True) -> None:
        dx, weights, states = reference_gradients(self.cell, self.given["x"], self.weights, self.states,
                                                  dy=self.given["dy"], dstate=self.dstates)
        check(self.run(program, folder, add), {"dx": dx, **self.wanted(program, weights, states)}, LIMITS[dtype])


@pytest.mark.parametrize(("cell", "layers", "dtype", "overlap"), [
    pytest.param("gru", 2, "float32", SIDES, marks=pytest.mark.exhaustive), ("lstm", 2, "bfloat16", SIDES),
    pytest.param("rnn_tanh", 2, "float32", SERIAL, marks=pytest.mark.exhaustive)], ids=str)
def test_directions(tmp_path: Path, cell: str, layers: int, dtype: str, overlap: Overlap):
    stack = Stack(layers, True, keep="states")
    program = program_of(cell, stack, dtype, overlap, T)
    for entry in (FORWARD, BACKWARD):
        pairs = [c for c in program.entries[entry].calls if isinstance(c, Concurrent) and all(
            any("persistent" in one.function for one in launches(branch)) for branch in c.branches)]
        assert [len(pair.branches) for pair in pairs] == [2] * layers * (overlap == SIDES)
    Step(cell, stack, dtype, T).check(program, tmp_path, dtype)


def test_directions_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_chunks(monkeypatch)
    stack = Stack(1, True, keep="states")
    program = program_of("gru", stack, "float32", SIDES, 20)
    pair = next(c for c in program.entries[BACKWARD].calls if isinstance(c, Concurrent))
    assert [[c.reverse for c in branch if isinstance(c, Chunks)] for branch in pair.branches] == [[True], [False]]
    Step("gru", stack, "float32", 20).check(program, tmp_path, "float32", add=False)


def apart(name: str, call: Call, reverse: bool) -> dict[str, np.ndarray]:
    table, found = unmarked(call.sequences), {}
    for number in range(len(call.states[0])):
        at = np.nonzero(table == number)
        own = changed(call, x=call.x[at][:, None], dy=call.dy[at][:, None], sequences=None,
                      states=[s[number:number + 1] for s in call.states],
                      dstates=[s[number:number + 1] for s in call.dstates])
        for what, value in reference(name, own, reverse).items():
            if what.startswith("gradient"):
                found[what] = found.get(what, 0) + value
            elif what in ("y", "dx"):
                found.setdefault(what, np.zeros((*table.shape, value.shape[-1])))[at] = value[:, 0]
            else:
                found.setdefault(what, np.zeros((len(call.states[0]), value.shape[-1])))[number] = value[0]
    return found


def check_columns(step: LayerStep, name: str, sizes: tuple[int, int, int, int], dtype: str, reverse: bool) -> None:
    call = step.arguments(*sizes[:2])
    wanted = apart(name, call, reverse)
    call.x[call.sequences < 0] = np.nan  # which nobody may use
    found = step.run(call)
    check(found, wanted, LIMITS[dtype])
    assert not found["dx"].reshape(call.x.shape)[call.sequences < 0].any()


@pytest.mark.parametrize(("schedule", "name", "sizes", "dtype", "reverse"), [
    ("persistent", "lstm", (9, 3, 6, UNITS), "float32", False),
    ("persistent", "gru", (8, 4, 7, UNITS), "float32", True),
    pytest.param("persistent", "gru_reset_before", (7, 4, 8, UNITS), "float32", False, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "rnn_tanh", (12, 2, 5, UNITS), "float16", False, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "lstm(peepholes)", (9, 3, 5, UNITS), "float32", True, marks=pytest.mark.exhaustive),
    pytest.param("persistent", "lstm(layer_norm)", (9, 3, 5, UNITS), "float32", False, marks=pytest.mark.exhaustive),
    ("persistent_wide", "lstm", (9, 9, 16, UNITS), "bfloat16", False),
], ids=str)
def test_a_training_step_in_columns(schedule, name, sizes, dtype, reverse, tmp_path):
    step = LayerStep(tmp_path, schedule, name, sizes, dtype, Traversal(reverse=reverse, sequences=True))
    check_columns(step, name, sizes, dtype, reverse)


@pytest.mark.parametrize(("name", "sizes", "reverse", "cut"), [
    ("lstm", (9, 9, 16, UNITS), True, {}),
    ("gru", (9, 9, 6, 72), False, {"units": 80, "parts": 2, "row_teams": 2, "groups": 1})], ids=str)
def test_a_recurrence_of_large_batches(name, sizes, reverse, cut, tmp_path, monkeypatch):
    large_batches(monkeypatch, cut)
    step = LayerStep(tmp_path, "persistent_wide", name, sizes, "float16", Traversal(reverse=reverse, sequences=True))
    assert "backward_persistent_wide" in step.program.functions and step.program.together != 1
    check_columns(step, name, sizes, "float16", reverse)


def test_which_columns_may_share_a_sequence_in_both_passes(monkeypatch, tmp_path):
    step = LayerStep(tmp_path, "persistent", "lstm", (9, 3, 6, UNITS), "float32", Traversal(sequences=True))
    whole, schedule = step.program.together, Persistent()
    assert whole == 0 == schedule.together(step.task, schedule.plan(step.task, schedule.default(step.task)))
    program, config = changed(step.program, together=12), schedule.default(adjoint_task(step.task))
    monkeypatch.setattr(Persistent, "together", lambda self, task, config: 8)
    assert with_backward(step.task, program, schedule, config).together == 4


def test_layers_whose_adjoint_does_not_fit_are_refused(monkeypatch):
    """A launch a step has no columns."""
    task = task_of("lstm", (9, 3, 6, UNITS), "float32", traversal=Traversal(sequences=True, keep="states"))
    inner = adjoint_task(task)
    assert "persistent" in [s.name for s in serving_or_raise(inner)]
    monkeypatch.setattr(Persistent, "refuses", lambda self, task: "no room")
    with pytest.raises(ScheduleError, match="persistent: no room"):
        serving_or_raise(inner)


@pytest.mark.parametrize(("cell", "overlap"), [
    ("gru", SIDES), pytest.param("lstm", SERIAL, marks=pytest.mark.exhaustive)], ids=str)
def test_stacks(tmp_path, cell, overlap):
    stack, lengths = Stack(2, True, sequences=True, keep="states"), [5, 5, 5, 5, 1]
    program = program_of(cell, stack, "float32", overlap, 7)
    columns = Columns.of(lengths, B, program.together or B)
    assert len(columns.table) == 7 and columns.wrapped.size
    count = len(lengths)
    step = Step(cell, stack, "float32", 7, count)
    rows = {n: np.zeros((5, count, step.given[n].shape[2])) for n in ("x", "dy")}
    for name, padded in rows.items():
        for s, n in enumerate(lengths):
            padded[:n, s] = step.given[name].reshape(-1, padded.shape[2])[columns.of_sequence(s)]
        step.given[name][columns.table < 0] = np.nan  # which nobody may use
    step.given["sequences"] = columns.marked
    found = step.run(program, tmp_path)
    dx, weights, states = reference_gradients(cell, rows["x"], step.weights, step.states, dy=rows["dy"],
                                              dstate=step.dstates, lengths=lengths)
    laid = np.zeros((7 * B, dx.shape[2]))
    for s, n in enumerate(lengths):
        laid[columns.of_sequence(s)] = dx[:n, s]
    check(found, {"dx": laid, **step.wanted(program, weights, states)}, LIMITS["float32"])


VALUES, GRADIENTS = 1e-5, 2e-5  # relative
REFUSED = "depends on neither x nor a state"  # a sum or maximum of parameters, by its name
SEEDS = seeds(range(40))


def random_step(seed: int) -> Training:
    return training(seed, whole=seed % 2 == 1, head=32)  # as persistent trains heads


def random_program(drawn: Training, seed: int, chosen: bool) -> tuple[Program, str, str]:
    """The program, its two schedules' names, and an architecture; ``chosen``: as compile() chooses; else others."""
    (steps, batch, width, hidden), arch = drawn.sizes, ("sm_90a", "sm_80")[seed // 2 % 2]
    device, keep = replace(KNOWN[arch], cores=3), ("gates", "states")[seed // 4 % 2]  # few blocks to emulate
    if chosen:
        masks = {name: getattr(drawn.traversal, name) for name in ("lengths", "resets", "reverse")}
        planned = plan(drawn.cell, hidden=hidden, input=drawn.cell.own_input(width, hidden), batch=batch, seq=steps,
                       training=True, keep=keep, target=device, overlap="none", **masks)
        (program,), (backward,) = planned.programs(), planned.backward
        assert backward is not None
        return program, f"{planned.found.schedule.name}, {backward.schedule.name}", arch
    task = make_task(drawn.cell, Workload(drawn.cell.identity(), hidden, width, batch, steps, "float32"), device,
                     replace(drawn.traversal, keep=keep))
    forward, behind = serving_or_raise(task), serving_or_raise(adjoint_task(task))
    first, second = forward[(seed + 1) % len(forward)], behind[(seed // 3 + 1) % len(behind)]
    return training_program(first, task, behind=second), f"{first.name}, {second.name}", arch


def wrong(drawn: Training, program: Program, folder: Path, arch: str) -> dict[str, float]:
    found = train_call(Emulated(program, folder, arch), drawn.cell.states, drawn.call)
    return {n: e for n, e in drawn.errors({n: found[n] for n in drawn.wanted}).items()
            if not e < (VALUES if n == "y" or n.endswith("_out") else GRADIENTS)}


# no gradient of x beside one of a vector by way of x's products; I = 1 where that reads x's products; an adjoint whose
# first exchange is left out, of a maximum in a softmax; one that leaves nothing but states; a product of a chosen value
@pytest.mark.parametrize(("seed", "chosen"), [(0, True), (1, True), (2, False), (3, False), (4, False), (5, True),
                                              (628, True), (676, True), (252, True), (70, True), (32, True)])
def test_a_random_training_step(seed: int, chosen: bool, tmp_path: Path):
    drawn = random_step(seed)
    program, _, arch = random_program(drawn, seed, chosen)
    assert not wrong(drawn, program, tmp_path, arch)


@pytest.mark.parametrize(("cell", "arch"), [
    (Averages(), "sm_80"), (Projected(), "sm_80"), (Peak(), "sm_80"), (Peak("peaks"), "sm_80"),
    (Peak("peaks"), "sm_90a"), (Peak("top"), "sm_80")], ids=lambda value: getattr(value, "name", value))
def test_every_schedule_trains_them(cell: Cell, arch: str, tmp_path: Path):
    call = Layer(cell, 5, 19, 3, 4).arguments(4, 3)
    drawn = Training(cell, (4, 3, 5, 19), ALONE, call, reference(cell, call, False))
    task = make_task(cell, Workload(cell.identity(), 19, 5, 3, 4, "float32"), replace(KNOWN[arch], cores=3),
                     replace(ALONE, keep="states"))
    behind = serving_or_raise(adjoint_task(task))
    for number, schedule in enumerate(serving_or_raise(task)):
        second = behind[number % len(behind)]
        (folder := tmp_path / schedule.name).mkdir()
        program = training_program(schedule, task, behind=second)
        assert not wrong(drawn, program, folder, arch), (schedule.name, second.name)


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "others"])
def test_many_training_steps(chosen: bool):
    faults = []
    for seed in SEEDS:
        drawn = random_step(seed)
        try:
            program, names, arch = random_program(drawn, seed, chosen)
            with tempfile.TemporaryDirectory() as folder:
                errors = wrong(drawn, program, Path(folder), arch)
            said = f"{names}: {errors}" if errors else ""
        except (CellError, ScheduleError) as error:
            said = "" if REFUSED in str(error) else f"is refused: {error}"
        except Exception as error:  # whatever it is
            said = f"{type(error).__name__}: {error}"
        print(seed, said, flush=True)
        faults += [f"{seed} {said}"] * bool(said)
    assert not faults, "\n".join(faults)
