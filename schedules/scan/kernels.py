"""The kernels of a scan: chunks of time are composed side by side, then their first states are known, then all steps.

``maps`` (chunks - 1, slots, B, H), float32, has the map of each chunk but the last: the entries of its matrix, then
what it adds. For each level of states (``ecornn/analysis/affine.py``) ``compose`` makes the maps, whose coefficients
may read states of the levels before, and ``carry`` puts the states behind each chunk where what it adds was. ``replay``
carries out the steps of each chunk from its true first states, as `elementwise` does those of a whole sequence: within
a chunk both round alike."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from ecornn.analysis import Assign, StepGraph
from ecornn.analysis.affine import Affine, maps_of
from ecornn.analysis.liveness import needed
from ecornn.analysis.scalar import variables
from ecornn.schedules.base import Task, knob
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var, ceil_div
from ecornn.schedules.cuda.isa import st_global, sync_block
from ecornn.schedules.elementwise.units import (
    ElementwiseKnobs,
    Recurrence,
    Span,
    Units,
    UnitThread,
    recurrence_kinds,
    units_kernel,
)
from ecornn.schedules.keeping import NOTHING, Stored, keeping

MAPS = "maps"


class ScanKnobs(ElementwiseKnobs):
    chunks: int = knob("chunks of time. More: more threads at the same time; fewer: fewer maps to carry states through")


Place = tuple[str, str] | str  # in a map: an entry of its matrix, or what it adds to a state


@dataclass(frozen=True)
class Level:
    """The map of some states, and what composes it."""

    map: Affine
    known: tuple[str, ...]  # the states of the levels before it
    assigns: tuple[Assign, ...]  # the scalars of a step that the map, and the known states, need
    read: frozenset[Var]  # all variables that these read
    first: int  # of its slots

    @property
    def places(self) -> dict[Place, int]:
        """The slots of a map, from the level's first one on."""
        every: list[Place] = [*self.map.entries, *self.map.states]
        return {place: n for n, place in enumerate(every)}

    def slot(self, place: Place) -> int:
        return self.first + self.places[place]


@dataclass(frozen=True)
class Layout:
    """All levels of a step, and the slots that they take of a chunk's map."""

    levels: tuple[Level, ...]
    slots: int

    @classmethod
    def of(cls, graph: StepGraph) -> Layout | None:
        """None where a state that steps read is no affine map of its past, or where none is read."""
        found, known, slots = list[Level](), tuple[str, ...](), 0
        for one in maps_of(graph) or ():
            wanted = {v for e in (*one.matrix.values(), *one.rest.values()) for v in variables(e)}
            assigns, read = needed((*graph.prologue, *one.assigns), wanted | {graph.results[name] for name in known})
            found.append(Level(one, known, assigns, frozenset(read), slots))
            slots, known = slots + len(found[-1].places), (*known, *one.states)
        return cls(tuple(found), slots) if found else None

    def state(self, name: str) -> int | None:
        """The slot that has a state behind the chunk, once it is known; None for a state that no step reads."""
        return next((level.slot(name) for level in self.levels if name in level.map.states), None)


@dataclass(frozen=True)
class Chunk:
    """A chunk of time, and its neighbour's place in ``maps``."""

    number: Expr
    steps: Expr  # of a whole chunk
    span: Span

    @classmethod
    def of(cls, number: Expr, steps: Expr, chunks: int) -> Chunk:
        number = T.let("chunk", number)
        whole = T.let("chunk_steps", T.max(ceil_div(steps, chunks), 1))
        first = T.let("first_step", number * whole)
        return cls(number, whole, Span(first, T.let("steps", T.max(T.min(steps - first, whole), 0))))


def slot_at(chunk: Expr, slot: int, slots: int, rows: Expr, place: Expr) -> Expr:
    """The index in ``maps`` of a slot of a chunk, for a place in (B, H), which has ``rows`` values."""
    return T.cast(chunk * slots + slot, "int64") * rows + place


def first_states(units: Units, layout: Layout, chunk: Chunk, first: Expr) -> None:
    """Loads the states before a chunk: what the call begins with, or what the chunk before it ends with. A state that
    no step reads is what the call begins with: nothing comes of it unless no step follows."""
    maps, rows = units.arguments[MAPS], units.batch * units.task.workload.hidden
    with T.If(chunk.number == 0):
        with T.Then():
            units.load_states(first)
        with T.Else():
            for name, s in units.kept_states.items():
                slot = layout.state(name)
                for e in range(units.count):
                    value = T.cast(units.arguments[f"{name}_in"][first + e], "float32") if slot is None else maps[
                        slot_at(chunk.number - 1, slot, layout.slots, rows, first + e)]
                    T.buffer_store(units.states, value, [s, e])


