"""Generated files -> one shared library, by the host's C++ compiler."""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ecornn.build.generated import Generated
from ecornn.build.nvcc import first_lines
from ecornn.errors import BuildError

COMPILERS = ("c++", "g++", "clang++")
SOURCE_SUFFIXES = (".cc", ".cpp", ".c", ".s")  # other files are headers


def link(generated: Generated, out: Path) -> None:
    """Writes the shared library ``out``, complete or not at all.

    It depends on ``libtvm_ffi.so`` and the C and C++ libraries. Raises :class:`BuildError` with the
    compiler's message, or with what to install where there is no C++ compiler.
    """
    from tvm_ffi import libinfo

    compiler = find_compiler()
    out = Path(out).absolute()  # the compiler runs in a folder of its own
    out.parent.mkdir(parents=True, exist_ok=True)
    # In the folder of `out`, so that it can take its place in one step.
    made = out.parent / f".{out.name}.{secrets.token_hex(8)}"
    runtime = Path(libinfo.find_libtvm_ffi())
    objects = {**generated.objects, "sources.o": _compiled(tuple(compiler), tuple(sorted(generated.sources.items())))}
    with tempfile.TemporaryDirectory(prefix="ecornn-") as name:
        inputs = _write({}, objects, generated.binaries, Path(name))
        try:
            _run([*compiler, "-shared", "-pthread", *inputs, f"-L{runtime.parent}", "-Wl,--as-needed",
                  "-Wl,--no-undefined", "-Wl,-z,noexecstack", "-ltvm_ffi", "-ldl", "-o", str(made)], name)
            made.replace(out)
        except OSError as error:
            raise BuildError(f"{out} cannot be written: {error}") from error
        finally:
            made.unlink(missing_ok=True)


@functools.lru_cache(maxsize=8)
def _compiled(compiler: tuple[str, ...], sources: tuple[tuple[str, str], ...]) -> bytes:
    """One object file of C++ sources; kept, since a search compiles the same ones for every candidate."""
    from tvm_ffi import libinfo

    with tempfile.TemporaryDirectory(prefix="ecornn-") as name:
        inputs = _write(dict(sources), {}, {}, Path(name))
        flags = ["-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden", "-pthread",
                 f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
        for source in inputs:
            _run([*compiler, *flags, "-c", source, "-o", f"{source}.o"], name)
        _run([*compiler, "-r", "-nostdlib", *(f"{source}.o" for source in inputs), "-o", "all.o"], name)
        return Path(name, "all.o").read_bytes()


def _run(command: list[str], folder: str) -> None:
    """Raises :class:`BuildError` with the first lines of what the compiler says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed:\n{first_lines(done.stderr + done.stdout)}")


def find_compiler() -> list[str]:
    """The command of the C++ compiler: ``$CXX``, else the first of c++, g++ and clang++."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    if chosen:
        raise BuildError(f"CXX={os.environ['CXX']!r}, but there is no {chosen[0]!r}")
    raise BuildError(f"no C++ compiler (looked for {', '.join(COMPILERS)}); install g++ or clang, "
                     "for example 'apt install g++', or set CXX")


def _write(sources: dict[str, str], objects: dict[str, bytes], binaries: dict[str, bytes],
           folder: Path) -> list[str]:
    """Writes all inputs to ``folder`` and returns those that the compiler is given."""
    inputs = []
    for name, text in sources.items():
        (folder / name).write_text(text)
        if name.endswith(SOURCE_SUFFIXES):
            inputs.append(name)
    for name, content in objects.items():
        (folder / name).write_bytes(content)
        inputs.append(name)
    if binaries:
        for symbol, content in binaries.items():
            (folder / f"{symbol}.bin").write_bytes(content)
        (folder / "binaries.s").write_text(_assembler(binaries))
        inputs.append("binaries.s")
    return inputs


def _assembler(binaries: dict[str, bytes]) -> str:
    """Read-only data ``symbol`` and ``symbol_size``; the assembler takes megabytes at once, as a C
    compiler does not."""
    lines = ['.section .rodata,"a",%progbits']
    for symbol, content in binaries.items():
        lines += [f".global {symbol}", f".hidden {symbol}", ".balign 64", f"{symbol}:",
                  f'.incbin "{symbol}.bin"', ".byte 0",
                  f".global {symbol}_size", f".hidden {symbol}_size", ".balign 8", f"{symbol}_size:",
                  f".quad {len(content)}"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",%progbits', ""])
