"""Workspaces in the place of others that are not used any more; what a training step takes on a GPU: sizes of programs
that are only made, and which memory a call points to."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from ecornn.compiler import _complete, plan
from ecornn.manifest import Manifest
from ecornn.program import (
    BACKWARD,
    FORWARD,
    KEPT,
    WORKSPACE,
    Buffer,
    Call,
    Chunks,
    Concurrent,
    Extent,
    Fill,
    Launch,
    Leaf,
    Loop,
    Parallel,
    Program,
    Relay,
    Wave,
    WaveLayer,
    every,
    launches,
    mapped,
)
from ecornn.runtime.frameworks import arrays_of
from ecornn.runtime.layer import Kept, Training
from ecornn.runtime.memory import GivenMemory, HostMemory
from ecornn.schedules.base import Component
from ecornn.schedules.chunks import Uses, free_for, overlaid


def function(*parameters: str) -> Any:
    return SimpleNamespace(params=[SimpleNamespace(name=p) for p in parameters])


def launch(name: str, **names: str) -> Launch:
    return Launch(name, 1, 32, names=names)


def space(name: str, fixed: int = 0, per_step: int = 0, dtype: str = "float32") -> Buffer:
    return Buffer(name, WORKSPACE, dtype, Extent(fixed, per_step))


def test_one_lies_where_another_was():
    """What is made first is not needed when what is made third is; the second one goes on."""
    functions = {"first": function("T", "a", "b"), "second": function("T", "a", "c"), "third": function("b", "c", "d")}
    calls = (launch("first"), launch("second"), launch("third"))
    buffers = (space("a", per_step=4), space("b", per_step=4), space("c", per_step=4),
               space("d", per_step=16, dtype="float16"))
    made = overlaid(Component(functions, buffers, calls), 10, ())
    assert made.buffers == (space("a", per_step=8), space("b", per_step=4), space("c", per_step=4))
    assert [call.names.get("d") for call in made.calls] == [None, None, "a"]
    assert overlaid(Component(functions, buffers, calls), 10, ("d",)).buffers == buffers
    gone = overlaid(Component(functions, (*buffers[:3], space("d", fixed=1 << 20)), calls), 10, ())
    assert len(gone.buffers) == 4  # both in one would be as much, so that any T has room


def test_what_goes_on_between_chunks_stays_where_it_is():
    functions = {name: function("a", "b") for name in ("make", "take")} | {"end": function("sums")}
    one, other = launch("make", a="x", b="before"), launch("take", a="outputs", b="sums")
    buffers = tuple(space(n, 8) for n in ("before", "outputs", "sums", "state", "next"))
    chunk = Chunks((one, Concurrent(((other,), (launch("take", a="outputs", b="next"),)))), {}, (("state", "next"),), 8)
    made = overlaid(Component(functions, buffers, (Fill("sums", 0, Extent(8)), chunk, launch("end"))), 8, ())
    assert [b.name for b in made.buffers] == ["before", "sums", "state", "next"]
    (inner,) = (call for call in made.calls if isinstance(call, Chunks))
    branches = inner.calls[1].branches  # type: ignore[union-attr]
    assert [each.names["a"] for (each,) in branches] == ["before"] * 2


def test_what_a_result_may_be_written_over():
    uses = Uses({"read": function("kept", "other"), "make": function("dx", "other")})
    calls = (Chunks((launch("read"), launch("make")), {}, (), 8), launch("read", kept="late", other="late"))
    assert free_for("dx", uses, calls, ["kept", "other", "late"]) == ["kept"]


def test_a_walk_knows_every_kind_of_call():
    """Each kind of call, of which one has another inside: all launches are seen and replaced, and all buffers."""
    leaf = launch("kernel", into="a")
    rows = {"x": 3}
    kinds: dict[type, Any] = {
        Launch: leaf, Parallel: Parallel("kernel", {"into": "a"}), Fill: Fill("a", 0, Extent(8)), Loop: Loop((leaf,)),
        Relay: Relay((leaf,), "a", "b", "c", "d", 4), Concurrent: Concurrent(((leaf,), (leaf,))),
        Wave: Wave((WaveLayer((leaf,), rows, (("a", "b"),)),) * 2, 2, 8),
        Chunks: Chunks((leaf,), rows, (("a", "b"),), 8, in_place=(("a", "x"),))}
    assert {*kinds} == {kind for one in get_args(Call) for kind in (get_args(one) or [one])}
    counts = [1, 0, 0, 1, 1, 2, 2, 1]
    assert [len([*launches([call])]) for call in kinds.values()] == counts
    for call in kinds.values():
        assert mapped(call, lambda one: one) == call
        other = mapped(call, lambda one: replace(one, function="other"), str.upper)
        assert all(one.function == "other" for one in every([other]) if isinstance(one, Leaf))
        assert not {*re.findall(r"'[abcdx]'", repr(other))} - ({"'a'"} if "into" in repr(call) else set())
    for walk in (lambda call: [*every([call])], lambda call: mapped(call, lambda one: one)):
        with pytest.raises(TypeError, match="is no call of a program"):
            walk(SimpleNamespace(calls=()))


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