class Replay(Recurrence):
    """The steps of a chunk, from the states that it begins with."""

    def __init__(self, thread: UnitThread, layout: Layout, chunk: Chunk) -> None:
        super().__init__(thread, chunk.span)
        self.layout, self.chunk = layout, chunk

    def begin(self, first: Expr) -> None:
        first_states(self, self.layout, self.chunk, first)

    def end(self, first: Expr) -> None:
        """The last states are those of the chunk that has the last step in which the row takes part."""
        last = self.all_steps - 1 if self.task.traversal.reverse else T.max(self.limit - 1, 0)
        with T.when(self.chunk.number == last // self.chunk.steps):
            super().end(first)


class Compose(Units):
    """The map of a chunk, of the states of one level."""

    def __init__(self, thread: UnitThread, layout: Layout, level: Level, chunk: Chunk) -> None:
        super().__init__(thread, level.known, chunk.span)
        self.layout, self.level, self.chunk = layout, level, chunk
        self.composed = T.local("composed", (len(level.places), self.count), "float32")

    def reads(self) -> Container[Var]:
        return self.level.read

    def begin(self, first: Expr) -> None:
        if self.kept_states:
            first_states(self, self.layout, self.chunk, first)
        for key, n in self.level.places.items():
            for e in range(self.count):
                T.buffer_store(self.composed, T.float32(isinstance(key, tuple) and key[0] == key[1]), [n, e])

    def step(self, i: int, number: Expr) -> None:
        live, fresh = self.masks(i, number)
        inputs, places, one = self.loaded(i), self.level.places, self.level.map
        for e in range(self.count):
            before = self.before(e, fresh)
            env = self.computed(e, inputs[e], before, self.level.assigns)
            old = [T.let("composed_before", self.composed[n, e]) for n in places.values()]
            started = dict(zip(places, self.timeline.started(fresh, old), strict=True))
            matrix = {at: env.get(value, value) for at, value in one.matrix.items()}
            rest = {name: env.get(value, value) for name, value in one.rest.items()}
            for place, value in composed(one, matrix, rest, started, lambda a, b: a * b).items():
                new = self.timeline.masked(live, T.let("composed_new", value), started[place])
                T.buffer_store(self.composed, new, [places[place], e])
            self.advance(env, live, before, e)

    def end(self, first: Expr) -> None:
        maps, rows = self.arguments[MAPS], self.batch * self.task.workload.hidden
        for n in self.level.places.values():
            at = slot_at(self.chunk.number, self.level.first + n, self.layout.slots, rows, first)
            values = [self.composed[n, e] for e in range(self.count)]
            if self.count == 1:
                T.buffer_store(maps, values[0], [at])
            else:
                st_global(maps.ptr_to([at]), values, "f32")


def composed(level: Affine, matrix: Mapping[tuple[str, str], Expr], rest: Mapping[str, Expr],
             before: Mapping[Place, Expr], times: Callable[[Expr, Expr], Expr]) -> dict[Place, Expr]:
    """The map ``before``, and then the one of ``matrix`` and ``rest``."""
    def total(terms: list[Expr]) -> Expr:
        return sum(terms[1:], terms[0]) if terms else T.float32(0)

    made: dict[Place, Expr] = {(n, o): total([times(m, before[k, o]) for (at, k), m in matrix.items()
                                              if at == n and (k, o) in before]) for n, o in level.entries}
    return made | {n: total([*(times(m, before[k]) for (at, k), m in matrix.items() if at == n),
                             *([rest[n]] if n in rest else [])]) for n in level.states}


LANES, GROUPS = 32, 16  # neighbouring units of a block; groups of chunks, whose maps are composed side by side


def guarded(a: Expr, b: Expr) -> Expr:
    """The product of two numbers, zero where one of them is zero and the other one infinite: a chunk's coefficients may
    be too large for float32 where the states, which are zero, stay so. What is not a number stays so."""
    return T.Select(T.And(T.isnan(a * b), T.Not(T.isnan(a + b))), T.float32(0), a * b)


def carry_kernel(task: Task, layout: Layout, number: int, chunks: int) -> PrimFunc:
    """Carries the states of a level through the maps of all chunks but the last. A warp has neighbouring units, and a
    group of chunks: it composes their maps; the first warp carries the states through what comes of that; then each
    carries those that its group begins with through its chunks."""
    level, slots, H = layout.levels[number], layout.slots, task.workload.hidden
    own, places, each = level.map, level.places, ceil_div(chunks - 1, GROUPS)
    with T.kernel(f"carry{number}") as made:
        T.arg("T", T.int32())
        batch = T.arg("B", T.int32())
        given = {name: T.pointer(f"{name}_in", task.workload.dtype) for name in own.states}
        maps = T.pointer(MAPS, "float32")
        T.device_entry()
        block, thread = T.block(carry_blocks(task)), T.thread(LANES * GROUPS)
        shared = T.shared(carry_words(level))
        rows, lane, group = T.let("rows", batch * H), T.let("lane", thread % LANES), T.let("group", thread // LANES)
        place = T.let("place", block * LANES + lane)
        there = T.let("there", place < rows)
        place = T.let("place", T.Select(there, place, 0))

        def in_shared(group: Expr, n: int) -> Expr:
            return (group * len(places) + n) * LANES + lane

        def loaded(chunk: Expr) -> dict[Place, Expr]:
            return {key: T.let("loaded", maps[slot_at(chunk, level.first + n, slots, rows, place)])
                    for key, n in places.items()}

        def through(values: Mapping[Place, Expr], states: TirBuffer) -> None:
            """Carries the states through a map."""
            before = {s: T.let(f"{s}_before", states[k]) for k, s in enumerate(own.states)}
            for k, s in enumerate(own.states):
                terms = [guarded(values[n, o], before[o]) for n, o in own.entries if n == s]
                T.buffer_store(states, sum(terms, values[s]), [k])

        T.note("the maps of each group of chunks as one")
        whole = T.local("whole", (len(places),), "float32")
        for key, n in places.items():
            T.buffer_store(whole, T.float32(isinstance(key, tuple) and key[0] == key[1]), [n])
        with T.serial("k", 0, each) as k:
            chunk = T.let("chunk", group * each + k)
            with T.when(chunk < chunks - 1):
                values, before = loaded(chunk), {key: T.let("before", whole[n]) for key, n in places.items()}
                matrix = {(n, o): values[n, o] for n, o in own.entries}
                new = composed(own, matrix, {s: values[s] for s in own.states}, before, guarded)
                for key, n in places.items():
                    T.buffer_store(whole, new[key], [n])
        for n in places.values():
            T.buffer_store(shared, whole[n], [in_shared(group, n)])
        sync_block()
        T.note("the states that each group begins with, in place of what its map adds")
        states = T.local("states", (len(own.states),), "float32")
        with T.when(group == 0):
            for k, s in enumerate(own.states):
                T.buffer_store(states, T.cast(given[s][place], "float32"), [k])
            with T.serial("g", 0, GROUPS) as g:
                values = {key: T.let("value", shared[in_shared(g, n)]) for key, n in places.items()}
                for k, s in enumerate(own.states):
                    T.buffer_store(shared, states[k], [in_shared(g, places[s])])
                through(values, states)
        sync_block()
        T.note("the states behind each chunk")
        for k, s in enumerate(own.states):
            T.buffer_store(states, shared[in_shared(group, places[s])], [k])
        with T.serial("k", 0, each) as k:
            chunk = T.let("chunk", group * each + k)
            with T.when(T.And(there, chunk < chunks - 1)):
                through(loaded(chunk), states)
                for n, s in enumerate(own.states):
                    T.buffer_store(maps, states[n], [slot_at(chunk, level.slot(s), slots, rows, place)])
    return made()


def carry_words(level: Level) -> int:
    return GROUPS * LANES * len(level.places)  # words of a block's shared memory


def carry_blocks(task: Task) -> int:
    return ceil_div(task.workload.batch * task.workload.hidden, LANES)


def compose_kernel(task: Task, cut: ScanKnobs, layout: Layout, number: int) -> PrimFunc:
    level = layout.levels[number]
    read = {"hoisted", "vectors", *(f"{state}_in" for state in level.known)}
    kinds = {name: kind for name, kind in recurrence_kinds(task, cut).items() if name in read}

    def code(thread: UnitThread, part: Expr) -> None:
        Compose(thread, layout, level, Chunk.of(part, thread.kernel.steps, cut.chunks)).run()

    return units_kernel(f"compose{number}", task, cut, kinds | {MAPS: "float32"}, code, cut.chunks - 1)


def replay_kernel(task: Task, cut: ScanKnobs, layout: Layout, kept: Stored = NOTHING) -> PrimFunc:
    """The kernel ``replay``, of an adjoint with ``outputs`` in place of y; ``replay_keeping`` stores what is ``kept``,
    too."""
    def code(thread: UnitThread, part: Expr) -> None:
        Replay(thread, layout, Chunk.of(part, thread.kernel.steps, cut.chunks)).run()

    return units_kernel(keeping("replay", kept), task, cut, recurrence_kinds(task, cut) | {MAPS: "float32"}, code,
                        cut.chunks, kept)
