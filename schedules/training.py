"""The entry ``backward`` of a layer on a GPU: its adjoint's recurrence, by a schedule of its own, and all around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from msgspec import structs

from ecornn.analysis.adjoint import Adjoint, adjoint
from ecornn.analysis.kept import kept
from ecornn.program import BACKWARD, ENTRIES, KEPT, WORKSPACE, Buffer, Chunks, Entry, Fill, Leaf, Program, mapped
from ecornn.schedules.assemble import tensor_buffers, vector_buffer
from ecornn.schedules.backward.assemble import parts_of, recurrence_task
from ecornn.schedules.backward.memory import rows_extent, rows_of_states
from ecornn.schedules.base import Component, Config, Schedule, Task, joined
from ecornn.schedules.builder import PrimFunc
from ecornn.schedules.chunks import Uses, chunk_for, free_for, in_chunks, may_be_cut, overlaid, shorter
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.keeping import VALUES, outputs_row, stored
from ecornn.schedules.timeline import piece_buffers

OWN = "backward_"  # of names of functions and buffers that nothing else uses
RECURRENCE = OWN + "recurrence_"  # and of those that are the recurrence's alone
SCALARS = ("T", "B", "t", "add", "first_step", "all_steps")


def with_backward(task: Task, forward: Program, schedule: Schedule, config: Config, beside: bool = False) -> Program:
    """The program with the entry ``backward``, too, whose recurrence ``schedule`` carries out, as ``config`` says.
    ``beside``: a layer's other direction goes on at the same time, so nothing can be added to its gradient of x."""
    w, traversal = task.workload, task.traversal
    made = adjoint(task.graph, w.hidden, starts_anew=traversal.resets)
    inner = replace(recurrence_task(task, made), row=outputs_row(task, made))
    plan, layout = schedule.plan(inner, config), hoisted_of(inner, str(config.get("hoisted", "float32")))
    together = gcd(forward.together, schedule.together(inner, plan)) if traversal.sequences else 1
    # the gradient of x of a second direction is added to the first one's, at once or by somebody else, not rounded
    second = traversal.reverse and traversal.directions > 1
    add_dx, dx = second and not beside, "float32" if second and beside else w.dtype
    before, recurrence, handed = _recurrence(inner, made, schedule.recurrence(inner, plan))
    hoisted = (layout.buffer(w.batch),) if inner.graph.hoisted_outputs else ()
    assert traversal.keep is not None
    known = kept(made, traversal.keep, by_steps=True)
    rows, after = parts_of(task, made, known, layout, recurrence, add=True, add_dx=add_dx, dx=dx)
    tensors = [structs.replace(b, dtype=dx) if b.tensor == "dx" else b for b in _tensors(task) if b.role != KEPT]
    tensors += stored(task).buffers(w.batch, w.hidden, w.dtype)
    names = _names(task)
    def of_chunk(steps: int) -> tuple[Component, Component]:
        short = replace(task, workload=structs.replace(w, seq=steps))
        return parts_of(short, made, known, layout, recurrence, add=True, add_dx=add_dx, chunked=True, dx=dx)
    expected = schedule.expected(inner)
    steps = chunk_for(task, (*hoisted, *rows.buffers), expected)
    if steps is not None:
        rows, after = of_chunk(steps)
        whole = joined(before, replace(rows, buffers=(*hoisted, *rows.buffers)), after)
        most, steps = steps, shorter(task, steps, _with_less(task, _named(whole, names))[0].buffers, expected)
        if steps < most:
            rows, after = of_chunk(steps)
        sums = [b for b in rows.buffers if b.name.startswith("sums_")]
        before = joined(before, Component(calls=tuple(Fill(b.name, 0, b.extent) for b in sums)))
    rows = _named(replace(rows, buffers=(*hoisted, *rows.buffers)), names)
    if steps is not None:
        pairs = [(names.get(a, OWN + a), names.get(b, OWN + b)) for a, b in handed]
        rows = in_chunks(rows, tensors, task, steps, pairs, not traversal.reverse)
    part = joined(_named(before, names), rows, _named(after, names))
    part, in_place = _with_less(task, part)
    taken = (*tensors, vector_buffer(task), *part.buffers, *in_place)
    buffers = {b.name: b for b in (*forward.buffers, *taken)}
    entry = Entry(part.calls, tuple(dict.fromkeys(b.name for b in taken)))
    return replace(forward, functions={**forward.functions, **part.functions}, buffers=tuple(buffers.values()),
                   entries={**forward.entries, BACKWARD: entry}, together=together,
                   dx_in=_room_for_dx(task, Uses(part.functions), entry), in_place={b.name: VALUES for b in in_place})


