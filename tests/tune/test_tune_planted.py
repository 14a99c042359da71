"""An endless kernel, a wild store, a wrong output, too little memory, planted in a run: each costs one trial."""

import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ecornn.build.cuda import lower
from ecornn.cells import get
from ecornn.program import Buffer, Extent, Fill, Launch, Parallel, Program
from ecornn.schedules import all_schedules
from ecornn.schedules.cpu.emit import Emitter
from ecornn.schedules.step.fused_step import FusedStep
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune import building
from ecornn.tune.building import Build
from ecornn.tune.log import read
from ecornn.tune.pool import Entries
from ecornn.tune.session import tune
from ecornn.workload import Workload

FOLDER = "ECORNN_PLANTED"  # to the build processes: where they agree on who has which fault
FAR = 1 << 36  # elements: beyond the memory of a GPU,
CPU_FAR = 1 << 46  # and beyond what a CPU can address
FLAG = Buffer("flag", "workspace", "uint32", Extent(1))


def followed_by(program: Program, body: Callable[[Any, Any], None], buffer: Buffer, size: int,
                first: tuple[Fill, ...] = ()) -> Program:
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    with IRBuilder() as builder, T.prim_func():
        T.func_name("planted")
        given = T.arg(buffer.name, T.buffer((T.int64(size),), buffer.dtype))
        T.device_entry()
        T.cta_id([1])
        body(T, (given, T.thread_id([32])))
    known = buffer.name in {b.name for b in program.buffers}
    return Program.running({**program.functions, "planted": builder.get()},
                           program.buffers if known else (*program.buffers, buffer),
                           (*program.calls, *first, Launch("planted", 1, 32)))


def endless(program: Program) -> Program:
    def body(T: Any, given: Any) -> None:
        word = T.alloc_buffer((1,), "uint32", scope="local")
        T.buffer_store(word, T.uint32(0), [0])
        with T.While(word[0] == 0):
            T.evaluate(T.ptx["ld.acquire.gpu.global.u32"](word[0], given[0].ptr_to([0])))
    return followed_by(program, body, FLAG, 1, (Fill("flag", 0, Extent(1)),))


def astray(program: Program) -> Program:
    def body(T: Any, given: Any) -> None:
        T.buffer_store(given[0], T.uint32(1), [T.int64(FAR)])
    return followed_by(program, body, FLAG, 2 * FAR)


def wrong(program: Program) -> Program:
    y = next(b for b in program.buffers if b.tensor == "y")
    def body(T: Any, given: Any) -> None:
        T.buffer_store(given[0], T.cast(T.float32(3.0), y.dtype), [given[1]])
    return followed_by(program, body, y, 32)


def needing(program: Program, buffer: Buffer) -> Program:
    return Program.running(program.functions, (*program.buffers, buffer), program.calls)


Fault = Callable[[Program], Program]
FAULTS: dict[str, Fault] = {
    "endless": endless, "astray": astray, "wrong": wrong,
    "vast": lambda program: needing(program, Buffer("vast", "workspace", "uint32", Extent(FAR)))}


def on_cpu(write: Callable[[Any, Any], None]) -> Fault:
    def fault(program: Program) -> Program:
        e = Emitter(8)
        for scalar in ("thread", "threads", "T", "B"):
            e.scalar(scalar)
        write(e, e.pointer("y"))
        return Program.running({**program.functions, "planted": e.function("planted")}, program.buffers,
                               (*program.calls, Parallel("planted")))
    return fault


CPU_FAULTS: dict[str, Fault] = {
    "endless": on_cpu(lambda e, y: e.call("pause")),  # until a signal comes
    "astray": on_cpu(lambda e, y: e.store(y, FAR, e.tirx.const(1.0, "float32"))),
    "wrong": on_cpu(lambda e, y: e.vstore(y, 0, e.splat(3.0))),
    "vast": lambda program: needing(program, Buffer("vast", "workspace", "float32", Extent(CPU_FAR)))}


def planted(config: Mapping[str, Any]) -> str | None:
    """Every second configuration that is built has a fault, the four kinds in turn; ``FOLDER`` has a file for each."""
    known, text = Path(os.environ[FOLDER]), json.dumps(config, sort_keys=True)
    for number in itertools.count():
        with contextlib.suppress(FileExistsError), (known / str(number)).open("x") as file:
            file.write(text)
            break
        if (known / str(number)).read_text() == text:
            break
    return [*FAULTS][number // 2 % len(FAULTS)] if number % 2 else None


def build(request: Build) -> str:
    schedule, fault = all_schedules()[request.schedule], planted(request.config)
    faults = FAULTS if request.device.kind == "cuda" else CPU_FAULTS
    if fault is None:
        return building.build(request)
    original = schedule.program
    schedule.program = lambda task, config: faults[fault](original(task, config))  # type: ignore[method-assign]
    try:
        digest, module = building.generate(request)  # the cache has modules by their configuration, not by the fault
    finally:
        del schedule.program
    Path(request.out).write_bytes(module)
    if fault == "endless":
        Path(request.out).with_suffix(".endless").touch()  # see short_if_endless of conftest.py
    return digest


TIMEOUT, HUNG, WRONG = 400.0, "run: took longer than 4 s and was stopped", "wrong output: relative error"
SAID = {"cuda": {"endless": HUNG, "astray": "illegal memory access|ILLEGAL_ADDRESS", "wrong": WRONG,
                 "vast": "out of memory|OUT_OF_MEMORY"},
        "cpu": {"endless": HUNG, "astray": "run: the process crashed with signal SIGSEGV", "wrong": WRONG,
                "vast": "run: MemoryError"}}


def program():
    task = make_task(get("lstm"), Workload("lstm", 64, 64, 4, 20, "bfloat16"), resolve("sm_90a"))
    return FusedStep().program(task, FusedStep().plan(task, FusedStep().default(task)))


@pytest.mark.parametrize(("fault", "text"), [("endless", "ptx_ld_acquire_gpu_global_u32"), ("astray", "68719476736"),
                                             ("wrong", "bfloat16")])
def test_what_is_planted_is_a_kernel(fault: str, text: str):
    kernels, source = lower(FAULTS[fault](program()), "sm_90a")
    assert "planted" in kernels and text in source[source.index("planted_kernel"):]


def test_what_is_planted_needs_more_memory_than_there_is():
    assert sum(b.nbytes(20) for b in FAULTS["vast"](program()).buffers) > 2 * resolve("sm_90a").memory


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_fault_costs_one_trial(target: str, tmp_path, monkeypatch, short_if_endless):
    monkeypatch.setenv(FOLDER, str(tmp_path / "planted"))
    (tmp_path / "planted").mkdir()
    layer = {"dtype": "bfloat16", "schedule": "fused_step", "trials": 32} if target == "cuda" else {"trials": 16}
    result = tune("lstm", hidden=64, batch=4, seq=20, target=target, timeout=TIMEOUT, early_stop=False,
                  output=tmp_path / "log.jsonl", entries=Entries(build="test_tune_planted:build"), **layer)
    trials = [t for t in read(tmp_path / "log.jsonl").trials() if t.stage == "search"]
    seen = Counter(planted(t.config) for t in trials)
    # An eighth of all for each fault; what is built last may be cut off.
    assert len(trials) == layer["trials"] and all(seen[fault] > len(trials) // 16 for fault in FAULTS), seen
    for trial in trials:
        fault = planted(trial.config)
        assert (trial.times is None) == (trial.error is not None)
        assert re.search(SAID[target][fault], trial.error or "") if fault else trial.times, (fault, trial.error)
    assert result.best is not None and planted(result.best.config) is None
