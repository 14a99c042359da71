"""How a configuration of the wide persistent schedule cuts a layer, and what it needs on chip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any

from ecornn.analysis.liveness import late_operands
from ecornn.program import Packing
from ecornn.schedules.base import Knobs, Task, knob
from ecornn.schedules.builder import ceil_div
from ecornn.schedules.gemm import job
from ecornn.schedules.hoisted import hoisted_knob, hoisted_of
from ecornn.schedules.scalars.gate_threads import Share, mask_values
from ecornn.schedules.scalars.pointwise import MATH_TRADES

TEAM = 128  # threads of a warpgroup
DEPTH = 64  # values of K of a chunk: 128 bytes
LANES = 32  # chunks of a ring at most: one for each lane of the warp that copies them
PARTS = (1, 2, 3, 4)  # blocks that share K
MORE_PARTS = (*PARTS, 6, 8, 12, 16)  # where K is of several operands
SLOTS = 2  # of the exchange; exchange.py says why two
HANDED = 2  # slots of partial sums; exchange.py says why two
SPACING = 32  # words from counter to counter: each has a line of its own
SPARE_REGISTERS = {1: 20, 2: 28}  # by rings: addresses, descriptors, loop state; with one ring, many are made anew
MORE_SPARE = 8  # where weights are streamed
OUTPUTS = 5  # registers of an item for where an adjoint's outputs go; with one ring, these are made anew
REGISTERS = {2: (40, 232), 3: (24, 160)}  # of a copying and a multiplying thread, by multiplying warpgroups
HELD_SLOTS = 2  # for streamed weights, of chunks that are multiplied, while others are on their way


class WideKnobs(Knobs):
    groups: int = knob("groups of batch rows. More: fewer rows in each, but its blocks hold more of the weights")
    units: int = knob("units in a block. More: fewer blocks read the state, but each has more weights")
    parts: int = knob("blocks that share K. More: each reads less of the state, but they exchange sums",
                      before=1)
    row_teams: int = knob("2 or 3: so many warpgroups, each with its own rows, use one copy of the state; 1: two "
                          "warpgroups share K, which small blocks need", before=1)
    registers: int = knob("percent of weights in registers. More: products read less shared memory; fewer: the rest of "
                          "the weights leaves less room for the state")
    streamed: int = knob("percent of weights that are read from L2 or memory in every step, because registers and "
                         "shared memory have no room for them", before=0, absent=0)
    ahead: int = knob("KB of streamed weights that a block loads ahead. More: less room for weights that stay",
                      before=32, absent=0)
    lasting: int = knob("percent of streamed weights that L2 should keep, if it has no room for all of them; 100: no "
                        "hint to L2", before=100, absent=100)
    hoisted: str = hoisted_knob()
    math: str = knob(MATH_TRADES)


@dataclass(frozen=True)
class WidePlan:
    """The cut: ``groups`` of ``sets`` of ``parts`` blocks, each group with all weights and its own batch rows."""

    hidden: int
    dtype: str
    operands: int  # vectors of H values that products multiply, which make K: one in a layer, several in an adjoint
    groups: int
    sets: int
    parts: int  # blocks of a set, which share K
    units: int  # hidden units of a set
    rows: int  # batch rows of a group
    gates: int  # rows of weights of a unit
    interleave: int  # those of them that stand next to each other
    teams: int  # multiplying warpgroups of a block
    rings: int  # of stages in a block: one for each team, which share K, or one for all, which share rows
    chunks: int  # of K, for each ring
    kept: int  # chunks of a ring whose weights are in registers; the others' are in shared memory
    stages: int  # of a ring
    values: int  # that a thread keeps for each item
    knobs: WideKnobs
    streamed: int = 0  # chunks of a ring whose weights get to shared memory in every step, see warps.py
    lasting: int = 0  # of these, the first ones, which L2 is asked to keep; all: it is asked nothing
    ahead: int = 0  # bytes of streamed weights that a block has on their way at once

    @property
    def blocks(self) -> int:  # blocks of a group
        return self.sets * self.parts

    @property
    def threads(self) -> int:  # threads of a block; the first warpgroup copies
        return (1 + self.teams) * TEAM

    @property
    def columns(self) -> int:  # columns of operand B: the batch rows of a group, padded to 8
        return ceil_div(self.rows, 8) * 8

    @property
    def octets(self) -> int:  # groups of 8 rows of weights
        return self.gates * self.units // 8

    @property
    def tiles(self) -> int:  # tiles of 64 rows of weights
        return ceil_div(self.octets, 8)

    @property
    def sharers(self) -> int:  # teams that share a ring
        return self.teams // self.rings

    @property
    def own_tiles(self) -> int:  # tiles of one team
        return ceil_div(self.tiles, self.sharers)

    @property
    def finished(self) -> int:  # units that a block of a set computes the gates of; the last one may have fewer
        if self.parts == 1:
            return self.units
        each = ceil_div(self.units, self.parts)
        whole = ceil_div(each, 8) * 8  # sectors of their rows
        return whole if (self.parts - 1) * whole < self.units else ceil_div(each, 2) * 2

    @property
    def finishers(self) -> int:  # blocks of a set that compute gates
        return ceil_div(self.units, self.finished)

    @property
    def share(self) -> Share:
        return Share(self.finished, self.rows, self.teams * TEAM, self.parts > 1)

    @property
    def copiers(self) -> int:  # warps that copy for one ring
        return 1 if self.rings > 1 else min(3 if self.streamed else 4, self.stages)

    @property
    def copier_stages(self) -> int:  # stages that such a warp fills, at most
        return ceil_div(self.stages, self.copiers)

    @property
    def most_chunks(self) -> int:  # chunks of a ring that its copying warps have lanes for
        apart = self.streamed and self.copiers > 1
        return self.stages * (LANES // self.copier_stages) if apart else LANES

    @property
    def resident(self) -> int:  # chunks of a ring whose weights stay in shared memory
        return self.chunks - self.kept - self.streamed

    @property
    def slots(self) -> int:  # slots of a ring, for streamed weights of a chunk each
        return min(self.streamed, HELD_SLOTS + ceil_div(self.ahead, self.rings * self.weight_bytes))

    def streamed_before(self, position: Any) -> Any:
        """Chunks of a ring before this position, from ``kept`` on, whose weights are streamed: as evenly among the
        others as may be, so that L2 is at work all the time."""
        return (position - self.kept) * self.streamed // max(1, self.chunks - self.kept)

    def stream(self, position: int) -> int | None:  # number among the streamed chunks of the one at a position
        before = self.streamed_before(position)
        return before if position >= self.kept and self.streamed_before(position + 1) > before else None

    @property
    def weight_bytes(self) -> int:  # bytes of one chunk's weights: padding rows take none, and read what lies behind
        return self.octets * 8 * DEPTH * 2

    @property
    def stage_bytes(self) -> int:
        return self.columns * DEPTH * 2

    @property
    def stride(self) -> int:  # floats between columns of the partial sums: 4 modulo 16, so that no banks conflict
        return ceil_div(self.gates * self.finished, 16) * 16 + 4

    @property
    def places(self) -> tuple[int, ...]:  # first bytes of weights, slots for streamed ones, partial sums and barriers
        return tuple(accumulate(self.rings * size for size in (
            self.stages * self.stage_bytes, self.resident * self.weight_bytes, self.slots * self.weight_bytes,
            self.columns * self.stride * 4)))

    @property
    def barriers(self) -> int:  # of a ring: full and empty of stages, that of its weights, full and empty of slots
        return 2 * self.stages + 1 + 2 * self.slots

    @property
    def shared(self) -> int:  # bytes of dynamic shared memory
        _, _, sums, barriers = self.places
        return max(barriers + self.rings * self.barriers * 8, sums + -self.octets % 8 * 128)  # behind the last weights

    @property
    def registers(self) -> int:  # about, of a multiplying thread; gate math has the accumulators' once more
        return (self.kept * self.own_tiles * 16 + self.own_tiles * self.columns // 2 + self.share.items * self.values
                + SPARE_REGISTERS[self.rings] + (MORE_SPARE if self.streamed else 0))

    @property
    def slot_words(self) -> int:  # words of one slot of a group's exchange
        return self.counters * self.columns * DEPTH // 2

    @property
    def counters(self) -> int:  # counters of a group, one for each chunk
        return self.parts * self.rings * self.chunks

    @property
    def reach(self) -> int:  # chunks of one operand; behind the last operand there may be some that only pad K
        return self.counters if self.operands == 1 else ceil_div(self.hidden, DEPTH)

    @property
    def packed_chunks(self) -> int:  # chunks whose weights lie in memory: those of a group, up to a whole operand
        return ceil_div(self.counters, self.reach) * self.reach

    @property
    def copied_bytes(self) -> int:  # bytes of state that are copied to one block in a step
        return self.rings * self.chunks * self.stage_bytes

    @property
    def streamed_bytes(self) -> int:  # bytes of weights that are copied to one block in a step
        return self.rings * self.streamed * self.weight_bytes

    @property
    def handed_bytes(self) -> int:  # bytes of partial sums that are handed to one block in a step
        return (self.parts - 1) * self.finished * self.gates * self.rows * 4

    @property
    def handed_rows(self) -> int:  # rows of a block's units in what it gets from another one, padded to sectors
        return ceil_div(self.gates * self.finished, 8) * 8

    @property
    def handed_words(self) -> int:  # words of one slot of a set's partial sums
        return self.finishers * (self.parts - 1) * self.columns * self.handed_rows


def unit_step(task: Task) -> int:
    """Units of a set come in multiples of this, so that rows of weights fill octets."""
    return max(2, 8 // gcd(len(task.graph.phases[0].products), 8))


def plan_of(task: Task, knobs: WideKnobs) -> WidePlan:
    """The plan of a configuration; it need not fit, ``check`` says that."""
    w, graph = task.workload, task.graph
    (phase,), masks, words = graph.phases, mask_values(task), hoisted_of(task, knobs.hoisted).words()
    gates, operands = len(phase.products), len(phase.operands)
    teams, rings = (2, 2) if knobs.row_teams == 1 else (knobs.row_teams, 1)
    chunks = ceil_div(operands * ceil_div(w.hidden, DEPTH), rings * knobs.parts)
    values = len(graph.states) + len(graph.hoisted_outputs) + masks + 2
    if task.traversal.backward:  # what is exchanged is not kept, but for rows that take no part
        states = set(graph.states.values()) - (set() if task.traversal.lengths else set(phase.operands))
        values = len(states) + words + masks + 2 + (operands if masks else 0) + (OUTPUTS if rings > 1 else 0)
    if late_operands(graph):  # the next step's inputs, too
        values += words
    streamed = ceil_div(chunks * knobs.streamed, 100)
    plan = WidePlan(
        hidden=w.hidden, dtype=w.dtype, operands=operands, groups=knobs.groups, sets=ceil_div(w.hidden, knobs.units),
        parts=knobs.parts, units=knobs.units, rows=ceil_div(w.batch, knobs.groups), gates=gates,
        interleave=gcd(gates, 8), teams=teams, rings=rings, chunks=chunks, kept=ceil_div(chunks * knobs.registers, 100),
        stages=1, values=values, knobs=knobs, streamed=streamed, lasting=streamed * knobs.lasting // 100,
        ahead=knobs.ahead << 10)
    stage = rings * (plan.stage_bytes + 16)
    return replace(plan, stages=max(1, min(chunks, 1 + (task.device.shared - plan.shared) // stage)))


def packing_of(task: Task, plan: WidePlan) -> Packing:
    """Recurrent weights: (set, chunk) pieces of 8-value chunks of K, octets, 8 rows, 8 values: core matrices of wgmma
    without a swizzle. Product ``interleave`` u + g of the rows of gates that are interleaved is gate g of unit u."""
    (phase,), e = task.graph.phases, plan.interleave
    made, multiplied = (plan.sets, plan.units * e // 8, 8 // e), (plan.reach, DEPTH // 8, 8)
    gates = (plan.gates // e, e)
    if not task.traversal.backward:
        sources = tuple(p.term.source for p in phase.products)
        return job.packing_of(sources, gates, made, multiplied, (2, 5, 6, 0, 3, 4, 1, 7), plan.dtype)
    operands = [[p.source(o) for p in phase.products] for o in phase.operands]
    operands += [[("", 0)] * plan.gates] * (plan.packed_chunks // plan.reach - plan.operands)
    return job.packing_of(tuple(s for own in operands for s in own), (len(operands), *gates), made, multiplied,
                          (3, 0, 6, 7, 1, 4, 5, 2, 8), plan.dtype, transposed=phase.products[0].terms[0].transposed)
