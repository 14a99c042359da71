"""Taking scalar expressions apart: children, rebuilding, sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ecornn.errors import CellError

BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "LT", "LE", "GT", "GE", "EQ", "NE", "And", "Or")


def is_leaf(e: Any) -> bool:
    """True for variables and constants."""
    return type(e).__name__ in ("Var", "FloatImm", "IntImm")


def is_constant(e: Any) -> bool:
    """True for constants."""
    return type(e).__name__ in ("FloatImm", "IntImm")


def children(e: Any) -> list[Any]:
    """Operands of an expression, in order."""
    kind = type(e).__name__
    if is_leaf(e):
        return []
    if kind in BINARY:
        return [e.a, e.b]
    if kind == "Select":
        return [e.condition, e.true_value, e.false_value]
    if kind in ("Cast", "Not"):
        return [e.value if kind == "Cast" else e.a]
    if kind == "Call":
        return list(e.args)
    raise CellError(f"the cell uses {kind}, which cannot be scheduled: {e}")


def rebuild(e: Any, new: list[Any]) -> Any:
    """The same operation on other operands."""
    from tvm import tirx

    kind = type(e).__name__
    if is_leaf(e):
        return e
    if kind in BINARY:
        return type(e)(*new)
    if kind == "Select":
        return tirx.Select(*new)
    if kind == "Cast":
        return tirx.Cast(e.dtype if hasattr(e, "dtype") else e.ty, new[0])
    if kind == "Not":
        return tirx.Not(new[0])
    return type(e)(e.op, new, e.attrs, e.ty_args, ret_ty=e.ty)


def terms(e: Any) -> list[tuple[bool, Any]]:
    """A sum as (negated, term) pairs; anything else is its own single term."""
    kind = type(e).__name__
    if kind == "Add":
        return terms(e.a) + terms(e.b)
    if kind == "Sub":
        return terms(e.a) + [(not negated, t) for negated, t in terms(e.b)]
    return [(False, e)]


def transform(e: Any, visit: Callable[[Any], Any | None]) -> Any:
    """Rebuilds an expression from the leaves up; ``visit`` may replace a node before descent."""
    done = visit(e)
    if done is not None:
        return done
    parts = children(e)
    return rebuild(e, [transform(p, visit) for p in parts]) if parts else e
