"""Look-up: the record that applies to a task, and why, by the rules of docs/TUNING_LOG_FORMAT.md.

Of the records nearest by device, batch, input and sequence length the configuration that is expected to be fastest is
used, in the form that the schedule gives it for the task's batch, at most a factor ``REACH`` away; else the default. On
a GPU a configuration of another batch that should take ``OTHER_BATCH`` times as long as the default is not used."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ecornn.device import Device
from ecornn.schedules.base import AnySchedule, Config, Knob, Task, Value
from ecornn.tune.log import Log, TrialLine, is_trial
from ecornn.tune.record import LEAST, Trial, proven
from ecornn.tune.space import Candidate
from ecornn.workload import FEW, Workload

STALE = 1.1  # of the persistent schedule's first two revisions: between 0.97 and 1.09
ONCE = 1.03  # the fastest of many times measured once is faster than it really is
MISSED = 1.25  # slower by this than a configuration of the same records that does not fit: no guide to the task
REACH = 4.0
OTHER_BATCH = 1.1  # benchmarks/notes/records.md
YOUNG = 1.1  # what the estimate of a schedule that is younger than a record may be off
FANCIFUL = "faster than this device can be"
SKIPPED = re.compile(r"; \d+ records? skipped \([^)]*\)")  # as said() writes them
HERE, SMALLER, ELSEWHERE = range(3)  # tiers of devices

# Bounds far below what was ever measured: operations a nanosecond of a multiprocessor, or of a core (the fastest of the
# records that ship takes 13 times as long), and a share of the schedule's estimate (they take 0.45 of it at least).
RATES = {"cuda": 50_000.0, "llvm": 3_000.0}
SHARE = 0.2

DEFAULTS = 64  # of tasks and schedules that are kept
_defaults: dict[tuple[str, int], tuple[Task, Config]] = {}

Distance = tuple[int, float, float, int]  # tier, octaves of batch (a smaller one counts a little more), of I, of T


@dataclass(frozen=True)
class Found:
    """A schedule and its configuration; ``provenance`` says in one line where they come from."""

    schedule: AnySchedule
    config: Config
    provenance: str
    line: TrialLine | None = None  # None: no record applies


@dataclass(frozen=True)
class Evidence:
    """A record of a configuration that could be used, and the µs per step to expect of it."""

    line: TrialLine
    expected: float
    stale: bool

    @property
    def trial(self) -> Trial:
        return self.line.record

    @property
    def order(self) -> tuple[float, str, str, int, str]:
        """A key for sorting: expected time, then what makes the choice independent of the order of reading."""
        return self.expected, self.trial.time, self.trial.run, self.trial.index, str(sorted(self.trial.config.items()))


def find(task: Task, schedules: Sequence[AnySchedule], log: Log) -> Found:
    """The configuration of the best record for the task, else the best default. ``log`` has the user's lines first."""
    by_name = {s.name: s for s in schedules}
    folders: dict[object, int] = {}  # folder -> its place in the order of reading
    groups: dict[Distance, list[TrialLine]] = {}
    ignored: Counter[str] = Counter()  # reasons, in the order of their first record
    for line in filter(is_trial, log.lines):
        distance = how_far(line.record, task.workload, task.device)
        if distance is None:
            continue
        folders.setdefault(line.path.parent, len(folders))
        if not possible(line.record, task):
            ignored[FANCIFUL] += 1
        else:
            now = up_to_date(line.record, by_name.get(line.record.schedule), task)
            groups.setdefault(distance, []).append(replace(line, record=now))
    for distance in sorted(groups):
        lines = [replace(line, record=rebatched(line.record, by_name, task)) for line in groups[distance]]
        timed = {line.record.schedule for line in lines if proven(line.record)}
        evidence, missed = collect(lines, by_name, task, ignored)
        while evidence and not credible((best := min(evidence, key=lambda one: one.order)).trial, task,
                                        by_name[best.trial.schedule]):
            evidence.remove(best)
            ignored[FANCIFUL] += 1
        if evidence and min(one.expected for one in evidence) > MISSED * missed:
            ignored["slower than others, whose configurations do not fit here"] += len(evidence)
            continue
        first_of = [[one for one in evidence if folders[one.line.path.parent] == place] for place in folders.values()]
        for rivals in (*(of for of in first_of if not all(one.stale for one in of)), evidence):
            if rivals:
                best = min(rivals, key=lambda one: one.order)
                instead = _by_estimate(best, timed, schedules, task)
                if instead is None and distance[1] >= 1 and task.device.kind == "cuda":
                    instead = _for_this_batch(best, schedules, task)
                if instead is not None:
                    return replace(instead, provenance=instead.provenance + said(ignored))
                fresh = min((one for one in rivals if not one.stale), key=lambda one: one.order, default=None)
                return Found(by_name[best.trial.schedule], best.trial.config,
                             describe(best, fresh, distance, task, by_name) + said(ignored), best.line)
    first = min(schedules, key=lambda s: s.rank(task))
    why = "no usable record" if ignored else "no record applies" + beyond(task, log)
    return Found(first, first.default(task), f"untuned default of {first.name}: {why}" + said(ignored))


