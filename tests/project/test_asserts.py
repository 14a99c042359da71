"""Under ``python -O`` there are no assertions: nothing that runs may be lost with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from rooms import ROOT

FILES = sorted(path for place in ("ecornn", "schedules", "benchmarks", "examples")
               for path in (ROOT / place).rglob("*.py"))
# Of the functions of builtins.
PURE = {"abs", "all", "any", "bool", "float", "frozenset", "getattr", "hasattr", "int", "isinstance", "issubclass",
        "len", "list", "max", "min", "range", "set", "sorted", "str", "sum", "tuple", "type"}


def effects(source: str) -> Iterator[str]:
    """Assertions that may do more than to hold something against something: with line and expression. A call may,
    unless it is of a function that is known to have no effect."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                called = isinstance(part, ast.Call) and not (isinstance(part.func, ast.Name) and part.func.id in PURE)
                if called or isinstance(part, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
                    yield f"{node.lineno}: {ast.unparse(part)}"


def test_no_assertion_has_an_effect():
    assert len(FILES) > 250
    found = [f"{path.relative_to(ROOT)}:{what}" for path in FILES for what in effects(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("statement", "count"), [
    ("assert isinstance(a, int) and len(a.rows) == 2 and sorted(b) == [*range(3)], f()", 0),
    *((statement, 1) for statement in (
        "assert known.setdefault(name, b) == b", "assert rows.pop() == 1", "assert (n := 3)", "assert next(rows) == 0",
        "assert len(read(file)) == 2", "assert all(seen.add(x) is None for x in rows)",
        "async def f(): assert await g"))])
def test_those_with_one_are_found(statement: str, count: int):
    assert len([*effects(statement)]) == count
