"""Writes TIR statements in order: bindings, loops, branches, scalar and vector memory access.

All indices are int64, as T * B * H may exceed 2**31; vectors have ``lanes`` lanes, of the layer's type by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ecornn.schedules.builder import Expr, PrimFunc, TirBuffer, Var

if TYPE_CHECKING:
    from tvm.tirx import Stmt


class Emitter:
    """Collects the statements of one function, whose parameters :meth:`scalar` and :meth:`pointer` make in order.
    ``real`` is what the layer computes in, ``float32`` or ``float64``, and ``lanes`` how many of these a vector has."""

    def __init__(self, lanes: int, real: str = "float32") -> None:
        from tvm import ir, tirx

        self.ir, self.tirx, self.lanes, self.real = ir, tirx, lanes, real
        self.vector_type = self.lanes_of(real)
        self.parameters: list[Var] = []
        self.stack: list[list[Stmt]] = [[]]

    # -- parameters and the function ------------------------------------------------------------
    def scalar(self, name: str) -> Expr:
        """An int32 parameter, as int64."""
        var = self.tirx.Var(name, "int32")
        self.parameters.append(var)
        return self.let(f"{name}_64", self.tirx.Cast("int64", var))

    def pointer(self, name: str, dtype: str | None = None) -> TirBuffer:
        """A parameter that points at ``dtype``, as a flat buffer."""
        dtype = dtype or self.real
        var = self.tirx.Var(name, self.ir.PointerType(self.ir.PrimType(dtype), "global"))
        self.parameters.append(var)
        # the size is only a bound: raw pointers carry none, and nothing checks it
        buffer = self.tirx.decl_buffer([self.index(1 << 40)], dtype, f"{name}_data", data=var)
        self.add(self.tirx.DeclBuffer(buffer, data=var))
        return buffer

    def function(self, name: str) -> PrimFunc:
        """The PrimFunc of everything that was written. It must not be marked ``noalias``: LLVM would then keep what one
        thread wrote before a barrier out of sight of another thread that read the place before."""
        (body,) = self.stack
        return self.tirx.PrimFunc(self.parameters, self.tirx.SeqStmt(body)).with_attr("global_symbol", name)

    # -- statements -----------------------------------------------------------------------------
    def add(self, statement: Stmt) -> None:
        self.stack[-1].append(statement)

    def let(self, name: str, value: Expr) -> Var:
        var = self.tirx.Var(name, str(value.ty))
        self.add(self.tirx.Bind(var, value))
        return var

    def call(self, name: str) -> None:
        """Calls ``extern "C" void name()``."""
        self.add(self.tirx.Evaluate(self.tirx.call_extern("void", name)))

    @contextmanager
    def loop(self, name: str, extent: Expr | int, start: Expr | int = 0) -> Iterator[Var]:
        """``for name in start .. start + extent - 1``."""
        var = self.tirx.Var(name, "int64")
        self.stack.append([])
        yield var
        if (body := self.block()) is not None:
            self.add(self.tirx.For(var, self.index(start), self.index(extent), self.tirx.ForKind.SERIAL, body))

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        self.stack.append([])
        yield
        if (body := self.block()) is not None:
            self.add(self.tirx.IfThenElse(condition, body, None))

    def block(self) -> Stmt | None:
        body = self.stack.pop()
        return self.tirx.SeqStmt(body) if len(body) > 1 else body[0] if body else None

    # -- values ---------------------------------------------------------------------------------
    def index(self, value: Expr | int) -> Expr:
        """An int64 constant, or the expression itself."""
        return self.tirx.const(value, "int64") if isinstance(value, int) else value

    def div(self, a: Expr, b: Expr | int) -> Expr:
        """Quotient of non-negative indices."""
        return self.tirx.truncdiv(a, self.index(b))

    def mod(self, a: Expr, b: Expr | int) -> Expr:
        return self.tirx.truncmod(a, self.index(b))

    def ceildiv(self, a: Expr, b: int) -> Expr:
        return self.div(a + self.index(b - 1), b)

    def number(self, value: float, dtype: str | None = None) -> Expr:
        return self.tirx.const(value, dtype or self.real)

    def splat(self, value: Expr | float, dtype: str | None = None) -> Expr:
        """A vector of equal lanes; a number becomes ``dtype``."""
        scalar = self.number(value, dtype) if isinstance(value, (int, float)) else value
        return self.tirx.Broadcast(scalar, self.lanes) if self.lanes > 1 else scalar

    def type_of(self, scalar: Expr) -> str:
        """The type that a scalar of the cell has here: what it calls float32 is the layer's."""
        return self.real if str(scalar.ty) == "float32" else str(scalar.ty)

    def intrinsic(self, name: str, *operands: Expr) -> Expr:
        """A TIR intrinsic that returns the type of its first operand."""
        return self.ir.Call(self.ir.Op.get(f"tirx.{name}"), list(operands), ret_ty=operands[0].ty)

    def fma(self, a: Expr, b: Expr, c: Expr) -> Expr:
        return self.intrinsic("fma", a, b, c)  # a * b + c, rounded once

    # -- memory ---------------------------------------------------------------------------------
    def load(self, buffer: TirBuffer, index: Expr | int) -> Expr:
        return self.tirx.BufferLoad(buffer, [self.index(index)])

    def store(self, buffer: TirBuffer, index: Expr | int, value: Expr) -> None:
        self.add(self.tirx.BufferStore(buffer, value, [self.index(index)]))

    def vload(self, buffer: TirBuffer, index: Expr | int) -> Expr:
        """Loads ``lanes`` elements from ``index`` on."""
        return self.tirx.BufferLoad(buffer, [self.ramp(index)])

    def vstore(self, buffer: TirBuffer, index: Expr | int, value: Expr) -> None:
        """Stores ``lanes`` elements from ``index`` on."""
        self.add(self.tirx.BufferStore(buffer, value, [self.ramp(index)]))

    def prefetch(self, buffer: TirBuffer, index: Expr | int) -> None:
        """Asks for the cache line of an element, which need not exist."""
        place = self.tirx.address_of(self.load(buffer, index))
        flags = (self.tirx.const(value, "int32") for value in (0, 3, 1))  # to read, for all caches, data
        self.add(self.tirx.Evaluate(self.tirx.call_llvm_intrin("void", "llvm.prefetch", place, *flags)))

    def ramp(self, index: Expr | int) -> Expr:
        first = self.index(index)
        return self.tirx.Ramp(first, self.index(1), self.lanes) if self.lanes > 1 else first

    def cast(self, dtype: str, value: Expr) -> Expr:
        """A vector converted to lanes of ``dtype``."""
        return self.tirx.Cast(self.lanes_of(dtype), value)

    def lanes_of(self, dtype: str) -> str:
        """The type of a vector of ``dtype``; one lane is no vector."""
        return f"{dtype}x{self.lanes}" if self.lanes > 1 else dtype

    def local(self, name: str, dtype: str | None = None, size: int = 0) -> TirBuffer:
        """A vector of its own, or ``size`` elements; LLVM makes it a register where every access is a whole vector."""
        buffer = self.tirx.decl_buffer([size or self.lanes], dtype or self.real, name, scope="local")
        self.add(self.tirx.AllocBuffer(buffer))
        return buffer

    def vload_part(self, name: str, buffer: TirBuffer, index: Expr, valid: Expr) -> Expr:
        """A vector whose first ``valid`` lanes (any number; <= 0 for none) are read, the others zero."""
        parts = self.local(name)
        self.vstore(parts, 0, self.splat(0.0))
        with self.when(valid >= self.index(self.lanes)):
            self.vstore(parts, 0, self.vload(buffer, index))
        with self.when(valid < self.index(self.lanes)), self.loop("lane", self.tirx.Max(valid, self.index(0))) as lane:
            self.store(parts, lane, self.load(buffer, index + lane))
        return self.let(f"{name}_value", self.vload(parts, 0))

    def vstore_part(self, name: str, buffer: TirBuffer, index: Expr, value: Expr, valid: Expr) -> None:
        """Stores the first ``valid`` lanes (any number; <= 0 for none)."""
        with self.when(valid >= self.index(self.lanes)):
            self.vstore(buffer, index, value)
        with self.when(valid < self.index(self.lanes)):
            parts = self.local(name)
            self.vstore(parts, 0, value)
            with self.loop("lane", self.tirx.Max(valid, self.index(0))) as lane:
                self.store(buffer, index + lane, self.load(parts, lane))
