"""Measuring on servers that a TVM RPC tracker knows: the tuner's side, and the server for tuners elsewhere.

Each measuring process of the pool holds a session with one server. TVM's server takes files and calls from whoever
reaches its port: remote execution, by design. So it listens on this machine alone unless told otherwise."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ecornn.device import Device
from ecornn.errors import ArgumentError, DeviceError, ScheduleError
from ecornn.quick_tvm import import_tvm
from ecornn.tune.choose import Environment, environment, matched, present, told
from ecornn.tune.pool import Entries, Pool
from ecornn.tune.record import Outcome
from ecornn.tune.timing import Measure
from ecornn.worker import Worker, WorkerError

if TYPE_CHECKING:
    from tvm.rpc import Server

ADDRESS = "ECORNN_TRACKER"  # to the measuring processes: JSON of a Tracker and the Device
T = TypeVar("T")
START = 60.0  # seconds that a server's measuring process may take to start, beside a measurement's limit
WAIT = 3.0  # seconds to wait for a free server
ANSWER = 20.0  # seconds that a tracker may take to say something
SERVED, DESCRIBE, MEASURE, WARM = ("ECORNN_SERVED", "ecornn.tune.describe", "ecornn.tune.measure", "ecornn.tune.warm")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HANDSHAKE = 5.0  # seconds that a connection, or the tracker, may take to say something


class NoServer(Exception):
    """Every server is busy or gone: the trial is for another process."""


class LostServer(Exception):
    """The server went away while it measured."""


@dataclass(frozen=True)
class Tracker:
    """The address of a TVM RPC tracker, and the key of the wanted servers."""

    host: str
    port: int
    key: str

    @classmethod
    def parse(cls, address: str, key: str, allow_remote: bool = False) -> Tracker:
        """The tracker at ``host:port``; :class:`ArgumentError` for others, and for another machine's unless allowed."""
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ArgumentError("tracker", address, "HOST:PORT of a TVM RPC tracker")
        host = host.removeprefix("[").removesuffix("]")  # as IPv6 is written
        require_loopback("tracker", host, allow_remote)
        return cls(host, int(port), key)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def servers(self) -> int:
        """The number of servers with the key. Raises :class:`DeviceError` where there is no tracker."""
        try:
            servers = _client(self, ANSWER).summary()["server_info"]
            return sum(info["key"] == f"server:{self.key}" for info in servers)
        except Exception as error:  # whatever comes of what something else than a tracker says
            why = f"no answer in {ANSWER:g} s" if isinstance(error, TimeoutError) else error
            raise DeviceError("tracker", str(self), f"the address of a running tracker ({why}); start one "
                              "with: python -m tvm.exec.rpc_tracker --host 127.0.0.1") from None

    def describe(self, target: str | Device | None = None) -> tuple[Device, Environment]:
        """The device of one of the servers, as ``matched`` with ``target``, and what records say of its machine. Raises
        :class:`DeviceError` where none answers, or that measures on another device than ``target``."""
        if not self.servers():
            raise DeviceError("key", self.key, f"the key of a server at the tracker {self}; start one with: "
                              f"ecornn serve --tracker {self} --key {self.key}")
        deadline = time.monotonic() + START
        while True:
            try:
                server = _within(deadline - time.monotonic(), lambda: _describe(_request(self)))
                return server.device if target is None else matched(target, server.device), server.environment
            except TimeoutError:
                raise DeviceError("key", self.key, f"the key of a server that answers; one at the tracker {self} has "
                                  f"not answered for {START:g} s, and may be suspended") from None
            except (NoServer, LostServer) as error:
                if time.monotonic() > deadline:
                    raise DeviceError("key", self.key, f"a server that is not busy ({error})") from None

    def pool(self, entries: Entries, quiet: bool, device: Device) -> Pool:
        """Processes that build here and measure on the servers, one for each; ``quiet``: builds would disturb."""
        here = replace(entries, measure_ready=f"{__name__}:ready", measure=f"{__name__}:measure")
        count, address = max(1, self.servers()), msgspec.json.encode((self.host, self.port, self.key, device)).decode()
        return Pool(here, measurers=count, proposers=count if count > 1 else 0, local=False, grace=START,
                    quiet=quiet and is_loopback(self.host), environment={ADDRESS: address})


