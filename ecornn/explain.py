"""The reasons for a layer's schedule, and the times to expect, as data from a plan; needs no device and no compiler."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ecornn.analysis.affine import groups_of
from ecornn.analysis.heads import most_heads
from ecornn.analysis.narrow import narrow_terms
from ecornn.boundary import public
from ecornn.dtypes import ITEMSIZE
from ecornn.floor import Step, documented, floor_of, measured
from ecornn.notebook import table
from ecornn.schedules import config_text
from ecornn.tune.choose import candidates, refusal
from ecornn.tune.record import Trial
from ecornn.workload import SERIAL

if TYPE_CHECKING:
    from ecornn.analysis import StepGraph
    from ecornn.compiler import LayerPlan
    from ecornn.device import Device
    from ecornn.schedules.base import Task
    from ecornn.tune.lookup import Found


class Dependence(msgspec.Struct, frozen=True):
    """States that depend on each other, and how their new values depend on their old ones, a value of
    :class:`~ecornn.analysis.affine.Past`."""

    states: list[str]
    past: str


class StepSummary(msgspec.Struct, frozen=True):
    """A step in numbers, as the analysis has it."""

    states: list[str]
    output: str
    hoisted: int  # products of x, done for all steps at once
    products: int  # the others
    statistics: int
    travels: list[list[str]]  # states, or what is computed of them, that other units need, a list for each exchange
    stays: list[str]  # states that no other unit needs
    past: list[Dependence]  # all states, each group behind those that it depends on
    weights: int
    weight_bytes: int
    multiplications: int  # of a step of all rows, hoisted ones not counted


class Alternative(msgspec.Struct, frozen=True):
    schedule: str
    refuses: str | None  # why it does not serve the layer
    expected_us: float | None  # of a step of its default; None where nobody can say
    chosen: bool


class RecordUsed(msgspec.Struct, frozen=True):
    """The record that was used: its place, time, device, B, I and T, and the times of a step that it has."""

    file: str
    line: int
    time: str
    device: str
    batch: int
    input: int
    seq: int
    us: float
    p20_us: float
    p80_us: float


class FloorTerms(msgspec.Struct, frozen=True):
    """The least time of a step, of the layer's own sizes, with its terms; microseconds."""

    total_us: float
    exchange_us: float
    products_us: float
    hoisted_us: float
    bytes_us: float


class Part(msgspec.Struct, frozen=True):
    """Sequences of a layer that are alike, or the backward pass of these (``entry``). ``chip``: the configuration's
    blocks, threads of a block, registers of a thread and bytes of shared memory of a block, by the names of
    :data:`CHIP`; on a CPU threads and bytes of weights of each."""

    labels: list[str]
    entry: str
    workload: str
    step: StepSummary
    schedules: list[Alternative]
    schedule: str
    config: dict[str, int | str | bool]
    why: str
    record: RecordUsed | None
    chip: dict[str, float]
    expected_us: float | None  # by the schedule's own estimate, where it has one
    floor: FloorTerms | None
    sequence_us: float | None  # of all T steps, by the record, or else the estimate
    stages_us: dict[str, float]  # the parts of the estimate, but for work beside the recurrence
    held_bytes: dict[str, int]  # places of a block's recurrent weights while steps go by -> bytes

    def _repr_html_(self) -> str:
        def time(us: float | None) -> str:
            return "" if us is None else f"{us:.4g} µs a step"

        return table([
            (" ".join([*self.labels, self.entry]), self.workload),
            *((one.schedule, f"no: {one.refuses}" if one.refuses else time(one.expected_us) or "serves")
              for one in self.schedules),
            ("chosen", f"{self.schedule} {config_text(self.config)}"), ("why", self.why),
            *((CHIP_WORDS.get(name, name), f"{value:,.0f}") for name, value in self.chip.items()),
            ("by the record", time(self.record.us if self.record is not None else None)),
            ("estimate", time(self.expected_us)),
            ("floor", time(self.floor.total_us if self.floor is not None else None))])


class Explanation(msgspec.Struct, frozen=True):
    layer: str
    stack: str
    overlap: str
    device: str
    arch: str
    cores: int
    parts: list[Part]
    no_floor: str | None  # why no part has a floor
    floor_from: str | None  # where the limits of floors come from: `measured` or `documents`

    def _repr_html_(self) -> str:
        of = ", ".join(filter(None, (self.layer, self.stack, self.overlap)))
        return table([("layer", of), ("device", f"{self.device} ({self.arch}), {self.cores} cores")]) + "".join(
            part._repr_html_() for part in self.parts)


# Features of schedules that say what a configuration takes on the chip -> their names in a Part; and these in words
CHIP = {"blocks": "blocks", "threads": "threads", "registers": "registers", "shared": "shared_bytes",
        "streamed": "streamed_weights", "thread_weight_bytes": "weight_bytes_of_a_thread"}
ON_A_CPU = {"threads": "threads_of_a_call"}
CHIP_WORDS = {"blocks": "blocks", "threads": "threads a block", "registers": "registers a thread",
              "shared_bytes": "bytes of shared memory a block", "weight_bytes_of_a_thread": "bytes of weights a thread",
              "threads_of_a_call": "threads"}


