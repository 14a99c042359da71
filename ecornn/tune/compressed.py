"""Tuning logs that are compressed: ``.jsonl.xz``, as those that ship, and ``.jsonl.gz``.

They are read wherever a log is, and written whole by `ecornn log`; nothing is appended to them, so a search has a
plain one.
"""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from pathlib import Path

from ecornn.errors import RecordError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
MEMORY = 128 << 20  # bytes that a decoder may ask for: twice what the best compression of xz needs


def is_compressed(path: Path) -> bool:
    """By the end of its name."""
    return path.suffix in (".gz", ".xz")


def unpacked(data: bytes, path: Path, most: int) -> bytes:
    """A file's text, of which a byte more than ``most`` is made at most, however little it takes compressed.

    Raises :class:`RecordError` where the data is damaged or cut off; ``path`` is what it names, and says what it is.
    """
    try:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                return file.read(most + 1)
        if path.suffix == ".xz":
            return _streams(data, most)
    except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise RecordError(f"{path} is damaged: {error}") from error
    return data


def _streams(data: bytes, most: int) -> bytes:
    """The text of xz streams behind each other; lzma.open would let a file ask for any memory."""
    text = bytearray()
    while data and len(text) <= most:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY)
        text += stream.decompress(data, most + 1 - len(text))
        if not stream.eof and len(text) <= most:
            raise EOFError("compressed file ended before the end of the stream")
        data = stream.unused_data.lstrip(b"\0")  # padding between streams
    return bytes(text)


def packed(text: bytes, path: Path) -> bytes:
    """What the file of that name holds for a text; the same bytes for the same text."""
    if path.suffix == ".gz":
        return gzip.compress(text, 9, mtime=0)
    if path.suffix == ".xz":
        return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    return text
