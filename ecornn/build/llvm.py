"""CPU programs: functions by TVM's LLVM code generator, called by the threads of host_cpu.cc."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ecornn import temporary
from ecornn.build.commands import at_once, at_the_same_time
from ecornn.build.generated import Generated, Texts, texts
from ecornn.device import Device
from ecornn.errors import BuildError
from ecornn.host_cpu import known, machine_of, promised, used
from ecornn.interrupts import safe_interrupts
from ecornn.program import Parallel, Program

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.runtime import Module
    from tvm.tirx import Buffer, PrimFunc, Stmt

HEADERS = ("cpu_openmp.h", "cpu_pack.h", "cpu_team.h", "cpu_waiting.h", "ecornn_blob.h", "host_cpu.h")
OWN = ("host_cpu.h",)  # those that a program's own file includes
SCALARS = 4  # thread, threads, T, B come before the pointers


@safe_interrupts()
def generate(program: Program, device: Device, apart: bool = False) -> Generated:
    """Object file, or with ``apart`` one of each function, and host code of a program of
    :class:`~ecornn.program.Parallel` calls. Functions take int32 ``thread``, ``threads``, ``T``, ``B`` and one pointer
    a buffer. Raises :class:`BuildError` for another form or an unknown CPU, or where the code would need TVM's runtime
    library."""
    for name, entry in program.entries.items():
        if not entry.calls or not all(isinstance(call, Parallel) for call in entry.calls):
            raise BuildError(f"a CPU program is made of Parallel calls; the schedule made for {name!r} "
                             f"{[type(c).__name__ for c in entry.calls]}")
    parts = [{name: function} for name, function in program.functions.items()] if apart else [program.functions]
    with at_the_same_time(at_once()) as threads:  # TVM and LLVM let go of Python's lock
        objects = list(threads.map(lambda part: _object(_module(part, device)), parts))
    shared = host_sources()
    return Generated(
        sources={"program.cc": tables(program)} | {name: shared[name] for name in OWN}, shared=shared,
        objects={f"worker{number or ''}.o": code for number, code in enumerate(objects)},
        emitted=Texts(tir=lambda: "\n".join(f.script() for f in program.functions.values()),
                      asm=lambda: str(_module(program.functions, device).inspect_source("asm"))))


def host_sources() -> dict[str, str]:
    return texts(*HEADERS, "host_cpu.cc")


def _object(module: Module) -> bytes:
    with temporary.folder() as folder:
        module.write_to_file(str(folder / "worker.o"), "o")
        code = (folder / "worker.o").read_bytes()
    if b"TVMBackend" in code:
        raise BuildError("the code calls TVM's runtime library; a module file must not need it")
    return code


def tables(program: Program) -> str:
    """``program.cc``: each entry's workers in the order of its calls, and the pointers that each is given. Raises
    :class:`BuildError` where a call names an unknown function, or a buffer that its entry does not take."""
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
        raise BuildError(f"LLVM {codegen.llvm_version_major()} does not know a 64-bit CPU {device.arch!r} of "
                         f"{triple}")
    # A hypervisor may hide what the CPU's name promises. What is named comes last: a feature goes with those that it
    # needs, and schedules go by those that are named.
    hidden = promised(device.arch, triple) - set(device.features)
    attributes = [f"-{name}" for name in sorted(hidden)] + [f"+{name}" for name in device.features]
    if strange := sorted(set(device.features) - used(device.arch, triple, attributes)):
        raise BuildError(f"LLVM does not know these features of {device.arch!r} for {triple}: {', '.join(strange)}")
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
    """The PrimFunc with values stored in a local array before a variable is bound to them: ``v = a + b`` becomes
    ``hidden[0:16] = a + b; v = hidden[0:16]``. CPU code is made in a fifth to a tenth of the time.

    TVM simplifies whatever a variable is bound to, with earlier variables put in: the arithmetic of a whole step again
    for each of its values, without use. LLVM makes the array a register; results stay the same, bit for bit. Other
    integers stay visible, since what is known of them makes addresses shorter. A type has one array, since LLVM has
    debugging information to keep for each."""
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
    """True for floats, and for integers with an operation of :data:`OPAQUE` in sums, products and casts."""
    parts = [part for part in (getattr(value, name, None) for name in ("a", "b", "value"))
             if part is not None and not isinstance(part, (int, float))]
    return kind.startswith("float") or (kind.startswith("int") and (
        type(value).__name__ in OPAQUE or any(_opaque(kind, part) for part in parts)))
