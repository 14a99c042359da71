"""Products over all rows as pieces of a program, on tensor cores; above all the input projection hoisted out of time:

    out[t, b, q, j] = projected value q of unit j, from x[t, b, :], the input weights and the biases

Hopper's own kernel (``rows_wgmma.py``) takes a product where it can: 16-bit types and TF32, rows of whole words, all
rows at once; else that of ``rows_mma.py``. A schedule may have all rows done before its own kernel, or only the first
``ahead`` percent: the rest is then for blocks of its own, beside those of the recurrence (``persistent``). A layer's x
is as its caller has it: rows of 650 values of 16 bits come 4 bytes at a time, where others come by 16. A row is copied
to shared memory once for every tile of columns; where that is often, x is copied once before, to rows that are
aligned."""

from __future__ import annotations

from dataclasses import replace

from ecornn.program import WORKSPACE, Buffer, Extent, Launch
from ecornn.schedules.base import Component, Task, joined
from ecornn.schedules.builder import T
from ecornn.schedules.cuda.isa import st_global
from ecornn.schedules.gemm import mma_mainloop, rows_mma, rows_wgmma, wgmma_mainloop
from ecornn.schedules.gemm.job import CHUNK, SLOWER, Columns, Epilogue, HoistedValues, Job, Operand, whole_chunks
from ecornn.schedules.hoisted import Hoisted, hoisted_of
from ecornn.schedules.rates import gpu_rates, short


def no_projection(task: Task) -> str | None:
    """None, or why a GPU cannot compute the task's projection."""
    if not task.device.can.tensor_cores:
        return "needs tensor cores and asynchronous copies of compute capability 8.0"
    need = rows_mma.shape_of(job_of(task)).shared if task.graph.hoisted_products else 0
    if need > task.device.shared:
        return f"the product with x needs {need} bytes of shared memory, but {task.device.shared} are available"
    return None


def job_of(task: Task) -> Job:
    """The projection as a product over all rows; of a cell without products of x one without operands. Of a short call
    these are a group or two, whose tiles leave most of the chip idle unless they are narrow."""
    w, products = task.workload, task.graph.hoisted_products
    x = Operand(Columns("x", task.own_input, w.input), "input_weights", tuple(p.term.source for p in products))
    return Job("project", task.device, w.dtype, w.arithmetic, (x,) if products else (), len(products), w.hidden,
               len(task.graph.vectors), expected=w.seq * w.batch if short(task) else None)


def projection_time(task: Task, ahead: int = 100) -> float:
    """Nanoseconds that one multiprocessor needs for a step's projection, by the kernel that ``ahead`` leads to."""
    w, rates = task.workload, gpu_rates(task.device)
    work = 2.0 * w.batch * w.input * w.hidden * len(task.graph.hoisted_products)
    hopper = ahead == 100 and rows_wgmma.shape_of(job_of(task)) is not None
    return work / (rates.wgmma_gemm if hopper else rates.mma_gemm) * SLOWER.get(w.arithmetic, 1)


def may_be_followed(task: Task) -> bool:
    """Tells whether the launch behind the projection may begin before its end and wait for it: where nothing else of a
    call makes anything before the recurrence, or uses the projection's memory, as what is kept and backward may."""
    graph, traversal = task.graph, task.traversal
    alone = not traversal.backward and traversal.keep is None and not graph.hoisted_statistics
    return alone and task.device.can.early_launches and bool(graph.hoisted_outputs)


