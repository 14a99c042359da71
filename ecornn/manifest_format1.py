"""Manifests of format 1, for modules that were compiled before format 2.

There ``role`` says of a buffer what ``tensor`` says now, a state's name and sequence are read from the buffer's name,
and ``run``, the only entry, takes all buffers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ecornn.program import RUN, TENSORS, Buffer, Extent, Packing
from ecornn.workload import SINGLE, Stack, Workload

FORMAT = 1


class _Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    role: str
    dtype: str
    extent: Extent = Extent()
    packing: Packing | None = None


class _Manifest(msgspec.Struct, frozen=True):
    """What is needed to read the buffers."""

    workload: Workload
    states: tuple[str, ...]
    buffers: tuple[_Buffer, ...]
    stack: Stack = SINGLE


def converted(text: str) -> dict[str, Any]:
    """The fields of the present format from a manifest's JSON; ``msgspec.MsgspecError`` where it is not of format 1."""
    old, fields = msgspec.json.decode(text, type=_Manifest), msgspec.json.decode(text)
    buffers, whose = [], _states(old)
    for b in old.buffers:
        if b.role in TENSORS:
            state, part = whose.get(b.name, (None, 0))
            role, tensor = TENSORS[b.role].role, b.role
            buffers.append(Buffer(b.name, role, b.dtype, b.extent, b.packing, tensor, state, part))
        else:
            buffers.append(Buffer(b.name, b.role, b.dtype, b.extent, b.packing))
    return fields | {"buffers": msgspec.to_builtins(buffers), "entries": {RUN: [b.name for b in old.buffers]}}


def _states(old: _Manifest) -> dict[str, tuple[str, int]]:
    """Name of a buffer -> the state that it holds, and the number of its sequence."""
    found: dict[str, tuple[str, int]] = {}
    for part in old.stack.parts(old.workload):
        prefix = f"{part.label}_" if old.stack.count > 1 else ""
        for state in old.states:
            found |= {f"{prefix}{state}_{end}": (state, part.number) for end in ("in", "out")}
    return found
