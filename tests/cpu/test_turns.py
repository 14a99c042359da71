"""Threads with short calls take turns, in their order."""

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from events import LIMIT, until

import ecornn.torch
from ecornn.runtime import plan
from ecornn.runtime import turns as module
from ecornn.runtime.turns import CALLS, Turns


def come(turns: Turns, order: list[int], number: int) -> threading.Thread:
    def work() -> None:
        with turns:
            order.append(number)

    waiting, thread = len(turns._waiting), threading.Thread(target=work)
    thread.start()
    until(lambda: len(turns._waiting) == waiting + 1)
    return thread


def test_those_that_wait_come_in_their_order():
    turns, order = Turns(), list[int]()
    with turns:
        threads = [come(turns, order, number) for number in range(5)]
        assert not order
    for thread in threads:
        thread.join()
    assert order == [*range(5)] and not turns._inside and not turns._waiting


@pytest.mark.parametrize("places", [1, 2])
def test_no_more_at_once_than_there_are_places(places: int):
    turns, inside, most = Turns(places), list[int](), list[int]()

    def work(_: int) -> None:
        for _ in range(50):
            with turns:
                inside.append(0)
                most.append(len(inside))
                time.sleep(0.0001)
                inside.pop()

    with ThreadPoolExecutor(6) as threads:
        [*threads.map(work, range(6))]
    assert max(most) == places and len(most) == 300 and not turns._inside and not turns._waiting


def test_who_comes_again_soon_goes_on_for_a_few_calls(monkeypatch: pytest.MonkeyPatch):
    """And then waits for those that waited: in a turn that somebody waits for there are as many calls as may be."""
    monkeypatch.setattr(module, "SOON", LIMIT)
    monkeypatch.setattr(module, "PATIENCE", LIMIT)
    turns, order = Turns(), list[int]()
    with turns:
        pass
    with turns:  # this thread has come again
        other = come(turns, order, 1)
    for _ in range(CALLS):
        with turns:
            order.append(0)
    other.join()
    assert order == [0] * (CALLS - 2) + [1, 0, 0] and not turns._inside and not turns._waiting


@pytest.mark.parametrize("comes", ["nobody", "another"])
def test_nobody_waits_for_long_for_who_does_not_come_again(comes: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SOON", LIMIT)
    monkeypatch.setattr(module, "PATIENCE", 0.05 if comes == "nobody" else 2 * LIMIT)
    turns, order = Turns(), list[int]()
    with turns:
        pass
    with turns:
        waits = come(turns, order, 1)
    if comes == "another":
        assert not order
        later = threading.Thread(target=lambda: order.append(2) if turns.__enter__() is None else None)
        later.start()
        later.join()
    waits.join(LIMIT)
    assert order == ([1] if comes == "nobody" else [1, 2])


def test_an_error_ends_a_turn():
    turns = Turns()
    with pytest.raises(KeyError), turns:
        raise KeyError
    with turns:
        pass


@pytest.fixture
def interruptible() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, fail)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_who_is_interrupted_does_not_keep_a_turn(interruptible: None):
    turns, order, leave = Turns(), list[int](), threading.Event()

    def hold() -> None:
        with turns:
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    until(lambda: turns._inside)

    def interrupt() -> None:
        until(lambda: turns._waiting)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=interrupt).start()
    with pytest.raises(TimeoutError), turns:
        raise AssertionError("nobody has left")
    other = come(turns, order, 1)
    leave.set()
    holder.join()
    other.join()
    assert order == [1] and not turns._inside and not turns._waiting


def test_a_forked_child_begins_anew():
    turns = Turns()
    with turns:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(900)
            with turns:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_which_calls_take_turns(monkeypatch: pytest.MonkeyPatch):
    """Those that give Python's lock away for microseconds; not the shortest, which keep it, nor long ones."""
    seen = list[object]()
    monkeypatch.setattr(plan, "in_turns", lambda function: lambda *given: seen.append(function(*given)))
    layer = torch.nn.RNN(7, 11)  # as other tests compile it
    theirs, model = copy.deepcopy(layer).double(), torch.nn.Sequential(layer)
    ecornn.torch.replace(model)
    for steps, taken in ((1, False), (1500, True), (5000, False)):
        x = torch.randn(steps, 1, 7)
        with torch.no_grad():
            wanted = theirs(x.double())[0]
            for _ in range(6):  # the short way is taken from the fourth on
                y = model(x)[0]
        assert bool(seen) is taken and float((y - wanted).norm()) <= 1e-5 * float(wanted.norm())
        seen.clear()