@public
def explain(planned: LayerPlan) -> Explanation:
    """Explains a plan. Sequences of a stack that have the same sizes, direction and choice are one part."""
    from ecornn.task import adjoint_task

    parts: dict[object, tuple[list[str], Task, Found, str]] = {}
    labels = [part.label for part in planned.stack.parts(planned.workload)]
    for label, task, found, inner in zip(labels, planned.tasks, planned.chosen, planned.backward, strict=True):
        for entry, of, choice in [("run", task, found)] + (
                [("backward", adjoint_task(task), inner)] if inner is not None else []):
            key = entry, task.workload, choice.schedule.name, str(choice.config), choice.provenance
            parts.setdefault(key, ([], of, choice, entry))[0].append(label)
    device = planned.device
    return Explanation(
        str(planned.workload), str(planned.stack), str(planned.overlap) if planned.overlap != SERIAL else "",
        device.name, device.arch, device.cores, [_part(*of) for of in parts.values()],
        None if documented(device.name) else f"the limits of {device.name} have not been measured",
        "measured" if measured(device.name) else "documents" if documented(device.name) else None)


def _part(labels: list[str], task: Task, found: Found, entry: str) -> Part:
    graph, schedule, line, record = task.graph, found.schedule, found.line, None
    plan = schedule.plan(task, found.config)
    features, cut = schedule.features(task, plan), schedule.cut(task, plan)
    if line is not None and isinstance(trial := line.record, Trial) and trial.times is not None:
        of, times = trial.workload, trial.times
        record = RecordUsed(line.path.name, line.number, trial.time, trial.device.name, of.batch, of.input, of.seq,
                            times.median, times.p20, times.p80)
    bounded = entry == "run" and graph.product_phases and most_heads(graph) == 1 and not narrow_terms(graph)
    expected = features["estimate"] / 1e3 if "estimate" in features else None
    best = record.us if record is not None else expected
    return Part(labels, entry, str(task.workload), summary(task), alternatives(task, found), schedule.name,
                dict(found.config), found.provenance, record, chip_of(features, task.device), expected,
                floor_terms(task) if bounded else None, None if best is None else best * task.workload.seq,
                {name: ns / 1e3 for name, ns in schedule.stages(task, plan).items()},
                {where: size for where, size in cut.held.items() if size} if cut is not None else {})


def chip_of(features: Mapping[str, float], device: Device) -> dict[str, float]:
    """The parts of the chip that a configuration takes, from its features, by the names of :data:`CHIP`."""
    names = CHIP | (ON_A_CPU if device.kind == "llvm" else {})
    return {names[n]: float(v) for n, v in features.items() if n in names}


def summary(task: Task) -> StepSummary:
    graph, work, phases = task.graph, task.workload, task.graph.phases
    exchanged = [sorted({v.name for v in (*p.operands, *(o for s in p.statistics for o in s.operands))})
                 for p in phases]
    operands = {v.name for p in phases for v in p.operands}
    terms = [term for p in phases for product in p.products for term in product.terms]
    size = 2.0 if work.weights in ("bfloat16", "int16") else {"int8": 1.0, "int21": 8 / 3}.get(
        work.weights or "", float(work.itemsize))
    weights = sum((t.rows or work.hidden) * (t.columns or work.hidden // t.heads) for t in terms)
    return StepSummary(list(graph.states), graph.output or ", ".join(v.name for v in graph.outputs),
                       len(graph.hoisted_products), len(terms), len(graph.statistics), exchanged,
                       [name for name, leaf in graph.states.items() if leaf.name not in operands],
                       [Dependence(list(group.states), group.past.value) for group in groups_of(graph)], weights,
                       round(weights * size), weights * work.batch)


def alternatives(task: Task, found: Found) -> list[Alternative]:
    """Every schedule for the kind of device: why it refuses the task, or the time that is expected of it."""
    listed = []
    for schedule in candidates(task.device):
        reason, expected = refusal(schedule, task), math.inf
        if reason is None:
            expected = schedule.features(task, schedule.plan(task, schedule.default(task))).get("estimate", math.inf)
        listed.append(Alternative(schedule.name, reason, expected / 1e3 if math.isfinite(expected) else None,
                                  schedule.name == found.schedule.name))
    return listed


def floor_terms(task: Task) -> FloorTerms | None:
    """The floor of a task's step; None where it is not known, on a device that no table has."""
    gpu, work = documented(task.device.name), task.workload
    if gpu is None or task.device.kind != "cuda":
        return None
    share = msgspec.structs.replace(gpu, cores=min(gpu.cores, task.device.cores))  # records may lack the other sizes
    least = floor_of(share, step_of(task.graph), work.batch, work.input, work.hidden,
                     "tf32" if work.precision == "tf32" else work.dtype, ITEMSIZE[work.stored])
    return FloorTerms(least.total, least.exchange, least.recurrent, least.projection, least.bytes)


def step_of(graph: StepGraph) -> Step:
    phases = graph.product_phases
    return Step(sum(len(p.products) for p in phases), len(graph.hoisted_products), len(phases))
