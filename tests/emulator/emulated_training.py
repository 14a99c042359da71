"""A training step of a program, emulated: both entries, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cuda_on_cpu import DTYPES, GUARD, Emulated, pack

from ecornn.program import BACKWARD, FORWARD, PACKED, TENSORS, Program


def train(program: Program, folder: Path, given: Mapping[str, Any], made: Mapping[str, int],
          parameters: Mapping[str, Any], steps: int, batch: int, arch: str = "sm_90a") -> dict[str, Any]:
    """What the two entries make of ``given``, arrays by the names of buffers, and of parameters in te shape: float64,
    by the names of buffers. ``made``: elements of those that have no extent. What is written holds NaN before, and has
    a guard behind it. The gradient of x, and workspaces, are written over what is kept where the program allows it."""
    memory: dict[str, Any] = {}
    for b in program.buffers:
        if b.role == PACKED:
            memory[b.name] = pack(b.packing, {n: v.astype(np.float32) for n, v in parameters.items()}).reshape(-1)
            continue
        content = given.get(b.name)
        count = made.get(b.name, b.extent.at(steps)) if content is None else content.size
        if b.tensor == "gradient":
            count = parameters[b.state].size
        raw = np.full(count * DTYPES[b.dtype].itemsize + GUARD, 0xFF, np.uint8)
        raw[-GUARD:] = 0xA5
        memory[b.name] = raw.view(DTYPES[b.dtype])
        if content is not None:
            memory[b.name][:count] = content.reshape(-1).astype(DTYPES[b.dtype])
    if program.dx_in:
        assert memory["dx"].nbytes == memory[program.dx_in].nbytes
        memory["dx"] = memory[program.dx_in]
    memory |= {own: memory[kept] for own, kept in program.in_place.items()}
    emulated = Emulated(program, folder, arch)
    for entry in (FORWARD, BACKWARD):
        emulated.carry_out({n: memory[n] for n in program.entries[entry].takes}, steps, batch, entry, add=False)
    assert all((memory[b.name].view(np.uint8)[-GUARD:] == 0xA5).all() for b in program.buffers if b.role != PACKED)
    return {b.name: memory[b.name][:-GUARD // b.itemsize].astype(np.float64) for b in program.buffers
            if b.tensor in TENSORS}


def check(found: Mapping[str, Any], wanted: Mapping[str, Any], limit: float) -> None:
    """That each is as near, relative to its norm."""
    for name, value in wanted.items():
        error = np.linalg.norm(found[name].reshape(-1) - value.reshape(-1)) / np.linalg.norm(value)
        assert error < limit, f"{name}: {error}"
