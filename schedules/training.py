"""The entry ``backward`` of a layer on a GPU: its adjoint's recurrence, by a schedule that carries out adjoints, and
what comes before and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import structs

from ecornn.analysis.adjoint import Adjoint, adjoint
from ecornn.analysis.kept import kept
from ecornn.errors import ScheduleError
from ecornn.program import (
    BACKWARD,
    ENTRIES,
    KEPT,
    TENSORS,
    WORKSPACE,
    Buffer,
    Call,
    Entry,
    Extent,
    Fill,
    Launch,
    Loop,
    Program,
)
from ecornn.schedules.assemble import tensor_buffers, vector_buffer
from ecornn.schedules.backward.assemble import parts_of
from ecornn.schedules.backward.recurrence import recurrence_task
from ecornn.schedules.base import Component, Task, joined
from ecornn.schedules.builder import PrimFunc
from ecornn.schedules.chunks import chunk_for, in_chunks
from ecornn.schedules.elementwise import Elementwise
from ecornn.schedules.hoisted import hoisted_of
from ecornn.schedules.keeping import kept_buffers, kept_states
from ecornn.schedules.persistent import Persistent
from ecornn.schedules.step.layout_transform import LayoutTransform

OWN = "backward_"  # of names of functions and buffers that nothing else uses
SCALARS = ("T", "B", "t", "first_step", "all_steps")


def refuses_backward(task: Task) -> str | None:
    """None, or why a task's adjoint is not carried out on its GPU."""
    made = adjoint(task.graph, task.workload.hidden, starts_anew=task.traversal.resets)
    return _schedule(recurrence_task(task, made))[1]


def with_backward(task: Task, forward: Program) -> Program:
    """The program with the entry ``backward``, too. Raises :class:`~ecornn.errors.ScheduleError` where no schedule
    carries out the adjoint."""
    w, traversal = task.workload, task.traversal
    made = adjoint(task.graph, w.hidden, starts_anew=traversal.resets)
    inner = recurrence_task(task, made)
    schedule, fault = _schedule(inner)
    if fault is not None:
        raise ScheduleError(f"no schedule carries out the adjoint of {w} on {task.device.name}: {fault}")
    config = schedule.default(inner)
    layout = hoisted_of(inner, config)
    second = traversal.reverse and traversal.directions > 1  # its gradient of x is added to the first one's
    before, recurrence, handed = _recurrence(inner, made, schedule.recurrence(inner, config))
    hoisted = (layout.buffer(w.batch),) if inner.graph.hoisted_outputs else ()
    rows, after = parts_of(task, made, kept(made, "states"), layout, recurrence, add=True, add_dx=second)
    tensors = tensor_buffers([t for t in ENTRIES[BACKWARD] if TENSORS[t].role != KEPT], traversal, w.dtype,
                             task.graph.states, task.graph.parameters)
    tensors += kept_buffers(kept_states(task), w.batch, w.hidden, w.dtype)
    names = _names(task)
    steps = chunk_for(task, (*hoisted, *rows.buffers))
    if steps is not None:
        short = replace(task, workload=structs.replace(w, seq=steps))
        rows, after = parts_of(short, made, kept(made, "states"), layout, recurrence, add=True, add_dx=second,
                               chunked=True)
        sums = [b for b in rows.buffers if b.name.startswith("sums_")]
        before = joined(before, Component(calls=tuple(Fill(b.name, 0, b.extent) for b in sums)))
    rows = _named(replace(rows, buffers=(*hoisted, *rows.buffers)), names)
    if steps is not None:
        pairs = [(names.get(a, OWN + a), names.get(b, OWN + b)) for a, b in handed]
        rows = in_chunks(rows, tensors, task, steps, pairs, not traversal.reverse)
    part = joined(_named(before, names), rows, _named(after, names))
    taken = (*tensors, vector_buffer(task), *part.buffers)
    buffers = {b.name: b for b in (*forward.buffers, *taken)}
    entry = Entry(part.calls, tuple(dict.fromkeys(b.name for b in taken)))
    return replace(forward, functions={**forward.functions, **part.functions}, buffers=tuple(buffers.values()),
                   entries={**forward.entries, BACKWARD: entry})


