"""How state travels between blocks through L2: words that announce themselves.

An exchanged vector lies in global memory (L2) in the order in which product warps need it as operand B of mma, in a
ring of R slots. The four words of a lane hold neighbouring units (K is permuted as the weights' is), so that a block
writes whole sectors. A word that has not been written holds a bit pattern that no value has (SENTINEL): a reader polls
the words it needs until none holds it. One trip through L2, no barrier between blocks, no copy through shared memory.

Step t reads slot t % R and writes slot (t + 1) % R. In step t, once its block has read all of slot t % R, the owner of
a word wipes it in slot (t - 1) % R, to be written again in step t + R - 2:

* Nobody still needs what is wiped: the block has the words that every other block wrote once it had read slot t - 1.
* Nobody takes old data for new. The reader of a word in step t + R - 1 has, in the same thread, read the same word in
  an earlier step, which its owner wrote after a fence behind the wipe of step t, and has had a fence itself since.
  Wipe, fence, write; read, fence, read: release and acquire patterns of PTX, so the wipe happens before the poll.

A fence waits for all that its thread has under way, a fifth of a step. Owners have one at the end of step t where
``PersistentPlan.released`` says so: in every step, or in one of R - 4. Behind the wipe of step t comes one at the end
of step f <= t + R - 5, behind that the write of step f + 1. Readers have theirs in every step, or where
``PersistentPlan.acquired`` says so: two steps after each of the owners'. So the one of step f + 2 <= t + R - 3 is
behind the read of what step f + 1 wrote, and before the poll of step t + R - 1. With fences in every step f = t, and
R = 4 leaves room for the readers'; three slots would not. A reader's fence also keeps it from polling at once, which
disturbs what it waits for in some layers and loses time in others: hence a knob."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from ecornn.analysis.liveness import late_operands
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, ceil_div
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.isa.tensor_core import PAIR, pack_pair, per_word
from ecornn.schedules.cuda.pipeline import BARRIER_WORDS, ClusterPipeline
from ecornn.schedules.gemm.projection import may_be_followed
from ecornn.schedules.gemm.rows_mma import LEAST_ROWS
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.persistent.plan import PersistentPlan, PhasePlan
from ecornn.schedules.rates import short
from ecornn.schedules.scalars.gate_threads import BLOCKS, THREADS, Head, declare_start, initial_values, start_thread
from ecornn.schedules.sequence_kernel import SequenceKernel

SENTINEL = 0xFFFFFFFF


def pack(values: list[Expr], dtype: str) -> Expr:
    """One or two float32 values as a word that is never the sentinel."""
    if dtype == "float32":
        word, nan = T.let("word", T.reinterpret("uint32", values[0])), 0x7FFFFFFF
    else:
        word, nan = pack_pair(values[0], values[1], dtype), 0x7FFF7FFF
    return T.Select(word == T.uint32(SENTINEL), T.uint32(nan), word)


def word_of(plan: PersistentPlan, phase: PhasePlan, operand: int, unit: Expr, column: Expr) -> Expr:
    """Place in a slot of the word that holds ``unit`` (of the group's) in batch row ``column`` of the group."""
    k = unit // per_word(plan.dtype)
    tile = (operand * plan.warps * phase.warp_pairs + k // PAIR) * plan.tiles + column // 8
    return (tile * 32 + column % 8 * 4 + k // 4 % 4) * 4 + k % 4


def load_pairs(plan: PersistentPlan, phase: int, state: TirBuffer, pairs: range, lane: Expr,
               load: Callable[[list[Expr], Expr], None], source: TirBuffer, start: Expr) -> None:
    """Loads a lane's four words of each pair of its warp, the first of which is at ``start``, to ``state``."""
    warp_pairs = plan.phases[phase].warp_pairs
    for place, q in enumerate(pairs):
        operand, pair = divmod(q, warp_pairs)
        for n in range(plan.tiles):
            with within(plan, n, lane // 4):
                at = ((operand * plan.warps * warp_pairs + pair) * plan.tiles + n) * 128
                load([state[place, n, i] for i in range(4)], source.ptr_to([start + at]))


def within(plan: PersistentPlan, tile: int, column: Expr) -> AbstractContextManager[None]:
    """A context for code that only columns with a batch row need; the padding of a tile has none."""
    return T.when((tile + 1) * 8 <= plan.rows or tile * 8 + column < plan.rows)


class Ring:
    """Emits both ends of the way that state travels through L2; ``phase`` is a number, ``slot`` a place of a slot."""

    def __init__(self, plan: PersistentPlan, rings: list[TirBuffer], group: Expr) -> None:
        self.plan, self.rings, self.group = plan, rings, group

    def slot(self, phase: int, step: Expr) -> Expr:
        """First word of the slot of a step."""
        return (self.group * self.plan.ring + step % self.plan.ring) * self.plan.slot_words(self.plan.phases[phase])

    def wait(self, phase: int, t: Expr) -> None:
        """Before the first :meth:`read` in step t, which waits for each word itself."""

    def read(self, phase: int, state: TirBuffer, start: Expr, pairs: range, lane: Expr) -> None:
        T.note("consumer: poll the slot in L2 until no word is the sentinel")
        missing = T.variable("missing", "int32", T.int32(1))
        with T.While(missing[0] != 0):
            T.buffer_store(missing, T.int32(0), [0])
            load_pairs(self.plan, phase, state, pairs, lane, isa.ld_relaxed, self.rings[phase], start)
            # the sentinel is the largest word: a tree of maxima is short, a chain of comparisons is not
            highest = [state[p, n, i] for p in range(len(pairs)) for n in range(self.plan.tiles) for i in range(4)]
            found = T.tree("highest", highest, T.max) == T.uint32(SENTINEL)
            T.buffer_store(missing, T.cast(found, "int32"), [0])
        isa.sync_warp()

    def done(self, phase: int, t: Expr, warp: Expr, lane: Expr) -> None:
        """Behind a product warp's last read of a slot, and the barrier that hands its sums over."""
        self.acquired(t)

    def write(self, phase: int, step: Expr, slot: Expr, place: Expr, values: list[Expr], mine: Expr) -> None:
        """Sends a word, of one value or of two neighbours, to all blocks of the group, from threads that have it."""
        self._store(phase, slot + place, T.let("word", pack(values, self.plan.dtype)), mine)

    def wipe(self, phase: int, t: Expr, places: list[tuple[Expr, Expr]]) -> None:
        """Takes back what was sent: (place, whether it is this thread's word)."""
        T.note("producer: the words of an earlier step become the sentinel again")
        slot = T.let("slot", self.slot(phase, t + (self.plan.ring - 1)))
        for place, mine in places:
            self._store(phase, slot + place, T.uint32(SENTINEL), mine)

    def _store(self, phase: int, place: Expr, word: Expr, mine: Expr) -> None:
        with T.when(mine):
            isa.st_relaxed(self.rings[phase].ptr_to([place]), [word])

    def ended(self, t: Expr) -> None:
        """Behind a gate warp's last write and wipe of a step."""
        with T.when(self.plan.released(t)):
            isa.fence_gpu()

    def acquired(self, t: Expr) -> None:
        """Behind a warp's reads in a step."""
        with T.when(self.plan.acquired(t)):
            isa.fence_gpu()


def begins_early(task: Task, plan: PersistentPlan) -> bool:
    """Tells whether launches of a call begin while the one ahead of them ends: of short calls, behind a projection that
    reads and writes nothing of what ``start`` does. ``project`` lets ``start`` begin when all of its own blocks have.
    ``start`` lets ``persistent`` begin, writes the exchange, and waits for ``project``: its end is that of both.
    ``persistent`` loads weights, waits for ``start``, and then reads hoisted values and states, and writes. What is
    read or written before a wait was written by an earlier call, which had ended when ``project`` began: that is not
    launched early. Nobody waits for a block that is not there yet: ``project`` and ``start`` wait only for what is
    ahead, and ``persistent``, whose blocks wait for each other, is cooperative."""
    if plan.cluster or plan.sums or plan.ahead < 100:  # what comes first is no load of weights, or no projection
        return False
    return short(task) and may_be_followed(task) and not late_operands(task.graph)  # which start reads


def start_kernel(task: Task, plan: PersistentPlan, layout: Hoisted, early: bool = False) -> PrimFunc:
    """``start(T, B, <state>_in ..., vectors, [hoisted,] exchange_0 ..., ready)``, ahead of the persistent kernel: the
    initial state into the exchange, sentinels elsewhere, and zeros into the counters of the projection beside. Words
    beyond H, which pad the last k-tiles, are zero in every slot, and stay so. ``early``: see :func:`begins_early`."""
    with T.kernel("start") as made:
        kernel = declare_start(task, layout, plan.knobs.math)
        rings = [T.pointer(f"exchange_{i}", "uint32") for i in range(len(plan.phases))]
        ready = T.pointer("ready", "uint32") if plan.workers else None
        T.device_entry()
        first, threads = start_thread(), BLOCKS * THREADS
        T.note("before the recurrence: counters to zero, the first state and sentinels into the rings")
        if early:
            isa.launch_dependents()
        if ready is not None:
            counters = T.let("counters", (kernel.steps * kernel.batch + (LEAST_ROWS - 1)) // LEAST_ROWS)
            turns = T.let("turns", (counters + (threads - 1)) // threads)
            with T.serial("turn", 0, turns) as turn, T.when(turn * threads + first < counters):
                T.buffer_store(ready, T.uint32(0), [turn * threads + first])
        for index, (phase, ring) in enumerate(zip(plan.phases, rings, strict=True)):
            words = plan.slot_words(phase)
            with T.strided("place", plan.groups * plan.ring * words, first, threads) as place:
                within = T.let("within", place % words)
                slot = T.let("slot", place // words % plan.ring)
                group = T.let("group", place // (words * plan.ring))
                at = located(plan, phase, group, within)
                rest = T.let("rest", T.Select(at[0] < phase.units, T.uint32(SENTINEL), T.uint32(0)))
                if index:
                    T.buffer_store(ring, rest, [place])
                    continue
                with T.If(slot == 0):
                    with T.Then():
                        given = initial_values(kernel, at, head_of(plan, group))
                        T.buffer_store(ring, pack(given, plan.dtype), [place])
                    with T.Else():
                        T.buffer_store(ring, rest, [place])
        if early:
            isa.wait_on_earlier()
    return made()


def located(plan: PersistentPlan, phase: PhasePlan, group: Expr, place: Expr) -> tuple[Expr, Expr, Expr]:
    """The first unit, of the group's, the batch row and the operand of a word of a slot."""
    part, lane = place % 4, place // 4 % 32
    tile, pair = place // 128 % plan.tiles, T.let("pair", place // (128 * plan.tiles))
    per_operand = plan.warps * phase.warp_pairs
    unit = T.let("unit", (pair % per_operand * PAIR + lane % 4 * 4 + part) * per_word(plan.dtype))
    rows = group if plan.heads == 1 else group // plan.heads
    return unit, T.let("row", rows * plan.rows + tile * 8 + lane // 4), pair // per_operand


def head_of(plan: PersistentPlan, group: Expr) -> Head | None:
    return Head(T.let("head_first", group % plan.heads * plan.own), plan.own) if plan.heads > 1 else None


LARGEST = 16  # blocks of a cluster; more than 8 are not portable, but those of H100 and B200 have them
AT_ONCE = 4  # words of the initial state that a thread has under way


class Cluster:
    """The same, inside a cluster, which is a group: straight into the shared memory of every block that needs it. Every
    block keeps two slots for an exchanged vector in its own shared memory: the stages of a ``ClusterPipeline``, which
    says what mbarriers count. Whoever computes a word sends it to all blocks of the cluster; product warps wait until
    all have arrived, and read.

    Nobody overwrites what is still needed, nor counts bytes in a phase too early. Words of step t + 2 are sent by a
    block that has all words of step t + 1, among them some of every block. Each is a sum over all of K, so its owner's
    warps had all read slot t % 2 by then, behind the end of its phase. Nothing is taken back, nothing needs a fence."""

    def __init__(self, plan: PersistentPlan, steps: Expr, shared: TirBuffer) -> None:
        self.plan, self.steps, self.words = plan, steps, shared.view("uint32")
        self.first, self.pipelines, place = list[int](), list[ClusterPipeline](), plan.exchange_words
        for slot, size in plan.sent:
            self.first.append(place)
            barriers, place = place + plan.ring * slot, place + plan.ring * (slot + BARRIER_WORDS)
            self.pipelines.append(ClusterPipeline(self.words, barriers, blocks=plan.blocks, size=size))
        self.first_sums, self.sums = self.first[len(plan.phases):], self.pipelines[len(plan.phases):]

    def begin(self, kernel: SequenceKernel, group: Expr, thread: Expr) -> None:
        """Makes the barriers; stores the initial state, zeros where no word comes. For all threads of the cluster."""
        plan = self.plan
        with T.when(thread == 0):
            for one in self.pipelines:
                one.init()
            isa.fence_mbarrier_init()
            for number, one in enumerate(self.pipelines):
                if number:
                    one.announce(0)
                else:  # what the call was given is there at once
                    isa.mbarrier_arrive(one.full_barrier(0))
                with T.when(self.steps > 1):
                    one.announce(1)
        T.note("cluster, prologue: the state that the call was given into the slot of step 0")
        for p, phase in enumerate(plan.phases):
            total, first = plan.slot_words(phase), self.first[p]
            with T.serial("turn", 0, ceil_div(total, plan.threads * AT_ONCE)) as turn:
                places = [T.let("place", (turn * AT_ONCE + i) * plan.threads + thread) for i in range(AT_ONCE)]
                found = [T.uint32(0)] * AT_ONCE
                if p == 0:
                    at, head = [located(plan, phase, group, place) for place in places], head_of(plan, group)
                    found = [self._word(initial_values(kernel, one, head), given=True) for one in at]
                for place, word in zip(places, found, strict=True):
                    with T.when(place < total):
                        T.buffer_store(self.words, word, [first + place])
                        T.buffer_store(self.words, T.uint32(0), [first + total + place])
        isa.cluster_arrive()
        isa.cluster_wait()

    def slot(self, phase: int, step: Expr) -> Expr:
        return self.first[phase] + step % 2 * self.plan.slot_words(self.plan.phases[phase])

    def wait(self, phase: int, t: Expr) -> None:
        T.note("consumer: the mbarrier's phase ends when the state's bytes have come from all CTAs of the cluster")
        self.pipelines[phase].wait_for(t)

    def read(self, phase: int, state: TirBuffer, start: Expr, pairs: range, lane: Expr) -> None:
        load_pairs(self.plan, phase, state, pairs, lane, isa.ld_shared, self.words, start)
        isa.sync_warp()

    def done(self, phase: int, t: Expr, warp: Expr, lane: Expr) -> None:
        T.note("one thread: the slot has been read; its mbarrier expects the state of step t + 2")
        with T.when(T.And(T.And(warp == 0, lane == 0), t + 2 < self.steps)):
            self.pipelines[phase].announce(t)

    def _word(self, values: list[Expr], given: bool = False) -> Expr:
        """The word that travels. Those of what the call was ``given`` may be 0 everywhere, beyond H: TVM prints the
        address of a constant that is reinterpreted."""
        if self.plan.dtype != "float32":
            return T.let("word", pack_pair(values[0], values[1], self.plan.dtype))
        return T.let("word", isa.float_bits(values[0]) if given else T.reinterpret("uint32", values[0]))

    def write(self, phase: int, step: Expr, slot: Expr, place: Expr, values: list[Expr], mine: Expr) -> None:
        word = self._word(values)
        with T.when(T.And(mine, step < self.steps)):
            self.pipelines[phase].send(step, slot + place, [word])

    def wipe(self, phase: int, t: Expr, places: list[tuple[Expr, Expr]]) -> None: ...

    def ended(self, t: Expr) -> None: ...

    def acquired(self, t: Expr) -> None: ...


Carrier: TypeAlias = Ring | Cluster
