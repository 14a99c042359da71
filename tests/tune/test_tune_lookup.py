"""Which record is used, and what is said about it."""

import math
from functools import cache
from pathlib import Path

import msgspec
import pytest
import test_records
from hypothesis import given, settings
from hypothesis import strategies as st
from test_records import DAY
from tune_fakes import DEVICE, Fake, make

from ecornn.cells import get
from ecornn.compiler import plan
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Knob, Task
from ecornn.schedules.persistent import Persistent
from ecornn.targets import KNOWN
from ecornn.task import make_task
from ecornn.tune.choose import choose
from ecornn.tune.log import Line, Log, read_all, shipped_folder
from ecornn.tune.lookup import FANCIFUL, find, moved, possible, unfit, within
from ecornn.tune.record import Times, Trial, decode, encode
from ecornn.tune.search import CostModel
from ecornn.tune.selection import best_lines
from ecornn.tune.space import Candidate
from ecornn.tune.transfer import borrowed, seeds, warm
from ecornn.workload import Workload

TASK = make(hidden=8, batch=4)
SCHEDULE = Fake()
TOO_LARGE = {"a": 7, "b": 7, "behaviour": "ok"}  # does not fit here


def trial(us: float = 10.0, *, a: int = 1, batch: int = 4, seq: int = 10, cores: int = 4,
          name: str = "Test CPU", **changes: object) -> Trial:
    fields = {"workload": Workload("lstm", 8, 8, batch, seq), "schedule": "fake", "revision": 3, "generation": 0,
              "device": msgspec.structs.replace(DEVICE, cores=cores, name=name), "times": Times.of([us]),
              "check": 1e-7, "config": {"a": a, "b": 0, "behaviour": "ok"}, "time": DAY}
    return test_records.trial(**{**fields, **changes})


def log_of(*trials: Trial, folder: str = "user") -> Log:
    return Log([Line(Path(folder, "log.jsonl"), n, t) for n, t in enumerate(trials, 1)])


def found(*trials: Trial, task: Task = TASK):
    return find(task, [SCHEDULE], log_of(*trials))


def test_records_that_are_too_far_are_named():
    """The nearest ones alone, none that failed or is another cell's, H's or kind of device's."""
    said, far = "untuned default of fake: no record applies; the nearest are for ", trial(batch=32)
    assert found(far).provenance == said + "B=32"
    assert found(far, trial(workload=Workload("lstm", 8, 8, 64, 10, "bfloat16"))).provenance == said + "B=32"
    assert found(trial(workload=Workload("lstm", 8, 8, 4, 10, "bfloat16"))).provenance == said + "bfloat16"
    assert found(trial(workload=Workload("lstm", 8, 8, 4, 10, weights="int16"))).provenance == said + "weights in int16"
    assert found(trial(workload=Workload("lstm", 8, 4, 4, 10))).provenance == said + "I=4"
    many = [trial(batch=batch) for batch in (32, 64, 128, 256)]
    assert found(*many).provenance == said + "B=128, B=256, B=32 and more"
    nothing = (trial(workload=Workload("gru", 8, 8, 32, 10)), trial(workload=Workload("lstm", 16, 16, 32, 10)),
               trial(batch=32, times=None, check=None, error="run: wrong"),
               trial(batch=32, device=msgspec.structs.replace(DEVICE, kind="cuda")))
    for result in (found(*nothing), found()):
        assert (result.config, result.line) == (SCHEDULE.default(TASK), None)
        assert result.provenance == "untuned default of fake: no record applies"


def test_the_fastest_applies_and_is_named():
    result = found(trial(10.0, a=1), trial(5.0, a=2), trial(7.0, a=3))
    assert result.config["a"] == 2
    assert "log.jsonl:2" in result.provenance and "this device, same batch, 5 µs" in result.provenance


def test_the_same_batch_goes_before_a_faster_other_one_and_then_the_nearest():
    assert found(trial(1.0, a=1, batch=8), trial(9.0, a=2, batch=4)).config["a"] == 2
    assert found(trial(1.0, a=1, batch=16), trial(9.0, a=2, batch=8)).config["a"] == 2
    smaller = found(trial(1.0, a=1, batch=2))
    assert smaller.config["a"] == 1 and "batch 2" in smaller.provenance
    assert found(trial(1.0, a=1, batch=2), trial(9.0, a=2, batch=8)).config["a"] == 2  # equally near: room for all
    assert found(trial(1.0, a=1, batch=3), trial(9.0, a=2, batch=8)).config["a"] == 1
    assert found(trial(batch=32)).line is None and found(trial(batch=1)).line is not None  # REACH