def _schedule(task: Task) -> tuple[Persistent | LayoutTransform | Elementwise, str | None]:
    """The schedule of a recurrence, with a reason why it cannot serve it, if none can. Where `persistent` can it is the
    faster one: 52 to 58 us a step beside 59 to 65 even where `layout_transform` is expected to gain most, LSTM
    256x64x2048 on an H200."""
    if not task.graph.phases:
        return Elementwise(), Elementwise().serves(task)
    if Persistent().serves(task) is None:
        return Persistent(), None
    return LayoutTransform(), LayoutTransform().serves(task)


def _recurrence(task: Task, adjoint: Adjoint, kernel: Component) -> tuple[Component, Component,
                                                                          list[tuple[str, str]]]:
    """What comes before the recurrence; it between its neighbours: it begins with gradients of the final states, and
    zeros, and leaves ``last_<state>``; and these pairs."""
    w, graph = task.workload, task.graph
    first = {state: name for name, state in adjoint.first.items()}
    names = {f"{s}_in": f"d{first[s]}_out" if s in first else f"zeros_{s}" for s in graph.states}
    names |= {f"{s}_out": f"last_{s}" for s in graph.states}
    vectors = vector_buffer(task)  # in the order of the recurrence
    own = {b.name: f"recurrence_{b.name}" for b in (*kernel.buffers, vectors)}
    made = _named(kernel, {**names, **own}, everything=False)
    size = Extent(w.batch * w.hidden)
    spaces = [Buffer(f"last_{s}", WORKSPACE, w.dtype, size) for s in graph.states]
    spaces.append(structs.replace(vectors, name=own[vectors.name]))
    zeros = [f"zeros_{s}" for s in graph.states if s not in first]
    before = Component({}, tuple(Buffer(z, WORKSPACE, w.dtype, size) for z in zeros),
                       tuple(Fill(z, 0, size) for z in zeros))
    return before, replace(made, buffers=(*made.buffers, *spaces)), [
        (names[f"{s}_in"], f"last_{s}") for s in graph.states]


def _names(task: Task) -> dict[str, str]:
    """What the parts call tensors, and what the entry does; all else gets a prefix."""
    tensors = [b.name for b in tensor_buffers(ENTRIES[BACKWARD], task.traversal, task.workload.dtype, task.graph.states,
                                              task.graph.parameters)]
    names = {name: name for name in (*tensors, *(f"{s}_kept" for s in task.graph.states), "vectors")}
    names |= {f"d_{s}_in": f"d{s}_in" for s in task.graph.states}
    return names | {f"d_{p}": f"gradient_{p}" for p in task.graph.parameters}


def _named(part: Component, names: Mapping[str, str], everything: bool = True) -> Component:
    """The same with other names of buffers; ``everything``: those that have none get a prefix, and functions, too."""
    def of(name: str) -> str:
        return names.get(name, OWN + name if everything else name)

    def call(one: Call) -> Call:
        if isinstance(one, Fill):
            return replace(one, buffer=of(one.buffer))
        if isinstance(one, Loop):
            return replace(one, calls=tuple(map(launch, one.calls)))
        assert isinstance(one, Launch), "a backward pass runs in one stream"
        return launch(one)

    def launch(one: Launch) -> Launch:
        parameters = (p.name for p in part.functions[one.function].params)
        given = {p: of(one.names.get(p, p)) for p in parameters if p not in SCALARS}
        return replace(one, function=OWN + one.function if everything else one.function, names=given)

    functions: dict[str, PrimFunc] = {OWN + n if everything else n: f for n, f in part.functions.items()}
    return Component(functions, tuple(structs.replace(b, name=of(b.name)) for b in part.buffers),
                     tuple(map(call, part.calls)))