def _by_estimate(best: Evidence, tried: Collection[str], schedules: Sequence[AnySchedule], task: Task) -> Found | None:
    """The default of a schedule that the ``best`` record cannot know, if its rank is better: one for a few steps, where
    the record is of longer calls, or of a later generation than the record's and not ``tried`` then."""
    steps, of = task.workload.seq, best.trial.workload.seq
    rivals = [s for s in schedules if s.name != best.trial.schedule and (
        (steps <= FEW < of and s.few_steps) or (best.trial.generation < s.generation(task) and s.name not in tried))]
    first = min(rivals, key=lambda s: s.rank(task), default=None)
    if first is None or first.rank(task) * (1.0 if first.few_steps else YOUNG) + first.beside(task) / of >= (
            best.expected * 1000):
        return None
    why = (f"for T={steps} it is expected to be faster than {best.trial.schedule}, whose record {best.line.place} "
           f"was measured with T={of}" if first.few_steps else
           f"it is newer than record {best.line.place} of {best.trial.time}, and it is expected to be faster than "
           f"{best.trial.schedule}, which takes {best.expected:g} µs per step by that record")
    return Found(first, first.default(task), f"untuned default of {first.name}: {why}")


def _for_this_batch(best: Evidence, schedules: Sequence[AnySchedule], task: Task) -> Found | None:
    """The default, if estimates say that the configuration of the ``best`` record, of another batch, is slower here."""
    first = min(schedules, key=lambda s: s.rank(task))
    config, name, own = first.default(task), best.trial.schedule, first.rank(task)
    (schedule,) = (s for s in schedules if s.name == name)
    expected = schedule.features(task, schedule.plan(task, best.trial.config)).get("estimate")
    if own == math.inf:
        own = first.features(task, first.plan(task, config)).get("estimate", math.inf)
    if expected is None or expected < OTHER_BATCH * own:
        return None
    return Found(first, config, f"untuned default of {first.name}: for B={task.workload.batch} it is expected to be "
                 f"faster than the configuration of {name} in record {best.line.place}, which is for "
                 f"B={best.trial.workload.batch}")


def up_to_date(trial: Trial, schedule: AnySchedule | None, task: Task) -> Trial:
    """A trial with the knobs that its schedule has got since then, at the values that say what was done before."""
    if schedule is None:
        return trial
    new = {k.name: k.before for k in schedule.knobs(task) if k.before is not None and k.name not in trial.config}
    return structs.replace(trial, config={**trial.config, **new}) if new else trial


def rebatched(trial: Trial, by_name: Mapping[str, AnySchedule], task: Task) -> Trial:
    """A trial of another batch with the configuration that its own becomes for the task's, if that fits."""
    schedule = by_name.get(trial.schedule)
    if schedule is None or trial.workload.batch == task.workload.batch:
        return trial
    config = moved(trial.config, schedule, trial.workload, task)
    return trial if unfit(schedule, task, config) else structs.replace(trial, config=config)


def moved(config: Config, schedule: AnySchedule, of: Workload, task: Task) -> Config:
    """The configuration for the task's batch that comes of one for the workload ``of``; the same one where it has a
    value that the schedule does not have there: a record may hold any."""
    if of.batch == task.workload.batch or not listed(config, schedule.knobs(replace(task, workload=of))):
        return config
    return schedule.rebatched(config, of.batch, task)


def possible(trial: Trial, task: Task) -> bool:
    """False where no core can be so fast; ``task`` has the cell and the hidden size of the trial."""
    work, graph, times = trial.workload, task.graph, trial.times
    products = work.hidden * sum(len(phase.products) for phase in graph.phases)
    operations = 2 * work.batch * work.hidden * (products + work.input * len(graph.hoisted_products))
    rate = RATES.get(trial.device.kind, max(RATES.values())) * max(1, trial.device.cores)
    return times is None or times.median >= max(LEAST, operations / rate / 1000)


