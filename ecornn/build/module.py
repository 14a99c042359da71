"""Program and manifest -> module file; or a static library for programs in C and C++, and its header.

Such a library needs C's and C++'s libraries alone: ``standalone.cc`` is what it takes of libtvm_ffi.so. One of its
symbols is global, so that a program may have several such libraries."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import msgspec

from ecornn import temporary
from ecornn.build import c_tables, cuda, llvm
from ecornn.build.commands import at_the_same_time
from ecornn.build.generated import Generated, texts
from ecornn.build.link import compile_ahead, find_compiler, identity, link, objects_of, run_tool, write_inputs
from ecornn.device import Device
from ecornn.dtypes import DLPACK
from ecornn.errors import ArgumentError, BuildError, WeightsError
from ecornn.host_cpu import machine_of
from ecornn.interrupts import safe_interrupts
from ecornn.manifest import Manifest
from ecornn.program import Program

if TYPE_CHECKING:
    import numpy as np

MANIFEST = "ecornn_manifest"


def generate(program: Program, device: Device, apart: bool = False) -> Generated:
    """Machine code and host code of ``program``, not linked; ``apart``: in several files where that takes less time.
    Raises :class:`~ecornn.errors.BuildError`."""
    return cuda.generate(program, device) if device.kind == "cuda" else llvm.generate(program, device, apart)


@safe_interrupts()
def build_module(program: Program, manifest: Manifest, out: Path) -> Generated:
    """Builds ``program`` for ``manifest.device`` into the module file ``out``; returns what was generated on the way.
    Raises :class:`~ecornn.errors.BuildError`; ``out`` is then left as it was."""
    with host_code_ahead(manifest.device.kind):
        generated = _complete(program, manifest)
    link(generated, out)
    return generated


@contextlib.contextmanager
def host_code_ahead(kind: str) -> Iterator[None]:
    """Compiles, while the caller imports TVM and plans, the host code that all modules of a kind of device share. The
    first module of a machine waits for it; an exception ends the compiler. Imports nothing of TVM itself."""
    backend = cuda if kind == "cuda" else llvm
    with at_the_same_time(1) as thread:
        thread.submit(compile_ahead, backend.host_sources() | c_tables.sources(), linked=backend is cuda)
        yield


def _complete(program: Program, manifest: Manifest) -> Generated:
    """All that is linked."""
    device = manifest.device
    if device.kind == "llvm" and (machine := machine_of(device)) != os.uname().machine:
        raise BuildError(f"a module for {device.arch} must be linked on an {machine} machine: compile it there, or "
                         "write its object file with --emit object")
    generated = generate(program, device, apart=True)
    own = {MANIFEST: msgspec.json.encode(manifest), c_tables.SYMBOL: c_tables.tables(manifest, program.entries)}
    return replace(generated, binaries={**own, **generated.binaries}, shared={**generated.shared, **c_tables.sources()},
                   functions=c_tables.functions(program, device))


def build_archive(program: Program, manifest: Manifest, out: Path,
                  weights: Mapping[str, np.ndarray[Any, Any]] | None = None) -> Path:
    """Builds the static library ``out`` of a CPU's program, with its ``weights`` inside where they are given, and
    returns its header, beside it. Raises :class:`~ecornn.errors.BuildError` where a tool fails or is missing,
    :class:`~ecornn.errors.WeightsError` for weights that are not the layer's, and as :func:`name_of`."""
    name = name_of(out)
    content, bind = (b"", "") if weights is None else _embedded(name, manifest, weights)
    generated = _complete(program, manifest)
    if content:
        generated = replace(generated, binaries={**generated.binaries, f"{name}_weights": content})
    header = out.with_name(f"{name}.h")
    compiler = find_compiler()
    if "clang" not in identity():  # GCC's variables of inline functions could not be made local
        compiler.append("-fno-gnu-unique")
    ar, objcopy = map(_tool, ("ar", "objcopy"))
    objects = objects_of(compiler, replace(generated, sources={**generated.sources, **texts("standalone.cc")}))
    text = Template(texts("static_layer.h")["static_layer.h"]).substitute(
        name=name, upper=name.upper(), what=f"{manifest.workload}, {manifest.device.arch}", bind=bind)
    with temporary.folder() as folder:
        inputs = write_inputs(objects, generated.binaries, folder, generated.functions)
        # sections of templates would be taken for those of another library, whose symbols are as local as these
        run_tool([*compiler, "-r", "-nostdlib", "-Wl,--force-group-allocation", *inputs, "-o", "all.o"], folder)
        run_tool([objcopy, f"--redefine-sym=ecornn_module_api={name}_module_api",
                  f"--keep-global-symbol={name}_module_api", f"--keep-global-symbol={name}_weights", "all.o",
                  f"{name}.o"], folder)
        run_tool([ar, "rcsD", "made.a", f"{name}.o"], folder)
        (folder / "made.h").write_text(text)
        for name_here, path in (("made.a", out), ("made.h", header)):
            try:
                with temporary.replacing(path) as beside:
                    shutil.copyfile(folder / name_here, beside)
            except OSError as error:
                raise BuildError(f"{path} cannot be written: {error}") from error
    return header


def _embedded(name: str, manifest: Manifest, weights: Mapping[str, np.ndarray[Any, Any]]) -> tuple[bytes, str]:
    """The weights, each at a multiple of 64 bytes, and the header's function that binds them."""
    import numpy as np

    dtype, content, shapes, tensors, named = manifest.workload.dtype, bytearray(), list[str](), list[str](), list[str]()
    code, bits = DLPACK[dtype]
    for n, parameter in enumerate(manifest.parameters):
        value = weights.get(parameter.name)
        if value is None or value.shape != parameter.shape:
            is_there = "is missing" if value is None else f"has shape {value.shape}"
            raise WeightsError(f"{parameter.name} of the weights {is_there}; expected shape {parameter.shape}",
                               [parameter.name])
        shapes.append(f"{{{', '.join(map(str, value.shape))}}}")
        tensors.append(f"{{(void*)({name}_weights.data + {len(content)}), {{kDLCPU, 0}}, {value.ndim}, "
                       f"{{{code}, {bits}, 1}}, shapes[{n}], NULL, 0}}")
        named.append(f'{{"{parameter.name}", &tensors[{n}]}}')
        content += np.ascontiguousarray(value, dtype).tobytes()
        content += bytes(-len(content) % 64)
    text = Template(texts("static_weights.h")["static_weights.h"]).substitute(
        name=name, count=len(named), shapes=", ".join(shapes), tensors=",\n      ".join(tensors),
        named=",\n                                ".join(named))
    return bytes(content), text


def name_of(out: Path) -> str:
    """The prefix of the functions of a library in this file, its name without ``lib`` and ending. Raises
    :class:`~ecornn.errors.ArgumentError` where that is none of a function."""
    name = out.stem.removeprefix("lib")
    if out.suffix != ".a" or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise ArgumentError("--emit-to", str(out), "a name of letters, digits and _ that ends with .a, such as "
                            "lstm64.a")
    return name


def _tool(name: str) -> str:
    if path := shutil.which(name):
        return path
    raise BuildError(f"{name} was not found; install binutils, for example 'apt install binutils'")