def test_the_nearest_batch_whose_configuration_fits_is_used():
    result = found(trial(1.0, batch=4, config=TOO_LARGE), trial(9.0, a=2, batch=8))
    assert result.config["a"] == 2 and "batch 8" in result.provenance and "do not fit here" in result.provenance


def test_what_is_much_slower_than_ones_that_do_not_fit_is_no_guide():
    """As where only the slow schedule's configuration can be used for a smaller batch."""
    near = trial(1.0, batch=4, config=TOO_LARGE), trial(1.2, a=2, batch=4)
    assert found(*near).config["a"] == 2
    near = trial(1.0, batch=4, config=TOO_LARGE), trial(4.0, a=2, batch=4)
    result = found(*near, trial(9.0, a=3, batch=8))
    assert result.config["a"] == 3 and "1 record skipped (slower than others, whose" in result.provenance
    assert found(*near).line is None and found(*near).config == SCHEDULE.default(TASK)


def test_sequence_lengths_within_a_factor_of_two_compete_and_others_are_said():
    assert found(trial(9.0, a=1, seq=10), trial(1.0, a=2, seq=19)).config["a"] == 2
    assert found(trial(9.0, a=1, seq=10), trial(1.0, a=2, seq=999)).config["a"] == 1
    assert "T=999" in found(trial(1.0, seq=999)).provenance


def test_the_nearest_input_size_counts_after_the_batch_and_is_said():
    def of(us: float, a: int, input: int, batch: int = 4) -> Trial:
        one = trial(us, a=a, batch=batch)
        return msgspec.structs.replace(one, workload=msgspec.structs.replace(one.workload, input=input))
    own = TASK.workload.input
    assert found(of(1.0, 1, 2 * own), of(9.0, 2, own)).config["a"] == 2
    assert found(of(1.0, 1, 4 * own), of(9.0, 2, 2 * own)).config["a"] == 2
    assert found(of(1.0, 1, own, batch=8), of(9.0, 2, 64 * own)).config["a"] == 2
    assert f"input {2 * own}" in found(of(1.0, 1, 2 * own)).provenance


def test_this_device_then_a_smaller_one_then_another_as_a_seed():
    smaller = trial(1.0, a=1, name="Other CPU", cores=2)
    seed = trial(0.5, a=3, device=msgspec.structs.replace(DEVICE, arch="skylake", name="Third CPU"))
    assert found(seed, smaller, trial(9.0, a=2)).config["a"] == 2
    alone = found(seed, smaller)
    assert alone.config["a"] == 1 and "Other CPU (same architecture)" in alone.provenance
    for only in (seed, trial(a=3, name="Third CPU", cores=8)):
        last = found(only)
        assert last.config["a"] == 3 and "measured on Third CPU, `ecornn tune` may find" in last.provenance
    assert found(trial(device=msgspec.structs.replace(DEVICE, kind="cuda", arch="sm_80"))).line is None


def test_the_users_folder_goes_before_the_shipped_one_unless_it_is_stale():
    log = log_of(trial(9.0, a=1))
    log.extend(log_of(trial(1.0, a=2), folder="shipped"))
    assert find(TASK, [SCHEDULE], log).config["a"] == 1
    log = log_of(trial(9.0, a=1, revision=2))
    log.extend(log_of(trial(1.0, a=2), folder="shipped"))
    assert find(TASK, [SCHEDULE], log).config["a"] == 2


def test_a_final_comparison_replaces_a_lucky_time_of_the_same_configuration():
    assert found(trial(1.0, a=1), trial(9.0, a=1, stage="final"), trial(8.0, a=2, run="r-2")).config["a"] == 2
    assert found(trial(1.00, a=1, run="r-2"), trial(1.02, a=2, stage="final")).config["a"] == 2
    assert found(trial(1.00, a=1, run="r-2"), trial(1.05, a=2, stage="final")).config["a"] == 1


def test_a_run_that_became_slower_does_not_make_its_losers_winners():
    """The search's fastest was slower at the end, as everything was by then; the second was not measured again."""
    run = [trial(10.0, a=1), trial(10.5, a=2), trial(20.0, a=3),
           *(trial(us, a=a, stage="final", time="2026-01-31T13:00:00Z") for us, a in ((13.0, 1), (26.0, 3)))]
    assert found(*run).config["a"] == 1
    other = [trial(10.5, a=2, run="r-2")]  # of another run, which knows nothing of that
    assert found(run[0], *other, *run[2:]).config["a"] == 2


