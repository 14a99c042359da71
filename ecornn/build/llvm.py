"""CPU programs: one function by TVM's LLVM code generator, called by the team of threads of host_cpu.cc."""

from __future__ import annotations

import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from ecornn.build.generated import Generated
from ecornn.device import Device
from ecornn.errors import BuildError
from ecornn.host_cpu import machine_of, promised
from ecornn.program import Parallel, Program


def generate(program: Program, device: Device) -> Generated:
    """Object file and host code of a program with one :class:`~ecornn.program.Parallel` call.

    The function's parameters are int32 ``thread``, ``threads``, ``T``, ``B`` and one pointer a buffer.
    Raises :class:`BuildError` where the program is of another form, LLVM does not know the CPU, or
    the code would need TVM's runtime library.
    """
    if len(program.calls) != 1 or not isinstance(program.calls[0], Parallel):
        raise BuildError("a CPU program is one Parallel call; the schedule made "
                         f"{[type(c).__name__ for c in program.calls]}")
    name = program.calls[0].function
    module = _module(name, program.functions[name], device)
    with tempfile.TemporaryDirectory(prefix="ecornn-") as folder:
        path = Path(folder, "worker.o")
        module.write_to_file(str(path), "o")
        code = path.read_bytes()
    if b"TVMBackend" in code:
        raise BuildError(f"{name} calls TVM's runtime library; a module file must not need it")
    header = (f"#define ECORNN_WORKER __tvm_ffi_{name}\n"
              f"#define ECORNN_BUFFERS {len(program.buffers)}\n")
    host = (resources.files("ecornn.build") / "host_cpu.cc").read_text()
    return Generated(
        sources={"program.h": header, "host.cc": host}, objects={"worker.o": code},
        emitted={"tir": program.functions[name].script(), "asm": module.inspect_source("asm")})


def _module(name: str, function: Any, device: Device) -> Any:
    import tvm
    from tvm import tirx
    from tvm.target import Target, codegen

    triple = f"{machine_of(device)}-linux-gnu"
    if not codegen.llvm_is_valid_cpu(device.arch, triple):
        raise BuildError(f"LLVM {codegen.llvm_version_major()} does not know the CPU {device.arch!r} of {triple}")
    # A hypervisor may hide what the CPU's name promises.
    hidden = promised(device.arch, triple) - set(device.features)
    attributes = [f"+{name}" for name in device.features] + [f"-{name}" for name in sorted(hidden)]
    target = Target({"kind": "llvm", "mcpu": device.arch, "mtriple": triple, "mattr": attributes})
    passes = tirx.transform
    # TVM's default pipeline would move local buffers, here registers, to memory of its runtime; common
    # subexpressions are left to LLVM, which is faster at them
    lower = tvm.ir.transform.Sequential([
        passes.BindTarget(target.with_host(target)), passes.FlattenBuffer(), passes.StmtSimplify(),
        passes.SplitHostDevice(), passes.MakePackedAPI(), passes.LowerIntrin()])
    with tvm.transform.PassContext(opt_level=3):
        lowered = lower(tvm.IRModule({name: function}))
    return tvm.get_global_func("target.build.llvm")(lowered, target)
