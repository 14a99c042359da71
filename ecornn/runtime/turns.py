"""The cores of this process, which the calls of all modules share, and turns of threads whose calls are short.

A thread that gives Python's lock away for some microseconds has it back before the one that it wakes runs: of eight
threads with calls of 20 us one call in a hundred takes 5 ms. Those that sleep here come in their order, half as many at
once as there are cores: others are between their calls, with Python's lock. To wake one takes longer than a call, so a
thread that soon calls again goes on for a few of them before it hands its turn over."""

from __future__ import annotations

import ctypes
import os
import threading
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from functools import cache
from time import monotonic
from typing import Any

from ecornn.host_cpu import physical_cores

_running = ctypes.c_int32(0)  # how many; the code of modules writes it


@cache
def _cores(allowed: frozenset[int]) -> int:
    return physical_cores(sorted(allowed))


def share_cores(share: Callable[[int, int], None]) -> None:
    """Has a module, whose function ``share`` this is, count its calls among those of the others."""
    share(ctypes.addressof(_running), cores())


def cores() -> int:
    """How many this thread may use."""
    return _cores(frozenset(os.sched_getaffinity(0)))


CALLS = 3  # of a turn, at most; eight threads wait for 21 of them
SOON = 200e-6  # seconds until its next call for which a turn waits, if the thread came as soon before
PATIENCE = 20e-3  # seconds after which the first one that waits looks whether the turn is anybody's


class Turns:
    """A context in which ``places`` threads are at once, the others after them in the order in which they came."""

    def __init__(self, places: int = 1) -> None:
        self._places = places
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Begins with nobody inside or waiting, also in a forked child, which has none of the other threads."""
        self._lock, self._inside, self._waiting = allocate_lock(), 0, deque[Any]()
        self._own = threading.local()  # of a thread, calls: of its turn; left: when it left; soon: whether it came soon

    def __enter__(self) -> None:
        own, now = self._own, monotonic()
        own.soon = now - getattr(own, "left", 0.0) < SOON
        with self._lock:
            free = self._inside < self._places
            if free and (not self._waiting or (own.soon and own.calls < CALLS)):
                own.calls = own.calls + 1 if own.soon and own.calls < CALLS else 1
                self._inside += 1
                return
            if free:  # the first one has waited for somebody who has not come in time
                self._inside += 1
                self._waiting.popleft().release()
            turn = allocate_lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            while not turn.acquire(timeout=PATIENCE):
                with self._lock:
                    if self._inside < self._places and self._waiting and self._waiting[0] is turn:
                        self._inside += 1  # who would come soon has not
                        self._waiting.popleft()
                        break
        except BaseException:  # a signal's, such as KeyboardInterrupt
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self._leave(True)
            raise
        own.calls = 1

    def __exit__(self, *_: object) -> None:
        own = self._own
        own.left = monotonic()
        self._leave(not own.soon or own.calls >= CALLS)

    def _leave(self, over: bool) -> None:
        """Hands the turn to the first one that waits, if it is ``over``; else it is anybody's."""
        with self._lock:
            if over and self._waiting:
                self._waiting.popleft().release()
            else:
                self._inside -= 1


@cache
def _turns() -> Turns:
    return Turns(max(1, cores() // 2))


def in_turns(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in half as many threads at once as the process has cores, of all that this is made of."""
    turns = _turns()

    def called(*arguments: Any) -> Any:
        with turns:
            return function(*arguments)

    return called