def _room_for_dx(task: Task, uses: Uses, entry: Entry) -> str | None:
    """A kept buffer as large as the gradient of x, which may then be written over it; None if there is none."""
    w, rooms = task.workload, [b.name for b in stored(task).buffers(1, 1, task.workload.dtype) if b.name != VALUES]
    if w.input != w.hidden or task.traversal.sequences or task.traversal.directions > 1:
        return None
    return next(iter(free_for("dx", uses, entry.calls, rooms)), None)


def _with_less(task: Task, part: Component) -> tuple[Component, list[Buffer]]:
    """The calls of ``part`` with less memory, and the workspaces that it has lost, which may lie over forward's values:
    the recurrence's outputs, if forward kept as many values and nobody reads these any more."""
    outputs, values = OWN + "outputs", [VALUES] if stored(task).together else []
    own = [outputs for _ in free_for(outputs, Uses(part.functions), part.calls, values)]
    apart = [*own, *(b.name for b in part.buffers if b.name.startswith(RECURRENCE))]
    less, pairs = overlaid(part, task.workload.seq, apart), tuple((name, VALUES) for name in own)
    calls = tuple(replace(call, in_place=pairs) if isinstance(call, Chunks) else call for call in less.calls)
    return (replace(less, buffers=tuple(b for b in less.buffers if b.name not in own), calls=calls),
            [b for b in less.buffers if b.name in own])


def _recurrence(task: Task, adjoint: Adjoint, kernel: Component) -> tuple[Component, Component, list[tuple[str, str]]]:
    """The component before the recurrence; the recurrence, between its neighbours; and pairs of a state's first and
    last buffer. It begins with gradients of the final states, and zeros, and leaves ``last_<state>``."""
    w, graph = task.workload, task.graph
    first = {state: name for name, state in adjoint.first.items()}
    # those that all states share, unless chunks of time hand each its own
    zeros = {s: f"zeros_{s}" if may_be_cut(task) else "zeros" for s in graph.states if s not in first}
    names = {f"{s}_in": f"d{first[s]}_out" if s in first else zeros[s] for s in graph.states}
    names |= {f"{s}_out": f"last_{s}" for s in graph.states}
    vectors = vector_buffer(task)  # in the order of the recurrence
    own = {b.name: RECURRENCE.removeprefix(OWN) + b.name for b in (*kernel.buffers, vectors)}
    made = _named(kernel, {**names, **own}, everything=False)
    size = rows_extent(rows_of_states(task.traversal), w.batch * w.hidden)
    spaces = [Buffer(f"last_{s}", WORKSPACE, w.dtype, size) for s in graph.states]
    spaces.append(structs.replace(vectors, name=own[vectors.name]))
    spaces += piece_buffers(task.traversal, w, len(graph.states))
    before = Component({}, tuple(Buffer(z, WORKSPACE, w.dtype, size) for z in dict.fromkeys(zeros.values())),
                       tuple(Fill(z, 0, size) for z in dict.fromkeys(zeros.values())))
    return before, replace(made, buffers=(*made.buffers, *spaces)), [
        (names[f"{s}_in"], f"last_{s}") for s in graph.states]


def _tensors(task: Task) -> list[Buffer]:
    return tensor_buffers(ENTRIES[BACKWARD], task.traversal, task.workload.dtype, task.graph.states,
                          task.graph.parameters)


def _names(task: Task) -> dict[str, str]:
    """Name of a tensor in the parts -> its name in the entry; all other names get a prefix."""
    tensors = (*_tensors(task), *stored(task).buffers(1, 1, task.workload.dtype))
    names = {name: name for name in (*(b.name for b in tensors), "vectors")}
    names |= {f"d_{s}_in": f"d{s}_in" for s in task.graph.states}
    return names | {f"d_{p}": f"gradient_{p}" for p in task.graph.parameters}


def _named(part: Component, names: Mapping[str, str], everything: bool = True) -> Component:
    """The component with other names of buffers; ``everything``: those not in ``names`` get a prefix, functions too."""
    prefix = OWN if everything else ""
    def of(name: str) -> str:
        return names.get(name, prefix + name)
    def leaf(one: Leaf) -> Leaf:
        parameters = (p.name for p in part.functions[one.function].params)
        given = {p: of(one.names.get(p, p)) for p in parameters if p not in SCALARS}
        return replace(one, function=prefix + one.function, names=given)
    functions: dict[str, PrimFunc] = {prefix + n: f for n, f in part.functions.items()}
    return Component(functions, tuple(structs.replace(b, name=of(b.name)) for b in part.buffers),
                     tuple(mapped(call, leaf, of) for call in part.calls))
