"""A worker process: the parent's side, which starts, calls, kills and restarts it, and the program that it runs. Calls
and replies go through stdin and stdout, each a length (4 bytes, little endian) and JSON. Native code that prints, loops
or crashes harms the worker only."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import msgspec

from ecornn import temporary
from ecornn.errors import EcornnError

T = TypeVar("T")
MARK = "ECORNN_WORKER"  # set in workers: a user's script that is imported there must not tune
PROGRAM = "from ecornn.worker import serve; serve()"
# Linux may give each session a share: niceness counts within it then, and the session has a niceness of its own
SESSION = '(echo "$0" >/proc/self/autogroup) 2>&-; '
BEHIND = 'command -v nice >/dev/null && exec nice -n "$0" "$@"; exec "$@"'
NICEST = 19
# the niceness of processes that only run where nobody else wants the core, and leave it at once; within the session of
# their program, or they would only do so for processes of their own
IDLE = 20
START_LIMIT = 300.0  # seconds for the first call, which imports TVM or opens the GPU
MAX_MESSAGE = 64 << 20  # bytes


class Call(msgspec.Struct, frozen=True):
    """A call of ``function`` ("module:name") with one argument, whose type is its annotation."""

    function: str
    argument: msgspec.Raw


class Reply(msgspec.Struct, frozen=True):
    """The value that the function returned, or the error that it raised."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None


class WorkerError(EcornnError):
    """A call failed: the function raised, or its process crashed, hung or was stopped, and is ``lost``."""

    def __init__(self, message: str, lost: bool) -> None:
        super().__init__(message)
        self.lost = lost


class Worker:
    """A worker process, started by the first call and after a loss. ``ready`` ("module:function") is called first in a
    new process with ``null``, within ``start_limit`` seconds. ``gpu`` False: it sees no GPU. ``environment``: more
    variables. ``niceness``: how far it and its children stand behind other programs; up to 19, or :data:`IDLE`."""

    def __init__(self, ready: str, gpu: bool, environment: Mapping[str, str] | None = None,
                 start_limit: float = START_LIMIT, niceness: int = 0) -> None:
        self.ready, self.gpu, self.environment = ready, gpu, dict(environment or {})
        self.start_limit, self.niceness = start_limit, niceness
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.turn = threading.RLock()  # held for the length of a call

    def call(self, function: str, argument: Any, kind: type[T], limit: float) -> T:
        """The result of ``function(argument)`` in the worker, decoded as ``kind``. Raises :class:`WorkerError` where it
        raises, crashes, or takes longer than ``limit`` seconds and is killed."""
        with self.turn:
            self.wake()
            return msgspec.json.decode(self.exchange(function, argument, limit), type=kind)

    def wake(self) -> None:
        """Starts the process unless it runs; returns once it is ready."""
        with self.turn:
            if self.process is None or self.process.poll() is not None:
                self.release()
                self.start()
                self.exchange(self.ready, None, self.start_limit)

    def start(self) -> None:
        if self.stopped:
            raise WorkerError("stopped", lost=True)
        path = [os.path.abspath(p or ".") for p in sys.path]  # noqa: PTH100 (may not exist)
        environment = {**os.environ, **self.environment, MARK: "1", "PYTHONPATH": os.pathsep.join(path),
                       "PYTHONSAFEPATH": "1", **({} if self.gpu else {"CUDA_VISIBLE_DEVICES": ""})}
        with temporary.said():
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        lifeline, self.lifeline = os.pipe()
        apart: Any = {"process_group": 0} if self.in_session() else {"start_new_session": True}
        try:
            self.process = subprocess.Popen(
                [*self.behind(), sys.executable, "-c", PROGRAM, str(lifeline), *["idle"] * (self.niceness >= IDLE)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment,
                pass_fds=[lifeline], **apart)
        finally:
            os.close(lifeline)
        if self.stopped:  # by another thread, in the meantime
            self.kill()

    def in_session(self) -> bool:
        """Tells whether the process stays in its program's session, in a group of its own."""
        return self.niceness >= IDLE and sys.version_info >= (3, 11)

    def behind(self) -> list[str]:
        """The beginning of a command that has this niceness from the start, before Python takes a core."""
        if not self.niceness or not Path("/bin/sh").exists():
            return []
        session = "" if self.in_session() else SESSION
        return ["/bin/sh", "-c", session + BEHIND, str(min(self.niceness, NICEST))]

    def exchange(self, function: str, argument: Any, limit: float) -> bytes:
        """Sends a call and waits for its reply's value."""
        assert self.process is not None and self.process.stdin and self.process.stdout
        deadline = time.monotonic() + limit
        try:
            send(self.process.stdin, Call(function, msgspec.Raw(msgspec.json.encode(argument))))
            (length,) = struct.unpack("<I", self.read(4, deadline))
            if length > MAX_MESSAGE:
                raise WorkerError(f"the worker sent {length} bytes", lost=True)
            reply = msgspec.json.decode(self.read(length, deadline), type=Reply)
        except TimeoutError:
            self.kill()
            raise WorkerError(f"took longer than {limit:g} s and was stopped", lost=True) from None
        except (EOFError, OSError):
            raise WorkerError(self.obituary(), lost=True) from None
        except BaseException:  # Ctrl-C: the next call must not read this one's reply
            self.kill()
            raise
        if reply.error is not None:
            raise WorkerError(reply.error, lost=False)
        return bytes(reply.value)

    def read(self, count: int, deadline: float) -> bytes:
        """Exactly ``count`` bytes; TimeoutError after the deadline, EOFError where the stream ends."""
        assert self.process is not None and self.process.stdout is not None
        file, parts = self.process.stdout.fileno(), b""
        while len(parts) < count:
            if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            if not (part := os.read(file, count - len(parts))):
                raise EOFError
            parts += part
        return parts

    def obituary(self) -> str:
        """A text that says how the process died, with the end of what it printed."""
        assert self.process is not None
        self.kill()
        if self.stopped:
            return "stopped"
        code = self.process.returncode
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 600))
        printed = self.errors.read().decode(errors="replace").strip()
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the process crashed with {name}" + (f": {printed}" if printed else "")

    def kill(self) -> None:
        """Kills the process and its children, if it runs. The next call starts a new one."""
        if (process := self.process) is None:
            return
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)  # a crash may still be on its way out: keep its own exit code
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the group outlives its leader if a child hangs
        process.wait()

    def stop(self) -> None:
        """Kills the process for good; a call that waits for it returns with an error."""
        self.stopped = True
        self.kill()
        with self.turn:  # that call may still be reading
            self.kill()
            self.release()

    def disown(self) -> None:
        """Lets go of the process in a forked child: it ends with the parent, whether the child still runs or not."""
        if self.process is not None:
            os.close(self.lifeline)
            self.process = None

    def release(self) -> None:
        """Closes the pipes of a process that is gone."""
        if self.process is not None and self.process.stdin and self.process.stdout:
            for stream in (self.process.stdin, self.process.stdout, self.errors):
                with contextlib.suppress(OSError):  # what was never flushed into a broken pipe
                    stream.close()
            os.close(self.lifeline)
            self.process = None