def credible(trial: Trial, task: Task, schedule: AnySchedule) -> bool:
    """False for a trial that is far faster than the schedule's estimate; its configuration fits the task's batch."""
    work = trial.workload
    if trial.times is None or trial.device.arch != task.device.arch:
        return True
    asked = replace(task, workload=structs.replace(task.workload, seq=work.seq))
    expected = schedule.features(asked, schedule.plan(asked, trial.config)).get("estimate", 0.0)
    return trial.times.median * 1000 >= SHARE * expected * min(1.0, work.batch / task.workload.batch)


def how_far(trial: Trial, workload: Workload, device: Device) -> Distance | None:
    """The distance of a trial from a task, less is nearer; None where it says nothing of it."""
    of, on = trial.workload, trial.device
    if (on.kind != device.kind or of.cell != workload.cell or of.hidden != workload.hidden  # most are told by these
            or structs.replace(of, batch=workload.batch, input=workload.input, seq=workload.seq) != workload
            or of.input < workload.input):
        return None
    octaves = math.log2(of.batch / workload.batch)
    if abs(octaves) > math.log2(REACH):
        return None
    here = (on.arch, on.name, on.cores) == (device.arch, device.name, device.cores)
    tier = HERE if here else SMALLER if within(on, device) else ELSEWHERE
    # Of two that are equally near the larger one is better: its configuration has room for the rows.
    batch = octaves if octaves >= 0 else -octaves + 1e-6
    return tier, batch, math.log2(of.input / workload.input), int(abs(math.log2(of.seq / workload.seq)))


def beyond(task: Task, log: Log) -> str:
    """The end of a line that says how the nearest records of this cell and H, which are too far, differ."""
    work = task.workload
    differences: dict[str, int] = {}  # differences in words -> how many
    for trial in log.trials():
        of = trial.workload
        if trial.times is None or trial.device.kind != task.device.kind:
            continue
        if (of.cell, of.hidden, of.entry) == (work.cell, work.hidden, work.entry):
            words = [of.dtype] if of.dtype != work.dtype else []
            words += [f"weights in {of.weights or of.dtype}"] if of.weights != work.weights else []
            words += [of.precision or "exact products"] if of.precision != work.precision else []
            words += [f"B={of.batch}"] if abs(math.log2(of.batch / work.batch)) > math.log2(REACH) else []
            words += [f"I={of.input}"] if of.input < work.input else []
            differences[" ".join(words)] = len(words)
    nearest = sorted(words for words, count in differences.items() if count == min(differences.values()))
    return f"; the nearest are for {', '.join(nearest[:3])}{' and more' * (len(nearest) > 3)}" if nearest else ""


def within(on: Device, device: Device) -> bool:
    """True where ``device``, of the same architecture, has as many cores and as much memory on the chip as ``on``."""
    return on.arch == device.arch and all(
        getattr(on, n) <= getattr(device, n) for n in ("cores", "shared", "registers"))


def collect(lines: Sequence[TrialLine], by_name: Mapping[str, AnySchedule], task: Task,
            ignored: Counter[str]) -> tuple[list[Evidence], float]:
    """The best evidence for each configuration that can be used, and the least time to expect, in µs per step, of those
    of the same schedules that do not fit. Counts in ``ignored`` what is left out, by reason."""
    tried: dict[Candidate, list[TrialLine]] = {}
    for line in lines:
        tried.setdefault(Candidate.of(line.record.schedule, line.record.config), []).append(line)
    usable, drifts, missed = [], drift(lines), math.inf
    for candidate, of in tried.items():
        timed = [line for line in of if proven(line.record)]
        if wrong := sum(line.record.times is not None for line in of) - len(timed):
            ignored["with a wrong output"] += wrong
        if not timed:
            continue
        schedule = by_name.get(candidate.schedule)
        reason = unfit(schedule, task, candidate.config)
        if reason is None and schedule is not None:
            one = best_evidence(timed, schedule.revision, drifts)
            if not one.stale or not any(line.record.revision == schedule.revision for line in of if line not in timed):
                usable.append(one)
                continue
            reason = "stale, and failing since then"
        elif schedule is not None:
            missed = min(missed, best_evidence(timed, schedule.revision, drifts).expected)
        ignored[str(reason)] += len(timed)
    return usable, missed


