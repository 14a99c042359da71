"""Records that do not apply teach: seeds to re-check, and samples for the model; of cells of the same products, too."""

import random
import statistics
from pathlib import Path

import msgspec
import pytest
import step_cells
from smaller_matrices import BlockRNN
from test_tune_lookup import SCHEDULE, log_of, trial
from test_tune_oracle import Scaled
from test_tune_search import LARGE, spend
from tune_fakes import DEVICE, Fake, cost, make

from ecornn.cells import get
from ecornn.schedules import all_schedules
from ecornn.schedules.base import Task
from ecornn.targets import resolve
from ecornn.task import make_task
from ecornn.tune.choose import choose
from ecornn.tune.log import Journal, Line, Log
from ecornn.tune.lookup import find
from ecornn.tune.record import Times, Trial
from ecornn.tune.search import CostModel, Search
from ecornn.tune.space import ConfigSpace
from ecornn.tune.transfer import BROAD, SEEDS, borrowed, distance, lent, seeds, warm
from ecornn.workload import Workload

TASK = make(hidden=8, batch=4)
SCHEDULES = [Fake()]


def test_seeds_are_the_fastest_of_this_workload_wherever_they_were_measured():
    other = msgspec.structs.replace(DEVICE, name="Third CPU", arch="skylake", cores=64)
    found = seeds(TASK, SCHEDULES, log_of(
        trial(3.0, a=1), trial(1.0, a=2, device=other), trial(2.0, a=3, revision=1), trial(0.1, a=4, batch=8),
        trial(0.1, a=5, schedule="gone"), trial(a=6, times=None, error="run: wrong output")))
    assert [c.config["a"] for c in found] == [3, 1, 2]  # another GPU's last; another batch lends its own, see below
    many = log_of(*(trial(9.0 - b, config={"a": 1, "b": b, "behaviour": "ok"}) for b in range(8)))
    assert [c.config["b"] for c in seeds(TASK, SCHEDULES, many)] == [7, 6, 5, 4] and SEEDS == 4


def test_the_model_learns_from_neighbours_stale_runs_and_other_devices_but_not_twice():
    other = msgspec.structs.replace(DEVICE, name="Other CPU")
    log = log_of(trial(1.0, a=1, run="old-1", revision=2), trial(2.0, a=2, run="there-1", device=other),
                 trial(3.0, a=3, run="wide-1", workload=Workload("lstm", 16, 16, 4, 10)), trial(4.0, a=4, run="mine-1"),
                 trial(5.0, a=5, run="arch-1", device=msgspec.structs.replace(DEVICE, arch="skylake")),
                 trial(6.0, a=99, run="old-1"), trial(7.0, a=6, run="cell-1", workload=Workload("gru", 8, 8, 4, 10)))
    model, mine = CostModel(), Journal(log.lines[0].path, "mine-1")
    assert warm(model, get("lstm"), TASK, SCHEDULES, log, mine) == len(model) == 3
    assert sorted(us for times in model.times.values() for us in times) == [1.0, 2.0, 3.0]
    assert len(model.rows) == 3  # times are compared within a run
    # someone else's log may have a run of that name: it searched the same
    assert warm(CostModel(), get("lstm"), TASK, SCHEDULES, log, Journal(Path("elsewhere.jsonl"), "mine-1")) == 4


def test_a_default_is_searched_once_and_none_for_what_a_schedule_does_not_serve():
    asked = []
    class Counting(Fake):
        def refuses(self, task):
            return "too large" if task.workload.hidden > 100 else None

        def default(self, task):
            asked.append(task.workload.hidden)
            assert self.serves(task) is None
            return super().default(task)

    large = Workload("lstm", 1000, 1000, 4, 10)
    log = log_of(*(trial(1.0 + n, a=99 + n, run=f"{work.hidden}-1", workload=work)
                   for n in range(20) for work in (large, Workload("lstm", 16, 16, 4, 10))))
    assert warm(CostModel(), get("lstm"), TASK, [Counting()], log) == 0 and asked == [16]


def test_a_schedule_is_asked_whether_it_serves_where_no_trial_of_it_as_it_is_says_so():
    asked = []
    class Asked(Fake):
        def refuses(self, task):
            asked.append(task.workload.hidden)

    log = log_of(*(trial(1.0 + n, a=n, run=f"{hidden}-1", workload=Workload("lstm", hidden, hidden, 4, 10),
                         revision=revision) for n in range(2) for hidden, revision in ((24, 3), (32, 2))))
    assert warm(CostModel(), get("lstm"), TASK, [Asked()], log) == 4 and asked == [32]


