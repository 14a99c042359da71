"""What is built beforehand is what runs ask for, and it can be carried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import prebuilding
import pytest
import search_tables
import tune_h100_set
from search_rate import PRETEND

from ecornn.build import cache
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
    """The builds that are asked for, without the file; none is made."""
    requests: list[bytes] = []
    call: Any = Worker.call

    def watched(self: Worker, function: str, argument: Any, *rest: Any) -> Any:
        if isinstance(argument, Build):
            requests.append(msgspec.json.encode(msgspec.structs.replace(argument, out="")))
            if function == Entries().build:
                return ""
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


def test_a_list_is_built_as_it_is_run_whatever_the_order_of_its_knobs(asked: list[bytes], tmp_path: Path):
    def choice(candidate: Any) -> Choice:
        return Choice(candidate.schedule, dict(reversed(candidate.knobs)))

    path = tmp_path / "set.jsonl"
    for text in SMALL:
        work = search_tables.workload_of(text)
        given = search_tables.first(search_tables.ConfigSpace(*search_tables.task_of(work, H100)), 6)
        choices = tuple(map(choice, given))
        item = tune_h100_set.Item(work.cell, work.hidden, work.batch, work.dtype, choices, seq=work.seq)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(item) + b"\n")
    tune_h100_set.prebuild(path, 2, 60.0)
    before = asked.copy()
    asked.clear()
    tune_h100_set.run(path, 60.0, 2, 60.0)
    assert len(before) == 12 and set(asked) == set(before)


def test_modules_are_packed_in_pieces_and_nothing_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          capsys: pytest.CaptureFixture[str]):
    import random

    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "here"))
    noise = random.Random(0)
    made = {str(n): msgspec.msgpack.encode((f"digest {n}", noise.randbytes(40_000))) for n in range(6)}
    for name, content in made.items():
        cache.entry("module", [name], lambda content=content: content)
    cache.entry("cubin", ["c"], lambda: msgspec.msgpack.encode((b"cubin", "log")))
    cache.entry("object", ["o"], lambda: b"\x7fELF")
    pieces = prebuilding.pack(tmp_path / "here", tmp_path / "p.tar.xz", piece=50_000)
    assert len(pieces) > 1 and "6 modules" in capsys.readouterr().out
    assert prebuilding.unpack(tmp_path / "there", pieces) == 6
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "there"))

    def missing() -> bytes:
        raise LookupError

    for name, content in made.items():
        assert cache.entry("module", [name], missing) == content
    with pytest.raises(LookupError):
        cache.entry("object", ["o"], missing)
