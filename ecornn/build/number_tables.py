"""Tables that the code of a module reads: 64-bit integers and strings, one after the other."""

from __future__ import annotations

import struct


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
