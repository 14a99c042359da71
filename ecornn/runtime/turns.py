"""Turns of threads whose calls are short.

A thread that gives Python's lock away for some microseconds has it back before another one, which that wakes, runs; the
other waits anew. So a thread goes on until the system takes its processor away: of eight threads with calls of 20 us
one call in a hundred takes 5 ms, and one in a thousand 45. Those that sleep here come in their order.
"""

from __future__ import annotations

import os
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

from ecornn.runtime import sharing


class Turns:
    """A context in which so many threads are at once, the others after them in the order in which they came.

    Parameters
    ----------
    places : how many
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """As if nobody had come, as in a forked child, which has none of the other threads."""
        self._lock, self._inside, self._waiting = allocate_lock(), 0, deque[Any]()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside < self._places and not self._waiting:
                self._inside += 1
                return
            turn = allocate_lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # a signal's, such as KeyboardInterrupt
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._inside -= 1


@cache
def _turns() -> Turns:
    return Turns(sharing.cores())


def in_turns(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, in as many threads at once as the process has cores, of all that this is made of."""
    turns = _turns()

    def called(*arguments: Any) -> Any:
        with turns:
            return function(*arguments)

    return called
