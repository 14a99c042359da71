"""How a configuration of the wide persistent schedule cuts a layer, and what it needs on chip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from ecornn.program import Packing
from ecornn.schedules.base import Config, Task
from ecornn.schedules.items import Share

TEAMS = 2  # multiplying warpgroups of a block, which share K
TEAM = 128  # threads of a warpgroup
THREADS = (1 + TEAMS) * TEAM  # the first warpgroup copies
DEPTH = 64  # values of K of a chunk: 128 bytes
LANES = 32  # chunks of a warpgroup at most: one for each lane of the warp that copies them
SLOTS = 2  # of the exchange; exchange.py says why two
SPACING = 32  # words from counter to counter: each has a line of its own
SPARE_REGISTERS = 28  # addresses, descriptors and loop state beside weights, accumulators and items


@dataclass(frozen=True)
class Plan:
    """The cut: ``groups`` of ``blocks`` blocks, each group with all weights and its own batch rows.

    Attributes
    ----------
    units, rows : hidden units of a block, batch rows of a group
    gates, interleave : rows of weights of a unit; those of them that stand next to each other
    chunks : of K, for each of the multiplying warpgroups
    kept : chunks of a warpgroup whose weights are in registers; the others' are in shared memory
    stages : of a warpgroup's ring of chunks of state
    values : that a thread keeps for each item
    """

    hidden: int
    dtype: str
    groups: int
    blocks: int
    units: int
    rows: int
    gates: int
    interleave: int
    chunks: int
    kept: int
    stages: int
    values: int

    @property
    def columns(self) -> int:
        """Columns of operand B: the batch rows of a group, padded to 8."""
        return -(-self.rows // 8) * 8

    @property
    def octets(self) -> int:
        """Groups of 8 rows of weights."""
        return self.gates * self.units // 8

    @property
    def tiles(self) -> int:
        """Tiles of 64 rows of weights."""
        return -(-self.octets // 8)

    @property
    def share(self) -> Share:
        return Share(self.units, self.rows, TEAMS * TEAM)

    @property
    def weight_bytes(self) -> int:
        """Of one chunk's weights: padding rows take none, and read what lies behind."""
        return self.octets * 8 * DEPTH * 2

    @property
    def stage_bytes(self) -> int:
        return self.columns * DEPTH * 2

    @property
    def stride(self) -> int:
        """Floats between columns of the partial sums: 4 modulo 16, so that no banks conflict."""
        return -(-self.octets // 2) * 16 + 4

    @property
    def first_weight(self) -> int:
        """Where weights begin, in bytes, behind the stages."""
        return TEAMS * self.stages * self.stage_bytes

    @property
    def first_sum(self) -> int:
        return self.first_weight + TEAMS * (self.chunks - self.kept) * self.weight_bytes

    @property
    def first_barrier(self) -> int:
        """Of each warpgroup: full and empty of each stage, and that of the weights."""
        return self.first_sum + TEAMS * self.columns * self.stride * 4

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return self.first_barrier + TEAMS * (2 * self.stages + 1) * 8

    @property
    def registers(self) -> int:
        """Estimate of a multiplying thread's registers; gate math has the accumulators' once more."""
        return (self.kept * self.tiles * 16 + self.tiles * self.columns // 2 + self.share.items * self.values
                + SPARE_REGISTERS)

    @property
    def slot_words(self) -> int:
        """Words of one slot of a group's exchange."""
        return TEAMS * self.chunks * self.columns * DEPTH // 2

    @property
    def counters(self) -> int:
        """Of a group, one for each chunk."""
        return TEAMS * self.chunks


def unit_step(task: Task) -> int:
    """Units of a block come in multiples of this, so that rows of weights fill octets."""
    return max(2, 8 // gcd(len(task.graph.phases[0].rows), 8))


def plan_of(task: Task, config: Config) -> Plan:
    """The plan of a configuration; it need not fit, ``check`` says that."""
    w, graph = task.workload, task.graph
    gates, groups, units = len(graph.phases[0].rows), int(config["groups"]), int(config["units"])
    chunks = -(-w.hidden // (DEPTH * TEAMS))
    values = len(graph.states) + len(graph.hoisted_outputs) + task.place.lengths + task.place.resets + 2
    plan = Plan(hidden=w.hidden, dtype=w.dtype, groups=groups, blocks=-(-w.hidden // units),
                units=units, rows=-(-w.batch // groups), gates=gates,
                interleave=gcd(gates, 8), chunks=chunks, kept=-(-chunks * int(config["registers"]) // 100),
                stages=1, values=values)
    stage = TEAMS * (plan.stage_bytes + 16)
    return replace(plan, stages=max(1, min(chunks, 1 + (task.device.shared - plan.shared) // stage)))


def packing_of(task: Task, plan: Plan) -> Packing:
    """Recurrent weights: (block, chunk) pieces of 8-value chunks of K, octets, 8 rows, 8 values.

    These are the core matrices of wgmma without a swizzle. Row ``interleave`` u + g of the rows of gates
    that are interleaved is gate g of unit u.
    """
    (phase,), e = task.graph.phases, plan.interleave
    sources = tuple((r.weight, r.gate) for r in phase.rows)
    every = TEAMS * plan.chunks
    return Packing(sources, (plan.gates, plan.blocks * plan.units, every * DEPTH),
                   (plan.gates // e, e, plan.blocks, plan.units * e // 8, 8 // e, every, DEPTH // 8, 8),
                   (2, 5, 6, 0, 3, 4, 1, 7), plan.dtype)
