"""A whole backward pass around a recurrence: what comes before it and after it, the same for all of them."""

from __future__ import annotations

from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.kept import Kept
from ecornn.program import WORKSPACE, Buffer, Extent, launches
from ecornn.schedules.backward.finish import state_gradients
from ecornn.schedules.backward.gather import gathered
from ecornn.schedules.backward.inputs import input_gradients, made_of_inputs, places_of_inputs
from ecornn.schedules.backward.memory import Memory
from ecornn.schedules.backward.replay import replay, replayed
from ecornn.schedules.backward.sequences import count_sequences
from ecornn.schedules.backward.sums import step_sums, vector_gradients
from ecornn.schedules.backward.weights import weight_gradients
from ecornn.schedules.base import Component, Task, beside, joined
from ecornn.schedules.gemm.aligned import align
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.outputs import written

FEW = 4 << 20  # bytes that a launch makes in about the time that it takes to begin


def backward(task: Task, adjoint: Adjoint, kept: Kept, layout: Hoisted, recurrence: Component, add: bool = False,
             add_dx: bool = False, first: bool = True) -> Component:
    """The calls of a backward pass in order, with all workspaces; what it exchanges is as ``memory.py`` has it.

    Parameters
    ----------
    layout : of ``hoisted``, which the recurrence reads
    recurrence : from ``hoisted`` to ``outputs`` and ``last_<state>``; without ``outputs``
    add : to the gradients of parameters that are there, where the scalar ``add`` is not 0
    add_dx : to dx, as a second direction does
    first : whether there are states before the first step; else these are zeros
    """
    return joined(*parts_of(task, adjoint, kept, layout, recurrence, add, add_dx, first))


def parts_of(task: Task, adjoint: Adjoint, kept: Kept, layout: Hoisted, recurrence: Component, add: bool = False,
             add_dx: bool = False, first: bool = True, chunked: bool = False,
             dx: str | None = None) -> tuple[Component, Component]:
    """The component that goes over the rows of all steps, or with ``chunked`` of a chunk of them, and the one after the
    last step. In chunks gradients are added to, and so are the sums of ``sums_<...>_parts``, zeros at first. ``dx``:
    its data type, if not the layer's."""
    w, memory = task.workload, Memory(task, adjoint, kept)
    at_once = not chunked and not adjoint.finish.sums  # sums of vectors are whole as soon as rows are done
    step = w.batch * memory.outputs_row if written(adjoint) else 0
    own = (Buffer("outputs", WORKSPACE, w.dtype, Extent(0, step)),) if step else ()
    multiplied = memory.leaves() | memory.outputs() | replayed(memory) | places_of_inputs(memory)
    of_x = joined(input_gradients(memory, add_dx, dx), step_sums(memory, chunked),
                  vector_gradients(memory, add) if at_once else Component())
    of_weights = weight_gradients(memory, multiplied, add)
    alone = any(space.variables for space in made_of_inputs(memory))  # what the one makes, the other reads
    after = joined(of_x, of_weights) if alone else beside(of_x, of_weights)
    before, serial = [align(task), *gathered(memory, first, chunked)], joined(replay(memory, layout), recurrence)
    read = {one.names.get(p.name, p.name) for one in launches(serial.calls)
            for p in serial.functions[one.function].params}
    # what only products after the recurrence read is made beside it, if that takes no longer than to launch it: what
    # is made beside something else cannot lie in its memory, nor in that of what comes before it. Else it is made
    # after it, and may lie where the recurrence's inputs were
    later = [one for one in before if not read.intersection(b.name for b in one.buffers)]
    along = [one for one in later if not chunked and sum(b.nbytes(w.seq) for b in one.buffers) <= FEW]
    until = joined(Component(buffers=own), *(one for one in before if one not in later), serial)
    rows = joined(beside(until, joined(*along)), *(one for one in later if one not in along), after)
    counted = count_sequences(task.traversal) if task.traversal.sequences else Component()
    return rows, joined(counted, state_gradients(memory), Component() if at_once else vector_gradients(memory, add))
