"""A schedule: a template with declared knobs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import getattr_static
from itertools import chain, zip_longest
from itertools import product as combinations
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import structs

from ecornn.analysis import StepGraph
from ecornn.analysis.heads import most_heads
from ecornn.device import Device
from ecornn.program import Buffer, Call, Concurrent, Launch, Leaf, Program, launches, mapped
from ecornn.workload import ALONE, Traversal, Workload

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

Value = int | str | bool
Config = Mapping[str, Value]  # knob -> value


@dataclass(frozen=True)
class Knob:
    """One choice of a schedule: its values and, in one line, what they trade. ``before``: what it did before it had the
    knob, with which older records count; None: it always had it."""

    name: str
    values: tuple[Value, ...]
    trades: str
    before: Value | None = None


class Knobs:
    """A configuration with a type for each knob, which a subclass declares as ``name: int = knob(...)``. A knob is
    looked up when it is first read: a search learns from those that ``check`` reads which others need not be tried."""

    def __init__(self, values: Config) -> None:
        self.values = values

    @classmethod
    def offered(cls, choices: Mapping[str, tuple[Value, ...]]) -> tuple[Knob, ...]:
        declared = {name: getattr_static(cls, name) for name in choices}
        return tuple(Knob(name, choices[name], one.trades, one.before) for name, one in declared.items())


class _Declared:
    def __init__(self, trades: str, before: Value | None, absent: Value | None) -> None:
        self.trades, self.before, self.absent = trades, before, absent

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, knobs: Knobs, owner: type) -> Value:
        value = knobs.values[self.name] if self.absent is None else knobs.values.get(self.name, self.absent)
        knobs.__dict__[self.name] = value  # where Python looks before it asks this descriptor
        return value


def knob(trades: str, *, before: Value | None = None, absent: Value | None = None) -> Any:
    """Declares a knob of a :class:`Knobs`; ``trades`` and ``before`` as of a :class:`Knob`; ``absent``: the value for a
    task that does not offer it."""
    return _Declared(trades, before, absent)


@dataclass(frozen=True)
class After:
    """A pass over all steps at once that follows a sequence: its graph, and where its outputs lie in y."""

    graph: StepGraph
    traversal: Traversal


@dataclass(frozen=True)
class Task:
    """The input of a schedule: one sequence, and how it sits in the layer around it. ``after``: a pass over all steps,
    by others, of what the sequence writes, if that is not y. ``row``: values from one row of an adjoint's ``outputs``
    to the next, which may be more than the outputs have; 0: as many."""

    workload: Workload
    graph: StepGraph
    device: Device
    traversal: Traversal = ALONE
    after: After | None = None
    row: int = 0

    @property
    def own_input(self) -> int:
        """The I of x itself; rows of x have the workload's, which counts the cell's inputs, too."""
        return self.graph.own_input(self.workload.input, self.workload.hidden)


@dataclass(frozen=True)
class Cut:
    """How a persistent layer lies on a GPU, a block on each multiprocessor.

    ``groups`` of ``blocks`` blocks exchange state ``by`` L2 or in a cluster, each group for ``rows`` rows of the batch
    and one of ``heads`` heads; ``units`` hidden units are those of a block, or of ``parts`` blocks that share K.
    ``workers``: blocks besides, which multiply x. ``held``: bytes of a block's recurrent weights by where they stay."""

    groups: int
    blocks: int
    units: int
    rows: int
    by: str
    held: Mapping[str, int]
    parts: int = 1
    heads: int = 1
    workers: int = 0


@dataclass(frozen=True)
class Component:
    """A piece of a program: functions, the buffers that it needs beside those around it, and its calls in order."""

    functions: Mapping[str, PrimFunc] = field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()
    calls: tuple[Call, ...] = ()


def joined(*components: Component) -> Component:
    return Component({name: function for one in components for name, function in one.functions.items()},
                     tuple(b for one in components for b in one.buffers),
                     tuple(call for one in components for call in one.calls))


def beside(one: Component, other: Component) -> Component:
    """Both components at the same time; neither may write what the other one uses."""
    both = joined(one, other)
    return replace(both, calls=(Concurrent((one.calls, other.calls)),)) if one.calls and other.calls else both


