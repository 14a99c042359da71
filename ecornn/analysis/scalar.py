"""Taking te expressions apart: scalars, whose operators are those of ``operators.py``; loads, and reductions over axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ecornn.analysis.operators import operator_of

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.te import Tensor
    from tvm.tirx import IterVar, Reduce, Var


def is_leaf(e: Expr) -> bool:
    return type(e).__name__ in ("Var", "FloatImm", "IntImm")


def is_constant(e: Expr) -> bool:
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
    if (done := visit(e)) is not None:
        return done
    parts = children(e)
    return rebuild(e, [transform(p, visit) for p in parts]) if parts else e


def extent_of(axis: IterVar) -> int | None:
    """Values of a reduction axis that starts at 0."""
    low, extent = axis.dom.min, axis.dom.extent
    fixed = type(extent).__name__ == "IntImm" and int(low) == 0
    return int(extent) if fixed else None


def reduces(body: Reduce, kind: str) -> bool:
    """True for a reduction by that operator, from its neutral value on, over all of its axes."""
    (result, *others), always = body.combiner.result, body.condition
    if others or body.init or type(result).__name__ != kind:
        return False
    return type(always).__name__ == "IntImm" and bool(int(always))


def is_load(e: Expr) -> bool:
    """True where e reads an element of a te tensor."""
    return type(e).__name__ in ("TensorLoad", "ProducerLoad") or (
        type(e).__name__ == "Call" and getattr(e.op, "name", "") == "te.tensor_load")


def load_parts(e: Expr) -> tuple[Tensor, list[Expr]]:
    if type(e).__name__ == "Call":
        return e.args[0], list(e.args[1:])
    return e.source, list(e.indices)


def parts_of(e: Expr) -> list[Expr]:
    """The operands of an expression, whatever its operator is."""
    if type(e).__name__ == "Call":
        return list(e.args)
    return [getattr(e, n) for n in ("a", "b", "condition", "true_value", "false_value", "value")
            if not isinstance(getattr(e, n, None), (int, float, type(None)))]


def multiplies(body: Reduce) -> bool:
    """True where a reduction reads a matrix."""
    pending = [body.source[0]]
    while pending:
        e = pending.pop()
        if not is_load(e):
            pending.extend(parts_of(e))
        elif type((tensor := load_parts(e)[0]).op).__name__ == "PlaceholderOp" and len(tensor.shape) == 3:
            return True
    return False


def evaluate(e: Expr, values: Mapping[Var, Any]) -> Any:
    """A scalar expression in NumPy, over arrays of its variables, (..., B, H), (..., B, 1) or (H,), or numbers."""
    if type(e).__name__ == "Var":
        return values[e]
    return float(e.value) if is_constant(e) else operator_of(e).numpy(*(evaluate(c, values) for c in children(e)))
