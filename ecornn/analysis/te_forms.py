"""The forms of te that the walk of a step (``graph.py``) tells apart: loads, and reductions over axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.te import Tensor
    from tvm.tirx import IterVar, Reduce, Var

ARITHMETIC = ("Add", "Sub", "Mul", "FloorDiv", "FloorMod")  # of indices


def extent_of(axis: IterVar) -> int | None:
    """Values of a reduction axis that starts at 0."""
    low, extent = axis.dom.min, axis.dom.extent
    fixed = type(extent).__name__ == "IntImm" and int(low) == 0
    return int(extent) if fixed else None


def every(axes: list[IterVar]) -> list[dict[Var, Expr]]:
    """All places on reduction axes: axis variable -> constant."""
    from tvm import tirx

    places: list[dict[Var, Expr]] = [{}]
    for axis in axes:
        places = [at | {axis.var: tirx.const(n, "int32")} for at in places for n in range(extent_of(axis) or 0)]
    return places


def is_sum(body: Reduce) -> bool:
    """True for a reduction by addition that starts at 0, over all of its axes."""
    return reduces(body, "Add")


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
    """Tensor and indices of a load."""
    if type(e).__name__ == "Call":
        return e.args[0], list(e.args[1:])
    return e.source, list(e.indices)


def parts_of(e: Expr) -> list[Expr]:
    """The operands of an expression, whatever its operator is."""
    if type(e).__name__ == "Call":
        return list(e.args)
    return [getattr(e, n) for n in ("a", "b", "condition", "true_value", "false_value", "value")
            if not isinstance(getattr(e, n, None), (int, float, type(None)))]


def placed(index: Expr, where: Mapping[Var, Expr]) -> Expr:
    """An index with the places ``where`` instead of its axes, simplified."""
    from tvm import sym

    if type(index).__name__ in ("Var", "IntImm"):
        return where.get(index, index)

    def put(e: Expr) -> Expr:
        kind = type(e).__name__
        if kind == "Var":
            return where.get(e, e)
        return type(e)(put(e.a), put(e.b)) if kind in ARITHMETIC else e

    return sym.Analyzer().simplify(put(index))
