"""Workspaces in the place of others that are not used any more."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from ecornn.program import (
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
    Relay,
    Wave,
    WaveLayer,
    every,
    launches,
    mapped,
)
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
