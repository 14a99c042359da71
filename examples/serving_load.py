"""Clients of 12_serving.py, all in one process: each sends a step of its session, waits for the answer, and repeats."""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass, field

import numpy as np


@dataclass(repr=False)  # asyncio.run() makes a text of its result, which would take long
class Load:
    """Measurements of the clients: seconds of requests, requests a second, and the steps of one session."""

    seconds: list[float] = field(default_factory=list)
    rate: float = 0.0
    sent: list[np.ndarray] = field(default_factory=list)
    got: list[np.ndarray] = field(default_factory=list)


class Client:
    """One session with its own connection; if it ``keeps``, it stores its inputs and the answers."""

    def __init__(self, port: int, name: str, input: int, found: Load, keeps: bool) -> None:
        self._port, self._name, self._input, self._found, self._keeps = port, name, input, found, keeps
        self._draw = np.random.default_rng(zlib.crc32(name.encode()))

    async def begin(self) -> None:
        """Connects and sends the first step, which starts from zeros."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        await self._step()

    async def go_on(self, until: float) -> None:
        """Sends one step after the other."""
        while (begin := time.perf_counter()) < until:
            await self._step()
            self._found.seconds.append(time.perf_counter() - begin)

    async def end(self) -> None:
        await self._ask("DELETE")
        self._writer.close()

    async def _step(self) -> None:
        x = self._draw.standard_normal(self._input, np.float32)
        y = np.frombuffer(await self._ask("POST", x.tobytes()), np.float32)
        if self._keeps:
            self._found.sent.append(x)
            self._found.got.append(y)

    async def _ask(self, method: str, body: bytes = b"") -> bytes:
        self._writer.write(f"{method} /sessions/{self._name} HTTP/1.1\r\nHost: ecornn\r\n"
                           f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        size = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
        answer = await self._reader.readexactly(size)
        if " 20" not in lines[0]:
            raise RuntimeError(f"{method} {self._name}: {lines[0]} {answer.decode(errors='replace')}")
        return answer


async def load(port: int, sessions: int, input: int, seconds: float) -> Load:
    """Runs all sessions for some ``seconds`` after all of them have begun; the first one keeps its steps."""
    found = Load()
    clients = [Client(port, f"s{n}", input, found, not n) for n in range(sessions)]
    await asyncio.gather(*(one.begin() for one in clients))
    begin = time.perf_counter()
    await asyncio.gather(*(one.go_on(begin + seconds) for one in clients))
    found.rate = len(found.seconds) / (time.perf_counter() - begin)
    await asyncio.gather(*(one.end() for one in clients))
    return found
