"""Generated code is what it was (where it is meant to change, tests/digests.py --renew), has the names of the step, and
as code for people does what is compiled, uses what it declares, fits on a screen, and says what its phases are.

    pytest tests/building/test_readable.py --renew    writes persistent_lstm.cu anew"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cuda_on_cpu
import digests
import numpy as np
import pytest
from click.testing import CliRunner
from cuda_on_cpu import Emulated, inputs
from emulated import SHAPES, TINY, task_of, training_program
from msgspec.structs import replace
from rooms import ROOT
from test_backward_emulated import Step
from test_persistent_wide import SMALL, config_for
from tvm import te

from ecornn.analysis import analyse
from ecornn.build import cuda, readable
from ecornn.build.cuda import lower
from ecornn.build.nvcc import compile_cubin
from ecornn.build.readable import WIDTH, clear, wrapped
from ecornn.cells import Cell, pointwise, product
from ecornn.cli import main
from ecornn.program import Program
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.schedules.builder import NOTE, Builder
from ecornn.workload import ALONE, Traversal, Workload

ARCH = "sm_90a"
LONGEST = 160
SIZES = (3, 3, 16, 40)  # T, B, I, H
# what is compiled, and changed knobs; each calls kernels that the others do not
CASES: dict[str, Any] = {
    "l2": ("persistent", "lstm", SIZES, "bfloat16", {"math": "fast"}),
    "cluster": ("persistent", "lstm", SIZES, "float16", {"carrier": "cluster", "fences": "rare"}),
    "statistics": ("persistent", "lstm(layer_norm)", SIZES, "float16", {}),
    "workers": ("persistent", "lstm", (9, 3, 24, 40), "bfloat16", {"ahead": 0}),
    "mma": ("persistent_block", "lstm", SIZES, "float16", {}), "fma": ("persistent_block", "gru", SIZES, "float32", {}),
    "wide": ("persistent_wide", "lstm", (5, 3, 24, 40), "bfloat16", {}),
    "elementwise": ("elementwise", "indrnn", (19, 3, 16, 32), "float16", {}),
    "scan": ("scan", "leaky", (19, 3, 16, 16), "float16", {}),
    "fused_step": ("fused_step", "lstm(layer_norm)", SIZES, "float32", {}),
    "layout_transform": ("layout_transform", "gru", SIZES, "float16", {}),
    "whole_step": ("whole_step", "lstm", (1, 3, 16, 40), "float16", {})}
TRAINED: dict[str, Any] = {
    "trained_outer_mma": ("persistent", "lstm", (5, 3, 6, 20), "float32", Traversal(lengths=True, resets=True)),
    "trained_outer_wgmma": ("persistent", "gru", (4, 5, 8, 40), "float16", ALONE),
    "trained_statistics": ("fused_step", "lstm(layer_norm)", (3, 2, 5, 9), "float32", ALONE)}
MMA = ("MMA warps, prologue", "MMA warps: wait", "MMA warps: partial sums")
GATES = ("gate warps, prologue", "gate warps: wait", "gate warps, epilogue", "gate warps: what nobody waits for")
# what the notes of a kernel begin with, in order; others may be between
PHASES = {
    "l2": {"start": ("before the recurrence",), "persistent": (*MMA[:2], "consumer: poll", MMA[2], *GATES[:3],
                                                               "producer: the words", GATES[3])},
    "cluster": {"persistent": ("cluster, prologue", *MMA[:2], "consumer: the mbarrier", MMA[2], *GATES)},
    "statistics": {"normalize": ("a CTA a row",), "persistent": (*MMA, GATES[0], "gate warps: statistics", GATES[3])},
    "workers": {"persistent": (*MMA, *GATES, "projection CTAs", "main loop", "epilogue")},
    "mma": {"persistent_block": ("all warps, prologue", "all threads, prologue", "CTA barrier", "epilogue", "barrier",
                                 "products of the next step")},
    "wide": {"persistent_wide": ("prologue", "producer warpgroup", "producer: bulk copies", "MMA warpgroups: weights",
                                 "MMA warpgroups: wait", "MMA warpgroups: partial sums", "gates, epilogue",
                                 "named barrier", "what nobody waits for")},
    "elementwise": {"sequence": ("a thread takes", "prologue", "a group of steps", "epilogue"),
                    "project": ("prologue", "producer warpgroup", "main loop", "epilogue")},
    "scan": {"compose0": ("a thread takes", "prologue", "a group of steps", "epilogue"),
             "carry0": ("the maps of each group", "the states that each group", "the states behind each chunk"),
             "replay": ("a thread takes", "prologue", "a group of steps", "epilogue")},
    "fused_step": {"step": ("products", "epilogue"), "project": ("tiles", )},
    "layout_transform": {"step": ("products", "prologue", "main loop", "partial sums", "epilogue")},
    "whole_step": {"step": ("programmatic dependent launch", "MMA warps", "CTA barrier", "epilogue")},
}


NAMES = [*CASES, *TRAINED]


def made(name: str) -> tuple[Task, Program]:
    schedule, cell, sizes, dtype, change = (CASES | TRAINED)[name]
    found, device = all_schedules()[schedule], SMALL if name in CASES and schedule.startswith("persistent") else TINY
    if name in TRAINED:
        task = task_of(cell, sizes, dtype, device, replace(change, keep="states"))
        return task, training_program(found, task)
    task = task_of(cell, sizes, dtype, device)
    config = config_for(found, task, **change)
    assert found.check(task, config) is None
    return task, found.program(task, found.plan(task, config))


known = cache(made)


@cache
def text_of(name: str) -> str:
    return cuda.readable(known(name)[1], ARCH)


def kernels(text: str) -> dict[str, str]:
    found = re.finditer(r'^extern "C" __global__ void [^{;]*?(\w+)_kernel\([^{;]*\) \{\n.*?^}', text, re.M | re.S)
    return {match[1]: match[0] for match in found}


def notes(kernel: str) -> list[str]:
    return [line.strip()[3:] for line in kernel.split("\n") if line.lstrip().startswith("// ")]


def compilable(text: str) -> str:
    return re.sub(r'"\s+"', "", re.sub(r",\s+", ", ", text))


@pytest.mark.parametrize("name", NAMES)
def test_all_that_is_declared_is_used(name: str):
    for kernel, text in kernels(text_of(name)).items():
        code = re.sub(r"//.*", "", text)
        uses = Counter(re.findall(r"\w+", code))
        declared = re.findall(r"^ *(?:alignas\(64\) )?(?:\w+\*? )(\w+)(?:\[\d+\])?(?: = .*)?;?$", code, re.M)
        declared += re.findall(r"^ *(?:alignas\(64\) )?\w+ (\w+)\[\d+\];$", code, re.M)
        assert declared, kernel
        unused = {n for n in declared if uses[n] < 2}
        assert not unused, f"{kernel}: {unused}"


@pytest.mark.parametrize("name", NAMES)
def test_lines_fit_and_names_stand_for_what_they_are(name: str):
    assert max(map(len, text_of(name).split("\n"))) <= LONGEST
    for kernel, text in kernels(text_of(name)).items():
        lines = text.replace(f"{kernel}_kernel", "k").split("\n")  # the name of one of several launches cannot be torn
        assert max(map(len, lines)) <= WIDTH, kernel
        assert all(text.count(index) < 2 for index in ("threadIdx.x", "blockIdx.x")), kernel
        for m in re.finditer(r"^( *)\w+ (\w+) = (thread (?:>> 5|& 31));\n", text, re.M):
            scope = re.split(rf"^(?!{m[1]})", text[m.end():], maxsplit=1, flags=re.M)[0]
            assert not re.search(rf"(?<!\)){m[3]}", scope), f"{kernel}: {m[3]} in place of {m[2]}"


@pytest.mark.parametrize("name", NAMES)
def test_each_kernel_has_notes(name: str):
    found = {kernel: notes(text) for kernel, text in kernels(text_of(name)).items()}
    assert found and all(found.values()), [kernel for kernel, own in found.items() if not own]
    for function, phases in PHASES.get(name, {}).items():
        (own,) = (n for kernel, n in found.items() if kernel.split("_0")[0] == function)
        rest = iter(own)
        assert all(any(note.startswith(phase) for note in rest) for phase in phases), (function, own)


@pytest.mark.parametrize("name", NAMES)
def test_notes_leave_nothing_in_what_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch):
    program = known(name)[1]
    source = cuda.lower(program, ARCH)[1]
    assert NOTE not in source and NOTE in "".join(function.script() for function in program.functions.values())
    monkeypatch.setattr(Builder, "note", lambda self, text: None)
    without = made(name)[1]
    assert NOTE not in "".join(function.script() for function in without.functions.values())
    cuda._latest.clear()
    assert cuda.lower(without, ARCH)[1] == source


def results(name: str, folder: Path, *changes: Callable[[str], str]) -> list[list[np.ndarray]]:
    (task, program), found = known(name), []
    w = task.workload
    given = inputs(w.cell, (w.seq, w.batch, w.input, w.hidden), w.dtype, task.graph.parameters,
                   tuple(task.graph.states))
    for number, change in enumerate(changes):
        (own := folder / str(number)).mkdir()
        y, after = Emulated(program, own, change=change).run(*given)
        found.append([y, *after.values()])
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_compiled_text_does(name: str, tmp_path: Path):
    for ours, theirs in zip(*results(name, tmp_path, str, lambda _: compilable(text_of(name))), strict=True):
        assert np.isfinite(ours.astype(np.float32)).all() and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_as_the_compiled_text_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    schedule, cell, sizes, dtype, traversal = TRAINED[name]
    found = []
    for kind in ("compiled", "read"):
        (folder := tmp_path / kind).mkdir()
        step = Step(folder, schedule, cell, sizes, dtype, traversal)
        found.append(step.run(step.arguments(*sizes[:2])))
        monkeypatch.setattr(cuda_on_cpu, "lower", lambda program, arch: (
            cuda.lower(program, arch)[0], compilable(cuda.readable(program, arch))))
    for key, ours in found[0].items():
        assert ours.tobytes() == found[1][key].tobytes(), key


def test_the_text_of_a_kernel(same_as_file: Callable[[str, str], None]):
    same_as_file("persistent_lstm.cu", kernels(text_of("l2"))["persistent"] + "\n")


def test_the_command_prints_it():
    layer = ["--cell", "lstm", "--hidden", "40", "--input", "16", "--target", ARCH, "--schedule", "persistent"]
    result = CliRunner().invoke(main, ["compile", *layer, "--emit", "cuda"])
    assert result.exit_code == 0, result.output
    (kernel,) = (text for name, text in kernels(result.output).items() if name == "persistent")
    assert notes(kernel) and "(int)threadIdx.x" in kernel and "&& !" not in kernel


@pytest.mark.parametrize(("line", "cleared"), [
    ("  y = (a + (b * c));", "  y = a + b * c;"), ("y = ((a - b) - (c - d));", "y = a - b - (c - d);"),
    ("y = (a + (b + c));", "y = a + (b + c);"),  # sums of floats keep their order
    ("y = ((a * b) / c);", "y = (a * b) / c;"), ("y = (a / (b / c));", "y = a / (b / c);"),
    ("y = ((t & 63) >> 3);", "y = (t & 63) >> 3;"), ("y = (((int)t) & 7);", "y = (int)t & 7;"),
    ("y = ((float)(a + b));", "y = (float)(a + b);"), ("y = (-(-b));", "y = -(-b);"),
    ("f((&(s[(a + 1)])), ((a < b) ? (c + 1) : 0));", "f(&s[a + 1], a < b ? c + 1 : 0);"),
    ("y = ((a ? b : c) ? d : (e ? f : g));", "y = (a ? b : c) ? d : (e ? f : g);"),
    ("if (!((a < b))) { break; }", "if (!(a < b)) { break; }"),
    ("y = ((a || b) && c);", "y = (a || b) && c;"), ("y = ((a && b) || c);", "y = (a && b) || c;"),
    ("y = (((float*)p)[0]);", "y = ((float*)p)[0];"), ("y = ((*(uint*)(p + 1)) | 1);", "y = *(uint*)(p + 1) | 1;"),
    ("y = (a - (b ? c : d));", "y = a - (b ? c : d);"), ("y = (1.5e-05f * (-2.0f));", "y = 1.5e-05f * -2.0f;")])
def test_parentheses_that_say_nothing(line: str, cleared: str):
    assert clear(line) == cleared


def test_parentheses_of_random_expressions_may_go():
    rng, values = np.random.default_rng(0), {"a": 5, "b": 3, "c": 12, "d": 7}
    def drawn(depth: int) -> str:
        if not depth or rng.random() < 0.1:
            return str(rng.choice([*values, "2", "9"]))
        return f"({drawn(depth - 1)} {rng.choice(['+', '-', '*', '&', '|', '^', '>>', '%', '/'])} {drawn(depth - 1)})"

    def value_of(text: str) -> int | None:
        try:
            return int(eval(text.replace("/", "//"), {}, dict(values)))
        except (ZeroDivisionError, ValueError):
            return None

    shorter = 0
    for _ in range(500):
        text = drawn(4)
        made = clear(f"y = {text};")[4:-1]
        shorter += len(made) < len(text)
        assert value_of(made) == value_of(text), (text, made)
    assert shorter > 250


def test_lines_are_wrapped_where_little_is_torn():
    line = "    float value = " + " + ".join(f"first_{i}[second * 3 + third]" for i in range(12)) + ";"
    found = list(wrapped(line))
    assert all(len(part) <= WIDTH for part in found) and len(found) > 2
    assert all(part.startswith(" " * 8 + "+ first_") for part in found[1:])  # between terms, not within brackets
    assert " ".join(part.strip() for part in found) == line.strip()
    text = '  asm("' + "add.f32 %0, %1, %2; " * 20 + '" : "=r"(a) : "r"(b));'
    assert compilable("\n".join(wrapped(text))) == text and max(map(len, wrapped(text))) <= WIDTH
    whole = "        && " + "a" * WIDTH + ";"  # there is no place to tear it but before its first word
    assert list(wrapped(whole)) == [whole]


@pytest.mark.parametrize("text", ["0x1.5p-3f/*1.640625e-01*/", "0x1.99999ap-4f/*1.000000e-01*/",
                                  "0x1.921fb54442d18p+1/*3.14*/"])
def test_numbers_are_the_same_in_decimal(text: str):
    bits = np.float32 if "f/" in text else float
    assert bits(readable._FLOAT.sub(readable._decimal, text).rstrip("f")) == bits(
        float.fromhex(text.split("/")[0].rstrip("f")))


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
    task, made = task_of("lstm", SHAPES[4], "bfloat16"), all_schedules()[schedule]
    source = lower(made.program(task, made.plan(task, made.default(task))), TINY.arch)[1]
    kernels = source[source.index('extern "C"'):]
    assert {"gate__5", "cell__0", "state__0"} <= set(re.findall(r"float (\w+) = ", kernels))
    assert not re.findall(r"\b(?:v|_ptr)(?:_\d+)?\b", kernels), "a variable without a name"


def test_the_code_in_the_docs_is_what_is_generated():
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
        task = Task(Workload(one.name, *sizes[::-1], "float16"), analyse(one, sizes[2], sizes[3]), TINY)
        program = made.program(task, made.plan(task, made.default(task)))
        compile_cubin(lower(program, TINY.arch)[1], TINY.arch)
        x, states, weights = inputs("plain", sizes, "float16", analyse(PLAIN, *sizes[2:]).parameters, PLAIN.states)
        states = dict(zip(one.states, states.values(), strict=True))
        weights = dict(zip(one.names, weights.values(), strict=True))
        (tmp_path / one.name).mkdir()
        y, after = Emulated(program, tmp_path / one.name).run(x, states, weights, {}, 1)
        found.append((y, *(after[name] for name in one.states)))
    assert all((a == b).all() for a, b in zip(*found, strict=True))
