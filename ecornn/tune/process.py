"""The parent's side of a worker process: start, call with a time limit, kill, start again."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ecornn import temporary
from ecornn.errors import EcornnError
from ecornn.tune.worker import MAX_MESSAGE, Call, Reply

T = TypeVar("T")
MARK = "ECORNN_WORKER"  # set in workers: a user's script that is imported there must not tune
START_LIMIT = 300.0  # seconds for the first call, which imports TVM or opens the GPU


class WorkerError(EcornnError):
    """A call failed: the function raised, or its process crashed, hung or was stopped.

    ``lost``: the process is gone.
    """

    def __init__(self, message: str, lost: bool) -> None:
        super().__init__(message)
        self.lost = lost


class Worker:
    """One worker process, started when first called and again after it was lost.

    ``ready`` ("module:function") is called first in a new process with ``null``; it does not count
    against a call's limit. With ``gpu`` False the process sees no GPU. ``environment``: variables that
    it sees besides this process's own.
    """

    def __init__(self, ready: str, gpu: bool, environment: Mapping[str, str] | None = None) -> None:
        self.ready, self.gpu, self.environment = ready, gpu, dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.turn = threading.RLock()  # held for the length of a call

    def call(self, function: str, argument: Any, kind: type[T], limit: float) -> T:
        """``function(argument)`` in the worker, decoded as ``kind``; :class:`WorkerError` where it
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
                self.exchange(self.ready, None, START_LIMIT)

    def start(self) -> None:
        """Starts the process, in a process group of its own."""
        if self.stopped:
            raise WorkerError("stopped", lost=True)
        path = [os.path.abspath(p or ".") for p in sys.path]  # noqa: PTH100 (may not exist)
        environment = {**os.environ, **self.environment, MARK: "1", "PYTHONPATH": os.pathsep.join(path),
                       "PYTHONSAFEPATH": "1"}
        if not self.gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with temporary.said():
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        lifeline, self.lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from ecornn.tune.worker import run; run()", str(lifeline)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment,
                start_new_session=True, pass_fds=[lifeline])
        finally:
            os.close(lifeline)
        if self.stopped:  # by another thread, in the meantime
            self.kill()

    def exchange(self, function: str, argument: Any, limit: float) -> bytes:
        """Sends a call and waits for its reply's value."""
        assert self.process is not None and self.process.stdin and self.process.stdout
        data = msgspec.json.encode(Call(function, msgspec.Raw(msgspec.json.encode(argument))))
        deadline = time.monotonic() + limit
        try:
            self.process.stdin.write(struct.pack("<I", len(data)) + data)
            self.process.stdin.flush()
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
            ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(file, count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts

    def obituary(self) -> str:
        """How the process died, with the end of what it printed."""
        assert self.process is not None
        self.kill()
        code = self.process.returncode
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 600))
        printed = self.errors.read().decode(errors="replace").strip()
        if self.stopped:
            return "stopped"
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the process crashed with {name}" + (f": {printed}" if printed else "")

    def kill(self) -> None:
        """Kills the process and its children, if it runs. The next call starts a new one."""
        process = self.process
        if process is None:
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

    def release(self) -> None:
        """Closes the pipes of a process that is gone."""
        if self.process is not None and self.process.stdin and self.process.stdout:
            for stream in (self.process.stdin, self.process.stdout, self.errors):
                with contextlib.suppress(OSError):  # what was never flushed into a broken pipe
                    stream.close()
            os.close(self.lifeline)
            self.process = None
