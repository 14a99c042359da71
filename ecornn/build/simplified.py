"""Lowered kernels for people: names where TVM's passes put expressions, and nothing that is not used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

MADE = "cse_v"  # begins the names that TVM makes up
LARGE = 6  # operations of an expression that is worth such a name
# calls that TVM takes to have effects, but that may go with their values
VALUES = {"tirx.cuda.__shfl_sync", "tirx.cuda.cvta_generic_to_shared"}
PURE, READS = 1, 2  # TVM's CallEffectKind: calls that depend on their arguments alone; on memory, too


def simplified(code: Any) -> Any:
    """``code``, a lowered function, that does the same in fewer words."""
    return code.with_body(_needed(_named(code.body, {}), Counter()))


def _named(statement: Any, known: dict[Any, Any]) -> Any:
    """``statement`` with a variable for each expression that one in scope is bound to. ``known``: structure of an
    expression -> that variable; variables that ``statement`` binds are added."""
    import tvm_ffi
    from tvm import ir, tirx

    structure: Any = tvm_ffi.StructuralKey  # whose annotations have one argument more than it takes

    def name(value: Any) -> Any:
        constant = isinstance(value, (tirx.IntImm, tirx.FloatImm, ir.StringImm))
        return value if constant else known.get(structure(value), value)

    def with_names(part: Any) -> Any:
        return tvm_ffi.structural_map(part, (ir.Expr, name), order="pre") if known else part

    if isinstance(statement, tirx.SeqStmt):
        return tirx.SeqStmt([_named(one, known) for one in statement.seq])
    if not isinstance(statement, tirx.Bind):
        return _rebuilt(statement, with_names, lambda body: _named(body, dict(known)))
    key = structure(statement.value)
    if key in known and known[key].name.startswith(MADE) and not statement.var.name.startswith(MADE):
        del known[key]  # this name is better
    named = tirx.Bind(statement.var, with_names(statement.value))
    if key not in known and _may_stand_for(statement):
        known[key] = statement.var
    return named


def _may_stand_for(bound: Any) -> bool:
    """True if the variable may be written for its value anywhere: the value is the same at any time."""
    import tvm_ffi
    from tvm import ir, tirx

    counts: Counter[str] = Counter()

    def look(value: Any) -> None:
        if isinstance(value, ir.Call):
            counts["changes"] += _effect(value) > PURE
        elif isinstance(value, ir.TensorLoad):
            counts["changes"] += 1
        elif not isinstance(value, (tirx.Var, tirx.IntImm, tirx.FloatImm, ir.StringImm)):
            counts["operations"] += 1

    tvm_ffi.structural_walk(bound.value, (ir.Expr, look))
    if isinstance(bound.value, tirx.Var):
        return bool(bound.value.name.startswith(("threadIdx", "blockIdx")))
    return not counts["changes"] and counts["operations"] >= (LARGE if bound.var.name.startswith(MADE) else 1)


def _needed(statement: Any, uses: Counter[Any]) -> Any:
    """``statement`` without variables and arrays that nothing uses; None where nothing is left. ``uses``: counts of the
    statements that follow, to which its own are added."""
    import tvm_ffi
    from tvm import tirx

    def count(part: Any) -> Any:
        tvm_ffi.structural_walk(part, (), (tirx.Var, lambda var, kind: uses.update([var] if kind == 0 else [])))
        return part

    if isinstance(statement, tirx.SeqStmt):
        left = [one for each in reversed(statement.seq) if (one := _needed(each, uses)) is not None]
        return tirx.SeqStmt(left[::-1]) if len(left) > 1 else left[0] if left else None
    if isinstance(statement, tirx.Bind) and not uses[statement.var] and _may_go(statement.value):
        return None
    if isinstance(statement, (tirx.AllocBuffer, tirx.DeclBuffer)) and not uses[statement.buffer]:
        return None
    return _rebuilt(statement, count, lambda body: _needed(body, uses) or tirx.Evaluate(0))


def _may_go(value: Any) -> bool:
    """True if an expression may be left out when nobody reads it."""
    import tvm_ffi
    from tvm import ir

    effects = []
    tvm_ffi.structural_walk(value, (ir.Call, lambda call: effects.append(_effect(call))))
    return all(effect <= READS for effect in effects)


def _effect(call: Any) -> int:
    """TVM's CallEffectKind of a call; of one to a device function, which TVM does not look into, by its source."""
    name = getattr(call.op, "name", "")
    value = name == "tirx.cuda.func_call" and "volatile" not in call.args[-1].value
    return READS if value or name in VALUES else int(call.op.get_attr("TCallEffectKind") or 0) if name else READS + 1


def _rebuilt(statement: Any, of_expression: Callable[[Any], Any], of_statement: Callable[[Any], Any]) -> Any:
    """``statement`` with the results for its parts: statements inside first, from the last to the first."""
    from tvm import tirx

    if isinstance(statement, tirx.IfThenElse):
        other = None if statement.else_case is None else of_statement(statement.else_case)
        return tirx.IfThenElse(of_expression(statement.condition), of_statement(statement.then_case), other)
    if isinstance(statement, tirx.For):
        body = of_statement(statement.body)
        return tirx.For(statement.loop_var, of_expression(statement.min), of_expression(statement.extent),
                        statement.kind, body, statement.thread_binding, statement.annotations, statement.step)
    if isinstance(statement, tirx.While):
        return tirx.While(of_expression(statement.condition), of_statement(statement.body))
    if isinstance(statement, tirx.AttrStmt):
        return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, of_statement(statement.body))
    return of_expression(statement)
