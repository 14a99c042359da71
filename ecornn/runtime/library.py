"""A module file as the functions that it exports."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecornn import checksum, temporary
from ecornn.errors import ModuleError
from ecornn.runtime.turns import share_cores

_MANIFEST = b"__tvm_ffi_manifest"
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_files: dict[str, list[tuple[int, int]]] = {}  # path -> device and inode of each file loaded from there
_modules: dict[str, tuple[Any, ctypes.CDLL]] = {}  # checksum of a file -> the loaded module
_lock = threading.Lock()
_LOADED_LIBRARY = 3  # ET_DYN


def _unavailable(*_: Any) -> Any:
    raise ModuleError("the module was built for a CPU: it has no device memory")


@dataclass(frozen=True)
class Library:
    """Functions of a module file; ``alloc`` to ``synchronize`` belong to CUDA modules."""

    manifest: Callable[..., Any]  # () -> JSON
    run: Callable[..., Any]  # (T, B, device, queue, *pointers) -> None; so are the next two, of modules that train
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    alloc: Callable[..., Any] = _unavailable  # (device, nbytes) -> pointer
    free: Callable[..., Any] = _unavailable  # (device, pointer) -> None
    copy: Callable[..., Any] = _unavailable  # (device, to, from, nbytes, queue) -> None
    synchronize: Callable[..., Any] = _unavailable  # (device, queue) -> None
    # of a CPU, the entries again as functions that keep Python's lock, for calls of microseconds
    held: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    file: ctypes.CDLL | None = None  # for functions in C, see weights.py

    @property
    def has_memory(self) -> bool:
        return self.alloc is not _unavailable


def open_library(path: Path) -> Library:
    """Loads the file; :class:`ModuleError` where it is missing, damaged or not ecornn's."""
    content = _inspect(path)
    try:
        module, file = _loaded_as(content, path.resolve())
        found = {name: module[name] for name in ("manifest", "run")}
    except (RuntimeError, OSError, AttributeError) as error:
        raise ModuleError(f"{path} cannot be loaded: {error}{temporary.noexec(path)}") from error
    others = ("forward", "backward", "alloc", "free", "copy", "synchronize")
    found |= {name: module[name] for name in others if module.implements_function(name)}
    held: dict[str, Callable[..., Any]] = {}
    if module.implements_function("share"):  # of a CPU
        share_cores(module["share"])
        for name in ("run", "forward", "backward"):
            if name in found:
                function = held[name] = module[name]
                function.release_gil = False
    return Library(**found, held=held, file=file)


def _loaded_as(content: str, path: Path) -> tuple[Any, ctypes.CDLL]:
    """The file for tvm_ffi, and for ctypes: once loaded it stays, and serves all files of this ``content``."""
    import tvm_ffi

    with _lock:
        if content not in _modules:
            name = spelling(path)
            _modules[content] = tvm_ffi.load_module(name), ctypes.CDLL(name)  # the dynamic loader has one of this name
        return _modules[content]


def spelling(path: Path) -> str:
    """A name of the file that the dynamic loader has not seen for another one: under a name that it knows it gives the
    same library, even if a new file lies there now. The old one stays loaded, so that its inode is not used again."""
    status, files = path.stat(), _files.setdefault(str(path), [])
    if (inode := (status.st_dev, status.st_ino)) not in files:
        files.append(inode)
    return f"{path.parent}/{'./' * files.index(inode)}{path.name}"


def _inspect(path: Path) -> str:
    """The checksum of the file; refuses what must not be loaded: a library's code is run, and a damaged one kills."""
    if path.exists() and not path.is_file():
        raise ModuleError(f"{path} cannot be read: it is not a regular file")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ModuleError(f"there is no file {path}") from error
    except OSError as error:
        raise ModuleError(f"{path} cannot be read: {error}") from error
    if content[:6] != b"\x7fELF\x02\x01" or len(content) < _EHDR.size:
        raise ModuleError(f"{path} is not a module file, since it is not a 64-bit shared library for Linux")
    if not _complete(content):
        raise ModuleError(f"{path} is damaged: it is shorter than its header says")
    if content.find(_MANIFEST) < 0:
        raise ModuleError(f"{path} is a shared library, but not one that ecornn made")
    whole = checksum.holds(content)
    if not whole:
        raise ModuleError(f"{path} is damaged, or was changed after it was compiled: its checksum "
                          f"{'is missing' if whole is None else 'does not match'}")
    return checksum.said(content).hex()


def _complete(content: bytes) -> bool:
    """True where all sections and segments of an ELF file lie inside it."""
    (_, kind, _, _, _, segments, sections, _, _, segment_size, segment_count, section_size, section_count,
     _) = _EHDR.unpack_from(content)
    ends = [segments + segment_size * segment_count, sections + section_size * section_count]
    if kind != _LOADED_LIBRARY or max(ends) > len(content):
        return False
    for index in range(segment_count):
        offset, _, _, size = struct.unpack_from("<4Q", content, segments + index * segment_size + 8)  # p_offset on
        ends.append(offset + size)
    return bool(max(ends) <= len(content))