def test_a_workload_with_a_known_neighbour_needs_a_quarter_of_the_trials():
    """Best of 24 trials with a neighbour's records against 96 without; five seeds."""
    space = ConfigSpace(make(), [LARGE])
    teacher, neighbour = spend(space, 99, 96), Workload("lstm", 16, 8, 4, 10)
    records = [trial(5 * us, config=c.config, workload=neighbour, run="near-1") for c, us in teacher.tried.items()]
    log = Log([Line(Path("user/log.jsonl"), n, r) for n, r in enumerate(records, 1)])
    warmed, cold = [], []
    for seed in range(5):
        model = CostModel(seed)
        assert warm(model, get("lstm"), TASK, [LARGE], log) == 96
        knows, guesses = (statistics.median(cost(c.config) for c in Search(space, known, seed).ask(16))
                          for known in (model, CostModel(seed)))
        assert knows < guesses / 2, "from the first batch on"
        search = Search(space, model, seed)
        while len(search.tried) < 24:
            for candidate in search.ask(min(8, 24 - len(search.tried))):
                search.tell(candidate, cost(candidate.config))
        warmed.append(min(us for us in search.tried.values() if us is not None))
        cold.append(min(us for us in spend(space, seed, 96).tried.values() if us is not None))
    assert statistics.median(warmed) <= statistics.median(cold) * 1.05 and Times.of(warmed).median < 2.0


def test_other_cells_teach_where_slow_configurations_were_measured_too():
    """Runs of other cells and data types that saw a good part of a space; a user's cell is not there to ask."""
    known = [(c.config, cost(c.config)) for c in ConfigSpace(make(), [LARGE]).sample(random.Random(0), 3 * BROAD)]
    def log(workload: Workload, count: int) -> Log:
        return log_of(*(trial(us, config=config, workload=workload, run="other-1") for config, us in known[:count]))
    gru, half = Workload("gru", 8, 8, 4, 10), Workload("lstm", 8, 8, 4, 10, "float16")
    for workload, count, expected in ((gru, 2 * BROAD, BROAD), (half, BROAD, BROAD), (gru, BROAD - 1, 0),
                                      (Workload("mine@0123456789ab", 8, 8, 4, 10), 2 * BROAD, 0)):
        assert warm(CostModel(), get("lstm"), TASK, [LARGE], log(workload, count)) == expected
    model = CostModel()
    warm(model, get("lstm"), TASK, [LARGE], log(gru, 3 * BROAD))
    (times,) = model.times.values()
    assert max(times) > 1.2 * statistics.median(times)  # of the whole run, not of its end


def test_the_nearest_workloads_lend_their_fastest():
    near, far = Workload("lstm", 16, 16, 4, 10), Workload("lstm", 64, 64, 4, 10)
    log = log_of(trial(9.0, a=1, run="mine-1"), trial(3.0, a=2, run="far-1", workload=far),
                 trial(5.0, a=3, run="near-1", workload=near), trial(4.9, a=4, run="near-1", workload=near),
                 trial(5.7, a=5, run="near-1", workload=near), trial(4.8, a=99, run="near-1", workload=near),
                 trial(2.0, a=7, run="cell-1", workload=Workload("gru", 8, 8, 4, 10)), trial(0.1, a=0, batch=8))
    def values(log: Log) -> list[int]:
        return [dict(c.knobs)["a"] for c in borrowed(TASK, SCHEDULES, log)]
    assert values(log) == [1, 0, 2, 4, 3]  # 99, which does not fit, was the best of its layer; 5 was slower by 1.19
    assert values(Log([line for line in log.lines if line.record.config["a"] != 99])) == [1, 0, 4, 2, 3]


def test_twins_are_near_and_other_layers_are_not():
    """Another 16-bit type, and a cell that multiplies alike; not another width, other cells, or rounded weights."""
    here = Workload("rnn_tanh", 64, 64, 8, 10, "float16")
    def far(**change: object) -> float:
        return distance(msgspec.structs.replace(here, **change), here)
    assert 0 == far() == far(seq=99) < far(dtype="bfloat16") == far(cell="rnn_relu") < far(batch=16)
    assert far(batch=16) < far(hidden=128, input=128)
    assert all(far(**change) == float("inf") for change in (
        {"dtype": "float32"}, {"cell": "gru"}, {"cell": "mine@0123456789ab"}, {"weights": "int8"}))
    log = log_of(trial(1.0, a=3, workload=msgspec.structs.replace(TASK.workload, dtype="bfloat16")))
    half = make_task(get("lstm"), msgspec.structs.replace(TASK.workload, dtype="float16"), DEVICE)
    assert [c.config["a"] for c in borrowed(half, SCHEDULES, log)] == [3] and not borrowed(TASK, SCHEDULES, log)


def task_of(cell: str, hidden: int = 8, batch: int = 4):
    found = get(cell)
    return make_task(found, Workload(found.identity(), hidden, hidden, batch, 10), DEVICE)


def of(cell: str, us: float = 1.0, **more):
    return trial(us, workload=Workload(cell, 8, 8, 4, 10), **more)


