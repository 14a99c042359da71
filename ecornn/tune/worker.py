"""The program of a worker process: ``python -m ecornn.tune.worker``.

Reads calls from stdin and answers on stdout, each message a length (4 bytes, little endian) and
JSON. Native code that prints, loops or crashes harms this process only.
"""

from __future__ import annotations

import importlib
import os
import signal
import struct
import sys
import threading
import time
import typing
from typing import Any, BinaryIO

import msgspec

MAX_MESSAGE = 64 << 20


class Call(msgspec.Struct, frozen=True):
    """``function`` ("module:name") of one argument, whose type is its annotation."""

    function: str
    argument: msgspec.Raw


class Reply(msgspec.Struct, frozen=True):
    """What the function returned, or what it raised."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None


def send(stream: BinaryIO, message: Any) -> None:
    """Writes one message."""
    data = msgspec.json.encode(message)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    """Reads one message; None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    if length > MAX_MESSAGE:
        raise ValueError(f"message of {length} bytes")
    data = stream.read(length)
    return data if len(data) == length else None


def answer(call: Call) -> Reply:
    """Carries out a call."""
    try:
        module, name = call.function.split(":")
        function = getattr(importlib.import_module(module), name)
        kind = next(iter(typing.get_type_hints(function).values()))
        result = function(msgspec.json.decode(call.argument, type=kind))
        return Reply(value=msgspec.Raw(msgspec.json.encode(result)))
    except Exception as error:
        return Reply(error=f"{type(error).__name__}: {error}"[:2000])


def die_with_parent(parent: int) -> None:
    """Kills this process and its children (compilers) once the parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Serves calls until stdin ends."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a compiler or a kernel prints must not end up among the replies
    threading.Thread(target=die_with_parent, args=(os.getppid(),), daemon=True).start()
    decoder = msgspec.json.Decoder(Call)
    while (data := receive(requests)) is not None:
        send(replies, answer(decoder.decode(data)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # static destructors of a broken module must not hang the exit