def project(task: Task, layout: Hoisted | None = None, ahead: int = 100, followed: bool = False) -> Component:
    """The projection of a task from x, ``vectors`` and ``input_weights`` to workspace ``hoisted``, as ``layout`` says,
    by default in float32; none of a cell without hoisted outputs. Of all rows the first ``ahead`` percent are done;
    the others have a workspace ``ready`` of counters, one for each tile's ``height`` of them. ``followed``: as
    :class:`~ecornn.schedules.gemm.job.Job` has it."""
    w, job = task.workload, job_of(task)
    if not task.graph.hoisted_outputs:
        return Component()
    epilogue = HoistedValues(task, layout or hoisted_of(task))
    if ahead == 100:
        job = replace(job, operands=tuple(replace(o, columns=x_of(task)) for o in job.operands), followed=followed)
        return joined(align(task), over_rows(job, epilogue))
    ready = Component(buffers=(Buffer("ready", WORKSPACE, "uint32", Extent(1, -(-w.batch // rows_mma.LEAST_ROWS))),))
    if ahead == 0:  # workers read the other packing
        return joined(Component(buffers=weights_of(job)), ready)
    return joined(over_rows(job, epilogue, ahead), ready)


ALIGNED = "x_aligned"
THREADS = 256
BLOCKS = 8  # a multiprocessor
# Microseconds: that a stage of 128 rows by 128 bytes takes longer when it comes in words; of another launch and what it
# waits for; and bytes that are copied in one
WORDS, LAUNCH, BYTES = 0.55, 3.0, 2e6
TILE = 256  # columns of a product that read a row together


def x_of(task: Task) -> Columns:
    """The place from which products over all rows read x: the workspace that :func:`align` makes, where that pays."""
    w, own = task.workload, task.own_input
    x = Columns("x", own, w.input)
    return Columns(ALIGNED, own, whole_chunks(own, w.itemsize)) if _pays(task, x) else x


def align(task: Task) -> Component:
    """The workspace of :func:`x_of`, if there is one, from x."""
    x, w, blocks = x_of(task), task.workload, BLOCKS * task.device.cores
    if x.name != ALIGNED:
        return Component()
    # in words, whatever the values are
    width, stride, chunks = x.width * w.itemsize // 4, w.input * w.itemsize // 4, x.stride * w.itemsize // CHUNK
    with T.kernel("align") as kernel:
        steps, batch = T.arg("T", T.int32()), T.arg("B", T.int32())
        given, made = (T.pointer(n, "uint32") for n in ("source", "into"))
        T.device_entry()
        T.note("rows of x to rows that are aligned to 16 bytes, zeros behind their values")
        thread = T.block(blocks) * THREADS + T.thread(THREADS)
        with T.items(T.cast(steps * batch, "int64") * chunks, thread, blocks * THREADS) as item:
            word = T.let("word", T.cast(item % chunks, "int32") * 4)
            place = T.let("place", item // chunks * stride + word)
            values = T.local("values", (4,), "uint32")
            for k in range(4):
                T.buffer_store(values, T.uint32(0), [k])
                with T.when(word + k < width):
                    T.buffer_store(values, given[place + k], [k])
            st_global(made.ptr_to([item * 4]), [values[k] for k in range(4)])
    return Component({"align": kernel()}, (Buffer(ALIGNED, WORKSPACE, w.dtype, Extent(0, w.batch * x.stride)),),
                     (Launch("align", blocks, THREADS, names={"source": "x", "into": ALIGNED}),))


def _pays(task: Task, x: Columns) -> bool:
    w, most = task.workload, CHUNK // task.workload.itemsize
    products = len(task.graph.hoisted_products)
    words = task.device.can.warpgroups and w.arithmetic != "float32" and x.copied(most) < most
    if not (words and products) or x.copied(most) * w.itemsize % 4 or x.width * w.itemsize % 4:
        return False
    rows, bytes_of_row = w.seq * w.batch, x.width * w.itemsize
    tiles = -(-rows // 128) * -(-w.hidden * products // TILE)
    stages = max(1.0, tiles / task.device.cores) * -(-bytes_of_row // 128)
    return WORDS * stages > LAUNCH + 2 * rows * bytes_of_row / BYTES


def over_rows(job: Job, epilogue: Epilogue, ahead: int = 100) -> Component:
    """The kernel, with the packed weights: the first ``ahead`` percent of the rows."""
    hopper = rows_wgmma.shape_of(job) if ahead == 100 else None
    if hopper is not None:
        weights = (o.buffer(rows_wgmma.packing_of(job, hopper, o, epilogue.span), job.dtype) for o in job.operands)
        return Component({job.name: rows_wgmma.wgmma_kernel(job, hopper, epilogue)}, tuple(weights),
                         (Launch(job.name, job.device.cores, wgmma_mainloop.THREADS, hopper.shared),))
    shape = rows_mma.shape_of(job)
    blocks = rows_mma.blocks_of(job, shape)
    return Component({job.name: rows_mma.mma_kernel(job, shape, epilogue, blocks, ahead)}, weights_of(job),
                     (Launch(job.name, blocks, mma_mainloop.THREADS, shape.shared),))


def weights_of(job: Job) -> tuple[Buffer, ...]:
    """The packed weights of ``rows_mma.py``'s kernel."""
    shape = rows_mma.shape_of(job)
    return tuple(o.buffer(rows_mma.packing_of(job, shape, o), job.dtype) for o in job.operands)
