"""Taking scalar expressions apart: operands, rebuilding, variables, sums. Operators are those of ``operators.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ecornn.analysis.operators import operator_of

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Var


def is_leaf(e: Expr) -> bool:
    """True for variables and constants."""
    return type(e).__name__ in ("Var", "FloatImm", "IntImm")


def is_constant(e: Expr) -> bool:
    """True for constants."""
    return type(e).__name__ in ("FloatImm", "IntImm")


def children(e: Expr) -> list[Expr]:
    """Operands of an expression, in order. Raises :class:`~ecornn.errors.CellError` for an unknown operator."""
    if is_leaf(e):
        return []
    fields = operator_of(e).fields
    return [getattr(e, field) for field in fields] if fields else list(e.args)


def variables(e: Expr) -> list[Var]:
    """Variables that an expression reads, in order, with repetitions."""
    if type(e).__name__ == "Var":
        return [e]
    return [v for c in children(e) for v in variables(c)]


def rebuild(e: Expr, new: list[Expr]) -> Expr:
    """Applies the operation of an expression to other operands."""
    kind = type(e).__name__
    if is_leaf(e):
        return e
    if kind == "Call":
        return type(e)(e.op, new, e.attrs, e.ty_args, ret_ty=e.ty)
    if kind == "Cast":
        return type(e)(e.dtype if hasattr(e, "dtype") else e.ty, new[0])
    return type(e)(*new)


def terms(e: Expr) -> list[tuple[bool, Expr]]:
    """A sum as (negated, term) pairs; anything else is its own single term."""
    kind = type(e).__name__
    if kind == "Add":
        return terms(e.a) + terms(e.b)
    if kind == "Sub":
        return terms(e.a) + [(not negated, t) for negated, t in terms(e.b)]
    return [(False, e)]


def transform(e: Expr, visit: Callable[[Expr], Expr | None]) -> Expr:
    """Rebuilds an expression from the leaves up; ``visit`` may replace a node before descent."""
    done = visit(e)
    if done is not None:
        return done
    parts = children(e)
    return rebuild(e, [transform(p, visit) for p in parts]) if parts else e
