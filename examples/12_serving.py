"""A service of many sessions over HTTP: each has its own states, and one call computes a step for many of them.

    pip install ".[examples]"    # in the checkout
    python examples/12_serving.py [--sessions 1 100 1000] [--hidden 512]
    python examples/12_serving.py --serve ecornn --port 8080

``POST /sessions/NAME`` with I float32 numbers computes one step of that session and returns its H numbers; DELETE ends
the session. One call of the layer computes all steps that are waiting: the service gathers the rows of their states and
puts the new ones back.

Without --serve the program starts the service with a compiled module and with torch.nn.LSTM, each in its own process.
It measures both, interleaved, under the load of each number of sessions: requests a second, and the 50th and 99th
percentile of the time of a request, as clients see them. It exits with 1 if a session's first answers differ from those
of its sequence in float64. On a CPU it takes three minutes at most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from serving_load import load
from stages import stage
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine, responses
from tornado.netutil import bind_sockets
from tornado.web import HTTPError

import ecornn

SIDES = ("ecornn", "torch")
CHECKED = 200
Layer = Callable[[np.ndarray, np.ndarray, np.ndarray], "tuple[np.ndarray, np.ndarray]"]


def lstm(hidden: int, input: int) -> torch.nn.LSTM:
    """A layer that has the same weights in each process."""
    torch.manual_seed(0)
    return torch.nn.LSTM(input, hidden).eval()


def layer_of(side: str, hidden: int, input: int, most: int) -> Layer:
    """x (B, I), h and c (B, H) -> h and c one step later, for B up to ``most``."""
    weights = lstm(hidden, input)
    if side == "torch":
        torch.set_num_threads(1)

        def step(x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            with torch.inference_mode():
                _, after = weights(torch.from_numpy(x)[None], (torch.from_numpy(h)[None], torch.from_numpy(c)[None]))
            return after[0][0].numpy(), after[1][0].numpy()
    else:
        module = ecornn.compile("lstm", hidden=hidden, input=input, batch=most, seq=1, target="cpu")
        layer = module.bind(dict(weights.state_dict()), threads=1)

        def step(x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return layer(x[None], (h, c))[1]
    return step


class Sessions:
    """The states of sessions as rows of arrays, and the steps that are waiting."""

    def __init__(self, layer: Layer, hidden: int, input: int, most: int, capacity: int) -> None:
        self._layer, self._most, self.input = layer, most, input
        self._states = np.zeros((2, capacity, hidden), np.float32)
        self._rows: dict[str, int] = {}
        self._free = [*range(capacity)]
        self._waiting: list[tuple[int, np.ndarray, asyncio.Future[np.ndarray]]] = []

    def step(self, name: str, x: np.ndarray) -> asyncio.Future[np.ndarray]:
        """The output of a session's next step; steps that arrive before it is computed share its call."""
        if name not in self._rows:
            if not self._free:
                raise HTTPError(503, reason="too many sessions")
            self._rows[name] = self._free.pop()
            self._states[:, self._rows[name]] = 0
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._run)  # after all requests that have arrived by now
        answer: asyncio.Future[np.ndarray] = loop.create_future()
        self._waiting.append((self._rows[name], x, answer))
        return answer

    def end(self, name: str) -> None:
        """Frees the row of a session for another one."""
        if (row := self._rows.pop(name, None)) is not None:
            self._free.append(row)

    def _run(self) -> None:
        now: dict[int, tuple[np.ndarray, asyncio.Future[np.ndarray]]] = {}
        later = []
        for row, x, answer in self._waiting:
            if row in now or len(now) == self._most:  # a session's steps are computed one after the other
                later.append((row, x, answer))
            else:
                now[row] = x, answer
        self._waiting = later
        rows = [*now]
        h, c = self._layer(np.stack([x for x, _ in now.values()]), self._states[0, rows], self._states[1, rows])
        self._states[0, rows], self._states[1, rows] = h, c
        for y, (_, answer) in zip(h, now.values(), strict=True):
            if not answer.done():  # it is done if the client has disconnected
                answer.set_result(y)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run)


