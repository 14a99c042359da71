"""Plants a kernel that never ends in some candidates of a real tuning run on a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ecornn.program import Buffer, Extent, Fill, Launch, Program
from ecornn.tune import building
from ecornn.tune.building import Build, Built


def planted(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is one of those that never end: about one in four."""
    return hashlib.sha256(repr(sorted(config.items())).encode()).digest()[0] % 4 == 0


def endless(program: Program) -> Program:
    """The program, followed by a kernel that waits for a word that nobody writes."""
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    with IRBuilder() as builder, T.prim_func():
        T.func_name("spin")
        flag = T.arg("flag", T.buffer((T.int64(1),), "uint32"))
        T.device_entry()
        T.cta_id([1])
        T.thread_id([32])
        word = T.alloc_buffer((1,), "uint32", scope="local")
        T.buffer_store(word, T.uint32(0), [0])
        with T.While(word[0] == 0):
            T.evaluate(T.ptx["ld.acquire.gpu.global.u32"](word[0], flag.ptr_to([0])))
    return replace(program, functions={**program.functions, "spin": builder.get()},
                   buffers=(*program.buffers, Buffer("flag", "workspace", "uint32", Extent(1))),
                   calls=(*program.calls, Fill("flag", 0, Extent(1)), Launch("spin", 1, 32)))


def build(request: Build) -> Built:
    """As :func:`ecornn.tune.building.build`, but some kernels never end."""
    from ecornn.schedules import all_schedules

    schedule = all_schedules()[request.schedule]
    if not planted(request.config):
        return building.build(request)
    original = schedule.program
    schedule.program = lambda task, config: endless(original(task, config))  # type: ignore[method-assign]
    try:
        return building.build(request)
    finally:
        del schedule.program
