"""Ctrl-C where it is safe: a KeyboardInterrupt may be raised in the middle of ``Condition.__enter__``, which is Python,
after the lock is taken and before the block begins. The lock then stays locked for ever, and so do threads that need
it, such as an executor's, and a program that waits for these."""

from __future__ import annotations

import _thread
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

ENDING = signal.SIGTERM, signal.SIGHUP  # end a program of their own, unless it ignores SIGHUP
AGAIN = 0.005  # seconds until a signal comes again that came at a bad moment
WAITS = {"wait", "_wait_for_tstate_lock", "join"}  # functions of threading.py that a signal may end
FOLDER = threading.__file__.removesuffix("threading.py")
LOCKING = {f"{FOLDER}concurrent/futures/_base.py", f"{FOLDER}concurrent/futures/thread.py", f"{FOLDER}queue.py",
           logging.__file__, "<frozen importlib._bootstrap>"}


def locking(frame: FrameType | None) -> bool:
    """True if the frame, of the main thread, may have a lock that nothing unlocks if it ends now."""
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return file in LOCKING or (file == threading.__file__ and frame.f_code.co_name not in WAITS)


@contextlib.contextmanager
def safe_interrupts(*more: signal.Signals) -> Iterator[None]:
    """SIGINT, and ``more`` signals with default actions, raise a KeyboardInterrupt where it leaves no lock locked.
    Nothing changes in other threads, which get no signals, or where the program has a handler."""
    def interrupt(number: int, frame: FrameType | None) -> None:
        if not locking(frame):
            raise KeyboardInterrupt
        _thread.start_new_thread(again, (number,))  # a threading.Thread would take locks, in a handler

    def again(number: int) -> None:
        time.sleep(AGAIN)
        signal.pthread_kill(main.ident, number)  # type: ignore[arg-type]

    before, main = {}, threading.main_thread()
    if threading.current_thread() is main:
        usual = {signal.SIGINT: signal.default_int_handler} | dict.fromkeys(more, signal.SIG_DFL)
        before = {s: signal.signal(s, interrupt) for s, handler in usual.items() if signal.getsignal(s) == handler}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
