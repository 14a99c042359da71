"""What a run asks to be built is the same, whatever the order of the knobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import search_tables
from search_rate import PRETEND

from ecornn.targets import resolve
from ecornn.tune import session as sessions
from ecornn.tune.building import Build
from ecornn.tune.pool import Entries, Pool
from ecornn.tune.record import Choice
from ecornn.worker import Worker

H100 = resolve(search_tables.H100)
ENTRIES = Entries("search_rate:nothing", "search_rate:pretended_build", "search_rate:nothing",
                  "search_rate:pretended_measure")
SMALL = ["lstm:64:2:10:float16", "gru:64:1:10:bfloat16"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bytes]]:
    """The builds that are asked for, without the file; they sleep."""
    requests: list[bytes] = []
    call: Any = Worker.call

    def watched(self: Worker, function: str, argument: Any, *rest: Any) -> Any:
        if isinstance(argument, Build):
            requests.append(msgspec.json.encode(msgspec.structs.replace(argument, out="")))
        return call(self, function, argument, *rest)

    class Pretended(sessions.Session):
        def __init__(self, target: str, **options: float) -> None:
            super().__init__(target, entries=ENTRIES, **options)
            self._pool = Pool(ENTRIES, 2, poisoned=True)

    monkeypatch.setattr(Worker, "call", watched)
    monkeypatch.setattr(sessions, "present", lambda target: H100)
    monkeypatch.setattr(sessions, "Session", Pretended)
    monkeypatch.setenv(PRETEND, json.dumps([0.001, 0.001]))
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    yield requests


def test_a_list_is_built_whatever_the_order_of_its_knobs(asked: list[bytes], tmp_path: Path):
    path, wanted = tmp_path / "set.jsonl", set()
    for text in SMALL:
        work = search_tables.workload_of(text)
        given = search_tables.first(search_tables.ConfigSpace(*search_tables.task_of(work, H100)), 6)
        choices = tuple(Choice(c.schedule, dict(reversed(c.knobs))) for c in given)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(search_tables.Item(text, choices)) + b"\n")
        wanted |= {msgspec.json.encode(Build(work.cell, work, H100, c.schedule, c.config, "")) for c in given}
    search_tables.run(path, 60.0, 2, 60.0)
    assert len(wanted) == 12 and set(asked) == wanted
