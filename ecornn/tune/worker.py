"""The program of a worker process.

Reads calls from stdin and answers on stdout, each message a length (4 bytes, little endian) and
JSON. Native code that prints, loops or crashes harms this process only.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import struct
import sys
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
    except (Exception, SystemExit) as error:
        return Reply(error=f"{type(error).__name__}: {error}"[:2000])


def guard(lifeline: int) -> None:
    """Forks a process that kills this process's group (a hanging kernel, compilers) once the tuner is
    gone, and so holds the pipe ``lifeline`` no more, or this process is.

    A thread could not: native code that hangs may hold the interpreter's lock.
    """
    leader = os.getpid()
    if os.fork():
        os.close(lifeline)
        return
    for stream in (0, 1):  # or the tuner would not see the end of these pipes
        os.close(stream)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == leader and not select.select([lifeline], [], [], 1.0)[0]:
        pass
    os.killpg(leader, signal.SIGKILL)


def main() -> None:
    """Serves calls until stdin ends. The argument is the file descriptor of the lifeline."""
    guard(int(sys.argv[1]))
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a compiler or a kernel prints must not end up among the replies
    decoder = msgspec.json.Decoder(Call)
    while (data := receive(requests)) is not None:
        send(replies, answer(decoder.decode(data)))


def run() -> None:
    """The whole program."""
    main()
    sys.stdout.flush()
    os._exit(0)  # static destructors of a broken module must not hang the exit
