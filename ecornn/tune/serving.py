"""A server that measures modules for tuners elsewhere, through TVM's RPC.

TVM's server takes files and calls from whoever reaches its port: that is remote execution, by design.
So it listens on this machine alone unless told otherwise.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ecornn.device import Device
from ecornn.errors import ArgumentError
from ecornn.tune.at_hand import Environment, environment
from ecornn.tune.measuring import Measure
from ecornn.tune.pool import Entries, Pool
from ecornn.tune.record import Outcome
from ecornn.worker import Worker, WorkerError

if TYPE_CHECKING:
    from tvm.rpc import Server

SERVED, DESCRIBE, MEASURE, WARM = ("ECORNN_SERVED", "ecornn.tune.describe", "ecornn.tune.measure", "ecornn.tune.warm")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HANDSHAKE = 5.0  # seconds that a connection, or the tracker, may take to say something


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device and the software that a server measures with."""

    device: Device
    environment: Environment


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a request: outcomes of the modules, or the error of the process that measured."""

    measured: list[Outcome] | None = None
    error: str | None = None


def is_loopback(host: str) -> bool:
    """True for this machine's own address."""
    return host in LOOPBACK


def require_loopback(argument: str, host: str, allow_remote: bool) -> None:
    """Raises :class:`ArgumentError` for another machine's address, unless that is allowed."""
    if not (allow_remote or is_loopback(host)):
        raise ArgumentError(argument, host, f"one of {', '.join(LOOPBACK)}, or --allow-remote beside it: whoever "
                            "reaches an RPC port can run any code, so only a trusted network will do")


def start(target: str, tracker: tuple[str, int], key: str, host: str = "127.0.0.1", port: int = 9200,
          address: str | None = None) -> Server:
    """Starts a server in processes of its own, known to the tracker; ``terminate()`` stops them.

    ``address`` is what the tracker tells tuners to connect to, where that is not ``host``. The first free port of 100
    from ``port`` on is used. Raises :class:`~ecornn.errors.DeviceError` without the device, :class:`ArgumentError`
    where it cannot listen there."""
    from tvm.rpc import Server

    from ecornn.tune.at_hand import present

    require_own(host)
    device = present(target)
    # A session's process is forked from one that may have looked at the GPU, and must not touch it.
    os.environ[SERVED] = msgspec.json.encode(Description(device, environment(device))).decode()
    try:
        return Server(host, port, port + 100, tracker_addr=tracker, key=key, custom_addr=address, silent=True,
                      server_init_callback=register)
    except (PermissionError, ValueError):  # of its process: a port is the system's, or all are taken
        raise ArgumentError("port", port, f"a port that this user may listen at, and one of {port} to {port + 99} "
                            "free") from None


def require_own(host: str) -> None:
    """Raises :class:`ArgumentError` for an address at which nothing on this machine can listen."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        raise ArgumentError("host", host, f"an address of this machine ({error.strerror or error})") from None


def register() -> None:
    """Makes the functions known that a session may call; each session has a process of its own."""
    import tvm_ffi
    from tvm.rpc import server

    socket.setdefaulttimeout(HANDSHAKE)  # one thread greets all: a connection that stays silent would keep it
    server._serving = outliving(server._serving)
    threading.excepthook = end_at_once
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    worker = Worker(Entries().measure_ready, gpu=True)
    tvm_ffi.register_global_func(DESCRIBE, describe, override=True)
    tvm_ffi.register_global_func(WARM, lambda: warm(worker), override=True)
    tvm_ffi.register_global_func(MEASURE, lambda request, limit: measure(worker, request, limit), override=True)


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


def describe() -> str:
    """JSON of a :class:`Description`."""
    return os.environ[SERVED]


def warm(worker: Worker) -> None:
    """Has the measuring process started, which takes seconds, while the tuner still builds."""
    threading.Thread(target=Pool.warm, args=(worker,), daemon=True).start()


def measure(worker: Worker, request: str, limit: float) -> str:
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
        if not error.lost and msgspec.json.decode(describe(), type=Description).device.kind == "cuda":
            worker.kill()  # an illegal access poisons the process's CUDA context
    for path in paths:
        Path(path).unlink(missing_ok=True)
    return msgspec.json.encode(answer).decode()
