"""`ecornn log`: lists, merges, imports, prunes and verifies logs: nothing valid is lost, and nothing counts twice."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_cli import LAYER, folder, from_json, run  # noqa: F401  (a user's folder of its own for each test)
from test_records import DAY, H100, finish, start, trial

from ecornn.cells import get
from ecornn.cli.log_commands import ROWS
from ecornn.schedules import all_schedules, revisions
from ecornn.targets import KNOWN
from ecornn.task import make_task
from ecornn.tune.log import Line, Log, append, read, rewrite
from ecornn.tune.lookup import find
from ecornn.tune.record import Outcome, Times, Trial
from ecornn.tune.selection import Check, best_lines, merge, worth_keeping
from ecornn.workload import Workload


def lines(records, name: str = "a.jsonl") -> list[Line]:
    return [Line(Path(name), number, record) for number, record in enumerate(records, 1)]


def timed(us: float, **more: object) -> Trial:
    return trial(times=Times.of([us]), time=DAY, **more)


def failed(error: str = "run: wrong output", **more: object) -> Trial:
    return trial(times=None, check=None, error=error, time=DAY, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


# few events and few results, so that equal and contradicting records occur
records = st.one_of(
    st.builds(timed, st.sampled_from([1.0, 2.0, 3.0]), run=st.sampled_from(["ab-1", "ab-2"]), index=st.integers(0, 2)),
    st.builds(failed, st.sampled_from(["run: a", "run: b"]), index=st.integers(0, 2)),
    st.builds(start, st.sampled_from(["ab-1", "ab-2"])), st.builds(finish, us=st.sampled_from([1.0, 1.5])))
logs = st.lists(records, max_size=8)


@given(logs, logs, logs)
def test_merging_is_commutative_associative_and_idempotent(a, b, c):
    def union(*parts):
        return merge(line for part in parts for line in lines(part)).records
    assert union(a, b) == union(b, a) and union(union(a, b), c) == union(a, union(b, c))
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
    """And no more: of two processes that went on with one run both count."""
    mine, theirs, out = (tmp_path / f"{name}.jsonl" for name in ("mine", "theirs", "out"))
    append(mine, start(), timed(2.0), finish(), *(timed(s, index=5, seconds=s) for s in (1.25, 1.5)))
    append(theirs, start(), timed(1.0), trial(time=DAY, index=1), finish())
    with theirs.open("ab") as file:
        file.write(b'{"kind":"trial","v":9}\nnot json\n')
    output = run("log", "merge", mine, theirs, "-o", out)
    assert f"left out {theirs}:2: conflicts with {mine}:2" in output and output.count("left out") == 1
    assert f"skipped {theirs}:5: version 9" in output and f"skipped {theirs}:6: " in output
    found = [line.record for line in read(out).lines]
    assert [type(r).__name__ for r in found] == ["Start", *["Trial"] * 4, "Finish"] and found[1].times.median == 2.0
    other, again = tmp_path / "other.jsonl", tmp_path / "again.jsonl"
    run("log", "merge", theirs, mine, "-o", other)
    assert out.read_bytes() == other.read_bytes()
    run("log", "merge", out, mine, out, "-o", again)
    assert again.read_bytes() == out.read_bytes()
    run("log", "merge", mine, "-o", out, code=2)  # never overwrites


def test_import_adds_what_is_new_to_the_users_folder(folder, path):  # noqa: F811
    append(path, start(), trial(time=DAY), finish())
    assert "added 3 records" in run("log", "import", path) and "added 0 records" in run("log", "import", path)
    append(path, trial(index=1, time=DAY))
    append(folder / "imported.jsonl", *[trial(time=DAY)] * 3)  # which were there twice
    assert run("log", "import", path).startswith("added 1 records") and len(read(folder / "imported.jsonl").lines) == 4
    assert "persistent" in run("log", "best")


@pytest.mark.parametrize("command", [("ls",), ("best",), ("stats",), ("import",), ("merge", "-o", "out.jsonl")])
def test_what_is_no_log_is_neither_listed_nor_merged(command, folder, tmp_path):  # noqa: F811
    (tmp_path / "readme.md").write_text("# no log\n")
    assert "is not a tuning log" in run("log", *command, "readme.md", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["readme.md"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path, work = tmp_path / "one.jsonl", Workload("lstm", 799, 800, 20, 300, "bfloat16")
    append(path, timed(9.0, workload=work, config={"blocks": 1}), failed(workload=work),
           timed(4.0, workload=work, config={"blocks": 2}, run="cd-1"))
    return path


def test_log_commands(log, folder, tmp_path):  # noqa: F811
    path, target, best = folder / "mine.jsonl", tmp_path / "merged.jsonl", tmp_path / "best.jsonl"
    assert str(path) not in run("log", "ls")
    folder.mkdir()
    path.write_bytes(log.read_bytes() + b'{"kind":"trial","v":1')
    output = run("log", "ls")
    assert f"{path}: 0 runs (0 finished), 3 trials, 1 failed" in output
    assert f"skipped {path}:4: torn last line" in output
    output = run("log", "best", path, "--all")
    assert "4 µs/step  persistent blocks=2  (mine.jsonl:3)" in output and "blocks=1" not in output
    run("log", "export", path, "-o", target)
    assert len(read(target).lines) == 3 and not read(target).problems
    run("log", "export", path, "-o", target, code=2)  # never overwrites
    run("log", "export", "--best", "-o", best)
    assert [line.record.config for line in read(best).lines] == [{"blocks": 2}]  # of one's own


def test_the_best_are_a_short_table(folder, path):  # noqa: F811
    of = [Workload("lstm", 8 * n, 8, 1, 9, "bfloat16") for n in range(1, ROWS + 3)]
    append(path, *(structs.replace(timed(n, run=f"r-{n}", workload=work), time=f"2026-02-{n:02}T12:00:00Z")
                   for n, work in enumerate(of, 1)))
    head, *rows, rest = run("log", "best", path).splitlines()
    assert head.split() == ["layer", "device", "µs/step", "schedule"] and rest == "there are 2 more; --all prints them"
    assert [row.partition("  ")[0] for row in rows] == [str(work) for work in of[:1:-1]]  # the latest
    assert len(run("log", "best", path, "--all").splitlines()) == len(from_json("log", "best", path)) == ROWS + 2
    append(folder / "mine.jsonl", timed(4.0, run="old-1", workload=of[0]))
    assert run("log", "best").splitlines()[1].endswith("4        persistent")  # one's own


def test_what_is_exported_is_ones_own(folder, tmp_path):  # noqa: F811
    assert "there are no records to export; to make" in run("log", "export", "-o", tmp_path / "none.jsonl", code=2)
    h200 = structs.replace(H100, name="NVIDIA H200")
    for name, record in (("mine.jsonl", timed(3.0, run="ab-1")), ("mine.jsonl", timed(4.0, run="ab-2", device=h200)),
                         ("imported.jsonl", timed(5.0, run="ab-3"))):
        append(folder / name, record)

    def exported(*options: str) -> list[str]:
        target = tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl"
        run("log", "export", *options, "-o", target)
        return [line.record.run for line in read(target).lines]

    assert sorted(exported()) == ["ab-1", "ab-2"] and exported("--device", "h200") == ["ab-2"]
    assert sorted(exported("--since", "2026-01-31")) == ["ab-1", "ab-2"]
    for options in (("--since", "2026-02-01"), ("--device", "A100")):
        said = run("log", "export", *options, "-o", tmp_path / "none.jsonl", code=2)
        assert "there are no such records to export; there are runs on NVIDIA H100" in said and "H200 (sm_90a)" in said


def test_logs_for_programs(log, folder, tmp_path):  # noqa: F811
    (listed,) = from_json("log", "ls", log)
    assert listed == {"file": str(log), "runs": 0, "finished": 0, "trials": 3, "failed": 1}
    (one,) = from_json("log", "stats", log)
    assert (one["trials"], one["failed"], one["failures"]) == (3, 1, {"run: wrong output": 1}) and one["gains"] is None
    merged = from_json("log", "merge", log, log, "-o", tmp_path / "merged.jsonl")
    assert merged == {"file": str(tmp_path / "merged.jsonl"), "records": 3, "newer": 0, "kept_out": []}
    assert from_json("log", "export", log, "--best", "-o", tmp_path / "best.jsonl")["records"] == 1
    assert from_json("log", "import", log) == {"file": str(folder / "imported.jsonl"), "added": 3, "records": 3,
                                           "kept_out": []}
    assert from_json("log", "import", log)["added"] == 0
    pruned = from_json("log", "prune", log, "--keep", 1, "-o", tmp_path / "pruned.jsonl")
    assert [(one["before"], one["records"]) for one in pruned] == [(3, 1)]
    assert [(one["file"], one["before"], one["records"]) for one in from_json("log", "prune", log, "--keep", 1)] == [
        (str(log), 3, 1)]
    found = from_json("log", "verify", log, "--target", "cpu")  # the records are a GPU's
    assert found["checks"] == [] and sum(found["left_out"].values()) == 1


def test_verify_says_the_median_of_an_even_number(path, monkeypatch):
    append(path, *[timed(1.0, run=f"r-{n}", check=1e-7, workload=Workload("lstm", n, n)) for n in (8, 16)])
    now = {8: 1.0, 16: 1.05}
    monkeypatch.setattr("ecornn.tune.session.Session", lambda *_, **__: nullcontext(SimpleNamespace(device=H100)))
    monkeypatch.setattr("ecornn.tune.selection.sample", lambda lines, *_: (lines, {}))
    monkeypatch.setattr("ecornn.tune.selection.verify", lambda lines, _: [
        Check(line, Outcome(Times.of([now[line.record.workload.hidden]]))) for line in lines])
    assert "2 of 2 times hold within 10%, median drift +2.5%" in run("log", "verify", path)


@pytest.mark.slow
def test_verify_measures_again_and_reports_drift(folder, tmp_path):  # noqa: F811
    run("tune", *LAYER, "--trials", "3")
    (path,) = folder.glob("*.jsonl")
    output = run("log", "verify", path, "--tolerance", "100000", "--target", "cpu")
    assert "1 of 1 times hold within 100000%" in output and "µs/step, " in output
    drifted = tmp_path / "drifted.jsonl"
    append(drifted, trial(), *(  # of a GPU
        structs.replace(t, times=Times.of([t.times.median / 50])) for t in read(path).trials() if t.times))
    output = run("log", "verify", drifted, "--target", "cpu", code=1)
    assert "DRIFTED" in output and "left out 1 of another device" in output and "0 of 1 times hold" in output


def test_what_a_newer_program_wrote_is_not_lost(folder, path, tmp_path):  # noqa: F811
    target = folder / "imported.jsonl"
    append(path, start(), trial(time=DAY), finish())
    run("log", "import", path)
    newer = b'{"kind":"trial","v":7,"of":"the future"}\n'
    with target.open("ab") as file:
        file.write(newer + b"not json\n")
    output = run("log", "import", path)
    assert "imported.jsonl:4: version 7" in output and "imported.jsonl:5: " in output
    assert "the file loses damaged lines (1) and keeps those of a newer ecornn (1)" in output
    run("log", "prune", target)
    assert target.read_bytes().endswith(newer) and len(read(target).lines) == 3
    run("log", "prune", target, target, "-o", tmp_path / "pruned.jsonl")
    assert (tmp_path / "pruned.jsonl").read_bytes() == target.read_bytes()


def test_a_stale_configuration_that_fails_now_is_not_brought_back(path):
    now, fast, good = revisions()["persistent"], {"k": 1}, {"k": 2}
    append(path, start(), timed(0.5, revision=now - 1, config=fast), finish(),
           start("cd-1"), timed(2.0, run="cd-1", revision=now, config=good),
           failed(run="cd-1", index=1, revision=now, config=fast), finish("cd-1"))
    assert [line.record.config for line in best_lines(read(path), revisions())] == [good]
    run("log", "prune", path)
    assert [(t.config, t.revision, t.error) for t in read(path).trials()] == [
        (fast, now - 1, None), (good, now, None), (fast, now, "run: wrong output")]


def test_the_best_is_a_current_one_where_there_is_one(path):
    append(path, timed(1.0, revision=1), timed(3.0, index=1, revision=2), timed(2.0, index=2, revision=2))
    for revision, us in ((2, 2.0), (1, 1.0), (3, 1.0)):
        (best,) = best_lines(read(path), {"persistent": revision})
        assert best.record.times.median == us


def test_the_best_is_what_look_up_chooses(tmp_path):
    """Of one configuration the latest final time counts, with a knob that came later or without, and not the least."""
    task = make_task(get("lstm"), Workload("lstm", 256, 256, 16, 100, "float16"), KNOWN["sm_90a"])
    persistent = all_schedules()["persistent"]
    default = dict(persistent.default(task))
    other = next({**default, "warps": warps} for warps in (2, 3, 4, 5, 6) if warps != default["warps"]
                 and persistent.check(task, {**default, "warps": warps}) is None)
    lacking = {k: v for k, v in default.items() if k != "hoisted"}
    default["hoisted"] = "float32"
    def final(index: int, config: dict, us: float, hour: int) -> Trial:
        return trial(index=index, stage="final", revision=persistent.revision, config=config, check=1e-4,
                     times=Times.of([us]), time=f"2026-01-31T{hour}:00:00Z", workload=task.workload)
    for first in (default, lacking):
        log = Log(lines([final(0, first, 1.0, 10), final(1, default, 3.0, 12), final(2, other, 2.0, 11)]))
        (best,) = best_lines(log, revisions())
        assert best.record.config == other == find(task, [persistent], log).config
        kept = worth_keeping([*log.lines, *lines([finish()])], revisions(), 1)
        assert [line.record.config for line in kept if isinstance(line.record, Trial)] == [other]


def test_prune_keeps_the_fastest_and_runs_under_way(path, tmp_path):
    now = revisions()["persistent"]
    append(path, start(), *(timed(1.0 + i, index=i, revision=now, config={"k": i}) for i in range(9)),
           timed(0.5, index=9, revision=now - 1, config={"k": 0}), failed(index=10),
           structs.replace(finish(), trials=11), start("cd-1"), failed("build: no", run="cd-1"))
    assert "kept 7 of 15 records" in run("log", "prune", path, "--keep", "3")
    log = read(path)
    assert [t.config["k"] for t in log.trials() if t.run == "ab-1"] == [0, 1, 2]
    assert [t.revision for t in log.trials() if t.run == "ab-1"] == [now] * 3  # the stale copy is gone
    assert [t.error for t in log.trials() if t.run == "cd-1"] == ["build: no"]
    assert "kept 7 of 7 records" in run("log", "prune", path, "--keep", "3") and not list(tmp_path.glob(".*"))


def test_prune_keeps_a_finished_run_that_goes_on(path):
    def trials(first: int, last: int, time: str = DAY) -> list[Trial]:
        return [trial(index=i, times=Times.of([1.0 + i]), config={"k": i}, time=time) for i in range(first, last)]
    append(path, start(), *trials(0, 4), structs.replace(finish(), trials=4))
    whole = path.read_bytes()
    append(path, *trials(4, 7))  # in the same second
    assert "1 runs (0 finished)" in run("log", "ls", path)
    assert "kept 9 of 9 records" in run("log", "prune", path, "--keep", "1")
    append(path, structs.replace(finish(), trials=7))
    assert "1 runs (1 finished)" in run("log", "ls", path)
    assert "kept 4 of 10 records" in run("log", "prune", path, "--keep", "1")

    path.write_bytes(whole)  # pruned before it goes on, it has fewer trials than its finish counts
    assert "kept 3 of 6 records" in run("log", "prune", path, "--keep", "1")
    append(path, *trials(4, 6, "2026-01-31T13:00:00Z"))
    assert "kept 5 of 5 records" in run("log", "prune", path, "--keep", "1")


@given(logs, st.integers(1, 4))
def test_pruning_never_loses_the_best(records, keep):
    before = lines(records)
    after = worth_keeping(before, {"persistent": 1}, keep)
    times = [line.record.times.median for line in before if getattr(line.record, "times", None)]
    left = [line.record.times.median for line in after if getattr(line.record, "times", None)]
    assert min(times, default=0) == min(left, default=0) and worth_keeping(after, {"persistent": 1}, keep) == after


def test_stats_say_what_there_is(path):
    append(path, start(), trial(noisy=True), failed("run: wrong output: 3", index=1), finish())
    output = run("log", "stats", path)
    assert f"{H100.name} (sm_90a): 1 workloads, 2 trials in the search, 1 failed, 2 stale, 1 noisy" in output
    append(path, failed("build: \x1b]0;title\x07 of 3\nmore", index=2))
    assert "1 failed: build: ?]0;title? of 3\n" in run("log", "stats", path)
    assert "1 failed: run: wrong output: 3" in output and "is 2.00 times as fast as the untuned" in output


def test_a_log_is_rewritten_whole_or_not_at_all(path, tmp_path):
    append(path, trial())
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        rewrite(path, Mock(side_effect=KeyboardInterrupt))
    assert path.read_bytes() == before and not list(tmp_path.glob(".*"))
