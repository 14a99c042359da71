"""How state travels where the blocks of a cluster share the weights: each has some of the units, and all rows of a few.

Who computes a state sends it to the shared memory of all blocks of the cluster, as ``ClusterPipeline`` says: two
neighbouring units of 16 bits a word. The stages are the two buffers of a state.

* Nobody overwrites what is still read. State of step t + 2 is sent by a thread whose block has all of step t + 1, also
  what each warp of each block has sent: that was behind its products of step t. Every warp has units (``check``).
* No thread is a phase behind: a barrier of the block lies in each step between what it sends and what it waits for.
  Behind it, all threads have waited for step t, and the arrival for step t + 2 is made; bytes of it may come before.
* Nothing is on its way to a block before it begins: a barrier of the cluster lies between making the barriers and the
  first state.
"""

from __future__ import annotations

from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa.cluster import cluster_arrive, cluster_wait
from ecornn.schedules.cuda.isa.mbarrier import fence_mbarrier_init
from ecornn.schedules.cuda.isa.tensor_core import pack_pair
from ecornn.schedules.cuda.isa.threads import sync_block
from ecornn.schedules.cuda.pipeline import ClusterPipeline
from ecornn.schedules.persistent_block.fma import exchanged
from ecornn.schedules.persistent_block.plan import BlockPlan

SIZES = (1, 2, 3, 4, 6, 8)  # blocks of a cluster; more are not portable


class Sent:
    """Emits both ends."""

    def __init__(self, plan: BlockPlan, words: TirBuffer, steps: Expr, thread: Expr) -> None:
        """``words``: the block's shared memory; ``steps``: T, so that there are states before T + 1 steps."""
        self.plan, self.steps, self.thread = plan, steps, thread
        size = plan.rows * plan.head * (4 if plan.dtype == "float32" else 2)
        self.state = ClusterPipeline(words, plan.barriers_place, blocks=plan.cluster, size=size)

    def begin(self) -> None:
        """The barriers; behind it all blocks have theirs, and what their threads stored before. For all threads."""
        T.note("cluster, prologue: mbarriers, then all CTAs meet")
        with T.when(self.thread == 0):
            self.state.init()
            fence_mbarrier_init()
        cluster_arrive()
        cluster_wait()
        with T.when(self.thread == 0):
            self.state.announce(T.int32(0))

    def wait(self, step: Expr) -> None:
        """For the state before a step, behind what this block's threads have sent of it. For all threads."""
        sync_block()
        T.note("consumer: one thread says what comes next; all wait for the state's bytes from the CTAs of the cluster")
        with T.when(T.And(self.thread == 0, step < self.steps)):
            self.state.announce(step + 1)
        self.state.wait_for(step)

    def pair(self, values: tuple[Expr, Expr], odd: Expr) -> Expr:
        """A word of two neighbouring units, of which this thread has the second one if it is ``odd``; the neighbour is
        four lanes away. Of two rows the even one makes the word of the first, the odd one that of the second."""
        mine = T.let("mine", T.Select(odd, values[1], values[0]))
        (theirs,) = exchanged([T.let("given", T.Select(odd, values[0], values[1]))], 4)
        return T.let("word", pack_pair(T.Select(odd, theirs, mine), T.Select(odd, mine, theirs), self.plan.dtype))
