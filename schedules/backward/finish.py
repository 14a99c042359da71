"""The gradients of a layer's first states, from what the recurrence leaves after its last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ecornn.program import WORKSPACE, launches
from ecornn.schedules.backward.memory import Memory, Place, Workspaces
from ecornn.schedules.backward.passes import RowPass, Wanted, items_of, unique_invariants
from ecornn.schedules.base import Component, joined
from ecornn.schedules.gemm.job import Columns


def state_gradients(memory: Memory) -> Component:
    """``d_<state>_in`` (B, H) of each state, from ``last`` (B, S, H) and the weights; and ``finish_summed``."""
    back, H = memory.adjoint, memory.task.workload.hidden
    summed = finish_summed(memory)
    stores = [(back.gradients[n], Place(Columns(f"d_{n}_in", H, H), memory.dtype)) for n in back.forward.states]
    passes = RowPass(memory, "finish", memory.last(), unique_invariants(back.forward, back.finish),
                     each=memory.each_state)
    made = passes.component(items_of(back.finish), Wanted((*stores, *summed.places().items())))
    if not summed.variables:  # else vectors need them
        made = _left_out(made, [p.columns.name for _, p in stores])
    return joined(Component(buffers=summed.buffers(memory.task.workload.batch, memory.each_state)), made)


def _left_out(made: Component, gradients: Sequence[str]) -> Component:
    """``made``, but a call that does not want these gradients leaves out the launches that make them; unchanged if a
    launch makes none of them."""
    wanted = [tuple(p.name for p in made.functions[one.function].params if p.name in gradients)
              for one in launches(made.calls)]
    if not all(wanted):
        return made
    return replace(made, calls=tuple(replace(one, wanted=own)
                                     for one, own in zip(launches(made.calls), wanted, strict=True)))


def finish_summed(memory: Memory) -> Workspaces:
    """The workspace of values that remain to be summed over the batch, float32."""
    found = Workspaces("finish_summed", "float32", memory.task.workload.hidden, WORKSPACE)
    found.add(s.value for s in memory.adjoint.finish.sums)
    return found