def drift(lines: Sequence[TrialLine]) -> dict[str, tuple[float, float]]:
    """By run, the factor, at least 1, by which every finalist was slower in the final comparison than in the search
    (one alone may have been lucky: that says nothing of others), and the fastest finalist's time, in µs per step."""
    times: dict[str, dict[Candidate, dict[str, float]]] = {}
    for line in lines:
        trial = line.record
        if trial.times is not None and proven(trial):
            candidate = Candidate.of(trial.schedule, trial.config)
            times.setdefault(trial.run, {}).setdefault(candidate, {})[trial.stage] = trial.times.median
    drifts = {}
    for run, of in times.items():
        ratios = [both["final"] / both["search"] for both in of.values() if len(both) == 2]
        slower = max(1.0, min(ratios)) if len(ratios) > 1 else 1.0
        drifts[run] = slower, min((both["final"] for both in of.values() if "final" in both), default=0.0)
    return drifts


def best_evidence(lines: Sequence[TrialLine], revision: int | None,
                  drifts: Mapping[str, tuple[float, float]]) -> Evidence:
    """The evidence of one of several times of a configuration, whose schedule is at ``revision``: a current one before
    a stale one, a final one before one measured once, then the latest. ``drifts``: those of :func:`drift`."""
    ranked = []
    for line in lines:
        trial = line.record
        assert trial.times is not None
        stale, once = trial.revision != revision, trial.stage != "final"
        expected = trial.times.median
        if once:
            slower, finalist = drifts.get(trial.run, (1.0, 0.0))
            expected = ONCE * max(expected * slower, finalist)
        one = Evidence(line, expected * (STALE if stale else 1.0), stale)
        ranked.append((not stale, not once, trial.time, -one.expected, trial.run, -trial.index, one))
    return max(ranked, key=lambda r: r[:-1])[-1]


def unfit(schedule: AnySchedule | None, task: Task, config: Config) -> str | None:
    """The reason why a configuration cannot be used for the task; None: it can."""
    if schedule is None:
        return "with schedules that do not serve this layer"
    knobs = schedule.knobs(task)
    if set(config) != {knob.name for knob in knobs} or not (
            listed(config, knobs) or typed(config) == typed(default_of(schedule, task))):
        return "with knobs or values that the schedule no longer has"
    return "with configurations that do not fit here" if schedule.check(task, config) else None


def listed(config: Config, knobs: Sequence[Knob]) -> bool:
    """True for a configuration of these knobs and no other, with values of theirs: ``check`` takes no others."""
    chosen = typed(config)
    return len(config) == len(knobs) and all(
        any(chosen.get(knob.name) == (type(v), v) for v in knob.values) for knob in knobs)


def default_of(schedule: AnySchedule, task: Task) -> Config:
    """The default for a task; those of the latest tasks are kept, since a default may be a search of its own."""
    key = schedule.name, id(task)
    if key not in _defaults:
        if len(_defaults) >= DEFAULTS:
            _defaults.clear()
        _defaults[key] = task, schedule.default(task)  # with the task: after its end another has its number
    return _defaults[key][1]


def typed(config: Config) -> dict[str, tuple[type, Value]]:
    """A configuration with the types of its values: True is not 1."""
    return {name: (type(value), value) for name, value in config.items()}


def describe(one: Evidence, fresh: Evidence | None, distance: Distance, task: Task,
             by_name: dict[str, AnySchedule]) -> str:
    """One line on the record that was chosen; ``fresh``: the best that is not stale."""
    trial = one.trial
    assert trial.times is not None
    device = ("this device", f"{trial.device.name} (same architecture)",
              f"measured on {trial.device.name}, `ecornn tune` may find a faster one here")[distance[0]]
    batch = "same batch" if trial.workload.batch == task.workload.batch else f"batch {trial.workload.batch}"
    width = "" if distance[2] == 0 else f", input {trial.workload.input}"
    length = "" if distance[3] == 0 else f", T={trial.workload.seq}"
    text = (f"record {one.line.place} of {trial.time}: {device}, {batch}{width}{length}, "
            f"{trial.times.median:g} µs per step")
    if one.stale:
        text += (f" with revision {trial.revision} of {trial.schedule}, which is now at "
                 f"{by_name[trial.schedule].revision}: the configuration still works, but its time may differ")
        if fresh is not None and fresh.trial.times is not None:
            text += (f"; it is expected to be faster than {fresh.trial.schedule}, which takes "
                     f"{fresh.trial.times.median:g} ({fresh.line.place})")
    return text


def said(ignored: Mapping[str, int]) -> str:
    return "".join(f"; {n} record{'s' * (n > 1)} skipped ({reason})" for reason, n in ignored.items())
