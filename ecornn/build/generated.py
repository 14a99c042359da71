"""Files that backends hand to the linker, and the tables that the code of a module reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class Texts(dict[str, str]):
    """Texts by kind, each made when it is first asked for."""

    def __init__(self, **makers: Callable[[], str]) -> None:
        self._makers = makers

    def __missing__(self, kind: str) -> str:
        self[kind] = self._makers[kind]()
        return self[kind]


@dataclass(frozen=True)
class Generated:
    """Files that become one shared library.

    Attributes
    ----------
    sources : file name -> C++ text, compiled by the host compiler against tvm-ffi's headers
    objects : file name -> bytes of an object file
    binaries : symbol -> bytes embedded as read-only data (``extern "C" ecornn_blob symbol``, see ecornn_blob.h), such
        as the manifest
    shared : file name -> C++ text, as ``sources``, that is the same for all modules and compiled apart from these
    functions : symbols, empty for none, whose addresses are in ``extern "C" void* const ecornn_functions[]``
    program : of a CUDA module, what the host code, all of which is ``shared``, reads of the program: it lies behind the
        library with the binaries, and nothing is compiled or linked
    emitted : ``cuda``, ``ptx``, ``tir``, ``asm`` -> text for people (``--emit``)
    resources : function -> what the compiler reports (registers, spilled bytes, shared memory)
    """

    sources: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    binaries: dict[str, bytes] = field(default_factory=dict)
    emitted: Mapping[str, str] = field(default_factory=dict)
    resources: dict[str, dict[str, int]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
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
