"""What the processes that build compute for a run besides its candidates."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import search_tables
from events import LIMIT
from search_rate import PRETEND

from ecornn.cells import get
from ecornn.errors import ScheduleError
from ecornn.schedules import all_schedules
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune import log as folders
from ecornn.tune import oracle, proposing
from ecornn.tune import session as sessions
from ecornn.tune import verify as verifying
from ecornn.tune.choose import serving_or_raise
from ecornn.tune.journal import Journal
from ecornn.tune.log import read, shipped_folder
from ecornn.tune.pool import Entries, Pool
from ecornn.tune.proposing import Elsewhere, Question, answers, defaults, joined, scan_parts, searching
from ecornn.tune.record import Choice, Finish, Trial
from ecornn.tune.search import Search
from ecornn.tune.space import Candidate, ConfigSpace
from ecornn.workload import Workload

H100 = resolve("sm_90a")
WORK = Workload("lstm", 64, 64, 2, 10, "float16")
ENTRIES = Entries("search_rate:nothing", "search_rate:pretended_build", "search_rate:nothing",
                  "search_rate:pretended_measure")


def test_workers_say_what_this_process_would(tmp_path: Path):
    task = make_task(get("lstm"), WORK, H100)
    expected = tuple(Candidate.of(s.name, s.default(task)) for s in serving_or_raise(task))
    here, there = tmp_path / "here.npz", tmp_path / "there.npz"
    oracle.write(here, get("lstm"), WORK, 3)
    with Pool(ENTRIES, 1) as pool:
        assert defaults(pool, Question("lstm", WORK, H100)) == expected
        assert [c.schedule for c in defaults(pool, Question("lstm", WORK, H100, "fused_step"))] == ["fused_step"]
        answers(pool, Question("lstm", WORK, H100, seed=3))(there)
        space = ConfigSpace(task, serving_or_raise(task))
        assert joined(space, scan_parts(pool, Question("lstm", WORK, H100), space)()) == space.scan()
        with pytest.raises(ScheduleError, match=r"^no schedule serves .* is for llvm, not cuda$"):
            defaults(pool, Question("lstm", WORK, H100, "cpu_sequence"))
        with pytest.raises(ScheduleError, match=r"^dtype='float64' is not"):
            defaults(pool, Question("lstm", msgspec.structs.replace(WORK, dtype="float64"), H100))
    with np.load(here) as a, np.load(there) as b:
        assert a.files == b.files and all((a[name] == b[name]).all() for name in a.files)


def few_records(_: None) -> bool:
    """In the process of a search, and here: reading all that ship takes seconds."""
    folders.shipped_folder = lambda: Path(os.environ["FEW_RECORDS"])
    return proposing.ready(None)


def test_a_search_elsewhere_proposes_what_one_here_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever it is told, also of a run that goes on; the space is scanned once that is needed."""
    (tmp_path / "few").mkdir()
    shutil.copy(shipped_folder() / "h100-rows.jsonl.xz", tmp_path / "few")
    monkeypatch.setenv("FEW_RECORDS", str(tmp_path / "few"))
    monkeypatch.setattr(folders, "shipped_folder", lambda: tmp_path / "few")
    cell, run = get("lstm"), Journal(tmp_path / "log.jsonl", "1-1")
    with Pool(replace(ENTRIES, propose_ready=f"{__name__}:few_records"), 1, proposers=1) as pool:
        asked = Question("lstm", WORK, H100, "persistent_wide", 7)
        given = defaults(pool, asked)

        def spaced() -> ConfigSpace:
            return ConfigSpace(make_task(cell, WORK, H100), [all_schedules()[c.schedule] for c in given], given)

        parts = scan_parts(pool, asked, spaced())
        with searching(pool, cell, spaced(), asked, parts, run) as there, \
                searching(pool, cell, spaced(), asked, parts, run) as here:
            assert isinstance(there, Elsewhere) and isinstance(here, Search) and there.first == here.first
            assert len(here.model)
            here.space.scans = lambda: joined(here.space, parts())
            default = here.space.defaults()[0]
            for one in (there, here):
                one.tell(default, 3.0)
            opening = here.ask(here.waiting())
            assert there.waiting() == len(opening) and there.ask(len(opening)) == opening
            assert there.parts is not None  # nothing waited for the scan
            for one in (there, here):
                one.prepare()
            for number, candidate in enumerate(opening):
                for one in (there, here):
                    one.tell(candidate, None if number % 5 == 4 else 2.0 + number % 3)
            for count in (4, 5):
                batch = here.ask(count)
                assert len(batch) == count and there.ask(count) == batch
            assert there.tried == here.tried and default in there.tried
            there.worker.kill()
            with pytest.raises(ScheduleError, match="was lost; the same command goes on"):
                there.ask(1)


