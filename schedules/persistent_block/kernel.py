"""The block kernel: each block takes some batch rows through all of time, and nothing leaves it.

A block holds all recurrent weights in registers and shared memory. In every step its threads multiply the state, which
lies in shared memory, compute the gates of the (unit, row) pairs whose sums they have (``products.py``), and store the
new state for the next step. A barrier lies between, one for each phase of the step.

State has two buffers, if the step has one phase: the state that step t + 1 reads is stored before the barrier at the
end of step t, while others may still read that of step t. What is stored there two steps later comes behind a barrier
that all reach once they have read it. With more phases a barrier is between anyway.

Blocks, or clusters of blocks that share the weights (``Sent``), know nothing of each other: there may be as many
as there are rows, in turns where the chip has no room. Heads, whose units see no others, know nothing of each other
either: of a layer with heads a block has one or some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ecornn.analysis.liveness import before_first
from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T, TirBuffer, Var
from ecornn.schedules.cuda import isa
from ecornn.schedules.cuda.isa.tensor_core import pack_pair, per_word
from ecornn.schedules.cuda.pipeline import ClusterPipeline
from ecornn.schedules.hoisted import Hoisted, Piece
from ecornn.schedules.keeping import Stored, keeping
from ecornn.schedules.persistent_block.plan import BlockPlan
from ecornn.schedules.persistent_block.products import KINDS, Products, TensorProducts
from ecornn.schedules.scalars.gate_threads import Ended, GateThreads, Share
from ecornn.schedules.scalars.pointwise import emit
from ecornn.schedules.sequence_kernel import SequenceKernel

SIZES = (1, 2, 3, 4, 6, 8)  # blocks of a cluster; more are not portable


class Sent:
    """How state travels where the blocks of a cluster share the weights: each has all rows of some units. Who computes
    a state sends it to the shared memory of all blocks of the cluster, as ``ClusterPipeline`` says: two neighbouring
    units of 16 bits a word. The stages are the two buffers of a state; there are T + 1 states.

    * Nobody overwrites what is still read. State of step t + 2 is sent by a thread whose block has all of step t + 1,
      also what each warp of each block has sent, behind its products of step t. Every warp has units (``check``).
    * No thread is a phase behind: a barrier of the block lies in each step between what it sends and what it waits for.
      Behind it, all threads have waited for step t, and step t + 2 is announced; its bytes may come before.
    * Nothing is on its way to a block before it begins: a barrier of the cluster lies between making the barriers and
      the first state."""

    def __init__(self, plan: BlockPlan, words: TirBuffer, steps: Expr, thread: Expr) -> None:
        self.plan, self.steps, self.thread = plan, steps, thread
        size = plan.rows * plan.head * (4 if plan.dtype == "float32" else 2)
        self.state = ClusterPipeline(words, plan.barriers_place, blocks=plan.cluster, size=size)

    def begin(self) -> None:
        """Makes the barriers; behind it all blocks have theirs, and what their threads stored before."""
        T.note("cluster, prologue: mbarriers, then all CTAs meet")
        with T.when(self.thread == 0):
            self.state.init()
            isa.fence_mbarrier_init()
        isa.cluster_arrive()
        isa.cluster_wait()
        with T.when(self.thread == 0):
            self.state.announce(T.int32(0))

    def wait(self, step: Expr) -> None:
        """Waits for the state before a step, behind what this block's threads have sent of it."""
        isa.sync_block()
        T.note("consumer: one thread says what comes next; all wait for the state's bytes from the CTAs of the cluster")
        with T.when(T.And(self.thread == 0, step < self.steps)):
            self.state.announce(step + 1)
        self.state.wait_for(step)

    def pair(self, values: tuple[Expr, Expr], odd: Expr) -> Expr:
        """A word of two neighbouring units, of which this thread has the second one if it is ``odd``; the neighbour is
        four lanes away. Of two rows the even one makes the word of the first, the odd one that of the second."""
        mine = T.let("mine", T.Select(odd, values[1], values[0]))
        theirs = T.let("theirs", isa.shuffle_xor(T.let("given", T.Select(odd, values[0], values[1])), 4))
        return T.let("word", pack_pair(T.Select(odd, theirs, mine), T.Select(odd, mine, theirs), self.plan.dtype))


