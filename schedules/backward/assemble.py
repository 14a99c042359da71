"""The recurrence of an adjoint, and a whole backward pass around it.

The recurrence is a task that schedules of forward layers carry out: a step like a cell's, with ``outputs`` in place of
y, products of several terms and transposed weights, whose inputs are hoisted, and which goes through time the other
way. Its outputs go into products and sums over all steps, its last states into `state_gradients`."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from ecornn.analysis import StepGraph
from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.heads import most_heads
from ecornn.analysis.kept import Kept
from ecornn.program import KEPT, WORKSPACE, Buffer, Extent, Launch, Program, launches
from ecornn.schedules.assemble import call_buffers, vector_buffer
from ecornn.schedules.backward import passes
from ecornn.schedules.backward.memory import Memory, Place, finish_summed, gathered, materialized, replayed
from ecornn.schedules.backward.weights import step_sums, vector_gradients, weight_gradients
from ecornn.schedules.base import Component, Task, beside, in_stages, joined, prepared
from ecornn.schedules.builder import Expr, T
from ecornn.schedules.cuda.isa import sync_block
from ecornn.schedules.gemm.job import COUNT, STEPS, Columns
from ecornn.schedules.gemm.projection import align
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import written
from ecornn.schedules.rates import light
from ecornn.schedules.timeline import Timeline, piece_buffers
from ecornn.workload import Traversal


def recurrence_graph(adjoint: Adjoint) -> StepGraph:
    return replace(adjoint.recurrence, outputs=written(adjoint))


def recurrence_task(layer: Task, adjoint: Adjoint) -> Task:
    traversal = structs.replace(layer.traversal, reverse=not layer.traversal.reverse, directions=1, backward=True)
    return replace(layer, workload=layer.workload.adjoint, graph=recurrence_graph(adjoint), traversal=traversal)


def beyond(task: Task) -> str | None:
    """None, or what a recurrence has that no schedule carries out yet."""
    graph = task.graph
    heads, whole = most_heads(graph), 64 if task.workload.itemsize == 2 else 32
    if heads > 1 and task.workload.hidden // heads % whole:
        return (f"can train heads of a multiple of {whole} units on a GPU, but these have "
                f"{task.workload.hidden // heads}")
    for phase in graph.phases:
        terms = [t for p in phase.products for t in p.terms]
        if len({t.transposed for t in terms}) > 1:
            return f"step {graph.cell!r} multiplies with weights and with transposed weights in one exchange"
        if any(len({t.operand for t in p.terms}) < len(p.terms) for p in phase.products):
            return f"step {graph.cell!r} multiplies one value twice in one product"
    return None


def assemble_recurrence(task: Task, recurrence: Component, layout: Hoisted, together: int = 1) -> Program:
    """The program that runs ``recurrence`` alone, from ``hoisted``, in ``layout``, to ``outputs``."""
    return Program.running(dict(recurrence.functions), (*recurrence_buffers(task, layout), *recurrence.buffers),
                           recurrence.calls, together=together)


def recurrence_buffers(task: Task, layout: Hoisted) -> list[Buffer]:
    """Buffers it shares: ``hoisted``, states, rows of the traversal, ``vectors``, and ``outputs`` (T, B, O, H)."""
    w, graph = task.workload, task.graph
    call = [b for b in call_buffers(graph.states, task.traversal, w.dtype) if b.tensor not in ("x", "y")]
    size = w.batch * len(graph.outputs) * w.hidden
    made = [Buffer("outputs", KEPT, w.dtype, Extent(0, size))] if size else []  # of a step that only states read: none
    kept = [structs.replace(layout.buffer(w.batch), role=KEPT)] if graph.hoisted_outputs else []
    return [*call, vector_buffer(task), *kept, *made, *piece_buffers(task.traversal, w, len(graph.states))]


def parts_of(task: Task, adjoint: Adjoint, kept: Kept, layout: Hoisted, recurrence: Component, add: bool = False,
             add_dx: bool = False, chunked: bool = False, dx: str | None = None) -> tuple[Component, Component]:
    """The components over the rows of all steps, and after the last one, with all workspaces, around ``recurrence``
    without its buffer ``outputs``. ``add``: to gradients of parameters, where the scalar ``add`` is not 0; ``add_dx``:
    to dx; ``chunked``: rows are a chunk's, sums go on in ``sums_<...>_parts``; ``dx``: its type."""
    memory = Memory(task, adjoint, kept)
    if light(task) and not chunked and not any(space.variables for space in passes.made_of_inputs(memory)):
        return _few_launches(memory, layout, recurrence, add, add_dx, dx)
    at_once = not chunked and not adjoint.finish.sums  # sums of vectors are whole as soon as rows are done
    own = _outputs(memory)
    multiplied = memory.leaves() | memory.outputs() | replayed(memory) | passes.places_of_inputs(memory)
    of_x = joined(passes.input_gradients(memory, add_dx, dx), *step_sums(memory, chunked),
                  vector_gradients(memory, add) if at_once else Component())
    of_weights = joined(*weight_gradients(memory, multiplied, add))
    alone = any(space.variables for space in passes.made_of_inputs(memory))  # what the one makes, the other reads
    after = joined(of_x, of_weights) if alone else beside(of_x, of_weights)
    before, serial = [align(task), *gathered(memory, chunked)], joined(replay(memory, layout), recurrence)
    read = {one.names.get(p.name, p.name) for one in launches(serial.calls)
            for p in serial.functions[one.function].params}
    # buffers that only later products read are made after the recurrence, and may lie where its inputs were
    later = [one for one in before if not read.intersection(b.name for b in one.buffers)]
    rows = joined(own, *(one for one in before if one not in later), serial, *later, after)
    counted = count_sequences(task.traversal) if task.traversal.sequences else Component()
    return rows, joined(counted, state_gradients(memory), Component() if at_once else vector_gradients(memory, add))