def test_given_candidates_cost_this_process_no_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]):
    """The defaults are those that a search here would find, and are looked for elsewhere."""
    task = make_task(get("lstm"), WORK, H100)
    preferred = serving_or_raise(task)[0]
    default = dict(preferred.default(task))
    other = {**default, "math": next(v for v in ("fast", "approx") if v != default["math"])}
    given = Choice(preferred.name, other), Choice(preferred.name, default)
    item = search_tables.Item("lstm:64:2:10:float16", given)
    (tmp_path / "set.jsonl").write_bytes(search_tables.msgspec.json.encode(item) + b"\n")

    class Pretended(sessions.Session):
        def __init__(self, target: str, **options: float) -> None:
            super().__init__(target, entries=ENTRIES, **options)
            self._pool = Pool(ENTRIES, 2, poisoned=True)

    def forbidden(self: object, task: object) -> None:
        raise AssertionError("a default was looked for in the process that tunes")

    monkeypatch.setenv(PRETEND, "[0.01, 0.002]")
    monkeypatch.setenv("ECORNN_TUNING_LOGS", str(tmp_path / "logs"))
    monkeypatch.setattr(sessions, "present", lambda target: H100)
    monkeypatch.setattr(sessions, "Session", Pretended)
    for kind in {type(s) for s in all_schedules().values() if s.kind == "cuda"}:
        monkeypatch.setattr(kind, "default", forbidden)
        monkeypatch.setattr(kind, "expected", forbidden)
    search_tables.run(tmp_path / "set.jsonl", 60.0, 2, 60.0)
    assert "2 trials, 0 workloads failed" in capsys.readouterr().out
    (log,) = (tmp_path / "logs").glob("*.jsonl")
    (finish,) = [line.record for line in read(log).lines if isinstance(line.record, Finish)]
    assert finish.default == Choice(preferred.name, default) and finish.default_us


def test_records_are_verified_again_and_told_in_their_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PRETEND, "[0.05, 0.01]")
    monkeypatch.setattr(sessions, "present", lambda target: H100)
    lines = [line for line in read(shipped_folder() / "h100.jsonl.xz").lines if isinstance(line.record, Trial)]
    small = [line for line in lines if line.record.workload.hidden <= 256]  # type: ignore[union-attr]
    drawn, left = verifying.sample(small, H100, 10, 0)
    with sessions.Session("cuda", entries=ENTRIES) as session:
        session._pool = Pool(ENTRIES, 2, poisoned=True)
        checks = list(verifying.verify(drawn, session))
    assert [check.line for check in checks] == drawn and len(drawn) == 10 and "of another device" not in left
    assert all(check.outcome.times and check.drift for check in checks)


@pytest.mark.parametrize("quiet", [False, True])
def test_several_are_built_at_a_time_where_that_disturbs_no_measurement(quiet: bool, monkeypatch: pytest.MonkeyPatch):
    together, most, lock, now = threading.Barrier(2), 0, threading.Lock(), 0

    def measured(line: int, session: object) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if not quiet:
            together.wait(LIMIT)  # broken where the other one waits for this one
        with lock:
            now -= 1
        return line

    monkeypatch.setattr(verifying, "measured", measured)
    session: Any = SimpleNamespace(pool=SimpleNamespace(quiet=quiet))
    lines: Any = range(6)
    assert list(verifying.verify(lines, session)) == [*range(6)] and (most == 1) == quiet
