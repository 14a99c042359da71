"""Ctrl-C at every point: none is lost, and no thread waits for a lock that nobody has."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ecornn.interrupts import safe_interrupts


def found(kind: str) -> dict:
    """Runs ``interrupting.py``, and returns what it prints."""
    done = subprocess.run([sys.executable, Path(__file__).with_name("interrupting.py"), kind], capture_output=True,
                          text=True, check=True, preexec_fn=lambda: signal.signal(signal.SIGINT,
                                                                                 signal.default_int_handler))
    return json.loads(done.stdout)


def test_at_every_call_and_return():
    """Python's own interrupts leave locks locked, or this test finds nothing."""
    assert len(found("plain")["hung"]) == 2
    safe = found("safe")
    assert safe["points"] > 100 and not safe["lost"] and not safe["hung"]


def test_a_handler_of_the_program_stays(monkeypatch: pytest.MonkeyPatch):
    with safe_interrupts(signal.SIGTERM):
        outer = signal.getsignal(signal.SIGTERM)
        with safe_interrupts(signal.SIGTERM):
            assert signal.getsignal(signal.SIGTERM) is outer
        assert outer is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_another_thread_nothing_is_changed():
    seen: list[object] = []

    def inside() -> None:
        with safe_interrupts(signal.SIGTERM):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]
