"""How state travels inside a cluster: straight into the shared memory of every block that needs it.

A group is one cluster. Every block keeps two slots for an exchanged vector in its own shared memory, words in the
order of exchange.py: the stages of a ``ClusterPipeline``, which says what mbarriers count. Whoever computes a word
sends it to all blocks of the cluster; product warps wait until all have arrived, and read.

Nobody overwrites what is still needed, nor counts bytes in a phase too early. Words of step t + 2 are sent by a block
that has all words of step t + 1, among them some of every block. Each is a sum over all of K, so its owner's warps had
all read slot t % 2 by then, which is behind the end of its phase.
"""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T, TirBuffer, ceil_div
from ecornn.schedules.cuda.isa.cluster import cluster_arrive, cluster_wait
from ecornn.schedules.cuda.isa.mbarrier import fence_mbarrier_init, mbarrier_arrive
from ecornn.schedules.cuda.isa.memory import ld_shared
from ecornn.schedules.cuda.isa.registers import float_bits
from ecornn.schedules.cuda.isa.tensor_core import pack_pair
from ecornn.schedules.cuda.isa.threads import sync_warp
from ecornn.schedules.cuda.pipeline import BARRIER_WORDS, ClusterPipeline
from ecornn.schedules.persistent.exchange import Carrier, pair_place, within
from ecornn.schedules.persistent.plan import PersistentPlan
from ecornn.schedules.persistent.start import head_of, located
from ecornn.schedules.scalars.initial import initial_values
from ecornn.schedules.sequence_kernel import SequenceKernel

LARGEST = 16  # blocks of a cluster; more than 8 are not portable, but every GPU of compute capability 9.0 has them
AT_ONCE = 4  # words of the initial state that a thread has under way


class Cluster(Carrier):
    """Carries it inside a cluster. Nothing needs to be taken back, and nothing needs a fence."""

    def __init__(self, plan: PersistentPlan, steps: Expr, shared: TirBuffer) -> None:
        self.plan, self.steps, self.words = plan, steps, shared.view("uint32")
        self.first, self.pipelines, place = list[int](), list[ClusterPipeline](), plan.exchange_words
        for slot, size in plan.sent:
            self.first.append(place)
            barriers, place = place + plan.ring * slot, place + plan.ring * (slot + BARRIER_WORDS)
            self.pipelines.append(ClusterPipeline(self.words, barriers, blocks=plan.blocks, size=size))
        self.first_sums, self.sums = self.first[len(plan.phases):], self.pipelines[len(plan.phases):]

    def begin(self, kernel: SequenceKernel, group: Expr, thread: Expr) -> None:
        """Makes the barriers; stores the initial state, and zeros where no word will come. For all threads of the
        cluster."""
        plan = self.plan
        with T.when(thread == 0):
            for one in self.pipelines:
                one.init()
            fence_mbarrier_init()
            for number, one in enumerate(self.pipelines):
                if number == 0:  # what the call was given is there at once
                    mbarrier_arrive(one.full_barrier(0))
                else:
                    one.announce(0)
                with T.when(self.steps > 1):
                    one.announce(1)
        T.note("cluster, prologue: the state that the call was given into the slot of step 0")
        for p, phase in enumerate(plan.phases):
            total, first = plan.slot_words(phase), self.first[p]
            with T.serial("turn", 0, ceil_div(total, plan.threads * AT_ONCE)) as turn:
                places = [T.let("place", (turn * AT_ONCE + i) * plan.threads + thread) for i in range(AT_ONCE)]
                found = [T.uint32(0)] * AT_ONCE
                if p == 0:
                    at = [located(plan, phase, group, place) for place in places]
                    head = head_of(plan, group)
                    found = [self._given(*initial_values(kernel, one, head)) for one in at]
                for place, word in zip(places, found, strict=True):
                    with T.when(place < total):
                        T.buffer_store(self.words, word, [first + place])
                        T.buffer_store(self.words, T.uint32(0), [first + total + place])
        cluster_arrive()
        cluster_wait()

    def slot(self, phase: int, step: Expr) -> Expr:
        return self.first[phase] + step % 2 * self.plan.slot_words(self.plan.phases[phase])

    def wait(self, phase: int, t: Expr) -> None:
        T.note("consumer: the mbarrier's phase ends when the state's bytes have come from all CTAs of the cluster")
        self.pipelines[phase].wait_for(t)

    def read(self, phase: int, state: TirBuffer, start: Expr, pairs: range, lane: Expr) -> None:
        plan = self.plan
        for place, q in enumerate(pairs):
            for n in range(plan.tiles):
                with within(plan, n, lane // 4):
                    at = self.words.ptr_to([start + pair_place(plan, plan.phases[phase], q, n)])
                    ld_shared([state[place, n, i] for i in range(4)], at)
        sync_warp()

    def done(self, phase: int, t: Expr, warp: Expr, lane: Expr) -> None:
        T.note("one thread: the slot has been read; its mbarrier expects the state of step t + 2")
        with T.when(T.And(T.And(warp == 0, lane == 0), t + 2 < self.steps)):
            self.pipelines[phase].announce(t)

    def word(self, value: Expr, neighbour: Expr | None = None) -> Expr:
        return T.let("word", T.reinterpret("uint32", value) if neighbour is None
                     else pack_pair(value, neighbour, self.plan.dtype))

    def _given(self, value: Expr, neighbour: Expr | None = None) -> Expr:
        """The same of values that may turn out to be 0 everywhere, beyond the layer's units: TVM prints the address of
        a constant where that is reinterpreted."""
        return self.word(value, neighbour) if neighbour is not None else T.let("word", float_bits(value))

    def write(self, phase: int, step: Expr, slot: Expr, place: Expr, word: Expr, mine: Expr) -> None:
        with T.when(T.And(mine, step < self.steps)):
            self.pipelines[phase].send(step, slot + place, [word])
