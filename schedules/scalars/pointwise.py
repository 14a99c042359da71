"""Splices a cell's scalars into a kernel that is being built with ``T``."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ecornn.analysis import Assign, StepGraph, Vector
from ecornn.analysis.operators import CUSTOM, key_of
from ecornn.analysis.scalar import children, is_constant, is_leaf, transform
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var
from ecornn.schedules.cuda.isa.functions import FUNCTIONS, call

MATH = ("exact", "fast", "approx")
MATH_TRADES = ("expf and tanhf to 2 ulp, or ex2, lg2 and rcp of the special function unit (error 2e-7), or "
               "tanh.approx (error 5e-4); less accurate functions shorten the latency of the gates")

# approx would be most of the error that float16 may have
MATH_FOR = {"float32": MATH[:1], "float16": MATH[:2], "bfloat16": MATH}


def math_choices(task: Task) -> tuple[str, ...]:
    """The values of a knob ``math``: an adjoint's scalars are exact."""
    return MATH_FOR["float32" if task.traversal.backward else task.workload.dtype]


def emit(assigns: Iterable[Assign], env: dict[Var, Expr], math: str = "exact") -> dict[Var, Expr]:
    """Emits ``assigns`` in order, each bound once, and returns ``env`` with them; ``math``: one of :data:`MATH`."""
    env = dict(env)
    for assign in assigns:
        env[assign.var] = T.let(assign.var.name, _value(assign.value, env, FUNCTIONS[math]))
    return env


def _value(value: Expr, env: dict[Var, Expr], table: dict[str, tuple[str, str]]) -> Expr:
    def visit(e: Expr) -> Expr | None:
        if type(e).__name__ == "Var":
            return env[e]
        if not is_leaf(e) and key_of(e) == CUSTOM:
            return transform(children(e)[0], visit)
        if not is_leaf(e) and key_of(e) in table:
            return call(*table[key_of(e)], *[T.let("inner", transform(part, visit)) for part in children(e)])
        # TVM works out between which values a variable lies, and fails at products of one that is a Cast of a
        # condition, or a Select of two values of which it knows neither.
        if type(e).__name__ == "Cast" and str(e.value.ty) == "bool":
            return T.Select(transform(e.value, visit), T.float32(1), T.float32(0))
        if type(e).__name__ == "Select" and not (is_constant(e.true_value) or is_constant(e.false_value)):
            return T.if_then_else(*(transform(part, visit) for part in children(e)))
        return None

    return transform(value, visit)


def invariants(graph: StepGraph, vectors: dict[Var, Expr], math: str = "exact") -> dict[Var, Expr]:
    """Emits what depends on parameters only; ``vectors`` maps each vector's variable to its value."""
    return emit(graph.invariants, vectors, math)


def vectors_at(vectors: Iterable[Vector], memory: TirBuffer, hidden: int, unit: Expr,
               read: Container[Var] | None = None) -> dict[Var, Expr]:
    """The values of ``vectors``, or of the ``read`` ones, at a unit, from their buffer; numbers of units as such."""
    return {v.var: T.let(v.var.name, T.cast(unit, "float32") if v.numbers else memory[k * hidden + unit])
            for k, v in enumerate(vectors) if read is None or v.var in read}
