"""``T``: TVM's builder of kernels, with names for what it makes, so that generated code can be read.

There is one for all: what it makes goes to the function that is being built (``with T.kernel(name)``). Everything that
is not here is TVM's (``tvm.tirx.script.builder.ir``), which is imported when it is first used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an Expr may also be a Python number
    from tvm.ir import Expr
    from tvm.tirx import Buffer as TirBuffer
    from tvm.tirx import PrimFunc, Var
else:
    Expr = PrimFunc = TirBuffer = Var = Any


NOTE = "ecornn_note"  # called with a text where a kernel's author wrote T.note


class Builder:
    """TVM's builder. A name is a wish: it gets a number where another variable has it. TVM keeps clear of C's keywords,
    and of nothing that CUDA declares: so names of a cell's states get endings here; others end in numbers."""

    @cached_property
    def _tvm(self) -> Any:
        from tvm.tirx.script.builder import ir

        return ir

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tvm, name)

    def named(self, name: str, made: Any) -> Any:
        """``made``, a variable or buffer, under that name."""
        from tvm.script.ir_builder import IRBuilder

        return IRBuilder.name(re.sub(r"^(?=\d)|\W", "_", name), made)

    def block(self, count: int) -> Var:
        """The number of the block, of ``count``."""
        return self.named("block", self._tvm.cta_id([count]))

    def thread(self, count: int) -> Var:
        """The number of the thread in its block, of ``count``."""
        return self.named("thread", self._tvm.thread_id([count]))

    @contextmanager
    def kernel(self, name: str) -> Iterator[Callable[[], PrimFunc]]:
        """Builds a kernel of that name; what is given returns it, once this is left."""
        from tvm.script.ir_builder import IRBuilder

        with IRBuilder() as builder, self._tvm.prim_func():
            self._tvm.func_name(name)
            yield builder.get

    @contextmanager
    def when(self, condition: Expr | bool) -> Iterator[None]:
        """Code that runs only where the condition holds; True: without asking."""
        if condition is True:
            yield
        else:
            with self._tvm.If(condition), self._tvm.Then():
                yield

    def let(self, name: str, value: Expr) -> Var:
        return self.named(name, self._tvm.Bind(value))

    def local(self, name: str, shape: Sequence[int], dtype: str) -> TirBuffer:
        """An array of a thread's own, in registers where every index is a constant; (1,): a variable that changes."""
        return self.named(name, self._tvm.alloc_buffer(shape, dtype, scope="local"))

    def variable(self, name: str, dtype: str, value: Expr) -> TirBuffer:
        """A variable that changes: its element 0 is ``value`` at first."""
        made = self.local(name, (1,), dtype)
        self._tvm.buffer_store(made, value, [0])
        return made

    def shared(self, words: int, align: int = 16) -> TirBuffer:
        """The block's dynamic shared memory, (words,) float32; ``align`` in bytes."""
        return self.named("shared", self._tvm.alloc_buffer((words,), "float32", scope="shared.dyn", align=align))

    def pointer(self, name: str, dtype: str) -> TirBuffer:
        """A parameter of a kernel: a flat array in global memory, of any size."""
        return self._tvm.arg(name, self._tvm.buffer((self._tvm.int64(1 << 40),), dtype))

    def tree(self, name: str, values: Sequence[Expr], join: Callable[[Expr, Expr], Expr]) -> Expr:
        """All values joined: neighbours first, then what these gave, so that no chain of dependent ones is long."""
        while len(values) > 1:
            pairs = [self.let(name, join(a, b)) for a, b in zip(values[::2], values[1::2], strict=False)]
            values = [*pairs, *values[len(pairs) * 2:]]
        return values[0]

    def note(self, text: str) -> None:
        """A comment in code for people (``--emit``), at a phase of a kernel or a role of its warps; nothing of it is
        compiled. ``MMA warps: ...`` begins what those do: the first such note in a branch names the role of its threads
        in pictures (``ecornn/report/roles.py``)."""
        self._tvm.evaluate(self._tvm.call_extern("void", NOTE, text))

    @contextmanager
    def serial(self, name: str, start: Expr | int, stop: Expr | int) -> Iterator[Var]:
        with self._tvm.serial(start, stop) as var:
            yield self.named(name, var)

    @contextmanager
    def strided(self, name: str, total: int, thread: Expr, threads: int) -> Iterator[Var]:
        """A loop of ``threads`` over the numbers below ``total``, of which each thread has every ``threads``-th."""
        with self.serial("turn", 0, ceil_div(total, threads)) as turn:
            number = self.let(name, turn * threads + thread)
            with self.when(number < total):
                yield number

    @contextmanager
    def items(self, total: Expr, thread: Expr, threads: int) -> Iterator[Var]:
        """A grid-stride loop over the items below ``total``, int64: every ``threads``-th, from ``thread`` on."""
        first = self.let("first_item", self._tvm.cast(thread, "int64"))
        total = self.let("total", total)
        turns = self.let("turns", (total - first + (threads - 1)) // threads)
        with self.serial("turn", self._tvm.int64(0), turns) as turn:
            yield self.let("item", turn * threads + first)

    @contextmanager
    def unroll(self, name: str, count: int) -> Iterator[Var]:
        with self._tvm.unroll(count) as var:
            yield self.named(name, var)


def ceil_div(a: Any, b: int) -> Any:
    """``a / b``, rounded up: of numbers or expressions."""
    return -(-a // b)


def name_of(value: Expr) -> str:
    """The name of a variable; ``value`` for another expression."""
    return getattr(value, "name", "value")


T = Builder()
