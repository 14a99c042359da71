"""The program of a stack, from those of its sequences.

Sequences run one after the other, or some at the same time. y of a layer is a workspace, and x of the next. Equal
functions are kept once; sequences with one program share its workspaces unless they run at the same time. A chunk of
time is a call of the same kernels on the rows from its first step on, from the states that the chunk before left where
the call's final states belong. So T stays free, and a call too short for two chunks runs one layer after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from msgspec import structs

from ecornn import program as ir
from ecornn.workload import SERIAL, Overlap, Part, Stack, Workload

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

CORES = 132  # of kernels that belong to no sequence: they serve more or fewer
REMAINING = "remaining"  # lengths of what is left from each step on, which a chunk reads in place of lengths


def compose(stack: Stack, whole: Workload, programs: Sequence[ir.Program], overlap: Overlap = SERIAL) -> ir.Program:
    """One program with the entries of ``programs``, which are of ``stack.parts(whole)`` in order; ``run`` goes as
    ``overlap`` says. Buffers are those that all parts share, such as ``x`` and ``lengths``, and each part's states and
    packed weights, named with its label, as ``l1_reverse_h_in``; so are the parameters that weights are packed from."""
    if stack.count == 1:
        return programs[0]
    parts = stack.parts(whole)
    # a program, and the place of its layer among those at the same time -> the prefix of its workspaces
    owners: dict[tuple[int, int], str] = {}
    functions: dict[str, PrimFunc] = {}
    buffers: dict[str, ir.Buffer] = {}
    sequences: list[ir.WaveLayer] = []
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
        calls = tuple(_renamed(call, names, known) for call in program.entries[ir.RUN].calls)
        before, after = ({b.state: names[b.name] for b in program.buffers if b.tensor == tensor}
                         for tensor in ("state_in", "state_out"))
        sequences.append(ir.WaveLayer(calls, _rows(part, program, names), tuple(
            (name, after[state]) for state, name in before.items())))
    notes = {f"{p.label} {k}": v for p, program in zip(parts, programs, strict=True) for k, v in program.notes.items()}
    calls = _arranged(sequences, overlap)
    if "lengths" in buffers and overlap.depth > 1:  # a chunk has lengths of its own
        from ecornn.schedules.timeline import remaining_lengths

        function, buffer, launch = remaining_lengths(whole.batch)
        functions[REMAINING], buffers[REMAINING] = function, buffer
        calls = launch, *calls
    # groups of as many columns lie within the groups of every part
    run = ir.Program.running(functions, buffers.values(), calls, notes, gcd(*(p.together for p in programs)))
    if ir.FORWARD not in programs[0].entries:
        return run
    placed = _TrainingStack(stack, whole, programs, functions, overlap.kind == "directions")
    entries = {**run.entries, ir.FORWARD: placed.entry(ir.FORWARD), ir.BACKWARD: placed.entry(ir.BACKWARD)}
    return replace(run, buffers=tuple((buffers | placed.buffers).values()), entries=entries)


class _TrainingStack:
    """The entries ``forward`` and ``backward`` of a stack: y of a layer is kept, gradients of it are workspaces. The
    second direction of a layer adds its gradient of x to the first one's; or, where both go at the same time
    (``beside``), it has one of its own, which is added afterwards."""

    def __init__(self, stack: Stack, whole: Workload, programs: Sequence[ir.Program], functions: dict[str, PrimFunc],
                 beside: bool) -> None:
        self.stack, self.whole, self.parts, self.programs = stack, whole, stack.parts(whole), programs
        self.functions, self.buffers, self.beside = functions, dict[str, ir.Buffer](), beside
        self.owners = {program: f"t{n}_" for n, program in enumerate(dict.fromkeys(map(id, programs)))}

    def entry(self, name: str) -> ir.Entry:
        calls, taken = list[ir.Call](), dict[str, None]()
        sequences, directions = list(zip(self.parts, self.programs, strict=True)), self.stack.directions
        layers = [sequences[n:n + directions] for n in range(0, len(sequences), directions)]
        for layer in layers if name == ir.FORWARD else reversed(layers):
            each = [self.part(name, part, program) for part, program in layer]
            taken.update(dict.fromkeys(new for _, names in each for new in names.values()))
            if not self.beside:
                calls += [call for own, _ in each for call in own]
                continue
            calls.append(ir.Concurrent(tuple(own for own, _ in each)))
            if name == ir.BACKWARD:
                calls += self.sum_of_directions(layer[0][0], [names["dx"] for _, names in each])
        return ir.Entry(tuple(calls), tuple(taken))

    def part(self, entry: str, part: Part, program: ir.Program) -> tuple[tuple[ir.Call, ...], dict[str, str]]:
        """The calls of one sequence, and the stack's buffer for each buffer of its program, by name."""
        known = {n: _keep(self.functions, n, f) for n, f in program.functions.items()}
        own = {b.name: b for b in program.buffers}
        names = {}
        for old in program.entries[entry].takes:
            new = self.placed(own[old], part, self.owners[id(program)])
            names[old], self.buffers[new.name] = new.name, new
        return tuple(_renamed(call, names, known) for call in program.entries[entry].calls), names

    def sum_of_directions(self, part: Part, dx: Sequence[str]) -> list[ir.Call]:
        """The calls that add the second gradient of x of a layer, of which ``part`` is one, to the first."""
        from ecornn.schedules.backward.passes import summed_directions

        adding = summed_directions(CORES, part.workload.input, self.whole.dtype)
        known = {n: _keep(self.functions, n, f) for n, f in adding.functions.items()}
        return [_renamed(call, {"dx": dx[0], "dx_second": dx[1]}, known) for call in adding.calls]

    def placed(self, b: ir.Buffer, part: Part, owner: str) -> ir.Buffer:
        work, of_x, of_y = part.workload, b.tensor in ("x", "dx"), b.tensor in ("y", "dy")
        rows = ir.Extent(0, work.batch * (work.input if of_x else part.traversal.y_width(work.hidden)))
        if b.tensor == "dx" and part.second and self.beside:
            return ir.Buffer(f"d_second_{work.input}", ir.WORKSPACE, b.dtype, rows)
        if (of_x and part.layer > 0) or (of_y and part.layer < self.stack.layers - 1):  # of two layers
            layer = part.layer - of_x
            return (ir.Buffer(f"l{layer}_y", ir.KEPT, b.dtype, rows) if b.tensor in ("x", "y") else
                    ir.Buffer(f"d_between_{layer % 2}", ir.WORKSPACE, b.dtype, rows))
        if b.tensor is not None and ir.TENSORS[b.tensor].by_parameter:
            key = parameter_prefix(self.stack, part) + (b.state or "")
            return structs.replace(b, name=f"{part.label}_{b.name}", state=key, part=part.number)
        return _placed(b, part, self.stack, owner, SERIAL)