def _few_launches(memory: Memory, layout: Hoisted, recurrence: Component, add: bool, add_dx: bool,
                  dx: str | None) -> tuple[Component, Component]:
    """The components of :func:`parts_of` where kernels take less than to launch them: those that wait for nothing of
    each other are one, and all is in the first component."""
    task = memory.task
    multiplied = memory.leaves() | memory.outputs() | replayed(memory) | passes.places_of_inputs(memory)
    before = in_stages(align(task), *gathered(memory))
    counted = count_sequences(task.traversal) if task.traversal.sequences else Component()
    gradients = joined(in_stages(*step_sums(memory), state_gradients(memory)), vector_gradients(memory, add))
    after = in_stages(passes.input_gradients(memory, add_dx, dx), gradients,
                      *weight_gradients(memory, multiplied, add, apart=True))
    return joined(_outputs(memory), counted, before, prepared(replay(memory, layout), recurrence), after), Component()


def _outputs(memory: Memory) -> Component:
    """The workspace that the recurrence writes, if it writes any."""
    w = memory.task.workload
    step = w.batch * memory.outputs_row if written(memory.adjoint) else 0
    return Component(buffers=(Buffer("outputs", WORKSPACE, w.dtype, Extent(0, step)),) if step else ())


def replay(memory: Memory, layout: Hoisted) -> Component:
    """``hoisted`` from x, states, dy and weights; and ``replayed``, what else later passes read of the forward step."""
    graph, forward = memory.adjoint.recurrence, memory.kept.replay
    own: tuple[passes.Item, ...] = graph.hoisted, graph.hoisted_statistics, graph.normalized
    items = passes.items_of(forward) + [item for item in own if item]
    multiplied, read = materialized(memory)
    rows = passes.RowPass(memory.task, memory.forward, memory.x, "replay", memory.leaves(),
                          passes.unique_invariants(memory.forward, graph))
    stores = tuple((v, p) for space in (multiplied, read) for v, p in space.places().items())
    made = rows.component(items, passes.Wanted(stores, graph.hoisted_outputs, layout))
    batch = memory.task.workload.batch
    hoisted = (layout.buffer(batch),) if graph.hoisted_outputs else ()
    return joined(Component(buffers=(*hoisted, *multiplied.buffers(batch, STEPS), *read.buffers(batch, STEPS))), made)


def state_gradients(memory: Memory) -> Component:
    """``d_<state>_in`` (B, H) of each state, from ``last`` (B, S, H) and the weights; and ``finish_summed``."""
    back, H = memory.adjoint, memory.task.workload.hidden
    summed = finish_summed(memory)
    stores = [(back.gradients[n], Place(Columns(f"d_{n}_in", H, H), memory.dtype)) for n in back.forward.states]
    rows = passes.RowPass(memory.task, memory.forward, memory.x, "finish", memory.last(),
                          passes.unique_invariants(back.forward, back.finish), each=memory.each_state)
    made = rows.component(passes.items_of(back.finish), passes.Wanted((*stores, *summed.places().items())))
    if not summed.variables:  # else vectors need them: a call that does not want gradients leaves out their launches
        names, calls = [p.columns.name for _, p in stores], list(launches(made.calls))
        wanted = [tuple(p.name for p in made.functions[one.function].params if p.name in names) for one in calls]
        if all(wanted):
            made = replace(made, calls=tuple(replace(one, wanted=own) for one, own in zip(calls, wanted, strict=True)))
    return joined(Component(buffers=summed.buffers(memory.task.workload.batch, memory.each_state)), made)


THREADS = 1024
WARP = 32  # whose threads have the highest number of as many each; then one thread has that of all


def count_sequences(traversal: Traversal) -> Component:
    """``count`` (1,), int32, from the table ``sequences``, whose numbers are those from 0 on; by one block."""
    with T.kernel("count_sequences") as made:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        table, count = (T.pointer(name, "int32") for name in ("sequences", COUNT))
        T.device_entry()
        T.block(1)
        thread = T.thread(THREADS)
        found, highest = T.shared(THREADS).view("int32"), T.local("highest", (1,), "int32")
        timeline, total = Timeline(traversal, {"sequences": table}, steps, batch), T.let("total", steps * batch)

        def include(number: Expr) -> None:
            T.buffer_store(highest, T.max(highest[0], number), [0])

        T.note("each thread's highest number of a sequence, then the CTA's, through shared memory")
        T.buffer_store(highest, T.int32(-1), [0])
        with T.serial("turn", 0, T.let("turns", (total - thread + (THREADS - 1)) // THREADS)) as turn:
            number = T.let("number", table[turn * THREADS + thread])
            include(T.Select(number < 0, T.int32(-1), timeline.sequence(number)))
        T.buffer_store(found, highest[0], [thread])
        sync_block()
        with T.when(thread < WARP), T.unroll("k", THREADS // WARP) as k:
            include(found[thread + k * WARP])
        sync_block()
        T.buffer_store(found, highest[0], [thread])
        sync_block()
        with T.when(thread == 0):
            with T.unroll("k", WARP) as k:
                include(found[k])
            T.buffer_store(count, highest[0] + 1, [0])
    return Component({"count_sequences": made()}, (Buffer(COUNT, WORKSPACE, "int32", Extent(1)),),
                     (Launch("count_sequences", 1, THREADS, 4 * THREADS),))
