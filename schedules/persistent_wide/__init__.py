"""Persistent schedule for large batches on Hopper: weights stay on chip, products by warpgroups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from math import prod

from ecornn.program import PACKED, WORKSPACE, Buffer, Extent, Fill, Launch, Program
from ecornn.schedules.assemble import assemble
from ecornn.schedules.backward.assemble import assemble_recurrence, beyond
from ecornn.schedules.base import Component, Config, Cut, Knob, SearchedSchedule, Task
from ecornn.schedules.builder import ceil_div
from ecornn.schedules.gemm.projection import no_projection, projection_time
from ecornn.schedules.hoisted import Hoisted, gained, hoisted_choices, hoisted_of, preferred, unhidden
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.persistent_wide import plan as plans
from ecornn.schedules.persistent_wide.exchange import UNWRITTEN
from ecornn.schedules.persistent_wide.kernel import start_kernel, wide_kernel
from ecornn.schedules.persistent_wide.plan import WideKnobs, WidePlan
from ecornn.schedules.rates import GPURates, gpu_rates
from ecornn.schedules.scalars.gate_threads import start_launch
from ecornn.schedules.scalars.pointwise import math_choices
from ecornn.schedules.timeline import together

HANDED_BYTES = 9.0  # of partial sums that a block gets in a cycle
HELD = 1.75  # times the tensor cores' time of a product: that of one with weights in registers
PRODUCT = 16  # cycles of the smallest product
HANDED_BESIDE = 1.2  # times that long, beside streamed weights
STATE_TURN, WEIGHTS_TURN = 1_250, 2_500  # cycles from a copy's start until its room is free again, but for its bytes
BEHIND = 0.15  # of the shorter of copies and products: what the longer one does not hide
# The share of a recurrence's time that hides what memory takes: inputs come while products run. By hand, from seven
# layers of 64 to 2048 rows: they took up to 1.65 times what was expected without it, and 0.9 to 1.1 times with it
HIDES = 0.75
GATES, ITEM = 250, 90  # cycles of the gates of a step, and of each of a thread's items


def estimate(task: Task, plan: WidePlan) -> float:
    """Nanoseconds of a step: the projection done ahead and the recurrence, with what memory takes longer."""
    rates = gpu_rates(task.device)
    step = cycles(plan, rates)[0] / rates.clock
    return projection_time(task) / task.device.cores + step + memory(task, step)


def memory(task: Task, step: float) -> float:
    """Nanoseconds that memory takes longer. An adjoint reads other values than hoisted ones; its times were fitted."""
    return 0.0 if task.traversal.backward else unhidden(task, step, HIDES)


def cycles(plan: WidePlan, rates: GPURates) -> tuple[float, float, float]:
    """Cycles of a step's recurrence, in all, of products and of gates; the rest is exchange that these do not hide."""
    copied = _streaming(plan, rates) if plan.streamed else plan.copied_bytes / _l2(plan, rates)
    from_shared = (64 * 16 * 2 + plan.columns * 16 * 2) / rates.shared
    tensor = rates.wgmma_column * plan.columns
    held, stored = max(HELD * tensor, PRODUCT), max(tensor, from_shared, PRODUCT)  # of the smaller rate
    products = plan.rings * plans.DEPTH / 16 * plan.own_tiles * plan.sharers  # of a chunk
    multiplied = products * (plan.kept * held + (plan.chunks - plan.kept) * stored)
    behind = BEHIND * min(copied, multiplied)
    gates = GATES + plan.columns * plan.stride * 4 * plan.rings * 2 / rates.shared + ITEM * plan.share.items
    handed = rates.l2_handover + plan.handed_bytes / HANDED_BYTES if plan.parts > 1 else 0.0
    handed *= HANDED_BESIDE if plan.streamed else 1.0
    return rates.l2_counted + max(copied, multiplied) + behind + handed + gates, multiplied, gates


def _l2(plan: WidePlan, rates: GPURates) -> float:
    """Bytes a cycle that a block gets from L2."""
    return min(rates.l2_bulk, rates.bounds.l2 / rates.clock / (plan.groups * plan.blocks))