def _running(program: ir.Program) -> ir.Program:
    """A program with the buffers that its entry ``run`` takes, and no others."""
    taken = set(program.entries[ir.RUN].takes)
    return replace(program, buffers=tuple(b for b in program.buffers if b.name in taken))


def _rows(part: Part, program: ir.Program, names: dict[str, str]) -> dict[str, int]:
    """The buffers of a part that have rows of time -> elements of a row for each row of the batch."""
    work = part.workload
    sizes = {"I": work.input, "H": work.hidden, "W": part.traversal.y_width(work.hidden)}
    rows = {names[b.name]: ir.TENSORS[b.tensor].row(sizes) for b in program.buffers if b.tensor is not None}
    if names.get("lengths") == REMAINING:
        rows[REMAINING] = 1
    return {name: size for name, size in rows.items() if size is not None}


def _arranged(sequences: list[ir.WaveLayer], overlap: Overlap) -> tuple[ir.Call, ...]:
    if overlap.kind == "directions":
        return tuple(ir.Concurrent((one.calls, other.calls))
                     for one, other in zip(sequences[::2], sequences[1::2], strict=True))
    calls: list[ir.Call] = []
    for first in range(0, len(sequences), overlap.depth):
        group = tuple(sequences[first:first + overlap.depth])
        calls += [ir.Wave(group, overlap.chunks, overlap.least)] if len(group) > 1 else group[0].calls
    return tuple(calls)


def parameter_prefix(stack: Stack, part: Part) -> str:
    return f"{part.label}." if stack.count > 1 else ""


def _placed(b: ir.Buffer, part: Part, stack: Stack, owner: str, overlap: Overlap) -> ir.Buffer:
    """A buffer of a part as one of the stack."""
    work = part.workload
    if (b.tensor == "x" and part.layer > 0) or (b.tensor == "y" and part.layer < stack.layers - 1):
        between = part.layer - (b.tensor == "x")  # all layers at a time write one each, and the first reads another
        extent = ir.Extent(0, work.batch * part.traversal.y_width(work.hidden))
        return ir.Buffer(f"between_{between % (overlap.depth + 1)}", ir.WORKSPACE, b.dtype, extent)
    if b.role == ir.WORKSPACE:
        in_chunks = overlap.depth > 1 and stack.layers % overlap.depth != 1  # a layer alone runs whole
        extent = ir.chunk_extent(b.extent, overlap.chunks, overlap.least) if in_chunks else b.extent
        return structs.replace(b, name=owner + b.name, extent=extent)
    if b.tensor is not None and not ir.TENSORS[b.tensor].by_state:
        return b
    packing, prefix = b.packing, parameter_prefix(stack, part)
    if packing is not None:
        packing = structs.replace(packing, sources=tuple((prefix + n if n else n, gate) for n, gate in packing.sources))
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


def _renamed(call: ir.Call, names: dict[str, str], known: dict[str, str]) -> ir.Call:
    def leaf(one: ir.Leaf) -> ir.Leaf:
        given = {parameter: names[buffer] for parameter, buffer in one.names.items()}
        return replace(one, function=known[one.function], names=names | given)

    if isinstance(call, ir.Chunks):  # parts share workspaces, but no memory that is kept
        call = replace(call, in_place=())
    return ir.mapped(call, leaf, names.__getitem__)