class Connection:
    """A session with one server that measures on ``device``, or on one that has it as a share. Uploads files once.
    Raises :class:`NoServer` where none is free, or the server measures on another device."""

    def __init__(self, tracker: Tracker, device: Device) -> None:
        self.session = _request(tracker)
        there = _describe(self.session).device
        try:
            same = matched(device, there).identity == device.identity
        except DeviceError:
            same = False
        if not same:
            raise NoServer(f"a server with the key {tracker.key} measures on {told(there)}, not on "
                           f"{told(device)}; start it with another key")
        self.run = self.session.get_function(MEASURE)
        with contextlib.suppress(AttributeError):  # an older server
            self.session.get_function(WARM)()
        self.uploaded: set[tuple[str, int]] = set()

    def measure(self, request: Measure) -> list[Outcome]:
        """Measures as ``timing.measure`` does, on the server."""
        answers = Path(request.answers)
        sent, name = (str(answers), answers.stat().st_mtime_ns), f"{answers.parent.name}.npz"
        if sent not in self.uploaded:
            self.session.upload(bytearray(answers.read_bytes()), name)
            self.uploaded.add(sent)
        for path in request.paths:
            self.session.upload(bytearray(Path(path).read_bytes()), Path(path).name)
        there = msgspec.structs.replace(request, paths=tuple(Path(p).name for p in request.paths), answers=name)
        answer = msgspec.json.decode(str(self.run(msgspec.json.encode(there).decode(), request.limit)), type=Answer)
        if answer.measured is None:
            raise ScheduleError(answer.error or "the server gave no answer")
        return answer.measured


def ready(_: None) -> bool:
    """Imports what a measurement needs, and has a server get ready, before the clock runs."""
    import_tvm()
    with contextlib.suppress(NoServer, LostServer):  # a measurement will say so, if it finds none either
        connected()
    return True