def test_what_a_run_did_not_compare_at_its_end_does_not_beat_what_it_did():
    """The command that a run ends with compiles the configuration that it calls the best."""
    searched = [trial(us, a=a, index=a) for us, a in ((10.0, 1), (10.1, 2), (10.2, 3))]
    finals = [trial(us, a=a, index=a + 3, stage="final") for us, a in ((10.9, 1), (10.15, 2))]
    assert found(*searched, *finals).config["a"] == 2
    finals = [trial(us, a=a, index=a + 3, stage="final") for us, a in ((11.9, 1), (10.8, 2))]
    assert found(*searched, *finals).config["a"] == 2 and found(*searched).config["a"] == 1


def test_one_finalist_does_not_tell_how_much_slower_a_run_became():
    """It may have been lucky in the search: others of the run count with what they took there."""
    run = [trial(10.0, config=TOO_LARGE), trial(10.5, a=2, index=1),
           trial(13.0, config=TOO_LARGE, index=2, stage="final")]
    assert found(*run, trial(13.3, a=3, run="r-2")).config["a"] == 2


def test_a_device_of_more_of_anything_on_chip_is_not_one_that_fits():
    large = msgspec.structs.replace(DEVICE, cores=8, shared=1 << 16, registers=1 << 16)
    assert within(large, large)
    for name in ("cores", "shared", "registers"):
        more = msgspec.structs.replace(large, **{name: getattr(large, name) + 1})
        assert within(large, more) and not within(more, large), name


class Grown(Fake):
    """With a knob that it did not have when most of its records were made."""

    def knobs(self, task: Task) -> tuple[Knob, ...]:
        return (*super().knobs(task), Knob("new", ("as it was", "better"), "nothing", before="as it was"))

    def default(self, task: Task) -> dict[str, object]:
        return {**super().default(task), "new": "better"}


def test_a_record_without_a_knob_that_came_later_counts_as_things_were_before():
    old, config = trial(10.0, a=1), {"a": 2, "b": 0, "behaviour": "ok", "new": "better"}
    result = find(TASK, [Grown()], log_of(old))
    assert result.config == {**old.config, "new": "as it was"} and "log.jsonl:1" in result.provenance
    assert find(TASK, [Grown()], log_of(old, trial(9.0, config=config))).config == config
    assert find(TASK, [Grown()], log_of(old, trial(11.0, config=config))).config == result.config
    assert seeds(TASK, [Grown()], log_of(old)) == [Candidate.of("fake", result.config)]
    assert unfit(Grown(), TASK, old.config) is not None  # as it stands in the log
    lacking = trial(1.0, config={"a": 1, "behaviour": "ok"})  # of another schedule, by its knobs
    assert find(TASK, [Grown()], log_of(lacking)).line is None


def test_a_stale_record_of_a_faster_schedule_beats_a_valid_one_of_a_slower():
    schedules = [SCHEDULE, other := Fake(name="other")]
    other.revision = 7
    slow = trial(5.7, a=1, schedule="other", revision=7)
    result = find(TASK, schedules, log_of(slow, trial(2.2, a=4, revision=2)))
    assert (result.schedule.name, result.config["a"]) == ("fake", 4)
    assert "with revision 2 of fake, which is now at 3" in result.provenance
    assert "expected to be faster than other, which takes 5.7 (log.jsonl:1)" in result.provenance
    close = find(TASK, schedules, log_of(slow, trial(5.5, a=4, revision=2)))
    assert close.schedule.name == "other"  # what is known goes before what might be a little faster
    # a changed revision makes only its own records stale
    result = find(TASK, schedules, log_of(trial(2.0, a=1, schedule="other", revision=7), trial(2.0, a=2, revision=2)))
    assert result.schedule.name == "other" and "revision" not in result.provenance


def test_what_failed_since_it_became_stale_is_not_used():
    failed = trial(a=4, times=None, error="run: wrong output")
    result = found(trial(1.0, a=4, revision=2), failed, trial(9.0, a=2))
    assert result.config["a"] == 2 and "stale, and failing since then" in result.provenance
    assert found(trial(1.0, a=4), failed).config["a"] == 4  # a current time counts, whatever else happened


def test_the_default_is_computed_only_where_no_record_applies(monkeypatch: pytest.MonkeyPatch):
    """The persistent schedule searches for it, which takes longer than all else of a look-up."""
    searched, search = list[Task](), Persistent.search
    monkeypatch.setattr(Persistent, "search", lambda self, task: (searched.append(task), search(self, task))[1])
    of = {"hidden": 768, "batch": 16, "dtype": "bfloat16", "target": "sm_90a"}
    assert plan("lstm", seq=1024, **of).found.line is not None and not searched
    assert plan("rnn_relu", **of | {"hidden": 769}).found.line is None and searched


