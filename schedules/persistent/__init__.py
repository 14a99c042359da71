"""Persistent schedule: one launch for the whole sequence, recurrent weights stay on chip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ecornn.analysis.heads import heads_of, most_heads
from ecornn.analysis.liveness import late_operands
from ecornn.analysis.narrow import columns_of
from ecornn.program import PACKED, WORKSPACE, Buffer, Call, Extent, Fill, Launch, Packing, Program
from ecornn.schedules.assemble import assemble
from ecornn.schedules.backward.assemble import assemble_recurrence, beyond
from ecornn.schedules.base import Component, Config, Cut, Knob, SearchedSchedule, Task, register_limit
from ecornn.schedules.builder import PrimFunc, ceil_div
from ecornn.schedules.cuda.isa.tensor_core import PAIR, words
from ecornn.schedules.gemm.projection import job_of, project
from ecornn.schedules.gemm.rows_mma import shape_of
from ecornn.schedules.hoisted import Hoisted, gained, hoisted_choices, hoisted_of, preferred
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.persistent import plan as plans
from ecornn.schedules.persistent.estimate import best_ahead, estimate, parts_of, recurrence, workers_time
from ecornn.schedules.persistent.exchange import LARGEST, begins_early, start_kernel
from ecornn.schedules.persistent.kernel import persistent_kernel
from ecornn.schedules.persistent.plan import PersistentKnobs, PersistentPlan
from ecornn.schedules.rates import gpu_rates
from ecornn.schedules.scalars.gate_threads import start_launch
from ecornn.schedules.scalars.pointwise import math_choices
from ecornn.schedules.scalars.row_sums import deferred
from ecornn.schedules.timeline import together

STREAMED_ROWS = 8  # with more, code with weights straight into registers takes half a minute to compile
STREAMED = 0.8  # of L2: the most of the weights that may be read from there every step, a line by one block only
ROWS = (8, 16, 24, 32, 48, 64)  # of a group
AHEAD = (100, 75, 50, 25, 0)
LATE = 2  # times as long as the recurrence: what workers may take before a configuration is not worth a trial
DOUBT = 1.1  # what a cluster must be expected to gain: the two estimates have errors of their own
HELD = 160 << 10  # bytes of weights of a block of a cluster; with more, the share in registers is worth finer steps
FEWEST = "rare"  # fences; without any, the only value
UNWRITTEN = 0xFF  # bytes of a sentinel
ROUNDED = 1 - 1e-9  # of a bound that is no bound by its last digits
ITEMS = 8  # (unit, batch row) pairs of a gate thread, at most


class _Shape(NamedTuple):
    config: Config  # with all weights in registers, and the product with x ahead
    plan: PersistentPlan  # the whole one
    registers: tuple[Any, ...]  # values of that knob
    beside: bool  # whether the product with x may run beside the recurrence


def _doubt(config: Config) -> float:
    return DOUBT if config["carrier"] == "cluster" else 1


class Persistent(SearchedSchedule[PersistentPlan]):
    """Serves every cell with a recurrent product whose weights fit in registers and shared memory."""

    name = "persistent"
    revision = 4
    kind = "cuda"
    sequences = True
    backward = True
    heads = True
    weights = ("int8",)

    def refuses(self, task: Task) -> str | None:
        if task.traversal.backward and (reason := beyond(task)):
            return reason
        if task.workload.weights and any(len(phase.operands) > 1 for phase in task.graph.product_phases):
            return f"supports {task.workload.weights} weights only in products of one operand"
        if not task.graph.product_phases:
            return f"cell {task.graph.cell!r} has no recurrent product"
        if most_heads(task.graph) > 1:
            if len({heads_of(phase) for phase in task.graph.product_phases}) > 1:
                return f"cell {task.graph.cell!r} has products with different numbers of heads"
            if task.graph.statistics:
                return f"cell {task.graph.cell!r} has statistics of all units beside products with heads"
        if not task.graph.phases[0].products:
            return f"cell {task.graph.cell!r} has statistics before its first product"
        if task.graph.hoisted_statistics and (late := late_operands(task.graph)):
            return (f"cell {task.graph.cell!r} multiplies {late[0].name}, which depends on statistics of x and on a "
                    "state")
        if not task.device.can.tensor_cores:
            return "needs tensor cores of compute capability 8.0"
        if not any(self.check(task, config) is None for _, config in self.cuts(task)):  # the first that is found
            return (f"the recurrent weights of {task.workload} do not fit on the {task.device.cores} "
                    f"multiprocessors of {task.device.name}")
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        w, graph, heads = task.workload, task.graph, most_heads(task.graph)
        late = task.traversal.backward or graph.hoisted_statistics or late_operands(graph)
        wide = any(len(p.products) == 3 for p in graph.product_phases)
        small = plans.unit_step(task, 4 if wide else 0)
        sizes = [u for u in range(128 // small * small, 0, -small) if heads == 1 or w.hidden // heads % u == 0]
        # of those that make the same number of blocks, the fewest
        units = tuple({ceil_div(w.hidden, u): u for u in sizes if ceil_div(w.hidden, u) <= task.device.cores}.values())
        groups = {ceil_div(w.batch, rows) for rows in ROWS}
        scarce = self._weights(task) > HELD * task.device.cores
        if clusters := self._clusters(task, units):
            few = [ceil_div(w.batch, count) for count in
                   (task.device.clusters(size) // heads for size in (8, task.device.can.cluster)) if count]
            groups |= {ceil_div(w.batch, rows) for rows in few}
        return PersistentKnobs.offered({
            "groups": tuple(sorted(groups)), "units": units, "warps": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14),
            "gate_warps": (1, 2, 3, 4, 5, 6, 8), "chains": (1, 2),
            "registers": (100, 75, 60, 50, 40, 33, 25, 15, 0) if scarce else (100, 75, 60, 50, 40, 25, 0),
            "interleave": (0, 4) if wide else (0,), "ahead": AHEAD if graph.hoisted_outputs and not late else AHEAD[:1],
            "fences": ("every", "products", FEWEST), "hoisted": hoisted_choices(task),
            "carrier": ("l2", "cluster") if clusters else ("l2",), "math": math_choices(task)})

    def plan(self, task: Task, config: Config, **instead: int) -> PersistentPlan:
        """The plan of a configuration, with ``instead`` in place of knobs, which are then not read."""
        return plans.plan_of(task, PersistentKnobs(config), **instead)

    @staticmethod
    def _clusters(task: Task, units: tuple[int, ...]) -> bool:
        """Tells whether clusters are worth a trial: not if much of the weights is in shared memory, which is slower."""
        heads = most_heads(task.graph)
        own, largest = task.workload.hidden // heads, min(LARGEST, task.device.can.cluster)
        return (Persistent._weights(task) <= heads * largest * HELD
                and min(units, default=own) < own <= largest * max(units) and task.device.clusters(largest) > 0)

    @staticmethod
    def _weights(task: Task) -> int:
        w = task.workload
        return sum(len(p.products) * len(p.operands) * words(columns_of(p, w.hidden), w.dtype)
                   for p in task.graph.product_phases) * w.hidden * (2 if w.weights else 4)

    def check(self, task: Task, config: Config) -> str | None:
        knobs = PersistentKnobs(config)
        # Conditions on few knobs come first: a search learns from the knobs that were read which it need not ask for.
        reason = self._unplaced(task, knobs) or self._idle_gates(task, knobs)
        if reason is None and knobs.units % (step := plans.unit_step(task, knobs.interleave)):
            reason = f"units={knobs.units} is not a multiple of {step}"
        return reason or self._idle_warps(task, knobs) or self._unfit(task, knobs)

    @staticmethod
    def _unplaced(task: Task, knobs: PersistentKnobs) -> str | None:
        """None, or why blocks of ``units`` in ``groups`` are not on the chip at once, or not carried that way."""
        device, w = task.device, task.workload
        units, groups, heads = knobs.units, knobs.groups, most_heads(task.graph)
        if heads > 1 and w.hidden // heads % units:
            return f"units={units} does not divide a head of {w.hidden // heads}"
        blocks = groups * ceil_div(w.hidden, units)
        if blocks > device.cores:
            return f"it needs {blocks} blocks, but there are {device.cores} multiprocessors"
        if knobs.carrier == "cluster":
            size = blocks // (groups * heads)
            if not 2 <= size <= LARGEST:
                return f"a cluster would have {size} blocks; 2 to {LARGEST} are possible"
            if groups * heads > (most := device.clusters(size)):
                return f"it needs {groups * heads} clusters of {size} blocks, but {most} fit on the chip at once"
        elif groups not in {ceil_div(w.batch, r) for r in ROWS}:
            return f"groups={groups} is only possible with carrier=cluster"
        return "a group would have no batch rows" if (groups - 1) * ceil_div(w.batch, groups) >= w.batch else None

    @staticmethod
    def _idle_gates(task: Task, knobs: PersistentKnobs) -> str | None:
        """None, or why ``gate_warps`` are too many or too few for the ``units`` and batch rows of a block."""
        units, rows = knobs.units, ceil_div(task.workload.batch, knobs.groups)
        threads = 32 * knobs.gate_warps
        lanes = plans.lanes_of(units) if task.graph.statistics else units
        items = ceil_div(lanes * rows, threads)
        if (items - 1) * threads >= lanes * rows or items > ITEMS:
            return f"each gate thread would have {items} items; at most {ITEMS} are possible, and none may be idle"
        if lanes * rows <= threads - 32:
            return "a gate warp would have no work"
        if task.graph.statistics and lanes > 32 and items > 1 and threads % lanes:
            return f"{threads} gate threads do not divide into rows of {lanes} lanes"
        most = max((len(p.statistics) for p in task.graph.phases), default=0)
        if knobs.carrier == "l2" and most > 2 * min(32, lanes):  # a lane sends two
            return f"rows of {lanes} lanes are too short for {most} statistics at once"
        return None

    @staticmethod
    def _idle_warps(task: Task, knobs: PersistentKnobs) -> str | None:
        """None, or the reason why ``warps`` are too many for the products, or too many beside ``gate_warps``."""
        w, units, gate_threads, warps = task.workload, knobs.units, 32 * knobs.gate_warps, knobs.warps
        rows, threads = ceil_div(w.batch, knobs.groups), gate_threads + 32 * warps
        if threads > 1024:
            return f"a block would have {threads} threads; at most 1024 are possible"
        if threads % 128 and (plans.lanes_of(units) if task.graph.statistics else units) * rows > gate_threads:
            return "another gate warp would cost no registers, which four warps get at a time, and would have work"
        heads = most_heads(task.graph)
        of_state = words(w.hidden // heads, w.dtype)
        if (warps - 1) * ceil_div(of_state, PAIR * warps) * PAIR >= of_state:
            return "a product warp would have no work"
        if heads > 1 and task.traversal.backward and of_state % (PAIR * warps):
            return f"{of_state} words of a head do not fill pairs of k-tiles of {warps} warps"
        return None

    def _unfit(self, task: Task, knobs: PersistentKnobs) -> str | None:
        """None, or the reason why the rest of what is asked for does not fit, beside the projection or without it."""
        device = task.device
        if task.graph.hoisted_statistics and knobs.ahead != 100:
            return "ahead must be 100, since statistics of the product with x need all of it"
        if task.traversal.backward and knobs.ahead != 100:
            return "a backward pass has no product with x, so that ahead must be 100"
        if late_operands(task.graph) and knobs.ahead != 100:
            return "ahead must be 100, since the first factors read the product with x"
        # neither another chain nor the projection beside makes room for what does not fit without them
        reason = self._crowded(task, self.plan(task, knobs.values, chains=1, ahead=100))
        if reason is None and knobs.chains != 1:
            reason = self._crowded(task, self.plan(task, knobs.values, ahead=100))
        if reason is None and knobs.carrier == "cluster" and knobs.fences != FEWEST:
            return "a cluster needs no fences"
        if reason is None and knobs.ahead != 100:
            if knobs.carrier == "cluster":
                return "computing the product with x beside the recurrence needs blocks outside of clusters"
            if task.traversal.reverse:
                return "ahead must be 100 for a recurrence from the last step to the first"
            if knobs.groups * ceil_div(task.workload.hidden, knobs.units) == device.cores:
                return "no multiprocessor is left for the product with x beside the recurrence"
            plan = self.plan(task, knobs.values)
            if workers_time(task, plan) > LATE * recurrence(plan, gpu_rates(device)):
                return f"{plan.workers} blocks are too few for the product with x beside the recurrence"
            reason = self._crowded(task, plan)
        return reason

    def _crowded(self, task: Task, plan: PersistentPlan) -> str | None:
        """Returns what a plan needs more of than there is, or None."""
        device = task.device
        if any(p.streamed_pairs and not p.slots for p in plan.phases) and plan.rows > STREAMED_ROWS:
            return (f"{plan.streamed} bytes of a block's weights do not fit on the chip, and {plan.rows} batch rows "
                    "are too many to stream them")
        if plan.streamed * plan.groups * plan.blocks > device.l2 * STREAMED:
            return f"{plan.streamed} bytes of a block's weights do not fit on the chip"
        limit = register_limit(device, plan.block_threads)
        if plan.registers > limit:
            return f"it needs about {plan.registers} registers per thread, but {limit} are available"
        if plan.workers and plans.worker_shape(task, plan) is None:
            return f"the product with x needs more than {limit} registers per thread"
        shared = max(plans.block_shared(task, plan), shape_of(job_of(task)).shared if plan.ahead else 0)
        return (f"it needs {shared} bytes of shared memory, but {device.shared} are available" if shared > device.shared
                else None)

    def rebatched(self, config: Config, batch: int, task: Task) -> Config:
        """``config`` with groups of as many batch rows; in L2, which polls and multiplies eights, of as many eights."""
        knobs = PersistentKnobs(config)
        each = 1 if knobs.carrier == "cluster" else 8
        return {**config, "groups": ceil_div(task.workload.batch, ceil_div(ceil_div(batch, knobs.groups), each) * each)}

    def expected(self, task: Task) -> float:
        plan = self.plan(task, self.default(task))
        return estimate(task, plan) - gained(task, plan.knobs.hoisted)

    def search(self, task: Task) -> Config | None:
        """The best of :meth:`cuts`, the first of several; those are left out that cannot be it."""
        found: tuple[float, int, Config] | None = None
        for least, number, shape in sorted((self._least(task, shape), n, shape)
                                           for n, shape in enumerate(self._shapes(task))):
            if found is not None and least > found[0]:
                break
            for cost, config in self._cuts_of(task, shape):
                cost *= _doubt(config)
                if (found is None or (cost, number) < found[:2]) and self.check(task, config) is None:
                    found = cost, number, config
        return None if found is None else {**found[2], "hoisted": preferred(task, found[0], once=True)}

    def cuts(self, task: Task) -> Iterator[tuple[float, Config]]:
        """Estimate and configuration of each cut with most weights in registers; with workers some may not be valid."""
        for shape in self._shapes(task):
            yield from self._cuts_of(task, shape)

    def _shapes(self, task: Task) -> Iterator[_Shape]:
        """The cuts but for what of the weights is in registers, and for workers."""
        knobs = {k.name: k.values for k in self.knobs(task)}
        few = task.workload.batch == 1 or task.graph.statistics
        for carrier, groups, units in product(*(knobs[n] for n in ("carrier", "groups", "units"))):
            placed: Config = {"carrier": carrier, "groups": groups, "units": units}
            rest: Config = {"fences": FEWEST if few or carrier == "cluster" else "products", "hoisted": "float32",
                            "math": "exact" if len(knobs["math"]) == 1 else "fast"}
            if self._unplaced(task, PersistentKnobs(placed)):
                continue
            gates = [n for n in knobs["gate_warps"]
                     if self._idle_gates(task, PersistentKnobs({**placed, "gate_warps": n})) is None]
            filled = [n for n in knobs["interleave"] if int(units) % plans.unit_step(task, int(n)) == 0]
            for interleave, warps, gate_warps in product(filled, knobs["warps"], gates):
                shape: Config = {**placed, "interleave": interleave, "warps": warps, "gate_warps": gate_warps}
                if self._idle_warps(task, PersistentKnobs(shape)) is None:
                    config: Config = {**shape, "chains": 1, "registers": 100, "ahead": 100, **rest}
                    yield _Shape(config, plans.whole(task, PersistentKnobs(config)), knobs["registers"],
                                 carrier == "l2" and len(knobs["ahead"]) > 1)

    def _least(self, task: Task, shape: _Shape) -> float:
        """A bound of all that :meth:`_cuts_of` finds."""
        plan = shape.plan._replace(ahead=0) if shape.beside else shape.plan
        return estimate(task, plan) * _doubt(shape.config) * ROUNDED

    def _cuts_of(self, task: Task, shape: _Shape) -> Iterator[tuple[float, Config]]:
        limit = register_limit(task.device, shape.plan.block_threads)
        for registers in shape.registers:
            if plans.fewest_registers(shape.plan, registers) > limit:
                continue
            plan, cut = plans.placed(task, shape.plan, registers), {**shape.config, "registers": registers}
            if self._crowded(task, plan) is None:
                for ahead in best_ahead(task, plan) if shape.beside else (100,):
                    config = {**cut, "ahead": ahead}
                    yield estimate(task, plan if ahead == 100 else self.plan(task, config)), config
                return

    def features(self, task: Task, plan: PersistentPlan) -> dict[str, float]:
        return {
            "blocks": plan.groups * plan.blocks, "threads": plan.threads, "columns": plan.columns, "rows": plan.rows,
            "polled_words": sum(plan.slot_words(p) for p in plan.phases),
            "lane_words": sum(p.pairs * plan.tiles * 4 for p in plan.phases),
            "products": sum(p.pairs * 2 * ceil_div(p.octets(plan.units), 2) * plan.tiles for p in plan.phases),
            "sums": sum(plan.warps * p.gates * plan.items for p in plan.phases), "registers": plan.registers,
            "shared": plan.shared, "estimate": estimate(task, plan) - gained(task, plan.knobs.hoisted),
            "workers": plan.workers, "ring": plan.ring, "acquires": int(plan.fences != "rare"),
            "polls": max(map(plan.turns, plan.phases)),
            "shared_weights": sum(map(plan.shared_weight_words, plan.phases)), "streamed": plan.streamed}

    def stages(self, task: Task, plan: PersistentPlan) -> dict[str, float]:
        return parts_of(task, plan)

    def cut(self, task: Task, plan: PersistentPlan) -> Cut:
        pairs = [(p, 4 * plan.warps * plan.octet_words * p.octets(plan.units)) for p in plan.phases]  # and their bytes
        held = {"registers": sum(p.register_pairs * size for p, size in pairs),
                "shared memory": sum(p.shared_pairs * size for p, size in pairs), "L2, read every step": plan.streamed}
        return Cut(plan.groups, plan.blocks, plan.units, plan.rows, "cluster" if plan.cluster else "L2", held,
                   heads=plan.heads, workers=plan.workers)

    def recurrence(self, task: Task, plan: PersistentPlan) -> Component:
        return _recurrence(task, plan, hoisted_of(task, plan.knobs.hoisted), early=False)

    def together(self, task: Task, plan: PersistentPlan) -> int:
        return together(task.traversal, plan.groups // plan.heads, plan.rows)

    def program(self, task: Task, plan: PersistentPlan) -> Program:
        layout = hoisted_of(task, plan.knobs.hoisted)
        if task.traversal.backward:
            return assemble_recurrence(task, self.recurrence(task, plan), layout, self.together(task, plan))
        early = begins_early(task, plan)
        recurrence = partial(_recurrence, replace(task, graph=deferred(task.graph)), plan, layout, early=early)
        return assemble(task, recurrence, layout, project(task, layout, plan.ahead, early), deferred=True,
                        together=self.together(task, plan))


def _recurrence(task: Task, plan: PersistentPlan, layout: Hoisted, kept: Stored = NOTHING, *, early: bool) -> Component:
    functions, buffers, calls = dict[str, PrimFunc](), list[Buffer](), list[Call]()
    slots = plan.groups * plan.ring  # of an exchange through L2
    for i, phase in enumerate(plan.phases):
        packing = plans.packing_of(task, plan, i)
        buffers.append(Buffer(f"recurrent_{i}", PACKED, "uint8" if plan.scaled else plan.dtype,
                              Extent(prod(packing.pad)), packing))
        if plan.scaled:  # what integers are multiples of: (gate, unit) of the rows that the packing has
            scales = Packing(packing.sources, packing.pad, packing.pad, (0, 1, 2), "scale")
            buffers.append(Buffer(f"scales_{i}", PACKED, "float32", Extent(prod(scales.pad[:-1])), scales))
        if not plan.cluster:
            buffers.append(Buffer(f"exchange_{i}", WORKSPACE, "uint32", Extent(slots * plan.slot_words(phase))))
    if not plan.cluster:
        sums = [Buffer(f"sums_{e}", WORKSPACE, "uint32", Extent(slots * plan.sum_words(e)))
                for e in range(len(plan.sums))]
        buffers += sums
        functions["start"] = start_kernel(task, plan, layout, early)
        calls += [*(Fill(b.name, UNWRITTEN, b.extent) for b in sums), start_launch(early)]
    name, blocks = keeping("persistent", kept), plan.groups * plan.blocks + plan.workers
    functions[name] = persistent_kernel(task, plan, layout, kept, early)
    calls.append(Launch(name, blocks, plan.block_threads, plans.block_shared(task, plan),
                        cooperative=not plan.cluster, cluster=plan.blocks if plan.cluster else 1, early=early))
    return Component(functions, tuple(buffers), tuple(calls))