def measure(request: Measure) -> list[Outcome]:
    """Does on a server what ``timing.measure`` does. Raises :class:`NoServer` and :class:`LostServer`, too."""
    connection = connected()
    try:
        return connection.measure(request)
    except ScheduleError:
        raise
    except Exception as error:  # whatever TVM raises where the other side is gone
        connected.cache_clear()
        raise LostServer(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


@cache
def connected() -> Connection:
    host, port, key, device = msgspec.json.decode(os.environ[ADDRESS], type=tuple[str, int, str, Device])
    return Connection(Tracker(host, port, key), device)


def _request(tracker: Tracker) -> Any:
    """A session with a free server; :class:`NoServer` where none becomes free in time."""
    try:
        return _client(tracker, WAIT).request(tracker.key, max_retry=1)
    except Exception as error:
        raise NoServer(f"no free server with the key {tracker.key} at {tracker}") from error


def _client(tracker: Tracker, limit: float) -> Any:
    """TVM's client of a tracker, which waits for each answer for ``limit`` seconds, rather than for ever."""
    from tvm.rpc import base, client

    class Client(client.TrackerSession):
        def _connect(self) -> None:
            self._sock = socket.create_connection(self._addr, limit)
            magic = struct.pack("<i", base.RPC_TRACKER_MAGIC)
            self._sock.sendall(magic)
            if base.recvall(self._sock, len(magic)) != magic:
                raise RuntimeError("another program listens there")

    return Client((tracker.host, tracker.port))


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call that may wait for ever, or its error; TimeoutError after these seconds."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(max(0.0, seconds))


def _describe(session: Any) -> Description:
    try:
        return msgspec.json.decode(str(session.get_function(DESCRIBE)()), type=Description)
    except Exception as error:
        raise LostServer(str(error)) from error


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: Device
    environment: Environment


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a request: outcomes of the modules, or the error of the process that measured."""

    measured: list[Outcome] | None = None
    error: str | None = None


def is_loopback(host: str) -> bool:
    return host in LOOPBACK


def require_loopback(argument: str, host: str, allow_remote: bool) -> None:
    """Raises :class:`ArgumentError` for another machine's address, unless that is allowed."""
    if not (allow_remote or is_loopback(host)):
        raise ArgumentError(argument, host, f"one of {', '.join(LOOPBACK)}, or --allow-remote beside it: whoever "
                            "reaches an RPC port can run any code, so only a trusted network will do")


def start(target: str, tracker: tuple[str, int], key: str, host: str = "127.0.0.1", port: int = 9200,
          address: str | None = None) -> Server:
    """Starts a server in processes of its own, known to the tracker, at the first free port of 100 from ``port`` on;
    ``terminate()`` stops them. ``address``: what tuners connect to, where that is not ``host``. Raises
    :class:`~ecornn.errors.DeviceError` without the device, :class:`ArgumentError` where it cannot listen there."""
    from tvm.rpc import Server

    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        raise ArgumentError("host", host, f"an address of this machine ({error.strerror or error})") from None
    device = present(target)
    # A session's process is forked from one that may have looked at the GPU, and must not touch it.
    os.environ[SERVED] = msgspec.json.encode(Description(device, environment(device))).decode()
    try:
        return Server(host, port, port + 100, tracker_addr=tracker, key=key, custom_addr=address, silent=True,
                      server_init_callback=register)
    except (PermissionError, ValueError):  # of its process: a port is the system's, or all are taken
        raise ArgumentError("port", port, f"a port that this user may listen at, and one of {port} to {port + 99} "
                            "free") from None


def register() -> None:
    """Makes the functions known that a session may call; each session has a process of its own."""
    import tvm_ffi
    from tvm.rpc import server

    socket.setdefaulttimeout(HANDSHAKE)  # one thread greets all: a connection that stays silent would keep it
    server._serving = outliving(server._serving)
    threading.excepthook = end_at_once
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    worker = Worker(Entries().measure_ready, gpu=True)

    def warm() -> None:  # takes seconds, while the tuner still builds
        threading.Thread(target=Pool.warm, args=(worker,), daemon=True).start()

    tvm_ffi.register_global_func(DESCRIBE, lambda: os.environ[SERVED], override=True)
    tvm_ffi.register_global_func(WARM, warm, override=True)
    tvm_ffi.register_global_func(MEASURE, lambda request, limit: measure_here(worker, request, limit), override=True)


def outliving(serving: Callable[..., None]) -> Callable[..., None]:
    """TVM's function that serves one session, which raises where the session's process was killed, as by a lack of
    memory: the thread that listens would end, and its port go on accepting."""

    def serve(connection: socket.socket, *rest: Any) -> None:
        folder = Path.cwd()
        connection.settimeout(None)  # of a session, which waits for its tuner
        try:
            serving(connection, *rest)
        except RuntimeError as error:
            print(f"warning: a session was lost: {error}", file=sys.stderr, flush=True)
            os.chdir(folder)
            connection.close()

    return serve


def end_at_once(failed: threading.ExceptHookArgs) -> None:
    """Ends a server whose thread that listens has failed: nobody would be served, and nobody told."""
    threading.__excepthook__(failed)
    sys.stderr.flush()
    os._exit(1)


def end_with(parent: int) -> None:
    """Ends this process, which would go on listening, once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def measure_here(worker: Worker, request: str, limit: float) -> str:
    """JSON of an :class:`Answer` to the JSON of a :class:`Measure` of files that were uploaded."""
    import tvm_ffi

    place: Any = tvm_ffi.get_global_func("tvm.rpc.server.workpath")
    asked = msgspec.json.decode(request, type=Measure)
    if any(Path(name).name != name for name in (*asked.paths, asked.answers)):
        return msgspec.json.encode(Answer(error="a file outside the session's folder")).decode()
    paths = tuple(str(place(name)) for name in asked.paths)
    try:
        asked = msgspec.structs.replace(asked, paths=paths, answers=str(place(asked.answers)))
        answer = Answer(measured=worker.call(Entries().measure, asked, list[Outcome], float(limit)))
    except WorkerError as error:
        answer = Answer(error=str(error))
        if not error.lost and msgspec.json.decode(os.environ[SERVED], type=Description).device.kind == "cuda":
            worker.kill()  # an illegal access poisons the process's CUDA context
    for path in paths:
        Path(path).unlink(missing_ok=True)
    return msgspec.json.encode(answer).decode()
