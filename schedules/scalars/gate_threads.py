"""Threads that compute a cell's scalars, step after step: what the persistent schedules share; and before them the
operands of the first step, from the call's states: by a small kernel ahead of that of all steps, or in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from ecornn.analysis.liveness import before_first, late_operands, urgent
from ecornn.program import Launch
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.isa import ld_shared, neighbour
from ecornn.schedules.cuda.isa.tensor_core import per_word
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import for_products
from ecornn.schedules.scalars.pointwise import emit, invariants, vectors_at
from ecornn.schedules.sequence_kernel import SequenceKernel
from ecornn.schedules.timeline import row_arguments


@dataclass(frozen=True)
class Share:
    """A block's ``units`` of H by ``rows``, for ``threads`` threads; ``paired``: each has rows of one unit, in twos."""

    units: int
    rows: int
    threads: int
    paired: bool = False

    @property
    def items(self) -> int:
        """(unit, batch row) pairs of a thread, the last ones of some threads without any."""
        if self.paired:
            return 2 * ceil_div(self.rows, self.threads // self.units * 2)
        return ceil_div(self.units * self.rows, self.threads)


def mask_values(task: Task) -> int:
    """Values that a thread keeps of an item's lengths, resets and sequences."""
    traversal = task.traversal
    return traversal.lengths + traversal.resets + traversal.sequences * (3 + len(task.graph.states))


def partial_sums(shared: TirBuffer, place: Expr, count: int) -> list[Expr]:
    """The sums of ``count`` neighbouring gates of a unit, from shared memory, float32; by one load, if one can."""
    if count in (2, 4):
        into = T.local("sums", (count,), "float32")
        ld_shared([into[k] for k in range(count)], shared.ptr_to([place]), "f32")
        return [into[k] for k in range(count)]
    return [T.let("sum", shared[place + k]) for k in range(count)]


@dataclass
class Ended:
    """A step of an item after its last exchange: the values that are known, whether its row took part and whether a
    sequence starts after it (None: always, never), and states by name, after it and before the next step."""

    env: dict[Var, Expr]
    live: Expr | None
    fresh: Expr | None = None
    new: dict[str, Expr] = field(default_factory=dict)
    following: dict[str, Expr] = field(default_factory=dict)


class GateThreads(ABC):
    """Emits the code of threads that own (unit, batch row) pairs for the whole sequence; two neighbours make a 16-bit
    word. Registers of each item: constants, states, hoisted inputs of this step (``inputs``) and the next (``ahead``),
    its row's ``limits``, starts (``fresh``); in columns the sequences' ``numbers`` in this step and the next two, and
    the state that one begins with (``given``)."""

    def __init__(self, kernel: SequenceKernel, share: Share, group: Expr, first: Expr, thread: Expr,
                 count: Expr | None = None) -> None:
        """``first``: unit of the block's share; ``count``: units that it really has, where not all have as many."""
        self.task, self.math, self.arguments, self.hoisted = kernel.task, kernel.math, kernel.arguments, kernel.hoisted
        self.steps, self.batch, self.timeline, self.kept = kernel.steps, kernel.batch, kernel.timeline, kernel.kept
        self.share, self.items, self.group, self.thread = share, share.items, group, thread
        self.first, self.count, task, hoisted = first, count, kernel.task, kernel.hoisted
        self.graph = graph = task.graph
        self.state_index = {name: s for s, name in enumerate(graph.states)}
        self.urgent, self.late = urgent(graph), bool(late_operands(graph))
        self._locate(thread)

        def local(name: str, count: int) -> TirBuffer:  # (item, one of count values)
            return T.local(name, (self.items, count), "float32")

        self.constants = local("constants", max(1, len(graph.invariant_outputs)))
        self.states = local("states", len(graph.states))
        self.inputs = hoisted.registers(self.items)  # of this step
        self.ahead = hoisted.registers(self.items, name="inputs_ahead")  # of the next one
        rows_of = ("row_values", "row_values_ahead") if graph.row_inputs else ()  # of this step, and of the next one
        self.row_values = [local(name, len(graph.row_inputs)) for name in rows_of]
        traversal, rows = task.traversal, (self.items,)  # of rows, too: these are on the critical path
        self.limits = T.local("limits", rows, "int32") if traversal.lengths else None
        self.fresh = T.local("fresh", rows, "int32") if traversal.resets else None
        # (item, this step and the next two)
        self.numbers: TirBuffer = T.local("numbers", (self.items, 3), "int32") if traversal.sequences else None
        self.given: TirBuffer = local("given", len(graph.states)) if traversal.sequences else None

    def _locate(self, thread: Expr) -> None:
        share, H = self.share, self.task.workload.hidden
        self.local, self.unit, self.column, self.owner = [], [], [], []
        for i in range(self.items):
            item = T.let("item", thread if share.paired else thread + i * share.threads)
            row = item // share.units * self.items + i if share.paired else item // share.units
            owner = row < share.rows if share.paired else item < share.units * share.rows
            owner = T.let("owner", owner if self.count is None else T.And(owner, item % share.units < self.count))
            self.local.append(self._bind("local", item % share.units))
            self.unit.append(self._bind("unit", self.first + item % share.units))
            self.column.append(self._bind("column", T.Select(owner, row, 0)))
            self.owner.append(owner)
        self.row = [self._bind("row", self.group * share.rows + c) for c in self.column]
        self.valid = [T.let("valid", T.And(owner, T.And(unit < H, row < self.batch)))
                      for owner, unit, row in zip(self.owner, self.unit, self.row, strict=True)]

    def _bind(self, name: str, value: Expr) -> Expr:
        return T.let(name, value)

    def begin(self) -> None:
        graph, H = self.graph, self.task.workload.hidden
        for i in range(self.items):
            unit = T.let("at", T.min(self.unit[i], H - 1))
            env = invariants(graph, vectors_at(graph.vectors, self.arguments["vectors"], H, unit), self.math)
            for k, var in enumerate(graph.invariant_outputs):
                T.buffer_store(self.constants, env[var], [i, k])
            if self.limits is not None:
                T.buffer_store(self.limits, self.timeline.limit(T.min(self.row[i], self.batch - 1)), [i])
            if self.numbers is not None:
                T.buffer_store(self.numbers, self._number(T.int32(0), i), [i, 2])
                self._begin_sequence(i, self.numbers[i, 2], self.states)
                continue
            for s, name in enumerate(graph.states):
                T.buffer_store(self.states, T.float32(0), [i, s])
                with T.when(self.valid[i]):
                    given = T.cast(self.arguments[f"{name}_in"][self.row[i] * H + self.unit[i]], "float32")
                    (value,) = self.timeline.started(self.timeline.fresh(0, self.row[i], self._limit(i)), [given])
                    T.buffer_store(self.states, value, [i, s])

    def _number(self, t: Expr, i: int) -> Expr:
        return self.timeline.number(t, T.let("some_row", T.min(self.row[i], self.batch - 1)))

    def _begin_sequence(self, i: int, number: Expr, into: TirBuffer) -> None:
        """Loads the state that a sequence begins with, or a piece of one goes on from; zero for -1."""
        H, timeline = self.task.workload.hidden, self.timeline
        for s in range(len(self.graph.states)):
            T.buffer_store(into, T.float32(0), [i, s])
        with T.when(T.And(self.valid[i], number >= 0)), T.If(timeline.continues(number)):
            with T.Then():
                for s in range(len(self.graph.states)):
                    T.buffer_store(into, self.arguments["pieces"][self._piece(i, s, timeline.other)], [i, s])
            with T.Else():
                at = T.let("at", T.cast(timeline.sequence(number), "int64") * H + self.unit[i])
                for s, name in enumerate(self.graph.states):
                    T.buffer_store(into, T.cast(self.arguments[f"{name}_in"][at], "float32"), [i, s])

    def _piece(self, i: int, s: int, beside: int = 0) -> Expr:
        """The place of what item i's column hands over of state s, or of what the column ``beside`` it does."""
        return (self.batch * s + self.row[i] + beside) * self.task.workload.hidden + self.unit[i]

    def _limit(self, i: int) -> Expr:
        return self.steps if self.limits is None else self.limits[i]

    def _live(self, i: int, t: Expr) -> Expr | None:
        if self.numbers is not None:
            return T.let("live", self.numbers[i, 0] >= 0)
        return self.timeline.live(t, self._limit(i))

    def _fetch(self, t: Expr) -> None:
        """Loads the hoisted inputs of step t into ``ahead``, and whether a sequence starts there."""
        self._prepare(t)
        self._start_at(t)
        self._load_inputs(t, self.ahead)
        self._load_row_values(t)

    def _prepare(self, t: Expr) -> None:  # noqa: B027  who has nothing to wait for leaves it as it is
        """Is called before the hoisted inputs of step t are read."""

    def _start_at(self, t: Expr) -> None:
        """Loads whether a sequence starts at step t into ``fresh``, or from which state into ``given``: one by one."""
        for i in range(self.items if self.numbers is not None else 0):
            for k in range(2):
                T.buffer_store(self.numbers, self.numbers[i, k + 1], [i, k])
            T.buffer_store(self.numbers, self._number(t + 1, i), [i, 2])  # looked at a step later
            with T.when(self.numbers[i, 1] != self.numbers[i, 0]):
                self._begin_sequence(i, self.numbers[i, 1], self.given)
        for i in range(self.items if self.fresh is not None else 0):
            row = T.let("some_row", T.min(self.row[i], self.batch - 1))
            T.buffer_store(self.fresh, T.cast(self.timeline.fresh(t, row, self._limit(i)), "int32"), [i])

    def _load_inputs(self, t: Expr, into: TirBuffer) -> None:
        hoisted, nothing = self.hoisted, T.uint32(0) if self.hoisted.packed else T.float32(0)
        for i in range(self.items if hoisted.outputs else 0):
            for k in range(hoisted.words()):
                T.buffer_store(into, nothing, [i, k])
            with T.when(T.And(self.valid[i], t < self.steps)):
                row = T.cast(self.timeline.at(t) * self.batch + self.row[i], "int64")
                for k, word in enumerate(hoisted.load(self.arguments["hoisted"], row, self.unit[i])):
                    T.buffer_store(into, word, [i, k])

    def _load_row_values(self, t: Expr) -> None:
        """Loads the statistics of step t's rows, (T*B, N) in float32, that the step takes beside hoisted inputs."""
        count = len(self.graph.row_inputs)
        for i in range(self.items if count else 0):
            for k in range(count):
                T.buffer_store(self.row_values[1], T.float32(0), [i, k])
            with T.when(T.And(self.valid[i], t < self.steps)):
                first = T.let("first", T.cast(self.timeline.at(t) * self.batch + self.row[i], "int64") * count)
                for k in range(count):
                    T.buffer_store(self.row_values[1], self.arguments["row_sums"][first + k], [i, k])

    def _advance(self) -> None:
        for i in range(self.items):
            for k in range(self.hoisted.words()):
                T.buffer_store(self.inputs, self.ahead[i, k], [i, k])
            for k in range(len(self.graph.row_inputs)):
                T.buffer_store(self.row_values[0], self.row_values[1][i, k], [i, k])

    def _hoisted_values(self, i: int, loaded: TirBuffer) -> dict[Var, Expr]:
        (values,) = self.hoisted.values([loaded[i, k] for k in range(self.hoisted.words())])
        return dict(zip(self.graph.hoisted_outputs, values, strict=True))

    def _before(self, i: int) -> dict[Var, Expr]:
        """The values of an item that are known before the products of its step."""
        graph, env = self.graph, self._hoisted_values(i, self.inputs)
        env |= {v: self.row_values[0][i, k] for k, v in enumerate(graph.row_inputs)}
        env |= {v: self.constants[i, k] for k, v in enumerate(graph.invariant_outputs)}
        env |= {v: self.states[i, s] for s, v in enumerate(graph.states.values())}
        return emit(graph.prologue, env, self.math)

    def _finish(self, i: int, env: dict[Var, Expr], t: Expr) -> Ended:
        """From ``urgent.first`` to what the next step's products need, sent at once; :meth:`_store` does the rest."""
        graph, timeline = self.graph, self.timeline
        ended = Ended(env, timeline.live(t, self._limit(i)))
        ended.new = self._new(i, ended, self.urgent.states)
        if self.numbers is not None:
            ended.fresh = T.let("fresh", self.numbers[i, 1] != self.numbers[i, 0])
        elif self.fresh is not None:
            ended.fresh = T.let("fresh", self.fresh[i] != 0)  # of step t + 1, as ``ahead`` is
        ended.following = self._following(i, ended, self.urgent.states)
        if self.numbers is not None:
            ended.live = T.let("live", self.numbers[i, 0] >= 0)
        following = {graph.states[name]: value for name, value in ended.following.items()}
        following |= {v: self.constants[i, k] for k, v in enumerate(graph.invariant_outputs)}
        if self.late:
            following |= self._hoisted_values(i, self.ahead)
        self._announce(i, 0, t + 1, emit(self.urgent.opening, following, self.math))
        return ended

    def _new(self, i: int, ended: Ended, names: Sequence[str]) -> dict[str, Expr]:
        """The states of these ``names`` after a step; of a row that took no part, as they were."""
        live = None if self.numbers is not None else ended.live
        return {name: self.timeline.masked(live, T.let(f"{name}_new", ended.env[self.graph.results[name]]),
                                           self.states[i, self.state_index[name]]) for name in names}

    def _following(self, i: int, ended: Ended, names: Sequence[str]) -> dict[str, Expr]:
        """The states of these ``names`` before the next step, in which a sequence may start."""
        if self.numbers is not None:
            return {name: self.timeline.masked(ended.fresh, self.given[i, self.state_index[name]], ended.new[name])
                    for name in names}
        return dict(zip(names, self.timeline.started(ended.fresh, [ended.new[name] for name in names]), strict=True))

    @abstractmethod
    def _announce(self, i: int, p: int, step: Expr, env: dict[Var, Expr]) -> None:
        """Hands item i's operands of phase p in ``step`` to the blocks that multiply."""

    def _store(self, i: int, t: Expr, ended: Ended) -> None:
        """Computes what else step t makes, and stores y and states."""
        late = [name for name in self.graph.states if name not in ended.new]
        ended.env = emit(self.urgent.late, ended.env, self.math)
        ended.new |= self._new(i, ended, late)
        ended.following |= self._following(i, ended, late)
        outputs = [T.let(var.name, ended.env[var]) for var in self.graph.outputs]  # one may be what a state was before
        for name, s in self.state_index.items():
            T.buffer_store(self.states, ended.following[name], [i, s])
        with T.when(self.valid[i]):
            self._write(i, t, ended, outputs)
            if self.numbers is None:
                with T.when(t == self.steps - 1):
                    self._leave(i, self.row[i], ended)
                return
            number = self.numbers[i, 0]
            ends = T.And(ended.live, self.numbers[i, 1] != number)
            with T.when(ends), T.If(self.timeline.hands_over(number)):
                with T.Then():
                    for name, s in self.state_index.items():
                        T.buffer_store(self.arguments["pieces"], ended.new[name], [self._piece(i, s)])
                with T.Else():
                    self._leave(i, T.cast(self.timeline.sequence(number), "int64"), ended)

    def _write(self, i: int, t: Expr, ended: Ended, outputs: list[Expr]) -> None:
        """Stores the step's y, or the ``outputs`` (T, B, O, H) of an adjoint's recurrence, and what is kept."""
        w, traversal = self.task.workload, self.task.traversal
        H, name, width, first = w.hidden, "outputs", self.task.row or len(outputs) * w.hidden, 0
        if not traversal.backward:
            own = self.graph.written * H
            name, width, first = "y", traversal.y_width(own), traversal.y_offset(own)
            outputs = outputs or [ended.new[self.graph.output]]
        values = [self.timeline.masked(ended.live, value, T.float32(0)) for value in outputs]
        row = T.cast(self.timeline.at(t) * self.batch + self.row[i], "int64")
        row = T.let("step_row", row) if self.kept else row
        at = row * width + self.unit[i]
        for o, value in enumerate(values):
            value = T.cast(for_products(value, self.task), w.dtype)
            T.buffer_store(self.arguments[name], value, [at + (first + o * H)])
        for spot, value in self.kept.found(ended.new, ended.env).items():
            value = self.timeline.masked(ended.live, value, T.float32(0))
            T.buffer_store(self.arguments[spot.buffer], T.cast(value, w.dtype), [spot.at(row, self.unit[i], H)])

    def _leave(self, i: int, row: Expr, ended: Ended) -> None:
        """Stores the last states of a row or a sequence; of an adjoint's rows as they may have been cleared since."""
        w = self.task.workload
        last = ended.following if self.task.traversal.backward and self.numbers is None else ended.new
        for name in self.state_index:
            T.buffer_store(self.arguments[f"{name}_out"], T.cast(last[name], w.dtype), [row * w.hidden + self.unit[i]])

    def _shared(self, value: Expr) -> list[Expr]:
        """The values of the word that this thread's value is in: its own, and of 16 bits that of the other thread."""
        return [value] if per_word(self.task.workload.dtype) == 1 else [value, T.let("neighbour", neighbour(value))]


BLOCKS, THREADS = 128, 256  # of the kernel ahead


@dataclass(frozen=True)
class Head:
    """The ``first`` unit of a head, and how many it has."""

    first: Expr
    units: int


def declare_start(task: Task, hoisted: Hoisted, math: str) -> SequenceKernel:
    """Declares what the kernel ahead reads: ``T, B, <state>_in ..., vectors, [hoisted,]`` and masks."""
    kinds = {f"{s}_in": task.workload.dtype for s in task.graph.states} | {"vectors": "float32"}
    kinds |= {"hoisted": hoisted.dtype} if late_operands(task.graph) else {}
    steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
    arguments = {name: T.pointer(name, kind) for name, kind in kinds.items()} | row_arguments(task.traversal)
    return SequenceKernel(task, hoisted, math, arguments, steps, batch)


def start_thread() -> Expr:
    return T.let("first", T.block(BLOCKS) * THREADS + T.thread(THREADS))


def start_launch(early: bool = False) -> Launch:
    return Launch("start", BLOCKS, THREADS, early=early)


def initial_values(kernel: SequenceKernel, at: tuple[Expr, Expr, Expr], head: Head | None = None) -> list[Expr]:
    """A word of the first operands, as one or two float32 values; ``at``: its first unit, row, operand number."""
    unit, row, operand = at
    return [initial_operand(kernel, T.let("own_unit", unit + e), row, operand, head)
            for e in range(per_word(kernel.task.workload.dtype))]


def initial_operand(kernel: SequenceKernel, unit: Expr, row: Expr, operand: Expr, head: Head | None = None) -> Expr:
    """A first-phase operand from the call's states, float32; zero beyond units and rows; ``unit``: of ``head``."""
    task, arguments, timeline = kernel.task, kernel.arguments, kernel.timeline
    graph, H, batch = task.graph, task.workload.hidden, kernel.batch
    count = H if head is None else head.units
    nearest = T.min(unit, count - 1)
    at, b = T.let("at", nearest if head is None else head.first + nearest), T.let("b", T.min(row, batch - 1))
    vectors = arguments["vectors"]
    env = invariants(graph, vectors_at(graph.vectors, vectors, H, at), kernel.math) if graph.prologue else {}
    from_row, inside = b, T.And(unit < count, row < batch)
    if task.traversal.sequences:
        number = T.let("number", timeline.number(0, b))
        from_row, inside = T.cast(timeline.sequence(T.max(number, 0)), "int64"), T.And(inside, number >= 0)
    given = [T.let(f"{name}_given", T.cast(arguments[f"{name}_in"][from_row * H + at], "float32"))
             for name in graph.states]
    env |= zip(graph.states.values(), timeline.started(timeline.fresh(0, b, timeline.limit(b)), given), strict=True)
    if late_operands(graph):
        first = T.cast(timeline.at(T.int32(0)) * batch + b, "int64")
        values = kernel.hoisted.values(kernel.hoisted.load(arguments["hoisted"], first, at))[0]
        env |= zip(graph.hoisted_outputs, values, strict=True)
    env = emit(before_first(graph), env, kernel.math)
    value = env[graph.phases[0].operands[0]]
    for i, other in enumerate(graph.phases[0].operands[1:], 1):
        value = T.Select(operand == i, env[other], value)
    return T.let("operand", T.Select(inside, value, T.float32(0)))