def in_stages(*components: Component) -> Component:
    """All components at the same time, their first launches as one kernel, then the second ones, and so on: what takes
    less than a launch should not have one of its own. None may write what another one uses, but a later launch what an
    earlier one has made."""
    def apart(call: Call) -> tuple[tuple[Call, ...], ...]:
        return call.branches if isinstance(call, Concurrent) and call.one_kernel else ((call,),)

    stages = [tuple(chain.from_iterable(map(apart, filter(None, stage))))
              for stage in zip_longest(*(one.calls for one in components))]
    return replace(joined(*components), calls=tuple(
        stage[0][0] if len(stage) == 1 else Concurrent(stage, one_kernel=True) for stage in stages))


def prepared(before: Component, recurrence: Component) -> Component:
    """``before``, then the ``recurrence``, whose first launch is made with the last one of ``before`` if it prepares
    memory that nobody else uses."""
    both, last, first = joined(before, recurrence), before.calls[-1:], recurrence.calls[:1]
    if len(recurrence.calls) < 2 or not all(isinstance(c, Launch) and not c.cooperative for c in (*last, *first)):
        return both
    used = [{c.names.get(p.name, p.name) for p in both.functions[c.function].params} for c in launches((*last, *first))]
    if len(used) < 2 or used[0] & used[1] - {"T", "B", "vectors"} or any(
            one.cluster > 1 or one.early for one in launches((*last, *first))):
        return both
    pair = in_stages(Component(calls=last), Component(calls=first)).calls
    return replace(both, calls=(*before.calls[:-1], *pair, *recurrence.calls[1:]))


def renamed(call: Call, names: Mapping[str, str]) -> Call:
    """The call with other buffers, by their ``names``."""
    def leaf(one: Leaf) -> Leaf:
        return replace(one, names={**names, **{p: names.get(b, b) for p, b in one.names.items()}})
    return mapped(call, leaf, lambda b: names.get(b, b))


Plan = TypeVar("Plan")


class Schedule(ABC, Generic[Plan]):
    """A schedule template. ``Plan`` is the type that :meth:`plan` returns: how the layer is cut, and what that
    takes; everything but ``check`` is asked of a plan, which is made once."""

    name: str  # the schedule's name in records and on the command line
    # raised when records, which are stale then, no longer say how a configuration does: it has come to mean something
    # else, or its code has become slower. Code that has only become faster keeps it (`ecornn log verify` says how much)
    revision: int
    kind: str  # ``cuda`` or ``llvm``
    weights: tuple[str, ...] = ()  # data types that weights may be rounded to, besides that of the layer
    sequences: bool = False  # whether a column of the batch may work on one sequence after the other
    heads: bool = False  # whether it carries out products with heads
    # whether it is for calls of a few steps; records of longer ones leave out what a call takes beside steps
    few_steps: bool = False
    # whether it carries out the recurrence of an adjoint, too, a task whose traversal is ``backward``
    backward: bool = False
    # factor on an adjoint's expected time where no record decides: two schedules' estimates err differently
    doubt: float = 1.0
    latest: int = 0  # the most that `generation` says of any task

    def serves(self, task: Task) -> str | None:
        """None, or the reason why this schedule cannot serve the task."""
        if most_heads(task.graph) > 1 and not self.heads:
            return "does not support products with heads"
        if task.traversal.backward:
            return self.refuses(task) if self.backward else "does not support backward passes"
        graph = task.graph
        transposed = any(p.terms[0].transposed for phase in graph.phases for p in phase.products)
        # cells have none of it, adjoints do
        beyond = {"inputs that are not multiplied": graph.given, "values summed over steps": graph.sums,
                  "weight gradients": graph.outer_products, "products of transposed weights": transposed,
                  "no state": not graph.states}
        found = next((what for what, has in beyond.items() if has), None)
        return f"step {graph.cell!r} has {found}, which no schedule supports" if found else self.refuses(task)

    @abstractmethod
    def refuses(self, task: Task) -> str | None:
        """None, or the reason why it cannot serve the task, of a cell's graph or, with ``backward``, an adjoint's."""

    @abstractmethod
    def knobs(self, task: Task) -> tuple[Knob, ...]:
        """The knobs, with the values that make sense for the task."""

    @abstractmethod
    def plan(self, task: Task, config: Config) -> Plan:
        """The plan of a configuration; it need not fit, :meth:`check` says that."""

    @abstractmethod
    def check(self, task: Task, config: Config) -> str | None:
        """None, or the reason (registers, shared memory, ...) why the configuration cannot run."""

    @abstractmethod
    def default(self, task: Task) -> Config:
        """The configuration of the declared heuristic, used where no record applies."""

    def rebatched(self, config: Config, batch: int, task: Task) -> Config:
        """The configuration for the task that comes of one which was found for another ``batch``; it need not fit."""
        return config

    def expected(self, task: Task) -> float:
        """Nanoseconds of a step that the default is expected to take; infinity where nobody can say."""
        return math.inf

    def generation(self, task: Task) -> int:
        """The generation of schedules that first serves the task; earlier records say nothing of this one. 1:
        `persistent_block`; 2: its clusters, streamed weights of `persistent_wide`; 3: heads of the first; 4: `scan`."""
        return 0

    def rank(self, task: Task) -> float:
        """The number by which the schedule competes where there is no record: the least is preferred."""
        return self.expected(task) * (self.doubt if task.traversal.backward else 1.0)

    def beside(self, task: Task) -> float:
        """Fixed cost of a call, in ns, that recorded step times include and :meth:`rank` does not."""
        return 0.0

    @abstractmethod
    def features(self, task: Task, plan: Plan) -> dict[str, float]:
        """The inputs of the cost model besides the knobs: bytes, products, occupancy, exchanges; and as ``estimate``,
        if the schedule has one, nanoseconds of a step, from which the model starts."""

    def stages(self, task: Task, plan: Plan) -> dict[str, float]:
        """The parts of a step's estimate, but for what runs beside the recurrence: name -> nanoseconds; or none."""
        return {}

    def cut(self, task: Task, plan: Plan) -> Cut | None:
        """How the layer lies on the chip; None where blocks keep nothing from step to step."""
        return None

    @abstractmethod
    def program(self, task: Task, plan: Plan) -> Program:
        """Generates the code."""

    def valid(self, task: Task, values: Mapping[str, Sequence[Any]]) -> Iterator[Config]:
        """The configurations of these ``values`` of all knobs that :meth:`check` accepts."""
        for chosen in combinations(*values.values()):
            config = dict(zip(values, chosen, strict=True))
            if self.check(task, config) is None:
                yield config

    def recurrence(self, task: Task, plan: Plan) -> Component:
        """The recurrence of an adjoint, which only schedules with ``backward`` are asked for: from ``hoisted``, as
        ``hoisted_of`` lays it out, to ``outputs``; around it come ``recurrence_buffers`` of backward/assemble.py."""
        raise NotImplementedError(f"{self.name} does not carry out adjoints")

    def together(self, task: Task, plan: Plan) -> int:
        """``together`` of the :class:`~ecornn.program.Program`."""
        return 1


