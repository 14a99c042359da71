"""What a backend hands to the linker."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Generated:
    """Files that become one shared library.

    Attributes
    ----------
    sources : file name -> C++ text, compiled by the host compiler against tvm-ffi's headers
    objects : file name -> bytes of an object file
    binaries : symbol -> bytes embedded as read-only data (``extern "C" const unsigned char symbol[]``
        and ``extern "C" const unsigned long long symbol_size``), such as a cubin
    emitted : ``cuda``, ``ptx``, ``tir``, ``asm`` -> text for people (``--emit``)
    resources : function -> what the compiler reports (registers, spilled bytes, shared memory)
    """

    sources: dict[str, str]
    objects: dict[str, bytes] = field(default_factory=dict)
    binaries: dict[str, bytes] = field(default_factory=dict)
    emitted: dict[str, str] = field(default_factory=dict)
    resources: dict[str, dict[str, int]] = field(default_factory=dict)