def send(stream: IO[bytes], message: Any) -> None:
    data = msgspec.json.encode(message)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    """Reads one message; None at the end of the stream."""
    if len(head := stream.read(4)) < 4:
        return None
    (length,) = struct.unpack("<I", head)
    if length > MAX_MESSAGE:
        raise ValueError(f"message of {length} bytes")
    data = stream.read(length)
    return data if len(data) == length else None


def answer(call: Call) -> Reply:
    try:
        module, name = call.function.split(":")
        function = getattr(importlib.import_module(module), name)
        kind = next(iter(typing.get_type_hints(function).values()))
        result = function(msgspec.json.decode(call.argument, type=kind))
        return Reply(value=msgspec.Raw(msgspec.json.encode(result)))
    except (Exception, SystemExit) as error:
        return Reply(error=f"{type(error).__name__}: {error}"[:2000])


def guard(lifeline: int) -> None:
    """Forks a process that kills this process's group (hanging kernels, compilers) once this process or the tuner,
    holder of ``lifeline``, is gone. A thread could not: hanging native code may hold the interpreter's lock."""
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


def serve() -> None:
    """Serves calls until stdin ends. Arguments: the lifeline's file descriptor; ``idle``, if it is to run so."""
    guard(int(sys.argv[1]))
    if "idle" in sys.argv[2:] and hasattr(os, "SCHED_IDLE"):  # behind the guard, which may have to end it
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a compiler or a kernel prints must not end up among the replies
    while (data := receive(requests)) is not None:
        send(replies, answer(msgspec.json.decode(data, type=Call)))
    sys.stdout.flush()
    os._exit(0)  # static destructors of a broken module must not hang the exit
