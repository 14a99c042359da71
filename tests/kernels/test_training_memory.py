"""What a training step takes on a GPU: sizes of programs that are only made, and which memory a call points to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ecornn.compiler import _complete, plan
from ecornn.manifest import Manifest
from ecornn.program import BACKWARD, FORWARD, KEPT, WORKSPACE, Program
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.layer import Kept, Training
from ecornn.runtime.memory import GivenMemory, HostMemory

MIB = 1 << 20


def made(cell: str, seq: int, keep: str = "gates", hidden: int = 768, layers: int = 1) -> tuple[Program, Manifest]:
    return _complete(plan(cell, hidden=hidden, input=hidden, batch=16, seq=seq, dtype="bfloat16", training=True,
                          keep=keep, target="sm_90a", layers=layers))


def training(manifest: Manifest, calls: list[Any]) -> Training:
    """Of a module that does nothing but to note its arguments."""
    library = SimpleNamespace(forward=None, backward=lambda *arguments: calls.append(arguments))
    packed = {b.name: 0 for b in manifest.buffers if b.role == "packed"}
    return Training(SimpleNamespace(manifest=manifest, packed=packed, threads=1, device=0, library=library))


@pytest.mark.parametrize(("cell", "seq", "most"), [("lstm", 1024, 174.08), ("gru", 1024, 182), ("lstm", 4096, 621)])
def test_a_step_that_keeps_gates(cell, seq, most):
    """y, what is kept, float32 gradients and the larger one of two workspaces, MiB; the gradient of x lies in what is
    kept. Workspaces are a tenth of that, but in GRU, where a chunk would be too short."""
    program, manifest = made(cell, seq)
    own, buffers = training(manifest, []), {b.name: b for b in program.buffers}
    kept, room = own.kept_bytes(seq, 16), own.workspace_bytes(seq)
    y, gradients = seq * 16 * 768 * 2, {"lstm": 4, "gru": 3}[cell] * 768 * (2 * 768 + 2) * 4
    assert program.dx_in is not None and buffers[program.dx_in].nbytes(seq) == y
    assert (y + kept + gradients + room) / MIB < most
    assert room < (0.1 if cell == "lstm" else 0.11) * kept
    apart = sum(b.nbytes(seq) for n in program.entries[BACKWARD].takes if (b := buffers[n]).role == WORKSPACE)
    assert room < apart < 1.6 * room  # a caller's memory stays as it is


def test_whose_memory_is_written():
    """What is kept, where that is the layer's; else a workspace."""
    _, manifest = made("lstm", 512, hidden=256)
    calls: list[Any] = []
    own, arrays = training(manifest, calls), arrays_of(np.empty(1), "x")
    size = own.kept_bytes(512, 16)
    takes = manifest.entries[BACKWARD]
    found = []
    callers = HostMemory(size)
    for memory in (HostMemory(size), GivenMemory(callers, callers.pointer, size)):
        kept = Kept(own._caller, arrays, (np.empty(0), 0), (None, 0), [(None, 0)] * 2, {}, memory, 512, 16, 16)
        own.backward(kept, (None, 0), [(None, 0)] * 2, (None, 0), [(None, 0)] * 2,
                     [(None, 0)] * len(manifest.parameters))
        at = dict(zip(takes, calls.pop()[4:], strict=True))
        found.append(at["backward_outputs"] == at["values_kept"])
        inside = [n for n in takes if memory.pointer <= at[n] < memory.pointer + size]
        assert {*inside} == {b.name for b in manifest.buffers if b.role == KEPT} | {*["backward_outputs"] * found[-1]}
    assert found == [True, False]


def test_chunks_of_several_layers():
    """Every launch names what its entry takes: nothing that lies in another one's place any more."""
    program, _ = made("lstm", 1024, layers=2)
    assert not program.in_place and {FORWARD, BACKWARD} <= {*program.entries}