def _streaming(plan: WidePlan, rates: GPURates) -> float:
    """Cycles of copies where weights are streamed, but for those that come while a step waits for state: of what is
    slowest, L2, memory, or the room that chunks of state and of weights come and go through."""
    blocks, ahead = plan.groups * plan.blocks, plan.rings * plan.slots * plan.weight_bytes
    found = [(plan.copied_bytes + plan.streamed_bytes - ahead) / _l2(plan, rates)]
    if plan.stages < plan.chunks:
        turn = STATE_TURN + plan.stage_bytes / rates.l2_bulk
        found.append(plan.copied_bytes * turn / (plan.rings * plan.stages * plan.stage_bytes))
    if plan.slots < plan.streamed:
        turn = WEIGHTS_TURN + plan.weight_bytes / rates.l2_bulk
        found.append(plan.streamed_bytes * turn / ahead)
    if plan.streamed_bytes * blocks > rates.l2_kept:
        from_memory = blocks * plan.streamed_bytes - rates.l2_lasting
        found.append(from_memory / (rates.memory * blocks) * rates.clock)
    return max(found)


def parts_of(task: Task, plan: WidePlan) -> dict[str, float]:
    """Nanoseconds of what :func:`estimate` adds up."""
    rates = gpu_rates(task.device)
    step, products, gates = (one / rates.clock for one in cycles(plan, rates))
    parts = {"product of x": projection_time(task) / task.device.cores, "exchange": step - products - gates,
             "products": products, "gates": gates}
    longer = memory(task, step)
    return parts | ({"memory": longer} if longer else {})


ITEMS = 8  # (unit, batch row) pairs of a thread, at most
COLUMNS = 256  # of a wgmma, at most
WIDEST, WIDEST_SUM = 128, 256  # units of a set at most: of a layer, and where a unit has one row of several operands
STREAMED = (0, 10, 20, 30, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90)  # percent
LASTING = (100, 75, 50, 35, 25, 15, 0)  # percent of streamed weights
AHEAD = (32, 16, 64, 48, 96)  # KB; defaults have one of the first two
LARGE = 256 << 10  # bytes of weights for each multiprocessor that may not all stay: some from here on fit no other way
BUSY = 4  # stages of state at least, beside streamed weights
FEW_ROWS = 8  # of `persistent` where it streams
TRIED = 3  # percents that are streamed of one cut, from the least that fits
KEPT = (100, 88, 75, 63, 50, 43, 38, 31, 25, 19, 13, 0)  # percent