def test_what_cannot_be_used_is_counted():
    stale = trial(1.0, a=1, revision=2)
    result = found(stale)
    assert result.config == stale.config and "revision 2" in result.provenance and "now at 3" in result.provenance
    assert found(trial(1.0, revision=2, a=99)).line is None
    assert found(trial(times=None, error="run: wrong output")).line is None
    for odd in (trial(a=99), trial(config={"a": 1, "b": 0}), trial(a=True)):
        assert "no longer has" in found(odd).provenance
    assert "do not fit here" in found(trial(config=TOO_LARGE)).provenance
    assert "2 records skipped (with schedules that do not serve" in found(
        trial(schedule="gone"), trial(schedule="gone", index=1), trial(batch=2)).provenance


@pytest.mark.parametrize("check", [1e6, 2e-5, None])
def test_a_time_without_a_right_output_counts_nowhere(check):
    wrong, right = trial(1.0, a=1, check=check), trial(9.0, a=2)
    result = found(wrong, right)
    assert result.config["a"] == 2 and "1 record skipped (with a wrong output)" in result.provenance
    assert found(wrong).line is None and [c.config["a"] for c in seeds(TASK, [SCHEDULE], log_of(wrong, right))] == [2]
    assert [line.record.config["a"] for line in best_lines(log_of(wrong, right), {"fake": 3})] == [2]


many = st.lists(st.builds(
    trial, st.floats(0.1, 100), a=st.integers(0, 9), batch=st.sampled_from([1, 2, 4, 8, 16, 32]),
    seq=st.sampled_from([5, 10, 15, 100]), cores=st.sampled_from([2, 4, 8]),
    name=st.sampled_from(["Test CPU", "Other CPU"]), revision=st.sampled_from([2, 3]),
    stage=st.sampled_from(["search", "final"]), index=st.integers(0, 99)), max_size=12)


def tier(one: Trial) -> int:
    return 0 if one.device == DEVICE else 1 if one.device.cores <= 4 else 2


def length(one: Trial) -> int:
    return int(abs(math.log2(one.workload.seq / 10)))


@given(many, st.randoms(use_true_random=False))
def test_what_is_found_can_run_and_nothing_nearer_was_passed_over(trials, rng):
    trials = [t if t.config["a"] <= 7 else msgspec.structs.replace(t, times=Times.of([1e3])) for t in trials]
    # what trials of one run say of each other: above
    trials = [msgspec.structs.replace(t, run=f"r-{n}") for n, t in enumerate(trials)]
    result = found(*trials)
    assert SCHEDULE.check(TASK, result.config) is None
    usable = [t for t in trials if 1 <= t.workload.batch <= 16 and t.config["a"] <= 7]
    assert (result.line is None) == (not usable)
    if result.line is None:
        return
    chosen = result.line.record
    assert chosen in usable and tier(chosen) == min(map(tier, usable))
    octaves = [abs(math.log2(t.workload.batch / 4)) for t in usable if tier(t) == tier(chosen)]
    assert abs(math.log2(chosen.workload.batch / 4)) == min(octaves)
    rivals = [t for t in usable if tier(t) == tier(chosen) and t.workload.batch == chosen.workload.batch
              and length(t) == length(chosen)]
    best: dict[int, tuple[bool, bool, float]] = {}  # configuration -> (stale, once, expected)
    for t in rivals:
        stale, once = t.revision != 3, t.stage != "final"
        us = t.times.median * (1.1 if stale else 1.0) * (1.03 if once else 1.0)
        best[t.config["a"]] = min(best.get(t.config["a"], (True, True, math.inf)), (stale, once, us))
    assert best[chosen.config["a"]][2] == min(us for _, _, us in best.values())
    shuffled = list(trials)
    rng.shuffle(shuffled)
    again = found(*shuffled)
    assert again.line.record.times == chosen.times and again.config == result.config


H100 = KNOWN["sm_90a"]
SHIPPED = {"persistent": {"groups": 4, "units": 16, "warps": 4, "gate_warps": 4, "chains": 1, "registers": 100,
                          "interleave": 0, "ahead": 100, "fences": "rare", "hoisted": "same", "carrier": "l2",
                          "math": "fast"},
           "persistent_wide": {"groups": 1, "units": 16, "parts": 1, "row_teams": 1, "registers": 100,
                               "hoisted": "same", "math": "fast"}}


def shipped(config: dict[str, object], work: Workload, name: str = "persistent") -> Log:
    return log_of(decode(encode(trial(1.0, schedule=name, revision=all_schedules()[name].revision, config=config,
                                      workload=work, device=H100))))


