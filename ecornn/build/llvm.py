"""CPU programs: functions by TVM's LLVM code generator, called by the threads of host_cpu.cc.

Values that TVM's analyzer need not look into are hidden from it, so that code is made in a fifth to a tenth of the
time. It simplifies whatever a variable is bound to, with what earlier variables are bound to put in, and so goes
through the arithmetic of a whole step again with each of its values, and through a quotient or a minimum again with
each index that is made of it. It has no use for either. A local array between hides them: LLVM makes it a register, and
the results stay the same, bit for bit. Other integers stay visible: what is known of them makes addresses shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING

from ecornn import temporary
from ecornn.build.generated import Generated, Texts
from ecornn.device import Device
from ecornn.errors import BuildError
from ecornn.host_cpu import known, machine_of, promised, used
from ecornn.program import Parallel, Program

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.runtime import Module
    from tvm.tirx import PrimFunc, Stmt

HEADERS = ("cpu_openmp.h", "cpu_pack.h", "cpu_team.h", "cpu_waiting.h", "ecornn_blob.h", "host_cpu.h")
SCALARS = 4  # thread, threads, T, B come before the pointers


def generate(program: Program, device: Device) -> Generated:
    """Object file and host code of a program of :class:`~ecornn.program.Parallel` calls.

    A function's parameters are int32 ``thread``, ``threads``, ``T``, ``B`` and one pointer a buffer.
    Raises :class:`BuildError` where the program is of another form, LLVM does not know the CPU, or
    the code would need TVM's runtime library.
    """
    for name, entry in program.entries.items():
        if not entry.calls or not all(isinstance(call, Parallel) for call in entry.calls):
            raise BuildError(f"a CPU program is made of Parallel calls; the schedule made for {name!r} "
                             f"{[type(c).__name__ for c in entry.calls]}")
    module, files = _module(program.functions, device), resources.files("ecornn.build")
    host = {name: (files / name).read_text() for name in (*HEADERS, "host_cpu.cc")}  # the same for all programs
    with temporary.folder() as folder:
        module.write_to_file(str(folder / "worker.o"), "o")
        code = (folder / "worker.o").read_bytes()
    if b"TVMBackend" in code:
        raise BuildError("the code calls TVM's runtime library; a module file must not need it")
    return Generated(
        sources={"program.cc": tables(program), **host}, objects={"worker.o": code},
        emitted=Texts(tir=lambda: "\n".join(f.script() for f in program.functions.values()),
                      asm=lambda: str(module.inspect_source("asm"))))


def tables(program: Program) -> str:
    """``program.cc``: for each entry the workers in the order of its calls, and the pointers that each is given.

    Raises :class:`BuildError` where a call names an unknown function, or a buffer that its entry does not take.
    """
    lines = ['#include "host_cpu.h"', "", *(f"ECORNN_WORKER(__tvm_ffi_{name})" for name in program.functions), ""]
    for name, entry in program.entries.items():
        place, rows = {buffer: i for i, buffer in enumerate(entry.takes)}, []
        for number, call in enumerate(entry.calls):
            assert isinstance(call, Parallel)
            if call.function not in program.functions:
                raise BuildError(f"a call of {call.function!r}, which is no function of the program")
            names = [p.name for p in program.functions[call.function].params][SCALARS:]
            given = [call.names.get(n, n) for n in names]
            if strangers := [n for n in given if n not in place]:
                raise BuildError(f"function {call.function!r}: the program has no buffer {', '.join(strangers)} that "
                                 f"entry {name!r} takes")
            numbers = ", ".join(str(place[n]) for n in given)
            lines.append(f"static const int {name}_pointers{number}[] = {{{numbers}}};")
            rows.append(f"    {{__tvm_ffi_{call.function}, {name}_pointers{number}, {len(given)}, {call.most}, "
                        f"{call.work}}},")
        lines += [f"static const ecornn::Call {name}_calls[] = {{", *rows, "};",
                  f"ECORNN_ENTRY({name}, {len(entry.takes)})", ""]
    return "\n".join(lines)


def _module(functions: Mapping[str, PrimFunc], device: Device) -> Module:
    import tvm
    from tvm import tirx
    from tvm.target import Target, codegen

    triple = f"{machine_of(device)}-linux-gnu"
    if not known(device.arch, triple):
        raise BuildError(f"LLVM {codegen.llvm_version_major()} does not know the CPU {device.arch!r} of {triple}, or "
                         "it has no 64 bits")
    # A hypervisor may hide what the CPU's name promises. What is named comes last: a feature goes with those that it
    # needs, and schedules go by those that are named.
    hidden = promised(device.arch, triple) - set(device.features)
    attributes = [f"-{name}" for name in sorted(hidden)] + [f"+{name}" for name in device.features]
    if strange := sorted(set(device.features) - used(device.arch, triple, attributes)):
        raise BuildError(f"features of {device.arch!r} that LLVM does not know for {triple}: {', '.join(strange)}")
    target = Target({"kind": "llvm", "mcpu": device.arch, "mtriple": triple, "mattr": attributes})
    passes = tirx.transform
    # TVM's default pipeline would move local buffers, here registers, to memory of its runtime; common
    # subexpressions are left to LLVM, which is faster at them
    lower = tvm.ir.transform.Sequential([
        passes.BindTarget(target.with_host(target)), passes.FlattenBuffer(), passes.StmtSimplify(),
        passes.SplitHostDevice(), passes.MakePackedAPI(), passes.LowerIntrin()])
    with tvm.transform.PassContext(opt_level=3):
        lowered = lower(tvm.IRModule({n: hide(f).with_attr("global_symbol", n) for n, f in functions.items()}))
    return tvm.get_global_func("target.build.llvm")(lowered, target)


# Operations of integers after which simplifying takes long and finds nothing.
OPAQUE = ("Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max", "Select", "BufferLoad")


def hide(function: PrimFunc) -> PrimFunc:
    """The PrimFunc with every such value stored in a local array before a variable is bound to it.

    Before: ``v = a + b``. After: ``memory = alloc_local((16,)); memory[0:16] = a + b; v = memory[0:16]``.
    """
    return function.with_body(_statement(function.body))


def _statement(one: Stmt) -> Stmt:
    from tvm import tirx

    if isinstance(one, tirx.SeqStmt):
        return tirx.SeqStmt([part for s in one.seq for part in _hidden(s)])
    if isinstance(one, tirx.For):
        return tirx.For(one.loop_var, one.min, one.extent, one.kind, _statement(one.body), one.thread_binding,
                        one.annotations)
    if isinstance(one, tirx.IfThenElse):
        otherwise = _statement(one.else_case) if one.else_case is not None else None
        return tirx.IfThenElse(one.condition, _statement(one.then_case), otherwise)
    return one


def _hidden(one: Stmt) -> Iterator[Stmt]:
    from tvm import tirx

    if not isinstance(one, tirx.Bind) or not _opaque(str(one.var.ty), one.value):
        yield _statement(one)
        return
    element, _, lanes = str(one.var.ty).partition("x")
    memory = tirx.decl_buffer([int(lanes or 1)], element, one.var.name, scope="local")
    start = tirx.const(0, "int64")
    index = tirx.Ramp(start, tirx.const(1, "int64"), int(lanes)) if lanes else start
    yield tirx.AllocBuffer(memory)
    yield tirx.BufferStore(memory, one.value, [index])
    yield tirx.Bind(one.var, tirx.BufferLoad(memory, [index]))


def _opaque(kind: str, value: Expr) -> bool:
    return kind.startswith("float") or (kind.startswith("int") and any(_operations(value)))


def _operations(value: Expr) -> Iterator[bool]:
    """Yields for each operation in the value True where it is one of ``OPAQUE``."""
    yield type(value).__name__ in OPAQUE
    for name in ("a", "b", "value"):  # of sums and products, and of casts
        part = getattr(value, name, None)
        if part is not None and not isinstance(part, (int, float)):
            yield from _operations(part)