class PersistentWide(SearchedSchedule[WidePlan]):
    """Serves cells with one recurrent product, and adjoints, in 16-bit types on Hopper, where weights fit on chip."""

    name = "persistent_wide"
    revision = 1
    latest = 2
    kind = "cuda"
    sequences = True
    backward = True
    doubt = 1.25  # what `persistent` expects of LSTM 1024 B=64 is 24% too long

    def refuses(self, task: Task) -> str | None:
        w, phases, backward = task.workload, task.graph.phases, task.traversal.backward
        if backward and (reason := beyond(task)):
            return reason
        if not task.device.can.warpgroups:
            return "needs the warpgroup products of sm_90a"
        if w.dtype == "float32":
            return "needs a 16-bit data type"
        if len(phases) != 1 or not (backward or len(phases[0].operands) == 1) or phases[0].statistics:
            return f"cell {task.graph.cell!r} must have exactly one recurrent product, of one vector"
        if w.hidden > plans.PARTS[-1] * plans.LANES * plans.DEPTH:
            return f"hidden={w.hidden} is too large; the limit is {plans.PARTS[-1] * plans.LANES * plans.DEPTH}"
        if fault := no_projection(task):
            return fault
        if next(self.candidates(task), None) is None:
            return (f"the recurrent weights of {w} do not fit on the {task.device.cores} "
                    f"multiprocessors of {task.device.name}")
        return None

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        w, step, several = task.workload, plans.unit_step(task), len(task.graph.phases[0].operands) > 1
        widest = WIDEST_SUM if several else WIDEST
        groups = sorted({ceil_div(w.batch, rows) for rows in (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)})
        # of those that make the same number of blocks, the fewest
        units = tuple({ceil_div(w.hidden, u): u for u in range(widest // step * step, 0, -step)
                       if ceil_div(w.hidden, u) <= task.device.cores}.values())
        large = {"streamed": STREAMED, "ahead": AHEAD, "lasting": LASTING} if _large(task) else {}
        return WideKnobs.offered({
            "groups": tuple(groups), "units": units, "parts": plans.MORE_PARTS if several else plans.PARTS,
            "row_teams": (1, *plans.REGISTERS), "registers": KEPT, **large, "hoisted": hoisted_choices(task),
            "math": math_choices(task)})

    def plan(self, task: Task, config: Config) -> WidePlan:
        return plans.plan_of(task, WideKnobs(config))

    def check(self, task: Task, config: Config) -> str | None:
        device, w, knobs = task.device, task.workload, WideKnobs(config)
        groups, units, parts, row_teams = knobs.groups, knobs.units, knobs.parts, knobs.row_teams
        blocks, rows = groups * ceil_div(w.hidden, units) * parts, ceil_div(w.batch, groups)
        if blocks > device.cores:
            return f"it needs {blocks} blocks, but there are {device.cores} multiprocessors"
        if (groups - 1) * rows >= w.batch:
            return "a group would have no batch rows"
        if units % (step := plans.unit_step(task)):
            return f"units={units} is not a multiple of {step}"
        if parts > 1 and row_teams == 1:
            return "row_teams=1 is only possible with parts=1"
        plan = self.plan(task, config)
        if plan.resident < 0:
            return f"{plan.kept} chunks in registers and {plan.streamed} streamed ones are more than all {plan.chunks}"
        if plan.chunks > plan.most_chunks:
            return (f"a warp would copy {plan.chunks} chunks of K; at most {plan.most_chunks} are possible in "
                    f"{plan.stages} stages")
        if plan.tiles < plan.sharers:
            return f"{plan.tiles} tiles of 64 rows are too few for {plan.sharers} warpgroups"
        if plan.finishers < parts:
            return f"{units} units are too few for {parts} blocks"
        if plan.columns > COLUMNS:
            return f"a product would have {plan.columns} columns; at most {COLUMNS} are possible"
        if plan.share.items > ITEMS:
            return f"each thread would have {plan.share.items} items; at most {ITEMS} are possible"
        if plan.registers > plans.REGISTERS[plan.teams][1]:
            return (f"it needs about {plan.registers} registers per thread, but {plans.REGISTERS[plan.teams][1]} are "
                    "available")
        if plan.shared > device.shared:
            return f"it needs {plan.shared} bytes of shared memory, but {device.shared} are available"
        return "shared memory has no room for two stages of the state" if plan.stages < min(2, plan.chunks) else None

    def search(self, task: Task) -> Config | None:
        best = min(self.candidates(task), key=lambda c: estimate(task, self.plan(task, c)), default=None)
        return best and {**best, "hoisted": preferred(task, estimate(task, self.plan(task, best)))}

    def rebatched(self, config: Config, batch: int, task: Task) -> Config:
        """``config`` with groups of as many eights of batch rows."""
        eights = ceil_div(ceil_div(batch, WideKnobs(config).groups), 8)
        return {**config, "groups": ceil_div(task.workload.batch, eights * 8)}

    def expected(self, task: Task) -> float:
        plan = self.plan(task, self.default(task))
        return estimate(task, plan) - gained(task, plan.knobs.hoisted)

    def generation(self, task: Task) -> int:
        """Later where weights are streamed; of few rows `persistent` does that, too: not measured beside each other."""
        return 2 if task.workload.batch > FEW_ROWS and _large(task) and WideKnobs(self.default(task)).streamed else 0

    def candidates(self, task: Task) -> Iterator[Config]:
        """The cuts that keep as many weights in registers as possible; where none has all, as many in shared memory."""
        knobs = {k.name: k.values for k in self.knobs(task)}
        cut, streams = ("groups", "units", "parts", "row_teams"), "streamed" in knobs
        rest: Config = {"streamed": 0, "ahead": AHEAD[0], "lasting": 100} if streams else {}
        rest = {**rest, "hoisted": "float32", "math": "exact" if len(knobs["math"]) == 1 else "fast"}
        cuts = [dict(zip(cut, values, strict=True)) for values in product(*(knobs[name] for name in cut))]
        none = True
        for found in filter(None, (self.fullest(task, one, rest, (0,)) for one in cuts)):
            none = False
            yield found
        if none and streams:
            ways = product(cuts, AHEAD[:2])
            yield from filter(None, (self.fullest(task, one, {**rest, "ahead": ahead}) for one, ahead in ways))

    def fullest(self, task: Task, cut: Config, rest: Config, streamed: tuple[int, ...] = STREAMED[1:]) -> Config | None:
        """A cut with as many weights in registers as there is room for, and with as many of these percents of them
        ``streamed`` as is expected to be best: what stays in shared memory takes room for what comes and goes."""
        reason: str | None = None
        for registers in KEPT:
            found: list[Config] = []
            for percent in streamed:
                tried: Config = {**cut, "registers": registers, **rest, **({"streamed": percent} if percent else {})}
                reason = self.check(task, tried)
                if reason is None and percent:
                    plan = self.plan(task, tried)
                    reason = "few stages" if plan.stages < min(BUSY, plan.chunks) else None
                if reason is None:
                    found.append({**tried, "lasting": _lasting(task, self.plan(task, tried))} if percent else tried)
                elif "shared memory" not in reason and "stages" not in reason:
                    break  # more that is streamed only helps where room is what is missing
                if len(found) == TRIED:
                    break
            if found:
                return min(found, key=lambda c: estimate(task, self.plan(task, c))) if found[1:] else found[0]
            if reason is None or not ("registers per thread" in reason or " in registers and " in reason):
                return None  # fewer in registers only help where these are what is missing
        return None

    def features(self, task: Task, plan: WidePlan) -> dict[str, float]:
        rates = gpu_rates(task.device)
        step, products, _ = cycles(plan, rates)
        return {"blocks": plan.groups * plan.blocks, "columns": plan.columns, "tiles": plan.tiles,
                "waste": plan.own_tiles * plan.sharers * 64 / (plan.gates * plan.units), "copied": plan.copied_bytes,
                "handed": plan.handed_bytes, "products": products, "items": plan.share.items, "stages": plan.stages,
                "resident": plan.stages / plan.chunks, "streamed": plan.streamed_bytes, "registers": plan.registers,
                "shared": plan.shared, "recurrence": step / rates.clock,
                "estimate": estimate(task, plan) - gained(task, plan.knobs.hoisted)}

    def stages(self, task: Task, plan: WidePlan) -> dict[str, float]:
        return parts_of(task, plan)

    def cut(self, task: Task, plan: WidePlan) -> Cut:
        held = {"registers": plan.rings * plan.kept * plan.weight_bytes,
                "shared memory": plan.rings * plan.resident * plan.weight_bytes,
                "L2 and memory, read every step": plan.streamed_bytes}
        return Cut(plan.groups, plan.blocks, plan.units, plan.rows, "L2", held, parts=plan.parts)

    def recurrence(self, task: Task, plan: WidePlan) -> Component:
        return _recurrence(task, plan, hoisted_of(task, plan.knobs.hoisted))

    def together(self, task: Task, plan: WidePlan) -> int:
        return together(task.traversal, plan.groups, plan.rows)

    def program(self, task: Task, plan: WidePlan) -> Program:
        layout = hoisted_of(task, plan.knobs.hoisted)
        if task.traversal.backward:
            return assemble_recurrence(task, self.recurrence(task, plan), layout, self.together(task, plan))
        return assemble(task, partial(_recurrence, task, plan, layout), layout, together=self.together(task, plan))


def _lasting(task: Task, plan: WidePlan) -> int:
    """Percent of streamed weights that L2 keeps."""
    every, rates = plan.groups * plan.blocks * plan.streamed_bytes, gpu_rates(task.device)
    return 100 if every <= rates.l2_kept else next(n for n in LASTING[1:] if every * n <= 100 * rates.l2_lasting)


def _large(task: Task) -> bool:
    """Tells whether some weights of a layer may have to be streamed."""
    (phase,), w = task.graph.phases, task.workload
    return (not task.traversal.backward
            and len(phase.products) * w.hidden * w.hidden * w.itemsize > LARGE * task.device.cores)


def _recurrence(task: Task, plan: WidePlan, layout: Hoisted, kept: Stored = NOTHING) -> Component:
    packing, name = plans.packing_of(task, plan), keeping("persistent_wide", kept)
    spaces = {"exchange": plan.groups * plans.SLOTS * plan.slot_words,
              "counters": plan.groups * plan.counters * plans.SPACING,
              "handed": plan.groups * plan.sets * plans.HANDED * plan.handed_words}
    buffers = [Buffer("recurrent", PACKED, plan.dtype, Extent(prod(packing.pad)), packing),
               *(Buffer(space, WORKSPACE, "uint32", Extent(size)) for space, size in spaces.items() if size)]
    fills = [Fill("handed", UNWRITTEN, Extent(spaces["handed"]))] if plan.parts > 1 else []
    functions = {"start": start_kernel(task, plan, layout), name: wide_kernel(task, plan, layout, kept)}
    launch = Launch(name, plan.groups * plan.blocks, plan.threads, plan.shared, cooperative=True)
    return Component(functions, tuple(buffers), (*fills, start_launch(), launch))
