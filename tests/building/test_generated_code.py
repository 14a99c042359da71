"""Generated code: what it was (where it is meant to change, python tests/digests.py --renew), and its names."""

from __future__ import annotations

import re

import digests
import pytest
from cuda_on_cpu import Emulated, inputs
from emulated import SHAPES, TINY, task_of
from rooms import ROOT
from tvm import te

from ecornn.analysis import analyse
from ecornn.build.cuda import lower
from ecornn.build.nvcc import compile_cubin
from ecornn.cells import Cell, pointwise, product
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.workload import Workload

LAYERS = {str(layer): layer for layer in digests.layers()}


@pytest.mark.parametrize("name", LAYERS)
def test_generated_code_is_unchanged(name: str):
    assert digests.digests_of(LAYERS[name]) == digests.kept()[name]


def test_the_file_has_these_layers_alone():
    assert len(LAYERS) == len(list(digests.layers())) and list(digests.kept()) == list(LAYERS)


def test_structure_ignores_names_alone():
    code = "float gate_3 = __expf(x[0]); y[i] = gate_3 + x[1];"
    renamed = code.replace("gate_3", "input_gate").replace("x[", "values[")
    assert digests.structure_of(code) == digests.structure_of(renamed)
    for other in (code.replace("x[1]", "x[0]"), code.replace("+", "-"), code.replace("= gate_3", "= i"),
                  code.replace("__expf", "__logf"), code.replace("float", "double")):
        assert digests.structure_of(code) != digests.structure_of(other)


class Named(Cell):
    """A gated unit with names of the caller's choice: of its states, parameters and tensors."""

    def __init__(self, name: str, states: tuple[str, str], parameters: tuple[str, str],
                 tensors: tuple[str, ...]) -> None:
        self.name, self.states, self.names, self.tensors = name, states, parameters, tensors

    def parameters(self, input, hidden):
        return dict(zip(self.names, ((2, hidden, input), (2, hidden, hidden)), strict=True))

    def step(self, x, states, parameters):
        h, c = states
        W, R = (parameters[name] for name in self.names)
        gx, nx, gh, nh = product(x, W, 0), product(x, W, 1), product(h, R, 0), product(h, R, 1)
        gate = pointwise(lambda i, j: te.sigmoid(gx[i, j] + gh[i, j]), h, self.tensors[0])
        new = pointwise(lambda i, j: te.tanh(nx[i, j] + nh[i, j]), h, self.tensors[1])
        cell = pointwise(lambda i, j: c[i, j] + gate[i, j] * (new[i, j] - c[i, j]), h, self.tensors[2])
        return [pointwise(lambda i, j: te.exp(te.max(-cell[i, j], cell[i, j])) - 1.0, h, self.tensors[3]), cell]


PLAIN = Named("plain", ("h", "c"), ("W", "R"), ("gate", "new", "cell", "state"))
ODD = [Named("taken", ("expf", "max"), ("threadIdx", "half"), ("ecornn_sigmoid_fast", "tanhf", "acc_ptr", "asm")),
       Named("strange", ("uint", "B"), ("blockIdx", "T"), ("a b", "1st", "x.y", "INFINITY"))]


@pytest.mark.parametrize("schedule", ["persistent", "layout_transform", "fused_step"])
def test_source_has_the_names_of_the_step(schedule: str):
    task = task_of("lstm", SHAPES[4], "bfloat16")
    made = all_schedules()[schedule]
    source = lower(made.program(task, made.plan(task, made.default(task))), TINY.arch)[1]
    kernels = source[source.index('extern "C"'):]
    assert {"gate__5", "cell__0", "state__0"} <= set(re.findall(r"float (\w+) = ", kernels))
    assert not re.findall(r"\b(?:v|_ptr)(?:_\d+)?\b", kernels), "a variable without a name"


def test_the_code_in_the_docs_is_what_is_generated():
    """The same lines for any sizes, where four warps share a product."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    shown = text.split("```c\n")[1].split("```")[0].splitlines()
    made, task = all_schedules()["persistent"], task_of("lstm", SHAPES[4], "bfloat16")
    source = lower(made.program(task, made.plan(task, {**made.default(task), "warps": 4})), TINY.arch)[1].splitlines()
    assert shown and not set(shown) - set(source)


@pytest.mark.parametrize("schedule", ["persistent", "layout_transform", "fused_step"])
@pytest.mark.parametrize("cell", ODD, ids=lambda c: c.name)
def test_names_of_a_cell_mean_nothing_else(tmp_path, cell: Named, schedule: str):
    made, sizes = all_schedules()[schedule], (3, 2, 16, 16)
    found = []
    for one in (PLAIN, cell):
        graph = analyse(one, sizes[2], sizes[3])
        task = Task(Workload(one.name, sizes[3], sizes[2], sizes[1], sizes[0], "float16"), graph, TINY)
        program = made.program(task, made.plan(task, made.default(task)))
        compile_cubin(lower(program, TINY.arch)[1], TINY.arch)
        x, states, weights = inputs("plain", sizes, "float16", analyse(PLAIN, *sizes[2:]).parameters, PLAIN.states)
        states = dict(zip(one.states, states.values(), strict=True))
        weights = dict(zip(one.names, weights.values(), strict=True))
        (tmp_path / one.name).mkdir()
        y, after = Emulated(program, tmp_path / one.name).run(x, states, weights, {}, 1)
        found.append((y, *(after[name] for name in one.states)))
    assert all((a == b).all() for a, b in zip(*found, strict=True))
