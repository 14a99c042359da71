"""The block kernel: each block takes some batch rows through all of time, and nothing leaves it.

A block holds all recurrent weights in registers and shared memory. In every step its threads multiply the state, which
lies in shared memory, compute the gates of the (unit, row) pairs whose sums they have (``products.py``), and store the
new state for the next step. A barrier lies between, one for each phase of the step.

State has two buffers, if the step has one phase: the state that step t + 1 reads is stored before the barrier at the
end of step t, by threads that have not waited since others may still read that of step t. What is stored two steps
later, where that was, comes behind a barrier that all reach once they have read it. With more phases a barrier lies
between anyway.

Blocks, or clusters of blocks that share the weights (``Sent``), know nothing of each other: there may be as many
as there are rows, in turns where the chip has no room. Heads, whose units see no others, know nothing of each other
either: of a layer with heads a block has one or some of them.
"""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, PrimFunc, T
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.keeping import NOTHING, Stored, keeping
from ecornn.schedules.persistent_block.gates import Gates
from ecornn.schedules.persistent_block.plan import BlockPlan
from ecornn.schedules.persistent_block.products import MultiplyAdds, Products, TensorProducts, WarpgroupProducts
from ecornn.schedules.sequence_kernel import SequenceKernel


def block_kernel(task: Task, plan: BlockPlan, hoisted: Hoisted, math: str, kept: Stored = NOTHING,
                 early: bool = False) -> PrimFunc:
    """``persistent_block(T, B, [hoisted,] vectors, <state>_in, <state>_out, recurrent_<part>, y)``;
    ``persistent_block_keeping`` stores what is ``kept``, too. ``early``: it begins while the projection ends, and loads
    weights until then."""
    own = dict.fromkeys((f"recurrent_{i}" for i in range(len(plan.parts))), plan.dtype if plan.mma else "float32")
    with T.kernel(keeping("persistent_block", kept)) as made:
        kernel = SequenceKernel.declare(task, hoisted, math, own, kept, early)
        weights = [kernel.arguments[name] for name in own]
        T.device_entry()
        block, thread = T.block(plan.blocks * plan.cluster), T.thread(plan.threads)
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": plan.resident})
        group, rank = block, T.int32(0)
        if plan.cluster > 1:
            group, rank = T.let("group", block // plan.cluster), T.let("rank", block % plan.cluster)
        # in order: state, weights, inputs that are copied ahead, barriers of a cluster
        shared = T.shared(plan.shared // 4)
        share: Expr = 0  # of the heads
        if plan.shares > 1:
            share, group = T.let("share", group % plan.shares), T.let("row_group", group // plan.shares)
        with T.when(group * plan.rows < kernel.batch):
            kinds: dict[str, type[Products]] = {"fma": MultiplyAdds, "mma": TensorProducts, "wgmma": WarpgroupProducts}
            products = kinds[plan.products](task, plan, shared, weights, thread, rank, share)
            Gates(kernel, plan, products, group, thread).run()
    return made()