@pytest.mark.parametrize(("cell", "lender"), [
    ("rnn_relu(clip=3)", "rnn_relu"), ("rnn_tanh(zoneout=0.1)", "rnn_tanh"), ("lstm(peepholes)", "lstm"),
    ("gru(clip=3)", "gru"), ("lstm(coupled)", None), ("lstm(layer_norm)", None), ("lstm(projection)", None),
    ("slstm", None), ("slstm(heads=2)", None), ("gru_reset_before", None)])
def test_a_cell_of_the_same_products_lends_its_records(cell: str, lender: str | None):
    task = task_of(cell)
    found = lent(task, log_of(*(of(name, a=1) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", *(
        ["slstm"] if "heads" in cell else [])))))
    if lender is None:
        assert found is None
    else:
        assert found is not None and found[0] == lender and [t.workload for t in found[1].trials()] == [task.workload]


def test_its_own_records_go_before_and_other_sizes_say_nothing():
    task = task_of("lstm(peepholes)")
    assert lent(task, log_of(of("lstm", a=1), of("lstm(peepholes)", 9.0, a=2))) is None
    assert lent(task_of("lstm(peepholes)", hidden=16), log_of(of("lstm", a=1))) is None and lent(task, Log()) is None
    failed = of("lstm(peepholes)", a=2, times=None, error="build: no")
    assert lent(task, log_of(of("lstm", a=1), failed)) is not None, "a failure is nothing to use"


def test_the_line_says_whose_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ecornn.tune.choose.serving", lambda task, schedule: [Fake()])
    chosen = choose(task_of("lstm(peepholes)"), None, None, log_of(of("lstm", 2.0, a=1), of("lstm", 1.0, a=3)))
    assert chosen.config["a"] == 3 and chosen.provenance.endswith("record is of lstm, which has the same products")
    unfit = choose(task_of("lstm(peepholes)"), None, None, log_of(of("lstm", a=99)))
    assert unfit.line is None and "no usable record" in unfit.provenance


def test_a_cell_of_the_users_own_takes_what_ships():
    works = ((cell, Workload(cell.identity(), 1024, 1024, 16, 256, "float16")) for cell in (Scaled(), get("rnn_tanh")))
    chosen, best = (choose(make_task(cell, work, resolve("sm_90a")), None, None) for cell, work in works)
    assert (chosen.schedule.name, chosen.config) == (best.schedule.name, best.config)
    assert "of rnn_tanh" in chosen.provenance


class Young(Fake):
    def generation(self, task: Task) -> int:
        return 2

    def expected(self, task: Task) -> float:
        return 4000.0

    def beside(self, task: Task) -> float:
        return 5000.0  # of a sequence of ten steps


def test_a_schedule_says_its_latest_generation():
    """Records of today state the latest of all schedules, so a generation above it would never count as known."""
    sizes = (("lstm", 64, 64), ("lstm", 256, 64), ("lstm", 512, 32), ("gru", 3072, 64), ("lstm", 2560, 64))
    tasks = [make_task(get(cell), Workload(cell, hidden, hidden, batch, 100, "float16"), resolve("sm_90a"))
             for cell, hidden, batch in sizes]
    heads = BlockRNN(4)
    tasks.append(make_task(heads, Workload(heads.identity(), 64, 64, 64, 100, "float16"), resolve("sm_90a")))
    tasks.append(make_task(step_cells.CELLS["leaky"], Workload("leaky", 64, 64, 2, 100, "float16"), resolve("sm_90a")))
    for schedule in all_schedules().values():
        if schedule.kind == "cuda":
            found = {schedule.generation(task) for task in tasks if schedule.serves(task) is None}
            assert max(found, default=0) == schedule.latest, (schedule.name, found)


def test_a_schedule_that_is_younger_than_the_record_competes_by_what_it_expects():
    young = Young(name="young")
    def chosen(*trials: Trial):
        return find(TASK, [SCHEDULE, young], log_of(*trials))
    result = chosen(trial(4.9, a=2))
    assert result.schedule is young and result.config == young.default(TASK)
    assert "newer than record log.jsonl:1 of 2026-01-31T12:00:00Z" in result.provenance
    assert chosen(trial(4.6, a=2)).config["a"] == 2, "with a doubt, and beside its steps"
    assert chosen(trial(4.9, a=2, generation=2)).config["a"] == 2, "it was there"
    tried = trial(5.0, a=3, schedule="young", generation=2, time="2026-02-02T12:00:00Z")
    assert chosen(trial(4.9, a=2), tried).config["a"] == 2, "it was tried"
    wrong = trial(schedule="young", a=3, times=None, check=None, error="run: wrong")
    assert chosen(trial(4.9, a=2), wrong).schedule is young, "what failed says nothing of its default"
