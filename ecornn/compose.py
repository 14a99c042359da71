"""The program of a stack, from those of its sequences.

Sequences run one after the other, or some at the same time. y of a layer is a workspace, and x of the next one. Equal
functions are kept once and launched with other buffers; sequences with one program share its workspaces, unless they
run at the same time.

A chunk of time is a call of the same kernels with fewer steps: on the rows of x, y and the masks from its first step
on, and from the states that the chunk before it left where the call's final states belong. So T stays free, and a call
that is too short for two chunks runs one layer after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from msgspec import structs

from ecornn.program import (
    BACKWARD,
    FORWARD,
    KEPT,
    RUN,
    TENSORS,
    WORKSPACE,
    Buffer,
    Call,
    Chunks,
    Concurrent,
    Entry,
    Extent,
    Leaf,
    Program,
    Wave,
    WaveLayer,
    chunk_extent,
    mapped,
)
from ecornn.workload import SERIAL, Overlap, Part, Stack, Workload

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

CORES = 132  # of kernels that belong to no sequence: they serve more or fewer
REMAINING = "remaining"  # lengths of what is left from each step on, which a chunk reads in place of lengths


def compose(stack: Stack, whole: Workload, programs: Sequence[Program], overlap: Overlap = SERIAL) -> Program:
    """One program of all, with the entries of the ``programs``, which are of ``stack.parts(whole)`` in order; the entry
    ``run`` goes as ``overlap`` says.

    Its buffers are those that all parts share, such as the call's ``x`` and ``lengths``, and each part's states and
    packed weights, named with the part's label: ``l1_reverse_h_in``. Weights are packed from parameters of such a
    prefix.
    """
    if stack.count == 1:
        return programs[0]
    parts = stack.parts(whole)
    # a program, and the place of its layer among those at the same time -> the prefix of its workspaces
    owners: dict[tuple[int, int], str] = {}
    functions: dict[str, PrimFunc] = {}
    buffers: dict[str, Buffer] = {}
    sequences: list[WaveLayer] = []
    running = {id(p): _running(p) for p in programs}
    for part, program in zip(parts, (running[id(p)] for p in programs), strict=True):
        owner = owners.setdefault((id(program), part.layer % overlap.depth), f"s{len(owners)}_")
        names = {}
        for old in program.buffers:
            new = _placed(old, part, stack, owner, overlap)
            names[old.name], buffers[new.name] = new.name, new
        if "lengths" in names and overlap.depth > 1:
            names["lengths"] = REMAINING
        known = {name: _keep(functions, name, f) for name, f in program.functions.items()}
        calls = tuple(_renamed(call, names, known) for call in program.entries[RUN].calls)
        sequences.append(WaveLayer(calls, _rows(part, program, names), _handed(program, names)))
    notes = {f"{p.label} {k}": v for p, program in zip(parts, programs, strict=True)
             for k, v in program.notes.items()}
    calls = _arranged(sequences, overlap)
    if "lengths" in buffers and overlap.depth > 1:  # a chunk has lengths of its own
        from ecornn.schedules.timeline import remaining_lengths

        function, buffer, launch = remaining_lengths(whole.batch)
        functions[REMAINING], buffers[REMAINING] = function, buffer
        calls = launch, *calls
    # groups of as many columns lie within the groups of every part
    run = Program.running(functions, buffers.values(), calls, notes, gcd(*(p.together for p in programs)))
    if FORWARD not in programs[0].entries:
        return run
    placed = _TrainingStack(stack, whole, programs, functions, overlap.kind == "directions")
    entries = {**run.entries, FORWARD: placed.entry(FORWARD), BACKWARD: placed.entry(BACKWARD)}
    return replace(run, buffers=tuple((buffers | placed.buffers).values()), entries=entries)


class _TrainingStack:
    """The entries ``forward`` and ``backward`` of a stack: y of a layer is kept, gradients of it are workspaces. The
    second direction of a layer adds its gradient of x to the first one's; or, where both go at the same time
    (``beside``), it has one of its own, which is added afterwards."""

    def __init__(self, stack: Stack, whole: Workload, programs: Sequence[Program], functions: dict[str, PrimFunc],
                 beside: bool) -> None:
        self.stack, self.whole, self.parts, self.programs = stack, whole, stack.parts(whole), programs
        self.functions, self.buffers, self.beside = functions, dict[str, Buffer](), beside
        self.owners = {program: f"t{n}_" for n, program in enumerate(dict.fromkeys(map(id, programs)))}

    def entry(self, name: str) -> Entry:
        """One of the two."""
        calls, taken = list[Call](), dict[str, None]()
        sequences, directions = list(zip(self.parts, self.programs, strict=True)), self.stack.directions
        layers = [sequences[n:n + directions] for n in range(0, len(sequences), directions)]
        for layer in layers if name == FORWARD else reversed(layers):
            each = [self.part(name, part, program) for part, program in layer]
            taken.update(dict.fromkeys(new for _, names in each for new in names.values()))
            if not self.beside:
                calls += [call for own, _ in each for call in own]
                continue
            calls.append(Concurrent(tuple(own for own, _ in each)))
            if name == BACKWARD:
                calls += self.sum_of_directions(layer[0][0], [names["dx"] for _, names in each])
        return Entry(tuple(calls), tuple(taken))

    def part(self, entry: str, part: Part, program: Program) -> tuple[tuple[Call, ...], dict[str, str]]:
        """The calls of one sequence, and the stack's buffer for each buffer of its program, by name."""
        known = {n: _keep(self.functions, n, f) for n, f in program.functions.items()}
        own = {b.name: b for b in program.buffers}
        names = {}
        for old in program.entries[entry].takes:
            new = self.placed(own[old], part, self.owners[id(program)])
            names[old], self.buffers[new.name] = new.name, new
        return tuple(_renamed(call, names, known) for call in program.entries[entry].calls), names

    def sum_of_directions(self, part: Part, dx: Sequence[str]) -> list[Call]:
        """The calls that add the second gradient of x of a layer, of which ``part`` is one, to the first."""
        from ecornn.schedules.backward.passes import summed_directions

        adding = summed_directions(CORES, part.workload.input, self.whole.dtype)
        known = {n: _keep(self.functions, n, f) for n, f in adding.functions.items()}
        return [_renamed(call, {"dx": dx[0], "dx_second": dx[1]}, known) for call in adding.calls]

    def placed(self, b: Buffer, part: Part, owner: str) -> Buffer:
        """A buffer of a part as one of the stack."""
        row = part.workload.batch * part.traversal.y_width(part.workload.hidden)
        below, above = part.layer > 0, part.layer < self.stack.layers - 1
        if (b.tensor == "x" and below) or (b.tensor == "y" and above):
            layer = part.layer - (b.tensor == "x")
            size = row if b.tensor == "y" else part.workload.batch * part.workload.input
            return Buffer(f"l{layer}_y", KEPT, b.dtype, Extent(0, size))
        if b.tensor == "dx" and part.second and self.beside:
            return Buffer(f"d_second_{part.workload.input}", WORKSPACE, b.dtype,
                          Extent(0, part.workload.batch * part.workload.input))
        if (b.tensor == "dx" and below) or (b.tensor == "dy" and above):
            layer = part.layer - (b.tensor == "dx")
            size = row if b.tensor == "dy" else part.workload.batch * part.workload.input
            return Buffer(f"d_between_{layer % 2}", WORKSPACE, b.dtype, Extent(0, size))
        if b.tensor is not None and TENSORS[b.tensor].by_parameter:
            key = parameter_prefix(self.stack, part) + (b.state or "")
            return structs.replace(b, name=f"{part.label}_{b.name}", state=key, part=part.number)
        return _placed(b, part, self.stack, owner, SERIAL)


