"""A GPU's module that has the C interface alone, with host memory in place of the GPU's, and the interface's tables."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import runtime_sample as sample

from ecornn.build import c_tables
from ecornn.build.link import find_compiler
from ecornn.manifest import Manifest, Parameter
from ecornn.program import Buffer, Extent, Packing
from ecornn.runtime.library import Library


def tables_of(parameters: Sequence[Parameter], packings: Iterable[Packing]) -> tuple[Manifest, bytes]:
    """Of a module that has these."""
    base = sample.manifest()
    packed = [Buffer(f"p{n}", "packed", "float32", Extent(1), p) for n, p in enumerate(packings)]
    buffers = (*base.buffers[1:4], *packed)
    said = msgspec.structs.replace(base, parameters=tuple(parameters), buffers=buffers, entries=sample.taken(buffers))
    return said, c_tables.tables(said, said.entries)


class FakeGPU:
    """The module of this manifest, whose weights ``pack`` packs on the device; None: it has no kernel for that.

    Attributes
    ----------
    library : as the runtime loads it
    held : address of memory that is not freed -> the memory and its bytes
    waits : streams that were waited for
    """

    def __init__(self, manifest: Manifest, folder: Path, pack: Callable[..., None] | None) -> None:
        self.held: dict[int, tuple[Any, int]] = {}
        self.waits: list[int] = []
        self.queues: list[int] = []
        functions = (pack, self._alloc, self._free, self._copy, lambda device, queue: self.waits.append(queue))
        self._answer = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64), ctypes.c_int32)(
            lambda number, args, count: int(functions[number](*args[:count]) or 0))
        self.library = Library(lambda: "", lambda *_: None, alloc=self._alloc, free=self._free, copy=self._copy,
                               synchronize=functions[-1], file=self._build(manifest, folder, pack is not None))
        self.library.file.answer_by(self._answer)

    @staticmethod
    def _build(manifest: Manifest, folder: Path, packs: bool) -> ctypes.CDLL:
        from tvm_ffi import libinfo

        inputs = sample.c_interface(msgspec.json.encode(manifest).decode(), folder,
                                    {"alloc", "free", "copy", "synchronize", *(["pack"] if packs else [])})
        out, library = folder / "interface.so", Path(libinfo.find_libtvm_ffi())
        subprocess.run([*find_compiler(), "-shared", "-fPIC", "-std=c++17", f"-I{libinfo.find_include_path()}",
                        f"-I{libinfo.find_dlpack_include_path()}", str(Path(__file__).with_suffix(".cc")), *inputs,
                        f"-L{library.parent}", "-ltvm_ffi", "-o", str(out)], check=True, cwd=folder)
        return ctypes.CDLL(str(out))

    def content(self, at: int) -> bytes:
        """All bytes of the memory there."""
        return ctypes.string_at(at, self.held[at][1])

    def _alloc(self, device: int, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(b"\xff" * (nbytes + 256))
        start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 256
        self.held[start] = (memory, nbytes)
        return start

    def _free(self, device: int, pointer: int) -> None:
        del self.held[pointer]

    def _copy(self, device: int, to: int, source: int, nbytes: int, queue: int) -> None:
        self.queues.append(queue)
        ctypes.memmove(to, source, nbytes)
