"""The code of a configuration, and the lines of it that each knob makes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ecornn.report.layers import asked
from ecornn.schedules.base import Config, Knob, Schedule, Task, Value
from ecornn.tune.record import Trial

MOST = 3000  # lines that are compared


@dataclass(frozen=True)
class MarkedCode:
    """The function of a program that knobs change most: its lines, each with the knobs that would change it, and the
    other values that these were compared with; ``alone``: knobs without another value that goes with the rest."""

    name: str
    lines: list[tuple[str, list[str]]]
    others: dict[str, Value]
    alone: list[str]


def marked(trial: Trial, task: Task | None) -> MarkedCode | None:
    """The code of a trial; None where its schedule has changed since, or its code is too long to compare."""
    return asked(trial, task, _marked)


def _marked(schedule: Schedule, task: Task, config: Config) -> MarkedCode | None:
    functions = _functions(schedule, task, config)
    if sum(map(len, functions.values())) > MOST:
        return None
    knobs: dict[str, list[list[str]]] = {name: [[] for _ in lines] for name, lines in functions.items()}
    others: dict[str, Value] = {}
    alone = []
    for knob in schedule.knobs(task):
        other = _other(schedule, task, config, knob)
        if other is None:
            alone.append(knob.name)
            continue
        others[knob.name] = other
        changed = _functions(schedule, task, {**config, knob.name: other})
        for name, lines in functions.items():
            for number in _made(lines, changed.get(name, [])):
                knobs[name][number].append(knob.name)
    name = max(functions, key=lambda one: sum(map(bool, knobs[one])))
    return MarkedCode(name, list(zip(functions[name], knobs[name], strict=True)), others, alone)


def _functions(schedule: Schedule, task: Task, config: Config) -> Mapping[str, list[str]]:
    """TVM's text of each function."""
    program = schedule.program(task, schedule.plan(task, config))
    return {name: function.script().splitlines() for name, function in program.functions.items()}


def _other(schedule: Schedule, task: Task, config: Config, knob: Knob) -> Value | None:
    """The nearest other value that is possible with the rest."""
    values = list(knob.values)
    here = values.index(config[knob.name]) if config.get(knob.name) in values else 0
    for value in sorted(values, key=lambda one: abs(values.index(one) - here)):
        if value != config.get(knob.name) and schedule.check(task, {**config, knob.name: value}) is None:
            return value
    return None


def _made(lines: list[str], other: list[str]) -> list[int]:
    """The numbers of lines that the other code has not, in its order."""
    compared = difflib.SequenceMatcher(None, [line.strip() for line in other], [line.strip() for line in lines],
                                       autojunk=False)
    return [number for what, _, _, first, last in compared.get_opcodes() if what in ("replace", "insert")
            for number in range(first, last)]
