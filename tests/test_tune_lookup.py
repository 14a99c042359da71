"""Which record is used, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tune_fakes import DEVICE, Fake, make

from ecornn.schedules.base import Task
from ecornn.tune.log import Line, Log
from ecornn.tune.lookup import find
from ecornn.tune.record import Times, Trial
from ecornn.workload import Workload

TASK = make(hidden=8, batch=4)
SCHEDULE = Fake()


def trial(us: float = 10.0, *, a: int = 1, batch: int = 4, seq: int = 10, cores: int = 4,
          name: str = "Test CPU", **changes: object) -> Trial:
    fields = {"run": "r-1", "index": 0, "stage": "search",
              "workload": Workload("lstm", 8, 8, batch, seq),
              "device": msgspec.structs.replace(DEVICE, cores=cores, name=name), "schedule": "fake",
              "revision": 3, "config": {"a": a, "b": 0, "behaviour": "ok"}, "versions": {}, "seed": 0,
              "seconds": 1.0, "times": Times.of([us])}
    return Trial(**{**fields, **changes})


def log_of(*trials: Trial, folder: str = "user") -> Log:
    return Log([Line(Path(folder, "log.jsonl"), n, t) for n, t in enumerate(trials, 1)])


def found(*trials: Trial, task: Task = TASK):
    return find(task, [SCHEDULE], log_of(*trials))


def test_without_records_the_heuristic_is_used_and_said():
    result = found()
    assert result.config == SCHEDULE.default(TASK) and result.line is None
    assert result.provenance == "untuned default of fake: no record applies"


def test_the_fastest_applies_and_is_named():
    result = found(trial(10.0, a=1), trial(5.0, a=2), trial(7.0, a=3))
    assert result.config["a"] == 2
    assert "log.jsonl:2" in result.provenance and "this device, same batch, 5 µs" in result.provenance


def test_the_same_batch_goes_before_a_faster_larger_one_and_the_nearest_larger_next():
    assert found(trial(1.0, a=1, batch=8), trial(9.0, a=2, batch=4)).config["a"] == 2
    assert found(trial(1.0, a=1, batch=32), trial(9.0, a=2, batch=8)).config["a"] == 2
    assert found(trial(1.0, a=1, batch=2)).line is None  # a smaller batch does not serve


def test_seq_plays_no_part():
    assert found(trial(9.0, a=1, seq=10), trial(1.0, a=2, seq=999)).config["a"] == 2


def test_this_device_goes_before_a_smaller_one_of_its_architecture_and_larger_ones_never_apply():
    other = trial(1.0, a=1, name="Other CPU", cores=2)
    assert found(other, trial(9.0, a=2)).config["a"] == 2
    alone = found(other)
    assert alone.config["a"] == 1 and "Other CPU (same architecture)" in alone.provenance
    assert found(trial(1.0, name="Other CPU", cores=8)).line is None
    arch = trial(device=msgspec.structs.replace(DEVICE, arch="skylake"))
    assert found(arch).line is None


def test_the_users_folder_goes_before_the_shipped_one():
    log = log_of(trial(9.0, a=1))
    log.extend(log_of(trial(1.0, a=2), folder="shipped"))
    assert find(TASK, [SCHEDULE], log).config["a"] == 1


def test_a_final_comparison_goes_before_single_times():
    assert found(trial(1.0, a=1), trial(9.0, a=2, stage="final")).config["a"] == 2


def test_stale_and_foreign_configurations_are_ignored_and_counted():
    stale = trial(1.0, revision=2)
    result = found(stale, stale, trial(9.0, a=4))
    assert result.config["a"] == 4 and "2 ignored, stale" in result.provenance
    result = found(stale)  # nothing else is left: its configuration goes before the heuristic
    assert result.config == stale.config and "revision 2" in result.provenance and "now 3" in result.provenance
    assert found(trial(1.0, revision=2, config={"a": 99, "b": 0, "behaviour": "ok"})).line is None
    assert "no longer has" in found(trial(config={"a": 99, "b": 0, "behaviour": "ok"})).provenance
    assert "no longer has" in found(trial(config={"a": 1, "b": 0})).provenance
    assert "no longer has" in found(trial(config={"a": True, "b": 0, "behaviour": "ok"})).provenance
    assert "do not fit here" in found(trial(config={"a": 7, "b": 7, "behaviour": "ok"})).provenance
    assert "do not serve" in found(trial(schedule="gone")).provenance


def test_failed_trials_never_apply():
    assert found(trial(times=None, error="run: wrong output")).line is None


many = st.lists(st.builds(
    trial, st.floats(0.1, 100), a=st.integers(0, 9), batch=st.sampled_from([1, 2, 4, 8, 16]),
    seq=st.integers(1, 100), cores=st.sampled_from([2, 4, 8]),
    name=st.sampled_from(["Test CPU", "Other CPU"]), revision=st.sampled_from([2, 3]),
    stage=st.sampled_from(["search", "final"])), max_size=12)


@given(many, st.randoms(use_true_random=False))
def test_what_is_found_can_run_and_nothing_nearer_was_passed_over(trials, rng):
    result = found(*trials)
    assert SCHEDULE.check(TASK, result.config) is None
    usable = [t for t in trials if t.workload.batch >= 4 and t.device.cores <= 4 and t.config["a"] <= 7]
    usable = [t for t in usable if t.revision == 3] or usable
    assert (result.line is None) == (not usable)
    if result.line is None:
        return
    chosen = result.line.record
    exact = [t for t in usable if t.device == DEVICE]
    assert chosen in usable and (not exact or chosen in exact)
    rivals = [t for t in usable if t.device == chosen.device]
    assert chosen.workload.batch == min(t.workload.batch for t in rivals)
    rivals = [t for t in rivals if t.workload.batch == chosen.workload.batch and t.stage == chosen.stage]
    assert chosen.times.median == min(t.times.median for t in rivals)
    shuffled = list(trials)
    rng.shuffle(shuffled)
    assert found(*shuffled).line.record.times == chosen.times


def test_a_task_of_another_size_or_dtype_finds_nothing():
    for change in ({"hidden": 16}, {"input": 16}, {"dtype": "float16"}, {"cell": "gru"}):
        work = msgspec.structs.replace(TASK.workload, **change)
        assert found(trial(), task=replace(TASK, workload=work)).line is None