@dataclass(frozen=True)
class Pairs(Share):
    """So many (unit, batch row) pairs of a thread, wherever they are."""

    items: int = 1


class Gates(GateThreads):
    """The gates, by the threads that multiply: sums to the new state, and inputs that are copied ahead. A thread copies
    its own hoisted inputs some steps ahead, to slots in shared memory of its own: a step is shorter than the way to
    memory."""

    def __init__(self, kernel: SequenceKernel, plan: BlockPlan, products: Products, block: Expr, thread: Expr) -> None:
        """``block``: the number of the block, or cluster, of these rows, among those that have the same heads."""
        self.plan, self.products, self.early = plan, products, kernel.early
        self.sent = Sent(plan, products.words, kernel.steps, thread) if plan.cluster > 1 else None
        self.values: list[Expr] = []  # of items, until all of them are sent
        super().__init__(kernel, Pairs(plan.hidden, plan.rows, plan.threads, items=plan.items), block, 0, thread)
        # whether a sequence starts at the step after ``fresh``'s: loaded, not looked at
        self.marks = T.local("marks", (self.items,), "int32") if kernel.task.traversal.resets else None

    def _locate(self, thread: Expr) -> None:
        """Finds the places of the thread's items; of heads, or a thread's only one, so that nobody looks into them.
        Else each step would work them out again, within branches, which takes less only where there are many."""
        place, heads = self.products.place, self.plan.heads > 1
        bind = isa.pinned if heads or self.plan.items == 1 else T.let
        if heads:
            head = T.let("layer_head", self.products.share_of_heads * self.plan.held + self.products.head)
            self.unit = [isa.pinned("unit", head * self.plan.head + unit) for unit, _, _ in place]
            self.local = [isa.pinned("local", self.products.head_first + unit) for unit, _, _ in place]
        else:
            self.unit = self.local = [bind("unit", unit) for unit, _, _ in place]
        self.owner = [T.let("owner", owner) for _, _, owner in place]
        self.column = [(T.let if heads else bind)("column", T.Select(owner, column, 0))
                       for owner, (_, column, _) in zip(self.owner, place, strict=True)]
        self.row = [bind("row", self.group * self.plan.rows + column) for column in self.column]
        self.valid = [T.let("valid", T.And(owner, T.And(unit < self.plan.hidden, row < self.batch)))
                      for owner, unit, row in zip(self.owner, self.unit, self.row, strict=True)]

    def run(self) -> None:
        plan, words = self.plan, self.plan.weights_place
        T.note("all warps, prologue: recurrent weights to registers and shared memory, states to zero")
        self.products.begin()
        with T.strided("place", words, self.thread, plan.threads) as place:  # beyond the layer's units it stays zero
            T.buffer_store(self.products.words, T.uint32(0), [place])
        if self.early:  # nothing before reads what the projection writes, or writes what it reads
            isa.wait_on_earlier()
        T.note("all threads, prologue: constants and states of their (unit, batch row) pairs, the first inputs")
        self.begin()
        self._mark(T.int32(0))
        for t in range(plan.depth - 1 if self.hoisted.outputs else 0):
            self._copy(T.int32(t))
        self._fetch(T.int32(0))
        self._advance()
        if self.sent is not None:
            self.sent.begin()
        else:
            isa.sync_block()
        for i in range(self.items):
            env = {v: self.states[i, s] for s, v in enumerate(self.graph.states.values())}
            env |= {v: self.constants[i, k] for k, v in enumerate(self.graph.invariant_outputs)}
            env |= self._before(i) if self.late else {}
            self._announce(i, 0, T.int32(0), emit(before_first(self.graph), env, self.math))
        T.note("CTA barrier: the state before step 0 is in shared memory; its products")
        self._fetch(T.int32(1))
        self._meet(T.int32(0))
        self.sums = T.local("sums", (self.items, len(self.graph.phases[0].products)), "float32")  # of the first phase
        self._multiply(T.int32(0))
        with T.serial("t", 0, self.steps) as t:
            self._step(t)
        T.note("no thread leaves before its copies have landed")
        isa.cp_async_wait_all()

    def _step(self, t: Expr) -> None:
        envs = [self._before(i) for i in range(self.items)]
        for p, phase in enumerate(self.graph.phases):
            if p:
                sums = self.products.multiply(p, self._side(t))
            else:
                sums = [{product.var: self.sums[i, n] for n, product in enumerate(phase.products)}
                        for i in range(self.items)]
            last = p + 1 == len(self.graph.phases)
            T.note("epilogue of the products: the cell's scalars; the new state to shared memory at once")
            for i in range(self.items):
                envs[i] = emit(self.urgent.first if last else phase.assigns, envs[i] | sums[i], self.math)
                if not last:
                    self._announce(i, p + 1, t, envs[i])
            ended: list[Ended] = [self._finish(i, envs[i], t) for i in range(self.items)] if last else []
            T.note("barrier: the state before step t + 1 is there")
            self._meet(t + 1)
            if last:
                self._multiply(t + 1, partial(self._after, t, ended))

    def _meet(self, step: Expr) -> None:
        """Waits until what all threads announced is there; of a cluster that is the state before ``step``."""
        if self.sent is not None:
            self.sent.wait(step)
            return
        self.products.stored()
        isa.sync_block()

    def _multiply(self, t: Expr, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Emits the first products of step t, also of the one behind the last, which nobody looks at."""
        T.note("products of the next step; y and inputs two steps ahead while these are under way")
        for i, own in enumerate(self.products.multiply(0, self._side(t), meanwhile)):
            for n, product in enumerate(self.graph.phases[0].products):
                T.buffer_store(self.sums, own[product.var], [i, n])

    def _after(self, t: Expr, ended: list[Ended]) -> None:
        """The rest of a step, which nobody waits for."""
        for i in range(self.items):
            self._store(i, t, ended[i])
        self._advance()
        self._fetch(T.let("after_next", t + 2))

    def _side(self, t: Expr) -> Expr:
        """The number of the operands' buffer that step t reads."""
        return t % 2 if self.plan.buffers > 1 else 0

    def _announce(self, i: int, p: int, step: Expr, env: dict[Var, Expr]) -> None:
        """Stores this thread's operands of phase p; units beyond H stay zero."""
        if self.sent is not None:
            (operand,) = self.graph.product_phases[p].operands
            self.values.append(env[operand])
            if len(self.values) == self.items:
                self._send(self.sent, step)
            return
        owner = self.owner[i]  # of heads threads have whole units
        with T.when(owner if self.plan.heads > 1 else T.And(owner, self.unit[i] < self.plan.hidden)):
            for o, operand in enumerate(self.graph.product_phases[p].operands):
                self.products.store(self.products.first(p, o, self._side(step)), self.local[i], self.column[i],
                                    env[operand])

    def _send(self, sent: Sent, step: Expr) -> None:
        """Sends all items' operands to the cluster's blocks, as words; two items are neighbouring rows of a unit."""
        products, values, self.values = self.products, self.values, []
        assert isinstance(products, TensorProducts)
        first, per = products.first(0, 0, self._side(step)), per_word(self.plan.dtype)
        odd = T.let("odd", products.tile_lane // 4 % 2 != 0)
        for i in range(0, self.items, per):
            unit, column, owner = self.local[i], self.column[i], self.owner[i]
            if per == 1:
                word = T.let("word", T.reinterpret("uint32", values[i]))
            else:
                word, unit = sent.pair((values[i], values[i + 1]), odd), unit // 2 * 2
                column, owner = T.Select(odd, self.column[i + 1], column), T.Select(odd, self.owner[i + 1], owner)
            with T.when(owner):
                sent.state.send(step, first + products.place_of(unit, column) // per, [word])

    def _start_at(self, t: Expr) -> None:
        if self.fresh is None or self.marks is None:
            super()._start_at(t)
            return
        for i in range(self.items):
            starts = self.timeline.starts(t, self._limit(i), self.marks[i])
            T.buffer_store(self.fresh, T.cast(starts, "int32"), [i])
        self._mark(t + 1)

    def _mark(self, t: Expr) -> None:
        for i in range(self.items if self.marks is not None else 0):
            row = T.let("some_row", T.min(self.row[i], self.batch - 1))
            mark = self.timeline.mark(T.min(t, self.steps - 1), row)
            T.buffer_store(self.marks, T.cast(mark, "int32"), [i])

    def _load_inputs(self, t: Expr, into: TirBuffer) -> None:
        """Takes the inputs of step t, and copies later ones to where those of the step before were."""
        if not self.hoisted.outputs:
            return
        self._copy(t + (self.plan.depth - 1))
        isa.cp_async_wait(self.plan.depth - 1)
        slot = t % self.plan.depth
        kind, nothing = ("b32", T.uint32(0)) if self.hoisted.packed else ("f32", T.float32(0))
        for i in range(self.items):
            for k in range(self.hoisted.words()):
                T.buffer_store(into, nothing, [i, k])
            with T.when(T.And(self.valid[i], t < self.steps)):
                for piece in self.hoisted.pieces():
                    isa.ld_shared(piece.of(into, i), self._slot(slot, i, piece), kind)
                    if self.hoisted.packed and piece.apart == 1:  # of two neighbouring units
                        half = T.shift_right(into[i, piece.register], T.cast(self.unit[i] % 2 * 16, "uint32"))
                        T.buffer_store(into, half, [i, piece.register])

    def _copy(self, t: Expr) -> None:
        slot = t % self.plan.depth
        for i in range(self.items):
            with T.when(T.And(self.valid[i], t < self.steps)):
                first = T.let("first", T.cast(self.timeline.at(t) * self.batch + self.row[i], "int64")
                              * self.hoisted.row)
                for piece in self.hoisted.pieces():
                    pair = self.hoisted.packed and piece.apart == 1
                    unit = self.unit[i] // 2 * 2 if pair else self.unit[i] * piece.apart
                    source = self.arguments["hoisted"].ptr_to([first + piece.base + unit])
                    isa.cp_async(self._slot(slot, i, piece), source, 4 * piece.words, l1=True)
        isa.cp_async_commit()

    def _slot(self, slot: Expr, i: int, piece: Piece) -> Expr:
        """A pointer to this thread's piece of item i."""
        plan = self.plan
        place = (slot * plan.items + i) * plan.words + piece.register
        return self.products.shared.ptr_to([plan.inputs_place + place * plan.threads + self.thread * piece.words])


def block_kernel(task: Task, plan: BlockPlan, hoisted: Hoisted, kept: Stored, early: bool) -> PrimFunc:
    """``persistent_block(T, B, [hoisted,] vectors, <state>_in, <state>_out, recurrent_<part>, y)``;
    ``persistent_block_keeping`` stores what is ``kept``, too. ``early``: it loads weights while the projection ends."""
    own = dict.fromkeys((f"recurrent_{i}" for i in range(len(plan.parts))), plan.dtype if plan.mma else "float32")
    with T.kernel(keeping("persistent_block", kept)) as made:
        kernel = SequenceKernel.declare(task, hoisted, plan.knobs.math, own, kept, early)
        weights = [kernel.arguments[name] for name in own]
        T.device_entry()
        block, thread = T.block(plan.blocks * plan.cluster), T.thread(plan.threads)
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.resident})
        group, rank = block, T.int32(0)
        if plan.cluster > 1:
            group, rank = T.let("group", block // plan.cluster), T.let("rank", block % plan.cluster)
        shared = T.shared(plan.shared // 4)  # in order: state, weights, inputs copied ahead, barriers of a cluster
        share: Expr = 0  # of the heads
        if plan.shares > 1:
            share, group = T.let("share", group % plan.shares), T.let("row_group", group // plan.shares)
        with T.when(group * plan.rows < kernel.batch):
            products = KINDS[plan.products](task, plan, shared, weights, thread, rank, share)
            Gates(kernel, plan, products, group, thread).run()
    return made()
