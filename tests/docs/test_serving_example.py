"""examples/12_serving.py's sessions, with a layer that takes notes, and what it finds of wrong answers."""

from __future__ import annotations

import asyncio
import importlib

import numpy as np
import pytest
from serving_load import Load
from tornado.web import HTTPError

import ecornn

serving = importlib.import_module("12_serving")


class Adding:
    """h and c become what they were, and x and twice x more."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.rows.append(len(x))
        return h + x, c + 2 * x


def test_steps_that_wait_share_a_call():
    layer = Adding()

    async def calls() -> list[float]:
        sessions = serving.Sessions(layer, 1, 1, most=3, capacity=4)
        # two steps of a, and more rows than a call has
        first = [sessions.step(name, np.float32([value])) for name, value in
                 (("a", 1), ("b", 10), ("a", 2), ("c", 100), ("d", 1000))]
        values = [float(y[0]) for y in await asyncio.gather(*first)]
        with pytest.raises(HTTPError) as refused:
            sessions.step("e", np.float32([0]))
        assert refused.value.status_code == 503
        sessions.end("a")
        sessions.end("nobody")
        for name, value in (("e", 5), ("d", 1)):  # e in the row that a had
            values.append(float((await sessions.step(name, np.float32([value])))[0]))
        return values

    assert asyncio.run(calls()) == [1, 10, 3, 100, 1000, 5, 1001]
    assert layer.rows == [3, 2, 1, 1]


def test_a_client_that_went_away_takes_no_answer():
    async def calls() -> float:
        sessions = serving.Sessions(Adding(), 1, 1, most=3, capacity=2)
        sessions.step("a", np.float32([1])).cancel()
        return float((await sessions.step("b", np.float32([2])))[0])

    assert asyncio.run(calls()) == 2


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_wrong_answers_are_found(off: float):
    found = Load()
    found.sent = [*np.random.default_rng(0).standard_normal((6, 3), np.float32)]
    weights = {k: v.numpy() for k, v in serving.lstm(4, 3).state_dict().items()}
    found.got = [*ecornn.reference("lstm", np.stack(found.sent)[:, None], weights)[0][:, 0]]
    found.got[3] = found.got[3] + off
    if off:
        with pytest.raises(SystemExit, match="differ from those of its sequence by"):
            serving.check(found, 4, 3)
    else:
        serving.check(found, 4, 3)
