"""Merging, importing and pruning logs: nothing valid is lost, and nothing counts twice."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_cli import folder, run  # noqa: F401  (a user's folder of its own for each test)
from test_records import DAY, H100, finish, start, trial

from ecornn.cells import get
from ecornn.schedules import all_schedules, revisions
from ecornn.targets import KNOWN
from ecornn.task import make_task
from ecornn.tune.log import Line, Log, append, read, rewrite
from ecornn.tune.lookup import find
from ecornn.tune.record import Outcome, Times, Trial
from ecornn.tune.selection import best_lines, merge, worth_keeping
from ecornn.tune.verify import Check
from ecornn.workload import Workload


def lines(records, name: str = "a.jsonl") -> list[Line]:
    return [Line(Path(name), number, record) for number, record in enumerate(records, 1)]


# few events and few results, so that equal and contradicting records occur
records = st.one_of(
    st.builds(trial, run=st.sampled_from(["ab-1", "ab-2"]), index=st.integers(0, 2), time=st.just(DAY),
              times=st.sampled_from([1.0, 2.0, 3.0]).map(lambda us: Times.of([us]))),
    st.builds(trial, index=st.integers(0, 2), time=st.just(DAY), times=st.none(), check=st.none(),
              error=st.sampled_from(["run: a", "run: b"])),
    st.builds(start, st.sampled_from(["ab-1", "ab-2"])), st.builds(finish, us=st.sampled_from([1.0, 1.5])))
logs = st.lists(records, max_size=8)


@given(logs, logs, logs)
def test_merging_is_commutative_associative_and_idempotent(a, b, c):
    def union(*parts):
        return merge(line for part in parts for line in lines(part)).records

    assert union(a, b) == union(b, a)
    assert union(union(a, b), c) == union(a, union(b, c))
    assert union(union(a, b), b) == union(a, b) and union(union(a)) == union(a)


@given(logs, logs)
def test_what_is_kept_out_is_a_copy_or_a_contradiction(a, b):
    both = [*lines(a), *lines(b, "b.jsonl")]
    found = merge(both)
    kept = found.records
    assert all(record in [line.record for line in both] for record in kept)
    assert len({msgspec.json.encode(record) for record in kept}) == len(kept)
    for line in both:  # every event is there, and says no more than any of its records
        if line.record not in kept:
            assert found.conflicts


def test_a_contradiction_is_reported_and_the_smaller_promise_kept(tmp_path):
    mine, theirs, out = (tmp_path / f"{name}.jsonl" for name in ("mine", "theirs", "out"))
    append(mine, start(), trial(time=DAY, times=Times.of([2.0])), finish())
    append(theirs, start(), trial(time=DAY, times=Times.of([1.0])), trial(time=DAY, index=1), finish())
    with theirs.open("ab") as file:
        file.write(b'{"kind":"trial","v":9}\nnot json\n')
    output = run("log", "merge", mine, theirs, "-o", out)
    assert f"kept out {theirs}:2: conflicts with {mine}:2" in output
    assert f"skipped {theirs}:5: version 9" in output and f"skipped {theirs}:6: " in output
    found = [line.record for line in read(out).lines]
    assert [type(r).__name__ for r in found] == ["Start", "Trial", "Trial", "Finish"]
    assert found[1].times.median == 2.0
    other = tmp_path / "other.jsonl"
    run("log", "merge", theirs, mine, "-o", other)
    assert out.read_bytes() == other.read_bytes()
    again = tmp_path / "again.jsonl"
    run("log", "merge", out, mine, out, "-o", again)
    assert again.read_bytes() == out.read_bytes()
    run("log", "merge", mine, "-o", out, code=2)  # never overwrites


def test_import_adds_what_is_new_to_the_users_folder(folder, tmp_path):  # noqa: F811
    theirs = tmp_path / "theirs.jsonl"
    append(theirs, start(), trial(time=DAY), finish())
    assert "3 records added" in run("log", "import", theirs)
    assert "0 records added" in run("log", "import", theirs)
    append(theirs, trial(index=1, time=DAY))
    assert "1 records added" in run("log", "import", theirs)
    assert len(read(folder / "imported.jsonl").lines) == 4
    assert "persistent" in run("log", "best")


def test_import_counts_what_is_new_and_not_what_was_there_twice(folder, tmp_path):  # noqa: F811
    theirs = tmp_path / "theirs.jsonl"
    append(folder / "imported.jsonl", *[trial(time=DAY)] * 3)
    append(theirs, trial(time=DAY), trial(index=1, time=DAY))
    assert run("log", "import", theirs).startswith("1 records added")


def test_what_is_no_log_is_not_merged(folder, tmp_path):  # noqa: F811
    text = tmp_path / "readme.md"
    text.write_text("# no log\n")
    for command in (("import", text), ("merge", text, "-o", tmp_path / "out.jsonl")):
        assert "is no tuning log" in run("log", *command, code=2)
    assert not (tmp_path / "out.jsonl").exists() and not (folder / "imported.jsonl").exists()


def test_verify_says_the_median_of_an_even_number(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    append(path, *[trial(run=f"r-{n}", times=Times.of([1.0]), check=1e-7, workload=Workload("lstm", n, n))
                      for n in (8, 16)])
    now = {8: 1.0, 16: 1.05}
    monkeypatch.setattr("ecornn.tune.session.Session", lambda *_, **__: nullcontext(SimpleNamespace(device=H100)))
    monkeypatch.setattr("ecornn.tune.verify.sample", lambda lines, *_: (lines, {}))
    monkeypatch.setattr("ecornn.tune.verify.verify", lambda lines, _: [
        Check(line, Outcome(Times.of([now[line.record.workload.hidden]]))) for line in lines])
    assert "2 of 2 hold within 10%, median drift +2.5%" in run("log", "verify", path)


def test_trials_of_export_best_can_be_pruned(tmp_path):
    path = tmp_path / "best.jsonl"
    append(path, *[trial(run=f"r-{n}", config={"k": n}, times=Times.of([1.0 + n]), time=DAY) for n in range(4)])
    assert "1 of 4 records kept" in run("log", "prune", path, "--keep", "1")


def test_two_processes_that_went_on_with_one_run_both_count(tmp_path):
    path, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    append(path, start(), *(trial(time=DAY, seconds=s, times=Times.of([s])) for s in (1.25, 1.5)), finish())
    assert "kept out" not in run("log", "merge", path, "-o", out) and len(read(out).trials()) == 2


def test_what_a_newer_program_wrote_is_not_lost(folder, tmp_path):  # noqa: F811
    theirs, target = tmp_path / "theirs.jsonl", folder / "imported.jsonl"
    append(theirs, start(), trial(time=DAY), finish())
    run("log", "import", theirs)
    newer = b'{"kind":"trial","v":7,"of":"the future"}\n'
    with target.open("ab") as file:
        file.write(newer + b"not json\n")
    output = run("log", "import", theirs)
    assert "imported.jsonl:4: version 7" in output and "imported.jsonl:5: " in output
    assert "1 damaged lines are dropped, 1 of a newer ecornn stay" in output
    run("log", "prune", target)
    assert target.read_bytes().endswith(newer) and len(read(target).lines) == 3
    run("log", "prune", target, target, "-o", tmp_path / "pruned.jsonl")
    assert (tmp_path / "pruned.jsonl").read_bytes() == target.read_bytes()


def test_a_stale_configuration_that_fails_now_is_not_brought_back(tmp_path):
    now, path = revisions()["persistent"], tmp_path / "log.jsonl"
    fast, good = {"k": 1}, {"k": 2}
    append(path, *[start(), trial(revision=now - 1, config=fast, times=Times.of([0.5]), time=DAY), finish(),
                      start("cd-1"), trial(run="cd-1", revision=now, config=good, times=Times.of([2.0]), time=DAY),
                      trial(run="cd-1", index=1, revision=now, config=fast, times=None, check=None,
                            error="run: wrong output", time=DAY), finish("cd-1")])
    assert [line.record.config for line in best_lines(read(path), revisions())] == [good]
    run("log", "prune", path)
    assert [(t.config, t.revision, t.error) for t in read(path).trials()] == [
        (fast, now - 1, None), (good, now, None), (fast, now, "run: wrong output")]


def test_the_best_is_a_current_one_where_there_is_one(tmp_path):
    path = tmp_path / "log.jsonl"
    append(path, *[trial(revision=1, times=Times.of([1.0])), trial(index=1, revision=2, times=Times.of([3.0])),
                      trial(index=2, revision=2, times=Times.of([2.0]))])
    for revision, us in ((2, 2.0), (1, 1.0), (3, 1.0)):
        (best,) = best_lines(read(path), {"persistent": revision})
        assert best.record.times.median == us


def test_the_best_is_what_look_up_chooses(tmp_path):
    """Of one configuration the latest final time counts, with a knob that came later or without, and not the least."""
    device = KNOWN["sm_90a"]
    task = make_task(get("lstm"), Workload("lstm", 256, 256, 16, 100, "float16"), device)
    persistent = all_schedules()["persistent"]
    default = dict(persistent.default(task))
    other = next({**default, "warps": warps} for warps in (2, 3, 4, 5, 6) if warps != default["warps"]
                 and persistent.check(task, {**default, "warps": warps}) is None)
    lacking = {k: v for k, v in default.items() if k != "hoisted"}
    default["hoisted"] = "float32"

    def final(index: int, config: dict, us: float, hour: int) -> Trial:
        return trial(index=index, stage="final", revision=persistent.revision, config=config, times=Times.of([us]),
                     check=1e-4, time=f"2026-01-31T{hour}:00:00Z", workload=task.workload)

    for first in (default, lacking):
        log = Log(lines([final(0, first, 1.0, 10), final(1, default, 3.0, 12), final(2, other, 2.0, 11)]))
        (best,) = best_lines(log, revisions())
        assert best.record.config == other == find(task, [persistent], log).config
        kept = worth_keeping([*log.lines, *lines([finish()])], revisions(), 1)
        assert [line.record.config for line in kept if isinstance(line.record, Trial)] == [other]


def test_prune_keeps_the_fastest_and_runs_under_way(tmp_path):
    now = all_schedules()["persistent"].revision
    path = tmp_path / "log.jsonl"
    append(path, *[start(), *(trial(index=i, revision=now, times=Times.of([1.0 + i]), config={"k": i}, time=DAY)
                                 for i in range(9)),
                      trial(index=9, revision=now - 1, times=Times.of([0.5]), config={"k": 0}, time=DAY),
                      trial(index=10, times=None, check=None, error="run: wrong output", time=DAY),
                      structs.replace(finish(), trials=11)])
    append(path, start("cd-1"), trial(run="cd-1", times=None, check=None, error="build: no", time=DAY))
    assert "7 of 15 records kept" in run("log", "prune", path, "--keep", "3")
    log = read(path)
    assert [t.config["k"] for t in log.trials() if t.run == "ab-1"] == [0, 1, 2]
    assert [t.revision for t in log.trials() if t.run == "ab-1"] == [now] * 3  # the stale copy is gone
    assert [t.error for t in log.trials() if t.run == "cd-1"] == ["build: no"]
    assert "7 of 7 records kept" in run("log", "prune", path, "--keep", "3")
    assert not list(tmp_path.glob(".*"))


def test_prune_keeps_a_finished_run_that_goes_on(tmp_path):
    path, late = tmp_path / "log.jsonl", "2026-01-31T13:00:00Z"

    def trials(first: int, last: int, time: str = DAY) -> list[Trial]:
        return [trial(index=i, times=Times.of([1.0 + i]), config={"k": i}, time=time) for i in range(first, last)]

    append(path, start(), *trials(0, 4), structs.replace(finish(), trials=4))
    whole = path.read_bytes()
    append(path, *trials(4, 7))  # in the same second
    assert "1 runs (0 finished)" in run("log", "ls", path)
    assert "9 of 9 records kept" in run("log", "prune", path, "--keep", "1")
    append(path, structs.replace(finish(), trials=7))
    assert "1 runs (1 finished)" in run("log", "ls", path)
    assert "4 of 10 records kept" in run("log", "prune", path, "--keep", "1")

    path.write_bytes(whole)  # pruned before it goes on, it has fewer trials than its finish counts
    assert "3 of 6 records kept" in run("log", "prune", path, "--keep", "1")
    append(path, *trials(4, 6, late))
    assert "5 of 5 records kept" in run("log", "prune", path, "--keep", "1")


@given(logs, st.integers(1, 4))
def test_pruning_never_loses_the_best(records, keep):
    before = lines(records)
    after = worth_keeping(before, {"persistent": 1}, keep)
    times = [line.record.times.median for line in before if getattr(line.record, "times", None)]
    left = [line.record.times.median for line in after if getattr(line.record, "times", None)]
    assert min(times, default=0) == min(left, default=0)
    assert worth_keeping(after, {"persistent": 1}, keep) == after


def test_stats_say_what_there_is(tmp_path):
    path = tmp_path / "log.jsonl"
    append(path, *[start(), trial(noisy=True), trial(index=1, times=None, check=None, error="run: wrong output: 3"),
                      finish()])
    output = run("log", "stats", path)
    assert f"{H100.name} (sm_90a): 1 workloads, 2 trials in the search, 1 failed, 2 stale, 1 noisy" in output
    append(path, trial(index=2, times=None, check=None, error="build: \x1b]0;title\x07 of 3\nmore"))
    assert "1 failed: build: ?]0;title? of 3\n" in run("log", "stats", path)
    assert "1 failed: run: wrong output: 3" in output and "2.00x in the median of 1 runs" in output


def test_a_log_is_rewritten_whole_or_not_at_all(tmp_path):
    path = tmp_path / "log.jsonl"
    append(path, trial())
    before = path.read_bytes()

    def fails(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewrite(path, fails)
    assert path.read_bytes() == before and not list(tmp_path.glob(".*"))
