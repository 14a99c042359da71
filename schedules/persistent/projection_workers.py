"""The input projection beside the recurrence: left-over blocks do it while the steps run.

Workers take tiles of rows in the order of time and count the finished ones in ``ready``, one
counter for each group of rows: store, barrier of the team, fence, add; acquire load, load. Gate
warps wait for the rows that they are about to fetch, two steps ahead of their use, and only when
these rows are of a group that they have not yet seen finished. Workers wait for nobody.
"""

from __future__ import annotations

from ecornn.schedules.base import Task
from ecornn.schedules.builder import Expr, T, TirBuffer
from ecornn.schedules.cuda.isa.memory import fence_gpu, ld_acquire, red_release
from ecornn.schedules.cuda.isa.threads import named_barrier_sync
from ecornn.schedules.gemm.epilogue import HoistedValues
from ecornn.schedules.gemm.mma_mainloop import THREADS
from ecornn.schedules.gemm.projection import job_of
from ecornn.schedules.gemm.rows_mma import Team, rows_ahead
from ecornn.schedules.hoisted import Hoisted
from ecornn.schedules.persistent.plan import PersistentPlan, worker_shape
from ecornn.schedules.sequence_kernel import SequenceKernel

BARRIER = 5  # named barrier of a team of workers; the recurrence has others in its own blocks


class ProjectionWorkers:
    """Emits both sides: the workers' code, and the gate warps' wait."""

    def __init__(self, kernel: SequenceKernel, plan: PersistentPlan) -> None:
        shape = worker_shape(kernel.task, plan)
        assert shape is not None, "check() refuses what has no room for the projection"
        self.task, self.plan, self.shape, self.arguments = kernel.task, plan, shape, kernel.arguments
        self.batch, self.steps, self.hoisted = kernel.batch, kernel.steps, kernel.hoisted
        self.rows = T.let("rows", self.steps * self.batch)
        self.first = T.let("first", rows_ahead(self.rows, plan.ahead))
        self.seen = T.variable("seen", "int32", T.int32(0))  # groups of rows

    @staticmethod
    def declare(task: Task, layout: Hoisted) -> dict[str, TirBuffer]:
        """The arguments that only this part has."""
        return {**job_of(task).declare_inputs(HoistedValues(task, layout)),
                "ready": T.pointer("ready", "uint32")}

    def work(self, worker: Expr, thread: Expr, shared: TirBuffer) -> None:
        """A worker block's whole life; for its first ``THREADS`` threads."""

        def barrier() -> None:
            named_barrier_sync(BARRIER, THREADS)

        def done(group: Expr) -> None:
            fence_gpu()
            red_release(self.arguments["ready"].ptr_to([group]))

        T.note("projection CTAs: tiles of the input's product for later steps; a counter says how many are done")
        epilogue = HoistedValues(self.task, self.hoisted)
        team = Team(job_of(self.task), self.shape, epilogue, self.arguments, shared, thread, barrier)
        team.run(self.first, self.rows, worker, self.plan.workers, done)

    def wait(self, t: Expr) -> None:
        """Waits until all rows of step t are there."""
        T.note("gate warps: wait until projection CTAs have counted all tiles of step t")
        columns = self.shape.columns
        last = T.let("last", T.min(t + 1, self.steps) * self.batch - 1)
        count = T.local("count", (1,), "uint32")  # finished tiles of a group
        with T.While(self.first + self.seen[0] * self.shape.height <= last):
            T.buffer_store(count, T.uint32(0), [0])
            with T.While(count[0] < T.uint32(columns)):
                ld_acquire(count[0], self.arguments["ready"].ptr_to([self.seen[0]]))
            T.buffer_store(self.seen, self.seen[0] + 1, [0])