@pytest.mark.parametrize("batch, known, groups, gates, carrier, becomes", [
    (24, 32, 4, 4, "l2", 3), (32, 16, 2, 4, "l2", 4), (20, 32, 4, 4, "l2", 3), (9, 16, 8, 1, "cluster", 5),
    (3, 4, 1, 2, "l2", 1)])
def test_a_configuration_of_another_batch_keeps_the_rows_of_a_group(batch, known, groups, gates, carrier, becomes):
    config = SHIPPED["persistent"] | {"groups": groups, "gate_warps": gates, "carrier": carrier}
    work = Workload(get("lstm").identity(), 256, 256, known, 100, "float16")
    log, task = shipped(config, work), make_task(get("lstm"), msgspec.structs.replace(work, batch=batch), H100)
    expected = {**config, "groups": becomes}
    assert moved(config, Persistent(), work, task) == expected
    assert [c.config for c in borrowed(task, [Persistent()], log)] == [expected]
    here = find(task, [Persistent()], log)  # near enough, or the default for this batch
    assert (here.config == expected) != here.provenance.startswith(f"untuned default of persistent: for B={batch} ")


def test_a_configuration_that_does_not_fit_with_as_many_rows_stays_as_it_is():
    config = SHIPPED["persistent"] | {"groups": 2, "warps": 5, "gate_warps": 3, "registers": 50, "fences": "products"}
    work = Workload(get("lstm").identity(), 800, 800, 32, 100, "float16")
    task = make_task(get("lstm"), msgspec.structs.replace(work, batch=40), H100)
    assert Persistent().check(task, {**config, "groups": 3}) is not None
    assert find(task, [Persistent()], shipped(config, work)).config == config


accepted = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-2, 64), st.booleans(),
                     st.sampled_from(["l2", "cluster", "rare", "exact"]), st.text("ab8é", min_size=1, max_size=4))


@settings(max_examples=50)
@given(st.sampled_from(sorted(SHIPPED)), st.data())
def test_no_value_that_the_format_accepts_stops_a_look_up_or_a_search(name, data):
    """In any knob of a record of another batch, or of another hidden size."""
    knob, schedule = data.draw(st.sampled_from(sorted(SHIPPED[name]))), all_schedules()[name]
    config, hidden = SHIPPED[name] | {knob: data.draw(accepted)}, data.draw(st.sampled_from([256, 264]))
    log = shipped(config, Workload("lstm", hidden, hidden, data.draw(st.sampled_from([20, 32])), 100, "float16"), name)
    task = make_task(get("lstm"), Workload("lstm", 256, 256, 20, 100, "float16"), H100)
    assert unfit(schedule, task, choose(task, name, None, log).config) is None
    for one in (*seeds(task, [schedule], log), *borrowed(task, [schedule], log)):
        schedule.check(task, one.config)
    warm(CostModel(), get("lstm"), task, [schedule], log)


def test_a_time_that_no_step_can_take_is_not_believed_and_that_is_said():
    """A line that claims 1e-9 µs, and to be of a final comparison, was the best of all; or one beyond what cores do."""
    large = {"workload": Workload("lstm", 512, 512, 64, 10)}
    for task, of, right, wrong in ((TASK, {}, 10.0, 1e-9), (make(hidden=512, batch=64), large, 900.0, 2.0)):
        result = found(trial(right, a=2, **of), trial(wrong, a=3, stage="final", **of), task=task)
        assert result.config["a"] == 2 and result.provenance.endswith(f"; 1 record skipped ({FANCIFUL})")
        assert found(trial(wrong, a=3, **of), task=task).line is None


@pytest.mark.parametrize(("us", "batch", "believed"), [(100.0, 4, True), (21.0, 4, True), (19.0, 4, False),
                                                       (6.0, 1, True), (4.0, 1, False)])
def test_a_time_far_below_the_schedules_estimate_is_not_believed(us, batch, believed, monkeypatch):
    monkeypatch.setattr(Fake, "features", lambda self, task, config: {"estimate": 100_000.0})  # ns, of B = 4
    monkeypatch.setattr(Fake, "rebatched", lambda self, config, batch, task: config)
    result = found(trial(us, a=3, batch=batch, stage="final"))
    assert (result.line is not None) is believed
    assert (f"1 record skipped ({FANCIFUL})" in result.provenance) is not believed


def test_no_record_that_ships_is_faster_than_a_device_can_be():
    task = cache(lambda cell, *sizes, **of: make_task(get(cell), Workload(cell, *sizes, **of), H100))
    for one in read_all([shipped_folder()]).trials():
        work = one.workload
        assert possible(one, task(work.cell, work.hidden, work.input, entry=work.entry))