def _running(program: Program) -> Program:
    """A program with the buffers that its entry ``run`` takes, and no others."""
    taken = set(program.entries[RUN].takes)
    return replace(program, buffers=tuple(b for b in program.buffers if b.name in taken))


def _rows(part: Part, program: Program, names: dict[str, str]) -> dict[str, int]:
    """The buffers of a part that have rows of time -> elements of a row for each row of the batch."""
    work = part.workload
    sizes = {"I": work.input, "H": work.hidden, "W": part.traversal.y_width(work.hidden)}
    rows = {names[b.name]: TENSORS[b.tensor].row(sizes) for b in program.buffers if b.tensor is not None}
    if names.get("lengths") == REMAINING:
        rows[REMAINING] = 1
    return {name: size for name, size in rows.items() if size is not None}


def _handed(program: Program, names: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The pairs of buffers that each state of a part comes from, and is left in."""
    ends = [{b.state: names[b.name] for b in program.buffers if b.tensor == tensor}
            for tensor in ("state_in", "state_out")]
    return tuple((name, ends[1][state]) for state, name in ends[0].items())


def _arranged(sequences: list[WaveLayer], overlap: Overlap) -> tuple[Call, ...]:
    if overlap.kind == "directions":
        return tuple(Concurrent((one.calls, other.calls))
                     for one, other in zip(sequences[::2], sequences[1::2], strict=True))
    calls: list[Call] = []
    for first in range(0, len(sequences), overlap.depth):
        group = tuple(sequences[first:first + overlap.depth])
        calls += [Wave(group, overlap.chunks, overlap.least)] if len(group) > 1 else group[0].calls
    return tuple(calls)


def parameter_prefix(stack: Stack, part: Part) -> str:
    """The prefix of a part's parameters, before the cell's own names."""
    return f"{part.label}." if stack.count > 1 else ""


def _placed(b: Buffer, part: Part, stack: Stack, owner: str, overlap: Overlap) -> Buffer:
    """A buffer of a part as one of the stack."""
    work = part.workload
    if (b.tensor == "x" and part.layer > 0) or (b.tensor == "y" and part.layer < stack.layers - 1):
        between = part.layer - (b.tensor == "x")  # all layers at a time write one each, and the first reads another
        extent = Extent(0, work.batch * part.traversal.y_width(work.hidden))
        return Buffer(f"between_{between % (overlap.depth + 1)}", WORKSPACE, b.dtype, extent)
    if b.role == WORKSPACE:
        in_chunks = overlap.depth > 1 and stack.layers % overlap.depth != 1  # a layer alone runs whole
        extent = chunk_extent(b.extent, overlap.chunks, overlap.least) if in_chunks else b.extent
        return structs.replace(b, name=owner + b.name, extent=extent)
    if b.tensor is not None and not TENSORS[b.tensor].by_state:
        return b
    packing = b.packing
    if packing is not None:
        prefix = parameter_prefix(stack, part)
        sources = tuple((prefix + n if n else n, gate) for n, gate in packing.sources)
        packing = structs.replace(packing, sources=sources)
    return structs.replace(b, name=f"{part.label}_{b.name}", packing=packing, part=part.number)


def _keep(functions: dict[str, PrimFunc], name: str, function: PrimFunc) -> str:
    """The name of an equal function among ``functions``, to which it is added if there is none."""
    from tvm_ffi import structural_equal

    own, number = name, 0
    while own in functions:
        if structural_equal(functions[own], function):
            return own
        number += 1
        own = f"{name}_v{number}"
    functions[own] = function
    return own


def _renamed(call: Call, names: dict[str, str], known: dict[str, str]) -> Call:
    def leaf(one: Leaf) -> Leaf:
        given = {parameter: names[buffer] for parameter, buffer in one.names.items()}
        return replace(one, function=known[one.function], names={**names, **given})

    if isinstance(call, Chunks):  # parts share workspaces, but no memory that is kept
        call = replace(call, in_place=())
    return mapped(call, leaf, names.__getitem__)
