"""Generated files -> one shared library, by the host's C++ compiler."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import struct
import threading
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from itertools import chain
from pathlib import Path
from typing import Any

from ecornn import checksum, temporary
from ecornn.build import cache
from ecornn.build.commands import ANSWER, WORK, at_the_same_time, first_lines, run, started
from ecornn.build.generated import Generated, NumberTables
from ecornn.errors import BuildError, MissingPackageError
from ecornn.interrupts import safe_interrupts

COMPILERS = ("c++", "g++", "clang++")
LIBRARY = ("-shared", "-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden", "-w")  # flags of a package's own one
SOURCE_SUFFIXES = (".cc", ".cpp", ".c", ".s")  # other files are headers
MARK = 0x6E72726F63652E31  # kMark of host_cuda.h
ALIGNMENT = 64  # bytes, of what lies behind a library
LOOK = 0.05  # seconds between two looks at whether those who wait still should


def link(generated: Generated, out: Path) -> None:
    """Writes the shared library ``out``, its checksum behind it, complete or not at all. It needs ``libtvm_ffi.so``,
    C's and C++'s libraries. Raises :class:`BuildError` if there is no compiler, if it fails, or if ``out`` is there and
    no file."""
    compiler = find_compiler()
    out = Path(out).absolute()  # the compiler runs in a folder of its own
    if out.exists() and not out.is_file():
        raise BuildError(f"{out} is not a regular file, and ecornn does not overwrite it; choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    if generated.program is None:
        content = _linked(compiler, objects_of(compiler, generated), generated.binaries, generated.functions)
    else:
        library = _host_library(compiler, generated.shared)
        content = library + behind(len(library), *generated.binaries.values(), program=generated.program)
    try:
        with temporary.replacing(out) as beside:
            beside.write_bytes(content)
            beside.chmod(0o755)
            checksum.append(beside)
    except OSError as error:
        raise BuildError(f"{out} cannot be written: {error}") from error


def _linked(compiler: Sequence[str], objects: dict[str, bytes], binaries: dict[str, bytes],
            functions: Sequence[str]) -> bytes:
    """A shared library of these."""
    with temporary.folder() as folder:
        inputs = write_inputs(objects, binaries, folder, functions)
        return _made([*compiler, "-shared", "-pthread", *inputs, f"-L{Path(libinfo().find_libtvm_ffi()).parent}",
                      "-Wl,--as-needed", "-Wl,--no-undefined", "-Wl,-z,noexecstack", "-Wl,-Bsymbolic",
                      "-Wl,--strip-debug", "-ltvm_ffi", "-ldl"], folder)


def _made(command: Sequence[str], folder: Path) -> bytes:
    run_tool([*command, "-o", "made"], folder)
    return (folder / "made").read_bytes()


def _host_library(compiler: Sequence[str], shared: Mapping[str, str]) -> bytes:
    """The library that all CUDA modules are: from the cache, once it has been compiled. A second caller waits, unless
    its pool is ended."""
    lock = _lock
    while not lock.acquire(timeout=LOOK):
        for owner in started():
            owner.check()
    try:
        return _host_library_of(tuple(compiler), tuple(shared.items()))
    finally:
        lock.release()


_lock = threading.Lock()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)  # the thread that has it is not there


@functools.lru_cache(maxsize=2)
def _host_library_of(compiler: tuple[str, ...], shared: tuple[tuple[str, str], ...]) -> bytes:
    return cache.entry("host", (_version(compiler), version("apache-tvm-ffi"), *chain(*shared)),
                       # what it does is mostly to wait for the driver: a second of -O2 gains nothing
                       lambda: _linked(compiler, _compiled(compiler, dict(shared), optimize="-Og"), {}, ()))


def behind(size: int, manifest: bytes, tables: bytes, *cubins: bytes, program: bytes) -> bytes:
    """The bytes behind a library of ``size`` bytes, which HostProgram::Read() of host_cuda.h finds from the end."""
    blobs, places, made, first = (manifest, tables, program, *cubins), list[int](), bytearray(), NumberTables()
    start = 8 * (1 + 2 * len(blobs))
    start += -(size + start) % ALIGNMENT
    for blob in blobs:
        places += [start + len(made), len(blob)]
        made += blob + bytes(1 + -(len(blob) + 1) % ALIGNMENT)  # with a zero behind it
    first.numbers(len(blobs), *places)
    content = bytes(first.content).ljust(start, b"\0") + made
    content += bytes(-len(content) % 8)
    return content + struct.pack("<2q", len(content) + 16, MARK)


def compile_ahead(shared: dict[str, str], linked: bool) -> None:
    """Compiles, and links if ``linked``, what modules share, for :func:`link`, to which errors are left."""
    with contextlib.suppress(BuildError):
        compiler = find_compiler()
        if linked:
            _host_library(compiler, shared)
        else:
            _compiled(compiler, shared)


def objects_of(compiler: Sequence[str], generated: Generated) -> dict[str, bytes]:
    return {**generated.objects, **_compiled(compiler, generated.sources, generated.shared)}


@safe_interrupts()
def _compiled(compiler: Sequence[str], *groups: Mapping[str, str], optimize: str = "-O2") -> dict[str, bytes]:
    """An object file of each C++ source of several groups; the other files of a group are its headers."""
    made = [((name, text), tuple(one for one in group.items() if not one[0].endswith(SOURCE_SUFFIXES)))
            for group in groups for name, text in group.items() if name.endswith(SOURCE_SUFFIXES)]
    with at_the_same_time(max(1, len(made))) as threads:  # that wait for the compiler
        objects = threads.map(lambda one: _object(tuple(compiler), optimize, *one), made)
        return {f"{name}.o": code for ((name, _), _), code in zip(made, objects, strict=True)}


@functools.lru_cache(maxsize=8)
def _object(compiler: tuple[str, ...], optimize: str, source: tuple[str, str],
            headers: tuple[tuple[str, str], ...]) -> bytes:
    """One source's object file: the latest ones of this process, or from the cache."""
    flags = ["-fPIC", optimize, "-std=c++17", "-fvisibility=hidden", "-pthread"]
    folders = [f"-I{f}" for f in (libinfo().find_include_path(), libinfo().find_dlpack_include_path())]

    def compile() -> bytes:
        with temporary.folder() as folder:
            for name, text in (source, *headers):
                (folder / name).write_text(text)
            return _made([*compiler, *flags, *folders, "-c", source[0]], folder)

    return cache.entry("object", (_version(compiler), version("apache-tvm-ffi"), *flags, *source, *chain(*headers)),
                       compile)