def answering(sessions: Sessions) -> Callable[[HTTPServerRequest], None]:
    """The function that Tornado's server calls with each request. Its web framework, which makes a handler and an Etag
    for each request, would take longer than the steps."""

    def answer(request: HTTPServerRequest) -> None:
        def reply(code: int, body: bytes = b"", reason: str | None = None) -> None:
            line = ResponseStartLine("", code, reason or responses[code])
            request.connection.write_headers(line, HTTPHeaders({"Content-Length": str(len(body))}), body)
            request.connection.finish()

        name = re.fullmatch(r"/sessions/(\w+)", request.path)
        if not name or request.method not in ("POST", "DELETE"):
            reply(404)
        elif request.method == "DELETE":
            sessions.end(name[1])
            reply(200)
        elif len(request.body) != 4 * sessions.input:
            reply(400, reason=f"expected {sessions.input} float32 numbers")
        else:
            try:
                step = sessions.step(name[1], np.frombuffer(request.body, np.float32))
            except HTTPError as error:
                reply(error.status_code, reason=error.reason)
            else:
                step.add_done_callback(lambda done: reply(200, done.result().tobytes()))

    return answer


async def serve(arguments: argparse.Namespace) -> None:
    """Serves until the process ends; prints the port first."""
    sizes = arguments.hidden, arguments.input
    layer = layer_of(arguments.serve, *sizes, arguments.batch)
    sessions = Sessions(layer, *sizes, arguments.batch, arguments.capacity)
    server = HTTPServer(answering(sessions))
    sockets = bind_sockets(arguments.port, "127.0.0.1", backlog=1024)
    server.add_sockets(sockets)
    print(sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def service(side: str, arguments: argparse.Namespace) -> Iterator[int]:
    """Starts a service in its own process and gives its port."""
    options = {"hidden": arguments.hidden, "input": arguments.input, "batch": arguments.batch, "port": 0,
               "capacity": max(arguments.sessions)}
    command = [sys.executable, __file__, "--serve", side, *(f"--{k}={v}" for k, v in options.items())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def check(found: Any, hidden: int, input: int) -> None:
    """Compares the first ``CHECKED`` answers of a session with its sequence in float64."""
    weights = {k: v.numpy() for k, v in lstm(hidden, input).state_dict().items()}
    wanted = ecornn.reference("lstm", np.stack(found.sent[:CHECKED])[:, None], weights)[0][:, 0]
    error = float(np.linalg.norm(np.stack(found.got[:CHECKED]) - wanted) / np.linalg.norm(wanted))
    if not error < 1e-5:
        sys.exit(f"a session's answers differ from those of its sequence by {error:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=SIDES, help="only serve, with a layer of this side")
    parser.add_argument("--port", type=int, default=8080, help="port of --serve [default: %(default)s]; 0: any")
    parser.add_argument("--hidden", type=int, default=512, help="H [default: %(default)s]")
    parser.add_argument("--input", type=int, default=128, help="I [default: %(default)s]")
    parser.add_argument("--batch", type=int, default=64, help="the most steps of a call [default: %(default)s]")
    parser.add_argument("--capacity", type=int, default=1000, help="the most sessions [default: %(default)s]")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 100, 1000],
                        help="numbers of sessions to measure [default: 1 100 1000]")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of each turn [default: %(default)s]")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side [default: %(default)s]")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments))
        return
    with contextlib.ExitStack() as stack:
        ports = {}
        for side in SIDES:
            with stage(f"starting the service with {side}"):
                ports[side] = stack.enter_context(service(side, arguments))
        print(f"LSTM {arguments.input} -> {arguments.hidden}, steps of all sessions that wait in one call\n"
              f"{'sessions':>8} {'':7} {'requests/s, p20 and p80':>28} {'p50 ms':>8} {'p99 ms':>8}")
        for sessions in arguments.sessions:
            rates: dict[str, list[float]] = {side: [] for side in SIDES}
            seconds: dict[str, list[float]] = {side: [] for side in SIDES}
            with stage(f"load of {sessions} sessions"):
                for turn in range(arguments.turns + 1):
                    for side, port in ports.items():
                        found = asyncio.run(load(port, sessions, arguments.input, arguments.seconds))
                        check(found, arguments.hidden, arguments.input)
                        if turn:  # the first one warms up
                            rates[side].append(found.rate)
                            seconds[side] += found.seconds
            for side in SIDES:
                low, rate, high = np.percentile(rates[side], [20, 50, 80])
                p50, p99 = np.percentile(seconds[side], [50, 99]) * 1e3
                print(f"{sessions:8} {side:7} {rate:8.0f} [{low:7.0f}, {high:7.0f}] {p50:10.2f} {p99:8.2f}", flush=True)


if __name__ == "__main__":
    main()
