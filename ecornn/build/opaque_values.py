"""Values that TVM's analyzer need not look into, so that CPU code is made in a fifth to a tenth of the time.

TVM simplifies whatever a variable is bound to, with what earlier variables are bound to put in, and so goes through
the arithmetic of a whole step again with each of its values, and through a quotient or a minimum again with each index
that is made of it. It has no use for either. A local array between hides them: LLVM makes it a register, and the
results stay the same, bit for bit. Other integers stay visible: what is known of them makes addresses shorter. All
values of a type go through the same array, since LLVM has debugging information to keep for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.tirx import Buffer, PrimFunc, Stmt

# Operations of integers after which simplifying takes long and finds nothing.
OPAQUE = ("Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max", "Select", "BufferLoad")


def hide(function: PrimFunc) -> PrimFunc:
    """The PrimFunc with every such value stored in a local array before a variable is bound to it.

    Before: ``v = a + b``. After: ``hidden[0:16] = a + b; v = hidden[0:16]``.
    """
    from tvm import tirx

    arrays: dict[str, tuple[Buffer, list[Expr]]] = {}  # data type -> the array, and the index of a value in it
    body = _statement(function.body, arrays)
    allocated = [tirx.AllocBuffer(array) for array, _ in arrays.values()]
    return function.with_body(tirx.SeqStmt([*allocated, body]) if allocated else body)


def _statement(one: Stmt, arrays: dict[str, tuple[Buffer, list[Expr]]]) -> Stmt:
    from tvm import tirx

    if isinstance(one, tirx.SeqStmt):
        return tirx.SeqStmt([part for s in one.seq for part in _hidden(s, arrays)])
    if isinstance(one, tirx.For):
        return tirx.For(one.loop_var, one.min, one.extent, one.kind, _statement(one.body, arrays), one.thread_binding,
                        one.annotations)
    if isinstance(one, tirx.IfThenElse):
        otherwise = _statement(one.else_case, arrays) if one.else_case is not None else None
        return tirx.IfThenElse(one.condition, _statement(one.then_case, arrays), otherwise)
    return one


def _hidden(one: Stmt, arrays: dict[str, tuple[Buffer, list[Expr]]]) -> Iterator[Stmt]:
    from tvm import tirx

    if not isinstance(one, tirx.Bind) or not _opaque(kind := str(one.var.ty), one.value):
        yield _statement(one, arrays)
        return
    if kind not in arrays:
        element, _, lanes = kind.partition("x")
        start = tirx.const(0, "int64")
        index = tirx.Ramp(start, tirx.const(1, "int64"), int(lanes)) if lanes else start
        arrays[kind] = tirx.decl_buffer([int(lanes or 1)], element, f"hidden_{kind}", scope="local"), [index]
    array, at = arrays[kind]
    yield tirx.BufferStore(array, one.value, at)
    yield tirx.Bind(one.var, tirx.BufferLoad(array, at))


def _opaque(kind: str, value: Expr) -> bool:
    return kind.startswith("float") or (kind.startswith("int") and any(_operations(value)))


def _operations(value: Expr) -> Iterator[bool]:
    """Yields for each operation in the value True where it is one of ``OPAQUE``."""
    yield type(value).__name__ in OPAQUE
    for name in ("a", "b", "value"):  # of sums and products, and of casts
        part = getattr(value, name, None)
        if part is not None and not isinstance(part, (int, float)):
            yield from _operations(part)