def package_library(source: str, linked: Sequence[str], folders: Sequence[str] = (),
                    parts: Sequence[str] = ()) -> bytes:
    """The bytes of a shared library of a C++ file of the package: cached, or new. ``folders``: headers of others, which
    ``parts`` name with their versions. Raises :class:`BuildError` where there is no compiler, or it fails."""
    package = Path(str(resources.files("ecornn")))
    places = [*(f"-I{folder}" for folder in (*folders, package / "include", libinfo().find_dlpack_include_path())),
              f"-L{Path(libinfo().find_libtvm_ffi()).parent}"]

    def compile() -> bytes:
        with temporary.folder() as folder:
            return _made([*find_compiler(), *LIBRARY, *places, str(package / source), *linked], folder)

    return cache.entry(*_library_entry(source, linked, folders, parts), compile)


def _library_entry(source: str, linked: Sequence[str], folders: Sequence[str] = (),
                   parts: Sequence[str] = ()) -> tuple[str, Sequence[str]]:
    """The kind and parts of the entry that :func:`package_library` keeps."""
    package = Path(str(resources.files("ecornn")))
    texts = [path.read_text() for place in ((package / source).parent, package / "include")
             for path in sorted(place.iterdir()) if path.suffix in (".cc", ".h", ".hpp")]
    return (package / source).parent.name, (identity(), *parts, *LIBRARY, *linked, *texts)


def package_library_file(arguments: dict[str, Any]) -> str:
    """Makes what :func:`package_library` makes of these; the file of its entry, empty if the cache keeps none."""
    package_library(**arguments)
    return str(cache.file_of(*_library_entry(**arguments)) or "")


@functools.cache
def libinfo() -> Any:
    """``tvm_ffi.libinfo``, which finds headers and the library, without its package, which loads that library and
    imports PyTorch where it is installed."""
    package = find_spec("tvm_ffi")
    found = PathFinder.find_spec("libinfo", package.submodule_search_locations) if package is not None else None
    if found is None or found.loader is None:
        raise MissingPackageError("apache-tvm-ffi is not installed, so that nothing can be linked")
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def identity() -> str:
    """The compiler's version, and that of the library that host code is linked against."""
    return f"{_version(tuple(find_compiler()))} {version('apache-tvm-ffi')}"


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return " ".join((*compiler, run([*compiler, "--version"], ANSWER)[1]))


def run_tool(command: list[str], folder: Path) -> None:
    """Runs a compiler or another tool. Raises :class:`BuildError` with the first lines of its message if it fails."""
    status, said = run(command, WORK, folder)
    if status != 0:
        raise BuildError(f"{command[0]} failed:\n{first_lines(said)}{temporary.limited()}")


def find_compiler() -> list[str]:
    """The command of the C++ compiler: ``$CXX``, else the first of c++, g++ and clang++."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    if chosen:
        raise BuildError(f"CXX={os.environ['CXX']!r}, but {chosen[0]!r} was not found")
    raise BuildError(f"no C++ compiler (looked for {', '.join(COMPILERS)}); install g++ or clang, "
                     "for example 'apt install g++', or set CXX")


def write_inputs(objects: dict[str, bytes], binaries: dict[str, bytes], folder: Path,
                 functions: Sequence[str] = ()) -> list[str]:
    """Writes all inputs of the linker to ``folder`` and returns their names."""
    for name, content in (objects | {f"{symbol}.bin": content for symbol, content in binaries.items()}).items():
        (folder / name).write_bytes(content)
    if binaries:
        (folder / "binaries.s").write_text(_assembler(binaries, functions))
    return [*objects, *(["binaries.s"] if binaries else [])]


def _assembler(binaries: dict[str, bytes], functions: Sequence[str]) -> str:
    """Read-only data of each ``symbol``, an ecornn_blob, and functions' addresses: for megabytes faster than C."""
    lines, writable = ['.section .rodata,"a",%progbits'], '.section .data.rel.ro,"aw",%progbits'
    for symbol in binaries:
        lines += [".balign 64", f"{symbol}_data:", f'.incbin "{symbol}.bin"', ".byte 0"]
    lines.append(writable)
    for symbol, content in binaries.items():
        lines += [f".global {symbol}", f".hidden {symbol}", ".balign 8", f"{symbol}:", f".quad {symbol}_data",
                  f".quad {len(content)}"]
    if functions:
        lines += [writable, ".global ecornn_functions", ".hidden ecornn_functions", ".balign 8", "ecornn_functions:",
                  *(f".quad {name or 0}" for name in functions)]
    return "\n".join([*lines, '.section .note.GNU-stack,"",%progbits', ""])
