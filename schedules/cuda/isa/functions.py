"""Device functions in CUDA C, for what TVM has no instruction for."""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T


def call(name: str, source: str, *arguments: Expr, returns: str) -> Expr:
    """The value that a device function returns, of the type ``returns``. ``source`` defines ``name``, and is written
    once however often it is called."""
    return T.cuda.func_call(name, *arguments, source_code=source, return_type=returns)


def run(name: str, source: str, *arguments: Expr) -> None:
    """Calls a device function that returns nothing."""
    T.evaluate(T.cuda.func_call(name, *arguments, source_code=source))
