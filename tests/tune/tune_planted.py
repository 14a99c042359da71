"""Plants faults in some candidates of a real tuning run, on a GPU or this CPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ecornn.program import Buffer, Extent, Fill, Launch, Parallel, Program
from ecornn.tune import building
from ecornn.tune.building import Build

FOLDER = "ECORNN_PLANTED"  # to the build processes: where they agree on who has which fault
FAR = 1 << 36  # elements: beyond the memory of a GPU,
CPU_FAR = 1 << 46  # and beyond what a CPU can address


def followed_by(program: Program, body: Callable[[Any, Any], None], buffer: Buffer, size: int,
                first: tuple[Fill, ...] = ()) -> Program:
    """The program, and then a kernel of one warp: ``body`` of TVM's builder and ``buffer`` of that many elements."""
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
    """Waits for a word that nobody writes."""
    def body(T: Any, given: Any) -> None:
        word = T.alloc_buffer((1,), "uint32", scope="local")
        T.buffer_store(word, T.uint32(0), [0])
        with T.While(word[0] == 0):
            T.evaluate(T.ptx["ld.acquire.gpu.global.u32"](word[0], given[0].ptr_to([0])))

    flag = Buffer("flag", "workspace", "uint32", Extent(1))
    return followed_by(program, body, flag, 1, (Fill("flag", 0, Extent(1)),))


def astray(program: Program) -> Program:
    """Writes where no memory is."""
    def body(T: Any, given: Any) -> None:
        T.buffer_store(given[0], T.uint32(1), [T.int64(FAR)])

    return followed_by(program, body, Buffer("flag", "workspace", "uint32", Extent(1)), 2 * FAR)


def wrong(program: Program) -> Program:
    """Overwrites the beginning of y."""
    y = next(b for b in program.buffers if b.tensor == "y")

    def body(T: Any, given: Any) -> None:
        T.buffer_store(given[0], T.cast(T.float32(3.0), y.dtype), [given[1]])

    return followed_by(program, body, y, 32)


def vast(program: Program) -> Program:
    """Needs more memory than a GPU has."""
    return needing(program, Buffer("vast", "workspace", "uint32", Extent(FAR)))


def needing(program: Program, buffer: Buffer) -> Program:
    """The program with one more buffer."""
    return Program.running(program.functions, (*program.buffers, buffer), program.calls)


Fault = Callable[[Program], Program]
FAULTS: dict[str, Fault] = {"endless": endless, "astray": astray, "wrong": wrong, "vast": vast}


def on_cpu(write: Callable[[Any, Any], None]) -> Fault:
    """The program, and then a function on each thread: ``write`` of an emitter and y."""
    def fault(program: Program) -> Program:
        from ecornn.schedules.cpu.emit import Emitter

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
    """The fault of a configuration: every second one that is built has one, the four kinds in turn, whichever the
    search proposes. ``FOLDER`` has a file for each, whose name is its number."""
    known, text = Path(os.environ[FOLDER]), json.dumps(config, sort_keys=True)
    for number in itertools.count():
        with contextlib.suppress(FileExistsError), (known / str(number)).open("x") as file:
            file.write(text)
            break
        if (known / str(number)).read_text() == text:
            break
    return [*FAULTS][number // 2 % len(FAULTS)] if number % 2 else None


def build(request: Build) -> str:
    """As :func:`ecornn.tune.building.build`, but some candidates have a fault."""
    from ecornn.schedules import all_schedules

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
