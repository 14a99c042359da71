"""How state travels where the blocks of a cluster share the weights: each has some of the units, and all rows of a few.

Who computes a state sends it to the shared memory of all blocks of the cluster by st.async, which counts its bytes at
an mbarrier there: two neighbouring units of 16 bits a word. Of the two buffers of a state, that of step t is t % 2, and
each has a barrier. One of its phases has the bytes of one step, and one arrival, by a thread that says how many.

* Nobody reads what is not there: a phase ends with its last byte. A wait for it acquires what these released.
* Nobody overwrites what is still read. State of step t + 2 is sent by a thread whose block has all of step t + 1, also
  what each warp of each block has sent: that was behind its products of step t. Every warp has units (``check``).
* No thread is a phase behind: a barrier of the block lies in each step between what it sends and what it waits for.
  Behind it, all threads have waited for step t, and the arrival for step t + 2 is made; bytes of it may come before.
* No block ends, or begins, while something is on its way to it: all that is sent is waited for, and a barrier of the
  cluster lies between making the barriers and the first state.
"""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa.cluster import cluster_arrive, cluster_send, cluster_wait
from ecornn.schedules.cuda.isa.mbarrier import fence_mbarrier_init, mbarrier_expect, mbarrier_init, mbarrier_wait
from ecornn.schedules.cuda.isa.memory import shared_address
from ecornn.schedules.cuda.isa.tensor_core import pack_pair
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.persistent_block.fma import exchanged
from ecornn.schedules.persistent_block.plan import BlockPlan

SIZES = (1, 2, 3, 4, 6, 8)  # blocks of a cluster; more are not portable


class Sent:
    """Emits both ends."""

    def __init__(self, plan: BlockPlan, words: TirBuffer, steps: Expr, thread: Expr) -> None:
        """``words``: the block's shared memory; ``steps``: T, so that there are states before T + 1 steps."""
        self.plan, self.words, self.steps, self.thread = plan, words, steps, thread

    def begin(self) -> None:
        """The barriers; behind it all blocks have theirs, and what their threads stored before. For all threads."""
        T.note("cluster, prologue: mbarriers, then all CTAs meet")
        with T.If(self.thread == 0), T.Then():
            for slot in range(2):
                mbarrier_init(self._barrier(T.int32(slot)), 1)
            fence_mbarrier_init()
        cluster_arrive()
        cluster_wait()
        with T.If(self.thread == 0), T.Then():
            self._expect(T.int32(0))

    def wait(self, step: Expr) -> None:
        """For the state before a step, behind what this block's threads have sent of it. For all threads."""
        sync_block()
        T.note("consumer: one thread says what comes next; all wait for the state's bytes from the CTAs of the cluster")
        with T.If(T.And(self.thread == 0, step < self.steps)), T.Then():
            self._expect(step + 1)
        mbarrier_wait(self._barrier(step % 2), T.cast(step // 2 % 2, "uint32"), cluster=True)

    def pair(self, values: tuple[Expr, Expr], odd: Expr) -> Expr:
        """A word of two neighbouring units, of which this thread has the second one if it is ``odd``; the neighbour is
        four lanes away. Of two rows the even one makes the word of the first, the odd one that of the second."""
        mine = T.let("mine", T.Select(odd, values[1], values[0]))
        (theirs,) = exchanged([T.let("given", T.Select(odd, values[0], values[1]))], 4)
        return T.let("word", pack_pair(T.Select(odd, theirs, mine), T.Select(odd, mine, theirs), self.plan.dtype))

    def send(self, step: Expr, place: Expr, word: Expr) -> None:
        """To all blocks, as word ``place`` of their memory."""
        to = T.let("to", shared_address(self.words.ptr_to([place])))
        barrier = T.let("barrier", shared_address(self._barrier(step % 2)))
        for rank in range(self.plan.cluster):
            cluster_send(to, barrier, T.uint32(rank), [word])

    def _barrier(self, slot: Expr) -> Expr:
        return self.words.ptr_to([self.plan.barriers_place + slot * 2])

    def _expect(self, step: Expr) -> None:
        count = self.plan.rows * self.plan.head * (4 if self.plan.dtype == "float32" else 2)
        mbarrier_expect(self._barrier(step % 2), count)
