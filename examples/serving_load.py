"""Clients of 12_serving.py, all in one process: each session sends a step, waits for the answer, and sends the next."""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass, field

import numpy as np


@dataclass(repr=False)  # asyncio.run() makes a text of what is returned, at its end
class Load:
    """What clients saw: seconds of requests but the first of each, requests a second, the steps of one session."""

    seconds: list[float] = field(default_factory=list)
    rate: float = 0.0
    sent: list[np.ndarray] = field(default_factory=list)
    got: list[np.ndarray] = field(default_factory=list)


async def client(port: int, name: str, input: int, until: float, found: Load, keep: bool) -> None:
    """One session, from zeros, over a connection of its own; those that ``keep`` note what was sent and what came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    draw, first = np.random.default_rng(zlib.crc32(name.encode())), True

    async def ask(method: str, body: bytes = b"") -> bytes:
        writer.write(f"{method} /sessions/{name} HTTP/1.1\r\nHost: ecornn\r\n"
                     f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        size = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
        answer = await reader.readexactly(size)
        if " 20" not in lines[0]:
            raise RuntimeError(f"{method} {name}: {lines[0]} {answer.decode(errors='replace')}")
        return answer

    while time.perf_counter() < until:
        x = draw.standard_normal(input, np.float32)
        begin = time.perf_counter()
        y = np.frombuffer(await ask("POST", x.tobytes()), np.float32)
        if not first:  # all connect at once, which is no step
            found.seconds.append(time.perf_counter() - begin)
        first = False
        if keep:
            found.sent.append(x)
            found.got.append(y)
    await ask("DELETE")
    writer.close()


async def load(port: int, sessions: int, input: int, seconds: float) -> Load:
    """So many sessions for so long, the first of which is kept."""
    found, begin = Load(), time.perf_counter()
    await asyncio.gather(*(client(port, f"s{n}", input, begin + seconds, found, not n) for n in range(sessions)))
    found.rate = len(found.seconds) / (time.perf_counter() - begin)
    return found
