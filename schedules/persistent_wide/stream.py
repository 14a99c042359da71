"""Weights that do not fit on the chip: a warp for each ring brings them in every step, chunk by chunk, by bulk copies.

Whose weights come next is known ahead, whatever the state is. So they go through slots of their own, apart from stages
of state: while a step waits for state, the weights of its first streamed chunks arrive. A slot is written again when
each warp that multiplies has arrived at its ``used``, behind its products (wgmma) of what the slot had; nobody writes
weights while the kernel runs, and nothing else orders these copies. Which slot a chunk has does not depend on the step;
how often a slot has been filled says which parity to wait for.

Weights beyond what L2 holds would drive each other out of it: read in the same order in every step, none would be there
when it is read again. So the first ones of a step are asked to stay, and the others to go first.
"""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa.memory import l2_policy
from ecornn.schedules.cuda.isa.registers import opaque
from ecornn.schedules.persistent_wide.block_role import BlockRole
from ecornn.schedules.persistent_wide.copies import Memory, chunk_at
from ecornn.schedules.persistent_wide.plan import WidePlan


def stream(steps: Expr, plan: WidePlan, memory: Memory, role: BlockRole, ring: Expr, weights: TirBuffer) -> None:
    """Emits one thread's whole life: all streamed chunks of a ring, step after step."""
    T.note("weight producer: bulk copies of the weights that do not fit, into slots that have been multiplied")
    count, among, slots = plan.streamed, plan.chunks - plan.kept, memory.streamed(ring)
    policies = T.local("policies", (2,), "uint64")
    if plan.lasting < count:
        l2_policy(policies[0], "evict_last")
        l2_policy(policies[1], "evict_first")
    turn = T.local("turn", (1,), "int32")  # a loop that is not unrolled: a thread that copies has few registers
    with T.serial("t", 0, steps) as t:
        T.buffer_store(turn, T.int32(0), [0])
        with T.While(turn[0] < count):
            number = opaque("number", turn[0])
            slot, position = opaque("slot", number % plan.slots), plan.kept + (number * among + among - 1) // count
            piece = role.member * plan.packed_chunks + chunk_at(plan, role, ring, opaque("position", position))
            source = weights.ptr_to([T.cast(opaque("piece", piece), "int64") * (plan.weight_bytes // 4)])
            slots.acquire(slots.use(t, number, count)._replace(stage=slot))
            policy = T.Select(number < plan.lasting, policies[0], policies[1]) if plan.lasting < count else None
            slots.copy(slot, memory.words.ptr_to([memory.slot(ring, slot)]), source, plan.weight_bytes, policy)
            T.buffer_store(turn, number + 1, [0])
