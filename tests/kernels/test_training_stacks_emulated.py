"""Training steps of GPU stacks, emulated: layers and directions one after the other, and directions side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_cpu import DTYPES, Emulated
from emulated import TINY, training_program
from emulated_training import check, train
from test_backward_emulated import in_chunks

from ecornn import reference_gradients
from ecornn.analysis import analyse
from ecornn.cells import get
from ecornn.compose import compose, parameter_prefix
from ecornn.program import BACKWARD, FORWARD, Chunks, Concurrent, Program, launches
from ecornn.schedules.base import Task
from ecornn.schedules.persistent import Persistent
from ecornn.workload import SERIAL, Overlap, Stack, Workload

T, B, I, H = 5, 3, 6, 20
SIDES = Overlap("directions", 2)
LIMITS = {"float32": 2e-5, "bfloat16": 8 * 2.0 ** -8}  # relative, of the largest error in a gradient


def program_of(cell: str, stack: Stack, dtype: str, overlap: Overlap, steps: int) -> Program:
    whole, made, schedule = Workload(cell, H, I, B, steps, dtype), {}, Persistent()
    for part in stack.parts(whole):
        task = Task(part.workload, analyse(get(cell), part.workload.input, H), TINY, part.traversal)
        made.setdefault((part.workload, part.traversal), training_program(schedule, task, overlap))
    return compose(stack, whole, [made[p.workload, p.traversal] for p in stack.parts(whole)], overlap)


class Step:
    """A training step on random arguments: what it must give, by :func:`reference_gradients`, and what it gives."""

    def __init__(self, cell: str, stack: Stack, dtype: str, steps: int) -> None:
        rng, self.stack = np.random.default_rng(5), stack

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
        self.states, self.dstates = ([drawn(stack.count, B, H) for _ in names] for _ in range(2))
        self.by_state = {"state_in": dict(zip(names, self.states, strict=True)),
                         "dstate_out": dict(zip(names, self.dstates, strict=True))}
        self.sizes = {"y": steps * B * width, "dx": steps * B * I, "state_out": B * H, "dstate_in": B * H}

    def run(self, program: Program, folder: Path, add: bool = True) -> dict[str, np.ndarray]:
        """What each buffer that is made holds, see :func:`~emulated_training.train`."""
        given = {b.name: self.given[b.tensor] for b in program.buffers if b.tensor in self.given}
        given |= {b.name: self.by_state[b.tensor][b.state][b.part] for b in program.buffers
                  if b.tensor in self.by_state}
        made = {b.name: self.sizes[b.tensor] for b in program.buffers if b.tensor in self.sizes}
        return train(Emulated(program, folder), given, made, self.parameters, self.steps, B, add)

    def wanted(self, program: Program, weights: dict[str, Any], states: Any) -> dict[str, Any]:
        """By the names of buffers: gradients of weights, and of first states."""
        found = {}
        for b in program.buffers:
            if b.tensor == "gradient":
                prefix, _, name = b.state.rpartition(".")
                found[b.name] = weights[f"{name}_{prefix}"]
            elif b.tensor == "dstate_in":
                found[b.name] = states[list(self.by_state["state_in"]).index(b.state)][b.part]
        return found

    def check(self, cell: str, found: dict[str, np.ndarray], program: Program, limit: float) -> None:
        dx, weights, states = reference_gradients(cell, self.given["x"], self.weights, self.states,
                                                  dy=self.given["dy"], dstate=self.dstates)
        check(found, {"dx": dx, **self.wanted(program, weights, states)}, limit)


@pytest.mark.parametrize(("cell", "layers", "dtype", "overlap"), [
    pytest.param("gru", 2, "float32", SIDES, marks=pytest.mark.exhaustive), ("lstm", 2, "bfloat16", SIDES),
    pytest.param("rnn_tanh", 2, "float32", SERIAL, marks=pytest.mark.exhaustive)], ids=str)
def test_directions(tmp_path: Path, cell: str, layers: int, dtype: str, overlap: Overlap):
    """The launches of both are mixed where they are side by side: what one writes the other must not use."""
    stack = Stack(layers, True, keep="states")
    program = program_of(cell, stack, dtype, overlap, T)
    for entry in (FORWARD, BACKWARD):
        pairs = [c for c in program.entries[entry].calls if isinstance(c, Concurrent) and all(
            any("persistent" in one.function for one in launches(branch)) for branch in c.branches)]
        assert [len(pair.branches) for pair in pairs] == [2] * layers * (overlap == SIDES)
    step = Step(cell, stack, dtype, T)
    step.check(cell, step.run(program, tmp_path), program, LIMITS[dtype])


def test_directions_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Side by side, each in chunks of its own."""
    in_chunks(monkeypatch)
    stack = Stack(1, True, keep="states")
    program = program_of("gru", stack, "float32", SIDES, 20)
    pair = next(c for c in program.entries[BACKWARD].calls if isinstance(c, Concurrent))
    assert [[c.reverse for c in branch if isinstance(c, Chunks)] for branch in pair.branches] == [[True], [False]]
    step = Step("gru", stack, "float32", 20)
    step.check("gru", step.run(program, tmp_path, add=False), program, LIMITS["float32"])
