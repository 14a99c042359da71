"""The wide persistent kernel: one launch for the whole sequence, products by wgmma.

Blocks form groups, and sets within these; a group serves its own batch rows and holds all recurrent weights, a
set the rows of ``units`` hidden units, each block of it for a part of K. In every block

* a warp for each ring, or four for the only one, copies chunks of the exchanged state into its stages in shared
  memory (``copies.py``);
* two or three warpgroups multiply, each its half of K or its own rows, with weights in registers and in shared
  memory (``products.py``), hand the partial sums of units that another block of the set finishes over to it
  (``exchange.py``), add those of their own, compute the cell's scalars, and write the new state to the
  exchange first and y afterwards (``gates.py``);
* where not all weights fit, a warp for each ring copies the others in every step (``copies.py``).

What registers the copying warpgroup does not need, the multiplying ones get.
"""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T
from ecornn.schedules.cuda.isa.mbarrier import fence_mbarrier_init
from ecornn.schedules.cuda.isa.memory import fence_async_shared
from ecornn.schedules.cuda.isa.registers import register_alloc, register_dealloc
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.persistent.exchange import pack
from ecornn.schedules.persistent_wide.copies import Memory, copy, stream
from ecornn.schedules.persistent_wide.exchange import BlockRole, place_of
from ecornn.schedules.persistent_wide.gates import Gates
from ecornn.schedules.persistent_wide.plan import REGISTERS, SLOTS, SPACING, TEAM, WidePlan
from ecornn.schedules.persistent_wide.products import Products
from ecornn.schedules.scalars.initial import BLOCKS, THREADS, declare_start, initial_values, start_thread
from ecornn.schedules.sequence_kernel import SequenceKernel


def wide_kernel(task: Task, plan: WidePlan, hoisted: Hoisted, math: str, kept: Stored = NOTHING) -> PrimFunc:
    """``persistent_wide(T, B, hoisted, vectors, <state>_in, <state>_out, recurrent, exchange, counters, y)``, and
    ``handed`` where blocks share K; of an adjoint's recurrence ``outputs`` in place of y; ``persistent_wide_keeping``
    stores what is ``kept``, too."""
    own = ("recurrent", "exchange", "counters", *(["handed"] if plan.parts > 1 else []))
    with T.kernel(keeping("persistent_wide", kept)) as made:
        kernel = SequenceKernel.declare(task, hoisted, math, dict.fromkeys(own, "uint32"), kept)
        a = kernel.arguments
        T.device_entry()
        block, thread = T.block(plan.groups * plan.blocks), T.thread(plan.threads)
        words = T.shared(plan.shared // 4, 1024)  # in order: stages of state, weights, partial sums, barriers
        memory = Memory(plan, words)
        role, (copying, multiplying) = BlockRole.of(plan, block), REGISTERS[plan.teams]
        _prepare(plan, memory, thread)
        # without this bound ptxas ignores setmaxnreg
        with T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1}), T.If(thread < TEAM):
            with T.Then():
                T.note("producer warpgroup: few registers; what it gives back, the MMA warpgroups get")
                register_dealloc(copying)
                with T.when(thread < plan.rings * plan.copiers * 32):
                    copy(kernel, plan, memory, role, T.let("warp", thread // 32), T.let("lane", thread % 32))
                if plan.streamed:
                    ring = T.let("ring", thread // 32 - plan.rings * plan.copiers)
                    with T.when(T.And(T.And(ring >= 0, ring < plan.rings), thread % 32 == 0)):
                        stream(kernel.steps, plan, memory, role, ring, a["recurrent"])
            with T.Else():
                T.note("MMA warpgroups: weights to registers, then products and gates of every step")
                register_alloc(multiplying)
                worker = T.let("worker", thread - TEAM)
                products = Products(plan, memory, role, T.let("team", worker // TEAM),
                                    T.let("team_thread", worker % TEAM), a["recurrent"])
                T.note("gates, prologue: constants, states and first inputs of each thread's (unit, batch row) pairs")
                gates = Gates(kernel, plan, memory, role, worker)
                gates.begin()
                with T.serial("t", 0, kernel.steps) as t:
                    products.run(t, gates.meanwhile)
                    T.note("MMA warpgroups: partial sums to shared memory, or to the CTA that finishes their units")
                    products.store(a.get("handed"))
                    T.note("gates, epilogue: wait for all partial sums; the cell's scalars")
                    gates.step(t)
    return made()


def _prepare(plan: WidePlan, memory: Memory, thread: Expr) -> None:
    """The barriers, by the first thread, for all."""
    T.note("prologue: one thread initialises the mbarriers of all stages: full, empty, weights")
    warps = plan.sharers * TEAM // 32
    with T.when(thread == 0):
        for ring in range(plan.rings):
            memory.state(ring).init(consumers=warps)
            if plan.resident:
                memory.resident(ring).init(producers=plan.resident)
            memory.streamed(ring).init(consumers=warps)
        fence_mbarrier_init()
        fence_async_shared()  # bulk copies arrive through this proxy
    sync_block()


def start_kernel(task: Task, plan: WidePlan, layout: Hoisted, math: str) -> PrimFunc:
    """The small kernel before: the initial state into the exchange, zero where there is none, and counters.

    ``start(T, B, <state>_in ..., vectors, [hoisted,] exchange, counters)``.

    Words beyond H, which pad the last chunks, are zero in both slots, and stay so.
    """
    with T.kernel("start") as made:
        kernel = declare_start(task, layout, math)
        exchange, counters = T.pointer("exchange", "uint32"), T.pointer("counters", "uint32")
        T.device_entry()
        T.note("before the recurrence: chunk counters to zero, the first state into the exchange")
        first = start_thread()
        with T.when(first < plan.groups * plan.counters):
            T.buffer_store(counters, T.uint32(0), [first * SPACING])
        with T.strided("place", plan.groups * SLOTS * plan.slot_words, first, BLOCKS * THREADS) as place:
            group = T.let("group", place // (SLOTS * plan.slot_words))
            unit, column, operand = place_of(plan, T.let("word", place % plan.slot_words))
            unit, column = T.let("unit", unit), T.let("column", column)
            row = T.let("row", group * plan.rows + column)
            slot = place // plan.slot_words % SLOTS
            given = T.And(slot == 0, T.And(unit < plan.hidden, column < plan.rows))
            with T.If(given if plan.operands == 1 else T.And(given, operand < plan.operands)):
                with T.Then():
                    values = initial_values(kernel, (unit, row, operand))
                    T.buffer_store(exchange, pack(values, plan.dtype), [place])
                with T.Else():
                    T.buffer_store(exchange, T.uint32(0), [place])
    return made()
