"""Threads that compute a cell's scalars, step after step: what the persistent schedules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ecornn.schedules.base import Task
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.pointwise import emit, invariants, urgent
from ecornn.schedules.timeline import Timeline


@dataclass(frozen=True)
class Share:
    """``units`` of H by ``rows`` of the batch that a block has, for ``threads`` threads; ``paired``: each has
    neighbouring rows of one unit, in twos."""

    units: int
    rows: int
    threads: int
    paired: bool = False

    @property
    def items(self) -> int:
        """(unit, batch row) pairs of a thread, the last ones of some threads without any."""
        if self.paired:
            return 2 * -(-self.rows // (self.threads // self.units * 2))
        return -(-self.units * self.rows // self.threads)


@dataclass
class Ended:
    """A step of an item after its last exchange: the values that are known, whether its row took part and whether a
    sequence starts after it (None: always, never), and states by name, after it and before the next step."""

    env: dict[Any, Any]
    live: Any
    fresh: Any = None
    new: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)


class Items(ABC):
    """Emits the code of threads that own (unit, batch row) pairs for the whole sequence.

    Neighbouring threads own neighbouring units of one row, so two of them make a 16-bit word. The
    values of each item are in registers: constants, states, hoisted inputs of this step (``inputs``) and of
    the next one (``ahead``), how far its row goes (``limits``) and whether it starts anew (``fresh``).
    Of a column of sequences: their ``numbers`` in this step and the next two, with the marks of pieces, and the state
    that the next step begins with if it is the first one of a sequence or piece (``given``).
    """

    def __init__(self, T: Any, task: Task, math: str, arguments: dict[str, Any], share: Share, group: Any,
                 first: Any, thread: Any, steps: Any, batch: Any, hoisted: Hoisted, count: Any = None) -> None:
        """``first``: unit of the block's share; ``count``: units that it really has, where not all have as many."""
        self.T, self.task, self.share, self.math = T, task, share, math
        self.graph, self.arguments, self.items = task.graph, arguments, share.items
        self.group, self.thread, self.steps, self.batch = group, thread, steps, batch
        self.first, self.count, self.hoisted, graph = first, count, hoisted, task.graph
        self.timeline = Timeline(T, task.place, arguments, steps, batch)
        self.state_index = {name: s for s, name in enumerate(graph.states)}
        self.opening, self.first_states, self.first_assigns, self.late_assigns = urgent(graph)
        self._locate(thread)

        def local(*shape: int) -> Any:
            return T.alloc_buffer(shape, "float32", scope="local")

        self.constants = local(self.items, max(1, len(graph.invariant_outputs)))
        self.states = local(self.items, len(graph.states))
        self.inputs = hoisted.registers(T, self.items)  # of this step
        self.ahead = hoisted.registers(T, self.items)  # of the next one
        rows_of = 2 if graph.row_inputs else 0  # of this step, and of the next one
        self.row_values = [local(self.items, len(graph.row_inputs)) for _ in range(rows_of)]
        place, rows = task.place, (self.items,)  # of rows, too: these are on the critical path
        self.limits = T.alloc_buffer(rows, "int32", scope="local") if place.lengths else None
        self.fresh = T.alloc_buffer(rows, "int32", scope="local") if place.resets else None
        self.numbers: Any = T.alloc_buffer((self.items, 3), "int32", scope="local") if place.sequences else None
        self.given: Any = local(self.items, len(graph.states)) if place.sequences else None

    def _locate(self, thread: Any) -> None:
        """Which pairs the items of a thread are."""
        T, share, H = self.T, self.share, self.task.workload.hidden
        self.local, self.unit, self.column, self.owner = [], [], [], []
        for i in range(self.items):
            item = T.Bind(thread if share.paired else thread + i * share.threads)
            row = item // share.units * self.items + i if share.paired else item // share.units
            owner = row < share.rows if share.paired else item < share.units * share.rows
            owner = T.Bind(owner if self.count is None else T.And(owner, item % share.units < self.count))
            self.local.append(self._bind(item % share.units))
            self.unit.append(self._bind(self.first + item % share.units))
            self.column.append(self._bind(T.Select(owner, row, 0)))
            self.owner.append(owner)
        self.row = [self._bind(self.group * share.rows + c) for c in self.column]
        self.valid = [T.Bind(T.And(owner, T.And(unit < H, row < self.batch)))
                      for owner, unit, row in zip(self.owner, self.unit, self.row, strict=True)]

    def _bind(self, value: Any) -> Any:
        """Names a value, which expressions that use it may take apart again."""
        return self.T.Bind(value)

    def begin(self) -> None:
        """What is known before the first step."""
        T, graph, H = self.T, self.graph, self.task.workload.hidden
        for i in range(self.items):
            self._constants(i)
            if self.limits is not None:
                limit = self.timeline.limit(T.min(self.row[i], self.batch - 1))
                T.buffer_store(self.limits, limit, [i])
            if self.numbers is not None:
                T.buffer_store(self.numbers, self._number(T.int32(0), i), [i, 2])
                self._begin_sequence(i, self.numbers[i, 2], self.states)
                continue
            for s, name in enumerate(graph.states):
                T.buffer_store(self.states, T.float32(0), [i, s])
                with T.If(self.valid[i]), T.Then():
                    row = self.row[i]
                    given = T.cast(self.arguments[f"{name}_in"][row * H + self.unit[i]], "float32")
                    first = self.timeline.fresh(0, row, self._limit(i))
                    (value,) = self.timeline.started(first, [given])
                    T.buffer_store(self.states, value, [i, s])

    def _number(self, t: Any, i: int) -> Any:
        """The sequence of item i's column in step t."""
        return self.timeline.number(t, self.T.Bind(self.T.min(self.row[i], self.batch - 1)))

    def _begin_sequence(self, i: int, number: Any, into: Any) -> None:
        """Loads the state that a sequence begins with, or a piece of one goes on from; zero for -1."""
        T, H, timeline = self.T, self.task.workload.hidden, self.timeline
        for s in range(len(self.graph.states)):
            T.buffer_store(into, T.float32(0), [i, s])
        with T.If(T.And(self.valid[i], number >= 0)), T.Then(), T.If(timeline.continues(number)):
            with T.Then():
                for s in range(len(self.graph.states)):
                    T.buffer_store(into, self.arguments["pieces"][self._piece(i, s, timeline.other)], [i, s])
            with T.Else():
                at = T.Bind(T.cast(timeline.sequence(number), "int64") * H + self.unit[i])
                for s, name in enumerate(self.graph.states):
                    T.buffer_store(into, T.cast(self.arguments[f"{name}_in"][at], "float32"), [i, s])

    def _piece(self, i: int, s: int, beside: int = 0) -> Any:
        """Place of what item i's column hands over of state s, or one beside it."""
        return (self.batch * s + self.row[i] + beside) * self.task.workload.hidden + self.unit[i]

    def _limit(self, i: int) -> Any:
        return self.steps if self.limits is None else self.limits[i]

    def _constants(self, i: int) -> None:
        T, graph, H = self.T, self.graph, self.task.workload.hidden
        at = T.Bind(T.min(self.unit[i], H - 1))
        env = {v.var: T.Bind(self.arguments["vectors"][k * H + at]) for k, v in enumerate(graph.vectors)}
        env = invariants(graph, env, self.math)
        for k, var in enumerate(graph.invariant_outputs):
            T.buffer_store(self.constants, env[var], [i, k])

    def _fetch(self, t: Any) -> None:
        """Loads the hoisted inputs of step t into ``ahead``, and whether a sequence starts there."""
        self._prepare(t)
        self._start_at(t)
        self._load_inputs(t, self.ahead)
        self._load_row_values(t)

    def _prepare(self, t: Any) -> None:  # noqa: B027  who has nothing to wait for leaves it as it is
        """Before the hoisted inputs of step t are read."""

    def _start_at(self, t: Any) -> None:
        """Loads whether a sequence starts at step t into ``fresh``, or from which state into ``given``. For steps in
        order, from the first."""
        T = self.T
        for i in range(self.items if self.numbers is not None else 0):
            for k in range(2):
                T.buffer_store(self.numbers, self.numbers[i, k + 1], [i, k])
            T.buffer_store(self.numbers, self._number(t + 1, i), [i, 2])  # looked at a step later
            with T.If(self.numbers[i, 1] != self.numbers[i, 0]), T.Then():
                self._begin_sequence(i, self.numbers[i, 1], self.given)
        for i in range(self.items if self.fresh is not None else 0):
            row = T.Bind(T.min(self.row[i], self.batch - 1))
            fresh = self.timeline.fresh(t, row, self._limit(i))
            T.buffer_store(self.fresh, T.cast(fresh, "int32"), [i])

    def _load_inputs(self, t: Any, into: Any) -> None:
        """Loads the hoisted inputs of step t."""
        T, hoisted = self.T, self.hoisted
        nothing = T.uint32(0) if hoisted.packed else T.float32(0)
        for i in range(self.items if hoisted.outputs else 0):
            for k in range(hoisted.words()):
                T.buffer_store(into, nothing, [i, k])
            with T.If(T.And(self.valid[i], t < self.steps)), T.Then():
                row = T.cast(self.timeline.at(t) * self.batch + self.row[i], "int64")
                for k, word in enumerate(hoisted.load(T, self.arguments["hoisted"], row, self.unit[i])):
                    T.buffer_store(into, word, [i, k])

    def _load_row_values(self, t: Any) -> None:
        """Loads what else the rows have of step t, (T*B, N) in float32."""
        T, count = self.T, len(self.graph.row_inputs)
        for i in range(self.items if count else 0):
            for k in range(count):
                T.buffer_store(self.row_values[1], T.float32(0), [i, k])
            with T.If(T.And(self.valid[i], t < self.steps)), T.Then():
                first = T.Bind(T.cast(self.timeline.at(t) * self.batch + self.row[i], "int64") * count)
                for k in range(count):
                    T.buffer_store(self.row_values[1], self.arguments["row_sums"][first + k], [i, k])

    def _advance(self) -> None:
        for i in range(self.items):
            for k in range(self.hoisted.words()):
                self.T.buffer_store(self.inputs, self.ahead[i, k], [i, k])
            for k in range(len(self.graph.row_inputs)):
                self.T.buffer_store(self.row_values[0], self.row_values[1][i, k], [i, k])

    def _before(self, i: int) -> dict[Any, Any]:
        """What is known of an item before the products of its step."""
        graph, hoisted = self.graph, self.hoisted
        (inputs,) = hoisted.values([self.inputs[i, k] for k in range(hoisted.words())])
        env = dict(zip(graph.hoisted_outputs, inputs, strict=True))
        env |= {v: self.row_values[0][i, k] for k, v in enumerate(graph.row_inputs)}
        env |= {v: self.constants[i, k] for k, v in enumerate(graph.invariant_outputs)}
        env |= {v: self.states[i, s] for s, v in enumerate(graph.states.values())}
        return emit(graph.prologue, env, self.math)

    def _finish(self, i: int, env: dict[Any, Any], t: Any) -> Ended:
        """From ``first_assigns`` to what the next step's products need, which goes out at once; :meth:`_store` does the
        rest, that nobody waits for."""
        T, graph, timeline = self.T, self.graph, self.timeline
        ended = Ended(env, timeline.live(t, self._limit(i)))
        ended.new = self._new(i, ended, self.first_states)
        if self.numbers is not None:
            ended.fresh = T.Bind(self.numbers[i, 1] != self.numbers[i, 0])
        elif self.fresh is not None:
            ended.fresh = T.Bind(self.fresh[i] != 0)  # of step t + 1, as ``ahead`` is
        ended.carried = self._carried(i, ended, self.first_states)
        if self.numbers is not None:
            ended.live = T.Bind(self.numbers[i, 0] >= 0)
        following = {graph.states[name]: value for name, value in ended.carried.items()}
        following |= {v: self.constants[i, k] for k, v in enumerate(graph.invariant_outputs)}
        self._announce(i, 0, t + 1, emit(self.opening, following, self.math))
        return ended

    def _new(self, i: int, ended: Ended, names: Sequence[str]) -> dict[str, Any]:
        """Those states after a step; of a row that took no part, as they were."""
        T, live = self.T, None if self.numbers is not None else ended.live
        return {name: self.timeline.masked(live, T.Bind(ended.env[self.graph.results[name]]),
                                           self.states[i, self.state_index[name]]) for name in names}

    def _carried(self, i: int, ended: Ended, names: Sequence[str]) -> dict[str, Any]:
        """Those states before the next step, in which a sequence may start."""
        if self.numbers is not None:
            return {name: self.timeline.masked(ended.fresh, self.given[i, self.state_index[name]], ended.new[name])
                    for name in names}
        values = self.timeline.started(ended.fresh, [ended.new[name] for name in names])
        return dict(zip(names, values, strict=True))

    @abstractmethod
    def _announce(self, i: int, p: int, step: Any, env: dict[Any, Any]) -> None:
        """Hands item i's operands of phase p in ``step`` to the blocks that multiply."""

    def _store(self, i: int, t: Any, ended: Ended) -> None:
        """What else step t makes, and y and states to memory."""
        T, graph, w, place = self.T, self.graph, self.task.workload, self.task.place
        H, dtype = w.hidden, w.dtype
        late = [name for name in graph.states if name not in ended.new]
        ended.env = emit(self.late_assigns, ended.env, self.math)
        ended.new |= self._new(i, ended, late)
        ended.carried |= self._carried(i, ended, late)
        for name, s in self.state_index.items():
            T.buffer_store(self.states, ended.carried[name], [i, s])
        with T.If(self.valid[i]), T.Then():
            output = self.timeline.masked(ended.live, ended.new[graph.output], T.float32(0))
            step = self.timeline.at(t)
            at = T.cast(step * self.batch + self.row[i], "int64") * place.y_width(H) + self.unit[i]
            at = at + place.y_offset(H) if place.y_offset(H) else at
            T.buffer_store(self.arguments["y"], T.cast(output, dtype), [at])
            if self.numbers is None:
                with T.If(t == self.steps - 1), T.Then():
                    self._leave(i, self.row[i], ended)
                return
            number = self.numbers[i, 0]
            ends = T.And(ended.live, self.numbers[i, 1] != number)
            with T.If(ends), T.Then(), T.If(self.timeline.hands_over(number)):
                with T.Then():
                    for name, s in self.state_index.items():
                        T.buffer_store(self.arguments["pieces"], ended.new[name], [self._piece(i, s)])
                with T.Else():
                    self._leave(i, T.cast(self.timeline.sequence(number), "int64"), ended)

    def _leave(self, i: int, row: Any, ended: Ended) -> None:
        """Stores the last states of a row or a sequence."""
        T, w = self.T, self.task.workload
        for name in self.state_index:
            T.buffer_store(self.arguments[f"{name}_out"], T.cast(ended.new[name], w.dtype),
                           [row * w.hidden + self.unit[i]])

    def _neighbour(self, value: Any) -> Any:
        """The value of the neighbouring thread."""
        return self.T.Bind(self.T.cuda.func_call("ecornn_neighbour", value, source_code=_NEIGHBOUR,
                                                 return_type="float32"))


_NEIGHBOUR = """
__device__ __forceinline__ float ecornn_neighbour(float value) {
  return __shfl_xor_sync(0xffffffffu, value, 1);
}"""
