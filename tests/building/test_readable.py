"""Code for people does what is compiled, uses what it declares, fits on a screen, and says what its phases are.

    pytest tests/building/test_readable.py --renew    writes persistent_lstm.cu anew
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from click.testing import CliRunner
from cuda_on_cpu import Emulated, inputs
from emulated import TINY, task_of, training_program
from msgspec.structs import replace
from test_backward_emulated import Step
from test_persistent_emulated import SMALL, cut
from test_persistent_wide import config_of

from ecornn.build import cuda, readable
from ecornn.build.readable import WIDTH, clear, without_notes, wrapped
from ecornn.cli import main
from ecornn.program import Program
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.schedules.builder import NOTE, Builder
from ecornn.workload import ALONE, Traversal

ARCH = "sm_90a"
LONGEST = 160
SIZES = (3, 3, 16, 40)  # T, B, I, H
# what is compiled, and changed knobs; each calls kernels that the others do not
CASES: dict[str, tuple[str, str, tuple[int, int, int, int], str, dict[str, Any]]] = {
    "l2": ("persistent", "lstm", SIZES, "bfloat16", {"math": "fast"}),
    "cluster": ("persistent", "lstm", SIZES, "float16", {"carrier": "cluster", "fences": "rare"}),
    "statistics": ("persistent", "lstm(layer_norm)", SIZES, "float16", {}),
    "workers": ("persistent", "lstm", (9, 3, 24, 40), "bfloat16", {"ahead": 0}),
    "mma": ("persistent_block", "lstm", SIZES, "float16", {}),
    "fma": ("persistent_block", "gru", SIZES, "float32", {}),
    "wide": ("persistent_wide", "lstm", (5, 3, 24, 40), "bfloat16", {}),
    "elementwise": ("elementwise", "indrnn", (19, 3, 16, 32), "float16", {}),
    "fused_step": ("fused_step", "lstm(layer_norm)", SIZES, "float32", {}),
    "layout_transform": ("layout_transform", "gru", SIZES, "float16", {}),
    "whole_step": ("whole_step", "lstm", (1, 3, 16, 40), "float16", {}),
}
TRAINED: dict[str, tuple[str, str, tuple[int, int, int, int], str, Traversal]] = {
    "outer_mma": ("persistent", "lstm", (5, 3, 6, 20), "float32", Traversal(lengths=True, resets=True)),
    "outer_wgmma": ("persistent", "gru", (4, 5, 8, 40), "float16", ALONE),
    "statistics": ("fused_step", "lstm(layer_norm)", (3, 2, 5, 9), "float32", ALONE),
}
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
    "fused_step": {"step": ("products", "epilogue"), "project": ("tiles", )},
    "layout_transform": {"step": ("products", "prologue", "main loop", "partial sums", "epilogue")},
    "whole_step": {"step": ("programmatic dependent launch", "MMA warps", "CTA barrier", "epilogue")},
}


def made(name: str) -> tuple[Task, Program]:
    schedule, cell, sizes, dtype, change = CASES[name]
    own = schedule.startswith("persistent")
    task, found = task_of(cell, sizes, dtype, SMALL if own else TINY), all_schedules()[schedule]
    kinds = {"persistent": lambda: cut(task, **change), "persistent_wide": lambda: config_of(**change)}
    config = kinds[schedule]() if schedule in kinds else found.default(task)
    assert found.check(task, config) is None
    return task, found.program(task, found.plan(task, config))


def trained(name: str) -> Program:
    schedule, cell, sizes, dtype, traversal = TRAINED[name]
    return training_program(all_schedules()[schedule],
                            task_of(cell, sizes, dtype, TINY, replace(traversal, keep="states")))


@cache
def every() -> dict[str, Program]:
    """All programs."""
    return {name: made(name)[1] for name in CASES} | {f"trained_{name}": trained(name) for name in TRAINED}


NAMES = [*CASES, *(f"trained_{name}" for name in TRAINED)]


@cache
def text_of(name: str) -> str:
    return cuda.readable(every()[name], ARCH)


def kernels(text: str) -> dict[str, str]:
    """Functions of the program, and the definitions of their kernels."""
    found = re.finditer(r'^extern "C" __global__ void [^{;]*?(\w+)_kernel\([^{;]*\) \{\n.*?^}', text, re.M | re.S)
    return {match[1]: match[0] for match in found}


def notes(kernel: str) -> list[str]:
    return [line.strip()[3:] for line in kernel.split("\n") if line.lstrip().startswith("// ")]


def compilable(text: str) -> str:
    """A text for people for those who look for whole lines: what was wrapped, and strings, as one again."""
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
        assert max(map(len, text.split("\n"))) <= WIDTH, kernel
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
    program = every()[name]
    source = cuda.lower(program, ARCH)[1]
    assert NOTE not in source
    assert NOTE in "".join(function.script() for function in program.functions.values())
    monkeypatch.setattr(Builder, "note", lambda self, text: None)
    without = trained(name.removeprefix("trained_")) if name.startswith("trained") else made(name)[1]
    assert NOTE not in "".join(function.script() for function in without.functions.values())
    cuda._latest.clear()
    assert cuda.lower(without, ARCH)[1] == source


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_compiled_text_does(name: str, tmp_path: Path):
    task, program = made(name)
    w = task.workload
    x, states, parameters = inputs(w.cell, (w.seq, w.batch, w.input, w.hidden), w.dtype, task.graph.parameters,
                                   tuple(task.graph.states))
    found = []
    for kind, change in (("compiled", str), ("read", lambda _: compilable(text_of(name)))):
        (folder := tmp_path / kind).mkdir()
        y, after = Emulated(program, folder, change=change).run(x, states, parameters)
        found.append([y, *after.values()])
    for ours, theirs in zip(*found, strict=True):
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


def test_a_fault_in_the_text_would_be_seen(tmp_path: Path):
    """Of a read text with another sign, so that the comparison above is one."""
    task, program = made("mma")
    w = task.workload
    sizes = w.seq, w.batch, w.input, w.hidden
    given = inputs(w.cell, sizes, w.dtype, task.graph.parameters, tuple(task.graph.states))
    text = compilable(text_of("mma"))
    broken = re.sub(r"(float gate__2 = \S+) \+ ", r"\1 - ", text, count=1)
    assert broken != text
    found = []
    for kind, source in (("right", text), ("wrong", broken)):
        (folder := tmp_path / kind).mkdir()
        found.append(Emulated(program, folder, change=lambda _, source=source: source).run(*given)[0])
    assert found[0].tobytes() != found[1].tobytes()


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
    """The value of an expression with a pair around each operator, as Python computes it with C's levels."""
    rng = np.random.default_rng(0)
    values = {"a": 5, "b": 3, "c": 12, "d": 7}

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


def test_what_is_compiled_has_no_notes():
    assert without_notes(f'a;\n  {NOTE}("MMA warps, prologue");\nb;\n') == "a;\nb;\n"
