"""Files that backends hand to the linker, and the tables that the code of a module reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources


class Texts(dict[str, str]):
    """Texts by kind, each made when it is first asked for."""

    def __init__(self, **makers: Callable[[], str]) -> None:
        self._makers = makers

    def __missing__(self, kind: str) -> str:
        self[kind] = self._makers[kind]()
        return self[kind]


@dataclass(frozen=True)
class Generated:
    """Files that become one shared library."""

    sources: dict[str, str] = field(default_factory=dict)  # name -> C++ text, compiled against tvm-ffi's headers
    objects: dict[str, bytes] = field(default_factory=dict)  # name -> bytes of an object file
    # symbol -> bytes embedded as read-only data (`extern "C" ecornn_blob symbol`, see ecornn_blob.h), as the manifest
    binaries: dict[str, bytes] = field(default_factory=dict)
    emitted: Mapping[str, str] = field(default_factory=dict)  # cuda, ptx, tir, asm -> text for people (--emit)
    # function -> what the compiler reports (registers, spilled bytes, shared memory)
    resources: dict[str, dict[str, int]] = field(default_factory=dict)
    # as `sources`, the same for all modules and compiled apart from these
    shared: dict[str, str] = field(default_factory=dict)
    functions: tuple[str, ...] = ()  # symbols, empty for none, whose addresses are in `ecornn_functions[]`
    # of a CUDA module, what the host code, all of which is `shared`, reads of the program: it lies behind the library
    # with the binaries, and nothing is compiled or linked
    program: bytes | None = None


class NumberTables:
    """Numbers and strings, one after the other; a string is its length and its bytes, padded, a zero behind it."""

    def __init__(self) -> None:
        self.content = bytearray()

    def numbers(self, *values: int) -> None:
        self.content += struct.pack(f"<{len(values)}q", *values)

    def strings(self, *values: str, counted: bool = False) -> None:
        if counted:
            self.numbers(len(values))
        for value in values:
            text = value.encode()
            self.numbers(len(text))
            self.content += text + bytes(8 - len(text) % 8)  # with a zero behind it


def texts(*names: str) -> dict[str, str]:
    folder = resources.files("ecornn.build")
    return {name: (folder / name).read_text() for name in names}
