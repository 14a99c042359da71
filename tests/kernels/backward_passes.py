"""Kernels of the backward pass, emulated, with what they read and write given by name: what tests of them share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cuda_on_cpu import DTYPES, GUARD, Emulated, pack

from ecornn.program import PACKED, WORKSPACE, Buffer, Extent, Program
from ecornn.schedules.base import Component

Arrays = dict[str, np.ndarray]


class Passes:
    """A piece of a program, compiled for this CPU; ``given`` are shapes and types of what it needs beside its own;
    ``more`` goes to ``Emulated``."""

    def __init__(self, part: Component, folder: Path, given: Mapping[str, tuple[tuple[int, ...], str]],
                 **more: Any) -> None:
        self.given = given
        own = {b.name: b for b in part.buffers}
        assert len(own) == len(part.buffers), "a buffer twice"
        others = [Buffer(n, WORKSPACE, kind, Extent(int(np.prod(shape)))) for n, (shape, kind) in given.items()
                  if n not in own]
        self.program = Program.running(dict(part.functions), (*part.buffers, *others), part.calls)
        self.emulated = Emulated(self.program, folder, **more)

    def run(self, steps: int, batch: int, values: Mapping[str, np.ndarray],
            parameters: Mapping[str, np.ndarray] | None = None, made: Mapping[str, tuple[int, ...]] | None = None,
            twice: bool = True, add: bool = True) -> Arrays:
        """All buffers afterwards, those of ``given`` and ``made`` in their shape. What is not among ``values`` holds
        NaN before, and a guard lies behind each. ``twice``: that a second run leaves the same bits;
        ``add``: the scalar of this name."""
        found = self._once(steps, batch, values, parameters or {}, made or {}, add)
        if twice:
            again = self._once(steps, batch, values, parameters or {}, made or {}, add)
            for name in self.given:
                assert found[name].tobytes() == again[name].tobytes(), f"{name} differs in a second run"
        return found

    def _once(self, steps: int, batch: int, values: Mapping[str, np.ndarray], parameters: Mapping[str, np.ndarray],
              made: Mapping[str, tuple[int, ...]], add: bool) -> Arrays:
        memory: Arrays = {}
        for b in self.program.buffers:
            if b.role == PACKED:
                assert b.packing is not None
                memory[b.name] = pack(b.packing, parameters).reshape(-1)
                assert memory[b.name].size == b.extent.at(0), b.name
                continue
            raw = np.full(b.extent.at(steps) * DTYPES[b.dtype].itemsize + GUARD, 0xFF, np.uint8)
            raw[-GUARD:] = 0xA5
            memory[b.name] = raw.view(DTYPES[b.dtype])
            if b.name in values:
                value = np.ascontiguousarray(values[b.name]).astype(DTYPES[b.dtype])
                memory[b.name][:value.size] = value.reshape(-1)
        self.emulated.carry_out(memory, steps, batch, add=add)
        for b in self.program.buffers:
            if b.role != PACKED:
                assert (memory[b.name].view(np.uint8)[-GUARD:] == 0xA5).all(), f"{b.name} was written beyond its end"
        shapes = {n: shape for n, (shape, _) in self.given.items()} | dict(made)
        return {n: memory[n][:int(np.prod(shapes[n]))].reshape(shapes[n]) if n in shapes else memory[n]
                for n in memory}