AnySchedule = Schedule[Any]


class SearchedSchedule(Schedule[Plan]):
    """A schedule whose default is the best of many configurations, which are searched once for each question."""

    def __init__(self) -> None:
        self._known: dict[tuple[Workload, Device, Traversal, bool], Config | None] = {}

    @abstractmethod
    def search(self, task: Task) -> Config | None:
        """The valid configuration that is expected to be fastest; None where there is none."""

    def best(self, task: Task) -> Config | None:
        """The result of :meth:`search`, kept for the next question. A reverse sequence has a forward one's estimates,
        but not all of its configurations: the forward one's best, if it is among them, is the best here."""
        way = task.traversal
        key = task.workload, task.device, way, task.after is None
        if key not in self._known:
            other = self.best(replace(task, traversal=structs.replace(way, reverse=False))) if way.reverse else None
            self._known[key] = other if other and self.check(task, other) is None else self.search(task)
        return self._known[key]

    def default(self, task: Task) -> Config:
        best = self.best(task)
        assert best is not None, "default() is for tasks that serves() accepts"
        return best


def register_limit(device: Device, threads: int, blocks: int = 1) -> int:
    """Registers of a thread, of ``blocks`` of ``threads``: given out to four warps at a time, eight for each thread."""
    return min(255, device.registers // (-(-threads // 128) * 128 * blocks) // 8 * 8)


def no_room(device: Device, shared: int, threads: int, registers: int) -> str | None:
    """None, or what a block of ``threads`` has too little of on a GPU: ``shared`` memory, in bytes, or ``registers`` of
    a thread, which are given out eight at a time and 255 at most."""
    if shared > device.shared:
        return f"it needs {shared} bytes of shared memory, but {device.shared} are available"
    limit = min(255, device.registers // threads // 8 * 8)
    return f"it needs about {registers} registers per thread, but {limit} are available" if registers > limit else None


def config_text(config: Config) -> str:
    return " ".join(f"{k}={v}" for k, v in config.items())  # a configuration on one line
