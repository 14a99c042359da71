"""An adjoint in the parts that a CPU carries out one after the other, and the stages of each.

    replay      what forward computed and did not keep, of all rows of a chunk of time
    recurrence  the adjoint step, from the chunk's last step to its first
    inputs      gradients of products of x, of all rows
    dx          the gradient of x
    finish      gradients of the first states, after the last chunk
    once        gradients of parameter vectors

Parts over all rows have the stages of a step, each of all rows: what a later one reads is kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ecornn.analysis import StepGraph
from ecornn.analysis.adjoint import Adjoint
from ecornn.analysis.kept import Kept
from ecornn.analysis.liveness import levels, needed
from ecornn.analysis.scalar import variables
from ecornn.analysis.step import Assign, Phase, Product, Statistic
from ecornn.schedules.builder import Var
from ecornn.schedules.cpu.stages import Stage, StepPlan
from ecornn.schedules.cpu.stages import plan as plan_step

_Part = tuple[tuple[Product, ...], tuple[Statistic, ...], tuple[Assign, ...]]


@dataclass(frozen=True)
class Backward:
    """The plans of an adjoint.

    Attributes
    ----------
    replay, inputs, finish : passes; what they keep is what other parts read
    recurrence : of the adjoint's recurrence
    written : stage of the recurrence -> what it writes for other parts
    dx : the pass that gives dx, or None where x has no gradient
    """

    adjoint: Adjoint
    kept: Kept
    replay: StepPlan
    recurrence: StepPlan
    written: dict[str, tuple[Var, ...]]
    inputs: StepPlan
    dx: StepPlan | None
    finish: StepPlan

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """The plans with products of H units."""
        return self.replay, self.recurrence, self.inputs, self.finish


def backward_plans(adjoint: Adjoint, kept: Kept) -> Backward:
    """Sorts an adjoint into parts."""
    recurrence, inputs = adjoint.recurrence, adjoint.inputs
    wanted = [*recurrence.outputs, *(s.value for s in recurrence.sums)]
    wanted += [v for o in recurrence.outer_products for v in (o.value, o.operand)]
    own = _made(recurrence) | {*recurrence.states.values()}  # a gradient may be what the step after left, as it is
    plan = _recurrence_plan(recurrence)
    written: dict[str, list[Var]] = {stage.name: [] for stage in plan.steps}
    for var in dict.fromkeys(v for v in wanted if v in own):
        # rows of statistics are left to the stage behind, which has all units
        stage = next((s for s in plan.steps if s.level >= plan.level[var] and s.finishes), plan.steps[-1])
        written[stage.name].append(var)

    last = inputs.phases[0] if inputs.phases else Phase((), (), ())
    before = replace(inputs, phases=())
    read = [t.operand for p in last.products for t in p.terms] + [v for a in last.assigns for v in variables(a.value)]
    read += [v for o in inputs.outer_products for v in (o.value, o.operand)] + [s.value for s in inputs.sums]
    read += [v for v in (adjoint.dx, *adjoint.dinputs.values()) if v is not None]
    made = _made(before)
    dx = None
    if adjoint.dx is not None:
        invariants, read_last = needed(inputs.invariants, {v for a in last.assigns for v in variables(a.value)})
        graph = replace(inputs, hoisted=(), hoisted_statistics=(), normalized=(), prologue=(), phases=(last,),
                        invariants=invariants, vectors=tuple(v for v in inputs.vectors if v.var in read_last))
        dx = _last_stage(pass_plan("dx", graph, (adjoint.dx,)))
    finish = adjoint.finish
    ends = _made(finish)
    return Backward(
        adjoint, kept, pass_plan("replay", kept.replay, kept.replay.outputs), plan,
        {name: tuple(those) for name, those in written.items()},
        pass_plan("inputs", before, tuple(dict.fromkeys(v for v in read if v in made))), dx,
        pass_plan("finish", finish, tuple(dict.fromkeys(
            v for v in (*adjoint.gradients.values(), *(s.value for s in finish.sums)) if v in ends))))


def pass_plan(name: str, graph: StepGraph, wanted: Iterable[Var]) -> StepPlan:
    """The stages of a graph without states, which go over all rows one after the other; ``wanted`` is kept."""
    parts: list[_Part] = [(graph.hoisted_products, (), graph.hoisted),
                          ((), graph.hoisted_statistics, graph.normalized), ((), (), graph.prologue)]
    parts += [(p.products, p.statistics, p.assigns) for p in graph.phases]
    level: dict[Var, int] = dict.fromkeys((v for v, at in levels(graph).items() if at == -3), -3)
    for number, (products, statistics, assigns) in enumerate(parts):
        level.update((p.var, number) for p in products)
        level.update((v, number) for s in statistics for v in s.made)
        level.update((a.var, number) for a in assigns)
    rows = (*graph.given, *graph.inputs.values(), *([graph.x] if graph.x is not None else []))
    level.update((v, 0) for v in rows if v not in level)
    later = set(wanted)
    for number, (products, statistics, assigns) in enumerate(parts):
        read = [t.operand for p in products for t in p.terms] + [v for s in statistics for v in s.operands]
        read += [v for a in assigns for v in variables(a.value)]
        later.update(v for v in read if level.get(v, number) < number)
    stages = []
    for number, (products, statistics, assigns) in enumerate(parts):
        # a statistic is one number a row; it is kept as such, and for all units where it is wanted
        totals = {v for s in statistics for v in s.made} - set(wanted)
        made = (*(p.var for p in products), *(v for s in statistics for v in s.made), *(a.var for a in assigns))
        keep = tuple(v for v in made if v in later and v not in totals)
        if statistics:
            stages.append(Stage(f"{name}_rows{number}", number, (), () if products else keep, statistics=statistics,
                                by_row=True, finishes=not products))
        if products or (keep and not statistics):
            stages.append(Stage(f"{name}_{number}", number, products, keep))
    definition = {a.var: a.value for assigns in (graph.invariants, *(p[2] for p in parts)) for a in assigns}
    return StepPlan(graph, (), tuple((stage,) for stage in stages), definition, level, (), barriers=True)


def _last_stage(plan: StepPlan) -> StepPlan:
    """``plan`` with stages that keep nothing; it has one even where what it stores is known before."""
    stages = plan.steps or (Stage("dx_0", 0, (), ()),)
    return replace(plan, parts=tuple((replace(stage, keep=()),) for stage in stages))


def _recurrence_plan(graph: StepGraph) -> StepPlan:
    """The plan of the recurrence: factors are computed where they are read, from what other parts made."""
    made = plan_step(replace(graph, hoisted_outputs=(), projected=()))
    level = {v: max(at, 0) if at > -3 else at for v, at in made.level.items()}
    parts = tuple(tuple(replace(s, name=f"recurrence_{s.name}") for s in part) for part in made.parts)
    return replace(made, hoisted=(), parts=parts, level=level)


def _made(graph: StepGraph) -> set[Var]:
    """The variables that a graph computes in each step."""
    return {v for v, at in levels(graph).items() if at > -3} - {*graph.states.values(), *graph.given}
