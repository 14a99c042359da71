"""The program of a stack, from those of its sequences.

Sequences run one after the other, or some at the same time. y of a layer is a workspace, and x of the next one. Equal
functions are kept once and launched with other buffers; sequences with one program share its workspaces, unless they
run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from msgspec import structs

from ecornn.program import (
    Beside,
    Buffer,
    Call,
    Extent,
    Fill,
    Launch,
    Loop,
    Parallel,
    Program,
    Wave,
    WaveLayer,
    chunk_extent,
)
from ecornn.workload import SERIAL, Overlap, Part, Stack, Workload


def compose(stack: Stack, whole: Workload, programs: Sequence[Program], overlap: Overlap = SERIAL) -> Program:
    """One program of all, the ``programs`` of ``stack.parts(whole)`` in order, which run as ``overlap`` says.

    Its buffers are the call's ``x``, ``y``, ``lengths``, ``resets`` and ``sequences``, and by the part's label its
    states and packed weights: ``l1_reverse_h_in``. Weights are packed from parameters of such a prefix.
    """
    if stack.count == 1:
        return programs[0]
    parts = stack.parts(whole)
    # a program, and the place of its layer among those at the same time -> the prefix of its workspaces
    owners: dict[tuple[int, int], str] = {}
    functions: dict[str, Any] = {}
    buffers: dict[str, Buffer] = {}
    sequences: list[WaveLayer] = []
    for part, program in zip(parts, programs, strict=True):
        owner = owners.setdefault((id(program), part.layer % overlap.depth), f"s{len(owners)}_")
        names = {}
        for old in program.buffers:
            new = _placed(old, part, stack, owner, overlap)
            names[old.name], buffers[new.name] = new.name, new
        if "lengths" in names and overlap.depth > 1:
            names["lengths"] = "remaining"
        known = {name: _keep(functions, name, f) for name, f in program.functions.items()}
        calls = tuple(_renamed(call, names, known) for call in program.calls)
        widths = {"x": part.workload.input, "y": part.place.y_width(part.workload.hidden), "resets": 1, "lengths": 1}
        ends = [[names[b.name] for b in program.buffers if b.role == role] for role in ("state_in", "state_out")]
        rows = {names[b.name]: widths[b.role] for b in program.buffers if b.role in widths}
        sequences.append(WaveLayer(calls, rows, tuple(zip(*ends, strict=True))))
    notes = {f"{p.label} {k}": v for p, program in zip(parts, programs, strict=True)
             for k, v in program.notes.items()}
    calls = _arranged(sequences, overlap)
    if "lengths" in buffers and overlap.depth > 1:  # a chunk has lengths of its own
        from ecornn.schedules.timeline import remaining_lengths

        function, buffer, launch = remaining_lengths(whole.batch)
        functions["remaining"], buffers["remaining"] = function, buffer
        calls = launch, *calls
    # groups of as many columns lie within the groups of every part
    return Program(functions, tuple(buffers.values()), calls, notes, gcd(*(p.together for p in programs)))


def _arranged(sequences: list[WaveLayer], overlap: Overlap) -> tuple[Call, ...]:
    if overlap.kind == "directions":
        return tuple(Beside((one.calls, other.calls))
                     for one, other in zip(sequences[::2], sequences[1::2], strict=True))
    calls: list[Call] = []
    for first in range(0, len(sequences), overlap.depth):
        group = tuple(sequences[first:first + overlap.depth])
        calls += [Wave(group, overlap.chunks, overlap.least)] if len(group) > 1 else group[0].calls
    return tuple(calls)


def parameter_prefix(stack: Stack, part: Part) -> str:
    """What a part's parameters are called by, before the cell's own name."""
    return f"{part.label}." if stack.count > 1 else ""


def _placed(b: Buffer, part: Part, stack: Stack, owner: str, overlap: Overlap) -> Buffer:
    """A buffer of a part as one of the stack."""
    work = part.workload
    if (b.role == "x" and part.layer > 0) or (b.role == "y" and part.layer < stack.layers - 1):
        between = part.layer - (b.role == "x")  # all layers at a time write one each, and the first reads another
        extent = Extent(0, work.batch * part.place.y_width(work.hidden))
        return Buffer(f"between_{between % (overlap.depth + 1)}", "workspace", b.dtype, extent)
    if b.role == "workspace":
        in_chunks = overlap.depth > 1 and stack.layers % overlap.depth != 1  # a layer alone runs whole
        extent = chunk_extent(b.extent, overlap.chunks, overlap.least) if in_chunks else b.extent
        return structs.replace(b, name=owner + b.name, extent=extent)
    if b.role in ("x", "y", "lengths", "resets", "sequences"):
        return b
    packing = b.packing
    if packing is not None:
        prefix = parameter_prefix(stack, part)
        sources = tuple((prefix + n if n else n, gate) for n, gate in packing.sources)
        packing = structs.replace(packing, sources=sources)
    return structs.replace(b, name=f"{part.label}_{b.name}", packing=packing)


def _keep(functions: dict[str, Any], name: str, function: Any) -> str:
    """The name of an equal function among ``functions``, to which it is added if there is none."""
    from tvm_ffi import structural_equal

    kept, number = name, 0
    while kept in functions:
        if structural_equal(functions[kept], function):
            return kept
        number += 1
        kept = f"{name}_v{number}"
    functions[kept] = function
    return kept


def _renamed(call: Call, names: dict[str, str], known: dict[str, str]) -> Call:
    if isinstance(call, Fill):
        return replace(call, buffer=names[call.buffer])
    if isinstance(call, Loop):
        return Loop(tuple(_launch(one, names, known) for one in call.calls))
    if isinstance(call, Parallel):
        given = {parameter: names[buffer] for parameter, buffer in call.names.items()}
        return replace(call, function=known[call.function], names={**names, **given})
    assert isinstance(call, Launch), "a sequence runs in one stream"
    return _launch(call, names, known)


def _launch(call: Launch, names: dict[str, str], known: dict[str, str]) -> Launch:
    return replace(call, function=known[call.function], names=names)
